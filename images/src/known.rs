//! The table of pieces that a new image need not write again.

use crate::ImageError;
use crate::hash::PieceHash;
use crate::limits::{BLOCK, MAX_PIECE_LENGTH};
use crate::manifest::{Compression, Extent, Storage};

/// Bytes of an encoded entry: hash, length, depth, file, compression, offset, stored length.
const ENTRY: usize = 48;

/// Pieces of an image's ancestors, by hash and length. The table travels to the worker that saves a client; at the commit, the
/// writer compares the worker's claims about pieces with the table.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Known {
    /// Ascending by hash and length, each once.
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    hash: PieceHash,
    length: u64,
    depth: u32,
    extent: Extent,
}

impl Known {
    /// Of pieces with their depths, in any order.
    pub(crate) fn new(pieces: impl Iterator<Item = (PieceHash, u64, u32, Extent)>) -> Self {
        let entry = |(hash, length, depth, extent)| Entry { hash, length, depth, extent };
        let mut entries: Vec<_> = pieces.map(entry).collect();
        entries.sort_unstable_by_key(|it| (it.hash, it.length, it.depth, it.extent));
        entries.dedup_by_key(|it| (it.hash, it.length));
        Self { entries }
    }

    /// Whether no piece is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of known pieces.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Where content of this hash and length is stored, if it is.
    #[must_use]
    pub fn get(&self, hash: PieceHash, length: u64) -> Option<Storage> {
        let at = self.entries.binary_search_by_key(&(hash, length), |it| (it.hash, it.length)).ok()?;
        let Entry { depth, extent, .. } = self.entries[at];
        Some(Storage::Parent { depth, extent })
    }

    /// The table as it is sent to a worker: 48 bytes for a piece.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(ENTRY * self.entries.len());
        for Entry { hash, length, depth, extent } in &self.entries {
            let compression = match extent.compression {
                Compression::None => 0,
                Compression::Lz4 => 1,
                Compression::Zstd => 2_u32,
            };
            bytes.extend(hash.to_bytes());
            // Pieces are shorter than 4 GiB.
            for word in [*length as u32, *depth, extent.file, compression] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.extend(extent.offset.to_le_bytes());
            bytes.extend(extent.length.to_le_bytes());
        }
        bytes
    }

    /// A table that was sent. The table is as true as its sender.
    ///
    /// # Errors
    /// [`ImageError::Invalid`] if it is none.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ImageError> {
        let invalid = || ImageError::Invalid { what: "a malformed table of known pieces".to_owned() };
        let (entries, rest) = bytes.as_chunks::<ENTRY>();
        let entries = entries.iter().map(|bytes| entry(bytes).ok_or_else(invalid)).collect::<Result<Vec<_>, _>>()?;
        let key = |it: &Entry| (it.hash, it.length);
        let sorted = entries.windows(2).all(|pair| key(&pair[0]) < key(&pair[1]));
        if sorted && rest.is_empty() { Ok(Self { entries }) } else { Err(invalid()) }
    }
}

fn entry(bytes: &[u8; ENTRY]) -> Option<Entry> {
    let (words, _) = bytes.as_chunks::<4>();
    let word = |i: usize| u32::from_le_bytes(words[i]);
    let long = |i: usize| u64::from(word(i)) | u64::from(word(i + 1)) << 32;
    let compression = match word(7) {
        0 => Compression::None,
        1 => Compression::Lz4,
        2 => Compression::Zstd,
        _ => return None,
    };
    let extent = Extent { file: word(6), offset: long(8), length: long(10), compression };
    let (length, depth) = (u64::from(word(4)), word(5));
    let sound = (1..=MAX_PIECE_LENGTH).contains(&length) && depth > 0 && extent.offset.is_multiple_of(BLOCK);
    let hash = PieceHash::from_bytes(*bytes.first_chunk()?);
    sound.then_some(Entry { hash, length, depth, extent })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn piece(n: u8, length: u64) -> (PieceHash, u64, u32, Extent) {
        let extent = Extent { file: 7, offset: u64::from(n) << 33, length, compression: Compression::None };
        (PieceHash::from_bytes([n; 16]), length, 1 + u32::from(n % 3), extent)
    }

    #[test]
    fn a_piece_is_found_by_hash_and_length_and_nothing_else_is() {
        let all: Vec<_> = (0..100).rev().flat_map(|n| [piece(n, 4096), piece(n, 5)]).collect();
        let known = Known::new(all.iter().copied().chain(all.iter().copied()));
        assert_eq!(known.len(), 200);
        let sent = Known::from_bytes(&known.to_bytes()).unwrap();
        assert_eq!(sent, known);
        for (hash, length, depth, extent) in all {
            assert_eq!(sent.get(hash, length), Some(Storage::Parent { depth, extent }));
            assert_eq!(sent.get(hash, length + 1), None);
        }
        assert_eq!(sent.get(PieceHash::from_bytes([200; 16]), 5), None);
    }

    #[test]
    fn the_nearest_ancestor_is_taken() {
        let (hash, length, _, extent) = piece(1, 4096);
        let known = Known::new([(hash, length, 3, extent), (hash, length, 1, extent)].into_iter());
        assert_eq!(known.get(hash, length), Some(Storage::Parent { depth: 1, extent }));
    }

    #[test]
    fn what_is_no_table_is_refused() {
        let good = Known::new((0..3).map(|n| piece(n, 4096))).to_bytes();
        assert!(Known::from_bytes(&good[..47]).is_err());
        let backwards = [&good[48..96], &good[..48]].concat();
        assert!(Known::from_bytes(&backwards).is_err());
        for (at, byte) in [(16 + 3, 0xff), (16 + 4, 0), (16 + 12, 9), (32, 1)] {
            let mut bad = good.clone();
            bad[at] = byte;
            assert!(Known::from_bytes(&bad).is_err(), "{at}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_table_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(known) = Known::from_bytes(&bytes) {
                prop_assert_eq!(known.to_bytes(), bytes);
            }
        }
    }
}
