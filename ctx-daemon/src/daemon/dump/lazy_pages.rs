//! Processes that lack pages of their own, which CRIU is still bringing (`rekindle restore --lazy`): CRIU dumps missing pages as if
//! nothing had ever been written there. So a dump waits until all pages are there.

use std::fs;
use std::io::ErrorKind;
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
    // A process that was made while others were looked at has been found when the next look finds the same ones.
    let mut whole = None;
    while lazy_pages::may_be_under_way() {
        let tree = process::tree(root).map_err(DumpError::Tree)?;
        let lacking = tree.iter().copied().find(|pid| lacks_pages(*pid));
        if lacking.is_none() && whole.as_ref() == Some(&tree) {
            break;
        }
        whole = lacking.is_none().then_some(tree);
        let Some(pid) = lacking else { continue };
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

/// Whether a process lacks pages, or cannot be asked. One that has ended lacks nothing.
fn lacks_pages(pid: i32) -> bool {
    match fs::read(format!("/proc/{pid}/smaps")) {
        Ok(text) => lazy_pages::lacks_pages(&String::from_utf8_lossy(&text)),
        Err(error) => error.kind() != ErrorKind::NotFound && error.raw_os_error() != Some(libc::ESRCH),
    }
}
