//! The process's pages: mapping, remapping, unmapping, and memfds.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// The size of a page on x86-64.
pub(crate) const PAGE: u64 = 4096;

const NONE: libc::c_int = libc::PROT_NONE;
const BOTH: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Maps fresh zeroed memory; at exactly `at`, which must be free, unless that is 0.
pub(crate) fn map(at: u64, len: u64) -> io::Result<u64> {
    new_mapping(at, len, BOTH, None)
}

/// Maps a part of a file at exactly `at`, which must be free.
pub(crate) fn map_part(at: u64, len: u64, file: &OwnedFd, offset: u64) -> io::Result<u64> {
    new_mapping(at, len, BOTH, Some((file, offset)))
}

/// Takes addresses without memory behind them; exactly those at `at`, which must be free, unless that is 0.
pub(crate) fn reserve(at: u64, len: u64) -> io::Result<u64> {
    new_mapping(at, len, NONE, None)
}

fn new_mapping(at: u64, len: u64, protection: libc::c_int, part: Option<(&OwnedFd, u64)>) -> io::Result<u64> {
    let (file, offset) = part.map_or((-1, 0), |(file, offset)| (file.as_raw_fd(), offset as i64));
    let kind = if part.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
    let flags = kind | libc::MAP_NORESERVE;
    let flags = if at == 0 { flags } else { flags | libc::MAP_FIXED_NOREPLACE };
    // SAFETY: a new mapping, which replaces none.
    let got = unsafe { libc::mmap(at as *mut _, len as usize, protection, flags, file, offset) };
    if got == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let got = got as u64;
    if at != 0 && got != at {
        // A kernel older than 4.17 takes the address as a hint.
        unmap(got, len);
        return Err(io::ErrorKind::AddrInUse.into());
    }
    Ok(got)
}

/// Gives pages and their addresses back.
pub(crate) fn unmap(at: u64, len: u64) {
    // SAFETY: the caller owns these pages, and has made sure that nobody accesses them any more.
    unsafe { libc::munmap(at as *mut _, len as usize) };
}

/// Puts a file's first bytes in place of reserved addresses.
pub(crate) fn place_file(at: u64, len: u64, file: &OwnedFd) -> io::Result<()> {
    place_part(at, len, file, 0)
}

/// Puts a part of a file in place of reserved addresses.
pub(crate) fn place_part(at: u64, len: u64, file: &OwnedFd, offset: u64) -> io::Result<()> {
    let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: replaces pages of a reservation that the caller owns.
    let got = unsafe { libc::mmap(at as *mut _, len as usize, BOTH, flags, file.as_raw_fd(), offset as i64) };
    if got == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Gives the memory behind a part of a file back: it is zero from then on. Returns whether that worked.
pub(crate) fn punch(file: &OwnedFd, offset: u64, len: u64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: changes a file of ours.
    unsafe { libc::fallocate(file.as_raw_fd(), mode, offset as i64, len as i64) == 0 }
}

/// Turns pages back into reserved addresses.
pub(crate) fn clear(at: u64, len: u64) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: replaces pages that the caller owns and nobody accesses any more.
    unsafe { libc::mmap(at as *mut _, len as usize, NONE, flags, -1, 0) };
}

/// A file in memory. Its name can be read back from `/proc/self/fd`.
pub(crate) fn memfd(name: &std::ffi::CStr, len: u64) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string; the descriptor is new and ours.
    let file = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let size = i64::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: changes a file of ours.
    if unsafe { libc::ftruncate(file.as_raw_fd(), size) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}
