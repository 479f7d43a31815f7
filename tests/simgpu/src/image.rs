//! Images of code: from what a program passes to parsed PTX.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rekindle_cuda_abi::code;
use rekindle_cuda_abi::jit::{JitOptions, Log};
use rekindle_cuda_abi::types::{
    CUDA_ERROR_FILE_NOT_FOUND, CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
};

use crate::config::{config, log};
use crate::merge::merge;
use crate::status::Result;

/// A parsed image, shared by all modules and libraries that were loaded from the same text.
#[derive(Debug)]
pub(crate) struct Image {
    /// The parsed text.
    pub(crate) ptx: rekindle_ptx::Module,
    /// Ten times the compute capability that it was made for, `CU_FUNC_ATTRIBUTE_PTX_VERSION`: templates of libraries
    /// choose their parameters by it.
    pub(crate) target: u32,
    /// How many bytes of addresses its code takes.
    pub(crate) code_bytes: u64,
    /// Whether its kernels may print, or fail in assertions.
    pub(crate) prints: bool,
    /// Variables that only its machine code has, and their sizes: those of libraries without PTX that were linked to it, such as the
    /// device runtime.
    pub(crate) of_machine_code: Vec<(String, u64)>,
}

/// Why an image could not be loaded: the driver's code, and the compiler's message.
#[derive(Debug)]
pub(crate) struct Unloadable {
    pub(crate) code: i32,
    pub(crate) text: String,
}

impl Unloadable {
    pub(crate) fn new(code: i32, text: impl ToString) -> Self {
        let text = text.to_string();
        log!("a code image cannot be loaded ({code}): {text}");
        Self { code, text }
    }

    pub(crate) fn none() -> Self {
        Self::new(CUDA_ERROR_NO_BINARY_FOR_GPU, "no PTX for this device, and machine code cannot be run")
    }
}

/// Loads an image that a program passed to `cuModuleLoadData` or `cuLibraryLoadData`.
///
/// # Safety
///
/// `image` must be null or point to an image of code.
pub(crate) unsafe fn load(image: *const u8) -> std::result::Result<Arc<Image>, Unloadable> {
    if image.is_null() {
        return Err(Unloadable::new(CUDA_ERROR_INVALID_VALUE, "null"));
    }
    // SAFETY: the caller's promise.
    let extent = unsafe { code::image_extent(image) };
    let extent = extent.map_err(|error| Unloadable::new(CUDA_ERROR_INVALID_IMAGE, error))?;
    // SAFETY: the image is still there: the caller is waiting for us.
    let mut parts = extent.parts.iter().map(|part| ptx_of(unsafe { part.as_slice() }));
    let first = parts.next().unwrap_or_else(|| Err(Unloadable::none()));
    if !matches!(&first, Err(error) if error.code == CUDA_ERROR_NO_BINARY_FOR_GPU) {
        return parse(&first?, Vec::new());
    }
    // The device linker's output has no PTX; each of the linked files has its own, and this library links it again.
    let others = parts.filter(|part| !matches!(part, Err(e) if e.code == CUDA_ERROR_NO_BINARY_FOR_GPU));
    let others: Vec<String> = others.collect::<std::result::Result<_, _>>()?;
    if others.is_empty() {
        return Err(Unloadable::none());
    }
    let merged = merge(&others).map_err(|error| Unloadable::new(CUDA_ERROR_INVALID_IMAGE, error))?;
    // SAFETY: as above.
    let of_machine_code = extent.parts.iter().flat_map(|part| machine_variables(unsafe { part.as_slice() }));
    parse(&merged, of_machine_code.collect())
}

/// The variables of the machine code that an image has for this device, with their sizes.
fn machine_variables(bytes: &[u8]) -> Vec<(String, u64)> {
    let Ok(image) = code::parse(bytes) else { return Vec::new() };
    let program = image.select(config().capability).and_then(|entry| entry.unpack().ok()).filter(|it| !it.is_ptx());
    let globals = program.and_then(|it| it.globals().ok()).unwrap_or_default();
    globals.into_iter().map(|global| (global.name, global.size)).collect()
}

/// Loads a file, as `cuModuleLoad` does.
pub(crate) fn load_file(path: &str) -> std::result::Result<Arc<Image>, Unloadable> {
    let mut bytes =
        std::fs::read(path).map_err(|error| Unloadable::new(CUDA_ERROR_FILE_NOT_FOUND, format!("{path}: {error}")))?;
    // PTX is a text that ends in NUL, which a file lacks.
    bytes.push(0);
    load_bytes(&bytes)
}

fn load_bytes(bytes: &[u8]) -> std::result::Result<Arc<Image>, Unloadable> {
    parse(&ptx_of(bytes)?, Vec::new())
}

/// The PTX that an image has for this device.
pub(crate) fn ptx_of(bytes: &[u8]) -> std::result::Result<String, Unloadable> {
    let image = code::parse(bytes).map_err(|error| Unloadable::new(CUDA_ERROR_INVALID_IMAGE, error))?;
    let Some(entry) = image.select_ptx(config().capability) else {
        return Err(Unloadable::none());
    };
    let payload = entry.payload().map_err(|error| Unloadable::new(CUDA_ERROR_INVALID_IMAGE, error))?;
    let end = payload.iter().position(|byte| *byte == 0).unwrap_or(payload.len());
    let text = std::str::from_utf8(&payload[..end]).map_err(|error| Unloadable::new(CUDA_ERROR_INVALID_PTX, error))?;
    Ok(text.to_owned())
}

/// CUDA 13.0's compiler takes PTX up to 9.0.
const NEWEST_PTX: u32 = 9;

/// Parses a text once, and shares the result while any module or library has it.
fn parse(text: &str, mut of_machine_code: Vec<(String, u64)>) -> std::result::Result<Arc<Image>, Unloadable> {
    static PARSED: Mutex<Option<HashMap<u64, Weak<Image>>>> = Mutex::new(None);
    let mut hasher = DefaultHasher::new();
    (text, &of_machine_code).hash(&mut hasher);
    let key = hasher.finish();
    let mut parsed = PARSED.lock().unwrap_or_else(PoisonError::into_inner);
    let parsed = parsed.get_or_insert_default();
    if let Some(image) = parsed.get(&key).and_then(Weak::upgrade) {
        return Ok(image);
    }
    // A later driver may understand the text; this one is of CUDA 13.0.
    let version = text.lines().find_map(|line| line.trim_start().strip_prefix(".version"));
    let major = version.and_then(|v| v.trim().split('.').next()?.parse::<u32>().ok());
    if major.is_some_and(|major| major > NEWEST_PTX) {
        return Err(Unloadable::new(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, "PTX of a later version"));
    }
    let ptx = rekindle_ptx::Module::parse(text).map_err(|error| Unloadable::new(CUDA_ERROR_INVALID_PTX, error))?;
    let digits = |c: &char| c.is_ascii_digit();
    let target = ptx.target().chars().skip_while(|c| !digits(c)).take_while(digits).collect::<String>();
    let prints = ["vprintf", "__assertfail"].iter().any(|name| text.contains(name));
    of_machine_code.sort();
    of_machine_code.dedup_by(|a, b| a.0 == b.0);
    of_machine_code.retain(|(name, _)| ptx.globals().iter().all(|global| global.name != *name));
    let (target, code_bytes) = (target.parse().unwrap_or(0), text.len() as u64);
    let image = Arc::new(Image { target, code_bytes, prints, of_machine_code, ptx });
    parsed.retain(|_, image| image.strong_count() > 0);
    parsed.insert(key, Arc::downgrade(&image));
    Ok(image)
}

/// Turns a load's failure into its code, and writes the message where the caller's options ask for it.
///
/// # Safety
///
/// `options` and `values` must be null or arrays of `count`, with values as `cuda.h` describes them.
pub(crate) unsafe fn answer(
    loaded: std::result::Result<Arc<Image>, Unloadable>,
    count: u32,
    options: *const u32,
    values: *mut *mut std::ffi::c_void,
) -> Result<Arc<Image>> {
    let text = loaded.as_ref().err().map_or("", |error| error.text.as_str());
    // SAFETY: the caller's promise.
    unsafe { write_logs(text, &JitOptions::read(count, options, values)?) };
    loaded.map_err(|error| error.code)
}

/// Writes the compiler's messages where the caller's options ask for them.
///
/// # Safety
///
/// As for [`answer`]; what the options were read from is still there.
pub(crate) unsafe fn write_logs(text: &str, options: &JitOptions) {
    // SAFETY: the caller's promise.
    unsafe {
        options.write_log(Log::Error, text.len(), |fits| text.as_bytes()[..fits].to_vec());
        options.write_log(Log::Info, 0, |_| Vec::new());
    }
}
