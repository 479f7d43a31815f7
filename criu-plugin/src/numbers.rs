//! The numbers of CRIU's hooks, and how many of them the running CRIU knows.

use crate::host;

/// The number of hooks in the plugin: the newest is CHECKPOINT_DEVICES, 11.
pub const HOOKS: usize = 12;
/// The number of hooks in CRIU 3.17, the oldest that runs on kernels of today.
const OLDEST_HOOKS: u32 = 10;

/// A socket leads outside the tree.
pub const DUMP_UNIX_SK: usize = 0;
/// CRIU recreates a socket.
pub const RESTORE_UNIX_SK: usize = 1;
/// A descriptor is of a kind that CRIU does not know.
pub const DUMP_EXT_FILE: usize = 2;
/// CRIU recreates such a descriptor.
pub const RESTORE_EXT_FILE: usize = 3;
/// A restored task is complete.
pub const RESUME_DEVICES_LATE: usize = 9;
/// A task is about to be stopped.
pub const PAUSE_DEVICES: usize = 10;
/// A task is stopped.
pub const CHECKPOINT_DEVICES: usize = 11;

/// The number of the plugin's hooks that the running CRIU knows.
pub fn known() -> u32 {
    host::hook_count().unwrap_or(OLDEST_HOOKS).min(HOOKS as u32)
}

/// Whether CRIU calls PAUSE_DEVICES, without which the plugin cannot dump.
pub fn can_dump() -> bool {
    known() as usize > CHECKPOINT_DEVICES
}
