//! Attributes of streams. All of them are hints: this process keeps the values that were set.

use std::ffi::c_void;

use rekindle_cuda_abi::types::*;

use super::code;
use crate::operations::stream::{context_of, named};
use crate::process::calling_thread::{self, named_stream};
use crate::state::client;
use crate::state::stream_attributes::{Named, Value};

const ACCESS_POLICY_WINDOW: u32 = 1;
const SYNCHRONIZATION_POLICY: u32 = 3;
const PRIORITY: u32 = 8;
const MEM_SYNC_DOMAIN_MAP: u32 = 9;
const MEM_SYNC_DOMAIN: u32 = 10;

/// The stream that a parameter names.
fn key(stream: CUstream) -> Result<(CUcontext, Named), CUresult> {
    let named = match named_stream(stream) {
        CU_STREAM_LEGACY => Named::Legacy,
        CU_STREAM_PER_THREAD => Named::Thread(calling_thread::number()),
        handle => Named::Made(handle),
    };
    Ok((context_of(stream)?, named))
}

/// The value of an attribute that was not set.
fn initial(stream: CUstream, attribute: u32) -> Result<Value, CUresult> {
    let first = |word| [word, 0, 0, 0, 0, 0, 0, 0];
    Ok(match attribute {
        ACCESS_POLICY_WINDOW | MEM_SYNC_DOMAIN => [0; 8],
        // None of CU_SYNC_POLICY_*: nothing was said.
        SYNCHRONIZATION_POLICY => first(u64::from(u32::MAX)),
        PRIORITY => first(u64::from(named(stream)?.priority as u32)),
        // The default domain is 0, the remote one 1.
        MEM_SYNC_DOMAIN_MAP => first(0x100),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

pub(crate) unsafe fn cuStreamGetAttribute(stream: CUstream, attribute: u32, value: *mut c_void) -> CUresult {
    code(client::get().and_then(|client| {
        let initial = initial(stream, attribute)?;
        let key = key(stream)?;
        if value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let now = client.streams.attributes.get(key, attribute)?.unwrap_or(initial);
        // SAFETY: not null, so a value by the caller's promise.
        unsafe { value.cast::<Value>().write_unaligned(now) };
        Ok(())
    }))
}

pub(crate) unsafe fn cuStreamSetAttribute(stream: CUstream, attribute: u32, value: *const c_void) -> CUresult {
    code(client::get().and_then(|client| {
        initial(stream, attribute)?;
        let key = key(stream)?;
        if value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, so a value by the caller's promise.
        let value = unsafe { value.cast::<Value>().read_unaligned() };
        let word = value[0] as u32;
        if attribute == SYNCHRONIZATION_POLICY && !(1..=4).contains(&word) || attribute == MEM_SYNC_DOMAIN && word > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        client.streams.attributes.set(key, attribute, value)
    }))
}

pub(crate) unsafe fn cuStreamCopyAttributes(to: CUstream, from: CUstream) -> CUresult {
    code(client::get().and_then(|client| {
        let (to, from) = (key(to)?, key(from)?);
        client.streams.attributes.copy(to, from)
    }))
}
