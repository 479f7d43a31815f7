//! Device memory that kernels allocate with `malloc`.
//!
//! As on a GPU, all that is known about a heap lies in the heap: whoever copies its bytes copies the heap. It is a sequence of blocks,
//! each with a header of two words: the block's length, with the header, and whether it is in use. The word 0 begins a heap that nobody
//! has used. Memory is taken from the end of the last free block that has room.

use std::sync::{Mutex, PoisonError};

/// Bytes of a block's header. Blocks begin and end at multiples of this.
const HEADER: u64 = 16;

/// A context's heap: one allocation of the size that the limit says, made when a kernel first asks for memory.
#[derive(Debug, Default)]
pub(crate) struct MallocHeap(Mutex<Option<Arena>>);

/// A heap's address and its length.
#[derive(Clone, Copy, Debug)]
struct Arena {
    base: u64,
    len: u64,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    at: u64,
    len: u64,
    used: bool,
}

impl MallocHeap {
    /// Takes memory for a kernel. `arena` makes the heap's own allocation, of zeros, and returns its address and size.
    pub(crate) fn take(&self, bytes: u64, arena: impl FnOnce() -> Option<(u64, u64)>) -> Option<u64> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if held.is_none() {
            let (base, len) = arena()?;
            *held = Some(Arena { base, len: len / HEADER * HEADER });
        }
        (*held)?.take(bytes)
    }

    /// Whether a kernel has asked for memory. The heap has its size for good then.
    pub(crate) fn is_made(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Gives memory of a kernel back.
    pub(crate) fn give_back(&self, addr: u64) {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(arena) = *held {
            arena.give_back(addr);
        }
    }
}

impl Arena {
    fn take(self, bytes: u64) -> Option<u64> {
        let len = bytes.max(1).checked_next_multiple_of(HEADER)?.checked_add(HEADER)?;
        let last = self.blocks().filter(|it| !it.used && it.len >= len).last()?;
        // What is left is too small for anything if it is a header alone, and is free all the same.
        let at = last.at + last.len - len;
        if at > last.at {
            self.write(Block { at: last.at, len: last.len - len, used: false });
        }
        self.write(Block { at, len, used: true });
        Some(at + HEADER)
    }

    fn give_back(self, addr: u64) {
        let found = self.blocks().find(|it| it.used && it.at + HEADER == addr);
        if let Some(block) = found {
            self.write(Block { used: false, ..block });
        }
    }

    /// The blocks, of which free ones side by side count as one. A heap whose headers a kernel has overwritten ends there.
    fn blocks(self) -> impl Iterator<Item = Block> {
        let end = self.base + self.len;
        let mut at = self.base;
        std::iter::from_fn(move || {
            let mut block = self.read(at)?;
            let mut next = at + block.len;
            while !block.used && next < end {
                let Some(behind) = self.read(next).filter(|it| !it.used) else { break };
                block.len += behind.len;
                next += behind.len;
            }
            at = next;
            Some(block)
        })
    }

    fn read(self, at: u64) -> Option<Block> {
        let end = self.base + self.len;
        if at >= end {
            return None;
        }
        // SAFETY: both words lie in the heap, which is mapped for as long as the context is there. Kernels may write there at the same
        // time, which are as careless on a GPU.
        let [len, used] = unsafe { (at as *const [u64; 2]).read_volatile() };
        if at == self.base && len == 0 {
            return Some(Block { at, len: self.len, used: false });
        }
        let is_block = len >= HEADER && len.is_multiple_of(HEADER) && len <= end - at;
        is_block.then_some(Block { at, len, used: used != 0 })
    }

    fn write(self, block: Block) {
        // SAFETY: as in `read`.
        unsafe { (block.at as *mut [u64; 2]).write_volatile([block.len, u64::from(block.used)]) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heap_gives_what_it_has_and_takes_it_back_and_its_bytes_are_all_that_it_knows() {
        let mut memory = vec![0_u128; 64];
        let base = memory.as_mut_ptr() as u64;
        let heap = MallocHeap::default();
        let take = |bytes| heap.take(bytes, || Some((base, 1024)));
        assert!(!heap.is_made());
        let all: Vec<_> = std::iter::from_fn(|| take(100)).collect();
        assert!(heap.is_made() && all.len() == 8);
        assert!(all.is_sorted_by(|a, b| *a == b + 128), "from the end");
        all[2..5].iter().for_each(|it| heap.give_back(*it));
        heap.give_back(base + 3);
        let saved = memory.clone();
        assert_eq!((take(3 * 128 - 16), take(1)), (Some(all[4]), None), "what is free lies side by side");
        memory.copy_from_slice(&saved);
        assert_eq!((take(200), take(100), take(1)), (Some(all[2] - 96), Some(all[4] + 32), Some(all[4])));
        assert_eq!(take(1), None);
    }
}
