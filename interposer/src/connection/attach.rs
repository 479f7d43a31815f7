//! Attaching to a worker: connecting to the daemon, making the shared memory, and the handshake.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rekindle_wire::attach::{Answer, Attach, Attached, PROTOCOL, SETTINGS};
use rekindle_wire::control::{DEFAULT_SOCKET, Opening, Request};
use rekindle_wire::layout::{self, Shared};
use rekindle_wire::{descriptor, frame, frame::FrameError};

use crate::process::log;
use crate::process::memfd::{map_shared, sealed_memfd};

/// The result of a handshake.
pub(crate) struct Attachment {
    pub(crate) socket: UnixStream,
    pub(crate) shared: Shared,
    /// The mapping of the bounce buffer.
    pub(crate) bounce_buffer: *mut u8,
    pub(crate) attached: Attached,
}

/// Why a process has no worker. Its text is one line for the user, which says what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AttachError {
    #[error(
        "cannot reach the Rekindle daemon at {path} ({error}); start it with `rekindled`, or set REKINDLE_SOCKET",
        error = .source
    )]
    Unreachable { path: String, source: io::Error },
    #[error("no shared memory: {0}")]
    SharedMemory(#[source] io::Error),
    #[error("cannot write the request to the daemon: {0}")]
    Request(#[source] serde_json::Error),
    #[error(
        "the daemon at {path} has not answered for {seconds} s: let it go on or start it anew, then this program",
        seconds = .time.as_secs()
    )]
    Silent { path: String, time: Duration },
    #[error("the daemon at {path} refuses this process: {reason}")]
    Refused { path: String, reason: String },
    #[error(
        "the daemon at {path} answered in a way that this version does not understand ({error}); use one version of Rekindle for both",
        error = .source
    )]
    OtherVersion { path: String, source: FrameError },
    #[error("the daemon at {path} closed the connection during the handshake; see its log")]
    Closed { path: String },
}

/// Attaches: connects to the daemon, gives it the shared memory, and waits for a worker.
pub(crate) fn attach() -> Result<Attachment, AttachError> {
    let path = std::env::var("REKINDLE_SOCKET").unwrap_or_else(|_| DEFAULT_SOCKET.into());
    // A process that is frozen during the handshake finds the connection closed when it is restored, and begins again.
    for _ in 0..3 {
        match try_attach(&path)? {
            Some(connection) => return Ok(connection),
            None => std::thread::sleep(std::time::Duration::from_millis(50)),
        }
    }
    Err(AttachError::Closed { path })
}

/// Attaches once. `None`: the connection ended during the handshake.
fn try_attach(path: &str) -> Result<Option<Attachment>, AttachError> {
    let socket = descriptor::connect(path).map_err(|source| AttachError::Unreachable { path: path.into(), source })?;
    let ring = Memory::new(layout::SHARED_NAME, layout::SHARED_SIZE).map_err(AttachError::SharedMemory)?;
    let bounce_buffer = Memory::new(layout::STAGING_NAME, layout::STAGING_SIZE).map_err(AttachError::SharedMemory)?;
    // SAFETY: a fresh shared mapping of that size, sealed; nothing uses `shared` after `ring` has unmapped it.
    let shared = unsafe { Shared::new(ring.at) };
    shared.initialise();
    let request = Request::Attach(Attach {
        dialect: rekindle_wire::Dialect::own(),
        pid: std::process::id() as i32,
        command: command_name(),
        socket: path.into(),
        cookie: cookie(socket.as_raw_fd()),
        settings: SETTINGS
            .iter()
            .chain([&PROTOCOL])
            .filter_map(|k| Some((k.to_string(), std::env::var(k).ok()?)))
            .collect(),
    });
    let opening = Opening::new(&request).map_err(AttachError::Request)?;
    let sent = frame::send(&socket, &opening, &[], &[ring.file.as_raw_fd(), bounce_buffer.file.as_raw_fd()]);
    if sent.is_ok() {
        wait_for_answer(&socket, path, TIMEOUTS)?;
    }
    match sent.and_then(|()| frame::receive::<Answer>(&socket)) {
        Ok(message) => match message.body {
            Answer::Attached(attached) => {
                ring.keep();
                Ok(Some(Attachment { socket, shared, bounce_buffer: bounce_buffer.keep(), attached }))
            }
            Answer::Refused { reason } => Err(AttachError::Refused { path: path.into(), reason }),
        },
        Err(FrameError::Closed | FrameError::Io(_)) => Ok(None),
        Err(source) => Err(AttachError::OtherVersion { path: path.into(), source }),
    }
}

/// A sealed memfd and a shared mapping of it, which is unmapped unless the attach succeeds: a process without a worker must
/// have no ring, because the ring shows which processes have lost their worker.
struct Memory {
    file: OwnedFd,
    at: *mut u8,
    size: usize,
}

impl Memory {
    /// The mapping does not come to forked children: a child must not touch the ring.
    fn new(name: &CStr, size: usize) -> io::Result<Self> {
        let file = sealed_memfd(name, size)?;
        let at = map_shared(&file, std::ptr::null_mut(), size, 0)?;
        // SAFETY: the mapping just made.
        unsafe { libc::madvise(at.cast(), size, libc::MADV_DONTFORK) };
        Ok(Self { file, at, size })
    }

    /// Leaves the mapping for the life of the process, and closes the file.
    fn keep(mut self) -> *mut u8 {
        self.size = 0;
        self.at
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.size > 0 {
            // SAFETY: `new` made the mapping, and nothing uses it after a failed attach.
            unsafe { libc::munmap(self.at.cast(), self.size) };
        }
    }
}

/// How long the daemon may take to answer.
#[derive(Clone, Copy, Debug)]
struct Timeouts {
    /// After this time without an answer the daemon gets a probe: a worker may need long to start.
    poll_interval: Duration,
    /// How long the daemon may take to answer a probe.
    probe: Duration,
    /// After this time without any answer the attach fails.
    give_up: Duration,
}

const TIMEOUTS: Timeouts = Timeouts {
    poll_interval: Duration::from_secs(5),
    probe: Duration::from_secs(10),
    give_up: Duration::from_secs(60),
};

/// Waits for the daemon's answer as long as the daemon answers probes. If it does not, logs a line, and later returns an
/// error.
fn wait_for_answer(socket: &UnixStream, path: &str, timeouts: Timeouts) -> Result<(), AttachError> {
    let mut silent_since: Option<Instant> = None;
    loop {
        let began = Instant::now();
        if is_readable(socket, timeouts.poll_interval) {
            return Ok(());
        }
        if answers_probe(path, timeouts.probe) {
            silent_since = None;
            continue;
        }
        if silent_since.is_none() {
            log::error(&format!(
                "the daemon at {path} does not answer; waiting for it (is it stopped? `rekindle doctor` says so)"
            ));
        }
        if silent_since.get_or_insert(began).elapsed() >= timeouts.give_up {
            return Err(AttachError::Silent { path: path.into(), time: timeouts.give_up });
        }
    }
}

/// Whether the daemon answers a status request on another connection.
fn answers_probe(path: &str, time: Duration) -> bool {
    let ask = || -> Option<UnixStream> {
        let socket = connect_within(path, time).ok()?;
        frame::send(&socket, &Opening::new(&Request::Status).ok()?, &[], &[]).ok()?;
        Some(socket)
    };
    ask().is_some_and(|socket| is_readable(&socket, time))
}

/// Connects within a time, also if the queue of a stopped daemon is full.
fn connect_within(path: &str, time: Duration) -> io::Result<UnixStream> {
    // SAFETY: plain system calls; the descriptor that comes back is new and owned here, the address a local of its size.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = UnixStream::from(descriptor::above_standard(OwnedFd::from_raw_fd(fd))?);
        socket.set_write_timeout(Some(time))?;
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        if path.len() >= address.sun_path.len() {
            return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
        }
        for (to, from) in address.sun_path.iter_mut().zip(path.bytes()) {
            *to = from as libc::c_char;
        }
        let size = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        if libc::connect(socket.as_raw_fd(), (&raw const address).cast(), size) == 0 {
            Ok(socket)
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

/// Whether the socket has data to read, or has ended, within this time.
fn is_readable(socket: &UnixStream, time: Duration) -> bool {
    let deadline = Instant::now() + time;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one entry, a local.
        let result = unsafe { libc::poll(&raw mut entry, 1, left.as_millis() as i32) };
        // A signal, or a freeze, ends the wait early.
        if result > 0 || left.is_zero() {
            return result > 0;
        }
    }
}

fn command_name() -> String {
    std::fs::read_to_string("/proc/self/comm").map(|s| s.trim_end().into()).unwrap_or_default()
}

fn cookie(socket: RawFd) -> u64 {
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into the local.
    unsafe {
        libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_COOKIE, (&raw mut cookie).cast(), &raw mut length);
    }
    cookie
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    const SHORT: Timeouts = Timeouts {
        poll_interval: Duration::from_millis(20),
        probe: Duration::from_millis(20),
        give_up: Duration::from_millis(300),
    };

    /// A listener that accepts no connection, and a socket that is connected to it.
    fn silent_daemon() -> (std::path::PathBuf, UnixListener, UnixStream) {
        static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("rekindle-silent-{}-{number}", std::process::id()));
        let listener = UnixListener::bind(&path).unwrap();
        let socket = UnixStream::connect(&path).unwrap();
        (path, listener, socket)
    }

    #[test]
    fn attach_fails_when_the_daemon_answers_no_probe_in_time() {
        let (path, _listener, socket) = silent_daemon();
        let error = wait_for_answer(&socket, path.to_str().unwrap(), SHORT).unwrap_err();
        assert!(matches!(&error, AttachError::Silent { time, .. } if *time == SHORT.give_up), "{error}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn shared_memory_of_a_failed_attach_is_unmapped() {
        let mapped = |name: &str| std::fs::read_to_string("/proc/self/maps").unwrap().contains(name);
        drop(Memory::new(c"failed-attach", 4096).unwrap());
        Memory::new(c"attach-that-succeeds", 4096).unwrap().keep();
        assert!(!mapped("failed-attach"));
        assert!(mapped("attach-that-succeeds"));
    }

    #[test]
    fn attach_waits_while_the_daemon_answers_probes() {
        // The daemon answers each probe.
        let timeouts = Timeouts { probe: Duration::from_secs(20), ..SHORT };
        let (path, listener, socket) = silent_daemon();
        let daemon = std::thread::spawn(move || {
            let (client, _) = listener.accept().unwrap();
            let began = Instant::now();
            let mut last = None;
            // Longer than the time after which an attach fails without an answer.
            while began.elapsed() < 2 * SHORT.give_up {
                let (probe, _) = listener.accept().unwrap();
                io::Write::write_all(&mut &probe, b"here").unwrap();
                last = Some(probe);
            }
            io::Write::write_all(&mut &client, b"a worker").unwrap();
            (client, last)
        });
        wait_for_answer(&socket, path.to_str().unwrap(), timeouts).unwrap();
        daemon.join().unwrap();
        std::fs::remove_file(path).unwrap();
    }
}
