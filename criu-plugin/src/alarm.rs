//! CRIU's alarm.

use std::ffi::c_uint;

/// Suspends CRIU's alarm while it lives. CRIU allows ten seconds to freeze the tasks, and the sixth alarm after that ends it;
/// a quiesce has its own limit, in the daemon.
#[derive(Debug)]
pub struct SuspendedAlarm {
    left: c_uint,
}

impl SuspendedAlarm {
    /// Suspends the alarm.
    #[allow(clippy::new_without_default, reason = "it has an effect")]
    pub fn new() -> Self {
        // SAFETY: alarm has no precondition.
        let left = unsafe { libc::alarm(0) };
        Self { left }
    }
}

impl Drop for SuspendedAlarm {
    fn drop(&mut self) {
        if self.left > 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(self.left) };
        }
    }
}
