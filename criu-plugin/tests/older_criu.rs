//! A CRIU with fewer hooks must see no more hooks than it knows: it would refuse the plugin, and with it every dump. This test
//! plays that CRIU with the one symbol that the plugin reads.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;

const HOOKS: usize = 10;

/// CRIU's table: a list head, and one for each kind of hook.
#[used]
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name is CRIU's")]
pub static cr_plugin_ctl: [u128; 1 + HOOKS] = [0; 1 + HOOKS];

/// The head of CRIU's `cr_plugin_desc_t`.
#[repr(C)]
struct Descriptor {
    name: *const c_void,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: c_uint,
    max_hooks: c_uint,
}

#[test]
fn an_older_criu_sees_no_more_hooks_than_it_knows() {
    let plugin = std::env::current_exe().unwrap().with_file_name("librekindle_criu.so");
    let plugin = CString::new(plugin.as_os_str().as_bytes()).unwrap();
    // SAFETY: a library that does nothing but count when it is loaded.
    let plugin = unsafe { libc::dlopen(plugin.as_ptr(), libc::RTLD_LAZY) };
    assert!(!plugin.is_null());
    // SAFETY: a handle and a name.
    let descriptor = unsafe { libc::dlsym(plugin, c"CR_PLUGIN_DESC".as_ptr()) };
    assert!(!descriptor.is_null());
    // SAFETY: what every plugin of CRIU has under that name.
    let descriptor = unsafe { descriptor.cast::<Descriptor>().read() };
    assert_eq!(descriptor.version, 0x000200);
    assert_eq!(descriptor.max_hooks, HOOKS as c_uint);
    // The plugin does not hinder dumps.
    assert_eq!((descriptor.init)(0), 0);
    (descriptor.exit)(0, 0);
    assert!(!descriptor.name.is_null());
}
