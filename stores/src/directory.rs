//! Objects as files below a directory.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::StoreError;
use crate::random;
use crate::transport::{Found, MAX_OBJECT, ObjectName, Transport};

/// The folder for files that are not whole yet. What a killed writer leaves there, garbage collection removes.
pub(crate) const TEMPORARY: &str = "tmp";

/// A directory with a store's objects. Files and folders in it are for their owner only.
#[derive(Debug)]
pub(crate) struct Directory {
    root: PathBuf,
}

impl Directory {
    pub(crate) fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Writes a file beside the others, durably. It has no object's name yet.
    fn write(&self, content: &[u8]) -> Result<PathBuf, StoreError> {
        let folder = self.root.join(TEMPORARY);
        make_folders(&folder)?;
        let path = folder.join(random::hex()?);
        let written = (|| {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all(content)?;
            file.sync_all()
        })();
        if let Err(error) = written {
            let _ = fs::remove_file(&path);
            return Err(StoreError::local("write", &path)(error));
        }
        Ok(path)
    }

    /// Gives a written file its name; says whether it has got it.
    fn place(&self, written: &Path, name: &ObjectName, replace: bool) -> Result<bool, StoreError> {
        let path = self.path(name);
        let placed = (|| {
            let Some(folder) = path.parent() else { return Err(io::ErrorKind::InvalidInput.into()) };
            make_folders(folder).map_err(io::Error::other)?;
            let placed = if replace { fs::rename(written, &path).map(|()| true) } else { rename_new(written, &path) };
            // The name is durable before anybody relies on it.
            placed.and_then(|placed| File::open(folder)?.sync_all().map(|()| placed))
        })();
        if !matches!(placed, Ok(true)) {
            let _ = fs::remove_file(written);
        }
        placed.map_err(StoreError::local("write", &path))
    }

    fn path(&self, name: &ObjectName) -> PathBuf {
        self.root.join(name.as_str())
    }

    fn open(&self, name: &ObjectName) -> Result<Option<File>, StoreError> {
        let path = self.path(name);
        // A link leads out of the store, and a FIFO would hold up the reader.
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = match OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(&path) {
            Err(error) if is_absent(&error) => return Ok(None),
            result => result.map_err(StoreError::local("open", &path))?,
        };
        let is_file = file.metadata().map_err(StoreError::local("ask about", &path))?.is_file();
        if is_file { Ok(Some(file)) } else { Err(StoreError::damaged(name.as_str(), "it is no regular file")) }
    }

    fn walk(&self, folder: &Path, named: &str, found: &mut Vec<Found>) -> io::Result<()> {
        let entries = match fs::read_dir(folder) {
            Err(error) if is_absent(&error) => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().map(|name| format!("{named}/{name}")) else { continue };
            let status = match entry.metadata() {
                // Removed meanwhile.
                Err(error) if is_absent(&error) => continue,
                status => status?,
            };
            if status.is_dir() {
                self.walk(&entry.path(), &name, found)?;
            } else if status.is_file()
                && let Some(name) = ObjectName::parse(&name)
            {
                found.push(describe(name, &status));
            }
        }
        Ok(())
    }
}

impl Transport for Directory {
    fn put(&self, name: &ObjectName, content: &[u8]) -> Result<(), StoreError> {
        let written = self.write(content)?;
        self.place(&written, name, true).map(drop)
    }

    fn put_if_absent(&self, name: &ObjectName, content: &[u8]) -> Result<bool, StoreError> {
        let written = self.write(content)?;
        self.place(&written, name, false)
    }

    fn get(&self, name: &ObjectName, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(mut file) = self.open(name)? else { return Ok(None) };
        let read = (|| {
            let size = file.metadata()?.len();
            let range = range.map_or(0..size, |it| it.start.min(size)..it.end.min(size));
            let length = range.end.saturating_sub(range.start);
            if length > MAX_OBJECT {
                return Err(io::Error::other(format!("it is longer than {MAX_OBJECT} bytes")));
            }
            file.seek(SeekFrom::Start(range.start))?;
            let mut content = vec![0; length as usize];
            file.read_exact(&mut content)?;
            Ok(content)
        })();
        read.map(Some).map_err(StoreError::local("read", &self.path(name)))
    }

    fn head(&self, name: &ObjectName) -> Result<Option<Found>, StoreError> {
        let path = self.path(name);
        match fs::symlink_metadata(&path) {
            Ok(status) if status.is_file() => Ok(Some(describe(name.clone(), &status))),
            Ok(_) => Ok(None),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(StoreError::local("ask about", &path)(error)),
        }
    }

    fn list(&self, folder: &str) -> Result<Vec<Found>, StoreError> {
        let path = self.root.join(folder);
        let mut found = Vec::new();
        self.walk(&path, folder, &mut found).map_err(StoreError::local("list", &path))?;
        Ok(found)
    }

    fn delete(&self, name: &ObjectName) -> Result<(), StoreError> {
        let path = self.path(name);
        match fs::remove_file(&path) {
            Err(error) if !is_absent(&error) => Err(StoreError::local("remove", &path)(error)),
            _ => Ok(()),
        }
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

fn describe(name: ObjectName, status: &fs::Metadata) -> Found {
    let modified = status.modified().ok().and_then(|it| it.duration_since(UNIX_EPOCH).ok());
    Found { name, size: status.len(), modified: modified.map_or(0, |it| it.as_millis() as u64) }
}

fn make_folders(path: &Path) -> Result<(), StoreError> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(StoreError::local("make", path))
}

/// Renames a file unless there is one of the new name.
fn rename_new(from: &Path, to: &Path) -> io::Result<bool> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Ok(()) => return Ok(true),
        Err(Errno::EXIST) => return Ok(false),
        // The file system has no such thing; it may have links.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
        Err(error) => return Err(error.into()),
    }
    match fs::hard_link(from, to) {
        Ok(()) => fs::remove_file(from).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ObjectName {
        ObjectName::parse(text).unwrap()
    }

    #[test]
    fn objects_are_written_read_listed_and_removed() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::new(place.path().join("store"));
        assert_eq!(directory.get(&name("a/b"), None).unwrap(), None);
        assert_eq!(directory.list("a").unwrap(), []);
        directory.put(&name("a/b"), b"0123456789").unwrap();
        assert_eq!(directory.get(&name("a/b"), None).unwrap().unwrap(), b"0123456789");
        assert_eq!(directory.get(&name("a/b"), Some(8..20)).unwrap().unwrap(), b"89");
        assert_eq!(directory.get(&name("a/b"), Some(18..20)).unwrap().unwrap(), b"");
        assert_eq!(directory.head(&name("a/b")).unwrap().unwrap().size, 10);
        assert_eq!(directory.head(&name("a")).unwrap(), None);
        let listed: Vec<_> = directory.list("a").unwrap().into_iter().map(|it| it.name).collect();
        assert_eq!(listed, [name("a/b")]);
        assert!(!directory.put_if_absent(&name("a/b"), b"other").unwrap());
        assert!(directory.put_if_absent(&name("a/c"), b"new").unwrap());
        assert_eq!(directory.get(&name("a/b"), None).unwrap().unwrap().len(), 10);
        directory.delete(&name("a/b")).unwrap();
        directory.delete(&name("a/b")).unwrap();
        assert_eq!(directory.head(&name("a/b")).unwrap(), None);
        assert_eq!(directory.list(TEMPORARY).unwrap(), []);
    }

    #[test]
    fn a_link_leads_nowhere() {
        let place = tempfile::tempdir().unwrap();
        std::fs::write(place.path().join("secret"), "x").unwrap();
        std::fs::create_dir(place.path().join("store")).unwrap();
        std::os::unix::fs::symlink("../secret", place.path().join("store/link")).unwrap();
        let directory = Directory::new(place.path().join("store"));
        assert!(directory.get(&name("link"), None).is_err());
        assert_eq!(directory.head(&name("link")).unwrap(), None);
    }

    #[test]
    fn of_many_writers_one_succeeds() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::new(place.path());
        let written: usize = std::thread::scope(|scope| {
            let one = |number: u8| {
                let directory = &directory;
                move || usize::from(directory.put_if_absent(&name("one"), &[number; 1000]).unwrap())
            };
            let threads: Vec<_> = (0..8).map(|number| scope.spawn(one(number))).collect();
            threads.into_iter().map(|it| it.join().unwrap()).sum()
        });
        assert_eq!(written, 1);
        let content = directory.get(&name("one"), None).unwrap().unwrap();
        assert!(content.iter().all(|byte| *byte == content[0]));
    }
}
