//! Device memory that is allocated by the byte: `cuMemAlloc`, stream-ordered allocation, module globals.
//!
//! As in the real driver, memory comes in blocks of 2 MiB; small allocations share one. Addresses are deterministic:
//! the same calls in the same order give the same addresses in every process, as long as they are free there.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY, MEMORY_GRANULARITY};

use super::account::Account;
use super::pages;
use super::space::{self, Kind, Region};
use crate::fault;
use crate::status::{Result, ensure};

/// The size of a block, which small allocations share.
const BLOCK: u64 = MEMORY_GRANULARITY;

/// The alignment of allocations.
const ALIGN: u64 = 512;

/// The system's pages.
const PAGE: u64 = 4096;

/// Allocations of this size and more get blocks of their own.
const LARGE: u64 = BLOCK / 2;

/// A heap of one device in a window of addresses of its own.
#[derive(Debug)]
pub(crate) struct Heap {
    window: u64,
    /// The file behind the heap's memory, so that other processes can map it: each address lies at its offset in the window.
    file: OnceLock<Option<OwnedFd>>,
    state: Mutex<State>,
}

/// A block's content, while the process has no device.
pub(crate) struct Saved {
    window: u64,
    offset: u64,
    charge: u64,
    content: Vec<u8>,
}

/// The place of an allocation's block.
pub(crate) struct Place {
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// The descriptor of the file in this process.
    pub(crate) file: i32,
    pub(crate) offset: u64,
}

#[derive(Debug, Default)]
struct State {
    /// Mapped blocks, by their offset in the window.
    blocks: BTreeMap<u64, Block>,
}

#[derive(Debug)]
struct Block {
    len: u64,
    /// The allocations in the block, offset to length; empty for a block whose addresses another part of the process has taken.
    used: BTreeMap<u64, u64>,
    /// The context whose code shares the block, or 0 for programs' allocations; none for a block of one large allocation.
    shared: Option<u64>,
}

impl Block {
    /// The bytes of a block that the device counts. A real context has room for code from its start on.
    fn charge(len: u64, shared: Option<u64>) -> u64 {
        if shared.is_some_and(|context| context != 0) { 0 } else { len }
    }
}

/// How many bytes of addresses a heap has.
pub(crate) const WINDOW: u64 = 1 << 40;

impl Heap {
    /// A heap whose addresses begin at `window`.
    pub(crate) fn new(window: u64) -> Self {
        Self { window, file: OnceLock::new(), state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes memory of the device. Only the device has access; contexts of peers give them access.
    pub(crate) fn allocate(&self, account: &Account, context: u64, kind: Kind, len: u64) -> Result<u64> {
        ensure(len > 0, CUDA_ERROR_INVALID_VALUE)?;
        fault::point("alloc")?;
        let size = len.checked_next_multiple_of(ALIGN).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let mut state = self.state();
        // Code of a context shares no block with another context's; programs' allocations share theirs.
        let sharers = if kind == Kind::Code { context } else { 0 };
        let at = if size >= LARGE {
            let size = size.checked_next_multiple_of(BLOCK).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
            let block = self.map_block(&mut state, account, size, None)?;
            state.take(block, 0, size)
        } else {
            let (block, offset) = match state.room_for(size, sharers) {
                Some(place) => place,
                None => (self.map_block(&mut state, account, BLOCK, Some(sharers))?, 0),
            };
            state.take(block, offset, size)
        };
        let base = self.window + at;
        let devices = account.devices();
        let region = Region {
            base,
            len,
            kind,
            device: account.device,
            context,
            readers: devices,
            writers: devices,
            id: space::next_id(),
        };
        if space::insert(region).is_err() {
            self.give_back(&mut state, account, base);
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        Ok(base)
    }

    /// Sets a range of an allocation to zero. Its whole pages go back to the system: a large variable without an initial value takes no
    /// memory until it is used.
    ///
    /// # Safety
    ///
    /// The range belongs to an allocation of this heap, and nobody else accesses it.
    pub(crate) unsafe fn clear(&self, address: u64, len: u64) {
        let end = address + len;
        let (first, last) = (address.next_multiple_of(PAGE), end - end % PAGE);
        let ranges = match self.file().filter(|_| first < last) {
            Some(file) if pages::punch(file, first - self.window, last - first) => [(address, first), (last, end)],
            _ => [(address, end), (end, end)],
        };
        for (from, to) in ranges {
            // SAFETY: the caller's promise.
            unsafe { (from as *mut u8).write_bytes(0, (to - from) as usize) };
        }
    }

    /// Gives an allocation back; the caller has taken its region out of the space.
    pub(crate) fn free(&self, account: &Account, base: u64) {
        self.give_back(&mut self.state(), account, base);
    }

    /// Takes addresses without memory, as other memory of the driver does that lies between blocks. Returns where.
    pub(crate) fn occupy(&self, len: u64) -> u64 {
        let mut state = self.state();
        let len = len.next_multiple_of(BLOCK);
        let at = state.gap(0, len);
        state.blocks.insert(at, Block { len, used: BTreeMap::new(), shared: None });
        at
    }

    /// Gives such addresses back.
    pub(crate) fn vacate(&self, at: u64) {
        self.state().blocks.remove(&at);
    }

    /// The block that holds an address.
    pub(crate) fn block(&self, address: u64) -> Option<Place> {
        let offset = address.checked_sub(self.window)?;
        let state = self.state();
        let (&start, block) = state.blocks.range(..=offset).next_back().filter(|(start, b)| offset - *start < b.len)?;
        Some(Place { base: self.window + start, len: block.len, file: self.file()?.as_raw_fd(), offset: start })
    }

    /// Takes the content of all blocks, and gives their memory back. Nothing may access it until [`Heap::move_in`].
    pub(crate) fn move_out(&self, account: &Account) -> Vec<Saved> {
        let state = self.state();
        let mut saved = Vec::new();
        for (&offset, block) in state.blocks.iter().filter(|(_, block)| !block.used.is_empty()) {
            let at = self.window + offset;
            // SAFETY: a block is mapped from its beginning to its end, and nobody accesses it meanwhile.
            let content = unsafe { std::slice::from_raw_parts(at as *const u8, block.len as usize) }.to_vec();
            pages::unmap(at, block.len);
            if let Some(file) = self.file() {
                pages::punch(file, offset, block.len);
            }
            account.release(Block::charge(block.len, block.shared));
            saved.push(Saved { window: self.window, offset, charge: Block::charge(block.len, block.shared), content });
        }
        saved
    }

    /// Maps a block again, with its content. Returns whether it is this heap's.
    pub(crate) fn move_in(&self, account: &Account, saved: &Saved) -> Result<bool> {
        if saved.window != self.window {
            return Ok(false);
        }
        account.charge(saved.charge)?;
        let (at, len) = (self.window + saved.offset, saved.content.len());
        let file = self.file().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        pages::map_part(at, len as u64, file, saved.offset).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        // SAFETY: the memory just mapped, of that length.
        unsafe { std::ptr::copy_nonoverlapping(saved.content.as_ptr(), at as *mut u8, len) };
        Ok(true)
    }

    fn file(&self) -> Option<&OwnedFd> {
        self.file.get_or_init(|| pages::memfd(c"simgpu-heap", WINDOW).ok()).as_ref()
    }

    fn give_back(&self, state: &mut State, account: &Account, base: u64) {
        let offset = base.wrapping_sub(self.window);
        let Some((&start, block)) = state.blocks.range_mut(..=offset).next_back() else { return };
        block.used.remove(&(offset - start));
        if block.used.is_empty() {
            let len = block.len;
            let charge = Block::charge(len, block.shared);
            state.blocks.remove(&start);
            pages::unmap(self.window + start, len);
            if let Some(file) = self.file() {
                pages::punch(file, start, len);
            }
            account.release(charge);
        }
    }

    /// Maps a block at the lowest address where it fits.
    fn map_block(&self, state: &mut State, account: &Account, len: u64, shared: Option<u64>) -> Result<u64> {
        let charge = Block::charge(len, shared);
        account.charge(charge)?;
        let mut next = 0;
        loop {
            let offset = state.gap(next, len);
            if offset + len > WINDOW {
                account.release(charge);
                return Err(CUDA_ERROR_OUT_OF_MEMORY);
            }
            let mapped = match self.file() {
                Some(file) => pages::map_part(self.window + offset, len, file, offset),
                None => Err(std::io::ErrorKind::OutOfMemory.into()),
            };
            match mapped {
                Ok(_) => {
                    state.blocks.insert(offset, Block { len, used: BTreeMap::new(), shared });
                    return Ok(offset);
                }
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => next = offset + BLOCK,
                Err(_) => {
                    account.release(charge);
                    return Err(CUDA_ERROR_OUT_OF_MEMORY);
                }
            }
        }
    }
}

impl State {
    /// The lowest offset from `from` on where `len` bytes are free.
    fn gap(&self, from: u64, len: u64) -> u64 {
        let mut at = from;
        for (&start, block) in &self.blocks {
            if start >= at + len {
                break;
            }
            at = at.max(start + block.len);
        }
        at
    }

    /// A place in a block for these sharers: the block's offset, and the offset in it.
    fn room_for(&self, size: u64, sharers: u64) -> Option<(u64, u64)> {
        self.blocks.iter().filter(|(_, block)| block.shared == Some(sharers)).find_map(|(&start, block)| {
            let mut at = 0;
            for (&offset, &len) in &block.used {
                if offset - at >= size {
                    break;
                }
                at = offset + len;
            }
            (block.len - at >= size).then_some((start, at))
        })
    }

    fn take(&mut self, block: u64, offset: u64, size: u64) -> u64 {
        if let Some(found) = self.blocks.get_mut(&block) {
            found.used.insert(offset, size);
        }
        block + offset
    }
}
