//! The cgroup of a container, which the kernel can freeze: then its processes do not run, whatever signals they get.
//!
//! A container that was handed over is frozen besides being stopped by a signal: systemd sends SIGCONT to what it is to stop, and so
//! may anybody. podman refuses `podman exec` in a frozen container.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::process::Process;

/// The file that freezes a cgroup, and the one that says whether all in it stand still.
const FREEZE: &str = "cgroup.freeze";
const EVENTS: &str = "cgroup.events";
const PROCESSES: &str = "cgroup.procs";
/// What the kernel says of the processes of a cgroup that has threads.
const NOT_SUPPORTED: i32 = 95;
/// How often to look again at processes that belong to no tree, and in which intervals: they may just end.
const LOOKS: u32 = 5;
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// How long the kernel may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// The pause between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The cgroup of the container with this id, to which this process of it belongs: none if it has none of its own, or the kernel cannot
/// freeze it.
pub(super) fn of(pid: i32, id: &str) -> Option<PathBuf> {
    let own = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let cgroup = cgroup_of(&own, id)?;
    // Elsewhere may be mounts that cannot be written to, or of another machine's root directory.
    mounted(&mounts).map(|it| it.join(&cgroup)).find(|it| it.join(FREEZE).exists())
}

/// Where the cgroups of version 2 are mounted, all that this process can see.
fn mounted(mounts: &str) -> impl Iterator<Item = PathBuf> {
    let lines = mounts.lines().filter(|line| line.contains(" - cgroup2 "));
    lines.filter_map(|line| {
        let mut fields = line.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        (root == "/").then(|| PathBuf::from(point))
    })
}

/// The path of the container's cgroup in what `/proc/PID/cgroup` says: the first one whose name has the id. Engines make others below.
fn cgroup_of(said: &str, id: &str) -> Option<PathBuf> {
    let path = said.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let mut found = PathBuf::new();
    for part in path.split('/') {
        found.push(part);
        if part.contains(id) {
            return Some(found);
        }
    }
    None
}

/// Freezes a cgroup, and waits until all its processes stand still. One that is gone has none.
pub(super) fn freeze(cgroup: &Path) -> io::Result<()> {
    let frozen = || -> io::Result<bool> {
        let events = fs::read_to_string(cgroup.join(EVENTS))?;
        Ok(events.lines().any(|line| line == "frozen 1" || line == "populated 0"))
    };
    let began = Instant::now();
    let done = fs::write(cgroup.join(FREEZE), "1").and_then(|()| {
        while !frozen()? {
            if began.elapsed() > PATIENCE {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    });
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

/// The processes of a cgroup and of those below it that are not of the tree of this one, if there are such for longer than a moment: those
/// that others have sent into the container.
pub(super) fn strangers(cgroup: &Path, root: i32) -> io::Result<Vec<i32>> {
    // One that has ended between two looks is in no tree.
    let look = || -> io::Result<Vec<i32>> {
        let mut all = Vec::new();
        processes(cgroup, &mut all)?;
        let tree = Process::trees_of(&[root])?;
        all.retain(|it| !tree.contains(it));
        Ok(all)
    };
    let mut found = look()?;
    for _ in 0..LOOKS {
        if found.is_empty() {
            break;
        }
        std::thread::sleep(LOOK_INTERVAL);
        let next = look()?;
        found.retain(|it| next.contains(it));
    }
    Ok(found)
}

/// Adds the processes of a cgroup and of those below it.
fn processes(cgroup: &Path, found: &mut Vec<i32>) -> io::Result<()> {
    match fs::read_to_string(cgroup.join(PROCESSES)) {
        Ok(said) => found.extend(said.lines().filter_map(|it| it.parse::<i32>().ok())),
        // It is gone, or has threads of which the one above has the processes.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) if error.raw_os_error() == Some(NOT_SUPPORTED) => {}
        Err(error) => return Err(error),
    }
    for entry in fs::read_dir(cgroup)?.flatten() {
        if entry.file_type().is_ok_and(|it| it.is_dir()) {
            processes(&entry.path(), found)?;
        }
    }
    Ok(())
}

/// Lets a cgroup's processes run that are not stopped otherwise. One that is gone has none.
pub(super) fn thaw(cgroup: &Path) -> io::Result<()> {
    match fs::write(cgroup.join(FREEZE), "0") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_a_container_is_the_first_with_its_id() {
        let of = |said: &str| cgroup_of(said, "4f2a").map(|it| it.display().to_string());
        assert_eq!(of("0::/libpod_parent/libpod-4f2a\n").as_deref(), Some("libpod_parent/libpod-4f2a"));
        let scope = "5:memory:/\n0::/machine.slice/libpod-4f2a.scope/container/init.scope\n";
        assert_eq!(of(scope).as_deref(), Some("machine.slice/libpod-4f2a.scope"));
        for shared in ["0::/user.slice/session-1.scope\n", "0::/\n", "4:freezer:/libpod-4f2a\n", ""] {
            assert_eq!(of(shared), None, "{shared}");
        }
    }

    #[test]
    fn cgroups_of_version_2_are_found_among_mounts() {
        let mounts = "25 30 0:23 / /sys rw shared:7 - sysfs sysfs rw\n\
                      27 25 0:26 /.. /host/sys/fs/cgroup rw shared:8 - cgroup2 cgroup2 rw\n\
                      28 25 0:26 / /sys/fs/cgroup ro,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(mounted(mounts).collect::<Vec<_>>(), [Path::new("/sys/fs/cgroup")]);
        assert_eq!(mounted("25 30 0:23 / /sys rw - sysfs sysfs rw\n").count(), 0);
    }

    #[test]
    fn what_others_have_sent_into_a_cgroup_is_no_part_of_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (own, pid) = (std::process::id() as i32, child.id() as i32);
        fs::write(dir.path().join(PROCESSES), format!("{own}\n")).unwrap();
        fs::create_dir(dir.path().join("below")).unwrap();
        fs::write(dir.path().join("below").join(PROCESSES), format!("{pid}\n")).unwrap();
        let found = [own, pid].map(|root| strangers(dir.path(), root).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found, [vec![], vec![own]]);
        assert_eq!(strangers(&dir.path().join("gone"), own).unwrap(), [0; 0]);
    }

    #[test]
    fn a_cgroup_that_is_gone_needs_no_freezing() {
        let dir = tempfile::tempdir().unwrap();
        freeze(&dir.path().join("gone")).unwrap();
        fs::write(dir.path().join(EVENTS), "populated 1\nfrozen 1\n").unwrap();
        freeze(dir.path()).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(FREEZE)).unwrap(), "1");
        thaw(&dir.path().join("gone")).unwrap();
        thaw(dir.path()).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join(FREEZE)).unwrap(), "0");
    }
}
