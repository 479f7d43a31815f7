//! How functions say what went wrong: with the driver's error codes.

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS, CUresult};

/// A value, or the driver's error code.
pub(crate) type Result<T> = std::result::Result<T, CUresult>;

/// Runs a driver function's body and turns its answer into a code.
pub(crate) fn status(body: impl FnOnce() -> Result<()>) -> CUresult {
    body().err().unwrap_or(CUDA_SUCCESS)
}

/// Writes through an out parameter that must not be null.
///
/// # Safety
///
/// `out` must be null or valid to write.
pub(crate) unsafe fn put<T>(out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so valid by the caller's promise. C may not have aligned a void pointer.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes through an out parameter that may be left out.
///
/// # Safety
///
/// `out` must be null or valid to write.
pub(crate) unsafe fn put_if<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: not null, so valid by the caller's promise.
        unsafe { out.write_unaligned(value) };
    }
}

/// The text that a C string holds.
///
/// # Safety
///
/// `text` must be null or a C string that outlives the answer.
pub(crate) unsafe fn text<'a>(text: *const std::ffi::c_char) -> Result<&'a str> {
    if text.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so a C string by the caller's promise.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    text.to_str().map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

/// `Ok` if the condition holds, the code otherwise.
pub(crate) fn ensure(condition: bool, otherwise: CUresult) -> Result<()> {
    if condition { Ok(()) } else { Err(otherwise) }
}
