//! The tables and the functions in them, but for the storage per context and what compilers keep on disk.

use std::ffi::{c_int, c_void};
use std::sync::atomic::AtomicU32;

use super::host::{answer, put};
use super::{compute_cache, handshake, storage};
use crate::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUcontext, CUdevice, CUfunction, CUmodule,
    CUresult, CUstream,
};

/// A slot: the table's size, or a function.
#[derive(Clone, Copy)]
#[repr(C)]
union Slot {
    bytes: usize,
    function: *const c_void,
}

/// A table of so many slots.
#[repr(C, align(16))]
pub(super) struct Table<const N: usize>([Slot; N]);

// SAFETY: a table is never written; what its pointers name are functions.
unsafe impl<const N: usize> Sync for Table<N> {}

impl<const N: usize> Table<N> {
    const fn refusing() -> Self {
        Self([Slot { function: refuse as *const c_void }; N])
    }

    /// A table that begins with its size.
    const fn new() -> Self {
        let mut table = Self::refusing();
        table.0[0] = Slot { bytes: N * size_of::<Slot>() };
        table
    }

    const fn with(mut self, slot: usize, function: *const c_void) -> Self {
        self.0[slot] = Slot { function };
        self
    }

    /// Where the table is.
    pub(super) fn address(&self) -> *const c_void {
        self.0.as_ptr().cast()
    }

    /// The function in a slot.
    pub(super) fn function(&self, slot: usize) -> *const c_void {
        assert_ne!(slot, 0, "slot 0 may hold the size");
        // SAFETY: all slots but the first are built as functions, and any bit pattern is a pointer.
        unsafe { self.0[slot].function }
    }
}

/// The runtime's table: primary contexts without activation.
static CUDART: Table<13> = Table::new().with(2, primary_context as *const c_void).with(12, nothing as *const c_void);
/// The runtime's handshake.
static INT: Table<3> = Table::new().with(1, answer_runtime as *const c_void);
static TLS: Table<3> = Table::new().with(2, current_context as *const c_void);
static HOOKS: Table<7> = Table::new().with(2, large_buffer as *const c_void).with(6, small_buffer as *const c_void);
static CLS: Table<8> = Table::refusing()
    .with(0, storage::put_value as *const c_void)
    .with(1, storage::delete_value as *const c_void)
    .with(2, storage::get_value as *const c_void);
static CHK: Table<15> = Table::new().with(2, checks_enter as *const c_void).with(3, nothing as *const c_void);
static TOOLS_CONTEXT: Table<93> = Table::new()
    .with(4, context_id as *const c_void)
    .with(39, stream_id as *const c_void)
    .with(51, stream_handle as *const c_void);
/// cuBLASLt reads a text of the driver's through it (slot 4, and slot 13 to give it back) when it looks for an algorithm, and
/// takes the table itself for granted; it does without the text.
static TEXTS: Table<32> = Table::new();
/// The table of the compilers' cache on disk.
static COMPUTE_CACHE: Table<8> = Table::new()
    .with(1, compute_cache::make_key as *const c_void)
    .with(2, compute_cache::drop_key as *const c_void)
    .with(3, compute_cache::find as *const c_void)
    .with(4, compute_cache::keep as *const c_void)
    .with(6, compute_cache::drop_content as *const c_void);
static TOOLS_MODULE: Table<99> = Table::new().with(7, enumerate_functions as *const c_void);

/// The table with that UUID, its bytes read as one big-endian number.
pub(super) fn find(uuid: u128) -> Option<*const c_void> {
    Some(match uuid {
        0x6BD5FB6C_5BF4_E74A_8987_D93912FD9DF9 => CUDART.address(),
        0x42D85A81_23F6_CB47_8298_F6E78A3AECDC => TLS.address(),
        0xA094798C_2E74_2E74_93F2_0800200C0A66 => HOOKS.address(),
        0xC693336E_1121_DF11_A8C3_68F355D89593 => CLS.address(),
        0x263E8860_7CD2_6143_92F6_BBD5006DFA7E => CHK.address(),
        0xD4082055_BDE6_704B_8D34_BA123C66E1F2 => INT.address(),
        0x21318C60_9714_3248_8CA6_41FF7324C8F2 => TOOLS_CONTEXT.address(),
        0xDA9151D3_3AE6_CC41_A5C0_4F26D533E328 => COMPUTE_CACHE.address(),
        0x1734DC26_800D_4745_8726_C0F1E7DD8BCA => TEXTS.address(),
        0x6E163FBE_B958_444D_835C_E182AFF1991E => TOOLS_MODULE.address(),
        _ => return None,
    })
}

unsafe extern "C" fn refuse() -> CUresult {
    CUDA_ERROR_NOT_SUPPORTED
}

unsafe extern "C" fn nothing() -> CUresult {
    CUDA_SUCCESS
}

/// Computes what the runtime expects over the addresses of its tables and what it passes.
unsafe extern "C" fn answer_runtime(version: u32, seconds: u64, out: *mut [u64; 2]) -> CUresult {
    answer(|host| {
        // SAFETY: always succeeds, and only answers a number.
        let thread = unsafe { libc::pthread_self() } as u32;
        let addresses = [CUDART.address(), INT.address(), INT.function(1)];
        let caller = handshake::Caller {
            version,
            pid: std::process::id(),
            thread,
            addresses: addresses.map(|a| a as u64),
            seconds,
        };
        // SAFETY: the caller passes room for the two words.
        unsafe { put(out, handshake::words(host, caller)) }
    })
}

unsafe extern "C" fn primary_context(context: *mut CUcontext, device: CUdevice) -> CUresult {
    answer(|host| {
        let handle = host.primary_context(device)?;
        // SAFETY: the caller passes a pointer to write the handle to.
        unsafe { put(context, handle) }
    })
}

unsafe extern "C" fn current_context(context: *mut CUcontext) -> CUresult {
    answer(|host| {
        let handle = host.current_context()?;
        // SAFETY: the caller passes a pointer to write the handle to.
        unsafe { put(context, handle) }
    })
}

/// Arrays in which tools leave their hooks for the runtime; there are no tools, so nobody writes them but the
/// runtime itself. Atomics, because it may do so from any thread.
static LARGE_BUFFER: [AtomicU32; 1024] = [const { AtomicU32::new(0) }; 1024];
static SMALL_BUFFER: [AtomicU32; 28] = [const { AtomicU32::new(0) }; 28];

unsafe extern "C" fn large_buffer(buffer: *mut *const c_void, count: *mut usize) -> CUresult {
    // SAFETY: the caller passes pointers to write the array's address and length to.
    answer(|_| unsafe { put(buffer, LARGE_BUFFER.as_ptr().cast()).and_then(|()| put(count, 1024)) })
}

unsafe extern "C" fn small_buffer(buffer: *mut *const c_void, count: *mut usize) -> CUresult {
    // SAFETY: the caller passes pointers to write the array's address and length to.
    answer(|_| unsafe { put(buffer, SMALL_BUFFER.as_ptr().cast()).and_then(|()| put(count, 14)) })
}

/// Asks whether the context is under an integrity check; it never is, so there is nothing to leave either.
unsafe extern "C" fn checks_enter(_context: CUcontext, checked: *mut u32, _leave: *mut *const c_void) -> CUresult {
    // SAFETY: the caller passes a pointer to write the answer to.
    answer(|_| unsafe { put(checked, 0) })
}

unsafe extern "C" fn context_id(context: CUcontext, id: *mut u64) -> CUresult {
    answer(|host| {
        let number = if context == 0 { 0 } else { host.context_id(context)? };
        // SAFETY: the caller passes a pointer to write the number to.
        unsafe { put(id, number) }
    })
}

/// Gives a handle that stands for a stream, whichever of its names it was asked by. It is the stream's id, moved
/// up by one so that it is never null.
unsafe extern "C" fn stream_handle(
    context: CUcontext,
    stream: CUstream,
    handle: *mut u64,
    per_thread: c_int,
) -> CUresult {
    answer(|host| {
        let id = host.stream_id(context, stream, per_thread != 0)?;
        // SAFETY: the caller passes a pointer to write the handle to.
        unsafe { put(handle, id.wrapping_add(1)) }
    })
}

unsafe extern "C" fn stream_id(_context: CUcontext, handle: u64, id: *mut u64) -> CUresult {
    answer(|_| {
        let number = handle.checked_sub(1).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the caller passes a pointer to write the number to.
        unsafe { put(id, number) }
    })
}

type EachFunction = unsafe extern "C" fn(*mut c_void, CUfunction, *const c_void, *const c_void);

/// Calls `each` with every function of a module, and returns how many there were: cuFFT, whose images have one kernel each
/// under a name that it does not know, takes any other answer than 1 for a failure.
unsafe extern "C" fn enumerate_functions(
    context: CUcontext,
    module: CUmodule,
    each: Option<EachFunction>,
    user: *mut c_void,
) -> c_int {
    let mut count = 0;
    answer(|host| {
        let each = each.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        for function in host.module_functions(context, module)? {
            // SAFETY: the caller's own function, called as it expects: with its data first.
            unsafe { each(user, function, std::ptr::null(), std::ptr::null()) };
            count += 1;
        }
        Ok(())
    });
    count
}
