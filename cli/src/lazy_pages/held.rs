//! The userfaultfds of a server that ends too early. While anybody has them, a process that touches a missing page waits for it.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

/// How `/proc/PID/fd` shows such a descriptor.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";
const PAGE: usize = 4096;
/// An address above `vm.mmap_min_addr`, below which no copy is tried, and below where programs lie: hardly any has memory there. If
/// one does, its page is filled with zeros, which it will not read, since it is being killed.
const NOWHERE: u64 = 1 << 20;
/// `_IOWR(UFFDIO, _UFFDIO_COPY, struct uffdio_copy)` (linux/userfaultfd.h).
const UFFDIO_COPY: libc::Ioctl = 0xc028_aa03_u32 as libc::Ioctl;

const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long processes may take to end that were killed.
const DYING: Duration = Duration::from_secs(10);

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    copied: i64,
}

/// Userfaultfds.
pub(super) struct Held(Vec<OwnedFd>);

impl Held {
    /// Those of a process, which `pidfd` names.
    pub(super) fn of(pid: i32, pidfd: &OwnedFd) -> Self {
        let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let ours = entries.filter(|it| fs::read_link(it.path()).is_ok_and(|to| to.as_os_str() == USERFAULTFD));
        let numbers = ours.filter_map(|it| it.file_name().to_str()?.parse().ok());
        Self(numbers.filter_map(|it| pidfd_getfd(pidfd, it, PidfdGetfdFlags::empty()).ok()).collect())
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
fn is_used(fd: &OwnedFd) -> bool {
    let page = [0_u8; PAGE];
    let mut copy = Copy { to: NOWHERE, from: page.as_ptr() as u64, length: PAGE as u64, mode: 0, copied: 0 };
    // SAFETY: the structure is the kernel's, and `from` has a page; `to` is in another process.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), UFFDIO_COPY, &raw mut copy) };
    done == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    /// `_IOWR(UFFDIO, _UFFDIO_API, struct uffdio_api)`.
    const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;

    /// A userfaultfd about this process, where the machine allows it.
    fn userfaultfd() -> Option<OwnedFd> {
        // SAFETY: the descriptor is new; the structure is three words.
        unsafe {
            let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
            let fd = (fd >= 0).then(|| OwnedFd::from_raw_fd(fd as i32))?;
            let mut api = [0xaa_u64, 0, 0];
            (libc::ioctl(fd.as_raw_fd(), UFFDIO_API, api.as_mut_ptr()) == 0).then_some(fd)
        }
    }

    #[test]
    fn memory_that_is_there_is_told_from_memory_that_is_gone() {
        let Some(own) = userfaultfd() else { return };
        assert!(is_used(&own));
        // One about a process that has ended.
        let (mut here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let fd = userfaultfd();
            let number = fd.as_ref().map_or(-1, |it| it.as_raw_fd());
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
