//! Hashes of device memory by the kernels of `ctx-worker/kernels/hash.cu` (what they compute:
//! `rekindle_images::content`).

use rekindle_cuda_abi::types::*;
use rekindle_images::content::{CHUNK, ContentHash, ContentKey, DIGEST, Schedule, THREADS};

use crate::gpu::driver::{CallFailed, Driver, checked, launch};
use crate::resources::units::Unit;

const PTX: &str = concat!(include_str!("../../../kernels/hash.ptx"), "\0");

/// The maximum number of pieces hashed at a time.
pub(crate) const MOST_PIECES: usize = 1 << 16;
/// The maximum number of bytes hashed at a time, at a quiesce.
pub(crate) const BATCH_BYTES: u64 = 4 << 30;
const NON_BLOCKING: u32 = 1;
/// Blocks for each multiprocessor. On an H200 twice as many hash as fast, but copy 1% slower.
const BLOCKS: u32 = 4;

/// Bytes of an entry of the kernels' table: source, target, length, first chunk.
const ENTRY: usize = 32;
const HASH: usize = 16;

/// Memory with a hash of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) source: u64,
    /// The address to which the piece is copied, if it is.
    pub(crate) target: u64,
    pub(crate) length: u64,
}

/// The kernels loaded in one device's primary context.
struct Loaded {
    context: CUcontext,
    hash: CUfunction,
    copy_hash: CUfunction,
    finish: CUfunction,
    stream: CUstream,
    /// The device's area.
    area: CUdeviceptr,
    /// Whether the code of the kernels has its place.
    placed: bool,
}

/// Memory of a device that outlives contexts.
#[derive(Clone, Copy)]
struct Area {
    address: CUdeviceptr,
    /// The driver's handle of the physical memory.
    piece: u64,
    size: usize,
}

/// A table of pieces that is on the device.
pub(crate) struct Table {
    pieces: usize,
    chunks: u64,
}

/// Hashes memory of all devices under one key.
pub(crate) struct Hasher {
    schedule: Schedule,
    devices: Vec<Option<Loaded>>,
    /// Memory of each device for schedule, table, hashes, digests, once it is made. The size is the maximum that is ever
    /// needed, since later mappings would change where the driver places the client's code. The memory is mapped, so that it
    /// outlives a reset of the context.
    areas: Vec<Option<Area>>,
    most_bytes: u64,
}

impl Hasher {
    /// A hasher for `devices` devices, and this much memory at a time.
    pub(crate) fn new(key: &ContentKey, devices: usize, most_bytes: u64) -> Self {
        let areas = vec![None; devices];
        let devices = (0..devices).map(|_| None).collect();
        Self { schedule: key.schedule(), devices, areas, most_bytes }
    }

    /// Changes the key for the following hashes.
    pub(crate) fn set_key(&mut self, driver: &Driver, key: &ContentKey) -> Result<(), CallFailed> {
        self.schedule = key.schedule();
        let bytes = self.schedule.bytes();
        for loaded in self.devices.iter().flatten() {
            // SAFETY: as in `prepare`; no kernel of ours runs.
            unsafe {
                checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(loaded.context))?;
                let copy =
                    (driver.cuMemcpyHtoDAsync_v2)(loaded.area, bytes.as_ptr().cast(), bytes.len(), loaded.stream);
                checked("cuMemcpyHtoDAsync", copy)?;
                checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(loaded.stream))?;
            }
        }
        Ok(())
    }

    fn table_at(&self) -> usize {
        Schedule::BYTES.next_multiple_of(64)
    }

    fn hashes_at(&self) -> usize {
        self.table_at() + MOST_PIECES * ENTRY
    }

    fn digests_at(&self) -> usize {
        self.hashes_at() + MOST_PIECES * HASH
    }

    /// Loads the kernels into a device's primary context, if that has not been done.
    pub(crate) fn prepare(
        &mut self,
        driver: &Driver,
        (ordinal, device): (usize, CUdevice),
        primary: CUcontext,
    ) -> Result<(), CallFailed> {
        if self.devices.get(ordinal).is_none_or(|loaded| loaded.as_ref().is_some_and(|l| l.context == primary)) {
            return Ok(());
        }
        let (mut module, mut hash, mut copy_hash, mut finish, mut stream) = (0, 0, 0, 0, 0);
        let bytes = self.schedule.bytes();
        // SAFETY: out parameters are locals; the image and the names end in a NUL.
        unsafe {
            checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
            checked("cuModuleLoadData", (driver.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()))?;
            let get = driver.cuModuleGetFunction;
            checked("cuModuleGetFunction", get(&raw mut hash, module, c"rekindle_hash".as_ptr()))?;
            checked("cuModuleGetFunction", get(&raw mut copy_hash, module, c"rekindle_copy_hash".as_ptr()))?;
            checked("cuModuleGetFunction", get(&raw mut finish, module, c"rekindle_finish".as_ptr()))?;
            checked("cuStreamCreate", (driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING))?;
        }
        let area = match self.areas[ordinal] {
            Some(area) => area.address,
            None => {
                let chunks = self.most_bytes as usize / CHUNK + MOST_PIECES;
                let made = map(driver, device, self.digests_at() + chunks * DIGEST)?;
                self.areas[ordinal] = Some(made);
                made.address
            }
        };
        // SAFETY: the area begins with room for the schedule, which the driver has taken when the stream is idle.
        unsafe {
            let copy = (driver.cuMemcpyHtoDAsync_v2)(area, bytes.as_ptr().cast(), bytes.len(), stream);
            checked("cuMemcpyHtoDAsync", copy)?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))?;
        }
        self.devices[ordinal] = Some(Loaded { context: primary, hash, copy_hash, finish, stream, area, placed: false });
        Ok(())
    }

    /// Has the driver place the code of the kernels, which it would do before their first launch otherwise: at the moment of a
    /// checkpoint, which no replay of the client's log repeats. The client's code would lie elsewhere after a restore.
    pub(crate) fn place(&mut self, driver: &Driver, ordinal: usize) -> Result<(), CallFailed> {
        let Some(loaded) = self.devices.get_mut(ordinal).and_then(Option::as_mut).filter(|it| !it.placed) else {
            return Ok(());
        };
        // SAFETY: the context and the functions are ours, made in `prepare`.
        unsafe {
            checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(loaded.context))?;
            for function in [loaded.hash, loaded.copy_hash, loaded.finish] {
                checked("cuFuncLoad", (driver.cuFuncLoad)(function))?;
            }
        }
        loaded.placed = true;
        Ok(())
    }

    /// Called before a primary context is reset, which destroys everything in it.
    pub(crate) fn release(&mut self, driver: &Driver, ordinal: usize) {
        if let Some(loaded) = self.devices.get_mut(ordinal).and_then(Option::take) {
            // SAFETY: the stream is ours, and no kernel of ours runs.
            unsafe { (driver.cuStreamDestroy_v2)(loaded.stream) };
        }
    }

    /// Gives the memory back that outlives contexts. Nothing is hashed any more.
    pub(crate) fn leave(&mut self, driver: &Driver) -> Result<(), CallFailed> {
        let areas = self.areas.iter_mut().filter_map(Option::take);
        let unmap = |it: Area| {
            // SAFETY: mapped by `map`, once; no kernel of ours runs.
            unsafe {
                checked("cuMemUnmap", (driver.cuMemUnmap)(it.address, it.size))?;
                checked("cuMemRelease", (driver.cuMemRelease)(it.piece))
            }
        };
        areas.map(unmap).fold(Ok(()), Result::and)
    }

    /// The stream in which a device's kernels run, once it is prepared.
    pub(crate) fn stream(&self, ordinal: usize) -> Option<CUstream> {
        self.devices.get(ordinal)?.as_ref().map(|loaded| loaded.stream)
    }

    /// Copies the table of pieces to the device. The device's primary context is current from here on. Returns `None` if the
    /// pieces are too many or too large, or there are none.
    pub(crate) fn table(
        &mut self,
        driver: &Driver,
        ordinal: usize,
        pieces: &[Piece],
    ) -> Result<Option<Table>, CallFailed> {
        let bytes = pieces.iter().fold(0_u64, |sum, piece| sum.saturating_add(piece.length));
        let Some(loaded) = self.devices.get(ordinal).and_then(Option::as_ref) else { return Ok(None) };
        if pieces.is_empty() || pieces.len() > MOST_PIECES || bytes > self.most_bytes {
            return Ok(None);
        }
        let (mut chunks, mut table) = (0, Vec::with_capacity(pieces.len() * ENTRY));
        for piece in pieces {
            let entry = [piece.source, piece.target, piece.length, chunks];
            entry.iter().for_each(|word| table.extend(word.to_le_bytes()));
            chunks += piece.length.div_ceil(CHUNK as u64);
        }
        // SAFETY: the area has room for MOST_PIECES entries there, and the table lives until the copy is done.
        unsafe {
            checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(loaded.context))?;
            let at = loaded.area + self.table_at() as u64;
            let copy = (driver.cuMemcpyHtoDAsync_v2)(at, table.as_ptr().cast(), table.len(), loaded.stream);
            checked("cuMemcpyHtoDAsync", copy)?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(loaded.stream))?;
        }
        Ok(Some(Table { pieces: pieces.len(), chunks }))
    }

    /// Enqueues the kernels for a table: `copies` says whether pieces are copied too.
    ///
    /// # Safety
    /// The sources of the table's pieces are mapped and readable until the kernels end, and the targets writable, if
    /// they are copied.
    pub(crate) unsafe fn enqueue(
        &self,
        driver: &Driver,
        (ordinal, processors): (usize, u32),
        table: &Table,
        copies: bool,
    ) -> Result<(), CallFailed> {
        let Some(loaded) = self.devices.get(ordinal).and_then(Option::as_ref) else { return Ok(()) };
        let at = |offset: usize| loaded.area + offset as u64;
        let (schedule, entries) = (at(0), at(self.table_at()));
        let (hashes, digests) = (at(self.hashes_at()), at(self.digests_at()));
        let blocks = table.chunks.clamp(1, u64::from(processors.max(1) * BLOCKS)) as u32;
        let mut params = self.schedule.column_bytes();
        let words = [schedule, entries, table.pieces as u64, table.chunks, digests];
        words.iter().for_each(|word| params.extend(word.to_le_bytes()));
        let mut last: Vec<u8> = Vec::new();
        [schedule, entries, digests, hashes].iter().for_each(|word| last.extend(word.to_le_bytes()));
        let first = if copies { loaded.copy_hash } else { loaded.hash };
        // SAFETY: the kernels are ours; besides the pieces they read and write the area, which holds digests for
        // `most_bytes` and a chunk more for each piece.
        unsafe {
            if table.chunks > 0 {
                launch(driver, first, (blocks, THREADS), loaded.stream, &params)?;
            }
            launch(driver, loaded.finish, (table.pieces as u32, THREADS), loaded.stream, &last)
        }
    }

    /// Waits for the kernels, and fetches the hashes.
    pub(crate) fn fetch(&self, driver: &Driver, ordinal: usize, table: &Table) -> Result<Vec<ContentHash>, CallFailed> {
        let Some(loaded) = self.devices.get(ordinal).and_then(Option::as_ref) else { return Ok(Vec::new()) };
        let mut hashes = vec![0; table.pieces * HASH];
        // SAFETY: the area has that many hashes there, and the bytes live until the copy is done.
        unsafe {
            let at = loaded.area + self.hashes_at() as u64;
            let copy = (driver.cuMemcpyDtoHAsync_v2)(hashes.as_mut_ptr().cast(), at, hashes.len(), loaded.stream);
            checked("cuMemcpyDtoHAsync", copy)?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(loaded.stream))?;
        }
        Ok(hashes.as_chunks::<HASH>().0.iter().map(|bytes| ContentHash::from_le_bytes(*bytes)).collect())
    }

    /// Hashes units of one device, which is idle. Leaves the device's primary context current.
    ///
    /// # Errors
    /// A driver call failed, as all calls do in a broken context.
    ///
    /// # Safety
    /// The units are mapped, and the device may read them.
    pub(crate) unsafe fn hash(
        &mut self,
        driver: &Driver,
        (ordinal, device, primary, processors): (usize, CUdevice, CUcontext, u32),
        units: &[Unit],
    ) -> Result<Vec<ContentHash>, CallFailed> {
        self.prepare(driver, (ordinal, device), primary)?;
        let piece = |unit: &Unit| Piece { source: unit.start, target: 0, length: unit.size() };
        let pieces: Vec<_> = units.iter().map(piece).collect();
        let Some(table) = self.table(driver, ordinal, &pieces)? else { return Ok(Vec::new()) };
        // SAFETY: the caller's promise; nothing is copied.
        unsafe { self.enqueue(driver, (ordinal, processors), &table, false)? };
        self.fetch(driver, ordinal, &table)
    }
}

/// Maps device memory at an address of the driver's choice.
fn map(driver: &Driver, device: CUdevice, size: usize) -> Result<Area, CallFailed> {
    let size = size.next_multiple_of(2 << 20);
    let properties = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        location_type: CU_MEM_LOCATION_TYPE_DEVICE,
        location_id: device,
        ..Default::default()
    };
    let access = CUmemAccessDesc {
        location_type: CU_MEM_LOCATION_TYPE_DEVICE,
        location_id: device,
        flags: CU_MEM_ACCESS_READWRITE,
    };
    let (mut piece, mut address) = (0_u64, 0);
    // SAFETY: out parameters are locals, structures live through the calls.
    unsafe {
        checked("cuMemAddressReserve", (driver.cuMemAddressReserve)(&raw mut address, size, 0, 0, 0))?;
        let made = (driver.cuMemCreate)((&raw mut piece).cast(), size, &raw const properties, 0);
        checked("cuMemCreate", made)?;
        checked("cuMemMap", (driver.cuMemMap)(address, size, 0, piece, 0))?;
        checked("cuMemSetAccess", (driver.cuMemSetAccess)(address, size, &raw const access, 1))?;
    }
    Ok(Area { address, piece, size })
}
