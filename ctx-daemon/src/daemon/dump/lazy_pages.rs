//! Processes that lack pages of their own, which CRIU is still bringing (`rekindle restore --lazy`): CRIU dumps missing pages as if
//! nothing had ever been written there. So a dump waits until all pages are there.

use std::fs;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rekindle_wire::lazy_pages;
use tracing::info;

use super::super::{process, sys};
use super::error::DumpError;
use crate::limit::Limit;

/// The pause between two looks, each of which reads the tables of a tree's whole memory.
const PAUSE: Duration = Duration::from_millis(50);

/// Waits until no process below `root` lacks pages, which takes as long as reading them; at most until the limit, and while
/// the plugin waits. No process is stopped meanwhile.
pub(super) fn wait(root: i32, stream: &UnixStream, limit: Limit) -> Result<(), DumpError> {
    let deadline = limit.begins();
    let mut told = false;
    while lazy_pages::may_be_under_way() {
        let tree = process::tree(root).map_err(DumpError::Tree)?;
        let Some(pid) = tree.into_iter().find(|pid| lacks_pages(*pid)) else { break };
        if !told {
            info!(root, pid, "the dump waits until CRIU has brought all pages of the process");
            told = true;
        }
        if sys::is_hung_up(stream) {
            return Err(DumpError::Closed);
        }
        if deadline.is_over() {
            return Err(DumpError::LacksPages { pid, limit });
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

/// A process that has ended lacks nothing.
fn lacks_pages(pid: i32) -> bool {
    fs::read(format!("/proc/{pid}/smaps")).is_ok_and(|it| lazy_pages::lacks_pages(&String::from_utf8_lossy(&it)))
}
