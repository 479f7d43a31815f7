//! Device memory of one device: addresses in its window, and the physical pieces behind them.
//!
//! ```text
//!   window  ├─ slab 2 MiB ─┼──── large allocation ────┼─ free ...
//!             small ones      pieces of 1 GiB at most
//! ```
//!
//! Small allocations share slabs of [`MEMORY_GRANULARITY`], at the driver's alignment. A large allocation is a range of its
//! own, made of pieces that are mapped side by side and given access once. Their size grows with the device (`size_of_pieces`), because
//! the driver takes its time for each, however large it is: 100 GiB take 127 ms in pieces of 64 MiB and 11 ms in pieces of 1 GiB
//! (`docs/results/2026-11-30-H200-pieces.txt`). Processes that share memory share pieces, and an image names those that are shared,
//! so an image has their size.

mod access;
pub(crate) mod borrowed;
mod create;
mod many;
mod runs;
mod suspend;
pub(crate) mod to_map;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Malformed;
use rekindle_wire::free_ranges::FreeRanges;
use rekindle_wire::ipc::{PieceId, Token};
use rekindle_wire::window::{self, MAX_PIECE};
use thiserror::Error;

use self::access::set_access;
use self::create::create;
use self::to_map::{Planned, Unfinished};

use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::shortage::Shortage;
use crate::session::share::{Share, What, Withdrawn};
use crate::session::state;

/// Allocations up to this size share slabs.
const SMALL: u64 = 1 << 20;
/// The alignment of small allocations and of parts of pools, as the driver gives it.
pub(crate) const ALIGN: u64 = 512;
/// The size of the pieces in images that do not say it.
const FORMER_PIECES: u64 = 64 << 20;
/// About how many pieces make up a device's memory.
const PIECES_OF_A_DEVICE: u64 = 128;

/// The size of the pieces of a device with this much memory: a power of two.
pub(crate) fn size_of_pieces(memory: u64) -> u64 {
    let wanted = memory / PIECES_OF_A_DEVICE;
    let power = 1 << wanted.checked_ilog2().unwrap_or(0);
    MAX_PIECE.min(power).max(MEMORY_GRANULARITY)
}

/// Why memory was not allocated.
#[derive(Debug, Error)]
pub(crate) enum MemoryError {
    /// The client must reserve its side of the window up to this address first.
    #[error("the client's window must reach {0:#x}")]
    Window(u64),
    /// The address is not free (a restore asks for particular addresses).
    #[error("device addresses from {0:#x} on are not free")]
    Taken(u64),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] CallFailed),
}

impl MemoryError {
    /// The result that the client gets.
    pub(crate) fn code(&self) -> CUresult {
        match self {
            MemoryError::Driver(failed) => failed.code,
            MemoryError::Window(_) | MemoryError::Taken(_) => CUDA_ERROR_OUT_OF_MEMORY,
        }
    }
}

/// An allocation of the client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) size: u64,
    /// 0 for memory from a pool, which belongs to no context.
    pub(crate) context: u64,
    /// The pool that the memory came from, or 0; the pool then keeps its place (see [`crate::resources::pools`]).
    pub(crate) pool: u64,
}

/// A piece behind an allocation that has a name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exported {
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) real: u64,
}

/// The physical memory behind a range of addresses.
enum Backing {
    Large(Vec<u64>),
    Slab { piece: u64, used: BTreeMap<u64, u64> },
}

/// The state of an allocation whose pieces are a template's: see `memory/borrowed.rs`.
enum Borrowed {
    /// The driver's handles of the pieces.
    Lent(Vec<u64>),
    Mapped,
    Aside(Vec<u64>),
}

/// A copy of device memory that runs in the background while the client runs.
pub(crate) trait BackgroundCopy: Send + Sync {
    /// Memory at these addresses is about to be unmapped. Returns when the copy no longer uses that memory.
    fn let_go(&self, start: u64, end: u64);
}

/// The memory of one device.
pub(crate) struct DeviceMemory {
    device: CUdevice,
    /// The size of all pieces but the last of a backing.
    piece_size: u64,
    window: Range<u64>,
    free: FreeRanges,
    /// The end of the part of the window that the driver has reserved for the worker, and the end of the client's part.
    reserved: u64,
    client_reserved: u64,
    backings: BTreeMap<u64, (u64, Backing)>,
    /// Backings that other devices may use too, by address and device.
    shared: BTreeSet<(u64, CUdevice)>,
    /// Devices that may use all of this memory.
    peers: BTreeSet<CUdevice>,
    allocations: BTreeMap<u64, Allocation>,
    /// The most that the client may have, and the memory of the client that is not mapped here: its arrays.
    limit: u64,
    beside: u64,
    /// The bytes of the pieces that the client maps itself.
    pieces: u64,
    /// The names by which other processes may know allocations and pieces, each with an address.
    exported: BTreeMap<Token, u64>,
    ids: BTreeMap<u64, PieceId>,
    /// What is left to be done for ranges that are being made, if many are; and where other devices get access after that.
    unfinished: Option<Unfinished>,
    to_admit: Vec<u64>,
    /// Pieces to be mapped at an address in place of new ones, by the driver's handles.
    made: BTreeMap<u64, u64>,
    /// Allocations behind which a template's pieces are.
    borrowed: BTreeMap<u64, Borrowed>,
    borrowed_version: u64,
    /// A copy that is under way: the memory that the copy needs stays mapped.
    kept: Option<Arc<dyn BackgroundCopy>>,
    /// The container's share, if memory counts with that of other workers; and the device that it counts for.
    share: Option<(Arc<Share>, What)>,
    /// Why the last allocation failed.
    shortage: Cell<Shortage>,
}

impl DeviceMemory {
    /// The memory of a device, in pieces of this size.
    pub(crate) fn new(device: CUdevice, ordinal: usize, piece_size: u64) -> Self {
        let window = window::device(ordinal);
        Self {
            device,
            piece_size,
            free: FreeRanges::all(window.clone()),
            reserved: window.start,
            client_reserved: window.start,
            window,
            backings: BTreeMap::new(),
            shared: BTreeSet::new(),
            peers: BTreeSet::new(),
            allocations: BTreeMap::new(),
            limit: u64::MAX,
            beside: 0,
            pieces: 0,
            exported: BTreeMap::new(),
            ids: BTreeMap::new(),
            unfinished: None,
            to_admit: Vec::new(),
            made: BTreeMap::new(),
            borrowed: BTreeMap::new(),
            borrowed_version: 0,
            kept: None,
            share: None,
            shortage: Cell::default(),
        }
    }

    /// Keeps the memory mapped that this copy needs; with `None`, keeps no memory any more.
    pub(crate) fn set_kept(&mut self, by: Option<Arc<dyn BackgroundCopy>>) {
        self.kept = by;
    }

    /// Sets the limit of the memory that is mapped from here on.
    pub(crate) fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Sets the bytes that count towards the limit and are not mapped here.
    pub(crate) fn set_beside(&mut self, bytes: u64) {
        self.beside = bytes;
        self.publish();
    }

    /// Sets the bytes of the pieces that the client maps itself.
    pub(crate) fn set_pieces(&mut self, bytes: u64) {
        self.pieces = bytes;
        self.publish();
    }

    /// Counts the memory used here together with that of other workers of the container.
    pub(crate) fn belong(&mut self, share: Arc<Share>, ordinal: usize) {
        self.share = Some((share, What::Device(ordinal)));
        self.publish();
    }

    /// Counts no memory of this worker's any more together with that of others: another worker counts it.
    pub(crate) fn count_no_more(&self) -> Option<Withdrawn> {
        let (share, what) = self.share.as_ref()?;
        share.withdraw(*what)
    }

    /// The most memory that the client may have.
    pub(crate) fn most(&self) -> u64 {
        let of_all = self.share.as_ref().and_then(|(share, _)| share.limits.device_memory);
        self.limit.min(of_all.unwrap_or(u64::MAX))
    }

    /// The bytes that count towards limits.
    fn own(&self) -> u64 {
        let mapped: u64 = self.backings.values().map(|(length, _)| length).sum();
        mapped.saturating_add(self.beside).saturating_add(self.pieces)
    }

    pub(crate) fn publish(&self) {
        if let Some((share, what)) = &self.share {
            share.set(*what, self.own());
        }
    }

    /// Whether so many more bytes may be mapped; if so, they count.
    pub(crate) fn take_share(&self, length: u64) -> bool {
        let own = self.own();
        let more = own.saturating_add(length);
        let fits = more <= self.limit && self.share.as_ref().is_none_or(|(share, what)| share.take(*what, own, more));
        if !fits {
            self.shortage.set(Shortage::Limit);
        }
        fits
    }

    /// Notes how an allocation of so many bytes went, whose memory the limits allow.
    pub(crate) fn note_result(&self, bytes: u64, result: CUresult) {
        let is_short = result == CUDA_ERROR_OUT_OF_MEMORY;
        self.shortage.set(if is_short { Shortage::Device(bytes) } else { Shortage::None });
    }

    /// Why the last allocation failed, which is then forgotten.
    pub(crate) fn take_shortage(&self) -> Shortage {
        self.shortage.take()
    }

    /// How much more memory the client may have.
    pub(crate) fn room(&self) -> u64 {
        let own = self.own();
        let of_all = self.share.as_ref().map_or(u64::MAX, |(share, what)| share.room(*what, own));
        self.limit.saturating_sub(own).min(of_all)
    }

    /// The size of all pieces of an allocation but the last.
    pub(crate) fn piece_size(&self) -> u64 {
        self.piece_size
    }

    fn cut(&self, length: u64) -> Cut {
        Cut { length, piece_size: self.piece_size }
    }

    /// All allocations by address.
    pub(crate) fn allocations(&self) -> &BTreeMap<u64, Allocation> {
        &self.allocations
    }

    /// The number of bytes allocated.
    pub(crate) fn bytes(&self) -> u64 {
        self.allocations.values().map(|a| a.size).sum()
    }

    /// How far the client has reserved the window, for the image.
    pub(crate) fn client_reserved(&self) -> u64 {
        self.client_reserved
    }

    /// Notes that the client has reserved its window up to `end`.
    pub(crate) fn client_reserves(&mut self, end: u64) {
        if self.window.contains(&end) || end == self.window.end {
            self.client_reserved = self.client_reserved.max(end);
        }
    }

    /// Allocates `size` bytes, at least 1.
    pub(crate) fn allocate(&mut self, driver: &Driver, size: u64, context: u64) -> Result<u64, MemoryError> {
        let address = if size <= SMALL { self.small(driver, size)? } else { self.large(driver, size)? };
        self.allocations.insert(address, Allocation { size, context, pool: 0 });
        Ok(address)
    }

    /// Allocates at an address that was recorded.
    pub(crate) fn allocate_at(
        &mut self,
        driver: &Driver,
        address: u64,
        allocation: Allocation,
    ) -> Result<(), MemoryError> {
        if allocation.size <= SMALL {
            let base = address & !(MEMORY_GRANULARITY - 1);
            if !self.backings.contains_key(&base) {
                self.take_at(base, MEMORY_GRANULARITY)?;
                self.map_slab(driver, base)?;
            }
            let Some((_, Backing::Slab { used, .. })) = self.backings.get_mut(&base) else {
                return Err(MemoryError::Taken(base));
            };
            used.insert(address, allocation.size.next_multiple_of(ALIGN));
        } else {
            let length = allocation.size.next_multiple_of(MEMORY_GRANULARITY);
            self.take_at(address, length)?;
            self.map_large(driver, address, length)?;
        }
        self.allocations.insert(address, allocation);
        Ok(())
    }

    /// Maps memory for a pool to give out in parts.
    pub(crate) fn map_segment(&mut self, driver: &Driver, length: u64) -> Result<u64, MemoryError> {
        self.large(driver, length)
    }

    /// Maps a pool's memory at an address that was recorded.
    pub(crate) fn map_segment_at(&mut self, driver: &Driver, address: u64, length: u64) -> Result<(), MemoryError> {
        self.take_at(address, length)?;
        self.map_large(driver, address, length)
    }

    /// Gives a pool's memory back.
    pub(crate) fn unmap_segment(&mut self, driver: &Driver, address: u64) -> Result<(), CallFailed> {
        self.unmap(driver, address)
    }

    /// Adds an allocation whose place a pool has chosen.
    pub(crate) fn add(&mut self, address: u64, allocation: Allocation) {
        self.allocations.insert(address, allocation);
    }

    /// Removes an allocation whose place a pool keeps.
    pub(crate) fn take_out(&mut self, address: u64) {
        self.allocations.remove(&address);
    }

    /// Lets another device use the memory at an address, for copies between the two.
    pub(crate) fn allow(&mut self, driver: &Driver, address: u64, device: CUdevice) -> Result<(), CallFailed> {
        let Some((&base, (length, _))) = self.backings.range(..=address).next_back() else { return Ok(()) };
        if device == self.device || !self.shared.insert((base, device)) {
            return Ok(());
        }
        let result = set_access(driver, base, *length, device, self.peer_access(base));
        if result.is_err() {
            self.shared.remove(&(base, device));
        }
        result
    }

    /// Lets another device use all memory, now and from now on.
    pub(crate) fn open_to(&mut self, driver: &Driver, device: CUdevice) -> Result<(), CallFailed> {
        self.peers.insert(device);
        let all: Vec<u64> = self.backings.keys().copied().collect();
        all.into_iter().try_for_each(|base| self.allow(driver, base, device))
    }

    /// Undoes [`DeviceMemory::open_to`].
    pub(crate) fn close_to(&mut self, driver: &Driver, device: CUdevice) -> Result<(), CallFailed> {
        self.peers.remove(&device);
        let all: Vec<u64> = self.backings.keys().copied().collect();
        all.into_iter().try_for_each(|base| self.deny(driver, base, device))
    }

    /// Opens a new backing to the devices that may use all memory.
    fn admit(&mut self, driver: &Driver, base: u64) {
        if self.unfinished.is_some() {
            self.to_admit.push(base);
            return;
        }
        for device in self.peers.clone() {
            // Memory was opened to these devices before, so there is no reason why this fails.
            let _ = self.allow(driver, base, device);
        }
    }

    /// Undoes [`DeviceMemory::allow`].
    pub(crate) fn deny(&mut self, driver: &Driver, address: u64, device: CUdevice) -> Result<(), CallFailed> {
        let Some((&base, (length, _))) = self.backings.range(..=address).next_back() else { return Ok(()) };
        if !self.shared.remove(&(base, device)) {
            return Ok(());
        }
        set_access(driver, base, *length, device, 0)
    }

    /// Frees an allocation; `None` if there is none at this address. The device must no longer use it.
    pub(crate) fn free(&mut self, driver: &Driver, address: u64) -> Option<Result<(), CallFailed>> {
        let allocation = self.allocations.remove(&address)?;
        self.exported.retain(|_, named| *named != address);
        if allocation.pool != 0 {
            return Some(Ok(()));
        }
        if allocation.size <= SMALL {
            let base = address & !(MEMORY_GRANULARITY - 1);
            if let Some((_, Backing::Slab { used, .. })) = self.backings.get_mut(&base) {
                used.remove(&address);
                if !used.is_empty() {
                    return Some(Ok(()));
                }
            }
            return Some(self.unmap(driver, base));
        }
        Some(self.unmap(driver, address))
    }

    /// The name by which other processes may get the allocation that holds an address. An allocation without a name gets
    /// `new`. `None` where there is no allocation, or only a pool's.
    pub(crate) fn export(&mut self, address: u64, new: impl FnOnce() -> Option<Token>) -> Option<Token> {
        let (&base, allocation) = self.allocations.range(..=address).next_back()?;
        if address - base >= allocation.size || allocation.pool != 0 {
            return None;
        }
        if let Some((token, _)) = self.exported.iter().find(|(_, named)| **named == base) {
            return Some(*token);
        }
        let token = new()?;
        self.exported.insert(token, base);
        Some(token)
    }

    /// The allocation behind a name: its offset in the pieces behind it, its size, and these pieces.
    pub(crate) fn exported(&self, token: &Token) -> Option<(u64, u64, Vec<Exported>)> {
        let address = *self.exported.get(token)?;
        let size = self.allocations.get(&address)?.size;
        let (base, _, pieces) = self.backing(address)?;
        Some((address - base, size, pieces))
    }

    /// What is mapped where an address is: where it begins, its length, and its pieces.
    pub(crate) fn backing(&self, address: u64) -> Option<(u64, u64, Vec<Exported>)> {
        let (&base, (length, backing)) = self.backings.range(..=address).next_back()?;
        let pieces: &[u64] = match backing {
            Backing::Large(pieces) => pieces,
            Backing::Slab { piece, .. } => std::slice::from_ref(piece),
        };
        let piece = |((offset, size), &real)| Exported { address: base + offset, size, real };
        Some((base, *length, self.cut(*length).pieces().zip(pieces).map(piece).collect()))
    }

    /// The name of the piece at an address. A piece without a name gets `new`.
    pub(crate) fn id(&mut self, address: u64, new: impl FnOnce() -> Option<PieceId>) -> Option<PieceId> {
        if let Some(id) = self.ids.get(&address) {
            return Some(*id);
        }
        let id = new()?;
        self.ids.insert(address, id);
        Some(id)
    }

    /// Whether other processes may have a part of the memory at these addresses.
    pub(crate) fn is_given_away(&self, address: u64, size: u64) -> bool {
        // Memory from a pool may begin anywhere in a piece.
        let first = match self.backings.range(..=address).next_back() {
            Some((base, (length, _))) if address - base < *length => {
                base + (address - base) / self.piece_size * self.piece_size
            }
            _ => address,
        };
        self.ids.range(first..address.saturating_add(size)).next().is_some()
    }

    /// The names of all named pieces, with their addresses and sizes.
    pub(crate) fn ids(&self) -> impl Iterator<Item = (PieceId, u64, u64)> {
        self.ids.iter().filter_map(|(&address, &id)| {
            let (&base, (length, _)) = self.backings.range(..=address).next_back()?;
            Some((id, address, self.piece_size.min(length.checked_sub(address - base)?)))
        })
    }

    /// Writes the names for the image, and the size of the pieces that they name.
    pub(crate) fn write_names(&self, out: &mut state::Device) {
        let mut exported: Vec<_> = self.exported.iter().map(|(token, address)| (*address, *token)).collect();
        exported.sort_unstable();
        out.exported = exported.iter().map(|(address, token)| state::named(token, *address)).collect();
        out.pieces = self.ids.iter().map(|(address, id)| state::named(id, *address)).collect();
        out.piece_size = self.piece_size;
    }

    /// Makes pieces of the size that an image has. Nothing is allocated yet.
    pub(crate) fn read_piece_size(&mut self, saved: &state::Device) -> Result<(), Malformed> {
        let size = if saved.piece_size == 0 { FORMER_PIECES } else { saved.piece_size };
        if !size.is_power_of_two() || !(MEMORY_GRANULARITY..=MAX_PIECE).contains(&size) {
            return Err(Malformed("pieces of device memory of a size that no worker makes"));
        }
        self.piece_size = size;
        Ok(())
    }

    /// Reads the names that [`DeviceMemory::write_names`] wrote.
    pub(crate) fn read_names(&mut self, saved: &state::Device) -> Result<(), Malformed> {
        for it in &saved.exported {
            self.exported.insert(state::name(&it.name)?, it.of);
        }
        for it in &saved.pieces {
            self.ids.insert(it.of, state::name(&it.name)?);
        }
        Ok(())
    }

    /// Has the pieces that `take` returns mapped at the addresses of named pieces, in place of new ones.
    pub(crate) fn use_made<E>(&mut self, mut take: impl FnMut(&PieceId) -> Result<u64, E>) -> Result<(), E> {
        for (&address, id) in &self.ids {
            self.made.insert(address, take(id)?);
        }
        Ok(())
    }

    /// Whether all pieces of [`DeviceMemory::use_made`] are mapped.
    pub(crate) fn has_mapped_made(&self) -> bool {
        self.made.is_empty()
    }

    fn small(&mut self, driver: &Driver, size: u64) -> Result<u64, MemoryError> {
        let size = size.next_multiple_of(ALIGN);
        for (&base, (_, backing)) in &mut self.backings {
            if let Backing::Slab { used, .. } = backing
                && let Some(address) = first_fit(base..base + MEMORY_GRANULARITY, used, size)
            {
                used.insert(address, size);
                return Ok(address);
            }
        }
        let base = self.take(MEMORY_GRANULARITY)?;
        self.map_slab(driver, base).inspect_err(|_| self.give(base, MEMORY_GRANULARITY))?;
        if let Some((_, Backing::Slab { used, .. })) = self.backings.get_mut(&base) {
            used.insert(base, size);
        }
        Ok(base)
    }

    fn large(&mut self, driver: &Driver, size: u64) -> Result<u64, MemoryError> {
        let length = size.checked_next_multiple_of(MEMORY_GRANULARITY).ok_or(MemoryError::Window(u64::MAX))?;
        let address = self.take(length)?;
        self.map_large(driver, address, length).inspect_err(|_| self.give(address, length))?;
        Ok(address)
    }

    fn map_slab(&mut self, driver: &Driver, base: u64) -> Result<(), MemoryError> {
        let pieces = self.map(driver, base, MEMORY_GRANULARITY)?;
        let piece = pieces.first().copied().unwrap_or(0);
        self.backings.insert(base, (MEMORY_GRANULARITY, Backing::Slab { piece, used: BTreeMap::new() }));
        self.admit(driver, base);
        Ok(())
    }

    fn map_large(&mut self, driver: &Driver, address: u64, length: u64) -> Result<(), MemoryError> {
        let pieces = self.map(driver, address, length)?;
        self.backings.insert(address, (length, Backing::Large(pieces)));
        self.admit(driver, address);
        Ok(())
    }

    /// Makes physical pieces and maps them. After a failure, undoes what was done.
    fn map(&mut self, driver: &Driver, address: u64, length: u64) -> Result<Vec<u64>, MemoryError> {
        if !self.take_share(length) {
            checked("the client's limit of GPU memory", CUDA_ERROR_OUT_OF_MEMORY)?;
        }
        self.reserve(driver, address + length).inspect_err(|_| self.publish())?;
        let mut pieces = Vec::new();
        let result = match self.map_lent(driver, address, length) {
            Some(lent) => lent.map(|lent| pieces = lent),
            None => self.map_pieces(driver, address, length, &mut pieces),
        };
        self.note_result(length, result.as_ref().map_or_else(|failed| failed.code, |()| CUDA_SUCCESS));
        if let Err(error) = result {
            let _ = self.unmap_named(driver, address, length, &pieces);
            self.publish();
            return Err(error.into());
        }
        Ok(pieces)
    }

    fn map_pieces(
        &mut self,
        driver: &Driver,
        address: u64,
        length: u64,
        pieces: &mut Vec<u64>,
    ) -> Result<(), CallFailed> {
        for (offset, size) in self.cut(length).pieces() {
            let made = self.made.remove(&(address + offset));
            if let Some(Unfinished::Planned(all)) = &mut self.unfinished {
                all.push(Planned { address: address + offset, size, piece: made });
                // `put_piece` follows.
                pieces.push(made.unwrap_or_default());
                continue;
            }
            let piece = made.map_or_else(|| create(driver, self.device, size), Ok)?;
            // SAFETY: a piece of ours, and addresses that are reserved for it. After a failure nobody knows the piece.
            unsafe {
                let mapped = (driver.cuMemMap)(address + offset, size as usize, 0, piece, 0);
                if mapped != CUDA_SUCCESS {
                    (driver.cuMemRelease)(piece);
                }
                checked("cuMemMap", mapped)?;
            }
            pieces.push(piece);
        }
        match &mut self.unfinished {
            Some(Unfinished::Closed(closed)) => {
                closed.add(address, length);
                Ok(())
            }
            Some(Unfinished::Planned(_)) => Ok(()),
            None => set_access(driver, address, length, self.device, CU_MEM_ACCESS_READWRITE),
        }
    }

    /// Sets the driver's handle of the piece at an address.
    fn put_piece(&mut self, address: u64, piece: u64) {
        let Some((base, (_, backing))) = self.backings.range_mut(..=address).next_back() else { return };
        let number = ((address - base) / self.piece_size) as usize;
        let place = match backing {
            Backing::Large(pieces) => pieces.get_mut(number),
            Backing::Slab { piece, .. } => Some(piece),
        };
        place.into_iter().for_each(|it| *it = piece);
    }

    fn unmap(&mut self, driver: &Driver, base: u64) -> Result<(), CallFailed> {
        let Some((length, backing)) = self.backings.remove(&base) else { return Ok(()) };
        if let Some(copying) = &self.kept {
            copying.let_go(base, base + length);
        }
        self.publish();
        self.shared.retain(|(b, _)| *b != base);
        let pieces = match backing {
            Backing::Large(pieces) => pieces,
            Backing::Slab { piece, .. } => vec![piece],
        };
        let result = self.unmap_named(driver, base, length, &pieces);
        self.ends_borrowing(driver, base);
        // The worker does not use addresses again whose unmapping failed.
        if result.is_ok() {
            self.give(base, length);
        }
        result
    }

    /// Unmaps pieces, which lose their names.
    fn unmap_named(&mut self, driver: &Driver, address: u64, length: u64, pieces: &[u64]) -> Result<(), CallFailed> {
        for ((offset, _), _) in self.cut(length).pieces().zip(pieces) {
            self.ids.remove(&(address + offset));
        }
        unmap_pieces(driver, address, self.cut(length), pieces)
    }

    /// Reserves the window with the driver up to at least `end`.
    fn reserve(&mut self, driver: &Driver, end: u64) -> Result<(), MemoryError> {
        while self.reserved < end {
            let mut got = 0;
            // SAFETY: the out parameter is a local.
            checked("cuMemAddressReserve", unsafe {
                (driver.cuMemAddressReserve)(&raw mut got, window::STEP as usize, 0, self.reserved, 0)
            })?;
            if got != self.reserved {
                return Err(MemoryError::Taken(self.reserved));
            }
            self.reserved += window::STEP;
        }
        Ok(())
    }

    fn take(&mut self, length: u64) -> Result<u64, MemoryError> {
        let address = self.free.first_fit(length).ok_or(MemoryError::Window(u64::MAX))?;
        if address + length > self.client_reserved {
            return Err(MemoryError::Window(address + length));
        }
        self.take_at(address, length)?;
        Ok(address)
    }

    fn take_at(&mut self, address: u64, length: u64) -> Result<(), MemoryError> {
        let taken = address.is_multiple_of(MEMORY_GRANULARITY) && self.free.take_at(address, length);
        if taken { Ok(()) } else { Err(MemoryError::Taken(address)) }
    }

    fn give(&mut self, address: u64, length: u64) {
        self.free.give(address, length);
    }
}

/// Unmaps all of these pieces of a range.
fn unmap_range(driver: &Driver, address: u64, cut: Cut) -> Result<(), CallFailed> {
    let mut result = Ok(());
    for (offset, size) in cut.pieces() {
        // SAFETY: the range is ours, and nothing uses it any more.
        result = result.and(checked("cuMemUnmap", unsafe { (driver.cuMemUnmap)(address + offset, size as usize) }));
    }
    result
}

/// Unmaps and releases the first pieces of a range. Returns the first error; the other pieces are released all the same.
fn unmap_pieces(driver: &Driver, address: u64, cut: Cut, pieces: &[u64]) -> Result<(), CallFailed> {
    let mut result = Ok(());
    for ((offset, size), &piece) in cut.pieces().zip(pieces) {
        // SAFETY: the range and the piece are ours, mapped together in `map_pieces`.
        unsafe {
            result = result.and(checked("cuMemUnmap", (driver.cuMemUnmap)(address + offset, size as usize)));
            result = result.and(checked("cuMemRelease", (driver.cuMemRelease)(piece)));
        }
    }
    result
}

/// The first place in a slab for `size` bytes.
fn first_fit(slab: Range<u64>, used: &BTreeMap<u64, u64>, size: u64) -> Option<u64> {
    let mut at = slab.start;
    for (&start, &length) in used {
        if start - at >= size {
            return Some(at);
        }
        at = start + length;
    }
    (slab.end - at >= size).then_some(at)
}

/// Addresses and sizes of the pieces behind a large allocation, if pieces have this size; `None` for a small one.
pub(crate) fn pieces_of(address: u64, size: u64, piece_size: u64) -> Option<impl Iterator<Item = (u64, u64)>> {
    let length = size.checked_next_multiple_of(MEMORY_GRANULARITY).filter(|_| size > SMALL)?;
    address.checked_add(length)?;
    Some(Cut { length, piece_size }.pieces().map(move |(offset, size)| (address + offset, size)))
}

/// A range that is cut into pieces.
#[derive(Clone, Copy)]
struct Cut {
    length: u64,
    piece_size: u64,
}

impl Cut {
    /// Offsets and sizes of the pieces.
    fn pieces(self) -> impl Iterator<Item = (u64, u64)> {
        let Self { length, piece_size } = self;
        (0..length.div_ceil(piece_size)).map(move |i| (i * piece_size, piece_size.min(length - i * piece_size)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_allocations_fill_the_holes_of_a_slab() {
        let mut used = BTreeMap::from([(512, 512), (2048, 512)]);
        assert_eq!(first_fit(0..4096, &used, 512), Some(0));
        used.insert(0, 512);
        assert_eq!(first_fit(0..4096, &used, 1024), Some(1024));
        assert_eq!(first_fit(0..4096, &used, 2048), None);
    }

    #[test]
    fn ranges_are_taken_given_back_and_grow_together() {
        let mut memory = DeviceMemory::new(0, 0, MAX_PIECE);
        let base = window::device(0).start;
        assert!(
            matches!(memory.take(MEMORY_GRANULARITY), Err(MemoryError::Window(end)) if end == base + MEMORY_GRANULARITY)
        );
        memory.client_reserves(base + window::STEP);
        let a = memory.take(MEMORY_GRANULARITY).unwrap();
        let b = memory.take(3 * MEMORY_GRANULARITY).unwrap();
        assert_eq!((a, b), (base, base + MEMORY_GRANULARITY));
        memory.take_at(base + 8 * MEMORY_GRANULARITY, MEMORY_GRANULARITY).unwrap();
        assert!(memory.take_at(b, MEMORY_GRANULARITY).is_err());
        memory.give(a, MEMORY_GRANULARITY);
        memory.give(b, 3 * MEMORY_GRANULARITY);
        memory.give(base + 8 * MEMORY_GRANULARITY, MEMORY_GRANULARITY);
        assert_eq!(memory.free.parts().count(), 1);
    }

    #[test]
    fn pieces_cover_a_range() {
        let pieces: Vec<_> = Cut { length: 130 << 20, piece_size: 64 << 20 }.pieces().collect();
        assert_eq!(pieces, [(0, 64 << 20), (64 << 20, 64 << 20), (128 << 20, 2 << 20)]);
    }

    #[test]
    fn large_devices_have_large_pieces() {
        const GIB: u64 = 1 << 30;
        assert_eq!(size_of_pieces(140 * GIB), GIB);
        assert_eq!(size_of_pieces(2000 * GIB), GIB);
        assert_eq!(size_of_pieces(80 * GIB), GIB / 2);
        assert_eq!(size_of_pieces(GIB), 8 << 20);
        assert_eq!(size_of_pieces(1 << 20), MEMORY_GRANULARITY);
        assert_eq!(size_of_pieces(0), MEMORY_GRANULARITY);
    }

    #[test]
    fn an_image_says_the_size_of_its_pieces_and_a_former_one_has_the_former_size() {
        let mut memory = DeviceMemory::new(0, 0, 1 << 28);
        let mut saved = state::Device::default();
        memory.write_names(&mut saved);
        let mut restored = DeviceMemory::new(0, 0, MAX_PIECE);
        restored.read_piece_size(&saved).unwrap();
        assert_eq!(restored.piece_size(), 1 << 28);
        memory.read_piece_size(&state::Device::default()).unwrap();
        assert_eq!(memory.piece_size(), FORMER_PIECES);
        for piece_size in [1, MEMORY_GRANULARITY / 2, 3 * MEMORY_GRANULARITY, 2 * MAX_PIECE, u64::MAX] {
            let saved = state::Device { piece_size, ..state::Device::default() };
            assert!(memory.read_piece_size(&saved).is_err(), "{piece_size}");
        }
        assert_eq!(memory.piece_size(), FORMER_PIECES);
    }
}
