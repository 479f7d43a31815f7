//! Attributes of streams. All of them are hints: they are kept here, and say what was set.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use rekindle_cuda_abi::types::*;

use super::{code, stream};
use crate::client;

/// `CUstreamAttrValue`.
type Value = [u64; 8];

const ACCESS_POLICY_WINDOW: u32 = 1;
const SYNCHRONIZATION_POLICY: u32 = 3;
const PRIORITY: u32 = 8;
const MEM_SYNC_DOMAIN_MAP: u32 = 9;
const MEM_SYNC_DOMAIN: u32 = 10;

/// What was set, by the stream's id.
static SET: Mutex<Option<HashMap<u64, HashMap<u32, Value>>>> = Mutex::new(None);

fn set<T>(change: impl FnOnce(&mut HashMap<u64, HashMap<u32, Value>>) -> T) -> T {
    change(SET.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Streams are named by their id, default streams also by their context.
fn key(stream: CUstream) -> Result<u64, CUresult> {
    let (id, context) = (stream::stream_id(0, stream)?, stream::context_of(stream)?);
    Ok(if id <= 1 || id > u64::MAX / 2 { id ^ context.rotate_left(17) } else { id })
}

/// What an attribute is before it is set.
fn initial(stream: CUstream, attribute: u32) -> Result<Value, CUresult> {
    let first = |word| [word, 0, 0, 0, 0, 0, 0, 0];
    Ok(match attribute {
        ACCESS_POLICY_WINDOW | MEM_SYNC_DOMAIN => [0; 8],
        // None of CU_SYNC_POLICY_*: nothing was said.
        SYNCHRONIZATION_POLICY => first(u64::from(u32::MAX)),
        PRIORITY => first(u64::from(stream::priority_of(stream)? as u32)),
        // The default domain is 0, the remote one 1.
        MEM_SYNC_DOMAIN_MAP => first(0x100),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

pub(crate) unsafe fn cuStreamGetAttribute(stream: CUstream, attribute: u32, value: *mut c_void) -> CUresult {
    code(client::get().and_then(|_| {
        let initial = initial(stream, attribute)?;
        let key = key(stream)?;
        if value.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let now = set(|all| all.get(&key).and_then(|of| of.get(&attribute)).copied()).unwrap_or(initial);
        // SAFETY: not null, so a value by the caller's promise.
        unsafe { value.cast::<Value>().write_unaligned(now) };
        Ok(())
    }))
}

pub(crate) unsafe fn cuStreamSetAttribute(stream: CUstream, attribute: u32, value: *const c_void) -> CUresult {
    code(client::get().and_then(|_| {
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
        set(|all| all.entry(key).or_default().insert(attribute, value));
        Ok(())
    }))
}

pub(crate) unsafe fn cuStreamCopyAttributes(to: CUstream, from: CUstream) -> CUresult {
    code(client::get().and_then(|_| {
        let (to, from) = (key(to)?, key(from)?);
        set(|all| {
            let of = all.get(&from).cloned().unwrap_or_default();
            all.insert(to, of);
        });
        Ok(())
    }))
}
