//! Device memory that kernels allocate with `malloc`.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use rekindle_ptx::Heap;

use crate::context::Context;
use crate::memory::space::Kind;

/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
const LIMIT: u32 = 2;

const ALIGN: u64 = 16;

/// A context's heap: one allocation of the size that the limit says, made when a kernel first asks for memory.
#[derive(Debug, Default)]
pub(crate) struct MallocHeap(Mutex<Option<Arena>>);

#[derive(Debug)]
struct Arena {
    base: u64,
    len: u64,
    /// Offset and length of what is taken.
    used: BTreeMap<u64, u64>,
}

impl Heap for Context {
    fn malloc(&self, bytes: u64) -> Option<u64> {
        let mut arena = self.malloc.0.lock().unwrap_or_else(PoisonError::into_inner);
        if arena.is_none() {
            let len = self.limit(LIMIT).ok()? as u64;
            let base = self.device.internal.allocate(self.device, self.handle, Kind::Internal, len).ok()?;
            *arena = Some(Arena { base, len, used: BTreeMap::new() });
        }
        arena.as_mut()?.take(bytes)
    }

    fn free(&self, addr: u64) {
        let mut arena = self.malloc.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(arena) = arena.as_mut() {
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
