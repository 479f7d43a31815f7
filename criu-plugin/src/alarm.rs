//! CRIU's alarm.

use std::ffi::c_uint;

/// Keeps CRIU's alarm away while it lives. CRIU gives the freezing of the tasks ten seconds, and dies of the sixth alarm
/// after that; a quiesce has its own limit, in the daemon.
#[derive(Debug)]
pub struct AlarmHeld {
    left: c_uint,
}

impl AlarmHeld {
    /// Stops the clock.
    #[allow(clippy::new_without_default, reason = "it has an effect")]
    pub fn new() -> Self {
        // SAFETY: alarm has no precondition.
        let left = unsafe { libc::alarm(0) };
        Self { left }
    }
}

impl Drop for AlarmHeld {
    fn drop(&mut self) {
        if self.left > 0 {
            // SAFETY: as above.
            unsafe { libc::alarm(self.left) };
        }
    }
}
