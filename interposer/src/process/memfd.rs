//! Memory that this process can share: sealed memfds and their mappings.

use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rekindle_wire::{descriptor, layout};

/// A memfd of `size` bytes whose size cannot change any more.
pub(crate) fn sealed_memfd(name: &CStr, size: usize) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; a descriptor that comes back is new and owned here.
    let file = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        descriptor::above_standard(OwnedFd::from_raw_fd(fd))?
    };
    // SAFETY: plain system calls on the descriptor made above.
    let ok = unsafe {
        libc::ftruncate(file.as_raw_fd(), size as libc::off_t) == 0
            && libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, layout::SEALS) == 0
    };
    if ok { Ok(file) } else { Err(io::Error::last_os_error()) }
}

/// Maps a file shared, readable and writable. `flags` may add `MAP_FIXED_NOREPLACE` and the like.
pub(crate) fn map_shared(file: &OwnedFd, at: *mut c_void, size: usize, flags: i32) -> io::Result<*mut u8> {
    // SAFETY: without MAP_FIXED a mapping replaces nothing.
    let got = unsafe {
        libc::mmap(at, size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | flags, file.as_raw_fd(), 0)
    };
    if got == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(got.cast()) }
}
