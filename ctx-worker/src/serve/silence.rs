//! How a quiesced worker notices that its daemon is stopped or hangs: no message arrives any more. The worker then gives up the
//! save and opens its ring, so that the application continues. A daemon that wakes up later notices this.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The variable in which the daemon states how long it may be silent, in milliseconds.
const VARIABLE: &str = "REKINDLE_SILENCE_MS";
const DEFAULT: Duration = Duration::from_secs(30);
/// How often a quiesced worker checks.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// When the worker last heard from the daemon.
#[derive(Debug)]
pub(crate) struct Silence {
    limit: Duration,
    began: Instant,
    /// Milliseconds from `began`.
    heard: AtomicU64,
    /// Only a quiesced worker depends on the daemon.
    listening: AtomicBool,
}

impl Silence {
    /// Reads the limit from the environment.
    pub(crate) fn new() -> Self {
        let told = std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok());
        Self::with_limit(told.map_or(DEFAULT, Duration::from_millis))
    }

    fn with_limit(limit: Duration) -> Self {
        Self { limit, began: Instant::now(), heard: AtomicU64::new(0), listening: AtomicBool::new(false) }
    }

    /// Called when a message arrives.
    pub(crate) fn heard(&self) {
        self.heard.store(self.now(), Ordering::Release);
    }

    /// Sets whether the daemon's silence counts from now on.
    pub(crate) fn listen(&self, listening: bool) {
        self.heard();
        self.listening.store(listening, Ordering::Release);
    }

    /// Whether the daemon has been silent for too long.
    pub(crate) fn is_too_long(&self) -> bool {
        let silent = self.now().saturating_sub(self.heard.load(Ordering::Acquire));
        self.listening.load(Ordering::Acquire) && u128::from(silent) > self.limit.as_millis()
    }

    /// Waits until there is data to read, or the daemon was silent for too long: then returns `false`. While silence does not
    /// count, waits for data without a limit.
    pub(crate) fn wait_readable(&self, socket: &UnixStream) -> bool {
        loop {
            let listening = self.listening.load(Ordering::Acquire);
            let timeout = if listening { POLL_INTERVAL.as_millis() as i32 } else { -1 };
            let mut entry = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry, a local.
            let ready = unsafe { libc::poll(&raw mut entry, 1, timeout) };
            // An error shows at the following read.
            if ready > 0 || ready < 0 && std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
                return true;
            }
            if self.is_too_long() {
                return false;
            }
        }
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_listens_finds_a_silence_too_long() {
        let silence = Silence::with_limit(Duration::ZERO);
        std::thread::sleep(Duration::from_millis(5));
        assert!(!silence.is_too_long());
        silence.listen(true);
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!silence.wait_readable(&ours));
        assert!(silence.is_too_long());
        drop(theirs);
        assert!(silence.wait_readable(&ours));
        silence.listen(false);
        assert!(!silence.is_too_long());
    }
}
