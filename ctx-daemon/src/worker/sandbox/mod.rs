//! A worker parses code images and commands that an application has made, and holds the GPU: it gives up what it does
//! not need before there is a client.
//!
//! ```text
//!   driver's library loaded ─► [enter: identity] ─► contexts made ─► Ready ─► a client
//! ```
//!
//! A part that cannot be done ends the worker: its daemon has asked for what this machine can do, and no more.

mod identity;

use crate::confinement::Confinement;

/// Before the driver is initialised, while there is one thread: attributes of threads are not those of a process.
pub(super) fn enter(confinement: &Confinement) -> Result<(), String> {
    identity::assume(confinement.identity.as_ref()).map_err(|failed| failed.to_string())
}

/// A step that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("the sandbox cannot be entered: {step}: {source}; see [sandbox] in the configuration")]
struct Failed {
    step: &'static str,
    source: std::io::Error,
}

/// The result of a system call.
fn check(step: &'static str, result: libc::c_int) -> Result<(), Failed> {
    if result < 0 { Err(Failed { step, source: std::io::Error::last_os_error() }) } else { Ok(()) }
}
