//! The bounce buffer: memory that this process shares with its worker, and that the worker registers with the driver. Copies between
//! the device and ordinary host memory go through its chunks.

use std::collections::VecDeque;
use std::sync::atomic::Ordering::Release;
use std::sync::{Condvar, Mutex};

use rekindle_cuda_abi::types::*;
use rekindle_wire::layout::{CHUNK_SIZE, CHUNKS};
use rekindle_wire::reply;

use super::{Connection, WORKER_DIED};

/// The chunks, and which of them are free.
pub(crate) struct BounceBuffer {
    base: *mut u8,
    free: Mutex<Free>,
    freed: Condvar,
}

struct Free {
    chunks: Vec<usize>,
    /// Chunks whose content is being copied to the device; each is free when its word in shared memory says so.
    in_flight: VecDeque<usize>,
}

impl Free {
    /// Frees the chunks that have been copied, so that they are taken again rather than chunks that nobody has used: the worker
    /// registers a chunk when it is used first, and an image has those that were used.
    fn take_back(&mut self, connection: &Connection) {
        while let Some(&chunk) = self.in_flight.front()
            && reply::is_over(connection.shared.chunk(chunk))
        {
            self.in_flight.pop_front();
            self.chunks.push(chunk);
        }
    }
}

// SAFETY: the base is the address of a mapping that stays; which thread uses a chunk is decided under the lock.
unsafe impl Send for BounceBuffer {}
// SAFETY: as above.
unsafe impl Sync for BounceBuffer {}

impl BounceBuffer {
    /// Takes the mapping of its memfd, which stays mapped.
    pub(crate) fn new(base: *mut u8) -> Self {
        let free = Free { chunks: (0..CHUNKS).rev().collect(), in_flight: VecDeque::new() };
        Self { base, free: Mutex::new(free), freed: Condvar::new() }
    }

    pub(crate) fn address(&self, chunk: usize) -> *mut u8 {
        // SAFETY: the mapping holds CHUNKS chunks, and chunk numbers come from the list made above.
        unsafe { self.base.add(chunk * CHUNK_SIZE) }
    }

    /// Takes a free chunk and marks it as pending, if there is one now. A thread that has chunks already must use this: if it
    /// waited for another, threads could wait for each other.
    pub(crate) fn try_take(&self, connection: &Connection) -> Option<usize> {
        let mut free = self.free.lock().ok()?;
        free.take_back(connection);
        let chunk = free.chunks.pop()?;
        connection.shared.chunk(chunk).store(reply::PENDING, Release);
        Some(chunk)
    }

    /// Takes a free chunk and marks it as pending; waits for one.
    pub(crate) fn take(&self, connection: &Connection) -> Result<usize, CUresult> {
        let mut free = self.free.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        loop {
            free.take_back(connection);
            if let Some(chunk) = free.chunks.pop() {
                connection.shared.chunk(chunk).store(reply::PENDING, Release);
                return Ok(chunk);
            }
            if let Some(chunk) = free.in_flight.pop_front() {
                drop(free);
                let copied = reply::wait(connection.shared.chunk(chunk), connection.spin(), || connection.is_alive());
                free = self.free.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
                if !copied {
                    return Err(WORKER_DIED);
                }
                free.chunks.push(chunk);
                continue;
            }
            // Other threads have all of them, and return each before they wait for another.
            free = self.freed.wait(free).map_err(|_| CUDA_ERROR_UNKNOWN)?;
        }
    }

    pub(crate) fn give(&self, chunk: usize) {
        if let Ok(mut free) = self.free.lock() {
            free.chunks.push(chunk);
            self.freed.notify_one();
        }
    }

    pub(crate) fn give_when_copied(&self, chunk: usize) {
        if let Ok(mut free) = self.free.lock() {
            free.in_flight.push_back(chunk);
            self.freed.notify_one();
        }
    }
}

/// Waits until the copy between a chunk and the device has ended; its result, or an outer error where the worker has died.
pub(crate) fn wait_for_chunk(connection: &Connection, chunk: usize) -> Result<Result<(), CUresult>, CUresult> {
    let word = connection.shared.chunk(chunk);
    if reply::wait(word, connection.spin(), || connection.is_alive()) {
        Ok(reply::chunk_result(word))
    } else {
        Err(WORKER_DIED)
    }
}
