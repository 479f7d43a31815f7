//! A chain of images in directories beside each other.

use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rekindle_images::*;

use crate::common::{self, fill};

/// Directories beside each other, each with CRIU's link to the one before.
pub(crate) struct Chain(tempfile::TempDir);

impl Chain {
    pub(crate) fn new() -> Self {
        let chain = Self(tempfile::tempdir().unwrap());
        fs::create_dir(chain.dir(0)).unwrap();
        common::write(&chain.dir(0));
        chain
    }

    pub(crate) fn dir(&self, n: u32) -> PathBuf {
        self.0.path().join(n.to_string())
    }

    pub(crate) fn open(&self, n: u32) -> Result<Image, ImageError> {
        Image::open(self.dir(n))
    }

    /// Begins image `n`.
    pub(crate) fn begin(&self, n: u32) -> ImageWriter {
        fs::create_dir(self.dir(n)).unwrap();
        symlink(format!("../{}", n - 1), self.dir(n).join(Base::CRIU_LINK)).unwrap();
        let dir = ImageDir::open(self.dir(n)).unwrap();
        let base = Base::find(&dir).unwrap();
        assert!(base.is_some());
        let options = CreateOptions { id: CheckpointId::from_bytes([n as u8; 16]), ..CreateOptions::new().unwrap() };
        ImageWriter::create_on(dir, options, base).unwrap()
    }

    /// Image `n`, of the same clients, the first of which has this at its global.
    pub(crate) fn add(&self, n: u32, counter: &[u8; 8]) -> Committed {
        let writer = self.begin(n);
        let manifest = common::fill_with(&writer, counter).unwrap();
        writer.commit(manifest).unwrap()
    }
}

/// The content of these pieces.
pub(crate) fn read(image: &Image, pieces: &[Piece]) -> Vec<u8> {
    let mut content = vec![0; pieces.iter().map(|it| it.length as usize).sum()];
    image.data_reader().unwrap().read_all(pieces, &mut content, NonZeroUsize::MIN).unwrap();
    content
}

/// Checks that everything reads as in the sample, but for the counter.
pub(crate) fn assert_reads(image: &Image, counter: &[u8]) {
    let report = image.verify(|_| ());
    assert!(report.is_good(), "{report:?}");
    for client in &image.manifest().clients {
        assert_eq!(read(image, &client.allocations[0].pieces), common::content());
    }
    assert_eq!(read(image, &image.manifest().clients[0].globals[0].pieces), counter);
    assert_eq!(read(image, &image.manifest().clients[1].globals[0].pieces), b"counter!");
    for (hash, code) in image.manifest().code.iter().map(|it| it.hash).zip(sorted_code()) {
        assert_eq!(image.read_code(hash).unwrap(), code);
    }
}

fn sorted_code() -> Vec<&'static [u8]> {
    let mut code = common::CODE.to_vec();
    code.sort_by_key(|code| CodeHash::of(code));
    code
}

/// In which ancestor each piece of a client is; `None` for zeros.
pub(crate) fn depths(client: &Client) -> Vec<Option<u32>> {
    let depth = |piece: &Piece| piece.storage.place().map(|(file, _)| file.depth);
    client.regions().flat_map(|region| region.pieces).map(depth).collect()
}

/// Another image in place of this one.
pub(crate) fn rewrite(dir: &Path, id: [u8; 16]) {
    let options = CreateOptions { id: CheckpointId::from_bytes(id), replace: true, ..common::options() };
    let writer = ImageWriter::create(ImageDir::open(dir).unwrap(), options).unwrap();
    let manifest = fill(&writer).unwrap();
    writer.commit(manifest).unwrap();
}

/// A new dump into a directory that has an image.
pub(crate) fn replace(dir: &Path, id: [u8; 16], base: bool) -> Result<ImageWriter, ImageError> {
    let dir = ImageDir::open(dir).unwrap();
    let base = if base { Base::find(&dir).unwrap() } else { None };
    let options = CreateOptions { id: CheckpointId::from_bytes(id), replace: true, ..common::options() };
    ImageWriter::create_on(dir, options, base)
}
