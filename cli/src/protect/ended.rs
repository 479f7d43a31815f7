//! How a process has ended that need not be a child of this one.
//!
//! | who knows | until when |
//! |---|---|
//! | `/proc/PID/stat` (its last field, for whoever may read the process's memory) | its parent waits for it |
//! | a pidfd, since Linux 6.15 (`PIDFD_GET_INFO` with `PIDFD_INFO_EXIT`) | the pidfd is closed |
//! | the guard, if the job was its child: every restored one is, and that of a command | its note is replaced |
//!
//! Whoever asks later, and after a reboot, learns that nobody saw it.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use rekindle_protect::{Ending, Process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// `_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)` (linux/pidfd.h), for the first version of the structure.
const PIDFD_GET_INFO: libc::Ioctl = 0xc040_ff0b_u32 as libc::Ioctl;
/// The exit status is wanted, or is there.
const PIDFD_INFO_EXIT: u64 = 1 << 3;
/// The fields of `/proc/PID/stat` behind the name: the state is the first.
const STARTED: usize = 19;
const EXIT_CODE: usize = 49;

/// `struct pidfd_info`, in its first version.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    numbers: [u32; 11],
    exit_code: i32,
}

/// A process that is being watched.
#[derive(Debug)]
pub(super) struct Watched {
    process: Process,
    fd: OwnedFd,
}

impl Watched {
    /// Watches a process; `None` if it is gone.
    pub(super) fn new(process: Process) -> Option<Self> {
        let fd = pidfd_open(Pid::from_raw(process.pid)?, PidfdFlags::empty()).ok()?;
        // The number may have been given to another one before the descriptor was there.
        (started(process.pid)? == process.started).then_some(Self { process, fd })
    }

    pub(super) fn pid(&self) -> i32 {
        self.process.pid
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Whether all its threads have ended.
    pub(super) fn has_ended(&self) -> bool {
        poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// How it has ended, if it has, and anybody can still tell.
    pub(super) fn ending(&self) -> Option<Ending> {
        let status = of_zombie(self.process).or_else(|| of_pidfd(&self.fd))?;
        Some(ending(ExitStatus::from_raw(status)))
    }
}

/// The ending with this status.
pub(super) fn ending(status: ExitStatus) -> Ending {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ending::Exited(code),
        (None, Some(signal)) => Ending::Signalled(signal),
        (None, None) => Ending::Unseen,
    }
}

/// The process with this number now.
pub(super) fn process(pid: i32) -> Option<Process> {
    Some(Process { pid, started: started(pid)? })
}

/// Whether the process is there, and has not ended.
pub(super) fn is_alive(process: Process) -> bool {
    Watched::new(process).is_some_and(|it| !it.has_ended())
}

fn started(pid: i32) -> Option<u64> {
    fields(pid)?.get(STARTED)?.parse().ok()
}

fn of_zombie(process: Process) -> Option<i32> {
    let fields = fields(process.pid)?;
    let is_it = fields.first()? == "Z" && fields.get(STARTED)?.parse() == Ok(process.started);
    fields.get(EXIT_CODE).filter(|_| is_it)?.parse().ok()
}

fn of_pidfd(fd: &OwnedFd) -> Option<i32> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the kernel writes no more than the size in the request's number, which is that of the structure.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) };
    (done == 0 && info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code)
}

/// The fields behind the name, which may have any bytes in it.
fn fields(pid: i32) -> Option<Vec<String>> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    Some(stat.rsplit_once(')')?.1.split_ascii_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    const _: () = assert!(size_of::<PidfdInfo>() == 64, "the size is in the number of the request");

    /// A shell that runs this line after it has read one.
    fn shell(line: &str) -> (Child, Watched) {
        let mut child =
            Command::new("sh").arg("-c").arg(format!("read x; {line}")).stdin(Stdio::piped()).spawn().unwrap();
        let watched = Watched::new(process(child.id().cast_signed()).unwrap()).unwrap();
        assert!(!watched.has_ended() && watched.ending().is_none());
        drop(child.stdin.take());
        poll(&mut [PollFd::new(watched.fd(), PollFlags::IN)], None).unwrap();
        assert!(watched.has_ended());
        (child, watched)
    }

    #[test]
    fn the_end_of_a_process_is_known_before_and_after_its_parent_has_waited_for_it() {
        for (line, expected) in [
            ("exit 0", Ending::Exited(0)),
            ("exit 7", Ending::Exited(7)),
            ("kill -TERM $$", Ending::Signalled(15)),
            ("kill -KILL $$", Ending::Signalled(9)),
        ] {
            let (mut child, watched) = shell(line);
            assert_eq!(watched.ending(), Some(expected), "{line}");
            assert_eq!(ending(child.wait().unwrap()), expected);
            // Older kernels do not know it any more.
            assert!(watched.ending().is_none_or(|it| it == expected), "{line}");
            assert!(!is_alive(watched.process));
        }
    }

    #[test]
    fn a_later_process_with_the_same_number_is_another_one() {
        let own = process(std::process::id().cast_signed()).unwrap();
        assert!(is_alive(own));
        assert!(!is_alive(Process { started: own.started + 1, ..own }) && process(i32::MAX).is_none());
    }
}
