//! User objects, and what is said of the memory of graphs.

use std::ffi::c_void;

use rekindle_cuda_abi::arguments::{In, Out};
use rekindle_cuda_abi::types::*;

use super::call::call;
use crate::Result;
use crate::store::with;

/// `CU_USER_OBJECT_NO_DESTRUCTOR_SYNC`, which is required.
const NO_SYNC: u32 = 1;
/// `CU_GRAPH_USER_OBJECT_MOVE`.
const MOVE: u32 = 1;

pub fn cuUserObjectCreate(
    out: Out<CUuserObject>,
    data: *mut c_void,
    destructor: *mut c_void,
    references: u32,
    flags: u32,
) -> CUresult {
    call(|| {
        out.require()?;
        let good = !destructor.is_null() && flags == NO_SYNC && counts(references);
        ensure(good, CUDA_ERROR_INVALID_VALUE)?;
        let (data, destructor) = (data as u64, destructor as u64);
        out.put(with(|store| Ok(store.graphs.users.create(data, destructor, references)))?)
    })
}

/// At least one, at most `INT_MAX`.
fn counts(count: u32) -> bool {
    (1..=i32::MAX as u32).contains(&count)
}

pub fn cuUserObjectRetain(user: CUuserObject, count: u32) -> CUresult {
    call(|| {
        ensure(counts(count), CUDA_ERROR_INVALID_VALUE)?;
        with(|store| store.graphs.users.retain(user, count))
    })
}

pub fn cuUserObjectRelease(user: CUuserObject, count: u32) -> CUresult {
    call(|| {
        ensure(counts(count), CUDA_ERROR_INVALID_VALUE)?;
        with(|store| store.graphs.users.release(user, count))
    })
}

pub fn cuGraphRetainUserObject(graph: CUgraph, user: CUuserObject, count: u32, flags: u32) -> CUresult {
    call(|| {
        ensure(counts(count) && flags <= MOVE, CUDA_ERROR_INVALID_VALUE)?;
        with(|store| {
            store.graphs.graph(graph)?;
            store.graphs.retain_user(graph, user, count)?;
            if flags == MOVE { store.graphs.users.release(user, count) } else { Ok(()) }
        })
    })
}

pub fn cuGraphReleaseUserObject(graph: CUgraph, user: CUuserObject, count: u32) -> CUresult {
    call(|| {
        ensure(counts(count), CUDA_ERROR_INVALID_VALUE)?;
        with(|store| store.graphs.release_user(graph, user, count))
    })
}

/// `CU_GRAPH_MEM_ATTR_*`: used, most that was used, reserved, most that was reserved.
const USED: u32 = 0;
const USED_HIGH: u32 = 1;
const RESERVED: u32 = 2;
const RESERVED_HIGH: u32 = 3;

/// Whether a device is one.
fn known(device: CUdevice) -> Result<()> {
    crate::driver::driver()?.is_device(device)
}

pub fn cuDeviceGetGraphMemAttribute(device: CUdevice, attribute: u32, value: Out<u64>) -> CUresult {
    call(|| {
        known(device)?;
        let number = with(|store| {
            let memory = &store.graphs.memory;
            Ok(match attribute {
                USED => memory.sums(device).0,
                USED_HIGH => memory.high(device).0,
                RESERVED => memory.sums(device).1,
                RESERVED_HIGH => memory.high(device).1,
                _ => return Err(CUDA_ERROR_INVALID_VALUE),
            })
        })?;
        value.put(number)
    })
}

/// Only the two highest can be set, to 0.
pub fn cuDeviceSetGraphMemAttribute(device: CUdevice, attribute: u32, value: In<u64>) -> CUresult {
    call(|| {
        known(device)?;
        let number = *value.read()?;
        ensure(matches!(attribute, USED_HIGH | RESERVED_HIGH) && number == 0, CUDA_ERROR_INVALID_VALUE)?;
        with(|store| {
            store.graphs.memory.reset_high(device, attribute == USED_HIGH);
            Ok(())
        })
    })
}

/// Memory that no graph uses is not kept anyway.
pub fn cuDeviceGraphMemTrim(device: CUdevice) -> CUresult {
    call(|| known(device))
}
