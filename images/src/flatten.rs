//! An image without a parent, made of one that has some.
//!
//! ```text
//!   into a directory of its own:   read, compare hashes, write ──► commit
//!   in place:                      the same into DIR/rekindle-flatten, and then, each step durable:
//!                                  DIR loses its commit record ─► files move over ─► manifest ─► commit record
//! ```
//!
//! [`recovery`] completes a flattening that is killed while files move over.

use std::collections::HashMap;
use std::path::Path;

use crate::ImageError;
use crate::chain::Holder;
use crate::data_reader::DataReader;
use crate::data_writer::DataWriter;
use crate::dir::ImageDir;
use crate::hash::{HashKey, PieceHash};
use crate::image::Image;
use crate::manifest::{Client, Piece, Storage};
use crate::names::BESIDE;
use crate::record::CommitRecord;
use crate::recovery;
use crate::writer::{Committed, CreateOptions, ImageWriter};

/// Writes the image again into `out`, with all of its content in other images. The image keeps its id. Every piece is
/// compared with its hash on the way.
///
/// # Errors
/// The errors of [`DataReader::read`](crate::DataReader::read) and of [`ImageWriter`]; `out` then has no image.
pub fn flatten(image: &Image, out: ImageDir) -> Result<Committed, ImageError> {
    let mut options = CreateOptions { id: image.manifest().id, ..CreateOptions::new()? };
    if let HashKey::Content(key) = image.manifest().hash_key {
        options.key = key;
    }
    let writer = ImageWriter::create_again(out, options, image.record())?;
    for code in &image.manifest().code {
        writer.put_code(&image.read_code(code.hash)?)?;
    }
    let reader = image.data_reader()?;
    let mut manifest = image.manifest().clone();
    for client in &mut manifest.clients {
        let (number, file) = writer.data_file(client.index)?;
        let data = DataWriter::new(file, number, writer.key())?;
        copy(client, &reader, &data)?;
        data.finish()?;
    }
    writer.commit(manifest)
}

/// Writes the content of a client, equal pieces once.
fn copy(client: &mut Client, reader: &DataReader, data: &DataWriter) -> Result<(), ImageError> {
    let mut written: HashMap<(PieceHash, u64), (PieceHash, Storage)> = HashMap::new();
    let mut content = Vec::new();
    for piece in client.pieces_mut() {
        let before = (piece.hash, piece.length);
        if let Some((hash, storage)) = written.get(&before) {
            (piece.hash, piece.storage) = (*hash, *storage);
            continue;
        }
        // Bounded: every piece of an open image is at most MAX_PIECE_LENGTH.
        content.resize(piece.length as usize, 0);
        reader.read(piece, &mut content)?;
        // Compressed as it was.
        let method = piece.storage.place().map(|(_, extent)| extent.compression);
        piece.hash = data.hash(&content);
        if let Some(method) = method {
            piece.storage = Storage::Stored(data.store(&content, method)?);
        }
        written.insert(before, (piece.hash, piece.storage));
    }
    Ok(())
}

impl Client {
    /// All pieces of all its regions.
    fn pieces_mut(&mut self) -> impl Iterator<Item = &mut Piece> {
        let allocations = self.allocations.iter_mut().flat_map(|it| &mut it.pieces);
        let globals = self.globals.iter_mut().flat_map(|it| &mut it.pieces);
        let pinned = self.pinned.iter_mut().flat_map(|it| &mut it.pieces);
        let blobs = self.blobs.iter_mut().flat_map(|it| &mut it.pieces);
        allocations.chain(globals).chain(pinned).chain(blobs)
    }
}

/// As [`flatten`], with the directory at `path` itself in place of `out`; whether there was anything to do. As much
/// space is needed as for both.
///
/// # Errors
/// The errors of [`flatten`], and [`ImageError::Busy`] if the image, or one that it builds on, is being written or is
/// needed by another that is: then the image is as it was. [`ImageError::Io`] while files are moved: then it is not
/// committed, and calling this again goes on.
pub fn flatten_in_place(path: &Path) -> Result<bool, ImageError> {
    let dir = ImageDir::open(path)?;
    dir.lock()?;
    if recovery::settle_flattening(&dir)? {
        return Ok(true);
    }
    let image = Image::hold_at(dir.try_clone()?, Holder { dir: &dir })?;
    if image.manifest().parent.is_none() {
        return Ok(false);
    }
    dir.make_dir(BESIDE)?;
    let made = dir.inner_dir(BESIDE).and_then(|beside| {
        let beside =
            beside.ok_or_else(|| ImageError::Missing { file: BESIDE.to_owned(), dir: dir.path().to_owned() })?;
        flatten(&image, beside.try_clone()?)?;
        let record = CommitRecord::read(&beside)?;
        Ok((record.ok_or_else(|| ImageError::Uncommitted { dir: beside.path().to_owned() })?, beside))
    });
    match made {
        Ok((record, beside)) => recovery::move_over(&dir, &beside, &record).map(|()| true),
        Err(error) => {
            // The first failure says more.
            let _ = dir.remove_dir(BESIDE);
            Err(error)
        }
    }
}
