//! Libraries that threads load while a restore replays the records before theirs.
//!
//! Most of the time of a replay goes into `cuLibraryLoadData`: 389 of 420 ms for a decode by PyTorch with 74 libraries. Under lazy
//! loading it reads a library and places nothing on a device; code and variables get their places by the records that follow, in
//! their order. So libraries may be loaded in any order and at the same time.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::Kind;

use crate::checkpoint::engine::small_thread;
use crate::cores::cores;
use crate::gpu::driver::Driver;
use crate::resources::code_store::Image;
use crate::resources::jit::JitOptions;

/// The most threads: more make the driver no faster (`cuLibraryLoadData` of 64 libraries of 0.9 MB on an H100: 58 ms with 1 thread, 20
/// with 4, 17 with 8, 22 with 16).
const THREADS_MAX: usize = 8;
/// `CU_MODULE_LAZY_LOADING`
const LAZY: u32 = 2;

/// The driver's handle of a library, or its error.
type Loaded = Result<u64, CUresult>;

/// Libraries that are loaded ahead of their records, by the client's handles.
#[derive(Default)]
pub(crate) struct Ahead(HashMap<u64, Receiver<Loaded>>);

struct Task {
    image: Arc<Image>,
    done: SyncSender<Loaded>,
}

impl Ahead {
    /// Begins to load libraries, in this order. Does nothing where the driver would place a library's code as it loads it.
    ///
    /// A library is loaded by the record itself if it must be compiled, since the compiler needs a larger stack than these threads have.
    pub(crate) fn begin(driver: &'static Driver, libraries: impl Iterator<Item = (u64, Arc<Image>)>) -> Self {
        if !loads_lazily(driver) {
            return Self::default();
        }
        let (mut tasks, mut ahead) = (VecDeque::new(), HashMap::new());
        for (handle, image) in libraries.filter(|(_, image)| !image.must_be_compiled) {
            let (done, loaded) = sync_channel(1);
            tasks.push_back(Task { image, done });
            ahead.insert(handle, loaded);
        }
        let threads = cores().min(THREADS_MAX).min(tasks.len());
        let tasks = Arc::new(Mutex::new(tasks));
        for _ in 0..threads {
            let tasks = Arc::clone(&tasks);
            // A thread that cannot be started is no loss but of time.
            let _ = small_thread("library").spawn(move || load_all(driver, &tasks));
        }
        Self(ahead)
    }

    /// Waits for the library of this handle. Returns nothing if it is not loaded ahead, or if no thread could load it.
    pub(crate) fn take(&mut self, handle: u64) -> Option<Loaded> {
        self.0.remove(&handle)?.recv().ok()
    }
}

/// Loads libraries until none is left. When the last thread is gone, so are the tasks that it has not begun, and whoever waits for one
/// learns it.
fn load_all(driver: &Driver, tasks: &Mutex<VecDeque<Task>>) {
    let next = || tasks.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    while let Some(Task { image, done }) = next() {
        // Nobody waits any more if the restore has failed.
        let _ = done.send(JitOptions::default().load(driver, Kind::Library, &image));
    }
}

/// Whether the driver places code when it is first used, rather than when it is loaded.
fn loads_lazily(driver: &Driver) -> bool {
    let mut mode = 0;
    // SAFETY: the out parameter is a local.
    unsafe { (driver.cuModuleGetLoadingMode)(&raw mut mode) == CUDA_SUCCESS && mode == LAZY }
}

#[cfg(test)]
mod tests {
    use rekindle_images::CodeHash;

    use super::*;
    use crate::gpu::driver::LoadError;

    const REFUSED: u8 = 13;

    /// A driver whose libraries have the first byte of their image as their handle, and that refuses one image.
    fn driver(mode: unsafe extern "C" fn(*mut u32) -> CUresult) -> &'static Driver {
        unsafe extern "C" fn load(
            library: *mut CUlibrary,
            image: *const std::ffi::c_void,
            _: *mut u32,
            _: *mut *mut std::ffi::c_void,
            _: u32,
            _: *mut u32,
            _: *mut *mut std::ffi::c_void,
            _: u32,
        ) -> CUresult {
            // SAFETY: both are what `JitOptions::load` passes.
            unsafe {
                let first = image.cast::<u8>().read();
                library.write(u64::from(first));
                if first == REFUSED { CUDA_ERROR_INVALID_IMAGE } else { CUDA_SUCCESS }
            }
        }
        extern "C" fn succeed() -> CUresult {
            CUDA_SUCCESS
        }
        let find = |_: &'static str| Ok::<_, LoadError>(succeed as *const std::ffi::c_void);
        // SAFETY: a function of the C ABI leaves its arguments to its caller, so one that looks at none of them can stand for all.
        let mut driver = unsafe { Driver::load(find) }.unwrap();
        (driver.cuLibraryLoadData, driver.cuModuleGetLoadingMode) = (load, mode);
        Box::leak(Box::new(driver))
    }

    unsafe extern "C" fn lazy(mode: *mut u32) -> CUresult {
        // SAFETY: an out parameter.
        unsafe { mode.write(LAZY) };
        CUDA_SUCCESS
    }

    unsafe extern "C" fn eager(mode: *mut u32) -> CUresult {
        // SAFETY: an out parameter.
        unsafe { mode.write(1) };
        CUDA_SUCCESS
    }

    /// An image of one part, with this first byte.
    fn image(first: u8, must_be_compiled: bool) -> Arc<Image> {
        let mut bytes: Vec<u8> = [1_u64, 3].into_iter().flat_map(u64::to_le_bytes).collect();
        bytes.extend([first, 0, 0]);
        let mut image = Image::new(CodeHash::of(&bytes), bytes, (9, 0)).unwrap();
        assert!(image.must_be_compiled, "nobody can read it");
        image.must_be_compiled = must_be_compiled;
        Arc::new(image)
    }

    #[test]
    fn every_library_is_loaded_once_and_answers_for_itself() {
        let libraries = (1..=100_u8).map(|number| (u64::from(number) << 8, image(number, false)));
        let mut ahead = Ahead::begin(driver(lazy), libraries);
        for number in (1..=100_u8).rev() {
            let expected = if number == REFUSED { Err(CUDA_ERROR_INVALID_IMAGE) } else { Ok(u64::from(number)) };
            let handle = u64::from(number) << 8;
            assert_eq!(ahead.take(handle), Some(expected));
            assert_eq!(ahead.take(handle), None, "the next one of this handle is another");
        }
    }

    #[test]
    fn code_to_compile_and_code_that_gets_its_place_at_once_are_left_to_their_records() {
        let both = || [(1, image(1, true)), (2, image(2, false))].into_iter();
        let mut ahead = Ahead::begin(driver(lazy), both());
        assert_eq!((ahead.take(1), ahead.take(2)), (None, Some(Ok(2))));
        let mut ahead = Ahead::begin(driver(eager), both());
        assert_eq!((ahead.take(1), ahead.take(2)), (None, None));
    }

    #[test]
    fn a_task_that_no_thread_takes_is_left_to_its_record() {
        let (done, loaded) = sync_channel(1);
        let mut ahead = Ahead(HashMap::from([(1, loaded)]));
        drop(Task { image: image(1, false), done });
        assert_eq!(ahead.take(1), None);
    }
}
