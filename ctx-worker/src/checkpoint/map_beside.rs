//! Memory of a restored client that exists, and that a thread maps while CRIU makes the client's process and the client's log is replayed.
//!
//! ```text
//!   load_when_mapped ──► thread "map": maps the first part ─fill─► maps the rest ─fill─► over
//!                                           the load's thread: └─► lanes              └─► lanes
//!   wait_until_mapped: before anything else uses the memory
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::CUcontext;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::content::ContentLoad;
use crate::checkpoint::engine::{Fill, small_thread};
use crate::checkpoint::mapping::{FIRST_PART, Mapping};
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::job::{EngineError, Job};
use crate::resources::memory::to_map::ToMap;

impl Checkpoint {
    /// Maps this memory in a thread of its own, where this context is current, and loads the content of each part when it is mapped. A
    /// load has begun. [`Checkpoint::load_rest`] follows, and the end of the load waits for the thread.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn load_when_mapped(
        &mut self,
        driver: &'static Driver,
        context: CUcontext,
        (to_map, fill): (Vec<ToMap>, Fill),
    ) -> Result<(), EngineError> {
        let ContentLoad::UnderWay(load) = &mut self.content else { return Err(EngineError::NothingToLoad) };
        let Some(more) = load.more.clone() else { return Err(EngineError::NothingToLoad) };
        let parts = in_parts(to_map, fill);
        load.fills.extend(parts.iter().map(|(_, fill)| Arc::clone(fill)));
        // A load that has failed takes nothing more, and its error comes with its end.
        let work = move || map(driver, context, parts, |fill| drop(more.send(fill)));
        load.mapping = Mapping::UnderWay(small_thread("map").spawn(work).map_err(|_| EngineError::NoThread)?);
        Ok(())
    }

    /// Waits until all memory is mapped.
    ///
    /// # Errors
    /// It cannot be mapped.
    pub(crate) fn wait_until_mapped(&mut self) -> Result<(), EngineError> {
        match &mut self.content {
            ContentLoad::UnderWay(load) => load.mapping.end().map(drop),
            _ => Ok(()),
        }
    }
}

/// Memory of some devices, and its content.
type Part = (Vec<ToMap>, Arc<Fill>);

/// What is mapped first, and the rest.
fn in_parts(mut to_map: Vec<ToMap>, mut fill: Fill) -> [Part; 2] {
    let first = to_map.iter_mut().map(|of_device| of_device.split_first(of_device.bytes() / FIRST_PART)).collect();
    // A piece of memory may be smaller than one of content.
    let lies_in = |it: &ToMap, job: &Job| it.holds(job.address) || it.holds(job.address + job.length.max(1) - 1);
    let of_rest = fill.split_off(|job| to_map.iter().any(|it| lies_in(it, job)));
    [(first, Arc::new(fill)), (to_map, Arc::new(of_rest))]
}

/// Maps one part after the other; `load` gets the content of each whose memory is mapped. Returns how long that took.
fn map(
    driver: &Driver,
    context: CUcontext,
    parts: [Part; 2],
    mut load: impl FnMut(Arc<Fill>),
) -> Result<Duration, CallFailed> {
    let began = Instant::now();
    // SAFETY: the context is the driver's own.
    checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(context) })?;
    for (part, fill) in parts {
        part.iter().try_for_each(|of_device| of_device.map(driver))?;
        load(fill);
    }
    Ok(began.elapsed())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use rekindle_cuda_abi::types::{
        CU_MEM_ACCESS_READWRITE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUmemAccessDesc, CUresult,
    };
    use rekindle_images::{Compression, Extent, Piece, PieceHash, Storage};

    use super::*;
    use crate::resources::job::jobs;
    use crate::resources::memory::{Allocation, DeviceMemory};

    const MIB: u64 = 1 << 20;

    /// What may be accessed on the device, and where mapping fails.
    static MAPPED: Mutex<(Vec<(u64, u64)>, u64)> = Mutex::new((Vec::new(), 0));

    unsafe extern "C" fn succeeds() -> CUresult {
        CUDA_SUCCESS
    }

    unsafe extern "C" fn reserve(at: *mut CUdeviceptr, _: usize, _: usize, wanted: CUdeviceptr, _: u64) -> CUresult {
        // SAFETY: the caller's out parameter.
        unsafe { *at = wanted };
        CUDA_SUCCESS
    }

    unsafe extern "C" fn create(piece: *mut u64, _: usize, _: *const u8, _: u64) -> CUresult {
        // SAFETY: the caller's out parameter.
        unsafe { *piece = 7 };
        CUDA_SUCCESS
    }

    unsafe extern "C" fn map_piece(at: CUdeviceptr, _: usize, _: usize, piece: u64, _: u64) -> CUresult {
        assert_eq!(piece, 7);
        if at == MAPPED.lock().unwrap().1 { CUDA_ERROR_OUT_OF_MEMORY } else { CUDA_SUCCESS }
    }

    unsafe extern "C" fn access(at: CUdeviceptr, size: usize, to: *const CUmemAccessDesc, count: usize) -> CUresult {
        // SAFETY: the caller passes one.
        let to = unsafe { &*to };
        assert_eq!((to.flags, count), (CU_MEM_ACCESS_READWRITE, 1));
        MAPPED.lock().unwrap().0.push((at, size as u64));
        CUDA_SUCCESS
    }

    fn driver() -> Driver {
        let find = |symbol: &'static str| {
            Ok(match symbol.trim_end_matches('\0') {
                "cuMemAddressReserve" => reserve as *const std::ffi::c_void,
                "cuMemCreate" => create as *const _,
                "cuMemMap" => map_piece as *const _,
                "cuMemSetAccess" => access as *const _,
                _ => succeeds as *const _,
            })
        };
        // SAFETY: what is called here has its signature, or takes what it is given and looks at none of it.
        unsafe { Driver::load(find) }.unwrap()
    }

    /// The content of a part, by the addresses of its pieces.
    fn addresses(fill: &Fill) -> Vec<u64> {
        fill.to_compare().map(|part| part.job.address).collect()
    }

    /// What is to be mapped of as many allocations of 64 MiB, of a device with pieces of this size, with their content.
    fn made(driver: &Driver, allocations: u64, piece_size: u64) -> ([Part; 2], Vec<u64>) {
        let mut memory = DeviceMemory::new(0, 0, piece_size);
        let start = memory.client_reserved();
        let all: Vec<_> = (0..allocations).map(|i| start + 64 * MIB * i).collect();
        let to_map = memory.make_many(|memory| {
            all.iter().try_for_each(|address| {
                memory.allocate_at(driver, *address, Allocation { size: 64 * MIB, context: 1, pool: 0 })
            })
        });
        let stored = |job| {
            let hash = PieceHash::from_bytes([1; 16]);
            let extent = Extent { file: 0, offset: 0, length: 4 * MIB, compression: Compression::None };
            (job, Piece { offset: 0, length: 4 * MIB, hash, storage: Storage::Stored(extent) })
        };
        let jobs = all.iter().flat_map(|address| jobs(*address, 64 * MIB, 0, 1)).map(stored);
        (in_parts(vec![to_map.unwrap()], Fill::new(jobs.collect(), |_| true)), all)
    }

    /// Whether all of a job's memory is mapped.
    fn is_mapped(address: u64) -> bool {
        let mapped = MAPPED.lock().unwrap();
        let holds = |at: u64| mapped.0.iter().any(|(start, size)| (*start..start + size).contains(&at));
        holds(address) && holds(address + 4 * MIB - 1)
    }

    #[test]
    fn content_is_loaded_when_its_memory_is_mapped_and_never_without() {
        let driver = driver();
        // Pieces of memory may be larger and smaller than those of content.
        for (allocations, piece_size, first) in [(32, 64 * MIB, 2 * 16), (1, 2 * MIB, 1), (3, 2 * MIB, 3)] {
            *MAPPED.lock().unwrap() = (Vec::new(), 0);
            let (parts, all) = made(&driver, allocations, piece_size);
            assert!(MAPPED.lock().unwrap().0.is_empty(), "it is made, and not mapped");
            let mut sent = Vec::new();
            map(&driver, 1, parts, |fill| {
                assert!(addresses(&fill).into_iter().all(is_mapped), "{:?}", MAPPED.lock().unwrap());
                sent.push(addresses(&fill).len() as u64);
            })
            .unwrap();
            assert_eq!(sent, [first, allocations * 16 - first], "a sixteenth is mapped first");
            assert!(all.into_iter().all(is_mapped));
        }
        let (parts, all) = made(&driver, 32, 64 * MIB);
        *MAPPED.lock().unwrap() = (Vec::new(), all[9]);
        let mut sent = 0;
        let failed = map(&driver, 1, parts, |_| sent += 1).unwrap_err();
        assert_eq!((failed.call, failed.code), ("cuMemMap", CUDA_ERROR_OUT_OF_MEMORY));
        assert_eq!(sent, 1, "the rest is not mapped");
    }
}
