//! Everything in a client that has content, seen alike.

use std::collections::BTreeSet;
use std::fmt;

use crate::data_reader::DataFile;
use crate::manifest::{Client, Piece};

/// A run of content: an allocation, a global, pinned memory, a blob.
#[derive(Debug, Clone, Copy)]
pub struct Region<'a> {
    /// The index of the client it belongs to.
    pub client: u32,
    /// The region's kind.
    pub what: RegionKind<'a>,
    /// Bytes.
    pub size: u64,
    /// Its content.
    pub pieces: &'a [Piece],
}

/// The kind of a [`Region`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind<'a> {
    /// Device memory.
    Allocation {
        /// The client's number of the device.
        device: u32,
        /// Where the client sees it.
        address: u64,
    },
    /// A device global.
    Global {
        /// Handle of its module.
        module: u64,
        /// Its symbol.
        name: &'a str,
        /// Where the client sees it.
        address: u64,
    },
    /// Pinned host memory.
    Pinned {
        /// Where the client sees it.
        address: u64,
    },
    /// Content at no address.
    Blob {
        /// The worker's number for what it is.
        kind: u32,
        /// Whose it is.
        handle: u64,
    },
}

impl RegionKind<'_> {
    /// Its first address, if it has one.
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        match *self {
            Self::Allocation { address, .. } | Self::Global { address, .. } | Self::Pinned { address } => Some(address),
            Self::Blob { .. } => None,
        }
    }
}

impl fmt::Display for Region<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.what {
            RegionKind::Allocation { device, address } => {
                write!(f, "allocation {address:#x} on device {device}")?;
            }
            RegionKind::Global { module, name, address } => {
                write!(f, "global {name:?} of module {module:#x} at {address:#x}")?
            }
            RegionKind::Pinned { address } => write!(f, "pinned memory {address:#x}")?,
            RegionKind::Blob { kind, handle } => {
                write!(f, "content of kind {kind} of object {handle:#x}")?;
            }
        }
        write!(f, " of client {}", self.client)
    }
}

impl Client {
    /// The data files that hold its pieces, those of other images among them.
    #[must_use]
    pub fn data_files(&self) -> BTreeSet<DataFile> {
        let pieces = self.regions().flat_map(|region| region.pieces);
        pieces.filter_map(|piece| piece.storage.place()).map(|(file, _)| file).collect()
    }

    /// All its regions: allocations, globals, pinned memory, blobs.
    pub fn regions(&self) -> impl Iterator<Item = Region<'_>> {
        let region = |what, size, pieces| Region { client: self.index, what, size, pieces };
        let allocations = self.allocations.iter().map(move |it| {
            let what = RegionKind::Allocation { device: it.device, address: it.address };
            region(what, it.size, it.pieces.as_slice())
        });
        let globals = self.globals.iter().map(move |it| {
            let what = RegionKind::Global { module: it.module, name: &it.name, address: it.address };
            region(what, it.size, it.pieces.as_slice())
        });
        let pinned = self.pinned.iter().map(move |it| {
            let what = RegionKind::Pinned { address: it.address };
            region(what, it.size, it.pieces.as_slice())
        });
        let blobs = self.blobs.iter().map(move |it| {
            let what = RegionKind::Blob { kind: it.kind, handle: it.handle };
            region(what, it.size, it.pieces.as_slice())
        });
        allocations.chain(globals).chain(pinned).chain(blobs)
    }
}
