//! The CRIU plugin, installed as `rekindle.so`. The plugin asks the daemon what to do at each of CRIU's steps and does nothing
//! else, but for letting threads of stopped processes run: no GPU, no threads, no children.
//!
//! ```text
//!   criu dump      init · PAUSE_DEVICES(root) · freeze · CHECKPOINT_DEVICES(pid) · pages · DUMP_UNIX_SK · exit    dump
//!   criu restore   init · RESTORE_UNIX_SK (in the target) · RESUME_DEVICES_LATE(pid) · exit                       restore
//! ```
//!
//! CRIU loads every plugin for every dump and restore on a host, also those without GPU processes. So `init` never fails a
//! dump, a hook that is called for a foreign process or socket returns -ENOTSUP, and without a daemon that answers the plugin
//! is inactive: CRIU itself then fails to dump a client, because of its rule against sockets that lead outside. For a client
//! the opposite holds: any error ends the dump with the processes running, or the restore without any process.
//!
//! - [`hooks`]: the functions that CRIU calls; nothing unwinds past them
//! - [`descriptor`]: how CRIU finds the hooks; [`numbers`]: their numbers, and how many CRIU may see
//! - [`dump`], [`restore`]: the work, and the [`answer`] that CRIU gets
//! - [`natives`], [`thread`]: processes that the driver checkpoints, and the thread of theirs that it needs
//! - [`daemon`]: the connection; [`socket`]: the application's sockets
//! - [`host`]: CRIU's own functions and variables, which it exports as [`symbols`]; [`log`]: its log
//! - [`managed`]: the descriptors of processes with managed memory
//! - [`competition`]: another plugin that takes GPU processes
//! - [`guard`]: what keeps processes from running without pages that CRIU brings later
//! - [`alarm`]: CRIU's alarm, suspended during a wait
//! - [`tree`]: ending a half-restored process tree

#![deny(clippy::print_stderr, clippy::print_stdout, clippy::dbg_macro, reason = "they panic when stderr is closed")]

pub mod alarm;
pub mod answer;
pub mod competition;
pub mod daemon;
pub mod descriptor;
pub mod dump;
pub mod guard;
pub mod hooks;
pub mod host;
pub mod log;
pub mod managed;
pub mod natives;
pub mod numbers;
pub mod restore;
pub mod socket;
pub mod symbols;
pub mod thread;
pub mod tree;

/// The plugin's name in CRIU's inventory.
pub const NAME: &std::ffi::CStr = c"rekindle";
/// Its other name, for images with native processes: a plugin that knows nothing of these leaves the name there, and CRIU refuses to
/// restore them without their GPU memory.
pub const NAME_OF_NATIVES: &std::ffi::CStr = c"rekindle-native";
