//! The client's staging: memory that it shares with the worker, in chunks. Copies between devices and pageable memory go through it.
//!
//! The driver learns of a chunk when the first copy goes through it, and the chunk gets its pages then. To make and register those of
//! all chunks takes 4 to 8 ms, which was most of an attach; and an image has only those chunks that were used. To register memory
//! does not wait for kernels, unlike to unregister it (`tests/facts/mapping.cu`).

use rekindle_cuda_abi::types::*;
use rekindle_wire::layout::{CHUNK_SIZE, CHUNKS};

use crate::gpu::driver::Driver;
use crate::session::outcome::{Refused, check};

/// The staging of a client, if there is one.
#[derive(Default)]
pub(crate) struct Staging {
    at: Option<std::ptr::NonNull<u8>>,
    /// The chunks that are registered with the driver.
    registered: [bool; CHUNKS],
}

impl Staging {
    /// The staging at this address: [`CHUNKS`] chunks of [`CHUNK_SIZE`] bytes, which stay mapped as long as the process.
    pub(crate) fn new(at: *mut u8) -> Self {
        Self { at: std::ptr::NonNull::new(at), registered: [false; CHUNKS] }
    }

    /// The address of a chunk; none if there is no such chunk, or no client.
    pub(crate) fn chunk(&self, chunk: usize) -> Option<*mut u8> {
        // SAFETY: the chunk lies inside the mapping.
        self.at.filter(|_| chunk < CHUNKS).map(|at| unsafe { at.as_ptr().add(chunk * CHUNK_SIZE) })
    }

    /// The first bytes of a chunk. What the client writes there meanwhile harms its own copy.
    pub(crate) fn content(&self, chunk: usize, bytes: usize) -> Option<Vec<u8>> {
        let from = self.chunk(chunk).filter(|_| bytes <= CHUNK_SIZE)?;
        let mut content = vec![0; bytes];
        // SAFETY: the range lies in the chunk, which is mapped as long as the process.
        unsafe { std::ptr::copy_nonoverlapping(from, content.as_mut_ptr(), bytes) };
        Some(content)
    }

    /// Whether the driver knows a chunk.
    pub(crate) fn is_registered(&self, chunk: usize) -> bool {
        self.registered.get(chunk).is_some_and(|it| *it)
    }

    /// Registers a chunk with the driver, in the current context and for all.
    pub(crate) fn register(&mut self, driver: &Driver, chunk: usize) -> Result<(), Refused> {
        const PORTABLE_AND_MAPPED: u32 = 3;
        let at = self.chunk(chunk).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        // SAFETY: the chunk is mapped as long as the process.
        check(unsafe { (driver.cuMemHostRegister_v2)(at.cast(), CHUNK_SIZE, PORTABLE_AND_MAPPED) })?;
        self.registered[chunk] = true;
        Ok(())
    }

    /// Has the driver forget all chunks. No copy goes through them now.
    pub(crate) fn unregister(&mut self, driver: &Driver) {
        for chunk in 0..CHUNKS {
            if let (true, Some(at)) = (std::mem::take(&mut self.registered[chunk]), self.chunk(chunk)) {
                // SAFETY: `register` has registered it.
                unsafe { (driver.cuMemHostUnregister)(at.cast()) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rekindle_wire::layout::STAGING_SIZE;

    use super::*;
    use crate::serve::fixture::{self, pins};

    #[test]
    fn the_driver_learns_of_a_chunk_when_it_is_used_and_forgets_all_at_once() {
        let mut memory = vec![7_u8; STAGING_SIZE];
        let mut call = fixture::executor().call;
        assert!(call.staged(0, 1).is_err() && call.session.staging.content(0, 1).is_none(), "there is no client");
        call.session.staging = Staging::new(memory.as_mut_ptr());
        let place = |chunk: usize| memory.as_ptr() as usize + chunk * CHUNK_SIZE;
        for chunk in [0, CHUNKS - 1, 0] {
            assert_eq!(call.staged(chunk, 1).unwrap() as usize, place(chunk));
        }
        assert!(call.staged(CHUNKS, 1).is_err());
        assert_eq!(pins::all(), [(place(0), CHUNK_SIZE), (place(CHUNKS - 1), CHUNK_SIZE)]);
        let driver = call.driver();
        call.session.staging.unregister(driver);
        assert!(pins::all().is_empty());
        call.staged(3, 1).unwrap();
        assert_eq!(pins::all(), [(place(3), CHUNK_SIZE)]);
    }

    #[test]
    fn the_content_of_a_chunk_is_no_longer_than_that() {
        let mut memory = vec![7_u8; STAGING_SIZE];
        let staging = Staging::new(memory.as_mut_ptr());
        assert_eq!(staging.content(CHUNKS - 1, CHUNK_SIZE), Some(vec![7; CHUNK_SIZE]));
        assert!(staging.content(0, CHUNK_SIZE + 1).is_none() && staging.content(CHUNKS, 1).is_none());
    }
}
