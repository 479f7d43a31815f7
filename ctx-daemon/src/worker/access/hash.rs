//! Hashes of device memory by the kernels of `ctx-daemon/kernels/hash.cu` (what they compute: `rekindle_images::content`).

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_images::content::{CHUNK, ContentHash, ContentKey, DIGEST, Schedule, THREADS};

use super::Unit;
use crate::worker::driver::{CallFailed, Driver, expect};

const PTX: &str = concat!(include_str!("../../../kernels/hash.ptx"), "\0");

/// As many units are hashed at most.
pub(crate) const MOST_UNITS: usize = 1 << 16;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`.
const PORTABLE: u32 = 3;
const NON_BLOCKING: u32 = 1;
/// Blocks for each multiprocessor: enough to hide one's end behind another's loads.
const BLOCKS: u32 = 8;

/// Bytes of an entry of the kernels' table: source, target, length, first chunk.
const ENTRY: usize = 32;
const HASH: usize = 16;

/// What is loaded in one device's primary context.
struct Loaded {
    context: CUcontext,
    hash: CUfunction,
    finish: CUfunction,
    stream: CUstream,
}

/// Hashes memory of all devices under one key.
pub(crate) struct Hasher {
    schedule: Schedule,
    devices: Vec<Option<Loaded>>,
    /// Pinned memory that kernels read and write: schedule, table, digests, hashes. Made once for the most that can come,
    /// since what the driver maps later moves where it places the client's code.
    area: *mut u8,
    most_bytes: u64,
}

impl Hasher {
    /// For `devices` devices, and this much memory at a time.
    pub(crate) fn new(key: &ContentKey, devices: usize, most_bytes: u64) -> Self {
        let devices = (0..devices).map(|_| None).collect();
        Self { schedule: key.schedule(), devices, area: std::ptr::null_mut(), most_bytes }
    }

    fn table_at(&self) -> usize {
        self.schedule.bytes().len().next_multiple_of(64)
    }

    fn hashes_at(&self) -> usize {
        self.table_at() + MOST_UNITS * ENTRY
    }

    fn digests_at(&self) -> usize {
        self.hashes_at() + MOST_UNITS * HASH
    }

    /// Loads the kernels into a device's primary context, if that has not been done.
    pub(crate) fn prepare(&mut self, driver: &Driver, ordinal: usize, primary: CUcontext) -> Result<(), CallFailed> {
        if self.devices.get(ordinal).is_none_or(|loaded| loaded.as_ref().is_some_and(|l| l.context == primary)) {
            return Ok(());
        }
        let (mut module, mut hash, mut finish, mut stream) = (0, 0, 0, 0);
        // SAFETY: out parameters are locals; the image and the names end in a NUL.
        unsafe {
            expect("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
            expect("cuModuleLoadData", (driver.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()))?;
            let get = driver.cuModuleGetFunction;
            expect("cuModuleGetFunction", get(&raw mut hash, module, c"rekindle_hash".as_ptr()))?;
            expect("cuModuleGetFunction", get(&raw mut finish, module, c"rekindle_finish".as_ptr()))?;
            expect("cuStreamCreate", (driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING))?;
        }
        if self.area.is_null() {
            let chunks = self.most_bytes as usize / CHUNK + MOST_UNITS;
            let size = self.digests_at() + chunks * DIGEST;
            let mut area: *mut c_void = std::ptr::null_mut();
            // SAFETY: the out parameter is a local.
            let made = unsafe { (driver.cuMemHostAlloc)(&raw mut area, size, PORTABLE) };
            expect("cuMemHostAlloc", made)?;
            self.area = area.cast();
            let bytes = self.schedule.bytes();
            // SAFETY: the area begins with room for it.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.area, bytes.len()) };
        }
        self.devices[ordinal] = Some(Loaded { context: primary, hash, finish, stream });
        Ok(())
    }

    /// A primary context is about to be reset: what is in it is forgotten.
    pub(crate) fn release(&mut self, driver: &Driver, ordinal: usize) {
        if let Some(loaded) = self.devices.get_mut(ordinal).and_then(Option::take) {
            // SAFETY: the stream is ours and idle.
            unsafe { (driver.cuStreamDestroy_v2)(loaded.stream) };
        }
        if ordinal == 0 && !self.area.is_null() {
            // SAFETY: allocated in `prepare`; no kernel of ours runs.
            unsafe { (driver.cuMemFreeHost)(self.area.cast()) };
            self.area = std::ptr::null_mut();
            // The others' kernels stay loaded; the next `prepare` of any makes the area anew.
            self.devices.iter_mut().for_each(|loaded| *loaded = None);
        }
    }

    /// Hashes units of one device, which is idle. Leaves the device's primary context current.
    ///
    /// # Errors
    /// A call of the driver failed, as all do in a context that is broken.
    pub(crate) fn hash(
        &mut self,
        driver: &Driver,
        (ordinal, primary, processors): (usize, CUcontext, u32),
        units: &[Unit],
    ) -> Result<Vec<ContentHash>, CallFailed> {
        self.prepare(driver, ordinal, primary)?;
        let bytes: u64 = units.iter().map(Unit::size).sum();
        let Some(loaded) = self.devices.get(ordinal).and_then(Option::as_ref) else { return Ok(Vec::new()) };
        if units.is_empty() || units.len() > MOST_UNITS || bytes > self.most_bytes {
            return Ok(Vec::new());
        }
        let mut chunks = 0;
        for (i, unit) in units.iter().enumerate() {
            let entry = [unit.start, 0, unit.size(), chunks];
            // SAFETY: the table has room for MOST_UNITS entries, and no kernel reads it now.
            unsafe { self.area.add(self.table_at() + i * ENTRY).cast::<[u64; 4]>().write_unaligned(entry) };
            chunks += unit.size().div_ceil(CHUNK as u64);
        }
        let at = |offset: usize| self.area as u64 + offset as u64;
        let (schedule, table, hashes, digests) =
            (at(0), at(self.table_at()), at(self.hashes_at()), at(self.digests_at()));
        let blocks = chunks.clamp(1, u64::from(processors.max(1) * BLOCKS)) as u32;
        let mut params = self.schedule.column_bytes();
        [schedule, table, units.len() as u64, chunks, digests].iter().for_each(|w| params.extend(w.to_le_bytes()));
        let mut last: Vec<u8> = Vec::new();
        [schedule, table, digests, hashes].iter().for_each(|word| last.extend(word.to_le_bytes()));
        // SAFETY: the kernels are ours; they read the units, which are mapped and readable, and the area, and write the
        // area, which holds digests for `most_bytes` and a chunk more for each unit.
        unsafe {
            expect("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(loaded.context))?;
            launch(driver, loaded.hash, blocks, loaded.stream, &mut params)?;
            launch(driver, loaded.finish, units.len() as u32, loaded.stream, &mut last)?;
            expect("cuStreamSynchronize", (driver.cuStreamSynchronize)(loaded.stream))?;
        }
        let of = |i: usize| {
            // SAFETY: written by the kernel, which has ended.
            let bytes = unsafe { self.area.add(self.hashes_at() + i * HASH).cast::<[u8; HASH]>().read_unaligned() };
            ContentHash::from_le_bytes(bytes)
        };
        Ok((0..units.len()).map(of).collect())
    }
}

/// Launches one of the kernels.
///
/// # Safety
/// What the parameters point to must be as the kernel takes it; the function's context is current.
unsafe fn launch(
    driver: &Driver,
    function: CUfunction,
    blocks: u32,
    stream: CUstream,
    params: &mut [u8],
) -> Result<(), CallFailed> {
    let mut size = params.len();
    // CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE.
    let mut extra = [
        std::ptr::without_provenance_mut(1),
        params.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut size).cast::<c_void>(),
        std::ptr::null_mut(),
    ];
    let (none, extra) = (std::ptr::null_mut(), extra.as_mut_ptr());
    // SAFETY: `extra` and what it points to live through the call; the rest is the caller's promise.
    let launched = unsafe { (driver.cuLaunchKernel)(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, none, extra) };
    expect("cuLaunchKernel", launched)
}
