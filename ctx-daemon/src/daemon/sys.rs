//! The system calls that the standard library lacks, by `rustix`. Those that `rustix` lacks too are here by hand, so all
//! unsafe code of the daemon but spawning is in this file.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, Mode, OFlags, SealFlags};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Resource, Rlimit, Signal, Uid};
use rustix::rand::GetRandomFlags;

/// The process that connected, as the daemon's namespaces see it. The pid is 0 where they do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

/// The credentials of the process that made the other end. By hand, because `rustix` has no pid 0.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into the local.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    check(result)?;
    Ok(Credentials { pid: found.pid, uid: found.uid })
}

/// A descriptor of the process that made the other end. Before Linux 6.5 it is of the process that has that pid now.
pub(crate) fn peer_pidfd(socket: BorrowedFd<'_>, pid: i32) -> io::Result<OwnedFd> {
    const SO_PEERPIDFD: i32 = 77;
    let mut found: RawFd = -1;
    let mut length = size_of::<RawFd>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into the local.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut found).cast(), &raw mut length)
    };
    match check(result) {
        // SAFETY: new, and owned here.
        Ok(_) => Ok(unsafe { OwnedFd::from_raw_fd(found) }),
        Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => pidfd_open(pid),
        Err(error) => Err(error),
    }
}

/// The seals of a memfd. An error for other files.
pub(crate) fn seals(file: BorrowedFd<'_>) -> io::Result<SealFlags> {
    Ok(rustix::fs::fcntl_get_seals(file)?)
}

/// Whether a descriptor was opened for both reading and writing.
pub(crate) fn is_read_write(file: BorrowedFd<'_>) -> io::Result<bool> {
    let flags = rustix::fs::fcntl_getfl(file)?;
    Ok(flags & OFlags::ACCMODE == OFlags::RDWR && !flags.contains(OFlags::PATH))
}

/// Waits until one of the descriptors can be read or is closed at the other end; returns which. None after the time.
pub(crate) fn wait_readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN | PollFlags::RDHUP));
    // A time that the kernel cannot express is endless.
    let timeout = timeout.and_then(|it| Timespec::try_from(it).ok());
    match poll(&mut polled, timeout.as_ref()) {
        Err(rustix::io::Errno::INTR) => Ok([false; N]),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(polled.map(|it| !it.revents().is_empty())),
    }
}

/// Whether a small message can be written to a socket without waiting: a Unix stream takes more while a quarter of its room
/// at most is taken.
pub(crate) fn is_writable(socket: &UnixStream) -> bool {
    events_now(socket, PollFlags::OUT).contains(PollFlags::OUT)
}

/// Whether the other end of a connection is closed, even if bytes wait to be read.
pub(crate) fn is_hung_up(socket: &UnixStream) -> bool {
    events_now(socket, PollFlags::RDHUP).intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

/// The events of a socket at this moment. None where the kernel does not say.
fn events_now(socket: &UnixStream, events: PollFlags) -> PollFlags {
    let mut polled = [PollFd::new(socket, events)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&at_once)).map_or(PollFlags::empty(), |_| polled[0].revents())
}

/// A descriptor of a process; it stays valid for killing the process when the pid is used again.
pub(crate) fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).filter(|pid| pid.as_raw_nonzero().get() > 0).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// Sends a signal.
pub(crate) fn pidfd_signal(process: BorrowedFd<'_>, signal: Signal) -> io::Result<()> {
    Ok(rustix::process::pidfd_send_signal(process, signal)?)
}

/// A copy of another process's descriptor.
pub(crate) fn pidfd_getfd(process: BorrowedFd<'_>, fd: RawFd) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_getfd(process, fd, PidfdGetfdFlags::empty())?)
}

/// Whether a descriptor of another process is a copy of this one: both are of one `open`, in any process.
pub(crate) fn has_opened(pid: i32, theirs: RawFd, ours: BorrowedFd<'_>) -> io::Result<bool> {
    /// `enum kcmp_type`.
    const KCMP_FILE: i32 = 0;
    let (own, ours) = (std::process::id(), ours.as_raw_fd());
    // SAFETY: no pointers.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, pid, own, KCMP_FILE, theirs, ours) };
    check(i32::try_from(order).unwrap_or(-1)).map(|order| order == 0)
}

/// The kernel's number of a socket, the same in every process that has it.
pub(crate) fn cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::net::sockopt::socket_cookie(socket)?)
}

/// The pid or user namespace that contains the one behind the descriptor.
pub(crate) fn parent_namespace(namespace: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    /// `_IO(0xb7, 0x2)`.
    const NS_GET_PARENT: libc::c_ulong = 0xb702;
    // SAFETY: the request takes no argument.
    let fd = check(unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT as _) })?;
    // SAFETY: new, and owned here.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The user, as seen here, who has made the user namespace that the namespace behind the descriptor is of.
pub(crate) fn namespace_owner(namespace: BorrowedFd<'_>) -> io::Result<u32> {
    /// `_IO(0xb7, 0x1)`.
    const NS_GET_USERNS: libc::c_ulong = 0xb701;
    // SAFETY: the request takes no argument.
    let fd = check(unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_USERNS as _) })?;
    // SAFETY: new, and owned here.
    let users = unsafe { OwnedFd::from_raw_fd(fd) };
    user_namespace_owner(users.as_fd())
}

/// The user, as seen here, who has made the user namespace behind the descriptor.
pub(crate) fn user_namespace_owner(namespace: BorrowedFd<'_>) -> io::Result<u32> {
    /// `_IO(0xb7, 0x4)`.
    const NS_GET_OWNER_UID: libc::c_ulong = 0xb704;
    let mut uid: libc::uid_t = 0;
    // SAFETY: the request writes one user id to the place, which is a live local.
    check(unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_OWNER_UID as _, &raw mut uid) })?;
    Ok(uid)
}

/// The effective user id.
pub(crate) fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether any process runs as this user.
pub(crate) fn user_has_processes(uid: u32) -> bool {
    rustix::process::getpriority_user(Uid::from_raw(uid)) != Err(rustix::io::Errno::SRCH)
}

/// A random number that nobody can guess.
pub(crate) fn random() -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    match rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())? {
        8 => Ok(u64::from_ne_bytes(bytes)),
        got => Err(io::Error::other(format!("the kernel gave {got} random bytes instead of 8"))),
    }
}

/// Makes all new files private to their owner. To be called while there is one thread.
pub(crate) fn private_files() {
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
}

/// Raises the limit of descriptors as far as possible: each client has several, and the default is 1024.
pub(crate) fn raise_descriptor_limit() -> io::Result<()> {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    Ok(rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?)
}

/// The bytes of host memory that can be had without swapping, as the kernel estimates it.
pub(crate) fn available_memory() -> io::Result<u64> {
    memory_info("MemAvailable")
}

/// The bytes of host memory in all.
pub(crate) fn memory() -> io::Result<u64> {
    memory_info("MemTotal")
}

fn memory_info(name: &str) -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|it| it.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other(format!("/proc/meminfo does not say {name}")))
}

/// Frees the pages of a memfd of this size, even if processes map it.
pub(crate) fn free_pages(file: BorrowedFd<'_>, size: u64) -> io::Result<()> {
    Ok(rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, size)?)
}

/// SIGTERM and SIGINT, blocked so that they do not end the process, and a thread can wait for them.
#[derive(Debug)]
pub(crate) struct StopSignals(libc::sigset_t);

impl StopSignals {
    /// Blocks them in this thread and those it starts: to be called while there is one thread.
    pub(crate) fn block() -> io::Result<Self> {
        // SAFETY: plain data for which zeros are valid; the calls write the local only.
        unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            libc::sigaddset(&raw mut set, libc::SIGTERM);
            libc::sigaddset(&raw mut set, libc::SIGINT);
            let result = libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            if result != 0 {
                return Err(io::Error::from_raw_os_error(result));
            }
            Ok(Self(set))
        }
    }

    /// Waits for one of the signals.
    pub(crate) fn wait(&self) -> &'static str {
        let mut signal = 0;
        // SAFETY: reads the set, writes the local.
        while unsafe { libc::sigwait(&raw const self.0, &raw mut signal) } != 0 {}
        if signal == libc::SIGINT { "SIGINT" } else { "SIGTERM" }
    }
}

/// The number of a group given by name or number.
pub(crate) fn group(name: &str) -> io::Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    let unknown = || io::Error::new(io::ErrorKind::NotFound, format!("no group {name:?}"));
    let c_name = CString::new(name).map_err(|_| unknown())?;
    // SAFETY: plain data for which zeros are valid.
    let mut entry: libc::group = unsafe { std::mem::zeroed() };
    let mut buffer = vec![0; 64 << 10];
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are to locals, with the buffer's length.
    let result =
        unsafe { libc::getgrnam_r(c_name.as_ptr(), &raw mut entry, buffer.as_mut_ptr(), buffer.len(), &raw mut found) };
    if result == 0 && !found.is_null() { Ok(entry.gr_gid) } else { Err(unknown()) }
}

/// The numbers of descriptors, as [`rekindle_wire::frame::send`] takes them.
pub(crate) fn raw<'a>(fds: impl IntoIterator<Item = &'a OwnedFd>) -> Vec<RawFd> {
    fds.into_iter().map(|fd| fd.as_fd().as_raw_fd()).collect()
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
