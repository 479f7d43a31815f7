//! The results of functions: the driver's error codes.

use rekindle_cuda_abi::arguments::Text;
use rekindle_cuda_abi::raw;
use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUresult, code};

pub(crate) use rekindle_cuda_abi::raw::{put, put_text, read, values};
pub(crate) use rekindle_cuda_abi::types::{check, ensure};

/// A value, or the driver's error code.
pub(crate) type Result<T> = std::result::Result<T, CUresult>;

/// Runs a driver function's body and turns its result into a code.
pub(crate) fn status(body: impl FnOnce() -> Result<()>) -> CUresult {
    code(body())
}

/// The text that a C string holds.
///
/// # Safety
///
/// `text` must be null or a C string that outlives the answer.
pub(crate) unsafe fn text<'a>(text: *const std::ffi::c_char) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    unsafe { raw::text(text) }?.to_str().map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

/// The text that a caller has passed, which must be UTF-8.
pub(crate) fn utf8(text: Text<'_>) -> Result<&str> {
    text.read()?.to_str().map_err(|_| CUDA_ERROR_INVALID_VALUE)
}
