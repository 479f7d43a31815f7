//! Measures how fast the hashing kernels are, compared with the device's memory: `rekindle-bench hash`, which `scripts/bench
//! hash` calls. No worker and no daemon are involved.

use std::path::Path;

use rekindle_cuda_abi::types::*;
use rekindle_images::content::ContentKey;
use rekindle_wire::window;
use serde::Serialize;

use super::hash::{Hasher, Piece};
use crate::checkpoint::engine::bench::BenchError;
use crate::gpu::driver::{self, CallFailed, Driver, checked};
use crate::resources::memory::DeviceMemory;

const MULTIPROCESSOR_COUNT: u32 = 16;
const NO_FLAGS: u32 = 0;

/// One size's figures: GB/s of content, one for each repeat.
#[derive(Debug, Serialize)]
struct Figures {
    bytes: u64,
    /// Pieces per launch.
    pieces: usize,
    /// A memset: the device writes.
    memset: Vec<f64>,
    /// A copy on the device, which reads and writes: twice as many bytes move.
    copy: Vec<f64>,
    hash: Vec<f64>,
    copy_and_hash: Vec<f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    processors: u32,
    figures: Vec<Figures>,
}

/// Measures each size in bytes, in pieces of `piece` at most, and prints JSON.
///
/// # Errors
/// A resource is not available, or a hash is wrong.
pub(crate) fn bench(library: &Path, sizes: &[u64], piece: u64, repeats: usize) -> Result<(), BenchError> {
    let driver = driver::load(library)?;
    let largest = sizes.iter().copied().max().filter(|largest| *largest > 0).ok_or(BenchError::NoSize)?;
    if sizes.contains(&0) || piece == 0 {
        return Err(BenchError::Nothing);
    }
    let bench = Bench::new(&driver, largest)?;
    let figures = bench.run(sizes, piece, repeats)?;
    let report = Report { processors: bench.processors, figures };
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

struct Bench<'a> {
    driver: &'a Driver,
    device: CUdevice,
    primary: CUcontext,
    processors: u32,
    largest: u64,
    source: u64,
    target: u64,
    events: [CUevent; 2],
}

impl<'a> Bench<'a> {
    fn new(driver: &'a Driver, largest: u64) -> Result<Self, CallFailed> {
        let (mut device, mut primary, mut processors, mut events) = (0, 0, 0, [0; 2]);
        // SAFETY: out parameters are locals.
        unsafe {
            checked("cuInit", (driver.cuInit)(0))?;
            checked("cuDeviceGet", (driver.cuDeviceGet)(&raw mut device, 0))?;
            checked("cuDevicePrimaryCtxRetain", (driver.cuDevicePrimaryCtxRetain)(&raw mut primary, device))?;
            checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))?;
            let got = (driver.cuDeviceGetAttribute)(&raw mut processors, MULTIPROCESSOR_COUNT, device);
            checked("cuDeviceGetAttribute", got)?;
            for event in &mut events {
                checked("cuEventCreate", (driver.cuEventCreate)(event, NO_FLAGS))?;
            }
        }
        // Allocated like a client's memory: pieces that are mapped side by side.
        let mut memory = DeviceMemory::new(device, 0, window::MAX_PIECE);
        memory.client_reserves(window::device(0).end);
        let mut allocate =
            || memory.allocate(driver, largest, 0).map_err(|e| CallFailed { call: "an allocation", code: e.code() });
        let (source, target) = (allocate()?, allocate()?);
        Ok(Self { driver, device, primary, processors: processors.unsigned_abs(), largest, source, target, events })
    }

    fn run(&self, sizes: &[u64], piece: u64, repeats: usize) -> Result<Vec<Figures>, BenchError> {
        let driver = self.driver;
        let key = ContentKey::random()?;
        let mut hasher = Hasher::new(&key, 1, self.largest);
        hasher.prepare(driver, (0, self.device), self.primary)?;
        let stream = hasher.stream(0).ok_or(BenchError::NoStream)?;
        self.check(&mut hasher, &key.schedule(), stream, piece)?;
        let mut all = Vec::new();
        for &bytes in sizes {
            let (mut memset, mut copy, mut hash, mut copy_and_hash) = (vec![], vec![], vec![], vec![]);
            let mut pieces = 0;
            for repeat in 0..repeats {
                // Other memory each time, as far as possible: caches hold some of the memory that was read last.
                let places = self.largest / bytes;
                let offset = repeat as u64 % places * bytes;
                let (source, target) = (self.source + offset, self.target + offset);
                let table = cut(source, target, bytes, piece);
                pieces = table.len();
                let table = hasher.table(driver, 0, &table)?;
                let table = table.ok_or(BenchError::TooMany)?;
                let place = (0, self.processors);
                let rate = |what: &dyn Fn() -> Result<(), CallFailed>| {
                    self.time(stream, what).map(|ms| bytes as f64 / ms / 1e6)
                };
                // SAFETY: both allocations hold `bytes` bytes from the offset on, and live to the end.
                memset.push(rate(&|| unsafe {
                    checked("memset", (driver.cuMemsetD8Async)(target, repeat as u8, bytes as usize, stream))
                })?);
                // SAFETY: as above.
                copy.push(rate(&|| unsafe {
                    checked("copy", (driver.cuMemcpyAsync)(target, source, bytes as usize, stream))
                })?);
                // SAFETY: as above.
                hash.push(rate(&|| unsafe { hasher.enqueue(driver, place, &table, false) })?);
                // SAFETY: as above.
                copy_and_hash.push(rate(&|| unsafe { hasher.enqueue(driver, place, &table, true) })?);
            }
            all.push(Figures { bytes, pieces, memset, copy, hash, copy_and_hash });
        }
        Ok(all)
    }

    /// Checks, before the measurements, that this device computes the same hashes as the host.
    fn check(
        &self,
        hasher: &mut Hasher,
        schedule: &rekindle_images::content::Schedule,
        stream: CUstream,
        piece: u64,
    ) -> Result<(), BenchError> {
        let bytes = self.largest.min(3 << 20);
        let content: Vec<u8> = (0..bytes).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        let pieces = cut(self.source, self.target, bytes, piece);
        let driver = self.driver;
        // SAFETY: the allocations hold the content, which lives until the copy is done.
        unsafe {
            let copied = (driver.cuMemcpyHtoDAsync_v2)(self.source, content.as_ptr().cast(), content.len(), stream);
            checked("copy", copied)?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))?;
        }
        let expected: Vec<_> = content.chunks(piece as usize).map(|piece| schedule.hash(piece)).collect();
        let table = hasher.table(driver, 0, &pieces)?.ok_or(BenchError::NoTable)?;
        for copies in [true, false] {
            // SAFETY: as above.
            unsafe { hasher.enqueue(driver, (0, self.processors), &table, copies) }?;
            if hasher.fetch(driver, 0, &table)? != expected {
                return Err(BenchError::Hashes);
            }
        }
        let mut back = vec![0; content.len()];
        // SAFETY: as above.
        unsafe {
            let copied = (driver.cuMemcpyDtoHAsync_v2)(back.as_mut_ptr().cast(), self.target, back.len(), stream);
            checked("copy", copied)?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))?;
        }
        if back == content { Ok(()) } else { Err(BenchError::Content) }
    }

    /// The milliseconds that an operation takes on the device.
    fn time(&self, stream: CUstream, what: &dyn Fn() -> Result<(), CallFailed>) -> Result<f64, CallFailed> {
        let (driver, [begin, end]) = (self.driver, self.events);
        let mut ms = 0.0_f32;
        // SAFETY: handles are the driver's own, the out parameter is a local.
        unsafe {
            checked("cuEventRecord", (driver.cuEventRecord)(begin, stream))?;
            what()?;
            checked("cuEventRecord", (driver.cuEventRecord)(end, stream))?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))?;
            checked("cuEventElapsedTime", (driver.cuEventElapsedTime_v2)(&raw mut ms, begin, end))?;
        }
        Ok(f64::from(ms).max(1e-6))
    }
}

fn cut(source: u64, target: u64, bytes: u64, piece: u64) -> Vec<Piece> {
    let at =
        |offset: u64| Piece { source: source + offset, target: target + offset, length: piece.min(bytes - offset) };
    (0..bytes.div_ceil(piece)).map(|i| at(i * piece)).collect()
}
