//! Getting an image out of a store.
//!
//! Everything is written beside the place that it will have, and gets its name at the end: a copy that was killed
//! leaves no image.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, CWD, OFlags, Timespec, Timestamps, UTIME_OMIT, utimensat};
use rustix::process::geteuid;
use serde::Serialize;

use crate::StoreError;
use crate::archive::{ARCHIVE, Archive, Container};
use crate::fetch;
use crate::manifest::{Body, Entry, Head, Kind, Run};
use crate::parallel::each;
use crate::progress::{Meter, OnProgress};
use crate::store::{Store, StoredImage};

/// What a download did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Received {
    /// The directory of the image itself; or the file, if it is an archive of a container.
    pub image: PathBuf,
    /// The container, if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<Container>,
    /// The directories of those that it builds on, the nearest first.
    pub parents: Vec<PathBuf>,
    /// Files.
    pub files: u64,
    /// Bytes of content.
    pub bytes: u64,
    /// Bytes that came from the store.
    pub received_bytes: u64,
}

impl Store {
    /// Writes an image to a directory, which must not exist or be empty. Of an archive, the file [`ARCHIVE`] is in it then. An image that builds on others becomes a
    /// directory with a directory for each: the way from one to the other is part of what is in them.
    ///
    /// # Errors
    /// [`StoreError::Refused`] if there is something in the directory, [`StoreError::Damaged`] and
    /// [`StoreError::Missing`] if the store's content is not what was written, and what transport and disk say. The
    /// directory is then as it was.
    pub fn get_to(&self, image: &StoredImage, to: &Path, tell: OnProgress<'_>) -> Result<Received, StoreError> {
        let body = &image.body;
        let unfinished = Unfinished::beside(to)?;
        let root = unfinished.path();
        make(root, body)?;
        let received = self.fill(root, body, tell)?;
        let container = image.head.container.as_ref();
        if let Some(container) = container {
            check_archive(&root.join(ARCHIVE), container, &image.head)?;
        }
        finish(root, &body.entries, self.threads)?;
        unfinished.name(to)?;
        let at = |folder: &String| if folder.is_empty() { to.to_owned() } else { to.join(folder) };
        Ok(Received {
            image: if container.is_some() { to.join(ARCHIVE) } else { at(&body.image) },
            container: container.cloned(),
            parents: body.parents.iter().map(at).collect(),
            files: body.files(),
            bytes: body.bytes(),
            received_bytes: received,
        })
    }

    /// Writes all pieces to the files that they belong to, each read once.
    fn fill(&self, root: &Path, body: &Body, tell: OnProgress<'_>) -> Result<u64, StoreError> {
        let mut places: Vec<Vec<(&str, u64)>> = vec![Vec::new(); body.pieces.len()];
        for entry in &body.entries {
            let Kind::File(runs) = &entry.kind else { continue };
            let mut at = 0;
            for run in runs {
                match run {
                    Run::Hole(length) => at += length,
                    Run::Piece(number) => {
                        let piece = body.piece(*number)?;
                        places[*number as usize].push((&entry.path, at));
                        at += piece.length;
                    }
                }
            }
        }
        let mut wanted = Vec::new();
        for (piece, places) in body.pieces.iter().zip(places) {
            wanted.push((body.place(piece)?, (*piece, places)));
        }
        let meter = Meter::new(body.bytes(), tell);
        let received = AtomicU64::new(0);
        let produce = |give: &mut dyn FnMut(_) -> bool| {
            fetch::tasks(wanted).into_iter().all(give);
            Ok(())
        };
        each(self.threads, produce, |task| {
            let bytes = task.run(&*self.transport, |object, (piece, places), stored| {
                let content = self.coder.decode(&piece.hash, piece.length, stored);
                let content = content.map_err(|what| StoreError::damaged(object.as_str(), what))?;
                for (path, offset) in places {
                    let path = root.join(path);
                    let file = OpenOptions::new().write(true).open(&path);
                    let written = file.and_then(|file| file.write_all_at(&content, offset));
                    written.map_err(StoreError::local("write", &path))?;
                    meter.add(piece.length);
                }
                Ok(())
            })?;
            received.fetch_add(bytes, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(received.into_inner())
    }
}

/// Makes sure that an archive is what the store says, before somebody has podman unpack it.
fn check_archive(path: &Path, container: &Container, head: &Head) -> Result<(), StoreError> {
    let damaged = |what: String| StoreError::damaged(format!("image {}", head.name), what);
    let found = Archive::open(path).map_err(|error| match error {
        StoreError::Archive { what, .. } => damaged(format!("it is no archive of a container: {what}")),
        error => error,
    })?;
    if found.container() != container || found.checkpoint() != head.checkpoint {
        return Err(damaged("its archive is of another container or checkpoint".to_owned()));
    }
    Ok(())
}

/// Makes folders, links, and files of the right length that are one hole.
fn make(root: &Path, body: &Body) -> Result<(), StoreError> {
    for entry in body.entries.iter().filter(|it| !it.path.is_empty()) {
        let path = root.join(&entry.path);
        let made = match &entry.kind {
            Kind::Folder => DirBuilder::new().mode(0o700).create(&path),
            Kind::Link(target) => symlink(target, &path),
            Kind::File(runs) => {
                let length = runs.iter().map(|it| body.length(it)).sum();
                let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
                file.and_then(|it| it.set_len(length))
            }
        };
        made.map_err(StoreError::local("make", &path))?;
    }
    Ok(())
}

/// Gives files and folders their modes and times, durably.
fn finish(root: &Path, entries: &[Entry], threads: usize) -> Result<(), StoreError> {
    let path_of = |entry: &Entry| if entry.path.is_empty() { root.to_owned() } else { root.join(&entry.path) };
    let produce = |give: &mut dyn FnMut(_) -> bool| {
        entries.iter().filter(|it| matches!(it.kind, Kind::File(_))).all(give);
        Ok(())
    };
    each(threads, produce, |entry| {
        let path = path_of(entry);
        let finished = (|| {
            let file = OpenOptions::new().write(true).open(&path)?;
            file.set_permissions(fs::Permissions::from_mode(entry.mode))?;
            set_time(&path, entry)?;
            file.sync_all()
        })();
        finished.map_err(StoreError::local("write", &path))
    })?;
    // What is in a folder first: it changes the folder's time, and may not be permitted afterwards.
    for entry in entries.iter().rev() {
        let path = path_of(entry);
        let finished = match entry.kind {
            Kind::File(_) => Ok(()),
            Kind::Link(_) => set_time(&path, entry),
            Kind::Folder => (|| {
                let folder = File::open(&path)?;
                folder.set_permissions(fs::Permissions::from_mode(entry.mode))?;
                set_time(&path, entry)?;
                folder.sync_all()
            })(),
        };
        finished.map_err(StoreError::local("write", &path))?;
    }
    Ok(())
}

fn set_time(path: &Path, entry: &Entry) -> io::Result<()> {
    let (tv_sec, nanoseconds) = entry.modified;
    let times = Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec { tv_sec, tv_nsec: nanoseconds.into() },
    };
    Ok(utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// A directory that is not whole yet, beside the one that it will be. Dropped, it is removed.
struct Unfinished {
    path: PathBuf,
    /// Held while it is written, so that what a killed copy has left is told from what another one is writing.
    _lock: File,
    named: bool,
}

impl Unfinished {
    fn beside(to: &Path) -> Result<Self, StoreError> {
        match fs::read_dir(to).map(|mut entries| entries.next().is_some()) {
            Ok(false) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Ok(true) => {
                let to = to.display();
                return Err(StoreError::refused(format!(
                    "{to} is not empty; name a directory that is, or does not exist"
                )));
            }
            Err(error) => return Err(StoreError::local("open", to)(error)),
        }
        let absolute = std::path::absolute(to).map_err(StoreError::local("find", to))?;
        let (Some(parent), Some(name)) = (absolute.parent(), absolute.file_name()) else {
            return Err(StoreError::usage(format!("{} is no directory that could be made", to.display())));
        };
        let path = parent.join(format!(".{}.rekindle-copy", name.to_string_lossy()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            result => result.map_err(StoreError::local("make", &path))?,
        }
        let flags = OFlags::NOFOLLOW | OFlags::DIRECTORY;
        let lock = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(&path);
        let lock = lock.map_err(StoreError::local("open", &path))?;
        // What somebody else has put there, they could change while it is written.
        let status = lock.metadata().map_err(StoreError::local("ask about", &path))?;
        if status.uid() != geteuid().as_raw() || status.mode() & 0o022 != 0 {
            return Err(StoreError::refused(format!("{} belongs to somebody else: remove it", path.display())));
        }
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(StoreError::refused(format!("another process is copying to {} just now", to.display())));
            }
            // A file system without locks: two copies collide when they make files.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let unfinished = Self { path, _lock: lock, named: false };
        unfinished.clear().map_err(StoreError::local("remove what a killed copy has left in", &unfinished.path))?;
        Ok(unfinished)
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn clear(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() { fs::remove_dir_all(entry.path())? } else { fs::remove_file(entry.path())? }
        }
        Ok(())
    }

    /// Gives it its name, in place of an empty directory.
    fn name(mut self, to: &Path) -> Result<(), StoreError> {
        fs::rename(&self.path, to).map_err(StoreError::local("make", to))?;
        self.named = true;
        let parent = self.path.parent().unwrap_or(Path::new("/"));
        File::open(parent).and_then(|it| it.sync_all()).map_err(StoreError::local("sync", parent))
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.named {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
