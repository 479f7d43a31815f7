//! The memory that a running fragment accesses: shared, local, and the recently used runs of global memory.

use std::rc::Rc;

use super::cluster::Cluster;
use super::row::LANES;
use crate::memory::Span;

/// The space that the addresses of an access belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Access {
    Generic,
    Shared,
    Local,
}

/// The shared memory of the block that runs, and that of the other blocks of its cluster.
pub(crate) struct SharedMemory {
    start: *mut u8,
    len: u64,
    cluster: Option<Rc<Cluster>>,
}

impl SharedMemory {
    /// No shared memory: no block runs.
    pub(crate) const NONE: SharedMemory = SharedMemory { start: std::ptr::null_mut(), len: 0, cluster: None };

    /// The memory of `len` bytes of a block.
    pub(crate) fn new(start: *mut u8, len: u64, cluster: Option<Rc<Cluster>>) -> Self {
        SharedMemory { start, len, cluster }
    }

    /// The cluster of the block.
    pub(crate) fn cluster(&self) -> Option<&Cluster> {
        self.cluster.as_deref()
    }

    /// The host's address of `len` bytes of the block, if all of them are there.
    #[inline(always)]
    pub(super) fn pointer(&self, addr: u64, len: u64) -> Option<*mut u8> {
        if addr < self.len && self.len - addr >= len {
            return Some(self.start.wrapping_add(addr as usize));
        }
        None
    }

    /// The host's address of `len` bytes of another block of the cluster, if all of them are there.
    pub(super) fn pointer_to_another(&self, addr: u64, len: u64) -> Option<*mut u8> {
        self.cluster.as_ref()?.pointer(addr, len)
    }
}

/// The stacks of the lanes of the warp that runs, one after the other.
pub(crate) struct LocalMemory {
    /// The stack of lane 0.
    pub(crate) start: *mut u8,
    /// The bytes of each stack.
    pub(crate) stride: u64,
    /// The offset of the running function's variables on a stack.
    pub(crate) frame: u64,
}

impl LocalMemory {
    /// No stacks: no warp runs.
    pub(crate) const NONE: LocalMemory = LocalMemory { start: std::ptr::null_mut(), stride: 0, frame: 0 };

    /// The host's address of `len` bytes on a lane's stack, if all of them are there.
    #[inline(always)]
    pub(super) fn pointer(&self, addr: u64, len: u64, lane: usize) -> Option<*mut u8> {
        debug_assert!(lane < LANES);
        if addr < self.stride && self.stride - addr >= len {
            let offset = lane as u64 * self.stride + addr;
            return Some(self.start.wrapping_add(offset as usize));
        }
        None
    }
}

/// The number of spans that are kept at hand.
const SPANS: usize = 4;

/// The spans of global memory that were resolved last.
pub(super) struct Spans {
    spans: [Span; SPANS],
    /// The span that is replaced next.
    next: usize,
    /// The number that the memory's last safe point returned.
    epoch: u64,
}

const NO_SPAN: Span = Span { base: 0, len: 0, host: std::ptr::null_mut(), writable: false };

impl Spans {
    /// No spans yet.
    pub(super) fn new(epoch: u64) -> Self {
        Spans { spans: [NO_SPAN; SPANS], next: 0, epoch }
    }

    /// The host's address of `len` bytes that lie in a span at hand.
    #[inline(always)]
    pub(super) fn pointer(&self, addr: u64, len: u64, write: bool) -> Option<*mut u8> {
        for span in &self.spans {
            let offset = addr.wrapping_sub(span.base);
            if offset < span.len && span.len - offset >= len && (span.writable || !write) {
                return Some(span.host.wrapping_add(offset as usize));
            }
        }
        None
    }

    /// Keeps a span at hand.
    pub(super) fn keep(&mut self, span: Span) {
        self.spans[self.next] = span;
        self.next = (self.next + 1) % SPANS;
    }

    /// Forgets the spans if the memory has changed since they were resolved.
    pub(super) fn renew(&mut self, epoch: u64) {
        if epoch != self.epoch {
            self.epoch = epoch;
            self.spans = [NO_SPAN; SPANS];
        }
    }
}
