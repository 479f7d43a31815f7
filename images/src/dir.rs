//! An image's directory, held by a descriptor.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::{ImageError, names, sys};

/// The directory that an image is in.
///
/// Files are opened relative to the descriptor and links are never followed, so neither a renamed
/// path nor a planted link leads elsewhere. Nothing in the directory is touched but files with our
/// names.
#[derive(Debug)]
pub struct ImageDir {
    dir: File,
    shown: PathBuf,
}

impl ImageDir {
    /// The directory at `path`.
    ///
    /// # Errors
    /// The path cannot be opened, or is no directory.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ImageError> {
        let path = path.as_ref();
        let failed = |error| ImageError::io("open", path.display().to_string(), error);
        let dir = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(path).map_err(failed)?;
        Self::from_fd(dir.as_fd(), path)
    }

    /// The directory behind a descriptor, which the caller keeps. `shown` is its path for
    /// messages; it is never opened.
    ///
    /// # Errors
    /// The descriptor is no directory, or one that may not be read.
    pub fn from_fd(fd: BorrowedFd<'_>, shown: impl Into<PathBuf>) -> Result<Self, ImageError> {
        let shown = shown.into();
        // Opened anew, not duplicated: a lock belongs to the open file, and the caller's
        // descriptor may be one that permits neither listing nor fsync.
        match sys::open_at(fd, ".", OFlags::RDONLY | OFlags::DIRECTORY, 0) {
            Ok(dir) => Ok(Self { dir, shown }),
            Err(error) => Err(ImageError::io("open", shown.display().to_string(), error)),
        }
    }

    /// The same directory once more, by an open file of its own.
    ///
    /// # Errors
    /// The directory cannot be opened again.
    pub fn try_clone(&self) -> Result<Self, ImageError> {
        Self::from_fd(self.dir.as_fd(), self.shown.clone())
    }

    /// Its path, as it was given; for messages.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shown
    }

    /// Bytes that may still be written to its file system, what is reserved for root excluded.
    ///
    /// # Errors
    /// The file system does not say.
    pub fn free_space(&self) -> Result<u64, ImageError> {
        sys::free_space(self.dir.as_fd()).map_err(|error| self.failed("ask for space in", error))
    }

    /// The file `name` and its length, if there is one.
    pub(crate) fn open_file(&self, name: &str) -> Result<Option<(File, u64)>, ImageError> {
        // Not blocking: a FIFO in place of a file must not hold up the reader.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match sys::open_at(self.dir.as_fd(), name, flags, 0) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
                return Err(ImageError::corrupt(name, "it is a symbolic link"));
            }
            Err(error) => return Err(ImageError::io("open", name, error)),
        };
        let status = file.metadata().map_err(|error| ImageError::io("read the size of", name, error))?;
        if !status.is_file() {
            return Err(ImageError::corrupt(name, "it is not a regular file"));
        }
        Ok(Some((file, status.len())))
    }

    /// As [`Self::open_file`], where the file must be there.
    pub(crate) fn require_file(&self, name: &str) -> Result<(File, u64), ImageError> {
        self.open_file(name)?.ok_or_else(|| ImageError::Missing { file: name.to_owned(), dir: self.shown.clone() })
    }

    /// A new file, which must not be there yet, for its owner only.
    pub(crate) fn create_file(&self, name: &str) -> Result<File, ImageError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        sys::open_at(self.dir.as_fd(), name, flags, 0o600).map_err(|error| ImageError::write(name, 0, error))
    }

    /// Opens a file to be written past the page cache, where its file system does that and it is worth it.
    pub(crate) fn open_direct(&self, name: &str) -> Option<File> {
        let flags = OFlags::WRONLY | OFlags::DIRECT | OFlags::NOFOLLOW;
        sys::open_at(self.dir.as_fd(), name, flags, 0).ok().filter(sys::is_worth_direct)
    }

    /// Removes a file; it is no error if there is none.
    pub(crate) fn remove(&self, name: &str) -> Result<(), ImageError> {
        match sys::unlink_at(self.dir.as_fd(), name) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(ImageError::io("remove", name, error)),
            _ => Ok(()),
        }
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), ImageError> {
        self.move_in(self, from, to)
    }

    /// Gives a file of another directory of this file system a name here, in place of what has it.
    pub(crate) fn move_in(&self, other: &Self, from: &str, to: &str) -> Result<(), ImageError> {
        sys::rename_at((other.dir.as_fd(), from), (self.dir.as_fd(), to))
            .map_err(|error| ImageError::io("rename", from, error))
    }

    /// The directory at a relative path; links are followed.
    pub(crate) fn open_below(&self, path: &Path) -> Result<Self, ImageError> {
        let shown = self.shown.join(path);
        match sys::open_at(self.dir.as_fd(), path, OFlags::RDONLY | OFlags::DIRECTORY, 0) {
            Ok(dir) => Ok(Self { dir, shown }),
            Err(error) => Err(ImageError::io("open", shown.display().to_string(), error)),
        }
    }

    /// Where it is now, without links (proc(5)): as this process sees it, which may be by a path that leads elsewhere.
    pub(crate) fn place(&self) -> io::Result<PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{}", self.dir.as_raw_fd()))
    }

    /// The target of a symbolic link in the directory; `None` if the name is not there or is no symbolic link.
    pub(crate) fn read_link(&self, name: &str) -> Option<PathBuf> {
        sys::read_link_at(self.dir.as_fd(), name).ok()
    }

    /// Makes a directory in this one, for its owner only.
    pub(crate) fn make_dir(&self, name: &str) -> Result<(), ImageError> {
        sys::make_dir_at(self.dir.as_fd(), name).map_err(|error| ImageError::write(name, 0, error))
    }

    /// The directory `name` in this one, if there is one; a link or a file of that name is none.
    pub(crate) fn inner_dir(&self, name: &str) -> Result<Option<Self>, ImageError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        match sys::open_at(self.dir.as_fd(), name, flags, 0) {
            Ok(dir) => Ok(Some(Self { dir, shown: self.shown.join(name) })),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)) => Ok(None),
            Err(error) => Err(ImageError::io("open", self.shown.join(name).display().to_string(), error)),
        }
    }

    /// Removes a directory in this one with all files of ours in it; it is no error if there is none. Its commit record
    /// goes first, durably, so that what is left by a kill on the way is no image.
    pub(crate) fn remove_dir(&self, name: &str) -> Result<(), ImageError> {
        let Some(inner) = self.inner_dir(name)? else { return Ok(()) };
        inner.remove(names::COMMIT)?;
        inner.sync()?;
        for name in inner.names()?.iter().filter(|name| names::Name::parse(name).is_some()) {
            inner.remove(name)?;
        }
        sys::remove_dir_at(self.dir.as_fd(), name).map_err(|error| ImageError::io("remove", name, error))
    }

    /// The metadata of the directory itself.
    pub(crate) fn status(&self) -> Result<std::fs::Metadata, ImageError> {
        self.dir.metadata().map_err(|error| self.failed("ask about", error))
    }

    /// Makes names created, renamed and removed before it durable.
    pub(crate) fn sync(&self) -> Result<(), ImageError> {
        match self.dir.sync_all() {
            // The file system has no such thing for directories.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
            result => result.map_err(|error| self.failed("sync", error)),
        }
    }

    /// Makes the content of all files in it durable, whoever has written them: of a dump, those of CRIU, which does not do
    /// that itself. `step` is called on the way, for who watches whether it comes further.
    ///
    /// # Errors
    /// A failure of the disk; [`ImageError::NoSpace`] where the file system notices only now that space is missing.
    pub fn sync_files(&self, mut step: impl FnMut()) -> Result<(), ImageError> {
        const PART: u64 = 64 << 20;
        let mut files = Vec::new();
        for name in self.names()? {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let file = match sys::open_at(self.dir.as_fd(), &name, flags, 0) {
                Ok(file) => file,
                // A link, a socket, or something that is gone.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENXIO | libc::ENOENT)) => {
                    continue;
                }
                Err(error) => return Err(ImageError::io("open", name, error)),
            };
            let status = file.metadata().map_err(|error| ImageError::io("read the size of", &name, error))?;
            if status.is_file() {
                // The disk need not wait for one to be whole before it gets the next.
                sys::begin_write_back(&file);
                files.push((name, file, status.len()));
            }
        }
        for (name, file, length) in files {
            for offset in (0..length).step_by(PART as usize) {
                // A file system may not have it; what counts comes behind it.
                match sys::write_back(&file, offset, PART) {
                    Err(error) if matches!(error.raw_os_error(), Some(libc::EIO | libc::ENOSPC | libc::EDQUOT)) => {
                        return Err(ImageError::write(&name, length, error));
                    }
                    _ => step(),
                }
            }
            file.sync_all().map_err(|error| ImageError::write(&name, length, error))?;
            step();
        }
        Ok(())
    }

    /// The names in it.
    pub(crate) fn names(&self) -> Result<Vec<String>, ImageError> {
        sys::names_in(self.dir.as_fd()).map_err(|error| self.failed("list", error))
    }

    /// Keeps out other writers, and processes that would build on the image in the directory, until this value is dropped.
    pub(crate) fn lock(&self) -> Result<(), ImageError> {
        match self.dir.try_lock() {
            Err(TryLockError::WouldBlock) => {
                let dir = self.shown.clone();
                // A process that builds on the image lets others build on it too; a writer lets nobody.
                if self.dir.try_lock_shared().is_ok() {
                    let _ = self.dir.unlock();
                    return Err(ImageError::BuiltOn { dir });
                }
                Err(ImageError::Busy { dir })
            }
            // A file system without locks: two writers still collide when they create files.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
        }
    }

    /// Keeps writers out until this value is dropped. Any number may do so at a time.
    pub(crate) fn share(&self) -> Result<(), ImageError> {
        match self.dir.try_lock_shared() {
            Err(TryLockError::WouldBlock) => Err(ImageError::Busy { dir: self.shown.clone() }),
            // A file system without locks: what has changed meanwhile is found before the commit.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
        }
    }

    fn failed(&self, action: &'static str, error: io::Error) -> ImageError {
        ImageError::io(action, self.shown.display().to_string(), error)
    }
}

impl Drop for ImageDir {
    fn drop(&mut self) {
        // Closing is not enough: a process that was forked and has not executed its program yet has the open file too.
        let _ = self.dir.unlock();
    }
}
