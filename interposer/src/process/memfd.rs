//! Memory that this process can share: sealed memfds and their mappings; and addresses that are kept free by a mapping of an empty one.

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

/// The name of the empty files that reservations map. It is none of those by which the daemon knows memory that processes share: a child
/// that was forked may have the mapping, too.
const RESERVED_NAME: &CStr = c"reserved-by-rekindle";

/// Keeps addresses from everything else in the process, without access. `false` where something is there.
///
/// The mapping is shared, of an empty file: CRIU makes a list of all pages that a process alone might have, and for a reservation of 64 GiB
/// of its own it would need 270 MB and, where it leaves pages in the processes (`--lazy-pages`), 0.3 seconds.
pub(crate) fn reserve(address: u64, size: u64) -> bool {
    // SAFETY: the name is a C string; a descriptor that comes back is new and owned here.
    let file = unsafe {
        let fd = libc::memfd_create(RESERVED_NAME.as_ptr(), libc::MFD_CLOEXEC);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd)).and_then(|fd| descriptor::above_standard(fd).ok())
    };
    let (fd, kind) = match &file {
        Some(file) => (file.as_raw_fd(), libc::MAP_SHARED),
        // The process has all its descriptors.
        None => (-1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS),
    };
    let flags = kind | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: MAP_FIXED_NOREPLACE replaces nothing.
    let got = unsafe { libc::mmap(address as *mut c_void, size as usize, libc::PROT_NONE, flags, fd, 0) };
    if got != libc::MAP_FAILED && got as u64 != address {
        // A kernel that does not know the flag.
        // SAFETY: what was just mapped.
        unsafe { libc::munmap(got, size as usize) };
    }
    got as u64 == address
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 64 << 30;

    #[test]
    fn a_reservation_keeps_its_addresses_and_is_none_of_the_processs_own_memory() {
        let at = 0x3f00_0000_0000;
        assert!(reserve(at, SIZE));
        assert!(!reserve(at + SIZE - 4096, 4096), "something is there");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps.lines().find(|it| it.starts_with("3f0000000000-3f1000000000 ")).unwrap();
        assert!(line.contains(" ---s ") && line.contains("/memfd:reserved-by-rekindle"), "{line}");
        // SAFETY: what was reserved above.
        assert_eq!(unsafe { libc::munmap(at as *mut c_void, SIZE as usize) }, 0);
    }
}
