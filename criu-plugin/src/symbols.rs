//! CRIU's symbols, looked up when they are needed. CRIU promises only `criu_get_image_dir` to plugins. A missing import would
//! keep CRIU from loading the plugin, and then from dumping anything.

use std::ffi::{CStr, c_void};
use std::mem;
use std::ptr::NonNull;

/// CRIU's function or variable of this name, if this CRIU has it.
pub fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: a look-up by name in what is loaded.
    NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
}

/// A function of CRIU's.
///
/// # Safety
///
/// `F` is the type of a function pointer and agrees with the function's declaration in CRIU.
pub unsafe fn function<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
    let symbol = symbol(name)?.as_ptr();
    // SAFETY: the caller says that this is a function of that type; both are pointers.
    Some(unsafe { mem::transmute_copy::<*mut c_void, F>(&symbol) })
}
