//! `rekindle lazy-pages`: the guard of CRIU's server of pages, which `rekindle restore --lazy` starts, and `rekindle migrate --lazy` on the
//! other host.
//!
//! ```text
//!   rekindle restore ── starts ──► guard ── starts and traces ──► criu lazy-pages ◄── userfaultfds ──┐
//!         │                          ▲ the tree's root, before the processes run                  │
//!         └── starts ──► criu restore ── plugin                                            the processes
//! ```
//!
//! A page that a process lacks is zero as soon as nobody has the process's userfaultfd any more: a server that is killed, or fails,
//! would leave wrong bytes in running processes, and nobody would notice. So the guard traces the server. The kernel stops it at
//! its end before it closes its files, whatever ends it. If pages are missing then, the guard takes the userfaultfds over, so that
//! processes wait for pages and do not read zeros; kills the processes; and closes the descriptors when no process needs them.
//!
//! The processes do not run before the guard knows them: the restore fails where the plugin cannot tell it. If only the guard is
//! killed, the server goes on without one.

mod guard;
mod held;
pub(crate) mod moved;
mod processes;
mod restorer;
mod server;

pub(crate) use self::guard::{Options, serve};
pub(crate) use self::processes::Processes;
pub(crate) use self::restorer::LazyPages;

/// CRIU's log of the server, and the guard's words, in the image's directory.
pub(crate) const LOG: &str = "lazy-pages.log";
/// What the guard says when CRIU can begin, before the path of its folder.
pub(crate) const READY: &str = "ready ";
/// What the guard says when all pages are there.
pub(crate) const DONE: &str = "done";
/// What the guard says, before the reason, when it has killed the processes.
pub(crate) const KILLED: &str = "killed: ";
