//! The privileges that a worker drops before it has a client, as its daemon tells it on the command line.
//!
//! The daemon determines once which measures this machine supports (`daemon::sandbox`). A worker applies all of them
//! (`serve/sandbox`), or does not start.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The measures to apply; `--confined` contains them as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// The user that the worker becomes. `None` if its daemon is not root: then the user stays the same.
    pub identity: Option<Identity>,
    /// Whether the worker may open only the paths that the driver needs.
    pub landlock: bool,
    /// Whether system calls that neither worker nor driver needs fail.
    pub seccomp: bool,
    /// Further paths that the administrator lets the worker read.
    pub read: Vec<PathBuf>,
}

/// A user for this worker alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// No other living worker has this user.
    pub uid: u32,
    /// The group of all workers, which lets them use the daemon's endpoint for workers and nothing else.
    pub gid: u32,
    /// The group of the driver's devices, unless everybody may use them.
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

/// The version of landlock that this kernel enforces; 0 if landlock is missing or not enabled.
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
