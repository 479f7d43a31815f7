//! Compares this crate's reading of images with a driver's answers once the driver has loaded them.
//!
//! Needs a GPU and its driver: `cargo test --test code_driver -- --ignored --nocapture`.

// Helpers of tests fail by panicking, as the tests do.
#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use rekindle_cuda_abi::code::{EntryKind, parse};

/// Images with code for some GPU, by name.
const IMAGES: [(&str, &[u8]); 6] = [
    ("none", include_bytes!("fixtures/code/forms.none.fatbin")),
    ("speed", include_bytes!("fixtures/code/forms.speed.fatbin")),
    ("size", include_bytes!("fixtures/code/forms.size.fatbin")),
    ("ptx", include_bytes!("fixtures/code/forms.ptx")),
    ("heap.cubin", include_bytes!("fixtures/code/heap.cubin")),
    ("heap.linked", include_bytes!("fixtures/code/heap.linked.cubin")),
];

/// A driver's function, by its name in the library.
fn symbol(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the library is open.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    found
}

macro_rules! driver {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        struct Driver { $($field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Driver {
            fn open() -> Self {
                // SAFETY: the driver's library has no requirements on being loaded.
                let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
                assert!(!library.is_null(), "no driver");
                Self { $(
                    // SAFETY: cuda.h declares the function so.
                    $field: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(
                            symbol(library, $name),
                        )
                    },
                )* }
            }
        }
    };
}

driver! {
    init = c"cuInit": fn(c_uint);
    attribute = c"cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    retain = c"cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int);
    set_current = c"cuCtxSetCurrent": fn(*mut c_void);
    load = c"cuModuleLoadData": fn(*mut *mut c_void, *const c_void);
    global = c"cuModuleGetGlobal_v2": fn(*mut u64, *mut usize, *mut c_void, *const c_char);
    function = c"cuModuleGetFunction": fn(*mut *mut c_void, *mut c_void, *const c_char);
    function_attribute = c"cuFuncGetAttribute": fn(*mut c_int, c_int, *mut c_void);
    param = c"cuFuncGetParamInfo": fn(*mut c_void, usize, *mut usize, *mut usize);
}

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `MINOR`.
const CAPABILITY: [c_int; 2] = [75, 76];
/// `CU_FUNC_ATTRIBUTE_PTX_VERSION` and `BINARY_VERSION`.
const VERSIONS: [c_int; 2] = [5, 6];

/// Loads one image, and returns where the driver disagrees.
fn compare(driver: &Driver, sm: (u32, u32), image: &[u8]) -> Vec<String> {
    let parsed = parse(image).unwrap();
    // Aligned, and for PTX ended by a NUL.
    let mut copy = vec![0_u64; image.len() / 8 + 1];
    // SAFETY: the copy is at least as long.
    unsafe { ptr::copy_nonoverlapping(image.as_ptr(), copy.as_mut_ptr().cast(), image.len()) };
    let mut module = ptr::null_mut();
    // SAFETY: a complete image.
    let loaded = unsafe { (driver.load)(&raw mut module, copy.as_ptr().cast()) };
    let Some(entry) = parsed.select(sm) else {
        return (loaded == 0).then(|| "loaded what was not selected".to_owned()).into_iter().collect();
    };
    if loaded != 0 {
        return vec![format!("error {loaded} instead of loading {}", entry.arch)];
    }
    let program = entry.unpack().unwrap();
    let mut differences = Vec::new();
    for global in program.globals().unwrap() {
        let name = CString::new(global.name.as_str()).unwrap();
        let (mut address, mut size) = (0, 0);
        // SAFETY: a loaded module and a name.
        let found = unsafe { (driver.global)(&raw mut address, &raw mut size, module, name.as_ptr()) };
        if found != 0 || size as u64 != global.size {
            differences.push(format!("{global:?}: error {found}, {size} bytes"));
        }
    }
    for kernel in program.kernels().unwrap() {
        let name = CString::new(kernel.name.as_str()).unwrap();
        let mut function = ptr::null_mut();
        // SAFETY: a loaded module and a name.
        let found = unsafe { (driver.function)(&raw mut function, module, name.as_ptr()) };
        if found != 0 {
            differences.push(format!("{}: error {found}", kernel.name));
            continue;
        }
        let versions = VERSIONS.map(|version| {
            let mut value = 0;
            // SAFETY: a function of a loaded module.
            let error = unsafe { (driver.function_attribute)(&raw mut value, version, function) };
            assert_eq!(error, 0);
            value.cast_unsigned()
        });
        let from_ptx = entry.kind == EntryKind::Ptx;
        if versions[usize::from(!from_ptx)] != entry.arch.number {
            differences.push(format!("{}: {versions:?} is not {}", kernel.name, entry.arch));
        }
        let mut params = Vec::new();
        let (mut offset, mut size) = (0, 0);
        // SAFETY: a function of a loaded module; the index may be too high.
        while unsafe { (driver.param)(function, params.len(), &raw mut offset, &raw mut size) == 0 } {
            params.push((offset, size));
        }
        let own: Option<Vec<_>> = kernel.params.as_ref().map(|params| {
            let pairs = params.iter().map(|p| (p.offset as usize, p.size as usize));
            pairs.collect()
        });
        if own.as_ref() != Some(&params) {
            differences.push(format!("{}: {own:?}, not {params:?}", kernel.name));
        }
    }
    differences
}

#[test]
#[ignore = "needs a GPU"]
fn the_driver_agrees() {
    let driver = Driver::open();
    let mut context = ptr::null_mut();
    // SAFETY: the order that the driver asks for, and places for what it returns.
    let sm = unsafe {
        assert_eq!((driver.init)(0), 0);
        assert_eq!((driver.retain)(&raw mut context, 0), 0);
        assert_eq!((driver.set_current)(context), 0);
        CAPABILITY.map(|attribute| {
            let mut value = 0;
            assert_eq!((driver.attribute)(&raw mut value, attribute, 0), 0);
            value.cast_unsigned()
        })
    };
    let mut differences = Vec::new();
    for (name, image) in IMAGES {
        for difference in compare(&driver, (sm[0], sm[1]), image) {
            differences.push(format!("{name}: {difference}"));
        }
    }
    assert!(differences.is_empty(), "{sm:?}\n{}", differences.join("\n"));
}
