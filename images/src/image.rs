//! Opening an image.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::ImageError;
use crate::commit::{CommitRecord, FileEntry, FileSizes};
use crate::data_reader::{DataReader, check_compression, unsupported_parent};
use crate::decode::Decoder;
use crate::dir::ImageDir;
use crate::envelope;
use crate::hash::{Checksum, CodeHash};
use crate::inspect::Summary;
use crate::limits::MAX_CODE;
use crate::manifest::{Client, Manifest, Storage};
use crate::names::{MANIFEST, Name, code_name, data_name};
use crate::validate;

/// A committed image, all of its files in place and of the right size.
///
/// Content is checked as it is read: by [`DataReader`], by [`read_code`](Self::read_code), or all
/// at once by [`verify`](Self::verify).
#[derive(Debug)]
pub struct Image {
    dir: ImageDir,
    manifest: Manifest,
    manifest_hash: Checksum,
    manifest_length: u64,
    entries: Vec<FileEntry>,
    files: FileSizes,
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
    /// dump did not finish, [`ImageError::NewerFormat`], [`ImageError::Unsupported`] for an
    /// incremental or compressed image, [`ImageError::Missing`] and [`ImageError::Corrupt`] for
    /// what was lost or changed since, [`ImageError::TooLarge`], [`ImageError::Io`].
    pub fn open_at(dir: ImageDir) -> Result<Self, ImageError> {
        let Some(opened) = envelope::open(&dir, envelope::MANIFEST)? else {
            return Err(without_manifest(dir));
        };
        let Some(record) = CommitRecord::read(&dir)? else {
            return Err(ImageError::Uncommitted { dir: dir.path().to_owned() });
        };
        record.check_manifest(&opened)?;
        let files = record.sizes()?;
        for FileEntry { name, size } in &record.files {
            let (_, found) = dir.require_file(name)?;
            if found != *size {
                let what = format!("it has {found} bytes, and {size} were written");
                return Err(ImageError::corrupt(name, what));
            }
        }

        let manifest = Decoder::new(MANIFEST).manifest(&opened.message, opened.version)?;
        if manifest.id != record.id {
            let what = format!("it is of checkpoint {}, not {}", manifest.id, record.id);
            return Err(ImageError::corrupt(MANIFEST, what));
        }
        validate::check(&manifest, &files).map_err(|what| ImageError::corrupt(MANIFEST, what))?;
        check_supported(&manifest)?;
        Ok(Self {
            dir,
            manifest,
            manifest_hash: opened.checksum,
            manifest_length: opened.length,
            entries: record.files,
            files,
        })
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &ImageDir {
        &self.dir
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The checksum of the manifest, which tells this image from every other.
    #[must_use]
    pub fn manifest_hash(&self) -> Checksum {
        self.manifest_hash
    }

    /// The length of the manifest's file in bytes.
    #[must_use]
    pub fn manifest_length(&self) -> u64 {
        self.manifest_length
    }

    /// The client with this index.
    #[must_use]
    pub fn client(&self, index: u32) -> Option<&Client> {
        self.manifest.clients.iter().find(|it| it.index == index)
    }

    /// Its data and code files.
    #[must_use]
    pub fn files(&self) -> &[FileEntry] {
        &self.entries
    }

    /// The numbers of its data files.
    pub fn data_files(&self) -> impl Iterator<Item = u32> {
        self.files.data.keys().copied()
    }

    /// Opens a data file for reading, to be handed to the process that loads it.
    ///
    /// # Errors
    /// [`ImageError::Missing`], [`ImageError::Corrupt`] if its size has changed,
    /// [`ImageError::Io`].
    pub fn data_file(&self, index: u32) -> Result<File, ImageError> {
        let name = data_name(index);
        let (file, found) = self.dir.require_file(&name)?;
        if self.files.data.get(&index) != Some(&found) {
            return Err(ImageError::corrupt(&name, "its size has changed"));
        }
        Ok(file)
    }

    /// A reader for all its data files.
    ///
    /// # Errors
    /// Those of [`data_file`](Self::data_file).
    pub fn data_reader(&self) -> Result<DataReader, ImageError> {
        let files: Result<Vec<_>, _> = self.data_files().map(|index| Ok((index, self.data_file(index)?))).collect();
        Ok(DataReader::new(self.manifest.hash_key, files?))
    }

    /// Opens a code file for reading. Whoever reads it compares its hash.
    ///
    /// # Errors
    /// [`ImageError::Missing`], [`ImageError::Corrupt`] if its size has changed,
    /// [`ImageError::Io`].
    pub fn code_file(&self, hash: CodeHash) -> Result<File, ImageError> {
        let size = self.code_size(hash)?;
        open_code_file(&self.dir, hash, size)
    }

    /// Reads a code image; on success it has the given hash.
    ///
    /// # Errors
    /// Those of [`code_file`](Self::code_file); [`ImageError::Corrupt`] if it was changed.
    pub fn read_code(&self, hash: CodeHash) -> Result<Vec<u8>, ImageError> {
        read_code_file(&self.dir, hash, self.code_size(hash)?)
    }

    /// What a person or a scheduler wants to know about it.
    #[must_use]
    pub fn summary(&self) -> Summary {
        Summary::of(&self.manifest)
    }

    pub(crate) fn sizes(&self) -> &FileSizes {
        &self.files
    }

    fn code_size(&self, hash: CodeHash) -> Result<u64, ImageError> {
        let size = self.files.code.get(&hash);
        size.copied().ok_or_else(|| ImageError::Missing { file: code_name(hash), dir: self.dir.path().to_owned() })
    }
}

impl Manifest {
    /// Reads the manifest in `dir`, committed or not, whatever has become of the other files.
    ///
    /// For telling people what is there; a restore wants [`Image::open`].
    ///
    /// # Errors
    /// Those of [`Image::open_at`] that concern the manifest alone.
    pub fn peek(dir: &ImageDir) -> Result<Self, ImageError> {
        match envelope::open(dir, envelope::MANIFEST)? {
            Some(opened) => Decoder::new(MANIFEST).manifest(&opened.message, opened.version),
            None => Err(ImageError::NotAnImage { dir: dir.path().to_owned() }),
        }
    }
}

/// What a directory without a manifest is. Only one that has nothing of ours is not an image:
/// taking a damaged image for none would restore a process without its GPU state.
fn without_manifest(dir: ImageDir) -> ImageError {
    let names = match dir.names() {
        Ok(names) => names,
        Err(error) => return error,
    };
    let mut unfinished = false;
    for name in names {
        match Name::parse(&name) {
            Some(Name::Commit) => {
                return ImageError::Missing { file: MANIFEST.to_owned(), dir: dir.path().to_owned() };
            }
            Some(_) => unfinished = true,
            None => {}
        }
    }
    let dir = dir.path().to_owned();
    if unfinished { ImageError::Uncommitted { dir } } else { ImageError::NotAnImage { dir } }
}

fn check_supported(manifest: &Manifest) -> Result<(), ImageError> {
    if manifest.parent.is_some() {
        return Err(unsupported_parent());
    }
    let regions = manifest.clients.iter().flat_map(Client::regions);
    for piece in regions.flat_map(|region| region.pieces) {
        if let Storage::Stored(extent) = &piece.storage {
            check_compression(extent)?;
        }
    }
    Ok(())
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
