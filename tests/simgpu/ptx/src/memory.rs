//! The caller's memory, which global and constant accesses reach.

use crate::fault::Fault;

/// A run of mapped bytes in the host's address space.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// The device address of its first byte.
    pub base: u64,
    /// The number of bytes; never zero.
    pub len: u64,
    /// The address of the first byte in this process, aligned as `base` is, modulo 8.
    pub host: *mut u8,
    /// Whether the kernel may write there.
    pub writable: bool,
}

/// Global memory, as a launch sees it. Everything outside the windows of the crate's top goes
/// through it.
///
/// Every access is at most 32 bytes and aligned to its size; loads and stores are relaxed atomic
/// accesses of the host (fenced where PTX asks for it), and atomic instructions are atomic
/// instructions of the host, so memory may be shared with the CPU and with other launches.
///
/// # Safety
///
/// A span that [`resolve`](Memory::resolve) returned must stay readable (writable, if it says so)
/// at `host` until the launch ends, or until the launch next calls
/// [`safe_point`](Memory::safe_point), whatever other threads do.
pub unsafe trait Memory: Sync {
    /// The mapped run that holds `addr`. It need not be the longest one, but an access that reaches
    /// beyond its end is a fault, so it may not end within an allocation. A `write` to memory that
    /// may not be written is a fault of kind [`ReadOnly`](crate::FaultKind::ReadOnly), an address
    /// that is not mapped one of kind [`Unmapped`](crate::FaultKind::Unmapped).
    ///
    /// # Errors
    ///
    /// Nothing that may be accessed so is mapped at `addr`.
    fn resolve(&self, addr: u64, write: bool) -> Result<Span, Fault>;

    /// Called regularly (every few milliseconds) while no pointer into a span is in use. Returns a number; when the number
    /// differs from the last one, earlier spans are forgotten. So memory can be unmapped under a running kernel: an
    /// implementation may, for instance, hold a read lock for the whole launch and release it for a moment here.
    fn safe_point(&self) -> u64 {
        0
    }
}
