//! How CRIU finds the hooks.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use crate::hooks;
use crate::numbers::{
    self, CHECKPOINT_DEVICES, DUMP_EXT_FILE, DUMP_UNIX_SK, HOOKS, PAUSE_DEVICES, RESTORE_EXT_FILE, RESTORE_UNIX_SK,
    RESUME_DEVICES_LATE,
};

/// CRIU's `CRIU_PLUGIN_VERSION`, the same in all its releases from 3.0 on.
const VERSION: c_uint = 0x000200;

type Hook1 = extern "C" fn(c_int) -> c_int;
type Hook2 = extern "C" fn(c_int, c_int) -> c_int;

/// CRIU's `cr_plugin_desc_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Descriptor {
    name: *const c_char,
    init: extern "C" fn(c_int) -> c_int,
    exit: extern "C" fn(c_int, c_int),
    version: c_uint,
    max_hooks: c_uint,
    hooks: [*const c_void; HOOKS],
}

/// The symbol that CRIU looks up in each library that it loads.
#[unsafe(no_mangle)]
pub static mut CR_PLUGIN_DESC: Descriptor = Descriptor {
    name: crate::NAME.as_ptr(),
    init: hooks::init,
    exit: hooks::exit,
    version: VERSION,
    max_hooks: HOOKS as c_uint,
    hooks: {
        let mut hooks = [ptr::null(); HOOKS];
        hooks[DUMP_UNIX_SK] = hooks::dump_unix_sk as Hook2 as *const c_void;
        hooks[RESTORE_UNIX_SK] = hooks::restore_unix_sk as Hook1 as *const c_void;
        hooks[DUMP_EXT_FILE] = hooks::dump_ext_file as Hook2 as *const c_void;
        hooks[RESTORE_EXT_FILE] = hooks::restore_ext_file as Hook1 as *const c_void;
        hooks[RESUME_DEVICES_LATE] = hooks::resume_devices_late as Hook1 as *const c_void;
        hooks[PAUSE_DEVICES] = hooks::pause_devices as Hook1 as *const c_void;
        hooks[CHECKPOINT_DEVICES] = hooks::checkpoint_devices as Hook1 as *const c_void;
        hooks
    },
};

/// Runs when the library is loaded. CRIU fails every dump and every restore while a plugin with more hooks than its own
/// is installed, so an older CRIU is shown fewer.
extern "C" fn fit() {
    let hooks = numbers::known();
    // SAFETY: constructors run in one thread, before CRIU has looked at the descriptor.
    unsafe { (&raw mut CR_PLUGIN_DESC.max_hooks).write(hooks) }
}

#[used]
#[unsafe(link_section = ".init_array")]
static FIT: extern "C" fn() = fit;
