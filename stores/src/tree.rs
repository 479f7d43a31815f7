//! An image in a directory, with the images that it builds on: what belongs to it, and where its files are cut.
//!
//! An image says where its parent is by a relative path, so a chain can only be moved together. The tree of an image
//! without a parent is its directory. That of one with parents begins at the nearest directory around them all, and
//! has only their directories.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rekindle_images::{Checksum, Image, Manifest, Storage, data_name};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::StoreError;

/// An image on disk.
pub(crate) struct Tree {
    pub(crate) root: PathBuf,
    /// The image's directory below the root.
    pub(crate) image: String,
    pub(crate) parents: Vec<String>,
    /// Each directory before what is in it.
    pub(crate) entries: Vec<OnDisk>,
    pub(crate) summary: rekindle_images::Summary,
    /// What tells the images from others: their directories and the checksums of their manifests.
    identities: Vec<(PathBuf, Checksum)>,
}

/// A directory, a link or a file of an image.
pub(crate) struct OnDisk {
    /// Below the root.
    pub(crate) path: String,
    pub(crate) mode: u32,
    pub(crate) modified: (i64, u32),
    pub(crate) kind: OnDiskKind,
}

pub(crate) enum OnDiskKind {
    Folder,
    Link(String),
    /// A file, and where the image itself has pieces in it.
    File {
        size: u64,
        cuts: Vec<u64>,
    },
}

impl Tree {
    /// Finds all that belongs to the image in a directory.
    ///
    /// # Errors
    /// The image is not whole, builds on one that is not to be found by the same way elsewhere, or the directory has
    /// what cannot be stored.
    pub(crate) fn of(directory: &Path) -> Result<Self, StoreError> {
        let resolve = |path: &Path| fs::canonicalize(path).map_err(StoreError::local("open", path));
        let first = resolve(directory)?;
        let image = Image::open(&first)?;
        image.check_companion()?;
        let mut directories = vec![first.clone()];
        let mut layers = vec![image];
        while let Some(parent) = layers.last().and_then(|it| it.manifest().parent.clone()) {
            let from = directories.last().unwrap_or(&first).clone();
            let found = resolve(&from.join(&parent.path))?;
            if lexical(&from.join(&parent.path)).as_ref() != Some(&found) {
                return Err(StoreError::refused(format!(
                    "the image in {} builds on the one in {} by way of a link, which leads elsewhere on another machine; \
                     `rekindle flatten` makes it independent first",
                    from.display(),
                    found.display()
                )));
            }
            layers.push(Image::open(&found)?);
            directories.push(found);
        }

        let root = common(&directories);
        let cuts_in = |(directory, image): (&PathBuf, &Image)| {
            let cuts = cuts_of(image.manifest()).into_iter();
            cuts.map(|(name, cuts)| (directory.join(name), cuts)).collect::<Vec<_>>()
        };
        let cuts: BTreeMap<_, _> = directories.iter().zip(&layers).flat_map(cuts_in).collect();
        let mut scan = Scan { root: &root, own: directories.iter().cloned().collect(), cuts, entries: Vec::new() };
        scan.way_to_all(&directories)?;
        let below = |it: &PathBuf| relative(&root, it);
        let mut named = directories.iter().map(below).collect::<Result<Vec<_>, _>>()?.into_iter();
        let image = named.next().unwrap_or_default();
        let identities = directories.iter().cloned().zip(layers.iter().map(Image::manifest_hash)).collect();
        let summary = layers[0].summary();
        Ok(Self { image, parents: named.collect(), entries: scan.entries, summary, identities, root })
    }

    /// The bytes of all files, holes included.
    pub(crate) fn size(&self) -> u64 {
        let size = |it: &OnDisk| if let OnDiskKind::File { size, .. } = it.kind { size } else { 0 };
        self.entries.iter().map(size).fold(0, u64::saturating_add)
    }

    /// Opens a file that was found, and makes sure that it is still the same.
    pub(crate) fn open(&self, entry: &OnDisk) -> Result<File, StoreError> {
        let path = self.root.join(&entry.path);
        let file = File::open(&path).map_err(StoreError::local("open", &path))?;
        self.compare(entry, &file.metadata().map_err(StoreError::local("ask about", &path))?)?;
        Ok(file)
    }

    /// Makes sure that a file is as it was found.
    pub(crate) fn compare(&self, entry: &OnDisk, now: &Metadata) -> Result<(), StoreError> {
        let OnDiskKind::File { size, .. } = entry.kind else { return Ok(()) };
        if now.is_file() && now.len() == size && modified(now) == entry.modified {
            return Ok(());
        }
        let path = self.root.join(&entry.path);
        Err(StoreError::refused(format!(
            "{} was changed while it was read; try again when nobody writes",
            path.display()
        )))
    }

    /// Makes sure that the images, and all files, are those that were found.
    pub(crate) fn compare_all(&self) -> Result<(), StoreError> {
        for entry in &self.entries {
            let path = self.root.join(&entry.path);
            self.compare(entry, &fs::symlink_metadata(&path).map_err(StoreError::local("ask about", &path))?)?;
        }
        for (directory, hash) in &self.identities {
            if Image::open(directory)?.manifest_hash() != *hash {
                let directory = directory.display();
                return Err(StoreError::refused(format!("another image was written to {directory} meanwhile")));
            }
        }
        Ok(())
    }
}

/// The offsets in the data files of an image, by their names, at which its pieces begin and end.
pub(crate) fn cuts_of(manifest: &Manifest) -> BTreeMap<String, BTreeSet<u64>> {
    let mut cuts: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
    for piece in manifest.clients.iter().flat_map(|it| it.regions()).flat_map(|it| it.pieces) {
        if let Storage::Stored(extent) = piece.storage {
            let file = cuts.entry(data_name(extent.file)).or_default();
            // With the zeros up to the next.
            let end = extent.offset.saturating_add(extent.length).checked_next_multiple_of(rekindle_images::BLOCK);
            file.extend([Some(extent.offset), end].into_iter().flatten());
        }
    }
    cuts
}

struct Scan<'a> {
    root: &'a Path,
    /// The directories of the images.
    own: BTreeSet<PathBuf>,
    cuts: BTreeMap<PathBuf, BTreeSet<u64>>,
    entries: Vec<OnDisk>,
}

impl Scan<'_> {
    /// The directories of the images, the directories on the way to them, and all that is in the former.
    fn way_to_all(&mut self, images: &[PathBuf]) -> Result<(), StoreError> {
        let mut folders = BTreeSet::from([self.root.to_owned()]);
        for image in images {
            folders.extend(image.ancestors().take_while(|it| it.starts_with(self.root)).map(Path::to_owned));
        }
        for folder in folders {
            self.add_folder(&folder)?;
            if self.own.contains(&folder) {
                self.contents(&folder, images)?;
            }
        }
        Ok(())
    }

    fn add_folder(&mut self, path: &Path) -> Result<(), StoreError> {
        let status = fs::symlink_metadata(path).map_err(StoreError::local("ask about", path))?;
        self.push(path, &status, OnDiskKind::Folder)
    }

    fn push(&mut self, path: &Path, status: &Metadata, kind: OnDiskKind) -> Result<(), StoreError> {
        let (mode, modified) = (status.mode() & 0o7777, modified(status));
        self.entries.push(OnDisk { path: relative(self.root, path)?, mode, modified, kind });
        Ok(())
    }

    fn contents(&mut self, folder: &Path, images: &[PathBuf]) -> Result<(), StoreError> {
        let list = || fs::read_dir(folder)?.map(|it| Ok(it?.path())).collect::<io::Result<Vec<_>>>();
        let mut paths = list().map_err(StoreError::local("list", folder))?;
        paths.sort();
        for path in paths {
            // The way to another image of the chain is there by itself.
            if images.iter().any(|it| it.starts_with(&path)) {
                continue;
            }
            let status = fs::symlink_metadata(&path).map_err(StoreError::local("ask about", &path))?;
            let kind = status.file_type();
            if kind.is_dir() {
                self.push(&path, &status, OnDiskKind::Folder)?;
                self.contents(&path, images)?;
            } else if kind.is_symlink() {
                let target = fs::read_link(&path).map_err(StoreError::local("read", &path))?;
                let target = target.to_str().ok_or_else(|| not_text(&path))?.to_owned();
                self.push(&path, &status, OnDiskKind::Link(target))?;
            } else if kind.is_file() && status.mode() & 0o7000 != 0 {
                let path = path.display();
                return Err(StoreError::refused(format!(
                    "{path} is for running as another user: chmod ug-s,-t {path}"
                )));
            } else if kind.is_file() {
                let cuts = self.cuts.remove(&path).unwrap_or_default().into_iter().collect();
                self.push(&path, &status, OnDiskKind::File { size: status.len(), cuts })?;
            } else if !kind.is_socket() {
                // A socket is nothing without the process that listens; these hold what nobody can read back.
                let path = path.display();
                return Err(StoreError::refused(format!("{path} is neither a file nor a folder: remove it first")));
            }
        }
        Ok(())
    }
}

/// The time of the last change, in seconds since 1970 and nanoseconds.
pub(crate) fn modified(status: &Metadata) -> (i64, u32) {
    (status.mtime(), status.mtime_nsec() as u32)
}

fn not_text(path: &Path) -> StoreError {
    StoreError::refused(format!("{} has a name, or leads to one, that is not UTF-8", path.display()))
}

fn relative(root: &Path, path: &Path) -> Result<String, StoreError> {
    let below = path.strip_prefix(root).ok().and_then(Path::to_str);
    below.map(str::to_owned).ok_or_else(|| not_text(path))
}

/// A path without `..`, where that needs no look at the disk.
fn lexical(path: &Path) -> Option<PathBuf> {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir if !plain.pop() => return None,
            Component::ParentDir | Component::CurDir => {}
            part => plain.push(part),
        }
    }
    Some(plain)
}

/// The nearest directory that is around all of these, or is one of them.
fn common(paths: &[PathBuf]) -> PathBuf {
    let around = |root: PathBuf, path: &PathBuf| {
        root.components().zip(path.components()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect()
    };
    let first = paths.first().cloned().unwrap_or_default();
    paths.iter().fold(first, around)
}

/// The ranges of a file that the file system stores; between them are holes.
pub(crate) fn stored_ranges(file: &File, size: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < size {
        let begin = match seek(file, SeekFrom::Data(at)) {
            Ok(begin) => begin.min(size),
            // Nothing but a hole up to the end.
            Err(Errno::NXIO) => break,
            // The file system does not tell holes.
            Err(Errno::INVAL) => {
                ranges.push((at, size));
                break;
            }
            Err(error) => return Err(error.into()),
        };
        let end = seek(file, SeekFrom::Hole(begin))?.min(size);
        if end <= begin {
            break;
        }
        ranges.push((begin, end));
        at = end;
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn holes_are_told_from_zeros() {
        let place = tempfile::tempdir().unwrap();
        let file = File::create_new(place.path().join("file")).unwrap();
        file.set_len(1 << 20).unwrap();
        assert_eq!(stored_ranges(&file, 1 << 20).unwrap(), []);
        file.write_all_at(&[0; 4096], 8192).unwrap();
        let file = File::open(place.path().join("file")).unwrap();
        assert_eq!(stored_ranges(&file, 1 << 20).unwrap(), [(8192, 12288)]);
        assert_eq!(stored_ranges(&file, 0).unwrap(), []);
    }

    #[test]
    fn a_chains_root_is_around_all_of_it() {
        let of = |paths: &[&str]| common(&paths.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(of(&["/a/second", "/a/first"]), Path::new("/a"));
        assert_eq!(of(&["/a/second", "/b/first"]), Path::new("/"));
        assert_eq!(of(&["/a/first/second", "/a/first"]), Path::new("/a/first"));
        assert_eq!(of(&["/a/one"]), Path::new("/a/one"));
        assert_eq!(lexical(Path::new("/a/b/../c/./d")), Some("/a/c/d".into()));
        assert_eq!(lexical(Path::new("/a/../../c")), None);
    }
}
