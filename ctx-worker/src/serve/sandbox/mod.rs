//! A worker parses code images and commands that an application has made, and holds the GPU: it gives up what it does
//! not need before there is a client.
//!
//! ```text
//!   driver's library loaded ─► [enter: identity, files] ─► contexts made ─► [close: calls] ─► Ready ─► a client
//! ```
//!
//! A part that cannot be done ends the worker: its daemon has asked for what this machine can do, and no more.

mod calls;
mod error;
mod files;
mod identity;
#[cfg(test)]
mod tests;

use std::path::Path;

pub(crate) use self::error::SandboxError;
use crate::serve::confinement::Confinement;

/// Before the driver is initialised, while there is one thread: attributes of threads are not those of a process.
/// `driver` is where its library was found.
pub(super) fn enter(confinement: &Confinement, driver: &Path) -> Result<(), SandboxError> {
    identity::assume(confinement.identity.as_ref())?;
    match confinement.landlock {
        true => files::restrict(driver, &confinement.read),
        false => Ok(()),
    }
}

/// When contexts are made: the driver's start needs more than what follows.
pub(super) fn close(confinement: &Confinement) -> Result<(), SandboxError> {
    if !confinement.seccomp {
        return Ok(());
    }
    calls::deny()
}
