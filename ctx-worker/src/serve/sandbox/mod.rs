//! A worker parses code images and commands from an application, and holds the GPU. So it drops unneeded privileges before
//! there is a client.
//!
//! ```text
//!   driver's library loaded ─► [enter: identity, files] ─► contexts made ─► [close: calls] ─► Ready ─► a client
//! ```
//!
//! A measure that fails ends the worker: its daemon asks only for measures that this machine supports.

mod calls;
mod error;
mod files;
mod identity;
#[cfg(test)]
mod tests;

use std::path::Path;

pub(crate) use self::error::SandboxError;
use crate::serve::confinement::Confinement;

/// The first step, before the driver is initialised, while there is one thread: attributes of threads are not those of a
/// process. `driver` is the path of its library.
pub(super) fn enter(confinement: &Confinement, driver: &Path) -> Result<(), SandboxError> {
    identity::assume(confinement.identity.as_ref())?;
    match confinement.landlock {
        true => files::restrict(driver, &confinement.read),
        false => Ok(()),
    }
}

/// The second step, after contexts are made: the driver's start needs more calls than the rest of its life.
pub(super) fn close(confinement: &Confinement) -> Result<(), SandboxError> {
    if !confinement.seccomp {
        return Ok(());
    }
    calls::deny()
}
