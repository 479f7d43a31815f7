//! Userfaultfds (linux/userfaultfd.h), by which a worker learns that its client's threads use managed memory, and gives them its
//! pages. A thread that touches a page which is not there sleeps until whoever has the descriptor wakes it; nobody else can tell
//! that it slept. While anybody has the descriptor, no such page turns into zeros by itself.
//!
//! A descriptor belongs to the memory of the process that made it, whoever uses it: addresses here are addresses there.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

/// What `/proc/PID/fd` says of a userfaultfd.
const LINK: &str = "anon_inode:[userfaultfd]";

/// The file by which a process may make one that the system call refuses it (Linux 6.1).
const DEVICE: &str = "/dev/userfaultfd";

/// `UFFD_API`, and the features that managed memory needs: writes to protected pages are told (Linux 5.7), also of shared memory
/// and of pages that are not there (5.19); pages can be poisoned (6.6).
const API: u64 = 0xaa;
const FEATURES: u64 = PAGEFAULT_FLAG_WP | MISSING_SHMEM | WP_HUGETLBFS_SHMEM | POISON;
const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const MISSING_SHMEM: u64 = 1 << 5;
const WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const POISON: u64 = 1 << 14;

const USERFAULTFD_IOC_NEW: libc::Ioctl = 0xaa00;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_aa01_u32 as libc::Ioctl;
const UFFDIO_WAKE: libc::Ioctl = 0x8010_aa02_u32 as libc::Ioctl;
const UFFDIO_COPY: libc::Ioctl = 0xc028_aa03_u32 as libc::Ioctl;
const UFFDIO_ZEROPAGE: libc::Ioctl = 0xc020_aa04_u32 as libc::Ioctl;
const UFFDIO_WRITEPROTECT: libc::Ioctl = 0xc018_aa06_u32 as libc::Ioctl;
const UFFDIO_POISON: libc::Ioctl = 0xc020_aa08_u32 as libc::Ioctl;

/// `UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP`
const MISSING_AND_WRITES: u64 = 3;
/// `UFFDIO_COPY_MODE_WP`, and `UFFDIO_WRITEPROTECT_MODE_WP`.
const COPY_PROTECTED: u64 = 2;
const PROTECT: u64 = 1;
/// `UFFD_EVENT_PAGEFAULT`, and its flags.
const PAGEFAULT: u8 = 0x12;
const FLAG_WRITE: u64 = 1;
const FLAG_WP: u64 = 2;

const PAGE: u64 = 4096;

/// Whether a descriptor of this process is a userfaultfd.
#[must_use]
pub fn is_one(fd: RawFd) -> bool {
    is_link(Path::new(&format!("/proc/self/fd/{fd}")))
}

/// The numbers of the userfaultfds that a process has open.
///
/// # Errors
/// The kernel's, where the process's descriptors cannot be listed.
pub fn open_in(pid: i32) -> io::Result<Vec<RawFd>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        // A descriptor that is closed meanwhile is none.
        if is_link(&entry.path()) {
            found.extend(entry.file_name().to_str().and_then(|it| it.parse::<RawFd>().ok()));
        }
    }
    Ok(found)
}

fn is_link(path: &Path) -> bool {
    fs::read_link(path).is_ok_and(|link| link.as_os_str() == LINK)
}

/// A thread of the process waits for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// An address in the page.
    pub address: u64,
    /// Whether the thread writes.
    pub writes: bool,
    /// Whether the page is there, and protected.
    pub is_protected: bool,
}

/// A userfaultfd.
#[derive(Debug)]
pub struct Userfault(OwnedFd);

impl From<OwnedFd> for Userfault {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<Userfault> for OwnedFd {
    fn from(faults: Userfault) -> Self {
        faults.0
    }
}

impl AsFd for Userfault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Userfault {
    /// Makes one for this process's memory, in which the kernel's own accesses wait too (`read(2)` into such memory). The system
    /// call needs `CAP_SYS_PTRACE` or `vm.unprivileged_userfaultfd`; otherwise the rights to `/dev/userfaultfd` decide.
    ///
    /// # Errors
    /// The kernel's, where the process may make none, or the kernel knows too little.
    pub fn new() -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call has no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        if fd < 0 {
            return Self::by_device(&File::open(DEVICE)?);
        }
        // SAFETY: a new descriptor that nobody else owns.
        Self(unsafe { OwnedFd::from_raw_fd(fd as i32) }).with_features()
    }

    /// As [`Userfault::new`], by that file, opened.
    ///
    /// # Errors
    /// The kernel's.
    pub fn by_device(device: &impl AsRawFd) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the request has a plain number and returns a descriptor.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), USERFAULTFD_IOC_NEW, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else owns.
        Self(unsafe { OwnedFd::from_raw_fd(fd) }).with_features()
    }

    fn with_features(self) -> io::Result<Self> {
        self.ask(UFFDIO_API, &mut [API, FEATURES, 0])?;
        Ok(self)
    }

    /// Makes a request whose structure consists of words, some of which the kernel writes.
    fn ask<const N: usize>(&self, request: libc::Ioctl, words: &mut [u64; N]) -> io::Result<()> {
        // SAFETY: the requests above take a structure of so many words and write no more.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), request, words.as_mut_ptr()) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Has threads wait that touch missing pages of a mapping, or write protected ones.
    ///
    /// # Errors
    /// The kernel's, for a range that is not mapped, or not as shared or private memory.
    pub fn register(&self, range: &Range<u64>) -> io::Result<()> {
        self.ask(UFFDIO_REGISTER, &mut [range.start, range.end - range.start, MISSING_AND_WRITES, 0])
    }

    /// Ends that. Threads that wait go on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn unregister(&self, range: &Range<u64>) -> io::Result<()> {
        self.ask(UFFDIO_UNREGISTER, &mut [range.start, range.end - range.start])
    }

    /// Wakes the threads that wait for pages of a range. They touch the pages again.
    ///
    /// # Errors
    /// The kernel's.
    pub fn wake(&self, range: &Range<u64>) -> io::Result<()> {
        self.ask(UFFDIO_WAKE, &mut [range.start, range.end - range.start])
    }

    /// Gives the process pages with this content, each at once, and wakes who waits for them. Pages that are there stay as they
    /// are. `address` and the length are multiples of the page size.
    ///
    /// # Errors
    /// The kernel's: no memory (`ENOMEM`, `ENOSPC`), no such mapping (`ENOENT`), no such process any more (`ESRCH`).
    pub fn copy(&self, address: u64, content: &[u8], protected: bool) -> io::Result<()> {
        let mode = if protected { COPY_PROTECTED } else { 0 };
        let source = content.as_ptr() as u64;
        by_parts(address..address + content.len() as u64, |part| {
            let mut words = [part.start, source + (part.start - address), part.end - part.start, mode, 0];
            // The kernel reads the source, which `content` keeps.
            let done = self.ask(UFFDIO_COPY, &mut words);
            (done, words[4])
        })
    }

    /// As [`Userfault::copy`], with pages of zeros.
    ///
    /// # Errors
    /// As [`Userfault::copy`].
    pub fn zero(&self, range: Range<u64>) -> io::Result<()> {
        by_parts(range, |part| {
            let mut words = [part.start, part.end - part.start, 0, 0];
            let done = self.ask(UFFDIO_ZEROPAGE, &mut words);
            (done, words[3])
        })
    }

    /// Has a thread that touches a page of the range from now on get SIGBUS, except for pages that are there. Wakes who waits.
    ///
    /// # Errors
    /// As [`Userfault::copy`].
    pub fn poison(&self, range: Range<u64>) -> io::Result<()> {
        by_parts(range, |part| {
            let mut words = [part.start, part.end - part.start, 0, 0];
            let done = self.ask(UFFDIO_POISON, &mut words);
            (done, words[3])
        })
    }

    /// Protects the pages that are there from writes (when this returns, no thread writes any more), or gives them free again, which
    /// wakes who waits.
    ///
    /// # Errors
    /// The kernel's.
    pub fn protect(&self, range: &Range<u64>, protected: bool) -> io::Result<()> {
        let mode = if protected { PROTECT } else { 0 };
        loop {
            let done = self.ask(UFFDIO_WRITEPROTECT, &mut [range.start, range.end - range.start, mode]);
            match done {
                // The process is changing its mappings.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => std::thread::yield_now(),
                done => return done,
            }
        }
    }

    /// Waits for faults, for a time at most, and returns some of those that nobody has read yet.
    ///
    /// # Errors
    /// The kernel's.
    pub fn read(&self, timeout_ms: i32) -> io::Result<Vec<Fault>> {
        const MESSAGE: usize = 32;
        let mut entry = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, a local.
        if unsafe { libc::poll(&raw mut entry, 1, timeout_ms) } <= 0 || entry.revents & libc::POLLIN == 0 {
            return if entry.revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) == 0 {
                Ok(Vec::new())
            } else {
                Err(io::ErrorKind::BrokenPipe.into())
            };
        }
        let mut bytes = [0_u8; 16 * MESSAGE];
        // SAFETY: reads at most as many bytes as the local has.
        let got = unsafe { libc::read(self.0.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len()) };
        if got < 0 {
            let error = io::Error::last_os_error();
            let is_none = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
            return if is_none { Ok(Vec::new()) } else { Err(error) };
        }
        let word = |message: &[u8], at: usize| message[at..at + 8].iter().rev().fold(0, |w, b| w << 8 | u64::from(*b));
        let messages = bytes[..got as usize].chunks_exact(MESSAGE).filter(|it| it[0] == PAGEFAULT);
        Ok(messages
            .map(|it| {
                let (flags, address) = (word(it, 8), word(it, 16));
                Fault { address, writes: flags & FLAG_WRITE != 0, is_protected: flags & FLAG_WP != 0 }
            })
            .collect())
    }
}

/// Makes a request for a range, and again for what the kernel has left of it. `request` returns the result, and the bytes that are
/// done or the negative error, as the kernel writes them. Pages that are there are left out. The kernel takes ranges of one mapping
/// only; a program may have split its own (mprotect(2), mlock(2)).
fn by_parts(range: Range<u64>, mut request: impl FnMut(Range<u64>) -> (io::Result<()>, u64)) -> io::Result<()> {
    let mut at = range.start;
    let mut most = range.end.saturating_sub(range.start);
    while at < range.end {
        let end = range.end.min(at + most);
        let (done, said) = request(at..end);
        let Err(error) = done else {
            at = end;
            most = range.end - range.start;
            continue;
        };
        if said as i64 > 0 {
            at += said;
            continue;
        }
        match error.raw_os_error() {
            Some(libc::EEXIST) => at += PAGE,
            Some(libc::EAGAIN) => std::thread::yield_now(),
            Some(libc::ENOENT) if end - at > PAGE => most = ((end - at) / 2).next_multiple_of(PAGE),
            _ => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::thread;

    use super::*;

    const PAGES: usize = 8;
    const BYTES: usize = PAGES * PAGE as usize;

    /// Shared memory of a file, and the file.
    fn mapped() -> (Range<u64>, OwnedFd) {
        // SAFETY: makes a file and maps it at an address of the kernel's choice.
        unsafe {
            let file = OwnedFd::from_raw_fd(libc::memfd_create(c"userfault-test".as_ptr(), libc::MFD_CLOEXEC));
            assert_eq!(libc::ftruncate(file.as_raw_fd(), BYTES as i64), 0);
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let at = libc::mmap(std::ptr::null_mut(), BYTES, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
            assert_ne!(at, libc::MAP_FAILED);
            (at as u64..at as u64 + BYTES as u64, file)
        }
    }

    fn page(range: &Range<u64>, index: u64) -> Range<u64> {
        range.start + index * PAGE..range.start + (index + 1) * PAGE
    }

    fn load(address: u64) -> u8 {
        // SAFETY: the mapping stays; another thread may change the page only before this returns.
        unsafe { (address as *const u8).read_volatile() }
    }

    fn store(address: u64, value: u8) {
        // SAFETY: as above.
        unsafe { (address as *mut u8).write_volatile(value) }
    }

    /// The next fault.
    fn next(faults: &Userfault) -> Fault {
        loop {
            if let Some(fault) = faults.read(100).unwrap().first() {
                return *fault;
            }
        }
    }

    #[test]
    fn a_thread_sleeps_until_its_page_is_there_and_a_protected_page_tells_of_writes() {
        // Neither containers nor older kernels need permit it.
        let Ok(faults) = Userfault::new() else { return };
        let (range, file) = mapped();
        faults.register(&range).unwrap();
        let (first, second) = (page(&range, 1), page(&range, 2));
        let reader = thread::spawn(move || load(first.start + 5));
        assert_eq!(next(&faults), Fault { address: first.start, writes: false, is_protected: false });
        faults.copy(first.start, &[7; 2 * PAGE as usize], true).unwrap();
        assert_eq!((reader.join().unwrap(), load(second.end - 1)), (7, 7));
        let writer = thread::spawn(move || store(second.start, 9));
        let fault = next(&faults);
        assert!(fault.is_protected && fault.writes && fault.address == second.start);
        faults.protect(&second, false).unwrap();
        writer.join().unwrap();
        // What the kernel does for the process waits, too.
        let third = page(&range, 3);
        let reader = thread::spawn(move || {
            let zeros = File::open("/dev/zero").unwrap();
            // SAFETY: a page of the mapping.
            unsafe { libc::read(zeros.as_raw_fd(), third.start as *mut c_void, 3) }
        });
        assert_eq!(next(&faults).address, third.start);
        faults.copy(third.start, &[5; PAGE as usize], false).unwrap();
        assert_eq!((reader.join().unwrap(), load(third.start), load(third.start + 3)), (3, 0, 5));
        // A page that leaves the file is missing again.
        let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: a plain call on an open file.
        assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), hole, 2 * PAGE as i64, PAGE as i64) }, 0);
        let reader = thread::spawn(move || load(second.start));
        assert_eq!(next(&faults).address, second.start);
        // Pages that are there are left out, and a mapping may be in parts.
        // SAFETY: a page of the mapping, which nothing writes.
        unsafe { libc::mprotect((range.start + 5 * PAGE) as *mut c_void, PAGE as usize, libc::PROT_READ) };
        faults.zero(range.clone()).unwrap();
        assert_eq!((reader.join().unwrap(), load(first.start), load(range.end - 1)), (0, 7, 0));
    }

    #[test]
    fn a_userfaultfd_is_told_from_other_files() {
        let file = File::open("/dev/null").unwrap();
        assert!(!is_one(file.as_raw_fd()) && !is_one(-1) && open_in(i32::MAX).is_err());
        let Ok(faults) = Userfault::new() else { return };
        let number = faults.as_fd().as_raw_fd();
        assert!(is_one(number) && open_in(std::process::id() as i32).unwrap().contains(&number));
    }

    #[test]
    fn whoever_touches_a_poisoned_page_gets_sigbus_and_pages_that_are_there_stay() {
        let Ok(faults) = Userfault::new() else { return };
        let (range, _file) = mapped();
        faults.register(&range).unwrap();
        faults.copy(range.start, &[3; PAGE as usize], false).unwrap();
        faults.poison(range.clone()).unwrap();
        assert_eq!(load(range.start), 3);
        let wrong = page(&range, 4).start;
        // SAFETY: the child only touches a page, and ends.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                let _ = libc::signal(libc::SIGBUS, libc::SIG_DFL);
                // A child has the parent's pages of shared memory only by the file.
                libc::_exit(i32::from(load(range.start) != 3));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            status
        };
        assert_eq!(status, 0);
        let file = File::open("/dev/zero").unwrap();
        // SAFETY: the kernel says that it cannot write there.
        let read = unsafe { libc::read(file.as_raw_fd(), wrong as *mut c_void, 1) };
        assert_eq!((read, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
    }
}
