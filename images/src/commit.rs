//! The commit record: what is written last, and what makes a directory an image.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;

use xxhash_rust::xxh3::xxh3_128;

use crate::ImageError;
use crate::decode::Decoder;
use crate::dir::ImageDir;
use crate::envelope::{self, Opened};
use crate::hash::{CheckpointId, Checksum, CodeHash};
use crate::limits::MAX_FILES;
use crate::names::{COMMIT, MANIFEST, Name};

/// What `rekindle.commit` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommitRecord {
    /// The manifest's id.
    pub(crate) id: CheckpointId,
    /// What the manifest's file ends with.
    pub(crate) manifest_hash: Checksum,
    /// Of the manifest's file, in bytes.
    pub(crate) manifest_length: u64,
    /// Every data and code file.
    pub(crate) files: Vec<FileEntry>,
    /// What of others the image belongs with.
    pub(crate) companion: Option<Companion>,
    /// Another dump has begun since to write over the files of others.
    pub(crate) others_overwritten: bool,
}

/// A file of others in the image's directory, as it was at the commit: of a dump, one of CRIU's that every dump writes
/// anew and that differs from dump to dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Companion {
    pub(crate) name: String,
    pub(crate) hash: Checksum,
}

impl Companion {
    /// The longest that is read, in bytes.
    const LIMIT: u64 = 64 << 20;

    /// The file of this name as it is now; `None` where there is none, or a name that leads out of the directory.
    pub(crate) fn read(dir: &ImageDir, name: &str) -> Result<Option<Self>, ImageError> {
        if name.contains('/') {
            return Ok(None);
        }
        let Some((file, length)) = dir.open_file(name)? else { return Ok(None) };
        if length > Self::LIMIT {
            let (file, what) = (name.to_owned(), "it");
            return Err(ImageError::TooLarge { file, what, size: length, limit: Self::LIMIT });
        }
        // Bounded by the check above.
        let mut content = vec![0; length as usize];
        file.read_exact_at(&mut content, 0).map_err(|error| ImageError::io("read", name, error))?;
        Ok(Some(Self { name: name.to_owned(), hash: Checksum::from_bytes(xxh3_128(&content).to_be_bytes()) }))
    }
}

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct FileEntry {
    /// Its name in the directory.
    pub name: String,
    /// Bytes.
    pub size: u64,
}

/// The sizes of an image's files.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileSizes {
    pub(crate) data: BTreeMap<u32, u64>,
    pub(crate) code: BTreeMap<CodeHash, u64>,
}

impl CommitRecord {
    /// The record in `dir`, if there is one.
    pub(crate) fn read(dir: &ImageDir) -> Result<Option<Self>, ImageError> {
        match envelope::open(dir, envelope::COMMIT)? {
            Some(opened) => Decoder::new(COMMIT).commit(&opened.message).map(Some),
            None => Ok(None),
        }
    }

    /// Whether it commits this manifest and no other.
    pub(crate) fn is_of(&self, manifest: &Opened) -> bool {
        (self.manifest_hash, self.manifest_length) == (manifest.checksum, manifest.length)
    }

    /// The manifest that it commits, among those in the directory: the commit record takes the place of an older one
    /// before the manifest does.
    pub(crate) fn manifest(&self, dir: &ImageDir) -> Result<Option<Opened>, ImageError> {
        let found = envelope::open(dir, envelope::MANIFEST);
        match &found {
            Ok(Some(manifest)) if self.is_of(manifest) => return found,
            _ => {}
        }
        match envelope::open(dir, envelope::NEW_MANIFEST) {
            Ok(Some(manifest)) if self.is_of(&manifest) => Ok(Some(manifest)),
            _ if matches!(found, Ok(Some(_))) => {
                Err(ImageError::corrupt(COMMIT, "it belongs to another manifest than the one beside it"))
            }
            _ => found,
        }
    }

    /// The files as the directory's: all names that the image has there.
    pub(crate) fn names(&self) -> BTreeSet<&str> {
        self.files.iter().map(|it| it.name.as_str()).chain([COMMIT, MANIFEST]).collect()
    }

    /// The files by what they are. Only our names are accepted, so that a record cannot lead out
    /// of the directory.
    pub(crate) fn sizes(&self) -> Result<FileSizes, ImageError> {
        if self.files.len() > MAX_FILES {
            return Err(ImageError::corrupt(COMMIT, "it lists too many files"));
        }
        let mut sizes = FileSizes::default();
        for FileEntry { name, size } in &self.files {
            let twice = match Name::parse(name) {
                Some(Name::Data(index)) => sizes.data.insert(index, *size).is_some(),
                Some(Name::Code(hash)) => sizes.code.insert(hash, *size).is_some(),
                _ => true,
            };
            if twice {
                return Err(ImageError::corrupt(
                    COMMIT,
                    format!("it lists {name:?}, which is no data or code file, or is listed twice"),
                ));
            }
        }
        Ok(sizes)
    }
}
