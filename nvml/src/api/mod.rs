//! The functions that are answered here, under their names: the generated exports call them.

mod device;
mod memory;
mod pci;
mod processes;
mod system;

use std::ffi::{CStr, c_char};

pub(crate) use device::*;
pub(crate) use memory::*;
pub(crate) use pci::*;
pub(crate) use processes::*;
pub(crate) use system::*;

use crate::Answered;
use crate::result::*;

/// Writes an out parameter.
///
/// # Safety
/// `out` is null or may be written.
unsafe fn put<T>(out: *mut T, value: T) -> Answered {
    if out.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes a text with its NUL, if there is room for all of it.
///
/// # Safety
/// `out` is null or holds `length` bytes.
unsafe fn put_text(out: *mut c_char, length: u32, text: &str) -> Answered {
    if out.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(ERROR_INSUFFICIENT_SIZE);
    }
    // SAFETY: there is room for the text and its NUL.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, text.len());
        *out.add(text.len()) = 0;
    }
    Ok(())
}

/// A text that the caller gives.
///
/// # Safety
/// `text` is null or ends in a NUL.
unsafe fn given<'a>(text: *const c_char) -> Result<&'a str, u32> {
    if text.is_null() {
        return Err(ERROR_INVALID_ARGUMENT);
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| ERROR_INVALID_ARGUMENT)
}
