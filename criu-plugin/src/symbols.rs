//! What CRIU exports, found when it is needed: only `criu_get_image_dir` is promised to plugins, and an import that is missing
//! would keep CRIU from loading us, and then from dumping anything.

use std::ffi::{CStr, c_void};
use std::mem;
use std::ptr::NonNull;

/// What has this name: a function or a variable of CRIU's, where this CRIU has it.
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
