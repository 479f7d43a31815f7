//! Libraries that several threads load before a restore replays their records: when the restore begins, or before that, where a client
//! is about to come.
//!
//! Most of the time of a replay goes into `cuLibraryLoadData`: 389 of 420 ms for a decode by PyTorch with 74 libraries. Under lazy
//! loading it reads a library and places nothing on a device; code and variables get their places by the records that follow, in
//! their order. So libraries may be loaded in any order and at the same time (measured, `tests/facts/loading.cu --ahead`: every
//! variable and function lies where it lay).

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_images::CodeHash;
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

/// Libraries whose records have not been replayed yet, by the client's handles, and their code.
#[derive(Default)]
pub(crate) struct Ahead(HashMap<u64, (CodeHash, Loaded)>);

impl Ahead {
    /// Loads those of these libraries that are not there yet. Does nothing where the driver would place a library's code as it loads it.
    ///
    /// A library is left to its record if it must be compiled, since the compiler needs a larger stack than these threads have.
    pub(crate) fn load(&mut self, driver: &Driver, mut libraries: Vec<(u64, Arc<Image>)>) {
        if !loads_lazily(driver) {
            return;
        }
        libraries.retain(|(handle, image)| !image.must_be_compiled && !self.has(*handle, image));
        let (next, loaded) = (AtomicUsize::new(0), Mutex::new(HashMap::new()));
        let work = || {
            while let Some((handle, image)) = libraries.get(next.fetch_add(1, Ordering::Relaxed)) {
                let library = JitOptions::default().load(driver, Kind::Library, image);
                loaded.lock().unwrap_or_else(PoisonError::into_inner).insert(*handle, (image.hash, library));
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..cores().min(THREADS_MAX).min(libraries.len()) {
                // A thread that cannot be started is no loss but of time.
                let _ = small_thread("library").spawn_scoped(scope, work);
            }
            work();
        });
        for (handle, it) in loaded.into_inner().unwrap_or_else(PoisonError::into_inner) {
            if let Some((_, Ok(other))) = self.0.insert(handle, it) {
                unload(driver, other);
            }
        }
    }

    /// Whether this library is there.
    pub(crate) fn has(&self, handle: u64, image: &Image) -> bool {
        self.0.get(&handle).is_some_and(|(hash, _)| *hash == image.hash)
    }

    /// The library of this handle and code, if it was loaded ahead.
    pub(crate) fn take(&mut self, handle: u64, code: CodeHash) -> Option<Loaded> {
        let found = self.0.get(&handle).is_some_and(|(hash, _)| *hash == code);
        found.then(|| self.0.remove(&handle)).flatten().map(|(_, loaded)| loaded)
    }

    /// How many are there.
    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Forgets what was not loaded: the driver may load it later.
    pub(crate) fn forget_errors(&mut self) {
        self.0.retain(|_, (_, loaded)| loaded.is_ok());
    }

    /// Unloads what nobody has asked for.
    pub(crate) fn unload(&mut self, driver: &Driver) {
        self.0.drain().filter_map(|(_, (_, loaded))| loaded.ok()).for_each(|library| unload(driver, library));
    }
}

fn unload(driver: &Driver, library: u64) {
    // SAFETY: the handle is the driver's own, and nobody has it any more.
    unsafe { (driver.cuLibraryUnload)(library) };
}

/// Whether the driver places code when it is first used, rather than when it is loaded.
fn loads_lazily(driver: &Driver) -> bool {
    let mut mode = 0;
    // SAFETY: the out parameter is a local.
    unsafe { (driver.cuModuleGetLoadingMode)(&raw mut mode) == CUDA_SUCCESS && mode == LAZY }
}

#[cfg(test)]
mod tests {
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
        let mut ahead = Ahead::default();
        ahead.load(driver(lazy), libraries.collect());
        for number in (1..=100_u8).rev() {
            let expected = if number == REFUSED { Err(CUDA_ERROR_INVALID_IMAGE) } else { Ok(u64::from(number)) };
            let (handle, code) = (u64::from(number) << 8, image(number, false).hash);
            assert_eq!(ahead.take(handle, image(0, false).hash), None, "the same handle, of other code");
            assert_eq!(ahead.take(handle, code), Some(expected));
            assert_eq!(ahead.take(handle, code), None, "the next one of this handle is another");
        }
    }

    #[test]
    fn what_is_there_is_loaded_no_second_time_and_an_error_is_none_for_ever() {
        let code = image(REFUSED, false);
        let mut ahead = Ahead::default();
        ahead.load(driver(lazy), vec![(1, image(1, false)), (2, code.clone())]);
        assert!(ahead.has(1, &image(1, false)) && !ahead.has(1, &image(2, false)));
        ahead.forget_errors();
        assert_eq!(ahead.count(), 1);
        // Other code under the same handle takes its place.
        ahead.load(driver(lazy), vec![(1, image(3, false)), (2, code.clone())]);
        assert_eq!(ahead.take(1, image(3, false).hash), Some(Ok(3)));
        assert_eq!(ahead.take(2, code.hash), Some(Err(CUDA_ERROR_INVALID_IMAGE)));
        ahead.load(driver(lazy), vec![(1, image(1, false))]);
        ahead.unload(driver(lazy));
        assert_eq!(ahead.count(), 0);
    }

    #[test]
    fn code_to_compile_and_code_that_gets_its_place_at_once_are_left_to_their_records() {
        let both = || vec![(1, image(1, true)), (2, image(2, false))];
        let loaded = |mode| {
            let mut ahead = Ahead::default();
            ahead.load(driver(mode), both());
            (ahead.take(1, image(1, true).hash), ahead.take(2, image(2, false).hash))
        };
        assert_eq!(loaded(lazy), (None, Some(Ok(2))));
        assert_eq!(loaded(eager), (None, None));
    }
}
