//! What a running fragment works on: its rows, its block's shared memory, its stack, and the
//! launch.

use std::rc::Rc;

use super::cluster::Cluster;
use super::{CONSTANT, Flow, LANES, ROW_OFFSET, Row};
use crate::fault::{Fault, FaultKind};
use crate::launch::Env;
use crate::memory::{Memory, Span};
use crate::program::Program;
use crate::{GRID_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};

/// What a launch is, for every thread of it.
pub(crate) struct Launch<'l> {
    pub(crate) program: &'l Program,
    pub(crate) memory: &'l dyn Memory,
    pub(crate) env: &'l Env<'l>,
    pub(crate) params: &'l [u8],
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) cluster: [u32; 3],
    pub(crate) dynamic_shared: u32,
    pub(crate) shared_bytes: u32,
    /// The words behind [`GRID_WINDOW`]: a size, and the barrier.
    pub(crate) grid_words: *mut u64,
}

/// How many bytes lie behind [`GRID_WINDOW`].
pub(crate) const GRID_BYTES: u64 = 64;

/// The bits of an address that count bytes within its window.
const WINDOW_OFFSET: u64 = (1 << 40) - 1;

/// Which space the addresses of an access belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Access {
    Generic,
    Shared,
    Local,
}

/// What an instruction that may be part of waiting costs, in instructions: waiting should not keep
/// from running what is waited for.
pub(crate) const POLL_COST: i64 = 1024;

/// How many spans are kept at hand.
const SPANS: usize = 4;

/// The state of the fragment that runs.
pub(crate) struct Core<'l> {
    pub(crate) launch: &'l Launch<'l>,
    /// The first words of the regions of [`Row`]: frame, constants, special registers.
    pub(crate) regions: [*mut u32; 4],
    /// The lanes that execute the current instruction.
    pub(crate) active: u32,
    pub(crate) shared: *mut u8,
    pub(crate) shared_len: u64,
    /// The cluster of the block that runs.
    pub(crate) cluster: Option<Rc<Cluster>>,
    /// The stack of lane 0; the others follow `stack_stride` bytes apart.
    pub(crate) stack: *mut u8,
    pub(crate) stack_stride: u64,
    /// Where the running function's variables begin on the stack.
    pub(crate) frame: u64,
    /// How many more instructions may run before others get their turn.
    pub(crate) budget: i64,
    /// Instructions executed so far that look like waiting.
    pub(crate) polls: u64,
    pub(crate) fault: Option<(Fault, usize)>,
    /// The last access faulted at this lane.
    spans: [Span; SPANS],
    next_span: usize,
    epoch: u64,
}

const NO_SPAN: Span = Span { base: 0, len: 0, host: std::ptr::null_mut(), writable: false };

impl<'l> Core<'l> {
    pub(crate) fn new(launch: &'l Launch<'l>) -> Self {
        let constants = launch.program.constants.as_ptr().cast::<u32>().cast_mut();
        let none = std::ptr::null_mut();
        Core {
            launch,
            regions: [none, constants, none, none],
            active: 0,
            shared: none.cast(),
            shared_len: 0,
            cluster: None,
            stack: none.cast(),
            stack_stride: 0,
            frame: 0,
            budget: 0,
            polls: 0,
            fault: None,
            spans: [NO_SPAN; SPANS],
            next_span: 0,
            epoch: launch.memory.safe_point(),
        }
    }

    /// The first word of a row.
    #[inline(always)]
    pub(crate) fn row(&self, row: Row) -> *mut u32 {
        debug_assert!(row & CONSTANT == 0 || row & (CONSTANT << 1) == 0);
        let region = self.regions[(row >> 30) as usize];
        region.wrapping_add((row & ROW_OFFSET) as usize)
    }

    /// Lets the memory change. No pointer into a span may be in use.
    pub(crate) fn safe_point(&mut self) {
        let epoch = self.launch.memory.safe_point();
        if epoch != self.epoch {
            self.epoch = epoch;
            self.spans = [NO_SPAN; SPANS];
        }
    }

    /// An instruction that may be one of a loop that waits for somebody else.
    #[inline]
    pub(crate) fn poll(&mut self) {
        self.polls += 1;
        self.budget -= POLL_COST;
    }

    #[cold]
    pub(crate) fn fail(&mut self, kind: FaultKind, addr: u64, lane: usize) -> Flow {
        self.fault = Some((Fault { kind, addr }, lane));
        Flow::Fault
    }

    /// The host's address of `len` bytes (a power of two) that a lane accesses; none after a fault.
    #[inline(always)]
    pub(crate) fn pointer(&mut self, access: Access, addr: u64, len: u64, write: bool, lane: usize) -> Option<*mut u8> {
        if addr & (len - 1) != 0 {
            self.fail(FaultKind::Misaligned, addr, lane);
            return None;
        }
        match access {
            Access::Generic => {
                for span in &self.spans {
                    let offset = addr.wrapping_sub(span.base);
                    if offset < span.len && span.len - offset >= len && (span.writable || !write) {
                        return Some(span.host.wrapping_add(offset as usize));
                    }
                }
                self.generic(addr, len, write, lane)
            }
            Access::Shared => self.shared_pointer(addr, len, lane),
            Access::Local => self.local_pointer(addr, len, lane),
        }
    }

    #[inline(always)]
    fn shared_pointer(&mut self, addr: u64, len: u64, lane: usize) -> Option<*mut u8> {
        if addr < self.shared_len && self.shared_len - addr >= len {
            return Some(self.shared.wrapping_add(addr as usize));
        }
        self.shared_of_another(addr, len, lane)
    }

    #[cold]
    fn shared_of_another(&mut self, addr: u64, len: u64, lane: usize) -> Option<*mut u8> {
        let found = self.cluster.as_ref().and_then(|it| it.pointer(addr, len));
        if found.is_none() {
            self.fail(FaultKind::Unmapped, addr, lane);
        }
        found
    }

    #[inline(always)]
    fn local_pointer(&mut self, addr: u64, len: u64, lane: usize) -> Option<*mut u8> {
        debug_assert!(lane < LANES);
        if addr < self.stack_stride && self.stack_stride - addr >= len {
            let offset = lane as u64 * self.stack_stride + addr;
            return Some(self.stack.wrapping_add(offset as usize));
        }
        self.fail(FaultKind::Unmapped, addr, lane);
        None
    }

    /// An address in no span at hand: one of a window, or of memory not yet asked for.
    #[inline(never)]
    fn generic(&mut self, addr: u64, len: u64, write: bool, lane: usize) -> Option<*mut u8> {
        if addr >= SHARED_WINDOW {
            let offset = addr & WINDOW_OFFSET;
            match addr - offset {
                SHARED_WINDOW => return self.shared_pointer(offset, len, lane),
                LOCAL_WINDOW => return self.local_pointer(offset, len, lane),
                PARAM_WINDOW if !write => {
                    let params = self.launch.params;
                    if offset < params.len() as u64 && params.len() as u64 - offset >= len {
                        return Some(params.as_ptr().wrapping_add(offset as usize).cast_mut());
                    }
                }
                GRID_WINDOW if offset < GRID_BYTES && GRID_BYTES - offset >= len => {
                    let words = self.launch.grid_words.cast::<u8>();
                    return Some(words.wrapping_add(offset as usize));
                }
                _ => {}
            }
            self.fail(FaultKind::Unmapped, addr, lane);
            return None;
        }
        match self.launch.memory.resolve(addr, write) {
            Ok(span) => {
                let offset = addr.wrapping_sub(span.base);
                if offset >= span.len || span.len - offset < len || (write && !span.writable) {
                    self.fail(FaultKind::Unmapped, addr, lane);
                    return None;
                }
                self.spans[self.next_span] = span;
                self.next_span = (self.next_span + 1) % SPANS;
                Some(span.host.wrapping_add(offset as usize))
            }
            Err(fault) => {
                self.fault = Some((fault, lane));
                None
            }
        }
    }
}
