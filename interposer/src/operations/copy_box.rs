//! Copies of boxes between what the worker reaches and ordinary host memory, through the bounce buffer: a box is cut into parts
//! that fit a chunk, whose rows lie there with nothing between them.

use std::collections::VecDeque;

use rekindle_cuda_abi::types::*;
use rekindle_wire::boxes::{End, Part, cut};
use rekindle_wire::command::{COPY_BOX_FROM_CHUNK, COPY_BOX_TO_CHUNK, CopyBoxChunk};
use rekindle_wire::layout::CHUNK_SIZE;

use super::copy::DEPTH;
use super::host_box::HostBox;
use crate::call::Call;
use crate::connection::bounce_buffer::wait_for_chunk;
use crate::state::client;

use crate::process::calling_thread::named_stream;

/// Copies the rows of a part, each between its place in the host's box and the next one in `packed`.
///
/// # Safety
/// The host's box and `packed` hold the part's bytes; `to_host` says which is written.
unsafe fn rows(host: HostBox, part: &Part, packed: *mut u8, to_host: bool) {
    let [width, height, depth] = part.size;
    let mut at = packed;
    for z in 0..depth {
        for y in 0..height {
            let row = host.row(part, y, z);
            let (from, to) = if to_host { (at, row) } else { (row, at) };
            // SAFETY: the caller's promise.
            unsafe {
                std::ptr::copy_nonoverlapping(from, to, width as usize);
                at = at.add(width as usize);
            }
        }
    }
}

/// Copies a box from the host, in stream order. When it returns, the bytes have been taken.
///
/// # Safety
/// The host's box is readable.
pub(crate) unsafe fn to_device(target: End, source: HostBox, size: [u64; 3], stream: CUstream) -> Result<(), CUresult> {
    let client = client::get()?;
    for part in cut(size, CHUNK_SIZE as u64) {
        let chunk = client.bounce_buffer.take(&client.connection)?;
        // SAFETY: the chunk is this thread's and holds a part; the caller vouches for the source.
        unsafe { rows(source, &part, client.bounce_buffer.address(chunk), false) };
        match send(COPY_BOX_FROM_CHUNK, target, &part, chunk, stream) {
            Ok(()) => client.bounce_buffer.give_when_copied(chunk),
            Err(error) => {
                client.bounce_buffer.give(chunk);
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Copies a box to the host, in stream order. When it returns, the bytes are there.
///
/// # Safety
/// The host's box is writable.
pub(crate) unsafe fn to_host(target: HostBox, source: End, size: [u64; 3], stream: CUstream) -> Result<(), CUresult> {
    let client = client::get()?;
    let mut in_flight: VecDeque<(usize, Part)> = VecDeque::new();
    let mut result = Ok(());
    let mut parts = cut(size, CHUNK_SIZE as u64).peekable();
    loop {
        if result.is_ok()
            && in_flight.len() < DEPTH
            && let Some(part) = parts.peek().copied()
        {
            // Waiting for another chunk while holding some could make threads wait for each other.
            let chunk = match client.bounce_buffer.try_take(&client.connection) {
                None if in_flight.is_empty() => Some(client.bounce_buffer.take(&client.connection)?),
                chunk => chunk,
            };
            if let Some(chunk) = chunk {
                parts.next();
                match send(COPY_BOX_TO_CHUNK, source, &part, chunk, stream) {
                    Ok(()) => in_flight.push_back((chunk, part)),
                    Err(error) => {
                        client.bounce_buffer.give(chunk);
                        result = Err(error);
                    }
                }
                continue;
            }
        }
        let Some((chunk, part)) = in_flight.pop_front() else { return result };
        result = result.and(wait_for_chunk(&client.connection, chunk)?);
        if result.is_ok() {
            // SAFETY: the chunk's bytes have arrived; the caller vouches for the target.
            unsafe { rows(target, &part, client.bounce_buffer.address(chunk), true) };
        }
        client.bounce_buffer.give(chunk);
    }
}

fn send(call: u16, end: End, part: &Part, chunk: usize, stream: CUstream) -> Result<(), CUresult> {
    let mut call = Call::in_context(call)?;
    let end = end.part(part.at).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let (chunk, size, stream) = (chunk as u64, part.size, named_stream(stream));
    call.put(&CopyBoxChunk { first: 0, chunk, end, size, stream });
    match call.send() {
        CUDA_SUCCESS => Ok(()),
        error => Err(error),
    }
}
