//! Host memory for copies: a daemon allocates it and lends it to workers in units (`stage` explains the purpose).

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// The result of a system call, or the error in errno.
fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A sealed memfd (see [`rekindle_wire::layout::SEALS`]) whose pages are all there, and zero.
///
/// # Errors
/// There is no memory, or no descriptor.
pub fn written_memfd(name: &std::ffi::CStr, size: u64) -> io::Result<OwnedFd> {
    const PAGE: usize = 4096;
    // SAFETY: the name is a C string.
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) })?;
    // SAFETY: new, and owned here.
    let file = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(size)?;
    // If there is no memory, `fallocate` reports that; a write to the mapping would end the process.
    // SAFETY: no pointers.
    check(unsafe { libc::fallocate(fd, 0, 0, size as libc::off_t) })?;
    let length = size as usize;
    // SAFETY: a new mapping at an address of the kernel's choice, of a file of that size, which nobody else has; it is
    // written within its bounds and unmapped again.
    unsafe {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let mapped = libc::mmap(std::ptr::null_mut(), length, protection, flags, fd, 0);
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        for page in (0..length).step_by(PAGE) {
            mapped.cast::<u8>().add(page).write_volatile(0);
        }
        libc::munmap(mapped, length);
        check(libc::fcntl(fd, libc::F_ADD_SEALS, rekindle_wire::layout::SEALS))?;
    }
    Ok(file.into())
}
