//! The types that the shared memory is made of: the processor's atomics, or those of the model checker.

#[cfg(feature = "model")]
pub(crate) use loom::cell::UnsafeCell as Cell;
#[cfg(feature = "model")]
pub(crate) use loom::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, fence};
#[cfg(not(feature = "model"))]
pub(crate) use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, fence};

/// Memory that one side hands to the other by an atomic beside it. The model checker's has these functions too, and
/// notices where both sides use it at once.
#[cfg(not(feature = "model"))]
#[repr(transparent)]
#[derive(Debug)]
pub struct Cell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(feature = "model"))]
impl<T> Cell<T> {
    /// Gives the content to read.
    #[inline]
    pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
        f(self.0.get())
    }

    /// Gives the content to write.
    #[inline]
    pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
        f(self.0.get())
    }
}
