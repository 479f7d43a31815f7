//! The tables as a program meets them: found by UUID, called by slot.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::types::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_SUPPORTED, CUcontext, CUdevice, CUfunction, CUmodule, CUstream,
};

struct Fake;

impl Host for Fake {
    fn driver_version(&self) -> i32 {
        13000
    }
    fn devices(&self) -> Vec<DeviceIdentity> {
        vec![DeviceIdentity { uuid: *b"0123456789abcdef", pci: [0, 6, 1] }]
    }
    fn primary_context(&self, device: CUdevice) -> Result<CUcontext, CUresult> {
        if device == 0 { Ok(0x100) } else { Err(101) }
    }
    fn current_context(&self) -> Result<CUcontext, CUresult> {
        Ok(0x100)
    }
    fn context_id(&self, context: CUcontext) -> Result<u64, CUresult> {
        Ok(context + 7)
    }
    fn stream_id(&self, _: CUcontext, stream: CUstream, per_thread: bool) -> Result<u64, CUresult> {
        Ok(if stream == 0 && per_thread { 2 } else { stream })
    }
    fn module_functions(&self, _: CUcontext, module: CUmodule) -> Result<Vec<CUfunction>, CUresult> {
        if module == 5 { Ok(vec![11, 12]) } else { panic!("unknown module") }
    }
}

fn table(uuid: u128) -> *const *const c_void {
    let mut out = std::ptr::null();
    // SAFETY: both pointers are valid.
    assert_eq!(unsafe { export_table(&Fake, &uuid.to_be_bytes(), &mut out) }, CUDA_SUCCESS);
    out.cast()
}

const CUDART: u128 = 0x6BD5FB6C5BF4E74A8987D93912FD9DF9;
const HOOKS: u128 = 0xA094798C2E742E7493F20800200C0A66;
const CLS: u128 = 0xC693336E1121DF11A8C368F355D89593;
const INT: u128 = 0xD4082055BDE6704B8D34BA123C66E1F2;
const TOOLS_CONTEXT: u128 = 0x21318C60971432488CA641FF7324C8F2;
const TOOLS_MODULE: u128 = 0x6E163FBEB958444D835CE182AFF1991E;

macro_rules! slot {
    ($table:expr, $slot:expr, fn($($arg:ty),*)) => {
        // SAFETY: the slot lies in the table and holds a function of this shape.
        unsafe {
            std::mem::transmute::<*const c_void, unsafe extern "C" fn($($arg),*) -> CUresult>(*table($table).add($slot))
        }
    };
}

#[test]
fn tables_begin_with_their_size_and_stay_where_they_are() {
    for (uuid, slots) in [(CUDART, 13), (HOOKS, 7), (INT, 3), (TOOLS_CONTEXT, 93), (TOOLS_MODULE, 99)] {
        // SAFETY: slot 0 of a table is readable.
        assert_eq!(unsafe { *table(uuid) } as usize, slots * 8);
        assert_eq!(table(uuid), table(uuid));
    }
}

#[test]
fn unknown_tables_and_bad_pointers_are_refused() {
    let mut out = std::ptr::null();
    let unknown = slot!(CUDART, 7, fn());
    // SAFETY: the pointers are valid or null.
    unsafe {
        assert_eq!(export_table(&Fake, &[0; 16], &mut out), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(export_table(&Fake, std::ptr::null(), &mut out), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(export_table(&Fake, &CUDART.to_be_bytes(), std::ptr::null_mut()), CUDA_ERROR_INVALID_VALUE);
        assert_eq!(unknown(), CUDA_ERROR_NOT_SUPPORTED);
    }
}

#[test]
fn the_primary_context_has_a_handle_before_it_is_active() {
    let get = slot!(CUDART, 2, fn(*mut u64, i32));
    let mut context = 0;
    // SAFETY: the pointers are valid or null.
    unsafe {
        assert_eq!((get(&mut context, 0), context), (0, 0x100));
        assert_eq!(get(&mut context, 3), 101);
        assert_eq!(get(std::ptr::null_mut(), 0), CUDA_ERROR_INVALID_VALUE);
    }
}

#[test]
fn the_handshake_is_what_the_runtime_computes() {
    let caller =
        handshake::Caller { version: 13002, pid: 4711, thread: 0x89abcdef, addresses: [16, 32, 48], seconds: 99 };
    assert_eq!(handshake::words(&Fake, handshake::Caller { version: 13000, ..caller })[0], 0x3341181c03cb675c);
    assert_eq!(handshake::words(&Fake, handshake::Caller { version: 13001, ..caller })[0], 0x1841181c03cb675c);
    // Computed independently, in Python, from the description of the message.
    assert_eq!(handshake::words(&Fake, caller), [HANDSHAKE_0, HANDSHAKE_1]);

    let ask = slot!(INT, 1, fn(u32, u64, *mut [u64; 2]));
    let (mut first, mut second) = ([0; 2], [0; 2]);
    // SAFETY: the pointers are valid.
    unsafe {
        assert_eq!(ask(13002, 1, &mut first), CUDA_SUCCESS);
        assert_eq!(ask(13002, 2, &mut second), CUDA_SUCCESS);
    }
    assert_ne!(first, second);
}

const HANDSHAKE_0: u64 = 0x93c13b20aed33248;
const HANDSHAKE_1: u64 = 0x345bf401a3fff7b9;

static DESTROYED: Mutex<Vec<[usize; 3]>> = Mutex::new(Vec::new());

unsafe extern "C" fn destroy(context: CUcontext, key: *mut c_void, value: *mut c_void) {
    DESTROYED.lock().unwrap().push([context as usize, key as usize, value as usize]);
}

#[test]
fn values_are_kept_per_context_until_it_is_reset() {
    type Destroy = unsafe extern "C" fn(u64, *mut c_void, *mut c_void);
    let put = slot!(CLS, 0, fn(u64, usize, usize, Option<Destroy>));
    let delete = slot!(CLS, 1, fn(u64, usize));
    let get = slot!(CLS, 2, fn(*mut usize, u64, usize));
    let mut value = 0;
    // SAFETY: the pointers are valid, and the destructor takes any arguments.
    unsafe {
        assert_eq!(get(&mut value, 0, 1), CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(put(0, 1, 41, Some(destroy)), CUDA_SUCCESS);
        assert_eq!(put(0x100, 2, 42, None), CUDA_SUCCESS);
        assert_eq!(put(0x100, 3, 43, Some(destroy)), CUDA_SUCCESS);
        assert_eq!(put(0x200, 1, 44, Some(destroy)), CUDA_SUCCESS);
        assert_eq!((get(&mut value, u64::MAX, 1), value), (0, 41));
        assert_eq!((get(&mut value, 0x200, 1), value), (0, 44));
        assert_eq!((delete(0, 3), delete(0, 3)), (CUDA_SUCCESS, CUDA_ERROR_INVALID_HANDLE));
        cls_reset(0x100);
        cls_reset(0x100);
        assert_eq!(get(&mut value, 0, 2), CUDA_ERROR_INVALID_HANDLE);
        assert_eq!((get(&mut value, 0x200, 1), value), (0, 44));
    }
    assert_eq!(*DESTROYED.lock().unwrap(), [[0x100, 1, 41]]);
}

#[test]
fn streams_are_told_apart() {
    let handle_of = slot!(TOOLS_CONTEXT, 51, fn(u64, u64, *mut u64, i32));
    let id_of = slot!(TOOLS_CONTEXT, 39, fn(u64, u64, *mut u64));
    let context_id = slot!(TOOLS_CONTEXT, 4, fn(u64, *mut u64));
    let ask = |stream, per_thread| {
        let (mut handle, mut id) = (0, 0);
        // SAFETY: the pointers are valid.
        unsafe {
            assert_eq!(handle_of(0x100, stream, &mut handle, per_thread), CUDA_SUCCESS);
            assert_ne!(handle, 0);
            assert_eq!(id_of(0x100, handle, &mut id), CUDA_SUCCESS);
        }
        id
    };
    assert_eq!((ask(0, 0), ask(0, 1), ask(9, 0)), (0, 2, 9));
    let mut id = 1;
    // SAFETY: the pointers are valid.
    unsafe {
        assert_eq!((context_id(0, &mut id), id), (0, 0));
        assert_eq!((context_id(0x100, &mut id), id), (0, 0x107));
    }
}

static SEEN: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn see(user: *mut c_void, function: CUfunction) {
    SEEN.fetch_add(user as usize * function as usize, Ordering::Relaxed);
}

#[test]
fn functions_are_enumerated_and_counted_and_a_panicking_host_has_none() {
    let each = slot!(TOOLS_MODULE, 7, fn(u64, u64, unsafe extern "C" fn(*mut c_void, u64), usize));
    // SAFETY: the callback takes any arguments.
    unsafe {
        assert_eq!(each(0x100, 5, see, 100), 2);
        assert_eq!(SEEN.load(Ordering::Relaxed), 2300);
        assert_eq!(each(0x100, 6, see, 100), 0);
    }
}

#[test]
fn what_a_compiler_keeps_is_found_under_an_equal_key_only() {
    use std::ffi::{c_char, c_int};

    type MakeKey = unsafe extern "C" fn(
        *mut *mut c_void,
        c_int,
        *const u8,
        u32,
        *const c_char,
        *const c_char,
        *const c_char,
        c_int,
        c_int,
    ) -> CUresult;

    let folder = std::env::temp_dir().join(format!("rekindle-compute-cache-{}", std::process::id()));
    // SAFETY: no other test of this binary reads the environment.
    unsafe { std::env::set_var("CUDA_CACHE_PATH", &folder) };
    let cache = table(0xDA9151D3_3AE6_CC41_A5C0_4F26D533E328);
    // SAFETY: the slot lies in the table and holds a function of this shape.
    let make = unsafe { std::mem::transmute::<*const c_void, MakeKey>(*cache.add(1)) };
    let key = |kind, source: &str, target| {
        let mut key = std::ptr::null_mut();
        let (options, host, version) = (c"-O3 ", c"HOST64", c"today");
        // SAFETY: all pointers are valid.
        let made = unsafe {
            let (text, size) = (source.as_ptr(), source.len() as u32);
            make(&mut key, kind, text, size, options.as_ptr(), host.as_ptr(), version.as_ptr(), target, 0)
        };
        assert_eq!(made, CUDA_SUCCESS);
        key
    };
    const COMPUTE_CACHE: u128 = 0xDA9151D3_3AE6_CC41_A5C0_4F26D533E328;
    let drop_key = slot!(COMPUTE_CACHE, 2, fn(*mut c_void));
    let find = slot!(COMPUTE_CACHE, 3, fn(*mut c_void, c_int, *mut *mut c_void, *mut u32));
    let keep = slot!(COMPUTE_CACHE, 4, fn(*mut c_void, c_int, *const u8, u32));
    let drop_content = slot!(COMPUTE_CACHE, 6, fn(*mut c_void));
    let found = |key: *mut c_void| {
        let (mut content, mut size) = (std::ptr::null_mut::<c_void>(), 0);
        // SAFETY: a key of the table's, and locals; what is found is dropped once.
        unsafe {
            let answer = find(key, 0, &mut content, &mut size);
            if answer != CUDA_SUCCESS {
                return None;
            }
            let bytes = std::slice::from_raw_parts(content.cast::<u8>(), size as usize).to_vec();
            drop_content(content);
            Some(bytes)
        }
    };
    let one = key(2, "kernel", 90);
    assert_eq!(found(one), None);
    // SAFETY: a key of the table's, and three bytes.
    assert_eq!(unsafe { keep(one, 0, b"sas".as_ptr(), 3) }, CUDA_SUCCESS);
    let keys = [key(2, "kernel", 90), key(1, "kernel", 90), key(2, "kernel2", 90), key(2, "kernel", 80)];
    assert_eq!(keys.map(found), [Some(b"sas".to_vec()), None, None, None]);
    for key in keys.into_iter().chain([one]) {
        // SAFETY: made above, and not used again.
        unsafe { drop_key(key) };
    }
    std::fs::remove_dir_all(folder).unwrap();
}
