//! Libraries that several threads load before a restore replays their records.
//!
//! Most of the time of a replay goes into `cuLibraryLoadData`: 389 of 420 ms for a decode by PyTorch with 74 libraries. Under lazy
//! loading it reads a library and places nothing on a device; code and variables get their places by the records that follow, in
//! their order. So libraries may be loaded in any order and at the same time (measured, `tests/facts/loading.cu --ahead`: every
//! variable and function lies where it lay).

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
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

/// Libraries whose records have not been replayed yet, by the client's handles.
#[derive(Default)]
pub(crate) struct Ahead(HashMap<u64, Loaded>);

impl Ahead {
    /// Loads libraries. Does nothing where the driver would place a library's code as it loads it.
    ///
    /// A library is left to its record if it must be compiled, since the compiler needs a larger stack than these threads have.
    pub(crate) fn load(driver: &Driver, mut libraries: Vec<(u64, Arc<Image>)>) -> Self {
        if !loads_lazily(driver) {
            return Self::default();
        }
        libraries.retain(|(_, image)| !image.must_be_compiled);
        let (next, loaded) = (AtomicUsize::new(0), Mutex::new(HashMap::new()));
        let work = || {
            while let Some((handle, image)) = libraries.get(next.fetch_add(1, Ordering::Relaxed)) {
                let library = JitOptions::default().load(driver, Kind::Library, image);
                loaded.lock().unwrap_or_else(PoisonError::into_inner).insert(*handle, library);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..cores().min(THREADS_MAX).min(libraries.len()) {
                // A thread that cannot be started is no loss but of time.
                let _ = small_thread("library").spawn_scoped(scope, work);
            }
            work();
        });
        Self(loaded.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// The library of this handle, if it was loaded ahead.
    pub(crate) fn take(&mut self, handle: u64) -> Option<Loaded> {
        self.0.remove(&handle)
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
        let mut ahead = Ahead::load(driver(lazy), libraries.collect());
        for number in (1..=100_u8).rev() {
            let expected = if number == REFUSED { Err(CUDA_ERROR_INVALID_IMAGE) } else { Ok(u64::from(number)) };
            let handle = u64::from(number) << 8;
            assert_eq!(ahead.take(handle), Some(expected));
            assert_eq!(ahead.take(handle), None, "the next one of this handle is another");
        }
    }

    #[test]
    fn code_to_compile_and_code_that_gets_its_place_at_once_are_left_to_their_records() {
        let both = || vec![(1, image(1, true)), (2, image(2, false))];
        let mut ahead = Ahead::load(driver(lazy), both());
        assert_eq!((ahead.take(1), ahead.take(2)), (None, Some(Ok(2))));
        let mut ahead = Ahead::load(driver(eager), both());
        assert_eq!((ahead.take(1), ahead.take(2)), (None, None));
    }
}
