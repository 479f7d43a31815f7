//! The real driver, loaded from the library that the daemon names.

use std::ffi::{CStr, CString, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rekindle_cuda_abi::types::*;
use thiserror::Error;

#[allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    missing_docs,
    unreachable_pub,
    non_snake_case,
    reason = "generated"
)]
mod generated {
    use rekindle_cuda_abi::types::*;
    use std::ffi::{c_char, c_void};
    include!(concat!(env!("OUT_DIR"), "/driver.rs"));
}
#[cfg(test)]
pub(crate) use generated::CALLED;
pub(crate) use generated::Driver;

/// Why the driver cannot be used.
#[derive(Debug, Error)]
pub(crate) enum LoadError {
    /// The library does not load.
    #[error("cannot load {library} ({reason}); install NVIDIA's driver, or name its library with --cuda-driver")]
    Library { library: String, reason: String },
    /// The library lacks a function that workers need.
    #[error("the driver library has no {0}; Rekindle needs a driver of CUDA 12.4 or later")]
    Symbol(&'static str),
}

/// A call of the worker's own, with no command of the client behind it, that the driver refused.
#[derive(Clone, Copy, Debug, Error)]
#[error("{call} failed: {} ({code})", result_name(*.code))]
pub(crate) struct CallFailed {
    pub(crate) call: &'static str,
    pub(crate) code: CUresult,
}

/// Success, or which call failed and how.
pub(crate) fn checked(call: &'static str, code: CUresult) -> Result<(), CallFailed> {
    if code == CUDA_SUCCESS { Ok(()) } else { Err(CallFailed { call, code }) }
}

/// Whether the context is lost after this error, so that every later call returns the same error.
pub(crate) fn is_sticky(code: CUresult) -> bool {
    matches!(code, CUDA_ERROR_ECC_UNCORRECTABLE | CUDA_ERROR_NVLINK_UNCORRECTABLE) || loses_process(code)
}

/// Launches one of the worker's own kernels, whose parameters are these, laid out as the kernel has them.
///
/// # Safety
/// The parameters must be valid for the kernel; the function's context is current.
pub(crate) unsafe fn launch<T: Copy>(
    driver: &Driver,
    function: CUfunction,
    (blocks, threads): (u32, u32),
    stream: CUstream,
    parameters: &[T],
) -> Result<(), CallFailed> {
    let mut size = size_of_val(parameters);
    // CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE.
    let mut extra = [
        std::ptr::without_provenance_mut(1),
        parameters.as_ptr().cast_mut().cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut size).cast::<c_void>(),
        std::ptr::null_mut(),
    ];
    let (none, extra) = (std::ptr::null_mut(), extra.as_mut_ptr());
    // SAFETY: `extra` and what it points to live through the call; the rest is the caller's promise.
    let launched = unsafe { (driver.cuLaunchKernel)(function, blocks, 1, 1, threads, 1, 1, 0, stream, none, extra) };
    checked("cuLaunchKernel", launched)
}

/// Whether commands run or wait in one of the driver's streams.
pub(crate) fn stream_is_busy(driver: &Driver, stream: CUstream) -> bool {
    // SAFETY: the stream is the driver's own; a query has no other effect. After an error nothing runs any more.
    unsafe { (driver.cuStreamQuery)(stream) == CUDA_ERROR_NOT_READY }
}

/// Loads the driver. It stays loaded as long as the process lives.
pub(crate) fn load(library: &Path) -> Result<Driver, LoadError> {
    let failed = |reason: String| LoadError::Library { library: library.display().to_string(), reason };
    let name = CString::new(library.as_os_str().as_bytes()).map_err(|e| failed(e.to_string()))?;
    // SAFETY: loading a library runs its initialisers, which is what the administrator asked for.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(failed(dl_error()));
    }
    let find = |symbol: &'static str| {
        // SAFETY: the generated names end in a NUL; the handle is open.
        let address = unsafe { libc::dlsym(handle, symbol.as_ptr().cast()) };
        if address.is_null() {
            return Err(LoadError::Symbol(symbol.trim_end_matches('\0')));
        }
        Ok(address.cast_const())
    };
    // SAFETY: the signatures are those of cuda.h, which a test compares with the table.
    unsafe { Driver::load(find) }
}

fn dl_error() -> String {
    // SAFETY: dlerror returns null or a C string that lives until the next dl call of this thread.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() { "unknown".into() } else { std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned() }
    }
}

/// The driver's version, from the file name of its library: NVIDIA installs `libcuda.so.580.159.04`, and `libcuda.so.1` is
/// a link to it. Empty for a library of another name.
pub(crate) fn build(library: &Path) -> String {
    let file =
        library.canonicalize().ok().and_then(|it| it.file_name().map(|name| name.to_string_lossy().into_owned()));
    let version = file.as_deref().and_then(|it| it.strip_prefix("libcuda.so."));
    let is_version = |it: &&str| it.contains('.') && it.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    version.filter(is_version).unwrap_or_default().to_owned()
}

/// The path at which the loader found the driver's library; empty if the loader does not say.
pub(crate) fn place(driver: &Driver) -> PathBuf {
    // SAFETY: plain data for which zeros are valid.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: writes the local; the name that it points to lives as long as the library.
    unsafe {
        if libc::dladdr(driver.cuInit as *const _, &raw mut found) == 0 || found.dli_fname.is_null() {
            return PathBuf::new();
        }
        OsStr::from_bytes(CStr::from_ptr(found.dli_fname).to_bytes()).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_tells_its_version_by_the_file_that_its_name_leads_to() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for file in ["libcuda.so.580.159.04", "libsimcuda.so", "libcuda.so.1"] {
            std::fs::write(at(file), "").unwrap();
        }
        assert_eq!(build(&at("libcuda.so.1")), "", "a file of that name tells nothing");
        std::fs::remove_file(at("libcuda.so.1")).unwrap();
        std::os::unix::fs::symlink("libcuda.so.580.159.04", at("libcuda.so.1")).unwrap();
        assert_eq!(build(&at("libcuda.so.1")), "580.159.04");
        assert_eq!((build(&at("libsimcuda.so")), build(&at("nowhere"))), (String::new(), String::new()));
    }
}
