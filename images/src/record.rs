//! The commit record: an image's files, and the file of others that the image belongs with.

use std::collections::{BTreeMap, BTreeSet};

use crate::ImageError;
use crate::hash::{CheckpointId, Checksum, CodeHash};
use crate::limits::MAX_FILES;
use crate::names::{COMMIT, MANIFEST, Name};

/// The content of `rekindle.commit`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CommitRecord {
    /// The manifest's id.
    pub(crate) id: CheckpointId,
    /// The checksum at the end of the manifest's file.
    pub(crate) manifest_hash: Checksum,
    /// Size of the manifest's file, in bytes.
    pub(crate) manifest_length: u64,
    /// Every data and code file.
    pub(crate) files: Vec<FileEntry>,
    /// The file of others that the image belongs with.
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
