//! Attributes of streams: stored, without an effect.

use std::ffi::c_void;
use std::sync::PoisonError;

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUresult, CUstream};

use crate::current;
use crate::status::{Result, ensure, put, status};
use crate::stream::Stream;

/// `CUstreamAttrValue`.
type Value = [u64; 8];

/// The value of an attribute that was never set: the window, how to wait, the priority, memory domains.
fn initial(stream: &Stream, attribute: u32) -> Result<Value> {
    let first = |word| [word, 0, 0, 0, 0, 0, 0, 0];
    Ok(match attribute {
        1 | 10 => [0; 8],
        // No way of waiting was set.
        3 => first(u64::from(u32::MAX)),
        8 => first(u64::from(stream.priority as u32)),
        9 => first(0x100),
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

pub unsafe fn cuStreamGetAttribute(stream: CUstream, attribute: u32, value: *mut c_void) -> CUresult {
    status(|| {
        let stream = current::stream(stream)?;
        let initial = initial(&stream, attribute)?;
        let set = stream.attributes.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: null or room for a value, by the caller's promise.
        unsafe { put(value.cast::<Value>(), set.get(&attribute).copied().unwrap_or(initial)) }
    })
}

pub unsafe fn cuStreamSetAttribute(stream: CUstream, attribute: u32, value: *const c_void) -> CUresult {
    status(|| {
        let stream = current::stream(stream)?;
        initial(&stream, attribute)?;
        ensure(!value.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: not null, so a value by the caller's promise.
        let value = unsafe { value.cast::<Value>().read_unaligned() };
        let word = value[0] as u32;
        let good = match attribute {
            3 => (1..=4).contains(&word),
            10 => word <= 1,
            _ => true,
        };
        ensure(good, CUDA_ERROR_INVALID_VALUE)?;
        stream.attributes.lock().unwrap_or_else(PoisonError::into_inner).insert(attribute, value);
        Ok(())
    })
}

pub fn cuStreamCopyAttributes(dst: CUstream, src: CUstream) -> CUresult {
    status(|| {
        let (dst, src) = (current::stream(dst)?, current::stream(src)?);
        let copied = src.attributes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        *dst.attributes.lock().unwrap_or_else(PoisonError::into_inner) = copied;
        Ok(())
    })
}
