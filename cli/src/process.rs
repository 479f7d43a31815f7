//! A process's `/proc/PID/stat` (proc(5)).

use std::fs;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pid: i32,
    state: char,
    session: i32,
    terminal: i32,
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
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let mut numbers = fields.skip(2).map_while(|field| field.parse().ok());
        Some(Self { pid, state, session: numbers.next()?, terminal: numbers.next()? })
    }

    /// Whether a signal or a debugger has stopped it.
    pub(crate) fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't')
    }

    /// Whether its session or its terminal is that of a process which is not dumped with it: CRIU refuses such a process
    /// unless it is told.
    pub(crate) fn is_of_a_shell(&self) -> bool {
        self.session != self.pid || self.terminal != 0
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
    fn a_stopped_process_is_told_from_one_that_runs_or_has_that_letter_in_its_name() {
        let stopped = |state: &str| Process::parse(9, &format!("9 (T) {state} 1 9 9 0 -1")).unwrap().is_stopped();
        assert_eq!(["T", "t", "R", "S", "Z"].map(stopped), [true, true, false, false, false]);
    }

    #[test]
    fn this_process_runs_and_no_process_has_a_negative_number() {
        let own = Process::find(std::process::id().cast_signed());
        assert!(own.is_some_and(|own| !own.is_stopped()));
        assert_eq!(Process::find(-1), None);
    }
}
