//! Memory that the application shares with other processes, and registers. Its pages cannot be moved into a memfd of ours, so the
//! worker maps the same file.
//!
//! ```text
//!   home  ── the application's mapping, which stays ──┐
//!   alias ── a second mapping in the pinned window ───┴── one file ── the worker's mapping at the alias, registered there
//! ```
//!
//! The file may have no name any more, and this process cannot open it by its mapping: the daemon does, and gives it to the
//! worker. CRIU saves both mappings as those of one file, and a restored process's worker gets the file in the same way.

use std::ffi::c_void;
use std::ops::Range;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{PINNED_MAP, PinnedMap};
use rekindle_wire::control::{Reply, Request};

use crate::call::Call;
use crate::connection::ask;
use crate::state::client::Client;

/// Between aliases: the kernel would take two mappings of one file for one, if the second continued the first.
const GAP: u64 = 4096;

/// Maps the pages a second time, and has the worker map them there in the current context. The pages lie in one shared, writable
/// mapping. Returns the address of the alias.
///
/// # Errors
/// Nothing is changed.
pub(crate) fn register(client: &'static Client, pages: &Range<u64>, flags: u32) -> Result<u64, CUresult> {
    let size = pages.end - pages.start;
    let place = size.checked_add(GAP).and_then(|place| client.memory.pinned_place(place));
    let alias = place.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    // If this fails, another mapping is there: the place must neither be unmapped nor reused.
    reserve(alias, size)?;
    let result = duplicate(pages.start, alias, size).and_then(|()| {
        let mut call = Call::in_context(PINNED_MAP)?;
        match ask::ask(&Request::Register { address: alias, size }) {
            Some(Reply::Registered) => {}
            _ => return Err(CUDA_ERROR_NOT_SUPPORTED),
        }
        call.put(&PinnedMap { address: alias, size, flags, serial: 0 });
        check(call.wait().0)
    });
    match result {
        Ok(()) => {
            // SAFETY: our own mapping, which a child needs not.
            unsafe { libc::madvise(alias as *mut _, size as usize, libc::MADV_DONTFORK) };
            Ok(alias)
        }
        Err(error) => {
            unmap(client, alias, size);
            Err(error)
        }
    }
}

/// Unmaps an alias that the worker no longer has mapped, and frees its place.
pub(crate) fn unmap(client: &Client, alias: u64, size: u64) {
    // SAFETY: the range was taken from the pinned window for this alias alone.
    unsafe { libc::munmap(alias as *mut c_void, size as usize) };
    client.memory.pinned_free(alias, size + GAP);
}

fn reserve(alias: u64, size: u64) -> Result<(), CUresult> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: MAP_FIXED_NOREPLACE replaces nothing.
    let got = unsafe { libc::mmap(alias as *mut c_void, size as usize, libc::PROT_NONE, flags, -1, 0) };
    if got != libc::MAP_FAILED && got as u64 != alias {
        // SAFETY: an old kernel took the address as a hint; this mapping is nobody's.
        unsafe { libc::munmap(got, size as usize) };
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    if got == libc::MAP_FAILED { Err(CUDA_ERROR_OUT_OF_MEMORY) } else { Ok(()) }
}

/// Maps shared pages a second time, in place of a reservation: `mremap(2)` does that where the old size is 0.
fn duplicate(home: u64, alias: u64, size: u64) -> Result<(), CUresult> {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: only the reservation is replaced, which is this alias's; the mapping at home stays.
    let got = unsafe { libc::mremap(home as *mut c_void, 0, size as usize, flags, alias as *mut c_void) };
    if got == libc::MAP_FAILED { Err(CUDA_ERROR_OUT_OF_MEMORY) } else { Ok(()) }
}
