//! The helper that asks the machine's NVML: a process that loads `libnvidia-ml.so.1` and calls the functions that the daemon
//! names.
//!
//! ```text
//!   library loaded ─► privileges dropped ─► nvmlInit ─► Ready ─► (HelperQuestion ─► Answer)* ─► the channel closes: end
//! ```
//!
//! The helper has no data of any process. An application's query reaches the helper as numbers, and as the versions at the
//! beginning of structures: the daemon has checked the sizes of the buffers. The helper gives up its privileges all the same.

use std::collections::HashMap;
use std::ffi::{CString, NulError, c_void};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;

use rekindle_wire::frame::{self, FrameError};
use rekindle_wire::nvml::{Answer, Argument, HelperQuestion, HelperReady};
use thiserror::Error;
use tracing::{debug, warn};

/// `nvmlReturn_t`.
const SUCCESS: u32 = 0;
const INVALID_ARGUMENT: u32 = 2;
const FUNCTION_NOT_FOUND: u32 = 13;
/// The most parameters of any function.
const MAX_ARGUMENTS: usize = 6;
/// Room behind each buffer, in case a library of another version writes more.
const SLACK: usize = 4096;
/// A symbol of our own library, which must not be taken for the machine's.
const OURS: &std::ffi::CStr = c"rekindle_nvml";
/// The user `nobody`, which has no rights.
const NOBODY: u32 = 65534;

/// Any function of NVML in the x86-64 calling convention: parameters are words in registers.
type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> u32;

/// Why the machine's library cannot be used.
#[derive(Debug, Error)]
enum LibraryError {
    #[error("its path contains a zero byte: {0}")]
    Path(#[from] NulError),
    #[error("the loader does not load it")]
    NotLoaded,
    #[error("it is Rekindle's own: the daemon must not find lib/rekindle in LD_LIBRARY_PATH")]
    Ours,
    #[error("it has no nvmlInit_v2")]
    NoInit,
    #[error("nvmlInit_v2 answers {0}")]
    Init(u32),
}

/// The machine's NVML.
struct Library {
    handle: *mut c_void,
    devices: HashMap<String, u64>,
}

/// Runs until the daemon closes the channel.
pub(crate) fn main(channel: UnixStream, library: &Path) -> ExitCode {
    let mut library = match Library::open(library) {
        Ok(library) => library,
        Err(error) => {
            let _ = frame::send(&channel, &HelperReady::Failed { reason: error.to_string() }, &[], &[]);
            return ExitCode::from(1);
        }
    };
    if frame::send(&channel, &HelperReady::Ready, &[], &[]).is_err() {
        return ExitCode::from(1);
    }
    loop {
        let question = match frame::receive::<HelperQuestion>(&channel) {
            Ok(message) => message.body,
            Err(FrameError::Closed) => return ExitCode::SUCCESS,
            Err(error) => {
                warn!("{error}");
                return ExitCode::from(1);
            }
        };
        if frame::send(&channel, &library.answer(question), &[], &[]).is_err() {
            return ExitCode::SUCCESS;
        }
    }
}

impl Library {
    fn open(path: &Path) -> Result<Self, LibraryError> {
        let name = CString::new(path.as_os_str().as_bytes())?;
        // SAFETY: loading a library runs its initialisers, which is what the administrator asked for.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(LibraryError::NotLoaded);
        }
        let library = Self { handle, devices: HashMap::new() };
        // SAFETY: looks a name up in the library just opened.
        if !unsafe { libc::dlsym(handle, OURS.as_ptr()) }.is_null() {
            return Err(LibraryError::Ours);
        }
        drop_privileges();
        let init = library.function("nvmlInit_v2").ok_or(LibraryError::NoInit)?;
        // SAFETY: nvmlInit_v2 takes no parameters.
        match unsafe { init(0, 0, 0, 0, 0, 0) } {
            SUCCESS => Ok(library),
            error => Err(LibraryError::Init(error)),
        }
    }

    fn function(&self, name: &str) -> Option<Function> {
        let name = CString::new(name).ok()?;
        // SAFETY: the handle is open, the name a C string.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        // SAFETY: a function of NVML's, whose parameters are words (see `Function`).
        (!address.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Function>(address) })
    }

    fn answer(&mut self, asked: HelperQuestion) -> Answer {
        let HelperQuestion { question, gpus } = asked;
        let failed = |result| Answer { result, buffers: Vec::new() };
        let Some(function) = self.function(&question.function) else {
            return failed(FUNCTION_NOT_FOUND);
        };
        if question.arguments.len() > MAX_ARGUMENTS {
            return failed(INVALID_ARGUMENT);
        }
        let mut words = [0; MAX_ARGUMENTS];
        let mut buffers = Vec::new();
        for (word, argument) in words.iter_mut().zip(question.arguments) {
            *word = match argument {
                Argument::Number(number) => number,
                Argument::Device(gpu) => {
                    let device = gpus.get(gpu as usize).ok_or(INVALID_ARGUMENT);
                    match device.and_then(|uuid| self.device(uuid)) {
                        Ok(device) => device,
                        Err(error) => return failed(error),
                    }
                }
                Argument::Buffer(bytes) => {
                    let size = bytes.len();
                    // A vector of words, for their alignment.
                    let mut room = vec![0_u64; (size + SLACK) / 8];
                    // SAFETY: there is room for `size` bytes, and neither is part of the other.
                    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), room.as_mut_ptr().cast(), size) };
                    let at = room.as_mut_ptr() as u64;
                    buffers.push((room, size));
                    at
                }
            };
        }
        let [a, b, c, d, e, f] = words;
        // SAFETY: the daemon has checked that devices, numbers and buffers are where the function has them, and of the
        // sizes that it writes; the buffers live until after the call.
        let result = unsafe { function(a, b, c, d, e, f) };
        let bytes = |(room, size): (Vec<u64>, usize)| {
            room.iter().flat_map(|word| word.to_le_bytes()).take(size).collect::<Vec<_>>()
        };
        Answer { result, buffers: buffers.into_iter().map(bytes).collect() }
    }

    /// The library's handle of a GPU.
    fn device(&mut self, uuid: &str) -> Result<u64, u32> {
        if let Some(device) = self.devices.get(uuid) {
            return Ok(*device);
        }
        let find = self.function("nvmlDeviceGetHandleByUUID").ok_or(FUNCTION_NOT_FOUND)?;
        let name = CString::new(uuid).map_err(|_| INVALID_ARGUMENT)?;
        let mut device = 0_u64;
        // SAFETY: nvmlDeviceGetHandleByUUID(const char *, nvmlDevice_t *), both of which live until after the call.
        match unsafe { find(name.as_ptr() as u64, (&raw mut device) as u64, 0, 0, 0, 0) } {
            SUCCESS => {
                self.devices.insert(uuid.to_owned(), device);
                Ok(device)
            }
            error => Err(error),
        }
    }
}

/// Becomes `nobody`, if it is root. The helper only reads from then on, which every user may.
fn drop_privileges() {
    // SAFETY: system calls without pointers, but for an empty list.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        if libc::geteuid() != 0 {
            return;
        }
        let dropped =
            libc::setgroups(0, std::ptr::null()) == 0 && libc::setgid(NOBODY) == 0 && libc::setuid(NOBODY) == 0;
        if !dropped {
            // In a user namespace without that user, root has no more rights than the user outside.
            debug!("cannot become user {NOBODY}: {}", std::io::Error::last_os_error());
        }
    }
}
