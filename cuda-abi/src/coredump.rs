//! What a program may set and ask about core dumps of GPUs (`cuCoredump*`).
//!
//! The variables of the environment that cuda-gdb's documentation names decide for good; what they do not say, the program may set.

use std::ffi::{CString, OsString, c_char, c_void};
use std::os::unix::ffi::OsStringExt;

use crate::raw::{put, read};
use crate::types::*;

const ON_EXCEPTION: u32 = 1;
const TRIGGER_HOST: u32 = 2;
const LIGHTWEIGHT: u32 = 3;
const USER_TRIGGER: u32 = 4;
const FILE: u32 = 5;
const PIPE: u32 = 6;
const FLAGS: u32 = 7;

/// `CU_COREDUMP_SKIP_*`, with the names that they have in `CUDA_COREDUMP_GENERATION_FLAGS`.
const NAMED_FLAGS: [(&str, u32); 7] = [
    ("skip_nonrelocated_elf_images", 1),
    ("skip_global_memory", 1 << 1),
    ("skip_shared_memory", 1 << 2),
    ("skip_local_memory", 1 << 3),
    ("skip_abort", SKIP_ABORT),
    ("skip_constbank_memory", 1 << 5),
    ("lightweight", LIGHTWEIGHT_FLAGS),
];
const SKIP_ABORT: u32 = 1 << 4;
const LIGHTWEIGHT_FLAGS: u32 = 0b10_1111;
const ALL_FLAGS: u32 = LIGHTWEIGHT_FLAGS | SKIP_ABORT;

/// Bytes of a name, with its NUL.
const NAME: usize = 1024;

/// `CU_CTX_COREDUMP_ENABLE`.
const CONTEXT_DUMPS: u32 = 0x20;
/// `CU_CTX_USER_COREDUMP_ENABLE`.
const CONTEXT_DUMPS_FOR_USERS: u32 = 0x40;
/// The flags of a context that ask for core dumps.
pub const CONTEXT_FLAGS: u32 = CONTEXT_DUMPS | CONTEXT_DUMPS_FOR_USERS;

/// Whose settings are changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those of one context.
    Context,
    /// Those that new contexts begin with.
    Global,
}

/// The settings of a context, or those that new contexts begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    on_exception: bool,
    user_trigger: bool,
    flags: u32,
    file: CString,
    pipe: CString,
    fixed: Fixed,
}

/// What the environment has decided.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Fixed {
    on_exception: bool,
    user_trigger: bool,
    flags: u32,
    file: bool,
    pipe: bool,
}

impl Settings {
    /// The settings with which this process begins.
    #[must_use]
    pub fn of_process() -> Self {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Self::new(host.trim(), std::process::id(), |name| std::env::var_os(name))
    }

    fn new(host: &str, pid: u32, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let truth = |name: &str| variable(name).map(|value| value == "1");
        let name = |name: &str| {
            let value = variable(name).filter(|value| !value.is_empty() && value.len() < NAME)?;
            CString::new(value.into_vec()).ok()
        };
        let default = |kind: &str| CString::new(format!("{kind}.cuda.{host}.{pid}")).unwrap_or_default();
        let (on_exception, user_trigger) =
            (truth("CUDA_ENABLE_COREDUMP_ON_EXCEPTION"), truth("CUDA_ENABLE_USER_TRIGGERED_COREDUMP"));
        let (file, pipe) = (name("CUDA_COREDUMP_FILE"), name("CUDA_COREDUMP_PIPE"));
        let mut fixed = Fixed {
            on_exception: on_exception.is_some(),
            user_trigger: user_trigger.is_some(),
            flags: 0,
            file: file.is_some(),
            pipe: pipe.is_some(),
        };
        let mut flags = 0;
        if let Some(list) = variable("CUDA_COREDUMP_GENERATION_FLAGS") {
            let list = list.to_string_lossy();
            let named = list.split(',').filter_map(|word| NAMED_FLAGS.iter().find(|(name, _)| *name == word.trim()));
            (flags, fixed.flags) = (named.fold(0, |flags, (_, flag)| flags | flag), ALL_FLAGS);
        }
        // The program may change these (driver 580).
        let mut decide = |decided: Option<bool>, bits: u32| {
            if let Some(set) = decided {
                flags = if set { flags | bits } else { flags & !bits };
            }
        };
        decide(truth("CUDA_ENABLE_LIGHTWEIGHT_COREDUMP"), LIGHTWEIGHT_FLAGS);
        decide(truth("CUDA_ENABLE_CPU_COREDUMP_ON_EXCEPTION").map(|dumps| !dumps), SKIP_ABORT);
        Self {
            on_exception: on_exception.unwrap_or(false),
            user_trigger: user_trigger.unwrap_or(false),
            flags,
            file: file.unwrap_or_else(|| default("core")),
            pipe: pipe.unwrap_or_else(|| default("corepipe")),
            fixed,
        }
    }

    /// The settings with which a context of these flags begins.
    #[must_use]
    pub fn of_context(&self, flags: u32) -> Self {
        let mut own = self.clone();
        own.on_exception |= flags & CONTEXT_FLAGS != 0 && !self.fixed.on_exception;
        own.user_trigger |= flags & CONTEXT_DUMPS_FOR_USERS != 0 && !self.fixed.user_trigger;
        own
    }

    /// Whether there would be a core dump at some event.
    #[must_use]
    pub fn wants_dumps(&self) -> bool {
        self.on_exception || self.user_trigger
    }

    /// `cuCoredumpGetAttribute`, and of all contexts.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for what is no attribute, and where the room does not suffice.
    ///
    /// # Safety
    /// `size` is null or a `size_t`, `value` null or as many bytes.
    pub unsafe fn get(&self, attribute: u32, value: *mut c_void, size: *mut usize) -> Result<(), CUresult> {
        let needed = bytes_of(attribute)?;
        // SAFETY: the caller's promise.
        let room = unsafe { read(size) }?;
        if value.is_null() {
            // SAFETY: the caller's promise.
            return unsafe { put(size, needed) };
        }
        let truth = match attribute {
            ON_EXCEPTION => self.on_exception,
            TRIGGER_HOST => self.flags & SKIP_ABORT == 0,
            LIGHTWEIGHT => self.flags & LIGHTWEIGHT_FLAGS == LIGHTWEIGHT_FLAGS,
            USER_TRIGGER => self.user_trigger,
            FLAGS if room < needed => return Err(CUDA_ERROR_INVALID_VALUE),
            // SAFETY: there is room for a number.
            FLAGS => return unsafe { put(value.cast(), self.flags) },
            _ => {
                let name = if attribute == FILE { &self.file } else { &self.pipe }.as_bytes_with_nul();
                if room < name.len() {
                    return Err(CUDA_ERROR_INVALID_VALUE);
                }
                // SAFETY: there is room for the name and its NUL.
                unsafe { value.cast::<u8>().copy_from_nonoverlapping(name.as_ptr(), name.len()) };
                return Ok(());
            }
        };
        if room < needed {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: there is room for a `bool`.
        unsafe { put(value.cast(), u8::from(truth)) }
    }

    /// `cuCoredumpSetAttribute`, and of all contexts.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for what is no attribute or no value of it, for what the environment has decided, and for what a
    /// context does not have of its own; `CUDA_ERROR_NOT_SUPPORTED` for a pipe that is in use. `cuda.h` says
    /// `CUDA_ERROR_NOT_PERMITTED` of most of these; driver 580 does not.
    ///
    /// # Safety
    /// As [`Settings::get`].
    pub unsafe fn set(
        &mut self,
        scope: Scope,
        attribute: u32,
        value: *const c_void,
        size: *mut usize,
    ) -> Result<(), CUresult> {
        let needed = bytes_of(attribute)?;
        // SAFETY: the caller's promise.
        let there = unsafe { read(size) }?;
        if value.is_null() {
            // SAFETY: the caller's promise.
            return unsafe { put(size, needed) };
        }
        if scope == Scope::Context && matches!(attribute, USER_TRIGGER | PIPE) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if attribute == PIPE && self.user_trigger && !self.fixed.pipe {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        if matches!(attribute, FILE | PIPE) {
            // SAFETY: as many bytes as the caller says.
            let name = unsafe { name_at(value.cast(), there) }?;
            let fixed = if attribute == FILE { self.fixed.file } else { self.fixed.pipe };
            let kept = if attribute == FILE { &mut self.file } else { &mut self.pipe };
            return change(kept, name, fixed);
        }
        if there < needed {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if attribute == FLAGS {
            // SAFETY: as many bytes as a number has.
            let wanted = unsafe { read(value.cast::<u32>()) }?;
            return self.set_flags(wanted);
        }
        // SAFETY: as many bytes as a `bool` has.
        let truth = unsafe { read(value.cast::<u8>()) }? != 0;
        match attribute {
            ON_EXCEPTION => change(&mut self.on_exception, truth, self.fixed.on_exception),
            USER_TRIGGER => change(&mut self.user_trigger, truth, self.fixed.user_trigger),
            TRIGGER_HOST if truth => self.set_flags(self.flags & !SKIP_ABORT),
            TRIGGER_HOST => self.set_flags(self.flags | SKIP_ABORT),
            _ if truth => self.set_flags(self.flags | LIGHTWEIGHT_FLAGS),
            _ => self.set_flags(self.flags & !LIGHTWEIGHT_FLAGS),
        }
    }

    fn set_flags(&mut self, wanted: u32) -> Result<(), CUresult> {
        if wanted & !ALL_FLAGS != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if (wanted ^ self.flags) & self.fixed.flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.flags = wanted;
        Ok(())
    }
}

/// Changes a setting, unless it is decided.
fn change<T: PartialEq>(kept: &mut T, wanted: T, fixed: bool) -> Result<(), CUresult> {
    if fixed && *kept != wanted {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    *kept = wanted;
    Ok(())
}

/// The size of an attribute.
fn bytes_of(attribute: u32) -> Result<usize, CUresult> {
    match attribute {
        ON_EXCEPTION | TRIGGER_HOST | LIGHTWEIGHT | USER_TRIGGER => Ok(size_of::<bool>()),
        FILE | PIPE => Ok(NAME),
        FLAGS => Ok(size_of::<u32>()),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// A name of at most that many bytes, with or without a NUL at its end.
///
/// # Safety
/// There are as many bytes, or a NUL before.
unsafe fn name_at(text: *const c_char, bytes: usize) -> Result<CString, CUresult> {
    let mut name = Vec::new();
    for place in 0..bytes {
        // SAFETY: the caller's promise; nothing behind a NUL is read.
        match unsafe { text.add(place).read() } {
            0 => break,
            byte => name.push(byte as u8),
        }
        if name.len() == NAME {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    let name = CString::new(name).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    if name.is_empty() { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Settings {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into());
        Settings::new("host", 7, find)
    }

    fn set(settings: &mut Settings, scope: Scope, attribute: u32, value: &[u8]) -> Result<(), CUresult> {
        let mut size = value.len();
        // SAFETY: locals.
        unsafe { settings.set(scope, attribute, value.as_ptr().cast(), &raw mut size) }
    }

    fn get(settings: &Settings, attribute: u32) -> Vec<u8> {
        let mut size = 0;
        // SAFETY: locals; the buffer has the size that the attribute needs.
        unsafe {
            settings.get(attribute, std::ptr::null_mut(), &raw mut size).unwrap();
            let mut value = vec![0xee_u8; size];
            settings.get(attribute, value.as_mut_ptr().cast(), &raw mut size).unwrap();
            if size == NAME { value.into_iter().take_while(|byte| *byte != 0).collect() } else { value }
        }
    }

    #[test]
    fn a_process_begins_with_what_cuda_h_says() {
        let settings = with(&[]);
        let all: Vec<_> = (1..=7).map(|attribute| get(&settings, attribute)).collect();
        let names = ["core.cuda.host.7", "corepipe.cuda.host.7"].map(|name| name.as_bytes().to_vec());
        let [file, pipe] = names;
        assert_eq!(all, [vec![0], vec![1], vec![0], vec![0], file, pipe, vec![0; 4]]);
        assert!(!settings.wants_dumps());
    }

    #[test]
    fn older_attributes_and_flags_say_the_same() {
        let mut settings = with(&[]);
        set(&mut settings, Scope::Context, LIGHTWEIGHT, &[1]).unwrap();
        set(&mut settings, Scope::Context, TRIGGER_HOST, &[0]).unwrap();
        assert_eq!(get(&settings, FLAGS), ALL_FLAGS.to_le_bytes());
        set(&mut settings, Scope::Context, FLAGS, &[0; 4]).unwrap();
        assert_eq!((get(&settings, LIGHTWEIGHT), get(&settings, TRIGGER_HOST)), (vec![0], vec![1]));
        let unknown = set(&mut settings, Scope::Context, FLAGS, &(1_u32 << 6).to_le_bytes());
        assert_eq!(unknown, Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn what_the_environment_says_stays() {
        let mut settings = with(&[
            ("CUDA_ENABLE_COREDUMP_ON_EXCEPTION", "1"),
            ("CUDA_COREDUMP_FILE", "/tmp/mine"),
            ("CUDA_COREDUMP_GENERATION_FLAGS", "skip_global_memory, skip_abort,unheard_of"),
        ]);
        assert!(settings.wants_dumps());
        let refused = Err(CUDA_ERROR_INVALID_VALUE);
        assert_eq!(set(&mut settings, Scope::Global, ON_EXCEPTION, &[0]), refused);
        assert_eq!(set(&mut settings, Scope::Global, ON_EXCEPTION, &[1]), Ok(()));
        assert_eq!(set(&mut settings, Scope::Global, FILE, b"other\0"), refused);
        assert_eq!(set(&mut settings, Scope::Global, TRIGGER_HOST, &[1]), refused);
        assert_eq!((get(&settings, FILE), get(&settings, FLAGS)), (b"/tmp/mine".to_vec(), vec![0b1_0010, 0, 0, 0]));
        let lightweight = with(&[("CUDA_ENABLE_LIGHTWEIGHT_COREDUMP", "1")]);
        assert_eq!(get(&lightweight, FLAGS), LIGHTWEIGHT_FLAGS.to_le_bytes());
    }

    #[test]
    fn a_context_has_no_pipe_of_its_own_and_the_pipe_of_all_stays_once_it_is_used() {
        let mut settings = with(&[]);
        let refused = Err(CUDA_ERROR_INVALID_VALUE);
        assert_eq!(set(&mut settings, Scope::Context, PIPE, b"pipe\0"), refused);
        assert_eq!(set(&mut settings, Scope::Context, USER_TRIGGER, &[1]), refused);
        assert_eq!(set(&mut settings, Scope::Global, PIPE, b"pipe"), Ok(()));
        assert_eq!(set(&mut settings, Scope::Global, USER_TRIGGER, &[1]), Ok(()));
        assert_eq!(set(&mut settings, Scope::Global, PIPE, b"other"), Err(CUDA_ERROR_NOT_SUPPORTED));
        assert_eq!(get(&settings, PIPE), b"pipe");
    }

    #[test]
    fn names_have_at_most_1023_bytes_and_numbers_need_their_room() {
        let mut settings = with(&[]);
        let invalid = Err(CUDA_ERROR_INVALID_VALUE);
        assert_eq!(set(&mut settings, Scope::Global, FILE, &[b'x'; 1023]), Ok(()));
        assert_eq!(get(&settings, FILE).len(), 1023);
        assert_eq!(set(&mut settings, Scope::Global, FILE, &[b'x'; 1024]), invalid);
        assert_eq!(set(&mut settings, Scope::Global, FILE, b"\0"), invalid);
        assert_eq!(set(&mut settings, Scope::Global, FLAGS, &[0; 3]), invalid);
        assert_eq!(set(&mut settings, Scope::Global, 8, &[0; 8]), invalid);
        let (mut value, mut size) = ([0_u8; 4], 4);
        // SAFETY: locals.
        assert_eq!(unsafe { settings.get(FILE, value.as_mut_ptr().cast(), &raw mut size) }, invalid);
        // SAFETY: null.
        assert_eq!(unsafe { settings.get(FLAGS, value.as_mut_ptr().cast(), std::ptr::null_mut()) }, invalid);
    }

    #[test]
    fn a_contexts_flags_ask_for_its_dumps() {
        let settings = with(&[]);
        assert!(!settings.of_context(0x1f).wants_dumps());
        let (own, users) = (settings.of_context(CONTEXT_DUMPS), settings.of_context(CONTEXT_DUMPS_FOR_USERS));
        assert_eq!((get(&own, ON_EXCEPTION), get(&own, USER_TRIGGER)), (vec![1], vec![0]));
        assert_eq!((get(&users, ON_EXCEPTION), get(&users, USER_TRIGGER)), (vec![1], vec![1]));
    }
}
