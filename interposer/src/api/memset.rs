//! The functions that set memory.

use rekindle_cuda_abi::types::*;

use crate::operations::{fill, stream};
use crate::state::client;

/// A memset without stream is one in the default stream. Of device memory it does not make the host wait unless that was
/// asked for, of pinned memory it does.
fn finished(address: CUdeviceptr, result: CUresult) -> CUresult {
    let waits = client::get()
        .is_ok_and(|c| c.memory.is_synchronous(address) || c.memory.at(address).is_some_and(|a| a.is_host()));
    if result == CUDA_SUCCESS && waits { super::code(stream::synchronize(0)) } else { result }
}

macro_rules! memsets {
    ($($name:ident, $blocking:ident($value:ty, $element:literal);)*) => {$(
        pub(crate) unsafe fn $name(address: CUdeviceptr, value: $value, count: usize, stream: CUstream) -> CUresult {
            super::code(fill::row(address, u32::from(value), $element, count, stream))
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
            super::code(fill::rows((address, pitch), u32::from(value), $element, (width, height), stream))
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
