//! Device memory that kernels allocate with `malloc`.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

const ALIGN: u64 = 16;

/// A context's heap: one allocation of the size that the limit says, made when a kernel first asks for memory.
#[derive(Debug, Default)]
pub(crate) struct MallocHeap(Mutex<Option<Arena>>);

#[derive(Debug)]
struct Arena {
    base: u64,
    len: u64,
    /// Offset and length of each allocation.
    used: BTreeMap<u64, u64>,
}

impl MallocHeap {
    /// Takes memory for a kernel. `arena` makes the heap's own allocation: its address and size.
    pub(crate) fn take(&self, bytes: u64, arena: impl FnOnce() -> Option<(u64, u64)>) -> Option<u64> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if held.is_none() {
            let (base, len) = arena()?;
            *held = Some(Arena { base, len, used: BTreeMap::new() });
        }
        held.as_mut()?.take(bytes)
    }

    /// Gives memory of a kernel back.
    pub(crate) fn give_back(&self, addr: u64) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(arena) = held.as_mut() {
            arena.used.remove(&addr.wrapping_sub(arena.base));
        }
    }
}

impl Arena {
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let size = bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let mut at = 0;
        for (&offset, &len) in &self.used {
            if offset - at >= size {
                break;
            }
            at = offset + len;
        }
        if self.len.checked_sub(at)? < size {
            return None;
        }
        self.used.insert(at, size);
        Some(self.base + at)
    }
}
