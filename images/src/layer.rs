//! A committed image by itself, without those that it builds on.

use crate::ImageError;
use crate::decode::Decoder;
use crate::dir::ImageDir;
use crate::envelope::{self, Opened};
use crate::hash::Checksum;
use crate::manifest::Manifest;
use crate::names::{MANIFEST, Name};
use crate::record::{CommitRecord, FileEntry, FileSizes};
use crate::scan;

/// A committed image by itself: its manifest, and its files in place and of the right size.
pub(crate) struct Layer {
    pub(crate) dir: ImageDir,
    pub(crate) manifest: Manifest,
    /// The manifest as it was read.
    message: Vec<u8>,
    pub(crate) manifest_hash: Checksum,
    pub(crate) manifest_length: u64,
    pub(crate) record: CommitRecord,
    pub(crate) files: FileSizes,
}

impl Layer {
    /// Reads the image in `dir`. Whether the manifest's parts agree is not checked yet.
    pub(crate) fn read(dir: ImageDir) -> Result<Self, ImageError> {
        let Some((opened, record)) = committed(&dir)? else {
            return Err(ImageError::Uncommitted { dir: dir.path().to_owned() });
        };
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
        let Opened { message, checksum: manifest_hash, length: manifest_length, .. } = opened;
        Ok(Self { dir, manifest, message, manifest_hash, manifest_length, record, files })
    }

    /// The client at this place of the manifest, encoded.
    pub(crate) fn encoded_client(&self, place: usize) -> Option<&[u8]> {
        scan::parts(&self.message, scan::CLIENT_IN_MANIFEST).nth(place)
    }
}

impl Manifest {
    /// Reads the manifest in `dir`, committed or not, whatever has become of the other files.
    ///
    /// For messages; a restore needs [`Image::open`](crate::Image::open).
    ///
    /// # Errors
    /// The errors of [`Image::open_at`](crate::Image::open_at) that concern the manifest alone.
    pub fn peek(dir: &ImageDir) -> Result<Self, ImageError> {
        let opened = match CommitRecord::read(dir) {
            Ok(Some(record)) => record.manifest(dir),
            _ => Ok(None),
        };
        let opened = match opened {
            Ok(Some(opened)) => Some(opened),
            _ => envelope::open(dir, envelope::MANIFEST)?,
        };
        match opened {
            Some(opened) => Decoder::new(MANIFEST).manifest(&opened.message, opened.version),
            None => Err(ImageError::NotAnImage { dir: dir.path().to_owned() }),
        }
    }

    /// The manifest whose file has these bytes: one that is in an archive, for example.
    ///
    /// # Errors
    /// As for [`peek`](Self::peek).
    pub fn of_file(bytes: Vec<u8>) -> Result<Self, ImageError> {
        let opened = envelope::unseal(envelope::MANIFEST, bytes)?;
        Decoder::new(MANIFEST).manifest(&opened.message, opened.version)
    }
}

/// The manifest and the commit record in `dir`; `None` for a manifest that is not committed.
fn committed(dir: &ImageDir) -> Result<Option<(Opened, CommitRecord)>, ImageError> {
    let found = envelope::open(dir, envelope::MANIFEST)?;
    let record = CommitRecord::read(dir);
    match (found, record?) {
        (Some(_), None) => Ok(None),
        (None, None) => Err(without_manifest(dir)),
        (_, Some(record)) => match record.manifest(dir)? {
            Some(opened) => Ok(Some((opened, record))),
            None => Err(without_manifest(dir)),
        },
    }
}

/// The error for a directory without a manifest. Only a directory without any file of ours is not an image: to take a damaged
/// image for none would restore a process without its GPU state.
fn without_manifest(dir: &ImageDir) -> ImageError {
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
            // It comes after an image, and says nothing about what has become of that.
            Some(Name::LastRestore) | None => {}
            Some(_) => unfinished = true,
        }
    }
    let dir = dir.path().to_owned();
    if unfinished { ImageError::Uncommitted { dir } } else { ImageError::NotAnImage { dir } }
}
