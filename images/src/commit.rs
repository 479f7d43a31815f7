//! Reading the commit record, which is written last and makes a directory an image, and what it was committed with.

use std::os::unix::fs::FileExt;

use xxhash_rust::xxh3::xxh3_128;

use crate::ImageError;
use crate::decode::Decoder;
use crate::dir::ImageDir;
use crate::envelope::{self, Opened};
use crate::hash::Checksum;
use crate::names::COMMIT;
use crate::record::{CommitRecord, Companion};

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
}
