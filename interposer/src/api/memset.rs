//! Memsets: they travel as the table says, once the range is known to be memory.

use rekindle_cuda_abi::types::*;
use rekindle_graphs::hook;

use crate::call::{remote, standing_error};
use crate::state::client;

/// The driver says at once when a range is no memory of its own, or not aligned to the value's size; checked here, so
/// that the call need not wait.
fn check(address: CUdeviceptr, bytes: u64, element: u64) -> Result<(), CUresult> {
    let client = client::get()?;
    client.contexts.current()?;
    standing_error(client)?;
    if !address.is_multiple_of(element) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if bytes == 0 || client.memory.is_direct(address, bytes) { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

/// A memset without stream is one in the default stream. Of device memory it does not make the host wait unless that was
/// asked for, of pinned memory it does.
fn finished(address: CUdeviceptr, result: CUresult) -> CUresult {
    let waits = client::get()
        .is_ok_and(|c| c.memory.is_synchronous(address) || c.memory.at(address).is_some_and(|a| a.is_host()));
    if result == CUDA_SUCCESS && waits { super::code(super::stream::synchronize(0)) } else { result }
}

fn fill(dst: u64, pitch: usize, value: u32, element: u32, width: usize, height: usize) -> CudaMemsetNodeParams {
    CudaMemsetNodeParams { dst, pitch, value, element, width, height }
}

macro_rules! memsets {
    ($($name:ident, $blocking:ident($value:ty, $element:literal);)*) => {$(
        pub(crate) unsafe fn $name(address: CUdeviceptr, value: $value, count: usize, stream: CUstream) -> CUresult {
            let (width, height, pitch) = (count, 1, 0);
            let fill = || fill(address, pitch, u32::from(value), $element, width, height);
            if let Some(answer) = hook::fill(stream, fill) {
                return answer;
            }
            match check(address, (count as u64).saturating_mul($element), $element) {
                // SAFETY: no pointers of the caller's.
                Ok(()) if count > 0 => unsafe { remote::$name(address, value, count, stream) },
                Ok(()) => CUDA_SUCCESS,
                Err(error) => error,
            }
        }

        pub(crate) unsafe fn $blocking(address: CUdeviceptr, value: $value, count: usize) -> CUresult {
            // SAFETY: no pointers.
            finished(address, unsafe { $name(address, value, count, 0) })
        }
    )*};
}

macro_rules! memsets_2d {
    ($($name:ident, $blocking:ident($value:ty, $element:literal);)*) => {$(
        pub(crate) unsafe fn $name(
            address: CUdeviceptr, pitch: usize, value: $value, width: usize, height: usize, stream: CUstream
        ) -> CUresult {
            let fill = || fill(address, pitch, u32::from(value), $element, width, height);
            if let Some(answer) = hook::fill(stream, fill) {
                return answer;
            }
            let bytes = (pitch as u64).saturating_mul((height as u64).saturating_sub(1)) + width as u64 * $element;
            match check(address, bytes, $element) {
                // SAFETY: no pointers of the caller's.
                Ok(()) if width > 0 && height > 0 => unsafe {
                    remote::$name(address, pitch, value, width, height, stream)
                },
                Ok(()) => CUDA_SUCCESS,
                Err(error) => error,
            }
        }

        pub(crate) unsafe fn $blocking(
            address: CUdeviceptr, pitch: usize, value: $value, width: usize, height: usize
        ) -> CUresult {
            // SAFETY: no pointers.
            finished(address, unsafe { $name(address, pitch, value, width, height, 0) })
        }
    )*};
}

memsets! {
    cuMemsetD8Async, cuMemsetD8_v2(u8, 1);
    cuMemsetD16Async, cuMemsetD16_v2(u16, 2);
    cuMemsetD32Async, cuMemsetD32_v2(u32, 4);
}

memsets_2d! {
    cuMemsetD2D8Async, cuMemsetD2D8_v2(u8, 1);
    cuMemsetD2D16Async, cuMemsetD2D16_v2(u16, 2);
    cuMemsetD2D32Async, cuMemsetD2D32_v2(u32, 4);
}
