//! Inspects processes and ends them.
//!
//! The process of the tests is a subreaper: a process that CRIU has restored becomes its child. Its exit status is thus
//! known, and its id is free again after a wait.

use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::Once;
use std::time::Duration;

use crate::Result;
use crate::wait::{until, until_true};

/// Makes orphans below this process its children.
pub fn adopt_orphans() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: changes an attribute of this process; no pointers.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
    });
}

/// Sends a signal. A process that is already gone is no error.
pub fn signal(pid: i32, signal: i32) -> Result {
    // SAFETY: no pointers.
    if unsafe { libc::kill(pid, signal) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error.into()) }
}

/// Reaps a child and returns its exit status; `None` if the child has not ended.
pub fn reap(pid: i32) -> Option<ExitStatus> {
    let mut status = 0;
    // SAFETY: the status is a live local.
    let reaped = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    (reaped == pid).then(|| ExitStatus::from_raw(status))
}

/// Whether a process no longer exists. Reaps it if it is a child that has ended.
pub fn is_gone(pid: i32) -> bool {
    reap(pid);
    !Path::new(&format!("/proc/{pid}")).exists()
}

/// Waits until a process is gone.
pub fn wait_gone(what: &str, pid: i32) -> Result {
    until_true(&format!("{what} (process {pid}) ends"), || Ok(is_gone(pid)))
}

/// Kills processes and waits until they are gone.
pub fn kill_all(pids: &[i32]) -> Result {
    for pid in pids {
        signal(*pid, libc::SIGKILL)?;
    }
    pids.iter().try_for_each(|pid| wait_gone("a killed process", *pid))
}

/// Waits until a process group is empty. A process that was created after the caller listed the group, and killed with
/// the others, keeps the group's id in use until it is reaped.
pub fn wait_group_gone(group: i32) -> Result {
    until_true(&format!("process group {group} ends"), || {
        // SAFETY: no pointers.
        while unsafe { libc::waitpid(-group, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
        // SAFETY: no pointers; signal 0 only asks.
        Ok(unsafe { libc::kill(-group, 0) } != 0)
    })
}

/// A process and all its descendants, itself first.
pub fn tree(root: i32) -> Vec<i32> {
    let mut pids = vec![root];
    let mut next = 0;
    while let Some(pid) = pids.get(next).copied() {
        next += 1;
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for thread in threads.flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            pids.extend(children.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
        }
    }
    pids
}

/// The process with which a daemon calls the driver's checkpoint.
pub fn driver_helper(daemon: i32) -> Option<i32> {
    let is_helper = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).nth(1) == Some(b"native")
    };
    tree(daemon).into_iter().skip(1).find(is_helper)
}

/// The processes with this entry, `NAME=VALUE`, in the environment that they started with. Zombies have no environment.
pub fn with_environment(entry: &str) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
    let has_entry = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|it| it == entry.as_bytes())
    };
    pids.filter(has_entry).collect()
}

/// A process's id and command line, for messages.
pub fn command_line(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    format!("{pid}: {}", String::from_utf8_lossy(&bytes).replace('\0', " "))
}

/// The targets of a process's descriptors, without the numbers that distinguish targets of one kind.
pub fn descriptors(pid: i32) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // The descriptor may have been closed since the directory was read.
        let Ok(target) = fs::read_link(entry?.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        let kind = target.split(":[").next().unwrap_or_default();
        all.push(kind.to_owned());
    }
    all.sort();
    Ok(all)
}

/// Like [`descriptors`], once the list has not changed for a while: a recently used descriptor may be about to be
/// closed.
pub fn settled_descriptors(pid: i32) -> Result<Vec<String>> {
    let mut last = (descriptors(pid)?, 0);
    until("its descriptors stay what they are", || {
        std::thread::sleep(Duration::from_millis(20));
        let now = descriptors(pid)?;
        last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
        Ok((last.1 == 3).then(|| last.0.clone()))
    })
}

/// Whether the process's first thread waits in `poll`.
pub fn is_polling(pid: i32) -> Result<bool> {
    let call = fs::read_to_string(format!("/proc/{pid}/syscall"))?;
    Ok(call.split(' ').next() == Some(&libc::SYS_poll.to_string()))
}
