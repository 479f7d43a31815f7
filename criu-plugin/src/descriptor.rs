//! How CRIU finds the hooks.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

use crate::{hooks, host};

/// The newest hook here is CHECKPOINT_DEVICES, 11.
const HOOKS: usize = 12;
/// CRIU's `CRIU_PLUGIN_VERSION`, the same in all its releases from 3.0 on.
const VERSION: c_uint = 0x000200;
/// The hooks of CRIU 3.17, the oldest that runs on kernels of today.
const OLDEST_HOOKS: u32 = 10;

const DUMP_UNIX_SK: usize = 0;
const RESTORE_UNIX_SK: usize = 1;
const RESUME_DEVICES_LATE: usize = 9;
const PAUSE_DEVICES: usize = 10;
const CHECKPOINT_DEVICES: usize = 11;

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

/// What CRIU looks up in each library that it loads.
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
        hooks[RESUME_DEVICES_LATE] = hooks::resume_devices_late as Hook1 as *const c_void;
        hooks[PAUSE_DEVICES] = hooks::pause_devices as Hook1 as *const c_void;
        hooks[CHECKPOINT_DEVICES] = hooks::checkpoint_devices as Hook1 as *const c_void;
        hooks
    },
};

/// Runs when the library is loaded. CRIU fails every dump and every restore while a plugin with more hooks than its own
/// is installed, so an older CRIU is shown fewer.
extern "C" fn fit() {
    let hooks = host::hook_count().unwrap_or(OLDEST_HOOKS).min(HOOKS as u32);
    // SAFETY: constructors run in one thread, before CRIU has looked at the descriptor.
    unsafe { (&raw mut CR_PLUGIN_DESC.max_hooks).write(hooks) }
}

#[used]
#[unsafe(link_section = ".init_array")]
static FIT: extern "C" fn() = fit;

/// Whether the CRIU that has loaded this calls PAUSE_DEVICES, without which nothing can be dumped.
pub fn can_dump() -> bool {
    // SAFETY: written by the constructor alone.
    let hooks = unsafe { (&raw const CR_PLUGIN_DESC.max_hooks).read() };
    hooks as usize > CHECKPOINT_DEVICES
}
