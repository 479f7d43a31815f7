//! Processes as `/proc` shows them.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tracing::debug;

use super::sys;

/// A process, told apart from a later one with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Process {
    /// The pid as the daemon sees it.
    pub(crate) pid: i32,
    /// The start time, in clock ticks since the machine started.
    pub(crate) start: u64,
}

impl Process {
    /// The process that has this pid now.
    pub(crate) fn with_pid(pid: i32) -> io::Result<Self> {
        let start = stat(pid)?.start;
        Ok(Self { pid, start })
    }

    /// Whether a thread of the process has not ended. The first thread may be a zombie while others still have files and memory.
    pub(crate) fn is_alive(&self) -> bool {
        stat(self.pid).is_ok_and(|it| it.start == self.start && !it.is_dead())
    }

    /// Whether the process is about to end, or does: a process with much memory takes a while for it.
    pub(crate) fn is_ending(&self) -> bool {
        const KILL: u64 = 1 << (libc::SIGKILL - 1);
        self.pending() & KILL != 0 || stat(self.pid).is_ok_and(|it| it.start == self.start && it.exiting)
    }

    /// The signals that are pending for its first thread, or for all of them.
    fn pending(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        signals(&status, &["SigPnd:", "ShdPnd:"])
    }

    /// Whether the number is a process's, and not that of another thread.
    pub(crate) fn is_leader(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
        line.and_then(|it| it.trim().parse().ok()) == Some(self.pid)
    }

    /// Sends SIGKILL, unless the process is gone.
    pub(crate) fn kill(&self) {
        self.send(Signal::KILL);
    }

    /// Whether a process traces it, as CRIU does.
    pub(crate) fn is_traced(&self) -> bool {
        self.is_alive() && tracer(self.pid).is_some()
    }

    /// Sends SIGSTOP, unless the process is gone. A process that is traced stops when its tracer lets go of it.
    pub(crate) fn stop(&self) {
        self.send(Signal::STOP);
    }

    /// Whether a signal has stopped it, as a shell does with a job. Not known of a process that is traced.
    pub(crate) fn is_stopped_by_signal(&self) -> bool {
        stat(self.pid).is_ok_and(|it| it.start == self.start && it.stopped_by_signal)
    }

    /// Whether a signal that stops it is pending: it is traced, and will stop when its tracer lets go of it.
    pub(crate) fn will_stop(&self) -> bool {
        stops(&std::fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default())
    }

    /// How often its threads have left a processor, if a signal has stopped all of them and nobody traces any. One that stays so keeps this
    /// number; one that has run since has a greater one. None if a thread is not stopped so, or the process is gone.
    pub(crate) fn standstill(&self) -> Option<u64> {
        let mut sum = 0_u64;
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.pid)).ok()? {
            let thread = thread.ok()?.path();
            // A thread is in the state before it leaves its processor, where it may be held up for long. To tell its system call the kernel
            // waits until it has left (`task_current_syscall` in lib/syscall.c), or says that it runs.
            if std::fs::read_to_string(thread.join("syscall")).is_ok_and(|it| it.starts_with("running")) {
                return None;
            }
            let status = std::fs::read_to_string(thread.join("status")).ok()?;
            let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            match field("State:")?.chars().next()? {
                // It has ended, and others have not.
                'Z' | 'X' => continue,
                'T' if field("TracerPid:")? == "0" => {}
                _ => return None,
            }
            for name in ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"] {
                sum = sum.checked_add(field(name)?.parse().ok()?)?;
            }
        }
        self.is_alive().then_some(sum)
    }

    /// Sends SIGCONT, which undoes SIGSTOP.
    pub(crate) fn go_on(&self) {
        self.send(Signal::CONT);
    }

    fn send(&self, signal: Signal) {
        // The descriptor names one process: if that is still this one, no other gets the signal.
        let Ok(pidfd) = sys::pidfd_open(self.pid) else { return };
        if self.is_alive()
            && let Err(error) = sys::pidfd_signal(pidfd.as_fd(), signal)
        {
            debug!(pid = self.pid, %error, "cannot signal a process; it has ended already");
        }
    }

    /// The CPU time of all its threads, in clock ticks. None if the process is gone.
    pub(crate) fn cpu_time(&self) -> Option<u64> {
        stat(self.pid).ok().filter(|it| it.start == self.start).map(|it| it.cpu)
    }

    /// Whether none of its threads runs: all are stopped, or the process is gone.
    pub(crate) fn is_stopped(&self) -> bool {
        match stat(self.pid) {
            Ok(leader) if leader.start == self.start && !leader.is_dead() => {
                (leader.stopped || leader.has_ended) && self.are_threads_stopped()
            }
            _ => true,
        }
    }

    fn are_threads_stopped(&self) -> bool {
        let Ok(mut threads) = std::fs::read_dir(format!("/proc/{}/task", self.pid)) else { return true };
        threads.all(|thread| {
            let text = thread.and_then(|it| std::fs::read(it.path().join("stat")));
            // A thread that has ended meanwhile does not run.
            text.ok().and_then(|text| parse_stat(&text)).is_none_or(|it| it.stopped || it.has_ended)
        })
    }
}

/// The signals in these lines of a `/proc/PID/status`.
fn signals(status: &str, names: &[&str]) -> u64 {
    let sets = status.lines().filter_map(|line| names.iter().find_map(|name| line.strip_prefix(name)));
    sets.filter_map(|it| u64::from_str_radix(it.trim(), 16).ok()).fold(0, |all, it| all | it)
}

/// Whether one of the signals that are pending by a `/proc/PID/status` stops the process. All but SIGSTOP may be blocked, handled or
/// ignored, and then they do not.
fn stops(status: &str) -> bool {
    const ALWAYS: u64 = 1 << (libc::SIGSTOP - 1);
    const OTHERS: u64 = 1 << (libc::SIGTSTP - 1) | 1 << (libc::SIGTTIN - 1) | 1 << (libc::SIGTTOU - 1);
    let kept_off = signals(status, &["SigBlk:", "SigCgt:", "SigIgn:"]);
    signals(status, &["SigPnd:", "ShdPnd:"]) & (ALWAYS | OTHERS & !kept_off) != 0
}

/// The flag of a thread whose end has begun, in `/proc/PID/stat`.
const PF_EXITING: u64 = 0x4;

/// The fields of `/proc/PID/stat` that the daemon uses.
struct Stat {
    parent: i32,
    start: u64,
    /// The CPU time of its threads, in clock ticks.
    cpu: u64,
    /// Whether the thread has ended: that of the first thread does not tell of the others.
    has_ended: bool,
    /// Threads of the process that have not ended, and the first one.
    threads: u64,
    /// Stopped by a signal or a tracer.
    stopped: bool,
    /// Stopped by a signal, and not traced.
    stopped_by_signal: bool,
    /// Its end has begun.
    exiting: bool,
}

impl Stat {
    /// Whether no thread of the process is left.
    fn is_dead(&self) -> bool {
        self.has_ended && self.threads <= 1
    }
}

fn stat(pid: i32) -> io::Result<Stat> {
    let text = std::fs::read(format!("/proc/{pid}/stat"))?;
    parse_stat(&text).ok_or_else(|| io::Error::other("a /proc/PID/stat that makes no sense"))
}

/// Parses a line. The command's name may hold spaces and parentheses: fields are counted from the last parenthesis.
fn parse_stat(text: &[u8]) -> Option<Stat> {
    let text = String::from_utf8_lossy(text);
    let fields: Vec<_> = text[text.rfind(')')? + 1..].split_ascii_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(Stat {
        has_ended: matches!(*fields.first()?, "Z" | "X"),
        threads: number(17)?,
        stopped: matches!(*fields.first()?, "T" | "t"),
        stopped_by_signal: *fields.first()? == "T",
        parent: fields.get(1)?.parse().ok()?,
        exiting: number(6)? & PF_EXITING != 0,
        start: number(19)?,
        cpu: number(11)?.saturating_add(number(12)?),
    })
}

/// A process and all its descendants; empty if the process does not exist.
pub(crate) fn tree(root: i32) -> io::Result<Vec<i32>> {
    if stat(root).is_err() {
        return Ok(Vec::new());
    }
    let mut children = HashMap::<i32, Vec<i32>>::new();
    for pid in all()? {
        // A process that has ended meanwhile is in no tree.
        if let Ok(stat) = stat(pid) {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        // Children are removed as they are found: pids that were used again during the walk cannot make it a circle.
        found.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    Ok(found)
}

/// The present time, as [`Process::start`] counts it.
pub(crate) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let ticks = rustix::param::clock_ticks_per_second();
    let (seconds, nanoseconds) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds.saturating_mul(ticks).saturating_add(nanoseconds.saturating_mul(ticks) / 1_000_000_000)
}

/// The same as [`tree`] for a tree in which nothing runs, without reading every process, which takes 20 us each: the kernel's
/// list of children is complete only then (proc(5)).
pub(crate) fn frozen_tree(root: i32) -> io::Result<Vec<i32>> {
    // Not every kernel has these lists.
    if !std::path::Path::new("/proc/thread-self/children").exists() {
        return tree(root);
    }
    if stat(root).is_err() {
        return Ok(Vec::new());
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        found.extend(children(*pid)?);
        next += 1;
    }
    Ok(found)
}

/// The children of all threads of a process; a process that is gone has none.
fn children(pid: i32) -> io::Result<Vec<i32>> {
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH);
    let threads = match std::fs::read_dir(format!("/proc/{pid}/task")) {
        Err(error) if gone(&error) => return Ok(Vec::new()),
        threads => threads?,
    };
    let mut found = Vec::new();
    for thread in threads {
        match std::fs::read_to_string(thread?.path().join("children")) {
            Err(error) if gone(&error) => {}
            pids => found.extend(pids?.split_ascii_whitespace().filter_map(|it| it.parse::<i32>().ok())),
        }
    }
    Ok(found)
}

/// The process that traces a process, if one does.
fn tracer(pid: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?;
    tracer.trim().parse().ok().filter(|it| *it != 0)
}

/// The processes that a process traces.
pub(crate) fn traced_by(pid: i32) -> io::Result<Vec<i32>> {
    Ok(all()?.into_iter().filter(|it| tracer(*it) == Some(pid)).collect())
}

/// A process, its parent, and so on up.
pub(crate) fn ancestry(pid: i32) -> Vec<i32> {
    let mut found = vec![pid];
    let mut at = pid;
    while let Ok(stat) = stat(at) {
        at = stat.parent;
        if at == 0 || found.contains(&at) {
            break;
        }
        found.push(at);
    }
    found
}

/// The pids of all processes.
pub(crate) fn all() -> io::Result<Vec<i32>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        if let Some(pid) = entry?.file_name().to_str().and_then(|it| it.parse().ok()) {
            pids.push(pid);
        }
    }
    Ok(pids)
}

/// The name of the process's command, for messages.
pub(crate) fn command(pid: i32) -> String {
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => name.trim_end().to_owned(),
        Err(_) => "?".to_owned(),
    }
}

/// The effective user of a process.
pub(crate) fn user(pid: i32) -> Option<u32> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(format!("/proc/{pid}")).ok().map(|it| it.uid())
}

/// The cgroup of a process in the v2 hierarchy; None if the process is gone, or there is no such hierarchy.
pub(crate) fn cgroup(pid: i32) -> Option<String> {
    let text = std::fs::read(format!("/proc/{pid}/cgroup")).ok()?;
    String::from_utf8_lossy(&text).lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// The user that a process acts as; None if the process does not exist.
pub(crate) fn effective_user(pid: i32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The pids of one process in every pid namespace that it is in, from the daemon's inwards.
pub(crate) fn namespace_pids(pid: i32) -> io::Result<Vec<i32>> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let pids = line.map(|line| line.split_ascii_whitespace().map(str::parse).collect());
    match pids {
        Some(Ok(pids)) => Ok(pids),
        _ => Err(io::Error::other("a /proc/PID/status without NSpid")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_forge_the_fields_behind_it() {
        let text = b"7 (a) Z 1 (b) c) S 5 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        let stat = parse_stat(text).unwrap();
        assert_eq!((stat.parent, stat.start, stat.is_dead()), (5, 4242, false));
    }

    #[test]
    fn a_process_has_started_before_now_and_the_next_one_has_not() {
        let before = now();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::with_pid(child.id() as i32).unwrap();
        assert!(before <= process.start && process.start <= now());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_process_has_ended_when_all_its_threads_have() {
        let stat = |state: &str, threads: u64| {
            let text = format!("7 (a) {state} 5 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 {threads} 0 4242 0 0");
            parse_stat(text.as_bytes()).unwrap()
        };
        assert!(stat("Z", 1).is_dead() && stat("X", 0).is_dead());
        assert!(!stat("Z", 2).is_dead() && !stat("S", 1).is_dead() && !stat("T", 1).is_dead());
        assert!(stat("Z", 2).has_ended);
    }

    #[test]
    fn a_signal_stops_a_process_unless_it_is_kept_off() {
        let stops = |pending: u64, kept_off: &str, by: u64| {
            super::stops(&format!("SigPnd:\t0000000000000000\nShdPnd:\t{pending:016x}\n{kept_off}:\t{by:016x}\n"))
        };
        let [stop, tstp] = [libc::SIGSTOP, libc::SIGTSTP].map(|it| 1 << (it - 1));
        assert!(stops(stop, "SigBlk", u64::MAX) && stops(tstp, "SigBlk", 0) && stops(tstp, "SigBlk", stop));
        for kept_off in ["SigBlk", "SigCgt", "SigIgn"] {
            assert!(!stops(tstp, kept_off, tstp), "{kept_off}");
        }
        assert!(!stops(1 << (libc::SIGTERM - 1), "SigBlk", 0) && !super::stops(""));
    }

    #[test]
    fn a_child_is_in_its_parents_tree_until_it_ends() {
        let own = std::process::id() as i32;
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let process = Process::with_pid(pid).unwrap();
        assert!(process.is_alive());
        assert!(tree(own).unwrap().contains(&pid));
        assert!(!tree(pid).unwrap().contains(&own));
        assert!(frozen_tree(own).unwrap().contains(&pid));
        assert_eq!(frozen_tree(pid).unwrap(), [pid]);
        assert!(ancestry(pid).contains(&own));
        assert_eq!(namespace_pids(pid).unwrap().first(), Some(&pid));
        assert!(process.is_leader() && !process.is_ending());
        child.kill().unwrap();
        // Its flags stay until somebody waits for it.
        while !process.is_ending() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(!process.is_alive());
        assert!(tree(pid).unwrap().is_empty() && frozen_tree(pid).unwrap().is_empty());
    }

    #[test]
    fn children_of_children_and_of_other_threads_are_in_a_frozen_tree() {
        use std::io::{BufRead, BufReader};
        let shell = || {
            let mut shell = std::process::Command::new("sh");
            shell.args(["-c", "sleep 60 & echo $!; wait"]).stdout(std::process::Stdio::piped());
            shell.spawn().unwrap()
        };
        // A child belongs to the thread that made it, as long as that thread exists.
        let (done, over) = std::sync::mpsc::channel::<()>();
        let (send, made) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            send.send(shell()).unwrap();
            let _ = over.recv();
        });
        let mut shell = made.recv().unwrap();
        let mut line = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let (pid, below) = (shell.id() as i32, line.trim().parse::<i32>().unwrap());
        assert_eq!(frozen_tree(pid).unwrap(), [pid, below]);
        let all = frozen_tree(std::process::id() as i32).unwrap();
        assert!(all.contains(&pid) && all.contains(&below));
        done.send(()).unwrap();
        thread.join().unwrap();
        for pid in [below, pid] {
            // SAFETY: a plain system call; both are this test's own and not waited for yet.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        shell.wait().unwrap();
    }
}
