//! Restores whose processes' own pages are brought when they are touched (`rekindle restore --lazy`).
//!
//! While CRIU's `lazy-pages` has pages that a process lacks, its memory is not whole, and only VmFlags of `/proc/PID/smaps` tell:
//! a dump by CRIU takes such pages for zeros. So each guard of a `lazy-pages` has a folder in [`FOLDER`] from before CRIU begins
//! until all pages are there, and the daemon looks at a tree's memory before its dump when there is such a folder.

use std::path::Path;

use crate::layout::MANAGED_NAME;

/// The folder, which only root can change. Its entries are named by their guards' pids.
pub const FOLDER: &str = "/run/rekindle-lazy";

/// The variable that names the guard's folder to CRIU's plugin.
pub const VARIABLE: &str = "REKINDLE_LAZY_PAGES";
/// The guard's socket, in its folder. The plugin writes a line with the root of the restored tree before the processes run; they may
/// run when the answer is the line [`GUARDED`]. Any other answer says why not.
pub const SOCKET: &str = "guard.sock";
/// The answer of a guard that knows the processes.
pub const GUARDED: &str = "guarded";

/// Whether any process on this machine may lack pages. What cannot be looked at may have an entry.
pub fn may_be_under_way() -> bool {
    any_in(Path::new(FOLDER))
}

fn any_in(folder: &Path) -> bool {
    match std::fs::read_dir(folder) {
        Ok(mut entries) => entries.next().is_some(),
        Err(error) => error.kind() != std::io::ErrorKind::NotFound,
    }
}

/// Whether a process lacks pages by the text of its `/proc/PID/smaps`: the flag `um` says that a userfaultfd is told of missing
/// pages (proc(5)). Managed memory has that flag, too, and is the worker's affair.
pub fn lacks_pages(smaps: &str) -> bool {
    let managed = format!("/memfd:{MANAGED_NAME}");
    let mut is_managed = false;
    smaps.lines().any(|line| match line.strip_prefix("VmFlags:") {
        Some(flags) => !is_managed && flags.split_ascii_whitespace().any(|flag| flag == "um"),
        None => {
            // Lines of figures begin with a name and a colon, and that of a mapping with an address.
            let is_mapping = line.split_ascii_whitespace().next().is_some_and(|it| !it.ends_with(':'));
            is_managed = if is_mapping { line.contains(&managed) } else { is_managed };
            false
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_tell_and_nothing_else_does() {
        let smaps =
            |flags: &str| format!("7f00-7f01 rw-p 00000000 00:00 0 um\nRss: 4 kB\nVmFlags: rd wr {flags}\n7f02-7f03\n");
        let managed = smaps("um").replace("00:00 0 um", "00:01 9 /memfd:rekindle-managed-3 (deleted)");
        assert!(!lacks_pages(&managed) && lacks_pages(&(managed + &smaps("um"))));
        assert!(lacks_pages(&smaps("mr um ac")) && lacks_pages(&smaps("um")));
        assert!(!lacks_pages(&smaps("mr mw ac")) && !lacks_pages(&smaps("umx")) && !lacks_pages(""));
    }

    #[test]
    fn an_entry_says_that_a_process_may_lack_pages() {
        let folder = std::env::temp_dir().join(format!("rekindle-lazy-test-{}", std::process::id()));
        assert!(!any_in(&folder));
        std::fs::create_dir_all(folder.join("1")).unwrap();
        let any = any_in(&folder);
        std::fs::remove_dir(folder.join("1")).unwrap();
        let none = !any_in(&folder);
        std::fs::remove_dir(&folder).unwrap();
        assert!(any && none);
    }
}
