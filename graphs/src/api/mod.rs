//! The driver's functions around graphs and captures, by their exported names. `cuda.h` describes them; comments here
//! say what it does not.
//!
//! Safety: every function here is called through its exported symbol, and its pointers are what the C caller passed.
//! They are used as `cuda.h` says that they may be, and tested for null where that is allowed.

#![allow(clippy::missing_safety_doc, reason = "the contract of each function is its documentation in cuda.h")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "said once, at the module's head")]
#![allow(missing_docs, reason = "the functions are cuda.h's, and documented there")]

mod captures;
mod execs;
mod graphs;
mod nodes;
mod params;
mod resources;

pub use captures::*;
pub use execs::*;
pub use graphs::*;
pub use nodes::*;
pub use resources::*;

use rekindle_cuda_abi::types::*;

use crate::Result;
use crate::driver::driver;
use crate::graph::Edge;

/// Runs a function's work where calls may be made, and turns its result into what C gets.
fn call(work: impl FnOnce() -> Result<()>) -> CUresult {
    let ready = driver().and_then(|driver| driver.current()).map(drop);
    ready.and_then(|()| work()).err().unwrap_or(CUDA_SUCCESS)
}

/// An error where a condition does not hold.
fn ensure(condition: bool, code: CUresult) -> Result<()> {
    if condition { Ok(()) } else { Err(code) }
}

/// Writes an out parameter that must not be null.
unsafe fn put<T>(out: *mut T, value: T) -> Result<()> {
    ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes an out parameter that may be null.
unsafe fn put_if<T>(out: *mut T, value: T) {
    if !out.is_null() {
        unsafe { out.write_unaligned(value) };
    }
}

/// Reads what must be there.
unsafe fn read<T: Copy>(from: *const T) -> Result<T> {
    ensure(!from.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    Ok(unsafe { from.read_unaligned() })
}

/// An array of so many.
unsafe fn slice<'a, T>(array: *const T, count: usize) -> Result<&'a [T]> {
    ensure(count == 0 || !array.is_null(), CUDA_ERROR_INVALID_VALUE)?;
    Ok(if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(array, count) } })
}

/// Nodes, and what is known of the edges from them, if anything.
unsafe fn edges(nodes: *const CUgraphNode, data: *const CUgraphEdgeData, count: usize) -> Result<Vec<Edge>> {
    let nodes = unsafe { slice(nodes, count) }?;
    if data.is_null() {
        return Ok(nodes.iter().map(|n| (*n, CUgraphEdgeData::default())).collect());
    }
    let data = unsafe { slice(data, count) }?;
    Ok(nodes.iter().copied().zip(data.iter().copied()).collect())
}

/// Fills an array of the caller's, which has room for `*count`; what is left of it is zero, and `*count` is how many
/// there are. A null array asks for their number.
unsafe fn list<T: Copy + Default>(items: &[T], array: *mut T, count: *mut usize) -> Result<()> {
    let room = unsafe { read(count) }?;
    unsafe {
        if !array.is_null() {
            for i in 0..room {
                array.add(i).write_unaligned(items.get(i).copied().unwrap_or_default());
            }
        }
        count.write_unaligned(if array.is_null() { items.len() } else { items.len().min(room) });
    }
    Ok(())
}
