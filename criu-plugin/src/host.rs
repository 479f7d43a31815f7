//! CRIU's own functions and variables.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};

use thiserror::Error;

use crate::symbols::{function, symbol};

/// This CRIU differs from what the plugin needs.
#[derive(Debug, Error)]
pub enum HostError {
    /// This CRIU does not export a function or variable.
    #[error("this CRIU has no symbol `{0}` for its plugins")]
    NoSymbol(&'static str),
    /// CRIU has an option value that this version does not know.
    #[error("this CRIU leaves tasks in an unknown state, {0}")]
    UnknownFate(c_int),
    /// CRIU refuses to name the plugin in the image.
    #[error("CRIU cannot add the plugin to the image's inventory")]
    Inventory,
}

/// The fate of the tasks after a dump, and the argument of `pstree_switch_state`: CRIU's `TASK_ALIVE` and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// `--leave-running`.
    Alive = 1,
    /// Killed; the default.
    Dead = 2,
    /// `--leave-stopped`.
    Stopped = 3,
}

/// Whether the image's inventory names the plugin, that is, whether the dump included GPU processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inventory {
    /// The inventory names the plugin.
    Names,
    /// The inventory does not name the plugin.
    Omits,
    /// The dump, or this CRIU, is older than 4.1 and knows no such list.
    Unknown,
}

/// The symbols of CRIU that the end of a dump needs beyond the functions that CRIU promises to plugins.
#[derive(Debug)]
pub struct Control {
    final_state: *const c_int,
    root_item: *mut *mut c_void,
    switch_state: unsafe extern "C" fn(*mut c_void, c_int),
}

// SAFETY: the addresses of CRIU's variables are good in all of the process; CRIU calls hooks from one thread.
unsafe impl Send for Control {}

/// From dlfcn.h.
const RTLD_DL_SYMENT: c_int = 1;

/// The number of kinds of hooks that the running CRIU knows. The size of its table of hooks shows it: the table has one list
/// head, and one for each kind.
pub fn hook_count() -> Option<u32> {
    let table = symbol(c"cr_plugin_ctl")?;
    // SAFETY: plain data, filled by dladdr1.
    let mut info: libc::Dl_info = unsafe { mem::zeroed() };
    let mut entry = ptr::null_mut::<c_void>();
    // SAFETY: the pointers are to live locals; with RTLD_DL_SYMENT the function writes a pointer to a symbol.
    let found = unsafe { libc::dladdr1(table.as_ptr(), &raw mut info, &raw mut entry, RTLD_DL_SYMENT) };
    let entry = NonNull::new(entry.cast::<libc::Elf64_Sym>())?;
    if found == 0 {
        return None;
    }
    // SAFETY: dladdr1 has found it in the symbol table of a library that stays loaded.
    let size = unsafe { entry.as_ref() }.st_size;
    const LIST_HEAD: u64 = 16;
    u32::try_from((size / LIST_HEAD).checked_sub(1)?).ok()
}

/// The image directory, which stays CRIU's.
pub fn image_dir() -> Option<RawFd> {
    // SAFETY: the declaration in criu-plugin.h.
    let get = unsafe { function::<unsafe extern "C" fn() -> c_int>(c"criu_get_image_dir") }?;
    // SAFETY: it takes no arguments and may be called from any hook.
    let fd = unsafe { get() };
    (fd >= 0).then_some(fd)
}

/// Adds a name of the plugin to the inventory, so that a CRIU without it refuses to restore. Does nothing before CRIU 4.1.
pub fn add_to_inventory(name: &CStr) -> Result<(), HostError> {
    // SAFETY: the declaration in criu/include/image.h.
    let add = unsafe { function::<unsafe extern "C" fn(*const c_char) -> c_int>(c"add_inventory_plugin") };
    // SAFETY: CRIU copies the name.
    match add.map(|add| unsafe { add(name.as_ptr()) }) {
        None | Some(0) => Ok(()),
        Some(_) => Err(HostError::Inventory),
    }
}

/// Looks for the plugin in the inventory and removes it there, as CRIU expects of each plugin that is loaded.
pub fn take_from_inventory() -> Inventory {
    // SAFETY: the declaration in criu/include/image.h.
    let take =
        unsafe { function::<unsafe extern "C" fn(*const c_char, usize) -> bool>(c"check_and_remove_inventory_plugin") };
    let Some(take) = take else {
        return Inventory::Unknown;
    };
    // SAFETY: a string and its length, which CRIU compares.
    let has = |name: &CStr| unsafe { take(name.as_ptr(), name.count_bytes()) };
    // For an image from before 4.1, CRIU answers yes to every name.
    has(crate::NAME_OF_NATIVES);
    if has(c"no plugin has this name") {
        Inventory::Unknown
    } else if has(crate::NAME) {
        Inventory::Names
    } else {
        Inventory::Omits
    }
}

/// Has CRIU stop processes one by one, where it would have their cgroup frozen: in a frozen cgroup no single thread can run. To be
/// called from `init`.
pub fn stop_one_by_one() {
    // SAFETY: the declaration in criu/include/seize.h.
    match unsafe { function::<unsafe extern "C" fn()>(c"set_compel_interrupt_only_mode") } {
        // SAFETY: it sets a variable.
        Some(set) => unsafe { set() },
        None => crate::log::info("this CRIU cannot stop processes but by a frozen cgroup, if it is told to use one"),
    }
}

/// The path of another plugin's library, if CRIU has loaded that before this plugin.
pub fn loaded_before(file: &str) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let mut paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    paths.find(|path| path.rsplit('/').next() == Some(file)).map(str::to_owned)
}

impl Control {
    /// Finds the symbols.
    pub fn find() -> Result<Self, HostError> {
        // SAFETY: the declaration in criu/include/pstree.h.
        let switch_state = unsafe { function::<unsafe extern "C" fn(*mut c_void, c_int)>(c"pstree_switch_state") };
        Ok(Self {
            final_state: symbol(c"opts").ok_or(HostError::NoSymbol("opts"))?.as_ptr().cast(),
            root_item: symbol(c"root_item").ok_or(HostError::NoSymbol("root_item"))?.as_ptr().cast(),
            switch_state: switch_state.ok_or(HostError::NoSymbol("pstree_switch_state"))?,
        })
    }

    /// The option that says what CRIU does with the tasks.
    pub fn fate(&self) -> Result<Fate, HostError> {
        // SAFETY: `final_state` is the first member of CRIU's options.
        match unsafe { self.final_state.read() } {
            1 => Ok(Fate::Alive),
            2 => Ok(Fate::Dead),
            3 => Ok(Fate::Stopped),
            other => Err(HostError::UnknownFate(other)),
        }
    }

    /// Lets the stopped tasks run, and leaves CRIU without a tree, so that its own step of the same kind does nothing. To be
    /// called only from `exit` of a dump: CRIU has taken its code out of the tasks by then.
    pub fn resume_tasks(&self) {
        // SAFETY: in `exit` of a dump `root_item` is the tree or null. Both that function and CRIU's later step (`free_pstree`)
        // allow both.
        unsafe {
            (self.switch_state)(self.root_item.read(), Fate::Alive as c_int);
            self.root_item.write(ptr::null_mut());
        }
    }
}

/// Does the steps of CRIU after a failed dump that CRIU has not done before `exit` of a dump that kills: unlocks connections,
/// removes helper files and mounts. Calls the same functions in the same order as CRIU's `cr_dump_finish`.
pub fn roll_back() {
    // SAFETY: the declaration in criu/include/lsm.h.
    let unsuspend = unsafe { function::<unsafe extern "C" fn() -> c_int>(c"unsuspend_lsm") };
    if let Some(unsuspend) = unsuspend {
        // SAFETY: `exit` comes at the point where CRIU itself may call it.
        unsafe { unsuspend() };
    }
    for name in [c"network_unlock", c"delete_link_remaps", c"clean_cr_time_mounts"] {
        // SAFETY: all three are declared `void f(void)`.
        match unsafe { function::<unsafe extern "C" fn()>(name) } {
            // SAFETY: as above.
            Some(step) => unsafe { step() },
            None => crate::log::warn(&format!("this CRIU has no symbol {name:?}: not called")),
        }
    }
}
