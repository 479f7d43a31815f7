//! The state on which a running fragment works: its rows, its memory, and the launch.

use super::launch::{GRID_BYTES, Launch};
use super::row::{CONSTANT, Lane, ROW_OFFSET, Row};
use super::space::{Access, LocalMemory, SharedMemory, Spans};
use crate::fault::{Fault, FaultKind};
use crate::{GRID_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};

/// The bits of an address that count bytes within its window.
const WINDOW_OFFSET: u64 = (1 << 40) - 1;

/// The cost of an instruction that may be part of a waiting loop, in instructions. It keeps a thread that waits from
/// delaying the thread that it waits for.
pub(crate) const POLL_COST: i64 = 1024;

/// Whether a warp goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    Next,
    /// The reason is in [`Core::fault`].
    Fault,
}

/// The state of the fragment that runs.
pub(crate) struct Core<'l> {
    pub(crate) launch: &'l Launch<'l>,
    /// The first words of the regions of [`Row`]: frame, constants, special registers.
    pub(crate) regions: [*mut u32; 4],
    /// The lanes that execute the current instruction.
    pub(crate) active: u32,
    pub(crate) shared: SharedMemory,
    pub(crate) local: LocalMemory,
    /// The number of instructions that may still run before others get their turn.
    pub(crate) budget: i64,
    /// The number of instructions so far that look like waiting.
    pub(crate) polls: u64,
    /// The last fault, and its lane.
    pub(crate) fault: Option<(Fault, usize)>,
    spans: Spans,
}

impl<'l> Core<'l> {
    pub(crate) fn new(launch: &'l Launch<'l>) -> Self {
        let constants = launch.constants.as_ptr().cast::<u32>().cast_mut();
        let none = std::ptr::null_mut();
        Core {
            launch,
            regions: [none, constants, none, none],
            active: 0,
            shared: SharedMemory::NONE,
            local: LocalMemory::NONE,
            budget: 0,
            polls: 0,
            fault: None,
            spans: Spans::new(launch.memory.safe_point()),
        }
    }

    /// The first word of a row.
    #[inline(always)]
    pub(crate) fn row(&self, row: Row) -> *mut u32 {
        debug_assert!(row & CONSTANT == 0 || row & (CONSTANT << 1) == 0);
        let region = self.regions[(row >> 30) as usize];
        region.wrapping_add((row & ROW_OFFSET) as usize)
    }

    /// One lane of a row.
    #[inline(always)]
    pub(crate) fn get<T: Lane>(&self, row: Row, lane: usize) -> T {
        // SAFETY: linking gave every operand a row of the width its instruction asks for, within
        // the frame, which `Warp` keeps large enough.
        unsafe { T::get(self.row(row), lane) }
    }

    /// Sets one lane of a row.
    #[inline(always)]
    pub(crate) fn put<T: Lane>(&mut self, row: Row, lane: usize, value: T) {
        // SAFETY: as for `get`; destinations are always rows of the frame.
        unsafe { T::put(self.row(row), lane, value) }
    }

    /// The lanes for which a predicate is true.
    #[inline(always)]
    pub(crate) fn predicate(&self, row: Row) -> u32 {
        // SAFETY: a predicate's row is one word.
        unsafe { *self.row(row) }
    }

    /// Sets a predicate for the active lanes.
    #[inline(always)]
    pub(crate) fn set_predicate(&mut self, row: Row, lanes: u32) {
        let row = self.row(row);
        // SAFETY: a predicate's row is one word.
        unsafe { *row = (*row & !self.active) | (lanes & self.active) }
    }

    /// Lets the memory change. No pointer into a span may be in use.
    pub(crate) fn safe_point(&mut self) {
        self.spans.renew(self.launch.memory.safe_point());
    }

    /// Counts an instruction that may belong to a loop that waits for another thread.
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
        let found = match access {
            Access::Generic => self.spans.pointer(addr, len, write),
            Access::Shared => self.shared.pointer(addr, len),
            Access::Local => self.local.pointer(addr, len, lane),
        };
        if found.is_some() { found } else { self.elsewhere(access, addr, len, write, lane) }
    }

    /// Resolves an address that no span at hand covers, or that is beyond the block's shared memory or the lane's stack.
    #[inline(never)]
    fn elsewhere(&mut self, access: Access, addr: u64, len: u64, write: bool, lane: usize) -> Option<*mut u8> {
        let found = match access {
            Access::Generic => return self.generic(addr, len, write, lane),
            Access::Shared => self.shared.pointer_to_another(addr, len),
            Access::Local => None,
        };
        if found.is_none() {
            self.fail(FaultKind::Unmapped, addr, lane);
        }
        found
    }

    /// Resolves an address in no span at hand: an address in a window, or in memory that was not resolved yet.
    fn generic(&mut self, addr: u64, len: u64, write: bool, lane: usize) -> Option<*mut u8> {
        if addr < SHARED_WINDOW {
            return self.global(addr, len, write, lane);
        }
        let offset = addr & WINDOW_OFFSET;
        let found = match addr - offset {
            // A fault in shared or local memory names the offset there.
            SHARED_WINDOW => return self.pointer(Access::Shared, offset, len, write, lane),
            LOCAL_WINDOW => return self.pointer(Access::Local, offset, len, write, lane),
            PARAM_WINDOW if !write => {
                let params = self.launch.params;
                let inside = offset < params.len() as u64 && params.len() as u64 - offset >= len;
                inside.then(|| params.as_ptr().wrapping_add(offset as usize).cast_mut())
            }
            GRID_WINDOW if offset < GRID_BYTES && GRID_BYTES - offset >= len => {
                Some(self.launch.grid_words.cast::<u8>().wrapping_add(offset as usize))
            }
            _ => None,
        };
        if found.is_none() {
            self.fail(FaultKind::Unmapped, addr, lane);
        }
        found
    }

    /// An address of the caller's memory.
    fn global(&mut self, addr: u64, len: u64, write: bool, lane: usize) -> Option<*mut u8> {
        match self.launch.memory.resolve(addr, write) {
            Ok(span) => {
                let offset = addr.wrapping_sub(span.base);
                if offset >= span.len || span.len - offset < len || (write && !span.writable) {
                    self.fail(FaultKind::Unmapped, addr, lane);
                    return None;
                }
                self.spans.keep(span);
                Some(span.host.wrapping_add(offset as usize))
            }
            Err(fault) => {
                self.fault = Some((fault, lane));
                None
            }
        }
    }
}
