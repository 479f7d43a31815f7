//! Hashes and identifiers of 128 bits.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

use crate::ImageError;
use crate::content::{ContentHash, ContentKey, Schedule};
use crate::sys;

/// A 128-bit value of its own type, shown as 32 hexadecimal digits.
macro_rules! value128 {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name([u8; 16]);

        impl $name {
            /// From its bytes, in the order in which they are shown.
            #[must_use]
            pub const fn from_bytes(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }

            /// Its bytes, in the order in which they are shown.
            #[must_use]
            pub const fn to_bytes(self) -> [u8; 16] {
                self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", u128::from_be_bytes(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = NotHex128;

            fn from_str(text: &str) -> Result<Self, NotHex128> {
                let ours = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
                if text.len() != 32 || !text.bytes().all(ours) {
                    return Err(NotHex128);
                }
                u128::from_str_radix(text, 16)
                    .map(|value| Self(value.to_be_bytes()))
                    .map_err(|_| NotHex128)
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.collect_str(self)
            }
        }
    };
}

value128! {
    /// The name of a checkpoint: random, never used twice.
    CheckpointId
}

value128! {
    /// The hash of a piece's content under the image's [`HashKey`]. One that a device made ([`ContentHash`]) is made one
    /// of these by `into()`.
    PieceHash
}

value128! {
    /// The hash of a code image's content, without a key: equal code has one name everywhere.
    CodeHash
}

value128! {
    /// The hash of what a variable held when its code was loaded, without a key: images compare by it.
    InitialHash
}

value128! {
    /// The checksum that a manifest or commit record ends with.
    Checksum
}

/// A text that is not 32 lowercase hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not 32 lowercase hexadecimal digits")]
pub struct NotHex128;

impl CheckpointId {
    /// A new one, from the kernel's random numbers.
    ///
    /// # Errors
    /// The kernel gave no random numbers.
    pub fn random() -> Result<Self, ImageError> {
        sys::random_bytes().map(Self)
    }
}

impl CodeHash {
    /// The hash of this code image: XXH3-128.
    #[must_use]
    pub fn of(code: &[u8]) -> Self {
        Self(xxh3_128(code).to_be_bytes())
    }
}

impl InitialHash {
    /// The hash of this content: XXH3-128.
    #[must_use]
    pub fn of(content: &[u8]) -> Self {
        Self(xxh3_128(content).to_be_bytes())
    }
}

impl From<ContentHash> for PieceHash {
    fn from(hash: ContentHash) -> Self {
        let mut bytes = hash.to_le_bytes();
        bytes.reverse();
        Self(bytes)
    }
}

impl From<PieceHash> for ContentHash {
    /// In an image of the first version this value is not a content hash, but compares like one.
    fn from(hash: PieceHash) -> Self {
        let mut bytes = hash.to_bytes();
        bytes.reverse();
        Self::from_le_bytes(bytes)
    }
}

/// How the pieces of one image are hashed, and under which key.
///
/// The key differs from checkpoint to checkpoint, so that an application cannot prepare content with
/// equal hashes; an incremental image takes its parent's, so that hashes can be compared. It is
/// kept in the manifest and is no secret once the image can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashKey {
    /// [`crate::content`]: what this version writes. The same on a GPU.
    Content(ContentKey),
    /// XXH3-128 with this seed: images of format version 1.
    Xxh3(u64),
}

impl HashKey {
    /// The algorithm's number in the format, and the key's bytes, to hand on to another process.
    #[must_use]
    pub fn to_parts(self) -> (u32, [u8; 16]) {
        match self {
            Self::Content(key) => (CONTENT, key.to_bytes()),
            Self::Xxh3(seed) => (XXH3, u128::from(seed).to_le_bytes()),
        }
    }

    /// Makes a key from the parts that [`to_parts`](Self::to_parts) gave.
    ///
    /// # Errors
    /// [`ImageError::Unsupported`] for an algorithm that this version does not know.
    pub fn from_parts(algorithm: u32, key: [u8; 16]) -> Result<Self, ImageError> {
        match algorithm {
            CONTENT => Ok(Self::Content(ContentKey::from_bytes(key))),
            XXH3 => Ok(Self::Xxh3(u128::from_le_bytes(key) as u64)),
            _ => Err(ImageError::Unsupported { what: format!("hash algorithm {algorithm}") }),
        }
    }

    /// Makes a hasher for this key. Making a hasher takes longer than hashing a short piece.
    #[must_use]
    pub fn hasher(self) -> Hasher {
        match self {
            Self::Content(key) => Hasher(Algorithm::Content(Box::new(key.schedule()))),
            Self::Xxh3(seed) => Hasher(Algorithm::Xxh3(seed)),
        }
    }

    /// The hash of one piece's content. For many, [`hasher`](Self::hasher) is made once.
    #[must_use]
    pub fn hash(self, content: &[u8]) -> PieceHash {
        self.hasher().hash(content)
    }
}

impl From<ContentKey> for HashKey {
    fn from(key: ContentKey) -> Self {
        Self::Content(key)
    }
}

/// Numbers of `HashAlgorithm` in `proto/image.proto`.
const XXH3: u32 = 1;
const CONTENT: u32 = 2;

/// Hashes the pieces of one image.
#[derive(Debug)]
pub struct Hasher(Algorithm);

#[derive(Debug)]
enum Algorithm {
    Content(Box<Schedule>),
    Xxh3(u64),
}

impl Hasher {
    /// The hash of a piece's content.
    #[must_use]
    pub fn hash(&self, content: &[u8]) -> PieceHash {
        match &self.0 {
            Algorithm::Content(schedule) => schedule.hash(content).into(),
            Algorithm::Xxh3(seed) => PieceHash(xxh3_128_with_seed(content, *seed).to_be_bytes()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_shown_as_xxhsum_shows_it() {
        // `printf '' | xxhsum -H2`
        assert_eq!(CodeHash::of(b"").to_string(), "99aa06d3014798d86001c324468d497f");
    }

    #[test]
    fn a_shown_hash_reads_back() {
        let hash = CodeHash::of(b"code");
        assert_eq!(hash.to_string().parse(), Ok(hash));
    }

    #[test]
    fn only_32_lowercase_digits_are_a_hash() {
        for text in [
            "",
            "+9aa06d3014798d86001c324468d497",
            "+99aa06d3014798d86001c324468d49f",
            "99AA06d3014798d86001c324468d497f",
            "99aa06d3014798d86001c324468d497f0",
        ] {
            assert_eq!(text.parse::<CodeHash>(), Err(NotHex128), "{text:?}");
        }
    }

    #[test]
    fn the_key_changes_the_hash() {
        assert_ne!(HashKey::Xxh3(1).hash(b"x"), HashKey::Xxh3(2).hash(b"x"));
    }

    #[test]
    fn a_key_is_the_same_after_it_was_handed_on() {
        for key in [HashKey::Xxh3(u64::MAX - 5), HashKey::Content(ContentKey::from_bytes(*b"sixteen bytes of"))] {
            let (algorithm, bytes) = key.to_parts();
            assert_eq!(HashKey::from_parts(algorithm, bytes).unwrap(), key);
        }
        assert!(HashKey::from_parts(0, [0; 16]).is_err());
    }

    #[test]
    fn a_hash_that_a_device_made_is_a_pieces_hash_and_is_shown_alike() {
        let key = ContentKey::from_bytes([5; 16]);
        let made = key.schedule().hash(b"content");
        let piece = PieceHash::from(made);
        assert_eq!(piece, HashKey::from(key).hash(b"content"));
        assert_eq!(piece.to_string(), made.to_string());
        assert_eq!(ContentHash::from(piece), made);
    }
}
