//! Short pieces together in one object.
//!
//! ```text
//!   packs/ab/ab…-LENGTH      │ piece │ piece │ … │ list of the pieces, sealed │
//!                                                 └───────── LENGTH ──────────┘
//! ```
//!
//! The list is for who uploads and wants to know which pieces are there already; an image says itself where its
//! pieces are.

use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::hash::Hash;
use crate::piece::{Coder, MAX_LENGTH};
use crate::random;
use crate::transport::{Found, ObjectName, Transport};

/// The folder of packs.
pub(crate) const PACKS: &str = "packs";
/// The folder of pieces that are objects of their own.
pub(crate) const PIECES: &str = "pieces";
/// A stored piece of so many bytes is an object of its own.
pub(crate) const LARGE: usize = 256 << 10;
/// A pack with so many bytes gets no more.
pub(crate) const FULL: usize = 16 << 20;
/// The most pieces in a pack.
const MOST: usize = 1 << 14;
/// The longest list of a pack, in bytes.
const MAX_LIST: u64 = 8 << 20;

/// Where a piece is stored.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) object: ObjectName,
    /// In the object, in bytes.
    pub(crate) offset: u64,
    /// The bytes that it has there.
    pub(crate) stored: u64,
}

/// A piece in a pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Packed {
    pub(crate) hash: Hash,
    /// The bytes of its content.
    pub(crate) length: u64,
    pub(crate) offset: u64,
    pub(crate) stored: u64,
}

/// A new name for the object of one piece. It is never used again, so that an object that is being removed as
/// unneeded is no other than the one that was not needed.
pub(crate) fn piece_name(hash: &Hash) -> Result<ObjectName, StoreError> {
    let text = hash.to_string();
    let number = u64::from_le_bytes(random::bytes()?);
    ObjectName::made(format!("{PIECES}/{}/{text}-{number:016x}", &text[..2]))
}

/// The hash in the name of a piece's object.
pub(crate) fn hash_in(name: &ObjectName) -> Option<Hash> {
    let (hash, _) = name.last().split_once('-')?;
    hash.parse().ok()
}

/// Pieces that will be a pack.
#[derive(Default)]
pub(crate) struct Builder {
    content: Vec<u8>,
    pieces: Vec<Packed>,
}

impl Builder {
    pub(crate) fn push(&mut self, hash: Hash, length: u64, stored: &[u8]) {
        let (offset, stored_length) = (self.content.len() as u64, stored.len() as u64);
        self.pieces.push(Packed { hash, length, offset, stored: stored_length });
        self.content.extend_from_slice(stored);
    }

    pub(crate) fn is_full(&self) -> bool {
        self.content.len() >= FULL || self.pieces.len() >= MOST
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The pack, its name, and what is in it.
    pub(crate) fn finish(mut self, coder: &Coder) -> Result<(ObjectName, Vec<u8>, Vec<Packed>), StoreError> {
        let id = random::hex()?;
        let list = serde_json::to_vec(&self.pieces).map_err(|error| StoreError::refused(error.to_string()))?;
        let sealed = coder.sealer().seal(&[b"pack", id.as_bytes()], &[&list])?;
        let name = ObjectName::made(format!("{PACKS}/{}/{id}-{}", &id[..2], sealed.len()))?;
        self.content.extend_from_slice(&sealed);
        Ok((name, self.content, self.pieces))
    }
}

/// The list of the pieces in a pack.
pub(crate) fn list(transport: &dyn Transport, coder: &Coder, pack: &Found) -> Result<Vec<Packed>, StoreError> {
    let bad = |what: &str| StoreError::damaged(pack.name.as_str(), what);
    let (id, length) = pack.name.last().split_once('-').ok_or_else(|| bad("its name is none of a pack"))?;
    let length: u64 = length.parse().map_err(|_| bad("its name is none of a pack"))?;
    let start = pack.size.checked_sub(length).filter(|_| length <= MAX_LIST).ok_or_else(|| bad("it is too short"))?;
    let sealed = transport.get(&pack.name, Some(start..pack.size))?;
    let sealed = sealed.ok_or_else(|| StoreError::Missing { object: pack.name.to_string() })?;
    let opened = coder.sealer().open(&[b"pack", id.as_bytes()], sealed).map_err(|_| bad("its list was changed"))?;
    let pieces: Vec<Packed> = serde_json::from_slice(&opened).map_err(|_| bad("its list cannot be read"))?;
    let inside =
        |it: &Packed| it.length <= MAX_LENGTH && it.offset.checked_add(it.stored).is_some_and(|end| end <= start);
    if pieces.len() > MOST || !pieces.iter().all(inside) {
        return Err(bad("its list says what cannot be"));
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Directory;
    use crate::key::Keys;

    #[test]
    fn a_pack_says_what_is_in_it_and_a_changed_list_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::new(place.path());
        let coder = Coder::new(&Keys::derive(None), false);
        let mut builder = Builder::default();
        for content in [&b"one"[..], b"another"] {
            let hash = coder.hash(content);
            builder.push(hash, content.len() as u64, &coder.encode(&hash, content).unwrap());
        }
        let (name, content, pieces) = builder.finish(&coder).unwrap();
        directory.put(&name, &content).unwrap();
        let found = directory.head(&name).unwrap().unwrap();
        assert_eq!(list(&directory, &coder, &found).unwrap(), pieces);
        for piece in &pieces {
            let range = piece.offset as usize..(piece.offset + piece.stored) as usize;
            coder.decode(&piece.hash, piece.length, content[range].to_vec()).unwrap();
        }
        let begin = (pieces[1].offset + pieces[1].stored) as usize;
        for at in begin..content.len() {
            let mut changed = content.clone();
            changed[at] ^= 0x10;
            directory.put(&name, &changed).unwrap();
            assert!(list(&directory, &coder, &found).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_pieces_name_has_its_hash_and_is_never_used_again() {
        let hash = Hash::of(&[0; 32], b"x");
        let [one, other] = [(); 2].map(|()| piece_name(&hash).unwrap());
        assert_eq!(hash_in(&one), Some(hash));
        assert_ne!(one, other);
        assert_eq!(hash_in(&ObjectName::parse("pieces/aa/bb-1").unwrap()), None);
    }
}
