//! The process's life: initialisation, fork, exit, and the gate that every call passes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicU8, Ordering};

use rekindle_cuda_abi::logs::Logs;
use rekindle_cuda_abi::types::{
    CUDA_ERROR_DEINITIALIZED, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_READY,
    CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_UNKNOWN, CUDA_SUCCESS, CUresult,
};

use crate::config::{config, log};
use crate::context::Context;
use crate::contexts::primary;
use crate::exports::SYMBOLS;
use crate::handles;
use crate::status::{Result, ensure};
use crate::{checkpoint, device, fault};

const NEW: u8 = 0;
const READY: u8 = 1;
/// The process is a child of one that had initialised CUDA: it can never use CUDA.
const FORKED: u8 = 2;
/// The process is exiting.
const OVER: u8 = 3;

static STATE: AtomicU8 = AtomicU8::new(NEW);

/// Functions that may be called before `cuInit`, in a forked child, and at exit; those of IPC check their pointers first.
const ALWAYS: &[&str] = &[
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetExportTable",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuInit",
    "cuIpcGetEventHandle",
    "cuIpcGetMemHandle",
    "cuModuleGetLoadingMode",
];

/// How the functions begin that act on another process, and pass whatever the state of this one.
const OF_OTHERS: &str = "cuCheckpointProcess";

/// Initialises the process, once.
pub(crate) fn initialize() -> Result<()> {
    static ONCE: Once = Once::new();
    state()?;
    ONCE.call_once(|| {
        device::create();
        crate::graphs::register();
        // SAFETY: registers functions that only store to an atomic, or cancel what runs.
        unsafe {
            libc::pthread_atfork(None, None, Some(forked));
            libc::atexit(exiting);
        }
        if let Err(error) = checkpoint::begin() {
            eprintln!("simgpu: SIMGPU_DEVICE_FILE: cannot be used: error {error}");
        }
        STATE.store(READY, Ordering::SeqCst);
    });
    ensure(!device::devices().is_empty(), CUDA_ERROR_NO_DEVICE)
}

unsafe extern "C" fn forked() {
    STATE.store(FORKED, Ordering::SeqCst);
}

/// The program's own exit handlers were registered before and so run after this function: their calls are refused, as by the
/// real driver. Kernels end; threads end with the process.
extern "C" fn exiting() {
    let _ = catch_unwind(|| {
        // In a forked child there is nothing to end, and locks may be held by threads that are not there.
        if STATE.swap(OVER, Ordering::SeqCst) != READY {
            return;
        }
        for device in device::devices() {
            if let Some(context) = &primary(device).active {
                context.cancel();
            }
        }
        handles::all::<Context>().iter().for_each(|context| context.cancel());
    });
}

fn state() -> Result<bool> {
    match STATE.load(Ordering::SeqCst) {
        NEW => Ok(false),
        READY => Ok(true),
        FORKED => Err(CUDA_ERROR_NOT_INITIALIZED),
        _ => Err(CUDA_ERROR_DEINITIALIZED),
    }
}

fn name(index: usize) -> &'static str {
    SYMBOLS.get(index).map_or("?", |symbol| symbol.0)
}

/// An error if cuInit has not been called.
pub(crate) fn initialized() -> Result<()> {
    ensure(state()?, CUDA_ERROR_NOT_INITIALIZED)
}

/// Passes a call of the function at that place of the table. Panics do not leave this function.
pub(crate) fn entry(index: usize, body: impl FnOnce() -> CUresult) -> CUresult {
    let gate = || -> Result<()> {
        if !ALWAYS.contains(&name(index)) {
            initialized()?;
        }
        fault::point(name(index))?;
        rekindle_graphs::hook::before(name(index))
    };
    let _inside = (!ALWAYS.contains(&name(index)) && !name(index).starts_with(OF_OTHERS)).then(checkpoint::gate::enter);
    let call = || gate().err().unwrap_or_else(body);
    let result = catch_unwind(AssertUnwindSafe(call)).unwrap_or(CUDA_ERROR_UNKNOWN);
    if config().trace || (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) {
        log!("{} answers {result}", name(index));
    }
    result
}

/// What programs can read of refusals.
pub(crate) static LOGS: Logs = Logs::new();

/// The reply of a function that is not implemented.
pub(crate) fn refuse(index: usize) -> CUresult {
    log!("{} is not supported", name(index));
    LOGS.write(&format!("{} is not supported", name(index)));
    CUDA_ERROR_NOT_SUPPORTED
}
