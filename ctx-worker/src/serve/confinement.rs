//! What a worker gives up before it has a client, as its daemon tells it on the command line.
//!
//! The daemon knows what this machine can do (`daemon::sandbox`), and says so once; a worker does all of it
//! (`serve/sandbox`), or does not start.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What is to be done; `--confined` has it as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Who the worker becomes. None where its daemon is not root: it then stays who it is.
    pub identity: Option<Identity>,
    /// Only what the driver needs is opened by its path.
    pub landlock: bool,
    /// System calls that nobody here needs fail.
    pub seccomp: bool,
    /// What the administrator lets it read besides.
    pub read: Vec<PathBuf>,
}

/// A user of a worker's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// No other worker's that lives.
    pub uid: u32,
    /// The group of all workers, which lets them use the daemon's endpoint for workers and nothing else.
    pub gid: u32,
    /// The driver's devices' group, where they are not for everybody.
    pub device_group: Option<u32>,
}

impl std::str::FromStr for Confinement {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        serde_json::from_str(text)
    }
}

impl std::fmt::Display for Confinement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| std::fmt::Error)?)
    }
}

/// The version of landlock that this kernel enforces; 0 where it is not there, or not switched on.
pub fn landlock_version() -> i32 {
    const CREATE_RULESET_VERSION: u32 = 1;
    // SAFETY: with this flag the kernel looks at no attributes.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<libc::c_void>(),
            0_usize,
            CREATE_RULESET_VERSION,
        )
    };
    i32::try_from(version).unwrap_or(0).max(0)
}
