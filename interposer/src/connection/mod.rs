//! The connection of this process to its worker, and questions to the daemon.

pub(crate) mod ask;
pub(crate) mod attach;
pub(crate) mod bounce_buffer;
pub(crate) mod command;
pub(crate) mod counts;
pub(crate) mod prints;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::time::Duration;

use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Pinned;
use rekindle_wire::frame;
use rekindle_wire::layout::Shared;
use rekindle_wire::standstill::{self, Standstill};

use crate::process::log;

/// The result of every call of an application after its worker has died.
pub(crate) const WORKER_DIED: CUresult = CUDA_ERROR_LAUNCH_FAILED;

/// The memory that this process shares with its worker, and the socket that shows whether the worker is there.
pub(crate) struct Connection {
    pub(crate) shared: Shared,
    socket: UnixStream,
    /// One announcement and its descriptor at a time.
    sending: Mutex<()>,
    /// Set once the worker is found dead; every later call fails.
    gone: AtomicBool,
}

impl Connection {
    pub(crate) fn new(shared: Shared, socket: UnixStream) -> Self {
        Self { shared, socket, sending: Mutex::new(()), gone: AtomicBool::new(false) }
    }

    /// Whether the worker is there. Costs a system call.
    pub(crate) fn is_alive(&self) -> bool {
        if self.is_known_dead() {
            return false;
        }
        if is_open(&self.socket) {
            return true;
        }
        if !self.gone.swap(true, AcqRel) {
            log::error("the worker of this process has died; see the daemon's log. Every CUDA call fails from here on");
        }
        false
    }

    /// Begins a standstill of this process, see [`standstill`]. Waits while a checkpoint is about to stop the process.
    pub(crate) fn standstill(&self) -> Standstill<'_> {
        standstill::begin(&self.shared, || self.is_alive())
    }

    /// Whether the worker was found dead before.
    pub(crate) fn is_known_dead(&self) -> bool {
        self.gone.load(Acquire)
    }

    /// The error of a kernel that has broken this process, for good.
    pub(crate) fn sticky_error(&self) -> Result<(), CUresult> {
        match self.shared.header().sticky.load(Acquire) {
            0 => Ok(()),
            sticky => Err(sticky),
        }
    }

    /// The error of an earlier call that did not wait; it is returned once.
    pub(crate) fn deferred_error(&self) -> Result<(), CUresult> {
        let header = self.shared.header();
        if header.deferred.load(Relaxed) == 0 {
            return Ok(());
        }
        match header.deferred.swap(0, AcqRel) {
            0 => Ok(()),
            deferred => Err(deferred),
        }
    }

    /// Whether callers that do not wait must wait for room before they send more: the worker holds too many commands.
    pub(crate) fn is_under_pressure(&self) -> bool {
        self.shared.header().pressure.load(Relaxed) != 0
    }

    /// How long a waiting caller spins.
    pub(crate) fn spin(&self) -> Duration {
        Duration::from_micros(u64::from(self.shared.header().caller_spin_us.load(Relaxed)))
    }

    /// Sends the memfd of a pinned allocation ahead of its command.
    pub(crate) fn announce_pinned(&self, pinned: Pinned, file: &impl AsRawFd) -> Result<(), CUresult> {
        self.announce(pinned, &[file.as_raw_fd()])
    }

    /// As [`Connection::announce_pinned`]. The memfd of managed memory comes with the process's userfaultfd.
    pub(crate) fn announce(&self, pinned: Pinned, files: &[RawFd]) -> Result<(), CUresult> {
        let _one = self.sending.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        frame::send(&self.socket, &pinned, &[], files).map_err(|_| {
            self.is_alive();
            WORKER_DIED
        })
    }
}

/// Whether the worker still holds the connection's other end.
fn is_open(socket: &UnixStream) -> bool {
    let mut byte = 0_u8;
    // SAFETY: receives at most one byte into the local; MSG_PEEK leaves it queued.
    let got = unsafe { libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
    if got >= 0 {
        return got > 0;
    }
    matches!(io::Error::last_os_error().kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
