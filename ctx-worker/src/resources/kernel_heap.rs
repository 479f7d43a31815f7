//! The heap from which a client's kernels take memory with `malloc`.
//!
//! The driver makes it at the first launch of a kernel that could call `malloc`, with the size that `CU_LIMIT_MALLOC_HEAP_SIZE` has by
//! then, and keeps it for the context's life. It does not say where the heap lies, and copies nothing from or to it. All that `malloc`
//! knows lies in the heap: its bytes in the heap of another process, at the same addresses, are the same heap
//! (`tests/facts/heap.cu`; `docs/results/2026-11-30-H200-heap.txt`).
//!
//! ```text
//!   first such launch:  rekindle_heap_find ─► where it lies        all such launches wait for that on the device
//!   dump, quiesced:     rekindle_heap_copy ─► the area ─► a blob of the image
//!   restore, replay:    rekindle_heap_find, at the same place of the log: the driver makes the heap; does it lie where it lay?
//!           at its end: the blob ─► the area ─► rekindle_heap_copy
//! ```
//!
//! Only heaps of primary contexts are saved, up to [`MOST`] bytes. `serve/kernel_heap.rs` calls this before launches.

use std::cell::Cell;

use rekindle_cuda_abi::types::*;
use rekindle_images::BlobKind;

use crate::gpu::driver::{CallFailed, Driver, checked, launch};
use crate::resources::kernel_heap_error::{HeapError, MOST};
use crate::resources::not_loaded::NotLoaded;
use crate::resources::saved::{Part, Saved};
use crate::session::state::{self, StateError};

const PTX: &str = concat!(include_str!("../../kernels/heap.ptx"), "\0");

/// `CU_LIMIT_MALLOC_HEAP_SIZE`
const LIMIT: u32 = 2;
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const NO_TIMING: u32 = 2;
/// Device memory through which content comes and goes.
const AREA: usize = 2 << 20;
/// The words that `rekindle_heap_find` writes to it.
const FOUND: usize = 2;
const BLOCKS: u32 = 64;
const THREADS: u32 = 256;

/// The heap of one device's primary context.
struct KernelHeap {
    /// The record of the client's log after which the driver has made it, and how many heaps it had made before.
    made_after: u64,
    number: u32,
    context: CUcontext,
    module: CUmodule,
    copy: CUfunction,
    stream: CUstream,
    area: CUdeviceptr,
    /// Behind the kernel that finds the heap, as long as that may run.
    finding: Cell<Option<CUevent>>,
    /// The heap's address and its size, once somebody has asked for them. A heap that was not found has size 0.
    place: Option<(u64, u64)>,
    /// Its content, in a dump and in a restore.
    content: Cell<Vec<u8>>,
}

/// The heaps that the client's kernels may have used, by device.
#[derive(Default)]
pub(crate) struct KernelHeaps {
    heaps: Vec<Option<KernelHeap>>,
}

impl KernelHeaps {
    fn of(&self, ordinal: usize) -> Option<&KernelHeap> {
        self.heaps.get(ordinal)?.as_ref()
    }

    /// Whether the driver has made the heap of a device.
    pub(crate) fn has(&self, ordinal: usize) -> bool {
        self.of(ordinal).is_some()
    }

    /// Whether kernels may have used any heap.
    pub(crate) fn is_empty(&self) -> bool {
        self.heaps.iter().all(Option::is_none)
    }

    /// Whether the kernel that finds the heap of a device has run.
    pub(crate) fn may_be_used(&self, driver: &Driver, ordinal: usize) -> bool {
        let Some(heap) = self.of(ordinal) else { return false };
        let Some(event) = heap.finding.get() else { return true };
        // SAFETY: an event of this heap's, which is destroyed once.
        unsafe {
            if (driver.cuEventQuery)(event) == CUDA_ERROR_NOT_READY {
                return false;
            }
            heap.finding.set(None);
            (driver.cuEventDestroy_v2)(event);
        }
        true
    }

    /// Has the driver make the heap of a device's primary context, which is current, and a kernel find it. The log has so many records.
    ///
    /// # Errors
    /// Nothing is known of a heap then.
    pub(crate) fn make(
        &mut self,
        driver: &Driver,
        (ordinal, context): (usize, CUcontext),
        records: u64,
    ) -> Result<(), HeapError> {
        let mut limit = 0;
        // SAFETY: the out parameter is a local.
        checked("cuCtxGetLimit", unsafe { (driver.cuCtxGetLimit)(&raw mut limit, LIMIT) })?;
        if limit as u64 > MOST {
            return Err(HeapError::TooLarge(limit as u64));
        }
        let (mut heap, find) = KernelHeap::load(driver, context)?;
        (heap.made_after, heap.number) = (records, self.heaps.iter().flatten().count() as u32);
        if let Err(failed) = heap.find(driver, find, limit as u64) {
            heap.leave(driver);
            return Err(failed.into());
        }
        if self.heaps.len() <= ordinal {
            self.heaps.resize_with(ordinal + 1, || None);
        }
        self.heaps[ordinal] = Some(heap);
        Ok(())
    }

    /// Has what is enqueued in a stream from now on wait until the heap of a device was found.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn wait(&self, driver: &Driver, ordinal: usize, stream: CUstream) -> Result<(), CallFailed> {
        let Some(event) = self.of(ordinal).and_then(|heap| heap.finding.get()) else { return Ok(()) };
        // SAFETY: the caller's stream, and an event of this heap's.
        checked("cuStreamWaitEvent", unsafe { (driver.cuStreamWaitEvent)(stream, event, 0) })
    }

    /// Has the driver make a saved client's heap where the log has it. It must lie where it lay.
    pub(crate) fn make_again(
        &mut self,
        driver: &Driver,
        (ordinal, context): (usize, CUcontext),
        records: u64,
        saved: &state::KernelHeap,
    ) -> Result<(), NotLoaded> {
        // SAFETY: the context is the device's primary one.
        checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(context) })?;
        self.make(driver, (ordinal, context), records).map_err(NotLoaded::Heap)?;
        let heap = self.heaps.get_mut(ordinal).and_then(Option::as_mut).ok_or(NotLoaded::NoDevice)?;
        let found = heap.place(driver)?;
        if found == (saved.base, saved.size) {
            Ok(())
        } else {
            Err(NotLoaded::HeapMoved { saved: (saved.base, saved.size), found })
        }
    }

    /// Forgets the heap of a device whose primary context the client has released, or which is about to be reset. Some context is current
    /// afterwards.
    pub(crate) fn release(&mut self, driver: &Driver, ordinal: usize) {
        if let Some(heap) = self.heaps.get_mut(ordinal).and_then(Option::take) {
            heap.leave(driver);
        }
    }

    /// Reads the content of all heaps, for [`Saved::save`]. Nothing runs on the devices. Some context of theirs is current afterwards.
    ///
    /// # Errors
    /// Why a heap cannot be saved.
    pub(crate) fn read(&mut self, driver: &Driver) -> Result<(), HeapError> {
        for heap in self.heaps.iter_mut().flatten() {
            let (base, size) = heap.place(driver)?;
            if size == 0 {
                return Err(HeapError::NotFound);
            }
            let mut content = vec![0_u8; size as usize];
            for (offset, part) in (0..).step_by(AREA).zip(content.chunks_mut(AREA)) {
                heap.copy(driver, heap.area, base + offset, part.len())?;
                // SAFETY: the part lives until the stream is idle.
                unsafe {
                    let (to, bytes) = (part.as_mut_ptr().cast(), part.len());
                    let copied = (driver.cuMemcpyDtoHAsync_v2)(to, heap.area, bytes, heap.stream);
                    checked("cuMemcpyDtoHAsync", copied)?;
                    checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(heap.stream))?;
                }
            }
            heap.content.set(content);
        }
        Ok(())
    }

    /// Writes the content that [`Saved::load`] has taken up. Nothing runs on the devices. Some context of theirs is current afterwards.
    ///
    /// # Errors
    /// Errors of the driver, and an image without the content.
    pub(crate) fn write(&mut self, driver: &Driver) -> Result<(), NotLoaded> {
        for heap in self.heaps.iter_mut().flatten() {
            let (base, size) = heap.place(driver)?;
            let content = heap.content.take();
            if content.len() as u64 != size {
                return Err(NotLoaded::Image("the image lacks the content of its kernels' heap"));
            }
            for (offset, part) in (0..).step_by(AREA).zip(content.chunks(AREA)) {
                // SAFETY: the area has room for the part, which lives until the stream is idle.
                unsafe {
                    let (from, bytes) = (part.as_ptr().cast(), part.len());
                    let copied = (driver.cuMemcpyHtoDAsync_v2)(heap.area, from, bytes, heap.stream);
                    checked("cuMemcpyHtoDAsync", copied)?;
                }
                heap.copy(driver, base + offset, heap.area, part.len())?;
                // SAFETY: the stream is ours.
                checked("cuStreamSynchronize", unsafe { (driver.cuStreamSynchronize)(heap.stream) })?;
            }
        }
        Ok(())
    }

    /// Why the heaps cannot be saved, as far as it is known without the devices.
    pub(crate) fn obstacle(&self) -> Option<String> {
        let is_lost = |heap: &KernelHeap| heap.place.is_some_and(|(_, size)| size == 0);
        self.heaps.iter().flatten().any(is_lost).then(|| HeapError::NotFound.to_string())
    }

    /// How an image describes the heap of a device. The content was read.
    pub(crate) fn describe(&self, ordinal: usize) -> Option<state::KernelHeap> {
        let heap = self.of(ordinal)?;
        let (base, size) = heap.place?;
        let &KernelHeap { made_after, number, .. } = heap;
        Some(state::KernelHeap { made_after, number, base, size, ..state::KernelHeap::default() })
    }
}

/// The content of heaps; the number of a part is its device's.
impl Saved for KernelHeaps {
    const KIND: BlobKind = BlobKind::KernelHeap;
    type With<'a> = ();

    fn save(&self) -> Result<Vec<Part>, StateError> {
        let heaps = (0..).zip(&self.heaps).filter_map(|(handle, heap)| Some((handle, heap.as_ref()?)));
        Ok(heaps.map(|(handle, heap)| Part { handle, bytes: heap.content.take() }).collect())
    }

    fn load(&mut self, part: Part, (): ()) -> Result<(), NotLoaded> {
        let heap = usize::try_from(part.handle).ok().and_then(|ordinal| self.heaps.get_mut(ordinal)?.as_mut());
        let heap = heap.ok_or(NotLoaded::Image("the image has the content of a heap that its kernels do not have"))?;
        heap.content.set(part.bytes);
        Ok(())
    }
}

impl KernelHeap {
    /// Loads the kernels into a context, which is the current one. Their code gets its place now, and not at the first dump, which no replay of
    /// the log repeats.
    fn load(driver: &Driver, context: CUcontext) -> Result<(Self, CUfunction), CallFailed> {
        let (mut module, mut find, mut copy, mut stream, mut area) = (0, 0, 0, 0, 0);
        // SAFETY: out parameters are locals; the image and the names end in a NUL.
        let loaded = unsafe {
            checked("cuModuleLoadData", (driver.cuModuleLoadData)(&raw mut module, PTX.as_ptr().cast()))?;
            let get = driver.cuModuleGetFunction;
            checked("cuModuleGetFunction", get(&raw mut find, module, c"rekindle_heap_find".as_ptr()))
                .and_then(|()| {
                    checked("cuModuleGetFunction", get(&raw mut copy, module, c"rekindle_heap_copy".as_ptr()))
                })
                .and_then(|()| checked("cuFuncLoad", (driver.cuFuncLoad)(find)))
                .and_then(|()| checked("cuFuncLoad", (driver.cuFuncLoad)(copy)))
                .and_then(|()| checked("cuMemAlloc", (driver.cuMemAlloc_v2)(&raw mut area, AREA)))
                .and_then(|()| checked("cuStreamCreate", (driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING)))
        };
        let (made_after, number, finding, content) = (0, 0, Cell::default(), Cell::default());
        let heap = Self { made_after, number, context, module, copy, stream, area, finding, place: None, content };
        match loaded {
            Ok(()) => Ok((heap, find)),
            Err(failed) => {
                heap.leave(driver);
                Err(failed)
            }
        }
    }

    /// Has the driver make the heap, and a kernel find it. The context is current.
    fn find(&self, driver: &Driver, find: CUfunction, limit: u64) -> Result<(), CallFailed> {
        let mut event = 0;
        let parameters = [self.area, limit];
        // SAFETY: the area has room for what the kernel writes; the out parameter is a local.
        unsafe {
            let cleared = (driver.cuMemsetD8Async)(self.area, 0, FOUND * size_of::<u64>(), self.stream);
            checked("cuMemsetD8Async", cleared)?;
            checked("cuEventCreate", (driver.cuEventCreate)(&raw mut event, NO_TIMING))?;
            self.finding.set(Some(event));
            launch(driver, find, (1, 1), self.stream, &parameters)?;
            checked("cuEventRecord", (driver.cuEventRecord)(event, self.stream))
        }
    }

    /// Where the heap lies, and its size: 0 if it was not found. The context is current afterwards.
    fn place(&mut self, driver: &Driver) -> Result<(u64, u64), CallFailed> {
        // SAFETY: the context is the one that everything here was made in.
        checked("cuCtxSetCurrent", unsafe { (driver.cuCtxSetCurrent)(self.context) })?;
        if let Some(place) = self.place {
            return Ok(place);
        }
        let mut found = [0_u64; FOUND];
        // SAFETY: the kernel has written so many bytes there, and what they are copied to lives until the stream is idle.
        unsafe {
            let (to, bytes) = (found.as_mut_ptr().cast(), size_of_val(&found));
            checked("cuMemcpyDtoHAsync", (driver.cuMemcpyDtoHAsync_v2)(to, self.area, bytes, self.stream))?;
            checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(self.stream))?;
        }
        Ok(*self.place.insert((found[0], found[1])))
    }

    /// Copies whole words between the heap and the area. The context is current.
    fn copy(&self, driver: &Driver, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<(), CallFailed> {
        // SAFETY: both are so long: the heap was found, and the caller copies no more than the area holds.
        unsafe { launch(driver, self.copy, (BLOCKS, THREADS), self.stream, &[to, from, bytes as u64 / 8]) }
    }

    /// Gives back what was made in the context, which is current afterwards. Nothing of it runs.
    fn leave(self, driver: &Driver) {
        // SAFETY: made in `load` and `find`, where 0 is what was not made.
        unsafe {
            (driver.cuCtxSetCurrent)(self.context);
            if let Some(event) = self.finding.take() {
                (driver.cuEventDestroy_v2)(event);
            }
            if self.stream != 0 {
                (driver.cuStreamDestroy_v2)(self.stream);
            }
            if self.area != 0 {
                (driver.cuMemFree_v2)(self.area);
            }
            (driver.cuModuleUnload)(self.module);
        }
    }
}
