//! Memory of a restored client that a thread makes and maps while CRIU makes the client's process and the client's log is replayed.
//!
//! ```text
//!   load_when_mapped ──► thread "map": makes and maps the first part ─fill─► makes the rest ─made─► maps it ─fill─► over
//!                                                     the load's thread: └─► lanes                              └─► lanes
//!   wait_until_mapped: before anything else uses the memory
//! ```
//!
//! Nobody may be promised memory that this thread is about to make. So the GPU has room for it when the thread begins, and more
//! (`serve/load.rs`), and until the daemon hears that all of it is made, a second restore begins only where the GPU has room for both.

use std::sync::Arc;
use std::time::Instant;

use rekindle_cuda_abi::types::CUcontext;
use rekindle_wire::control::{MEMORY_MADE, MEMORY_MAPPED};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::content::ContentLoad;
use crate::checkpoint::engine::{Fill, small_thread};
use crate::checkpoint::mapping::{FIRST_PART, Mapped, Mapping};
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::device::Device;
use crate::resources::job::{EngineError, Job};
use crate::resources::memory::to_map::ToMap;

impl Checkpoint {
    /// Makes and maps this memory in a thread of its own, where this context is current, says when all of it is made and when it is mapped,
    /// and loads the content of each part when that is mapped. A load has begun. [`Checkpoint::load_rest`] follows, and the end of the load waits for
    /// the thread.
    ///
    /// # Errors
    /// There is no thread.
    pub(crate) fn load_when_mapped(
        &mut self,
        driver: &'static Driver,
        context: CUcontext,
        (to_map, fill): (Vec<ToMap>, Fill),
        says: impl Fn(&'static str) + Send + 'static,
    ) -> Result<(), EngineError> {
        let ContentLoad::UnderWay(load) = &mut self.content else { return Err(EngineError::NothingToLoad) };
        let Some(more) = load.more.clone() else { return Err(EngineError::NothingToLoad) };
        let parts = in_parts(to_map, fill);
        load.fills.extend(parts.iter().map(|(_, fill)| Arc::clone(fill)));
        // A load that has failed takes nothing more, and its error comes with its end.
        let work = move || map(driver, context, parts, says, |fill| drop(more.send(fill)));
        load.mapping = Mapping::UnderWay(small_thread("map").spawn(work).map_err(|_| EngineError::NoThread)?);
        Ok(())
    }

    /// Waits until all memory is mapped.
    ///
    /// # Errors
    /// It cannot be made or mapped.
    pub(crate) fn wait_until_mapped(&mut self, devices: &mut [Device]) -> Result<(), EngineError> {
        match &mut self.content {
            ContentLoad::UnderWay(load) => load.mapping.end(devices).map(drop),
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

/// Makes and maps one part after the other; `load` gets the content of each whose memory is mapped.
fn map(
    driver: &Driver,
    context: CUcontext,
    [first, rest]: [Part; 2],
    says: impl Fn(&'static str),
    mut load: impl FnMut(Arc<Fill>),
) -> Result<Mapped, CallFailed> {
    let began = Instant::now();
    // SAFETY: the context is the driver's own.
    checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(context) })?;
    let make = |part: &mut Vec<ToMap>| part.iter_mut().try_for_each(|it| it.make(driver).map_err(|(_, failed)| failed));
    let map = |part: &Vec<ToMap>| part.iter().try_for_each(|it| it.map(driver));
    let ((mut first, of_first), (mut rest, of_rest)) = (first, rest);
    make(&mut first)?;
    map(&first)?;
    load(of_first);
    make(&mut rest)?;
    says(MEMORY_MADE);
    map(&rest)?;
    says(MEMORY_MAPPED);
    load(of_rest);
    first.append(&mut rest);
    Ok(Mapped { parts: first, took: began.elapsed() })
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

    /// What fails: mapping at an address, or making as many pieces as are before it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Fails {
        Map,
        Create,
    }

    /// What may be accessed on the device, the bytes that are made, and what fails.
    #[derive(Debug, Default, PartialEq, Eq)]
    struct State {
        mapped: Vec<(u64, u64)>,
        made: u64,
        fails: Option<(Fails, u64)>,
    }

    static STATE: Mutex<State> = Mutex::new(State { mapped: Vec::new(), made: 0, fails: None });

    unsafe extern "C" fn succeeds() -> CUresult {
        CUDA_SUCCESS
    }

    unsafe extern "C" fn reserve(at: *mut CUdeviceptr, _: usize, _: usize, wanted: CUdeviceptr, _: u64) -> CUresult {
        // SAFETY: the caller's out parameter.
        unsafe { *at = wanted };
        CUDA_SUCCESS
    }

    unsafe extern "C" fn create(piece: *mut u64, size: usize, _: *const u8, _: u64) -> CUresult {
        let mut state = STATE.lock().unwrap();
        if matches!(state.fails, Some((Fails::Create, _))) && state.made == 9 * 64 * MIB {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        state.made += size as u64;
        // SAFETY: the caller's out parameter.
        unsafe { *piece = 7 };
        CUDA_SUCCESS
    }

    unsafe extern "C" fn map_piece(at: CUdeviceptr, _: usize, _: usize, piece: u64, _: u64) -> CUresult {
        assert_eq!(piece, 7);
        if STATE.lock().unwrap().fails == Some((Fails::Map, at)) { CUDA_ERROR_OUT_OF_MEMORY } else { CUDA_SUCCESS }
    }

    unsafe extern "C" fn access(at: CUdeviceptr, size: usize, to: *const CUmemAccessDesc, count: usize) -> CUresult {
        // SAFETY: the caller passes one.
        let to = unsafe { &*to };
        assert_eq!((to.flags, count), (CU_MEM_ACCESS_READWRITE, 1));
        STATE.lock().unwrap().mapped.push((at, size as u64));
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
    fn planned(driver: &Driver, allocations: u64, piece_size: u64) -> (DeviceMemory, [Part; 2], Vec<u64>) {
        let mut memory = DeviceMemory::new(0, 0, piece_size);
        let start = memory.client_reserved();
        let all: Vec<_> = (0..allocations).map(|i| start + 64 * MIB * i).collect();
        let to_map = memory.plan_many(|memory| {
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
        (memory, in_parts(vec![to_map.unwrap()], Fill::new(jobs.collect(), |_| true)), all)
    }

    /// Whether all of a job's memory is mapped.
    fn is_mapped(address: u64) -> bool {
        let state = STATE.lock().unwrap();
        let holds = |at: u64| state.mapped.iter().any(|(start, size)| (*start..start + size).contains(&at));
        holds(address) && holds(address + 4 * MIB - 1)
    }

    /// The driver's handles of all pieces of these allocations.
    fn handles(memory: &DeviceMemory, all: &[u64]) -> Vec<u64> {
        let pieces = all.iter().filter_map(|address| memory.backing(*address)).flat_map(|(_, _, pieces)| pieces);
        pieces.map(|it| it.real).collect()
    }

    #[test]
    fn content_is_loaded_when_its_memory_is_mapped_and_never_without() {
        let driver = driver();
        // Pieces of memory may be larger and smaller than those of content.
        for (allocations, piece_size, first) in [(32, 64 * MIB, 2 * 16), (1, 2 * MIB, 1), (3, 2 * MIB, 3)] {
            *STATE.lock().unwrap() = State::default();
            let (mut memory, parts, all) = planned(&driver, allocations, piece_size);
            assert_eq!(*STATE.lock().unwrap(), State::default(), "nothing is made or mapped");
            let mut sent = Vec::new();
            let all_bytes = allocations * 64 * MIB;
            let told = |what: &str| {
                let state = STATE.lock().unwrap();
                let mapped: u64 = state.mapped.iter().map(|(_, size)| size).sum();
                assert_eq!(state.made, all_bytes, "{what}");
                assert_eq!(mapped == all_bytes, what == MEMORY_MAPPED, "{what}");
            };
            let mapped = map(&driver, 1, parts, told, |fill| {
                assert!(addresses(&fill).into_iter().all(is_mapped), "{:?}", STATE.lock().unwrap());
                sent.push(addresses(&fill).len() as u64);
            })
            .unwrap();
            assert_eq!(sent, [first, allocations * 16 - first], "a sixteenth is mapped first");
            assert!(all.iter().copied().all(is_mapped));
            let pieces = (allocations * 64 * MIB / piece_size) as usize;
            assert_eq!(handles(&memory, &all), vec![0; pieces], "not known yet");
            mapped.parts.iter().for_each(|it| memory.take_made(it));
            let handles = handles(&memory, &all);
            assert_eq!((handles.len(), handles.contains(&0)), (pieces, false));
        }
        for (fails, call, sent_before) in [(Fails::Map, "cuMemMap", 1), (Fails::Create, "cuMemCreate", 1)] {
            *STATE.lock().unwrap() = State::default();
            let (_, parts, all) = planned(&driver, 32, 64 * MIB);
            let (mut sent, said) = (0, Mutex::new(Vec::new()));
            STATE.lock().unwrap().fails = Some((fails, all[9]));
            let failed = map(&driver, 1, parts, |what| said.lock().unwrap().push(what), |_| sent += 1).err().unwrap();
            assert_eq!((failed.call, failed.code), (call, CUDA_ERROR_OUT_OF_MEMORY));
            assert_eq!(sent, sent_before, "the rest is not mapped");
            let expected: &[&str] = if fails == Fails::Map { &[MEMORY_MADE] } else { &[] };
            assert_eq!(*said.lock().unwrap(), expected);
        }
    }
}
