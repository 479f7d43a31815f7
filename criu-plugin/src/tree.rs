//! Ending a process tree.

use std::collections::BTreeSet;
use std::fs;

/// Kills the processes and all their descendants. All of them are stopped, so that the tree does not change meanwhile.
pub fn kill(pids: &[i32]) {
    let mut found = BTreeSet::new();
    for &pid in pids {
        collect(pid, &mut found);
    }
    for pid in found {
        // SAFETY: kill has no precondition. The pids are of processes that CRIU has made and holds stopped.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
}

fn collect(pid: i32, found: &mut BTreeSet<i32>) {
    // 0 and below are groups of processes to kill(2), and 1 is the init of CRIU's own namespace.
    if pid <= 1 || !found.insert(pid) {
        return;
    }
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return;
    };
    for thread in threads.flatten() {
        let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        for child in children.split_whitespace().flat_map(str::parse) {
            collect(child, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn descendants_are_found_and_impossible_pids_left_alone() {
        let mut shell = Command::new("sh").args(["-c", "sleep 60 & wait"]).spawn().unwrap();
        let pid = shell.id() as i32;
        let mut found = BTreeSet::new();
        while found.len() < 2 {
            found.clear();
            collect(pid, &mut found);
        }
        assert!(found.contains(&pid));
        kill(&[pid, 0, -1]);
        assert!(!shell.wait().unwrap().success());
        found.clear();
        collect(1, &mut found);
        collect(0, &mut found);
        assert!(found.is_empty());
    }
}
