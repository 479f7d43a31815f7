//! The system calls that the standard library does not offer: files relative to a directory's
//! descriptor. All of this crate's `unsafe` is here.

use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::ImageError;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn c_name(name: &OsStr) -> io::Result<CString> {
    CString::new(name.as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// `openat` with `O_CLOEXEC` added.
pub(crate) fn open_at(dir: BorrowedFd<'_>, name: impl AsRef<OsStr>, flags: i32, mode: u32) -> io::Result<File> {
    let name = c_name(name.as_ref())?;
    // SAFETY: the descriptor is borrowed, hence open; the name ends in NUL and outlives the call.
    let fd =
        check(unsafe { libc::openat(dir.as_raw_fd(), name.as_ptr(), flags | libc::O_CLOEXEC, mode as libc::c_uint) })?;
    // SAFETY: the call above gave this descriptor to us alone.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// `unlinkat`; a symbolic link is removed itself.
pub(crate) fn unlink_at(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let name = c_name(name.as_ref())?;
    // SAFETY: as in `open_at`.
    check(unsafe { libc::unlinkat(dir.as_raw_fd(), name.as_ptr(), 0) }).map(drop)
}

/// `unlinkat` of an empty directory.
pub(crate) fn remove_dir_at(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let name = c_name(name.as_ref())?;
    // SAFETY: as in `open_at`.
    check(unsafe { libc::unlinkat(dir.as_raw_fd(), name.as_ptr(), libc::AT_REMOVEDIR) }).map(drop)
}

/// `mkdirat`, for the owner only.
pub(crate) fn make_dir_at(dir: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let name = c_name(name.as_ref())?;
    // SAFETY: as in `open_at`.
    check(unsafe { libc::mkdirat(dir.as_raw_fd(), name.as_ptr(), 0o700) }).map(drop)
}

/// `readlinkat`.
pub(crate) fn read_link_at(dir: BorrowedFd<'_>, name: &str) -> io::Result<PathBuf> {
    let name = c_name(name.as_ref())?;
    // The kernel takes no longer one, without the NUL that it does not write.
    let mut target = vec![0_u8; libc::PATH_MAX as usize];
    // SAFETY: the descriptor and the name as in `open_at`; the buffer is as long as said.
    let length = unsafe { libc::readlinkat(dir.as_raw_fd(), name.as_ptr(), target.as_mut_ptr().cast(), target.len()) };
    target.truncate(usize::try_from(length).map_err(|_| io::Error::last_os_error())?);
    Ok(OsString::from_vec(target).into())
}

/// `renameat`.
pub(crate) fn rename_at(from: (BorrowedFd<'_>, &str), to: (BorrowedFd<'_>, &str)) -> io::Result<()> {
    let ((from_dir, from), (to_dir, to)) = (from, to);
    let (from, to) = (c_name(from.as_ref())?, c_name(to.as_ref())?);
    let (from_dir, to_dir) = (from_dir.as_raw_fd(), to_dir.as_raw_fd());
    // SAFETY: as in `open_at`.
    check(unsafe { libc::renameat(from_dir, from.as_ptr(), to_dir, to.as_ptr()) }).map(drop)
}

/// The names in a directory, in no order; those that are not UTF-8 cannot be ours and are left out.
pub(crate) fn names_in(dir: BorrowedFd<'_>) -> io::Result<Vec<String>> {
    /// Closes the stream however the function is left.
    struct Stream(*mut libc::DIR);
    impl Drop for Stream {
        fn drop(&mut self) {
            // SAFETY: made by `fdopendir` and closed only here.
            unsafe { libc::closedir(self.0) };
        }
    }

    // A descriptor of its own, since reading moves the position that duplicates share.
    let own = open_at(dir, ".", libc::O_RDONLY | libc::O_DIRECTORY, 0)?;
    // SAFETY: an open directory; on success the stream owns it.
    let stream = unsafe { libc::fdopendir(own.as_raw_fd()) };
    if stream.is_null() {
        return Err(io::Error::last_os_error());
    }
    let _ = own.into_raw_fd();
    let stream = Stream(stream);

    let mut names = Vec::new();
    loop {
        // SAFETY: this thread's errno; readdir tells the end from a failure only by it.
        unsafe { *libc::__errno_location() = 0 };
        // SAFETY: the stream is open and used by this thread alone.
        let entry = unsafe { libc::readdir(stream.0) };
        if entry.is_null() {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                Some(0) | None => Ok(names),
                Some(_) => Err(error),
            };
        }
        // SAFETY: an entry's name ends in NUL and lives until the next readdir.
        let name = unsafe { CStr::from_ptr((*entry).d_name.as_ptr()) };
        if let Ok(name) = name.to_str() {
            names.push(name.to_owned());
        }
    }
}

/// Bytes that an unprivileged process may still write to the file system of `dir`.
pub(crate) fn free_space(dir: BorrowedFd<'_>) -> io::Result<u64> {
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the descriptor is open, and the structure is as large as the call expects.
    check(unsafe { libc::fstatvfs(dir.as_raw_fd(), answer.as_mut_ptr()) })?;
    // SAFETY: filled by the successful call.
    let answer = unsafe { answer.assume_init() };
    Ok(answer.f_bavail.saturating_mul(answer.f_frsize))
}

/// Where the first data at or after `from` begins; `None` if only a hole follows.
pub(crate) fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    let from = libc::off_t::try_from(from).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the descriptor is open. The position that this moves is used by nobody: all reads
    // and writes in this crate say where.
    let at = unsafe { libc::lseek(file.as_raw_fd(), from, libc::SEEK_DATA) };
    match u64::try_from(at) {
        Ok(at) => Ok(Some(at)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

/// Makes a range of a file a hole, within its length.
pub(crate) fn punch_hole(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let number = |value| libc::off_t::try_from(value).map_err(|_| io::ErrorKind::InvalidInput);
    let (offset, length) = (number(offset)?, number(length)?);
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the descriptor is open; nothing of ours is in the file's memory.
    check(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, length) }).map(drop)
}

/// Gives a range of a file its blocks, and the file that length if it is shorter.
pub(crate) fn reserve(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let number = |value| libc::off_t::try_from(value).map_err(|_| io::ErrorKind::InvalidInput);
    let (offset, length) = (number(offset)?, number(length)?);
    // SAFETY: as above.
    check(unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, length) }).map(drop)
}

/// Has what is in the page cache of a file sent to the disk, and does not wait for it. What fails, `fsync` says.
pub(crate) fn begin_write_back(file: &File) {
    // SAFETY: the descriptor is open; no pointers.
    unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// Has these bytes of a file sent to the disk, and waits for that. It does not make them durable.
pub(crate) fn write_back(file: &File, offset: u64, length: u64) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    // SAFETY: the descriptor is open; no pointers.
    check(unsafe { libc::sync_file_range(file.as_raw_fd(), offset as i64, length as i64, flags) }).map(drop)
}

/// Whether a file is on a file system on which writing past the page cache was measured to be faster (`scripts/bench
/// write`). On a file system in memory it is slower, and others may not have it, or not mean it.
pub(crate) fn is_worth_direct(file: &File) -> bool {
    let mut answer = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the descriptor is open, and the structure is as large as the call expects.
    if unsafe { libc::fstatfs(file.as_raw_fd(), answer.as_mut_ptr()) } < 0 {
        return false;
    }
    // SAFETY: filled by the successful call.
    let kind = unsafe { answer.assume_init() }.f_type;
    [libc::EXT4_SUPER_MAGIC, libc::XFS_SUPER_MAGIC].contains(&kind)
}

/// Random bytes from the kernel.
pub(crate) fn random_bytes<const N: usize>() -> Result<[u8; N], ImageError> {
    let mut bytes = [0; N];
    // SAFETY: the buffer is as long as said. Up to 256 bytes are never given in part.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    if usize::try_from(got) == Ok(N) {
        Ok(bytes)
    } else {
        let error = io::Error::last_os_error();
        Err(ImageError::io("read", "random numbers", error))
    }
}
