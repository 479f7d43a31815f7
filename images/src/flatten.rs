//! An image without a parent, made of one that has some.
//!
//! ```text
//!   into a directory of its own:   read, compare hashes, write ──► commit
//!   in place:                      the same into DIR/rekindle-flatten, and then, each step durable:
//!                                  DIR loses its commit record ─► files move over ─► manifest ─► commit record
//! ```
//!
//! What is killed while files move over is not committed, and goes on when it is asked for again. What was made of another
//! image than the one that is in DIR by then is removed: it must never take the place of a newer one.

use std::collections::HashMap;
use std::path::Path;

use crate::ImageError;
use crate::chain::Holder;
use crate::commit::{CommitRecord, FileEntry};
use crate::data_reader::DataReader;
use crate::data_writer::DataWriter;
use crate::dir::ImageDir;
use crate::hash::{HashKey, PieceHash};
use crate::image::Image;
use crate::manifest::{Client, Manifest, Piece, Storage};
use crate::names::{BESIDE, COMMIT, MANIFEST, Name};
use crate::writer::{Committed, CreateOptions, ImageWriter};

/// Writes the image again into `out`, with everything that it has in other images. It keeps its id. Every piece is
/// compared with its hash on the way.
///
/// # Errors
/// Those of [`DataReader::read`](crate::DataReader::read) and of [`ImageWriter`]; `out` then has no image.
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
/// Those of [`flatten`], and [`ImageError::Busy`] if the image, or one that it builds on, is being written or is
/// needed by another that is: then the image is as it was. [`ImageError::Io`] while files are moved: then it is not
/// committed, and calling this again goes on.
pub fn flatten_in_place(path: &Path) -> Result<bool, ImageError> {
    let dir = ImageDir::open(path)?;
    dir.lock()?;
    if settle(&dir)? {
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
        Ok((record, beside)) => move_over(&dir, &beside, &record).map(|()| true),
        Err(error) => {
            // The first failure says more.
            let _ = dir.remove_dir(BESIDE);
            Err(error)
        }
    }
}

/// Completes a flattening in the directory that was killed while files moved over, or after it was whole; removes what
/// is left of one that came less far, or of another image. Whether there was one to complete.
pub(crate) fn settle(dir: &ImageDir) -> Result<bool, ImageError> {
    let Some(beside) = dir.inner_dir(BESIDE)? else { return Ok(false) };
    match CommitRecord::read(&beside)? {
        Some(record) if belongs(dir, &record)? => move_over(dir, &beside, &record).map(|()| true),
        _ => dir.remove_dir(BESIDE).map(|()| false),
    }
}

/// Whether a committed image beside the one in `dir` was made of that: both are the same checkpoint. While files move over
/// there is no commit record in `dir`, and its manifest, if it is there, is of either.
fn belongs(dir: &ImageDir, record: &CommitRecord) -> Result<bool, ImageError> {
    if let Some(own) = CommitRecord::read(dir)? {
        return Ok(own.id == record.id);
    }
    match Manifest::peek(dir) {
        Ok(manifest) => Ok(manifest.id == record.id),
        Err(ImageError::NotAnImage { .. }) => Ok(true),
        Err(error) => Err(error),
    }
}

/// Moves a committed image over that of the directory around it. Every step may have been done before.
fn move_over(dir: &ImageDir, beside: &ImageDir, record: &CommitRecord) -> Result<(), ImageError> {
    let manifest = FileEntry { name: MANIFEST.to_owned(), size: record.manifest_length };
    for FileEntry { name, size } in record.files.iter().chain([&manifest]) {
        let found = beside.open_file(name)?.map_or_else(|| dir.require_file(name), Ok)?.1;
        if found != *size {
            return Err(ImageError::corrupt(name, format!("it has {found} bytes, and {size} were written")));
        }
    }
    // The folder itself first: it must not be lost with what it takes the place of.
    dir.sync()?;
    dir.remove(COMMIT)?;
    dir.sync()?;
    let names = record.files.iter().map(|it| it.name.as_str());
    for name in names.clone().chain([MANIFEST]) {
        if beside.open_file(name)?.is_some() {
            dir.move_in(beside, name, name)?;
        }
    }
    for name in dir.names()? {
        let kept = name == MANIFEST || names.clone().any(|it| it == name);
        if Name::parse(&name).is_some() && !kept {
            dir.remove(&name)?;
        }
    }
    dir.sync()?;
    // From here on it is whole again.
    dir.move_in(beside, COMMIT, COMMIT)?;
    dir.sync()?;
    dir.remove_dir(BESIDE)
}
