//! Opening an image.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::ImageError;
use crate::chain::{self, Ancestor, Holder};
use crate::data_reader::{DataFile, DataReader};
use crate::dir::ImageDir;
use crate::hash::{Checksum, CodeHash};
use crate::inspect::Summary;
use crate::last_restore::LastRestore;
use crate::layer::Layer;
use crate::limits::MAX_CODE;
use crate::manifest::{Client, Manifest};
use crate::names::{MANIFEST, code_name, data_name};
use crate::record::{CommitRecord, Companion, FileEntry, FileSizes};
use crate::validate;

/// A committed image, all of its files in place and of the right size, and so are those of the images that it builds
/// on.
///
/// Content is checked as it is read: by [`DataReader`], by [`read_code`](Self::read_code), or all
/// at once by [`verify`](Self::verify).
pub struct Image {
    layer: Layer,
    ancestors: Vec<Ancestor>,
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image({} in {})", self.layer.manifest.id, self.layer.dir.path().display())
    }
}

impl Image {
    /// Opens the image in the directory at `path`.
    ///
    /// # Errors
    /// See [`open_at`](Self::open_at).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ImageError> {
        Self::open_at(ImageDir::open(path)?)
    }

    /// Opens the image in `dir`: everything is checked that can be without reading content.
    ///
    /// # Errors
    /// [`ImageError::NotAnImage`] if nothing of ours is there, [`ImageError::Uncommitted`] if a
    /// dump did not finish, [`ImageError::NewerFormat`], [`ImageError::Missing`] and [`ImageError::Corrupt`] for
    /// what was lost or changed since, [`ImageError::Parent`] for that in an image that it builds on,
    /// [`ImageError::TooLarge`], [`ImageError::Io`].
    pub fn open_at(dir: ImageDir) -> Result<Self, ImageError> {
        Self::with_ancestors(dir, chain::open)
    }

    /// As [`open_at`](Self::open_at); as long as the result lives, no other writer changes an image that this one builds on.
    ///
    /// # Errors
    /// [`ImageError::Busy`] and [`ImageError::Overwrites`] as well.
    pub(crate) fn hold_at(dir: ImageDir, holder: Holder<'_>) -> Result<Self, ImageError> {
        Self::with_ancestors(dir, |dir, manifest| chain::hold(dir, manifest, holder))
    }

    fn with_ancestors(
        dir: ImageDir,
        ancestors: impl FnOnce(&ImageDir, &Manifest) -> Result<Vec<Ancestor>, ImageError>,
    ) -> Result<Self, ImageError> {
        let layer = Layer::read(dir)?;
        let ancestors = ancestors(&layer.dir, &layer.manifest)?;
        let files: Vec<_> = std::iter::once(&layer.files).chain(ancestors.iter().map(|it| &it.files)).collect();
        validate::check(&layer.manifest, &files).map_err(|what| ImageError::corrupt(MANIFEST, what))?;
        Ok(Self { layer, ancestors })
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &ImageDir {
        &self.layer.dir
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.layer.manifest
    }

    /// The checksum of the manifest, which tells this image from every other.
    #[must_use]
    pub fn manifest_hash(&self) -> Checksum {
        self.layer.manifest_hash
    }

    /// The length of the manifest's file in bytes.
    #[must_use]
    pub fn manifest_length(&self) -> u64 {
        self.layer.manifest_length
    }

    /// The client with this index.
    #[must_use]
    pub fn client(&self, index: u32) -> Option<&Client> {
        self.layer.manifest.clients.iter().find(|it| it.index == index)
    }

    /// A client as the manifest's file has it, for [`Client::from_bytes`] in another process: to encode a client anew takes milliseconds
    /// where it has 100 GB.
    ///
    /// # Errors
    /// [`ImageError::Invalid`] if no client has this index.
    pub fn encoded_client(&self, index: u32) -> Result<&[u8], ImageError> {
        let place = self.layer.manifest.clients.iter().position(|it| it.index == index);
        let found = place.and_then(|place| self.layer.encoded_client(place));
        found.ok_or_else(|| ImageError::Invalid { what: format!("there is no client {index}") })
    }

    /// Its data and code files.
    #[must_use]
    pub fn files(&self) -> &[FileEntry] {
        &self.layer.record.files
    }

    /// The numbers of its data files.
    pub fn data_files(&self) -> impl Iterator<Item = u32> {
        self.layer.files.data.keys().copied()
    }

    /// The data files that hold the pieces of one client, its ancestors' among them.
    #[must_use]
    pub fn data_files_of(&self, client: &Client) -> BTreeSet<DataFile> {
        client.data_files()
    }

    /// Opens a data file for reading, to be handed to the process that loads it.
    ///
    /// # Errors
    /// [`ImageError::Missing`], [`ImageError::Corrupt`] if its size has changed,
    /// [`ImageError::Io`].
    pub fn data_file(&self, file: DataFile) -> Result<File, ImageError> {
        let (dir, files) = self.layer_at(file.depth)?;
        let name = data_name(file.index);
        let (open, found) = dir.require_file(&name)?;
        if files.data.get(&file.index) != Some(&found) {
            return Err(ImageError::corrupt(&file.to_string(), "its size has changed"));
        }
        Ok(open)
    }

    /// A reader for all its data files, and those of other images that have pieces of it.
    ///
    /// # Errors
    /// The errors of [`data_file`](Self::data_file).
    pub fn data_reader(&self) -> Result<DataReader, ImageError> {
        let mut all: BTreeSet<_> = self.data_files().map(DataFile::own).collect();
        for client in &self.layer.manifest.clients {
            all.extend(self.data_files_of(client));
        }
        let files: Result<Vec<_>, _> = all.into_iter().map(|file| Ok((file, self.data_file(file)?))).collect();
        Ok(DataReader::new(self.layer.manifest.hash_key, files?))
    }

    /// The number of images that this image builds on, one after the other.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.ancestors.len()
    }

    /// How many images lie between this one and the one with this manifest, that one included, if this one builds on it: the
    /// [`DataFile::depth`] of its content.
    #[must_use]
    pub fn depth_of(&self, manifest_hash: Checksum) -> Option<u32> {
        let place = self.ancestors.iter().position(|it| it.manifest_hash == manifest_hash)?;
        u32::try_from(place + 1).ok()
    }

    /// Opens a code file for reading. The reader compares its hash.
    ///
    /// # Errors
    /// [`ImageError::Missing`], [`ImageError::Corrupt`] if its size has changed,
    /// [`ImageError::Io`].
    pub fn code_file(&self, hash: CodeHash) -> Result<File, ImageError> {
        let (dir, size) = self.code_place(hash)?;
        open_code_file(dir, hash, size)
    }

    /// Reads a code image; on success it has the given hash.
    ///
    /// # Errors
    /// The errors of [`code_file`](Self::code_file); [`ImageError::Corrupt`] if it was changed.
    pub fn read_code(&self, hash: CodeHash) -> Result<Vec<u8>, ImageError> {
        let (dir, size) = self.code_place(hash)?;
        read_code_file(dir, hash, size)
    }

    /// Checks that the files of others in its directory, CRIU's, are those that it was committed with. An image that is older
    /// than this record says nothing of them.
    ///
    /// # Errors
    /// [`ImageError::OtherDump`] if they are not, [`ImageError::Io`].
    pub fn check_companion(&self) -> Result<(), ImageError> {
        let Layer { dir, record, .. } = &self.layer;
        let other = |what: String| ImageError::OtherDump { dir: dir.path().to_owned(), what };
        if record.others_overwritten {
            return Err(other("a later dump has begun to overwrite them, and has not come to its end".to_owned()));
        }
        let Some(companion) = &record.companion else { return Ok(()) };
        match Companion::read(dir, &companion.name)? {
            Some(now) if now == *companion => Ok(()),
            Some(_) => Err(other(format!("{} is not the one that this image was committed with", companion.name))),
            None => Err(other(format!("{} is missing", companion.name))),
        }
    }

    /// What the last restore of this image was like, if that is known.
    #[must_use]
    pub fn last_restore(&self) -> Option<LastRestore> {
        LastRestore::read(&self.layer.dir, self.layer.manifest_hash)
    }

    pub(crate) fn record(&self) -> &CommitRecord {
        &self.layer.record
    }

    /// A summary for persons and schedulers.
    #[must_use]
    pub fn summary(&self) -> Summary {
        Summary::of(&self.layer.manifest)
    }

    pub(crate) fn sizes(&self) -> &FileSizes {
        &self.layer.files
    }

    pub(crate) fn ancestors(&self) -> &[Ancestor] {
        &self.ancestors
    }

    /// Directory and files of the image at this depth.
    fn layer_at(&self, depth: u32) -> Result<(&ImageDir, &FileSizes), ImageError> {
        if depth == 0 {
            return Ok((&self.layer.dir, &self.layer.files));
        }
        let at = usize::try_from(depth - 1).ok().and_then(|at| self.ancestors.get(at));
        let missing = || ImageError::Invalid { what: format!("image {depth} of {}", self.ancestors.len()) };
        at.map(|it| (&it.dir, &it.files)).ok_or_else(missing)
    }

    fn code_place(&self, hash: CodeHash) -> Result<(&ImageDir, u64), ImageError> {
        let code = self.layer.manifest.code.iter().find(|it| it.hash == hash);
        let missing = || ImageError::Missing { file: code_name(hash), dir: self.layer.dir.path().to_owned() };
        let code = code.ok_or_else(missing)?;
        Ok((self.layer_at(code.parent_depth)?.0, code.size))
    }
}

fn open_code_file(dir: &ImageDir, hash: CodeHash, size: u64) -> Result<File, ImageError> {
    let name = code_name(hash);
    let (file, found) = dir.require_file(&name)?;
    if found != size {
        let what = format!("it has {found} bytes instead of {size}");
        return Err(ImageError::corrupt(&name, what));
    }
    Ok(file)
}

/// The content of a code file that must have this size and hash.
pub(crate) fn read_code_file(dir: &ImageDir, hash: CodeHash, size: u64) -> Result<Vec<u8>, ImageError> {
    let name = code_name(hash);
    if size > MAX_CODE {
        return Err(ImageError::TooLarge { file: name, what: "the code image", size, limit: MAX_CODE });
    }
    let file = open_code_file(dir, hash, size)?;
    // Bounded, and the file is that long.
    let mut code = vec![0; size as usize];
    file.read_exact_at(&mut code, 0).map_err(|error| ImageError::io("read", &*name, error))?;
    if CodeHash::of(&code) != hash {
        return Err(ImageError::corrupt(&name, "content does not match its hash"));
    }
    Ok(code)
}
