//! The library's exports and look-ups.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::ffi::{CString, c_char, c_void};

use support::library;

fn open() -> *mut c_void {
    let path = CString::new(library().join("libcuda.so.1").to_str().unwrap()).unwrap();
    // SAFETY: loads a library that does nothing when loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null());
    handle
}

fn symbol(handle: *mut c_void, name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    // SAFETY: a look-up in a loaded library.
    unsafe { libc::dlsym(handle, name.as_ptr()) }
}

#[test]
fn every_symbol_of_the_driver_is_exported() {
    let handle = open();
    let table = rekindle_cuda_abi::table::parse(rekindle_cuda_abi::table::TEXT).unwrap();
    for function in &table {
        assert!(!symbol(handle, &function.symbol).is_null(), "{}", function.symbol);
    }
}

#[test]
fn what_is_not_implemented_refuses_and_nothing_works_before_initialisation() {
    let handle = open();
    let call = |name: &str| {
        // SAFETY: functions that take no arguments, or look at none before they refuse.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> i32>(symbol(handle, name))() }
    };
    assert_eq!(call("cuTexRefCreate"), 801);
    assert_eq!(call("cuCtxSynchronize"), 3);
}

#[test]
fn functions_are_looked_up_by_name_version_and_flag() {
    let handle = open();
    type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut u32) -> i32;
    // SAFETY: the function has this signature.
    let get = unsafe { std::mem::transmute::<*mut c_void, GetProcAddress>(symbol(handle, "cuGetProcAddress_v2")) };
    let find = |name: &str, version, flags| {
        let name = CString::new(name).unwrap();
        let (mut function, mut status) = (std::ptr::null_mut(), 9);
        // SAFETY: the pointers are valid.
        assert_eq!(unsafe { get(name.as_ptr(), &mut function, version, flags, &mut status) }, 0);
        (function, status)
    };
    assert_eq!(find("cuCtxGetDevice", 13000, 0), (symbol(handle, "cuCtxGetDevice_v2"), 0));
    assert_eq!(find("cuCtxGetDevice", 2000, 0), (symbol(handle, "cuCtxGetDevice"), 0));
    assert_eq!(find("cuMemcpyAsync", 13000, 2), (symbol(handle, "cuMemcpyAsync_ptsz"), 0));
    assert_eq!(find("cuNoSuchThing", 13000, 0), (std::ptr::null_mut(), 1));
    assert_eq!(find("cuLibraryLoadData", 11000, 0), (std::ptr::null_mut(), 2));
    let name = c"cuNoSuchThing";
    let mut function = std::ptr::null_mut();
    // SAFETY: the pointers are valid or may be null.
    assert_eq!(unsafe { get(name.as_ptr(), &mut function, 13000, 0, std::ptr::null_mut()) }, 500);
}
