//! Copies of two and three dimensions, between memory of any kind and arrays.

use rekindle_cuda_abi::types::*;
use rekindle_wire::boxes::{End, span};
use rekindle_wire::command::{COPY_BOX, CopyBox};

use super::host_box::{self, HostBox};
use super::{copy_box, stream};
use crate::call::Call;
use crate::process::calling_thread::named_stream;
use crate::state::client;

/// One side of a copy, as the worker and this process reach it.
#[derive(Clone, Copy, Debug)]
enum Side {
    /// Device memory or an array.
    Device(End),
    /// Pinned memory, which both reach.
    Pinned(End, HostBox),
    /// Host memory that only the application reaches.
    Host(HostBox),
}

impl Side {
    fn is_host(&self) -> bool {
        !matches!(self, Side::Device(_))
    }

    fn end(&self) -> Option<End> {
        match *self {
            Side::Device(end) | Side::Pinned(end, _) => Some(end),
            Side::Host(_) => None,
        }
    }

    fn host(&self) -> Option<HostBox> {
        match *self {
            Side::Pinned(_, host) | Side::Host(host) => Some(host),
            Side::Device(_) => None,
        }
    }
}

/// One side of a descriptor, after the checks that the driver makes at the call.
fn side(s: &CudaMemcpy3dSide, size: [usize; 3]) -> Result<Side, CUresult> {
    let CopyMemory { base, address, pitch, rows } = match s.place(size)? {
        CopyPlace::Memory(memory) => memory,
        CopyPlace::Array(array, at) => {
            s.check_in_array(&client::get()?.arrays.get(array)?.desc, size)?;
            return Ok(Side::Device(End::Array { array, at: at.map(|n| n as u64) }));
        }
    };
    let bytes = span(size.map(|n| n as u64), pitch as u64, rows as u64).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    address.checked_add(bytes).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let end = |address| End::Memory { address, pitch: pitch as u64, rows: rows as u64 };
    let host = HostBox { address: address as usize, pitch, rows };
    let client = client::get()?;
    // Registered memory has another address there.
    let reached = client.memory.reached_at(address, bytes);
    Ok(match (client.memory.at(address), reached) {
        (Some(a), Some(_)) if !a.is_host() => Side::Device(end(address)),
        (Some(a), None) if !a.is_host() => return Err(CUDA_ERROR_INVALID_VALUE),
        (Some(_), Some(at)) => Side::Pinned(end(at), host),
        (Some(_), None) => Side::Host(host),
        (None, _) if s.kind == CU_MEMORYTYPE_DEVICE || base == 0 => return Err(CUDA_ERROR_INVALID_VALUE),
        (None, _) => Side::Host(host),
    })
}

/// A side of a copy as the worker reaches it, if it does.
fn end_of(s: &CudaMemcpy3dSide, c: &CudaMemcpy3d) -> Result<Option<End>, CUresult> {
    Ok(side(s, [c.width, c.height, c.depth])?.end())
}

/// Both ends of a copy as the worker reaches them, `None` where it does not.
pub(crate) fn ends(c: &CudaMemcpy3d) -> Result<Option<(End, End)>, CUresult> {
    Ok(end_of(&c.dst, c)?.zip(end_of(&c.src, c)?))
}

/// A side of a copy that only this process reaches.
pub(crate) fn host_box(s: &CudaMemcpy3dSide, c: &CudaMemcpy3d) -> Result<Option<HostBox>, CUresult> {
    Ok(match side(s, [c.width, c.height, c.depth])? {
        Side::Host(host) => Some(host),
        _ => None,
    })
}

/// Whether a side of a copy is memory of a device.
pub(crate) fn is_on_device(s: &CudaMemcpy3dSide, c: &CudaMemcpy3d) -> bool {
    side(s, [c.width, c.height, c.depth]).is_ok_and(|side| !side.is_host())
}

/// Copies a box. With `wait`, the call is a synchronous one.
///
/// # Safety
/// Host memory that the descriptor names is as large as it says.
pub(crate) unsafe fn copy(c: &CudaMemcpy3d, on: CUstream, wait: bool) -> Result<(), CUresult> {
    client::get()?.contexts.current()?;
    let size = [c.width, c.height, c.depth];
    if size.contains(&0) {
        return Ok(());
    }
    let (target, source) = (side(&c.dst, size)?, side(&c.src, size)?);
    let size = size.map(|n| n as u64);
    let synchronise = || stream::synchronize(on);
    match (target, source) {
        (Side::Host(to), from) | (Side::Pinned(_, to), from @ Side::Host(_)) if from.is_host() => {
            let from = from.host().ok_or(CUDA_ERROR_UNKNOWN)?;
            synchronise()?;
            // SAFETY: the caller's promise.
            unsafe { host_box::within_host(to, from, size) };
            Ok(())
        }
        (Side::Host(to), from) => {
            let from = from.end().ok_or(CUDA_ERROR_UNKNOWN)?;
            // SAFETY: the caller's promise.
            unsafe { copy_box::to_host(to, from, size, on) }
        }
        (to, Side::Host(from)) => {
            let to = to.end().ok_or(CUDA_ERROR_UNKNOWN)?;
            // SAFETY: the caller's promise. When it returns, the bytes have been taken, as with the driver.
            unsafe { copy_box::to_device(to, from, size, on) }?;
            if wait { synchronise() } else { Ok(()) }
        }
        _ => {
            let (end, source_end) = target.end().zip(source.end()).ok_or(CUDA_ERROR_UNKNOWN)?;
            let mut call = Call::in_context(COPY_BOX)?;
            call.put(&CopyBox { first: 0, second: 0, end, source: source_end, size, stream: named_stream(on) });
            check(call.send())?;
            // Between device memories the driver does not make the host wait.
            if wait && (target.is_host() || source.is_host()) { synchronise() } else { Ok(()) }
        }
    }
}
