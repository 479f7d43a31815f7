//! The commit record: what is written last, and what makes a directory an image.

use std::collections::BTreeMap;

use crate::ImageError;
use crate::decode::Decoder;
use crate::dir::ImageDir;
use crate::envelope::{self, Opened};
use crate::hash::{CheckpointId, Checksum, CodeHash};
use crate::limits::MAX_FILES;
use crate::names::{COMMIT, Name};

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

    /// That it commits this manifest and no other.
    pub(crate) fn check_manifest(&self, manifest: &Opened) -> Result<(), ImageError> {
        if (self.manifest_hash, self.manifest_length) == (manifest.checksum, manifest.length) {
            Ok(())
        } else {
            Err(ImageError::corrupt(COMMIT, "it belongs to another manifest than the one beside it"))
        }
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
