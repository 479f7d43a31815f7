//! A client's part of the manifest while its memory is being copied.

use rekindle_images::{Blob, BlobKind, Client, DataWriter, ImageError, Piece};

/// A client's part of the manifest, without the places at which the content of its memory is stored.
pub(crate) struct Draft {
    pub(super) client: Client,
    pub(super) texts: Vec<Text>,
    pub(super) arrays: Vec<Blob>,
    /// For each job, the region that it belongs to.
    pub(super) regions: Vec<Region>,
}

impl Draft {
    /// The blobs to be written besides memory. The executor does not write them, since it must respond while a disk hangs.
    pub(crate) fn take_texts(&mut self) -> Vec<Text> {
        std::mem::take(&mut self.texts)
    }

    /// Completes the draft with the jobs' pieces, in the jobs' order, and the blobs of the texts.
    pub(crate) fn complete(self, pieces: Vec<Piece>, texts: Vec<Blob>) -> Client {
        let Self { mut client, mut arrays, regions, .. } = self;
        for (region, piece) in regions.iter().zip(pieces) {
            match *region {
                Region::Allocation(i) => client.allocations[i].pieces.push(piece),
                Region::Global(i) => client.globals[i].pieces.push(piece),
                Region::Array(i) => arrays[i].pieces.push(piece),
            }
        }
        client.blobs = texts;
        client.blobs.extend(arrays);
        client
    }
}

/// State of a client other than memory, to be stored as a blob.
pub(crate) struct Text {
    pub(super) kind: BlobKind,
    pub(super) handle: u64,
    pub(super) bytes: Vec<u8>,
}

impl Text {
    /// Appends the text to the data files.
    pub(crate) fn write(&self, writer: &DataWriter) -> Result<Blob, ImageError> {
        let pieces = writer.append_all(&self.bytes)?;
        Ok(Blob { kind: self.kind.into(), handle: self.handle, device: 0, size: self.bytes.len() as u64, pieces })
    }
}

/// The region that a piece belongs to, by its index in its list.
#[derive(Clone, Copy)]
pub(crate) enum Region {
    Allocation(usize),
    Global(usize),
    Array(usize),
}
