//! Options of the driver's compiler and linker: what travels, and what comes back into the caller's arrays.

use std::ffi::c_void;

use rekindle_cuda_abi::jit::{
    CU_JIT_ERROR_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER, CU_JIT_THREADS_PER_BLOCK, CU_JIT_WALL_TIME, JitOption, JitOptions,
    Log, POINTER_OPTIONS,
};
use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{CODE_LOG, CodeLog};

use super::check;
use crate::call::Call;
use crate::connection::command::Reply;

/// A call's options that travel. The caller's array stays for as long as this is used, as `cuda.h` wants it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Options(JitOptions);

impl Options {
    /// # Safety
    /// Both arrays are null or hold `count` elements.
    pub(crate) unsafe fn read(count: u32, options: *const u32, values: *mut *mut c_void) -> Result<Options, CUresult> {
        // SAFETY: the caller's promise.
        let mut options = unsafe { JitOptions::read(count, options, values) }?;
        let points = |option: &JitOption| POINTER_OPTIONS.contains(&option.number);
        if options.list().iter().any(|option| points(option) && option.value != 0) {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        options.retain(|option| !points(option));
        Ok(Self(options))
    }

    /// Options and values as they travel: the number and 32 bits of value in a word. Of a buffer, whether there is one.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let word = |option: &JitOption| {
            let value = match option.number {
                CU_JIT_INFO_LOG_BUFFER | CU_JIT_ERROR_LOG_BUFFER => u64::from(option.value != 0),
                _ => option.value as u64 & 0xffff_ffff,
            };
            (u64::from(option.number) | value << 32).to_le_bytes()
        };
        self.0.list().iter().flat_map(word).collect()
    }

    /// Takes what came back: how long the two logs are, then each option's value. Writes it, and the logs, where the
    /// caller wants them.
    pub(crate) fn write_back(&self, reply: &mut Reply) {
        let (Some(info), Some(error)) = (reply.word(), reply.word()) else { return };
        for option in self.0.list() {
            let Some(value) = reply.word() else { return };
            if matches!(option.number, CU_JIT_THREADS_PER_BLOCK | CU_JIT_WALL_TIME) {
                // SAFETY: the caller's array is still there.
                unsafe { option.answer(value as usize) };
            }
        }
        for (log, length) in [(Log::Info, info), (Log::Error, error)] {
            let text = |fits| fetch_log(log, fits).unwrap_or_default();
            // SAFETY: the caller's array is still there, and the buffer has as many bytes as the other option said.
            unsafe { self.0.write_log(log, length as usize, text) };
        }
    }
}

/// The first bytes of a log of this thread's last compilation.
fn fetch_log(log: Log, length: usize) -> Result<Vec<u8>, CUresult> {
    let mut text = Vec::new();
    while text.len() < length {
        let mut call = Call::new(CODE_LOG)?;
        call.put(&CodeLog { which: u64::from(log == Log::Error), offset: text.len() as u64 });
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
