//! Options of the driver's compiler and linker: what travels, and what comes back into the caller's arrays.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::CODE_LOG;

use super::check;
use crate::client::{Call, Reply};

/// `CU_JIT_*`.
const THREADS_PER_BLOCK: u32 = 1;
const WALL_TIME: u32 = 2;
const INFO_BUFFER: u32 = 3;
const INFO_SIZE: u32 = 4;
const ERROR_BUFFER: u32 = 5;
const ERROR_SIZE: u32 = 6;
/// Options that point to names or addresses, of link-time optimisation and earlier: they do not travel.
const POINTERS: [u32; 4] = [17, 18, 25, 27];

/// A call's options. The caller's array stays for as long as this is used, as `cuda.h` wants it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options {
    list: Vec<JitOption>,
}

#[derive(Clone, Copy, Debug)]
struct JitOption {
    number: u32,
    /// What its value was: where it is a size, later ones say how much was written.
    value: usize,
    /// Where in the caller's array its value is.
    place: usize,
}

impl Options {
    /// # Safety
    /// Both arrays are null or hold `count` elements.
    pub(crate) unsafe fn read(count: u32, options: *const u32, values: *mut *mut c_void) -> Result<Options, CUresult> {
        if count > 0 && (options.is_null() || values.is_null()) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut list = Vec::new();
        for i in 0..count as usize {
            // SAFETY: not null, so `count` elements by the caller's promise.
            let (option, value) = unsafe { (options.add(i).read(), values.add(i)) };
            // SAFETY: as above.
            if POINTERS.contains(&option) && unsafe { !value.read().is_null() } {
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            }
            if !POINTERS.contains(&option) {
                // SAFETY: as above.
                let now = unsafe { value.read() as usize };
                list.push(JitOption { number: option, value: now, place: value as usize });
            }
        }
        Ok(Self { list })
    }

    fn find(&self, number: u32) -> Option<JitOption> {
        self.list.iter().find(|option| option.number == number).copied()
    }

    /// Options and values as they travel: the number and 32 bits of value in a word. Of a buffer, whether there is one.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let word = |option: &JitOption| {
            let value = match option.number {
                INFO_BUFFER | ERROR_BUFFER => u64::from(option.value != 0),
                _ => option.value as u64 & 0xffff_ffff,
            };
            (u64::from(option.number) | value << 32).to_le_bytes()
        };
        self.list.iter().flat_map(word).collect()
    }

    /// Takes what came back: how long the two logs are, then each option's value. Writes it, and the logs, where the
    /// caller wants them.
    pub(crate) fn write_back(&self, reply: &mut Reply) {
        let (Some(info), Some(error)) = (reply.word(), reply.word()) else { return };
        for option in &self.list {
            let Some(value) = reply.word() else { return };
            if matches!(option.number, THREADS_PER_BLOCK | WALL_TIME) {
                // SAFETY: the caller's array is still there.
                unsafe { (option.place as *mut usize).write(value as usize) };
            }
        }
        for (which, length, buffer, size) in [(0, info, INFO_BUFFER, INFO_SIZE), (1, error, ERROR_BUFFER, ERROR_SIZE)] {
            let (Some(buffer), Some(size)) = (self.find(buffer), self.find(size)) else { continue };
            let (buffer, room) = (buffer.value as *mut u8, size.value & 0xffff_ffff);
            let fits = if buffer.is_null() { 0 } else { (length as usize).min(room.saturating_sub(1)) };
            let text = fetch_log(which, fits).unwrap_or_default();
            // SAFETY: the caller's array is still there, and the buffer has as many bytes as the other option said.
            unsafe {
                if room > 0 && !buffer.is_null() {
                    std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, text.len());
                    buffer.add(text.len()).write(0);
                }
                (size.place as *mut usize).write(text.len());
            }
        }
    }
}

/// The first bytes of a log of this thread's last compilation: 0 for information, 1 for errors.
fn fetch_log(which: u64, length: usize) -> Result<Vec<u8>, CUresult> {
    let mut text = Vec::new();
    while text.len() < length {
        let mut call = Call::new(CODE_LOG)?;
        call.word(which);
        call.word(text.len() as u64);
        let (result, reply) = call.wait();
        check(result)?;
        let part = reply.rest().blob().map_err(|_| CUDA_ERROR_UNKNOWN)?.to_vec();
        if part.is_empty() {
            break;
        }
        text.extend_from_slice(&part);
    }
    text.truncate(length);
    Ok(text)
}
