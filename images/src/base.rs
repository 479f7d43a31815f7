//! The image that a new one is to build on, and what the new one may find in it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::ImageError;
use crate::chain::Holder;
use crate::content::ContentKey;
use crate::dir::ImageDir;
use crate::error::ErrorKind;
use crate::hash::{CodeHash, HashKey};
use crate::image::Image;
use crate::known::Known;
use crate::limits::MAX_ANCESTORS;
use crate::manifest::{Parent, Storage};
use crate::record::FileSizes;

/// A committed image that a new one is to build on.
///
/// As long as it lives, no other writer begins an image in its directory or in that of an image that it builds on, or flattens
/// one there: such a writer gets [`ImageError::BuiltOn`]. Others may build on it at the same time, and it may be read.
#[derive(Debug)]
pub struct Base {
    image: Image,
    path: PathBuf,
    key: ContentKey,
    manifest_hash: crate::Checksum,
}

impl Base {
    /// A symbolic link of this name in the image directory leads to the image to build on.
    pub const LINK: &str = "rekindle-parent";

    /// The name under which CRIU keeps a dump's parent in its image directory (`--prev-images-dir`, which podman's
    /// `--with-previous` uses too), which counts where there is no [`LINK`](Self::LINK). CRIU (4.1, `criu/mem.c`,
    /// `detect_pid_reuse`) refuses a dump with it unless both dumps tracked memory, for which the kernel must have
    /// soft-dirty bits.
    pub const CRIU_LINK: &str = "parent";

    /// The image at `path`, relative to `dir`, in which the new image will be.
    ///
    /// # Errors
    /// The errors of [`Image::open_at`]; [`ImageError::Unsupported`] for an image of format version 1, whose hashes are of
    /// another kind, and for one that has as many ancestors as an image may have; [`ImageError::Invalid`] if it
    /// is in `dir` itself; [`ImageError::Overwrites`] if one that it builds on is: a new image in `dir`, whole or not, would be
    /// the end of it; [`ImageError::Busy`] if one of them is just being written.
    pub fn open(dir: &ImageDir, path: &Path) -> Result<Self, ImageError> {
        let parent = dir.open_relative(path)?;
        let own = dir.identity()?;
        if parent.identity()? == own {
            let what = format!("an image that builds on the one in its own directory, {}", dir.path().display());
            return Err(ImageError::Invalid { what });
        }
        // Before it is read: what is read stays as it is.
        parent.share()?;
        let image = Image::hold_at(parent, Holder { dir })?;
        let HashKey::Content(key) = image.manifest().hash_key else {
            return Err(ImageError::Unsupported { what: "to build on an image of format version 1".to_owned() });
        };
        if image.ancestors().len() >= MAX_ANCESTORS {
            return Err(ImageError::Unsupported {
                what: format!("more than {MAX_ANCESTORS} images behind each other"),
            });
        }
        let manifest_hash = image.manifest_hash();
        Ok(Self { image, path: path.to_owned(), key, manifest_hash })
    }

    /// The image of the directory that a [`LINK`](Self::LINK) in `dir`, or else [CRIU's](Self::CRIU_LINK), leads to;
    /// `None` without such a link, or where that directory has nothing of ours, as after CRIU's `pre-dump`. An image that
    /// builds on it says where the directory is, and does not need the link: the next dump into `dir`, which may fail,
    /// makes it anew or removes it before it begins.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn find(dir: &ImageDir) -> Result<Option<Self>, ImageError> {
        for link in [Self::LINK, Self::CRIU_LINK] {
            match Self::open(dir, &dir.way_through(link)) {
                Err(error) if error.kind() == ErrorKind::NotAnImage => {}
                Err(ImageError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
                result => return result.map(Some),
            }
        }
        Ok(None)
    }

    /// The image.
    #[must_use]
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// The key of its hashes, and of those of an image that builds on it.
    #[must_use]
    pub fn key(&self) -> ContentKey {
        self.key
    }

    /// The pieces to which the process with this pid (as it sees itself) may refer: those that it had itself, never those of
    /// another process. None if several processes had that pid, in different namespaces.
    #[must_use]
    pub fn known(&self, namespace_pid: u32) -> Known {
        let mut same = self.image.manifest().clients.iter().filter(|it| it.namespace_pid == namespace_pid);
        let (Some(client), None) = (same.next(), same.next()) else { return Known::default() };
        let pieces = client.regions().flat_map(|region| region.pieces);
        Known::new(pieces.filter_map(|piece| {
            let (depth, extent) = match piece.storage {
                Storage::Zero => return None,
                Storage::Stored(extent) => (1, extent),
                Storage::Parent { depth, extent } => (depth + 1, extent),
            };
            Some((piece.hash, piece.length, depth, extent))
        }))
    }

    /// How deep, from an image that builds on this one, a code image of this hash and size is.
    pub(crate) fn code(&self, hash: CodeHash, size: u64) -> Option<u32> {
        let code = self.image.manifest().code.iter().find(|it| it.hash == hash && it.size == size)?;
        Some(code.parent_depth + 1)
    }

    /// The reference in the manifest of an image that builds on this one.
    pub(crate) fn reference(&self) -> Parent {
        Parent { path: self.path.clone(), id: self.image.manifest().id, manifest_hash: self.manifest_hash }
    }

    /// The files of the ancestors of an image that builds on this one.
    pub(crate) fn files(&self) -> Vec<&FileSizes> {
        std::iter::once(self.image.sizes()).chain(self.image.ancestors().iter().map(|it| &it.files)).collect()
    }
}

/// The tables of all clients of a new image, each made once.
pub(crate) struct Tables<'a> {
    base: &'a Base,
    made: BTreeMap<u32, Known>,
}

impl<'a> Tables<'a> {
    pub(crate) fn new(base: &'a Base) -> Self {
        Self { base, made: BTreeMap::new() }
    }

    pub(crate) fn of(&mut self, namespace_pid: u32) -> &Known {
        self.made.entry(namespace_pid).or_insert_with(|| self.base.known(namespace_pid))
    }
}
