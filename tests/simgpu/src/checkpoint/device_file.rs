//! The file that stands for the driver's devices: open and mapped while the process has its GPU.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

const BYTES: usize = 4096;

static OPEN: Mutex<Option<(File, usize)>> = Mutex::new(None);

/// Its path, if this process has one.
pub(super) fn path() -> Option<PathBuf> {
    std::env::var_os("SIMGPU_DEVICE_FILE").filter(|it| !it.is_empty()).map(PathBuf::from)
}

/// Opens and maps it.
pub(super) fn open() -> io::Result<()> {
    let Some(path) = path() else { return Ok(()) };
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
    file.set_len(BYTES as u64)?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping just made. The real driver's are not inherited either.
    unsafe { libc::madvise(at, BYTES, libc::MADV_DONTFORK) };
    *OPEN.lock().unwrap_or_else(PoisonError::into_inner) = Some((file, at as usize));
    Ok(())
}

/// Unmaps and closes it.
pub(super) fn close() {
    if let Some((_, at)) = OPEN.lock().unwrap_or_else(PoisonError::into_inner).take() {
        // SAFETY: the mapping that `open` has made, which nobody accesses.
        unsafe { libc::munmap(at as *mut _, BYTES) };
    }
}
