//! Copies between the device and ordinary host memory, through the bounce buffer.
//!
//! ```text
//!   to the device     bytes ──memcpy──> chunk ──COPY_FROM_CHUNK──> device      returns when the last chunk is on its way
//!   to the host       device ──COPY_TO_CHUNK──> chunk ──memcpy──> bytes        several chunks in flight
//! ```
//!
//! Large copies are striped over a few threads, because one thread's memcpy is slower than the link. Where the process may
//! have no more threads, the caller copies alone.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{COPY_BYTES, COPY_FROM_CHUNK, COPY_TO_CHUNK, CopyBytes, CopyChunk, MAX_INLINE_BYTES};
use rekindle_wire::layout::{CHUNK_SIZE, CHUNKS};

use crate::call::{Call, stream_of};
use crate::connection::bounce_buffer::wait_for_chunk;
use crate::connection::prints;
use crate::process::calling_thread::Identity;
use crate::process::threads;
use crate::state::client;
use crate::state::idle;

/// From this size on, several threads copy.
const STRIPED: usize = 16 << 20;
/// The most threads of one copy, the caller included.
const STRIPES: usize = 4;
/// Up to this size, a copy to the device goes in pieces of [`SMALL_PIECE`].
const SMALL: usize = 4 << 20;
/// Part of a chunk. The device takes one while the caller fills the next, and waiting for the last one is short.
const SMALL_PIECE: usize = 128 << 10;
const _: () = assert!(SMALL_PIECE <= CHUNK_SIZE);
/// Chunks that one thread keeps in flight towards the host.
pub(crate) const DEPTH: usize = CHUNKS / STRIPES;

/// Copies bytes to the device, in stream order. When it returns, the bytes have been taken.
///
/// # Safety
/// `source` holds `bytes` readable bytes.
pub(crate) unsafe fn to_device(target: u64, source: *const u8, bytes: usize, stream: CUstream) -> CUresult {
    if bytes <= MAX_INLINE_BYTES {
        let mut call = match Call::in_context(COPY_BYTES) {
            Ok(call) => call,
            Err(error) => return error,
        };
        let stream = match stream_of(stream) {
            Ok(stream) => stream,
            Err(error) => return error,
        };
        // SAFETY: the caller's promise.
        let bytes = unsafe { std::slice::from_raw_parts(source, bytes) };
        call.put(&CopyBytes { destination: target, stream, bytes });
        return call.send();
    }
    let source = source as usize;
    let piece = if bytes <= SMALL { SMALL_PIECE } else { CHUNK_SIZE };
    striped(bytes, piece, move |chunks| {
        let client = client::get()?;
        for (offset, length) in chunks {
            let chunk = client.bounce_buffer.take(&client.connection)?;
            // SAFETY: the chunk is this thread's; the source range is part of what the caller promises.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    (source + offset) as *const u8,
                    client.bounce_buffer.address(chunk),
                    length,
                );
            }
            let sent = chunk_command(COPY_FROM_CHUNK, target + offset as u64, chunk, length, stream);
            match sent {
                Ok(_) => client.bounce_buffer.give_when_copied(chunk),
                Err(error) => {
                    client.bounce_buffer.give(chunk);
                    return Err(error);
                }
            }
        }
        Ok(())
    })
}

/// Copies bytes from the device, in stream order. When it returns, the bytes are there.
///
/// # Safety
/// `target` has room for `bytes` bytes.
pub(crate) unsafe fn to_host(target: *mut u8, source: u64, bytes: usize, stream: CUstream) -> CUresult {
    let target = target as usize;
    striped(bytes, CHUNK_SIZE, move |chunks| {
        let client = client::get()?;
        let mut in_flight: VecDeque<(usize, usize, usize)> = VecDeque::new();
        let (mut result, mut end) = (Ok(()), None);
        let mut chunks = chunks.peekable();
        loop {
            let may_send = result.is_ok() && in_flight.len() < DEPTH;
            if let Some(&(offset, length)) = chunks.peek().filter(|_| may_send) {
                let chunk = match client.bounce_buffer.try_take(&client.connection) {
                    None if in_flight.is_empty() => Some(client.bounce_buffer.take(&client.connection)?),
                    chunk => chunk,
                };
                if let Some(chunk) = chunk {
                    chunks.next();
                    match chunk_command(COPY_TO_CHUNK, source + offset as u64, chunk, length, stream) {
                        Ok(behind) => {
                            end = Some(behind);
                            in_flight.push_back((chunk, offset, length));
                        }
                        Err(error) => {
                            client.bounce_buffer.give(chunk);
                            result = Err(error);
                        }
                    }
                    continue;
                }
            }
            let Some((chunk, offset, length)) = in_flight.pop_front() else { break };
            result = result.and(wait_for_chunk(&client.connection, chunk)?);
            if result.is_ok() {
                // SAFETY: the chunk's bytes have arrived; the target range is part of what the caller promises.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        client.bounce_buffer.address(chunk),
                        (target + offset) as *mut u8,
                        length,
                    );
                }
            }
            client.bounce_buffer.give(chunk);
        }
        if let (Ok(()), Some(end)) = (result, end) {
            idle::waited_for(stream, end);
        }
        result
    })
}

fn chunk_command(call: u16, device: u64, chunk: usize, bytes: usize, stream: CUstream) -> Result<u64, CUresult> {
    let mut call = Call::in_context(call)?;
    let stream = stream_of(stream)?;
    call.put(&CopyChunk { device, chunk: chunk as u64, bytes: bytes as u64, stream });
    call.send_to_end()
}

/// Calls `work` with the (offset, length) pieces of a copy, each of which a chunk takes; of a large one from several threads.
fn striped(
    bytes: usize,
    piece: usize,
    work: impl Fn(&mut dyn Iterator<Item = (usize, usize)>) -> Result<(), CUresult> + Sync,
) -> CUresult {
    let result = striped_over(threads_for(bytes), bytes, piece, work);
    if let Ok(client) = client::get() {
        prints::deliver(&client.connection);
    }
    result.err().unwrap_or(CUDA_SUCCESS)
}

/// The number of threads for a copy of this size.
fn threads_for(bytes: usize) -> usize {
    if bytes < STRIPED {
        return 1;
    }
    let cores = std::thread::available_parallelism().map_or(1, |c| c.get());
    STRIPES.min(cores / 2).max(1)
}

/// As [`striped`], with at most `threads` threads, or fewer if no more can be created. Each takes the next piece that no
/// other has taken, so the caller copies alone if it has no helpers.
fn striped_over(
    threads: usize,
    bytes: usize,
    piece: usize,
    work: impl Fn(&mut dyn Iterator<Item = (usize, usize)>) -> Result<(), CUresult> + Sync,
) -> Result<(), CUresult> {
    let next = AtomicUsize::new(0);
    let chunks = || {
        std::iter::from_fn(|| {
            // Taken only while there are any, so that it does not wrap around.
            let taken = next.fetch_update(Relaxed, Relaxed, |i| (i < bytes.div_ceil(piece)).then_some(i + 1));
            let offset = taken.ok()? * piece;
            Some((offset, piece.min(bytes - offset)))
        })
    };
    if threads <= 1 {
        return work(&mut chunks());
    }
    let context = crate::state::contexts::current();
    // The per-thread default stream is the caller's, not the helper's.
    let caller = Identity::of_caller();
    let help = || {
        crate::state::contexts::set_current(context);
        caller.assume();
        work(&mut chunks())
    };
    std::thread::scope(|scope| {
        // If one cannot be created, no other can.
        let helpers: Vec<_> =
            (1..threads).map_while(|_| threads::spawn_helper(scope, "cuda-copy", help).ok()).collect();
        let mut result = work(&mut chunks());
        for helper in helpers {
            result = result.and(helper.join().unwrap_or(Err(CUDA_ERROR_UNKNOWN)));
        }
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    const LAST: usize = 5;

    /// Which thread has taken which chunk of a copy of some chunks and a few bytes.
    fn taken(threads: usize) -> BTreeMap<usize, (usize, std::thread::ThreadId)> {
        let taken = Mutex::new(BTreeMap::new());
        let copied = striped_over(threads, 7 * CHUNK_SIZE + LAST, CHUNK_SIZE, |chunks| {
            for (offset, length) in chunks {
                let former = taken.lock().unwrap().insert(offset, (length, std::thread::current().id()));
                assert_eq!(former, None, "taken twice");
                std::thread::yield_now();
            }
            Ok(())
        });
        assert_eq!(copied, Ok(()));
        taken.into_inner().unwrap()
    }

    fn must_be_whole(taken: &BTreeMap<usize, (usize, std::thread::ThreadId)>) {
        let chunks: Vec<_> = taken.iter().map(|(offset, (length, _))| (*offset, *length)).collect();
        let expected: Vec<_> = (0..8).map(|i| (i * CHUNK_SIZE, if i < 7 { CHUNK_SIZE } else { LAST })).collect();
        assert_eq!(chunks, expected);
    }

    #[test]
    fn each_chunk_is_copied_once_with_any_number_of_threads() {
        for threads in [1, 2, 4, 20] {
            must_be_whole(&taken(threads));
        }
    }

    #[test]
    fn the_caller_copies_alone_when_no_thread_can_be_created() {
        threads::tests::REFUSED.set(true);
        let taken = taken(4);
        must_be_whole(&taken);
        assert!(taken.values().all(|(_, by)| *by == std::thread::current().id()));
    }

    #[test]
    fn a_copy_fails_when_one_part_fails() {
        let caller = std::thread::current().id();
        let result = striped_over(2, CHUNK_SIZE, CHUNK_SIZE, |chunks| {
            chunks.for_each(drop);
            if std::thread::current().id() == caller { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
        });
        assert_eq!(result, Err(CUDA_ERROR_INVALID_VALUE));
    }
}
