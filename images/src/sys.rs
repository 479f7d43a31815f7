//! The system calls that the standard library does not offer: files relative to a directory's
//! descriptor. rustix has all but one of them.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use rustix::fs::{self, AtFlags, Dir, FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::ImageError;

/// `openat` with `O_CLOEXEC` added.
pub(crate) fn open_at(dir: BorrowedFd<'_>, name: impl AsRef<OsStr>, flags: OFlags, mode: u32) -> io::Result<File> {
    Ok(fs::openat(dir, name.as_ref(), flags | OFlags::CLOEXEC, Mode::from_raw_mode(mode))?.into())
}

/// `unlinkat`; a symbolic link is removed itself.
pub(crate) fn unlink_at(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    Ok(fs::unlinkat(dir, name, AtFlags::empty())?)
}

/// `unlinkat` of an empty directory.
pub(crate) fn remove_dir_at(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    Ok(fs::unlinkat(dir, name, AtFlags::REMOVEDIR)?)
}

/// `mkdirat`, for the owner only.
pub(crate) fn make_dir_at(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    Ok(fs::mkdirat(dir, name, Mode::RWXU)?)
}

/// `readlinkat`.
pub(crate) fn read_link_at(dir: BorrowedFd<'_>, name: &str) -> io::Result<PathBuf> {
    let target = fs::readlinkat(dir, name, Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

/// `renameat`.
pub(crate) fn rename_at(from: (BorrowedFd<'_>, &str), to: (BorrowedFd<'_>, &str)) -> io::Result<()> {
    Ok(fs::renameat(from.0, from.1, to.0, to.1)?)
}

/// The names in a directory, in no order; those that are not UTF-8 cannot be ours and are left out.
pub(crate) fn names_in(dir: BorrowedFd<'_>) -> io::Result<Vec<String>> {
    // A descriptor of its own, since reading moves the position that duplicates share.
    let own = open_at(dir, ".", OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
    let mut names = Vec::new();
    for entry in Dir::new(own)? {
        if let Ok(name) = entry?.file_name().to_str() {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

/// Bytes that an unprivileged process may still write to the file system of `dir`.
pub(crate) fn free_space(dir: BorrowedFd<'_>) -> io::Result<u64> {
    let answer = fs::fstatvfs(dir)?;
    Ok(answer.f_bavail.saturating_mul(answer.f_frsize))
}

/// Where the first data at or after `from` begins; `None` if only a hole follows.
pub(crate) fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    // The position that this moves is used by nobody: all reads and writes in this crate say where.
    match fs::seek(file, SeekFrom::Data(offset(from)?)) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// An offset or a length that the kernel has numbers for.
fn offset(value: u64) -> io::Result<u64> {
    libc::off_t::try_from(value).map(|_| value).map_err(|_| io::ErrorKind::InvalidInput.into())
}

/// Makes a range of a file a hole, within its length.
pub(crate) fn punch_hole(file: &File, from: u64, length: u64) -> io::Result<()> {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(fs::fallocate(file, mode, offset(from)?, offset(length)?)?)
}

/// Gives a range of a file its blocks, and the file that length if it is shorter.
pub(crate) fn reserve(file: &File, from: u64, length: u64) -> io::Result<()> {
    Ok(fs::fallocate(file, FallocateFlags::empty(), offset(from)?, offset(length)?)?)
}

/// Has the pages of a file in the page cache sent to the disk, and does not wait for that. `fsync` reports failures.
pub(crate) fn begin_write_back(file: &File) {
    // SAFETY: the descriptor is open; no pointers.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Has these bytes of a file sent to the disk, and waits for that. It does not make them durable.
pub(crate) fn write_back(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the descriptor is open; no pointers.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, length as i64, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a file is on a file system on which writing past the page cache was measured to be faster (`scripts/bench
/// write`). On a file system in memory it is slower, and others may not have it, or not mean it.
pub(crate) fn is_worth_direct(file: &File) -> bool {
    fs::fstatfs(file).is_ok_and(|answer| [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC].contains(&answer.f_type))
}

/// Random bytes from the kernel.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N], ImageError> {
    let mut bytes = [0; N];
    // Up to 256 bytes are never given in part.
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(got) if got == N => Ok(bytes),
        Ok(_) => Err(ImageError::io("read", "random numbers", io::ErrorKind::UnexpectedEof.into())),
        Err(error) => Err(ImageError::io("read", "random numbers", error.into())),
    }
}
