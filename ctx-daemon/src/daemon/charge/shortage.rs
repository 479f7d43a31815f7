//! A pod or slice that has no memory left: the kernel ends one of the processes in it.

use std::fs;
use std::io;
use std::path::Path;

use super::super::process::Process;

/// Gives a worker its client's weight in the kernel's choice of a process to end. A worker inherits the daemon's, which protects the
/// daemon from programs of the host. Beside a container it would have the kernel end small programs for the memory of a large worker.
pub(super) fn weigh_as(client: Process, worker: Process) -> io::Result<()> {
    let of = |process: Process| format!("/proc/{}/oom_score_adj", process.pid);
    fs::write(of(worker), fs::read(of(client))?)
}

/// How many processes of a cgroup the kernel has ended because memory was short.
pub(super) fn ended(folder: &Path) -> u64 {
    ended_by(&fs::read_to_string(folder.join("memory.events")).unwrap_or_default())
}

fn ended_by(events: &str) -> u64 {
    let count = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|it| it.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_kernel_counts_whom_it_ends() {
        assert_eq!(ended_by("low 0\nhigh 0\nmax 41\noom 1\noom_kill 3\noom_group_kill 0\n"), 3);
        assert_eq!(ended_by("oom 1\n"), 0);
        assert_eq!(ended(Path::new("/proc/absent")), 0);
    }

    #[test]
    fn a_worker_weighs_what_its_client_weighs() {
        let mut children = [0, 1].map(|_| Command::new("sleep").arg("600").spawn().unwrap());
        let [client, worker] = [0, 1].map(|it| Process::with_pid(children[it].id() as i32).unwrap());
        let path = |it: Process| format!("/proc/{}/oom_score_adj", it.pid);
        // More than any process has by itself, so that no privileges are needed.
        fs::write(path(client), "1000").unwrap();
        weigh_as(client, worker).unwrap();
        let weight = fs::read_to_string(path(worker)).unwrap();
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!(weight, "1000\n");
        assert!(weigh_as(client, worker).is_err());
    }
}
