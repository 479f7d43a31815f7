//! A process's `/proc/PID/stat` (proc(5)).

use std::fs;
use std::io;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pid: i32,
    state: char,
    parent: i32,
    group: i32,
    session: i32,
    terminal: i32,
    /// Threads that have not ended, and the first one.
    threads: i32,
}

/// When a process started, in clock ticks since the machine did: that tells it from a later one with the same number. None if there is no
/// such process, or it has ended.
pub(crate) fn start_of(pid: i32) -> Option<u64> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    if Process::parse(pid, &stat)?.has_ended() {
        return None;
    }
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Whether a thread with this state has ended.
fn is_over(state: char) -> bool {
    matches!(state, 'Z' | 'X')
}

/// Whether all threads of a process have ended. Those that somebody traces are there until that one looks, as CRIU never does.
fn have_threads_ended(pid: i32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    // One without its file has gone.
    let stats = threads.filter_map(|it| fs::read(it.path().join("stat")).ok());
    let mut states = stats.map(|it| Process::parse(pid, &String::from_utf8_lossy(&it)).map(|it| it.state));
    states.all(|it| it.is_some_and(is_over))
}

/// Whether another process traces this one, as CRIU does.
pub(crate) fn is_traced(pid: i32) -> bool {
    let status = fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|it| it.trim() != "0")
}

/// The boot of the machine, by the kernel's random name for it.
pub(crate) fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim_end().to_owned()
}

impl Process {
    /// The process with this number, if there is one.
    pub(crate) fn find(pid: i32) -> Option<Self> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The process's name may be any bytes.
        Self::parse(pid, &String::from_utf8_lossy(&stat))
    }

    /// Parses the fields behind the name, which may have brackets in it: state, parent, group, session and terminal.
    fn parse(pid: i32, stat: &str) -> Option<Self> {
        let (_, fields) = stat.rsplit_once(')')?;
        let fields: Vec<_> = fields.split_ascii_whitespace().collect();
        let number = |at: usize| fields.get(at)?.parse().ok();
        let state = fields.first()?.chars().next()?;
        let (parent, group, session, terminal) = (number(1)?, number(2)?, number(3)?, number(4)?);
        Some(Self { pid, state, parent, group, session, terminal, threads: number(17).unwrap_or(1) })
    }

    /// All processes, but those that end meanwhile.
    fn all() -> io::Result<Vec<Self>> {
        let names = fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Ok(names.filter_map(Self::find).collect())
    }

    /// Those of the processes that live, and all that descend from them.
    pub(crate) fn trees_of(roots: &[i32]) -> io::Result<Vec<i32>> {
        let mut left = Self::all()?;
        let mut found = Vec::new();
        let mut next: Vec<_> = left.extract_if(.., |it| roots.contains(&it.pid)).collect();
        while let Some(process) = next.pop() {
            // Descendants of one that has ended, and was not waited for, have another parent by now.
            if !process.has_ended() {
                next.extend(left.extract_if(.., |it| it.parent == process.pid));
                found.push(process.pid);
            }
        }
        Ok(found)
    }

    /// Whether this process is its parent.
    pub(crate) fn is_child_of(&self, parent: i32) -> bool {
        self.parent == parent
    }

    /// What keeps these numbers from being given to other processes: the processes with them, also such that have ended and were
    /// not waited for, those of the groups and sessions that they led, and all that descend from any of these.
    pub(crate) fn holders_of(numbers: &[i32]) -> io::Result<Vec<i32>> {
        let mut left = Self::all()?;
        let mut found: Vec<_> = left.extract_if(.., |it| it.holds_one_of(numbers)).collect();
        let mut looked = 0;
        while let Some(parent) = found.get(looked).map(|it| it.pid) {
            found.extend(left.extract_if(.., |it| it.parent == parent));
            looked += 1;
        }
        Ok(found.iter().map(|it| it.pid).collect())
    }

    /// Whether it has one of these numbers itself, or as that of its group or session.
    fn holds_one_of(&self, numbers: &[i32]) -> bool {
        [self.pid, self.group, self.session].iter().any(|number| numbers.contains(number))
    }

    /// Whether all its threads have ended.
    fn has_ended(&self) -> bool {
        is_over(self.state) && (self.threads <= 1 || have_threads_ended(self.pid))
    }

    /// Whether a signal or a debugger has stopped it.
    pub(crate) fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// Whether it has a controlling terminal.
    pub(crate) fn has_terminal(&self) -> bool {
        self.terminal != 0
    }

    /// Whether its session or its terminal is that of a process which is not dumped with it: CRIU refuses such a process
    /// unless it is told.
    pub(crate) fn is_of_a_shell(&self) -> bool {
        self.session != self.pid || self.has_terminal()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_a_shell_is_told_from_a_session_of_its_own() {
        let job = |stat: &str| Process::parse(9, stat).unwrap().is_of_a_shell();
        assert!(!job("9 (a) b) S 1 9 9 0 -1 4194560"));
        assert!(job("9 (a) S 1 9 8 0 -1 4194560"), "its session is led by another");
        assert!(job("9 (a) S 1 9 9 34816 9 4194560"), "it has a terminal");
        for cut in ["9 (a", "9 (a)", "9 (a) S 1 9", "9 (a) S 1 9 9", "9 (a) S 1 9 x 0"] {
            assert_eq!(Process::parse(9, cut), None, "{cut}");
        }
    }

    #[test]
    fn a_number_is_held_by_its_process_its_group_and_its_session() {
        let process = Process::parse(9, "9 (a) S 1 8 7 0").unwrap();
        let held = [9, 8, 7, 1, 0].map(|number| process.holds_one_of(&[99, number]));
        assert_eq!(held, [true, true, true, false, false]);
        assert!(process.is_child_of(1) && !process.holds_one_of(&[]));
    }

    #[test]
    fn a_stopped_process_is_told_from_one_that_runs_or_has_that_letter_in_its_name() {
        let stopped = |state: &str| Process::parse(9, &format!("9 (T) {state} 1 9 9 0 -1")).unwrap().is_stopped();
        assert_eq!(["T", "t", "R", "S", "Z"].map(stopped), [true, true, false, false, false]);
    }

    #[test]
    fn a_tree_has_the_children_and_no_others() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let (own, pid) = (std::process::id().cast_signed(), child.id().cast_signed());
        let (all, one) = (Process::trees_of(&[own]).unwrap(), Process::trees_of(&[pid]).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(all.contains(&own) && all.contains(&pid) && !all.contains(&1));
        assert_eq!((one, Process::trees_of(&[pid]).unwrap()), (vec![pid], Vec::new()));
    }

    #[test]
    fn this_process_runs_and_no_process_has_a_negative_number() {
        let own = Process::find(std::process::id().cast_signed());
        assert!(own.is_some_and(|own| !own.is_stopped()));
        assert_eq!(Process::find(-1), None);
    }
}
