//! The helper that has the driver checkpoint other processes: a process that loads the machine's `libcuda.so.1`.
//!
//! ```text
//!   library loaded ─► cuInit ─► Ready ─► (Question ─► Answer)* ─► the channel closes: end
//! ```
//!
//! The driver's checkpoint works on processes that use NVIDIA's own library. It is called from a process of its own, since a call
//! may hang with the process that it is about, and since `cuInit` takes seconds on a machine with several GPUs: it is paid once.
//! The helper keeps its privileges, for the driver wants those of a debugger (`CAP_SYS_PTRACE`) for every call.
//!
//! Each function is taken by `cuGetProcAddress` with the version whose structures are filled in here, never by its symbol
//! ([`rekindle_cuda_abi::checkpoint`]).
//!
//! A driver from 615 on offers storage of the caller's own: with it, `Checkpoint` would return device pointers here, in this
//! process, from which the daemon's copy threads could write GPU memory into an image's data files. That belongs into
//! [`Driver::call`], and into the daemon's `native/held.rs` as another way to save a process.

use std::ffi::{CStr, CString, NulError, c_char, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

use rekindle_cuda_abi::checkpoint::{
    CheckpointArgs, FIRST, Function, GpuPair, LockArgs, RestoreArgs, UnlockArgs, WITH_PAIRS,
};
use rekindle_cuda_abi::types::{CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUresult, result_text};
use rekindle_wire::frame::{self, FrameError};
use rekindle_wire::native::{About, Answer, Call, Gpu, Question, Ready};
use thiserror::Error;
use tracing::warn;

/// A symbol that only Rekindle's own library has, which must not be taken for the driver's.
const OURS: &CStr = c"rekindle_checkpoint";
/// The version asked for of everything that is older than checkpoints.
const BASIC: i32 = 12_000;
/// Room for a device's name.
const NAME: usize = 256;

type Look = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut u32) -> CUresult;

/// Why the driver cannot be used.
#[derive(Debug, Error)]
enum DriverError {
    #[error("its path contains a zero byte: {0}")]
    Path(#[from] NulError),
    #[error("the loader does not load {path}: {reason}")]
    NotLoaded { path: String, reason: String },
    #[error("it is Rekindle's own library: the daemon must not find lib/rekindle in LD_LIBRARY_PATH")]
    Ours,
    #[error("it speaks CUDA {}.{} and has no checkpoint of other processes: that needs CUDA 12.8, which is driver 570", .0 / 1000, .0 % 1000 / 10)]
    TooOld(i32),
    #[error("it has no {0}")]
    NoFunction(&'static str),
    #[error("{function} answers {}", name(*.result))]
    Call { function: &'static str, result: CUresult },
}

/// A `CUresult` by its name and number.
fn name(result: CUresult) -> String {
    let text = result_text(result, true);
    // SAFETY: a constant that ends in a NUL.
    let text = text.map(|it| unsafe { CStr::from_ptr(it) }.to_string_lossy().into_owned());
    format!("{} ({result})", text.as_deref().unwrap_or("an unknown error"))
}

/// The functions of the driver.
struct Driver {
    state: unsafe extern "C" fn(i32, *mut u32) -> CUresult,
    thread: unsafe extern "C" fn(i32, *mut i32) -> CUresult,
    lock: Function<LockArgs>,
    checkpoint: Function<CheckpointArgs>,
    restore: Function<RestoreArgs>,
    unlock: Function<UnlockArgs>,
    about: About,
}

/// Runs until the daemon closes the channel.
pub(crate) fn main(channel: UnixStream, library: &Path) -> ExitCode {
    let driver = match Driver::open(library) {
        Ok(driver) => driver,
        Err(error) => {
            let _ = frame::send(&channel, &Ready::Failed { reason: error.to_string() }, &[], &[]);
            return ExitCode::from(1);
        }
    };
    if frame::send(&channel, &Ready::Ready(driver.about.clone()), &[], &[]).is_err() {
        return ExitCode::from(1);
    }
    loop {
        let question = match frame::receive::<Question>(&channel) {
            Ok(message) => message.body,
            Err(FrameError::Closed) => return ExitCode::SUCCESS,
            Err(error) => {
                warn!("{error}");
                return ExitCode::from(1);
            }
        };
        if frame::send(&channel, &driver.call(&question), &[], &[]).is_err() {
            return ExitCode::SUCCESS;
        }
    }
}

/// How functions of a loaded library are found.
struct Library {
    look: Look,
}

impl Library {
    fn open(path: &Path) -> Result<Self, DriverError> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: loading a library runs its initialisers, which is what the administrator asked for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: after a failure the loader's text, or null.
            let reason = unsafe { libc::dlerror().as_ref() };
            // SAFETY: as above; it ends in a NUL.
            let reason = reason.map(|it| unsafe { CStr::from_ptr(it) }.to_string_lossy().into_owned());
            return Err(DriverError::NotLoaded {
                path: path.display().to_string(),
                reason: reason.unwrap_or_default(),
            });
        }
        // SAFETY: looks names up in the library just opened, which stays open.
        let (ours, look) =
            unsafe { (libc::dlsym(handle, OURS.as_ptr()), libc::dlsym(handle, c"cuGetProcAddress_v2".as_ptr())) };
        if !ours.is_null() {
            return Err(DriverError::Ours);
        }
        if look.is_null() {
            return Err(DriverError::NoFunction("cuGetProcAddress_v2"));
        }
        // SAFETY: the function of that name and signature in cuda.h.
        Ok(Self { look: unsafe { std::mem::transmute::<*mut c_void, Look>(look) } })
    }

    /// The function of this name, as of this version.
    ///
    /// # Safety
    /// `F` is the type of a function pointer and agrees with that version's declaration in cuda.h.
    unsafe fn function<F: Copy>(&self, symbol: &'static CStr, version: i32) -> Result<F, DriverError> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) }
        let (mut address, mut found) = (std::ptr::null_mut(), 0);
        // SAFETY: a C string and two live locals.
        let result = unsafe { (self.look)(symbol.as_ptr(), &raw mut address, version, 0, &raw mut found) };
        if result != CUDA_SUCCESS || address.is_null() {
            return Err(DriverError::NoFunction(symbol.to_str().unwrap_or("function")));
        }
        // SAFETY: the caller says that this is such a function; both are pointers.
        Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
    }
}

/// Makes an error of a failed call.
fn checked(function: &'static str, result: CUresult) -> Result<(), DriverError> {
    if result == CUDA_SUCCESS { Ok(()) } else { Err(DriverError::Call { function, result }) }
}

impl Driver {
    fn open(path: &Path) -> Result<Self, DriverError> {
        let library = Library::open(path)?;
        // SAFETY: the signatures of cuda.h in these versions; the pointers are to live locals.
        unsafe {
            let version: unsafe extern "C" fn(*mut i32) -> CUresult = library.function(c"cuDriverGetVersion", BASIC)?;
            let mut number = 0;
            checked("cuDriverGetVersion", version(&raw mut number))?;
            if number < FIRST {
                return Err(DriverError::TooOld(number));
            }
            let init: unsafe extern "C" fn(u32) -> CUresult = library.function(c"cuInit", BASIC)?;
            checked("cuInit", init(0))?;
            // Structures without pairs are the same in both.
            let restore_version = if number >= WITH_PAIRS { WITH_PAIRS } else { FIRST };
            Ok(Self {
                state: library.function(c"cuCheckpointProcessGetState", FIRST)?,
                thread: library.function(c"cuCheckpointProcessGetRestoreThreadId", FIRST)?,
                lock: library.function(c"cuCheckpointProcessLock", FIRST)?,
                checkpoint: library.function(c"cuCheckpointProcessCheckpoint", FIRST)?,
                restore: library.function(c"cuCheckpointProcessRestore", restore_version)?,
                unlock: library.function(c"cuCheckpointProcessUnlock", FIRST)?,
                about: About { version: number, gpus: gpus(&library)? },
            })
        }
    }

    fn call(&self, question: &Question) -> Answer {
        let pid = question.pid;
        let mut value = 0;
        let result = match &question.call {
            Call::RestoreThread => {
                // SAFETY: a live local of the type that the function writes.
                unsafe { (self.thread)(pid, &raw mut value) }
            }
            Call::State => {
                let mut state = 0;
                // SAFETY: as above.
                let result = unsafe { (self.state)(pid, &raw mut state) };
                value = i32::try_from(state).unwrap_or(-1);
                result
            }
            Call::Lock { timeout_ms } => {
                let mut args = LockArgs { timeout_ms: *timeout_ms, ..LockArgs::default() };
                // SAFETY: the structure of the version that the function was asked for in.
                unsafe { (self.lock)(pid, &raw mut args) }
            }
            Call::Checkpoint => {
                let mut args = CheckpointArgs::default();
                // SAFETY: as above.
                unsafe { (self.checkpoint)(pid, &raw mut args) }
            }
            Call::Restore { gpus } if !gpus.is_empty() && self.about.version < WITH_PAIRS => CUDA_ERROR_NOT_SUPPORTED,
            Call::Restore { gpus } => {
                let pairs: Vec<_> = gpus.iter().map(|(old, new)| GpuPair { old: *old, new: *new }).collect();
                let mut args = RestoreArgs::new(&pairs);
                // SAFETY: as above; the pairs live until after the call.
                unsafe { (self.restore)(pid, &raw mut args) }
            }
            Call::Unlock => {
                let mut args = UnlockArgs::default();
                // SAFETY: as above.
                unsafe { (self.unlock)(pid, &raw mut args) }
            }
        };
        Answer { result, value }
    }
}

/// The machine's GPUs.
///
/// # Safety
/// The library is initialised.
unsafe fn gpus(library: &Library) -> Result<Vec<Gpu>, DriverError> {
    // SAFETY: the signatures of cuda.h in these versions; the pointers are to live locals of that size.
    unsafe {
        let count: unsafe extern "C" fn(*mut i32) -> CUresult = library.function(c"cuDeviceGetCount", BASIC)?;
        let get: unsafe extern "C" fn(*mut i32, i32) -> CUresult = library.function(c"cuDeviceGet", BASIC)?;
        let uuid_of: unsafe extern "C" fn(*mut [u8; 16], i32) -> CUresult =
            library.function(c"cuDeviceGetUuid", BASIC)?;
        let name_of: unsafe extern "C" fn(*mut c_char, i32, i32) -> CUresult =
            library.function(c"cuDeviceGetName", BASIC)?;
        let mut number = 0;
        checked("cuDeviceGetCount", count(&raw mut number))?;
        let mut found = Vec::new();
        for ordinal in 0..number {
            let (mut device, mut uuid, mut text) = (0, [0; 16], [0_u8; NAME]);
            checked("cuDeviceGet", get(&raw mut device, ordinal))?;
            checked("cuDeviceGetUuid", uuid_of(&raw mut uuid, device))?;
            checked("cuDeviceGetName", name_of(text.as_mut_ptr().cast(), NAME as i32, device))?;
            let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
            found.push(Gpu { uuid, name: text.to_string_lossy().into_owned() });
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_told_by_its_name_and_number() {
        assert_eq!(name(401), "CUDA_ERROR_ILLEGAL_STATE (401)");
        assert_eq!(name(-7), "an unknown error (-7)");
    }

    #[test]
    fn what_is_no_driver_is_refused_with_the_reason() {
        let Err(error) = Driver::open(Path::new("/nowhere/libcuda.so.1")) else { panic!("there is no such library") };
        assert!(matches!(error, DriverError::NotLoaded { .. }), "{error}");
        let Err(error) = Driver::open(Path::new("libc.so.6")) else { panic!("the C library is no driver") };
        assert_eq!(error.to_string(), "it has no cuGetProcAddress_v2");
        let old = DriverError::TooOld(12_040).to_string();
        assert!(old.contains("CUDA 12.4") && old.contains("driver 570"), "{old}");
    }
}
