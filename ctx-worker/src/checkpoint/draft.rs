//! A client's part of the manifest while its memory is being copied.

use rekindle_images::{Blob, BlobKind, Client, DataWriter, ImageError, Piece};

/// A client's part of the manifest, but for where the content of its memory is.
pub(crate) struct Draft {
    pub(super) client: Client,
    pub(super) texts: Vec<Text>,
    pub(super) arrays: Vec<Blob>,
    /// For each job, whose it is.
    pub(super) regions: Vec<Region>,
}

impl Draft {
    /// What is to be written besides memory: not by the executor, which must be there when a disk hangs.
    pub(crate) fn take_texts(&mut self) -> Vec<Text> {
        std::mem::take(&mut self.texts)
    }

    /// With the jobs' pieces, in their order, and what became of the texts.
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

/// Something of a client's that is no memory, for a blob.
pub(crate) struct Text {
    pub(super) kind: BlobKind,
    pub(super) handle: u64,
    pub(super) bytes: Vec<u8>,
}

impl Text {
    /// Appends it to the data files.
    pub(crate) fn write(&self, writer: &DataWriter) -> Result<Blob, ImageError> {
        let pieces = writer.append_all(&self.bytes)?;
        Ok(Blob { kind: self.kind.into(), handle: self.handle, device: 0, size: self.bytes.len() as u64, pieces })
    }
}

/// The region that a piece belongs to, by its place in its list.
#[derive(Clone, Copy)]
pub(crate) enum Region {
    Allocation(usize),
    Global(usize),
    Array(usize),
}
