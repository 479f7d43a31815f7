//! The userfaultfds of a server that ends too early. While anybody has them, a process that touches a missing page waits for it.

use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use rekindle_wire::userfault::{self, Userfault};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

const PAGE: usize = 4096;
/// An address above `vm.mmap_min_addr`, below which no copy is tried, and below where programs lie: hardly any has memory there. If
/// one does, its page is filled with zeros, which it will not read, since it is being killed.
const NOWHERE: u64 = 1 << 20;

const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long processes may take to end that were killed.
const DYING: Duration = Duration::from_secs(10);

/// Userfaultfds.
pub(super) struct Held(Vec<Userfault>);

impl Held {
    /// Those of a process, which `pidfd` names.
    pub(super) fn of(pid: i32, pidfd: &OwnedFd) -> Self {
        let numbers = userfault::open_in(pid).unwrap_or_default().into_iter();
        let copies = numbers.filter_map(|it| pidfd_getfd(pidfd, it, PidfdGetfdFlags::empty()).ok());
        Self(copies.map(Userfault::from).collect())
    }

    /// Waits until the memory of all processes is gone that the descriptors are about. `late` is called once if that takes long.
    pub(super) fn wait_until_unused(mut self, late: impl Fn()) {
        let began = Instant::now();
        let mut is_late = false;
        loop {
            self.0.retain(is_used);
            if self.0.is_empty() {
                return;
            }
            if !is_late && began.elapsed() > DYING {
                is_late = true;
                late();
            }
            thread::sleep(POLL_INTERVAL);
        }
    }
}

/// Whether the memory is there that a userfaultfd is about: a copy to nowhere fails otherwise where it is not (ESRCH).
fn is_used(userfault: &Userfault) -> bool {
    let copied = userfault.copy(NOWHERE, &[0; PAGE], false);
    copied.err().and_then(|it| it.raw_os_error()) != Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd, AsRawFd};

    #[test]
    fn memory_that_is_there_is_told_from_memory_that_is_gone() {
        let Ok(own) = Userfault::new() else { return };
        assert!(is_used(&own));
        // One about a process that has ended.
        let (mut here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let made = Userfault::new();
            let number = made.as_ref().map_or(-1, |it| it.as_fd().as_raw_fd());
            // SAFETY: the bytes are those of a number.
            unsafe {
                libc::write(there.as_raw_fd(), (&raw const number).cast(), 4);
                libc::pause();
                libc::_exit(0);
            }
        }
        let mut number = [0; 4];
        std::io::Read::read_exact(&mut here, &mut number).unwrap();
        let pid = rustix::process::Pid::from_raw(child).unwrap();
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let held = Held::of(child, &pidfd);
        let all_are_used = held.0.iter().all(is_used);
        // The child has a copy of the first one, too.
        let count = held.0.len();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
        assert!(all_are_used && count == 2, "{count}");
        let gone = held.0.iter().filter(|it| !is_used(it)).count();
        assert_eq!(gone, 1, "the other is about this process");
    }
}
