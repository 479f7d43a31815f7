//! Memsets: they travel as the table says, once the range is known to be memory.

use rekindle_cuda_abi::types::*;

use crate::{client, remote};

/// The driver says at once when a range is no memory of its own; checked here, so that the call need not wait.
fn check(address: CUdeviceptr, bytes: u64) -> Result<(), CUresult> {
    let client = client::get()?;
    client.contexts.current()?;
    if bytes == 0 || client.memory.is_direct(address, bytes) { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

macro_rules! memsets {
    ($($name:ident($value:ty, $element:literal $(, $stream:ident)?);)*) => {$(
        pub(crate) unsafe fn $name(address: CUdeviceptr, value: $value, count: usize $(, $stream: CUstream)?) -> CUresult {
            match check(address, (count as u64).saturating_mul($element)) {
                // SAFETY: no pointers of the caller's.
                Ok(()) if count > 0 => unsafe { remote::$name(address, value, count $(, $stream)?) },
                Ok(()) => CUDA_SUCCESS,
                Err(error) => error,
            }
        }
    )*};
}

macro_rules! memsets_2d {
    ($($name:ident($value:ty, $element:literal $(, $stream:ident)?);)*) => {$(
        pub(crate) unsafe fn $name(
            address: CUdeviceptr, pitch: usize, value: $value, width: usize, height: usize $(, $stream: CUstream)?
        ) -> CUresult {
            let bytes = (pitch as u64).saturating_mul((height as u64).saturating_sub(1)) + width as u64 * $element;
            match check(address, bytes) {
                // SAFETY: no pointers of the caller's.
                Ok(()) if width > 0 && height > 0 => unsafe {
                    remote::$name(address, pitch, value, width, height $(, $stream)?)
                },
                Ok(()) => CUDA_SUCCESS,
                Err(error) => error,
            }
        }
    )*};
}

memsets! {
    cuMemsetD8_v2(u8, 1);
    cuMemsetD16_v2(u16, 2);
    cuMemsetD32_v2(u32, 4);
    cuMemsetD8Async(u8, 1, stream);
    cuMemsetD16Async(u16, 2, stream);
    cuMemsetD32Async(u32, 4, stream);
}

memsets_2d! {
    cuMemsetD2D8_v2(u8, 1);
    cuMemsetD2D16_v2(u16, 2);
    cuMemsetD2D32_v2(u32, 4);
    cuMemsetD2D8Async(u8, 1, stream);
    cuMemsetD2D16Async(u16, 2, stream);
    cuMemsetD2D32Async(u32, 4, stream);
}
