//! The CRIU plugin, installed as `rekindle.so`. It asks the daemon what to do at each of CRIU's steps and does nothing
//! else: no GPU, no threads, no children.
//!
//! ```text
//!   criu dump      init · PAUSE_DEVICES(root) · freeze · CHECKPOINT_DEVICES(pid) · pages · DUMP_UNIX_SK · exit    dump
//!   criu restore   init · RESTORE_UNIX_SK (in the target) · RESUME_DEVICES_LATE(pid) · exit                       restore
//! ```
//!
//! CRIU loads every plugin for every dump and restore on a host, ours or not. So `init` never fails a dump, a hook that
//! is asked about something foreign answers -ENOTSUP, and a daemon that is away or odd leaves the plugin inactive: a
//! process of ours then fails to be dumped by CRIU's own rule against sockets that lead outside. Whatever is ours is the
//! other way round: any doubt ends the dump with the processes running, or the restore with none.
//!
//! - [`hooks`]: what CRIU calls; nothing unwinds past it
//! - [`descriptor`]: how CRIU finds the hooks; [`numbers`]: which there are, and how many it may be shown
//! - [`dump`], [`restore`]: what they do, and the [`answer`] that CRIU gets
//! - [`daemon`]: the connection
//! - [`host`]: CRIU's own functions and variables, by what it exports ([`symbols`]); [`log`]: its log
//! - [`alarm`]: keeping CRIU's alarm from a wait
//! - [`tree`]: ending a half-restored process tree

#![deny(clippy::print_stderr, clippy::print_stdout, clippy::dbg_macro, reason = "they panic where nobody reads")]

pub mod alarm;
pub mod answer;
pub mod daemon;
pub mod descriptor;
pub mod dump;
pub mod hooks;
pub mod host;
pub mod log;
pub mod numbers;
pub mod restore;
pub mod symbols;
pub mod tree;

/// What CRIU's inventory calls the plugin.
pub const NAME: &std::ffi::CStr = c"rekindle";
