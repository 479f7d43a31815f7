//! Managed memory: where allocations lie, and what the program has said of them.
//!
//! ```text
//!   area   one memfd, mapped here and in the worker        [ a | b | free | c | free ... ]
//!          small allocations share areas of 2 MiB; a large one has an area of its own
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rekindle_cuda_abi::managed::Managed;
use rekindle_cuda_abi::types::*;
use rekindle_wire::control::Request;
use rekindle_wire::descriptor;
use rekindle_wire::free_ranges::FreeRanges;
use rekindle_wire::layout::USERFAULT_NAME;
use rekindle_wire::userfault::Userfault;

use crate::connection::ask;
use crate::process::log;
use crate::process::memfd::{map_shared, sealed_memfd};

/// The environment variable by which a user keeps managed memory in host memory: `host`.
const MANAGED: &str = "REKINDLE_MANAGED";

/// The size of an area that allocations share.
const SHARED: u64 = 2 << 20;
/// Larger allocations have areas of their own.
const LARGEST_SHARED: u64 = SHARED / 2;
/// The driver aligns managed memory so.
const ALIGNMENT: u64 = 512;

/// Memory that one or more allocations lie in.
#[derive(Debug)]
struct Area {
    /// Whether small allocations may lie in it, one beside the other.
    is_shared: bool,
    size: u64,
    context: CUcontext,
    free: FreeRanges,
}

/// What becomes of the area of an allocation that is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    /// Other allocations lie in it.
    Kept,
    /// Nothing lies in this area any more.
    Area { base: u64, size: u64 },
}

/// All managed memory of the process.
#[derive(Debug, Default)]
pub(crate) struct ManagedMemory {
    /// The allocations, and what the program has advised.
    pub(crate) said: Managed,
    areas: Mutex<BTreeMap<u64, Area>>,
    /// By what the worker learns of the process's use of pages, where the kernel permits it. It is made once.
    userfault: OnceLock<Option<OwnedFd>>,
}

/// Maps a page of a memfd whose name says that this process has a userfaultfd for managed memory. A forked child has neither.
fn mark() -> io::Result<()> {
    const PAGE: usize = 4096;
    let file = sealed_memfd(USERFAULT_NAME, PAGE)?;
    let at = map_shared(&file, std::ptr::null_mut(), PAGE, 0)?;
    // SAFETY: mapped just now.
    match unsafe { libc::madvise(at.cast(), PAGE, libc::MADV_DONTFORK) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl ManagedMemory {
    /// The process's userfaultfd, if managed memory may move: the kernel allows it, and the user has not chosen host memory.
    pub(crate) fn userfault(&self) -> Option<&OwnedFd> {
        let made = self.userfault.get_or_init(|| {
            if std::env::var_os(MANAGED).is_some_and(|it| it == "host") {
                return None;
            }
            // The process keeps it: as long as it is open, no page that is missing turns into zeros, whatever happens to the worker.
            // A mapping says so to whoever finds the descriptor.
            let made = Userfault::new().or_else(|why| match ask::for_file(&Request::Userfaultfd) {
                Some(device) => Userfault::by_device(&device),
                None => Err(why),
            });
            let made = made.and_then(|it| descriptor::above_standard(it.into()));
            let made = made.and_then(|it| mark().map(|()| it));
            made.inspect_err(|why| log::note(&format!("managed memory stays in host memory: {why}"))).ok()
        });
        made.as_ref()
    }

    /// In a forked child, which has no CUDA: closes the child's copy of the userfaultfd, which is about the parent's memory.
    pub(crate) fn close_in_child(&self) {
        if let Some(Some(userfault)) = self.userfault.get() {
            // SAFETY: the child uses it no more; the parent keeps its own.
            unsafe { libc::close(userfault.as_raw_fd()) };
        }
    }

    fn areas(&self) -> MutexGuard<'_, BTreeMap<u64, Area>> {
        // Each change leaves the areas valid.
        self.areas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many areas there are.
    pub(crate) fn areas_there(&self) -> usize {
        self.areas().len()
    }

    /// The size of the area that an allocation needs where no other has room for it; none where there is no such size.
    pub(crate) fn area_for(bytes: u64) -> Option<u64> {
        if bytes <= LARGEST_SHARED { Some(SHARED) } else { bytes.checked_next_multiple_of(ALIGNMENT) }
    }

    /// A place in an area of this context that has room.
    pub(crate) fn take(&self, context: CUcontext, bytes: u64) -> Option<u64> {
        if bytes > LARGEST_SHARED {
            return None;
        }
        let length = bytes.next_multiple_of(ALIGNMENT);
        let mut areas = self.areas();
        let shared = areas.values_mut().filter(|it| it.context == context && it.is_shared);
        let base = shared.into_iter().find_map(|it| it.free.take(length))?;
        self.said.add(base..base + bytes);
        Some(base)
    }

    /// Adds an area, with an allocation at its beginning.
    pub(crate) fn add(&self, context: CUcontext, base: u64, size: u64, bytes: u64) {
        let mut free = FreeRanges::all(base..base + size);
        free.take_at(base, bytes.next_multiple_of(ALIGNMENT).min(size));
        let is_shared = bytes <= LARGEST_SHARED;
        self.areas().insert(base, Area { is_shared, size, context, free });
        self.said.add(base..base + bytes);
    }

    /// The context of the allocation that begins at an address; none if none does.
    pub(crate) fn context(&self, base: u64) -> Option<CUcontext> {
        self.said.at(base).filter(|range| range.start == base)?;
        let areas = self.areas();
        let (&at, area) = areas.range(..=base).next_back()?;
        // Variables lie in no area.
        (base < at + area.size).then_some(area.context)
    }

    /// Frees the allocation that begins at an address. Nothing uses it any more.
    pub(crate) fn give(&self, base: u64) -> Option<Freed> {
        let range = self.said.at(base).filter(|range| range.start == base)?;
        let mut areas = self.areas();
        let (&at, area) = areas.range_mut(..=base).next_back().filter(|(at, area)| base < **at + area.size)?;
        self.said.remove(base);
        let length = (range.end - range.start).next_multiple_of(ALIGNMENT).min(at + area.size - base);
        area.free.give(base, length);
        let size = area.size;
        if area.free.total() < size {
            return Some(Freed::Kept);
        }
        areas.remove(&at);
        Some(Freed::Area { base: at, size })
    }

    /// Forgets all memory of a context, and returns the areas, each with its size.
    pub(crate) fn forget_context(&self, context: CUcontext) -> Vec<(u64, u64)> {
        let mut areas = self.areas();
        let gone = areas.iter().filter(|(_, area)| area.context == context);
        let gone: Vec<_> = gone.map(|(base, area)| (*base, area.size)).collect();
        areas.retain(|_, area| area.context != context);
        gone.iter().for_each(|(base, size)| self.said.remove_all(*base..base + size));
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AREA: u64 = 0x4000_0000;

    #[test]
    fn small_allocations_share_an_area_until_the_last_is_freed() {
        let memory = ManagedMemory::default();
        assert_eq!((memory.take(1, 100), ManagedMemory::area_for(100)), (None, Some(SHARED)));
        memory.add(1, AREA, SHARED, 100);
        let second = memory.take(1, 700).unwrap();
        assert_eq!((second, memory.take(2, 1)), (AREA + 512, None));
        assert_eq!(memory.take(1, 1), Some(AREA + 512 + 1024));
        assert_eq!((memory.context(second), memory.context(second + 1)), (Some(1), None));
        assert_eq!(memory.give(second + 512), None);
        assert_eq!(memory.give(second), Some(Freed::Kept));
        assert_eq!(memory.give(second), None);
        assert_eq!(memory.take(1, 512), Some(second));
        for base in [AREA, AREA + 512 + 1024] {
            assert_eq!(memory.give(base), Some(Freed::Kept));
        }
        assert_eq!(memory.give(second), Some(Freed::Area { base: AREA, size: SHARED }));
        assert_eq!(memory.take(1, 1), None);
    }

    #[test]
    fn a_large_allocation_has_an_area_of_its_own() {
        let memory = ManagedMemory::default();
        let bytes = LARGEST_SHARED + 1;
        let size = ManagedMemory::area_for(bytes).unwrap();
        assert_eq!(size, LARGEST_SHARED + ALIGNMENT);
        assert_eq!(ManagedMemory::area_for(u64::MAX), None);
        memory.add(1, AREA, size, bytes);
        assert_eq!(memory.take(1, 1), None);
        assert_eq!(memory.said.at(AREA + bytes - 1), Some(AREA..AREA + bytes));
        assert_eq!(memory.give(AREA), Some(Freed::Area { base: AREA, size }));
    }

    #[test]
    fn a_context_takes_its_memory_along() {
        let memory = ManagedMemory::default();
        memory.add(1, AREA, SHARED, 8);
        memory.add(2, AREA + SHARED, SHARED, 8);
        assert_eq!(memory.forget_context(1), [(AREA, SHARED)]);
        assert_eq!((memory.said.at(AREA), memory.context(AREA + SHARED)), (None, Some(2)));
    }
}
