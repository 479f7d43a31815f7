//! Hashes and identifiers of 128 bits.

use std::fmt;
use std::str::FromStr;

use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

use crate::ImageError;
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
    /// The hash of a piece's content under the checkpoint's [`HashKey`].
    PieceHash
}

value128! {
    /// The hash of a code image's content, without a key: equal code has one name everywhere.
    CodeHash
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

/// The key under which the pieces of one image are hashed (the seed of XXH3-128).
///
/// It differs from checkpoint to checkpoint, so that an application cannot prepare content with
/// equal hashes; an incremental image takes its parent's, so that hashes can be compared. It is
/// kept in the manifest and is no secret once the image can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HashKey(u64);

impl HashKey {
    /// This key.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A new one, from the kernel's random numbers.
    ///
    /// # Errors
    /// The kernel gave no random numbers.
    pub fn random() -> Result<Self, ImageError> {
        sys::random_bytes().map(|bytes| Self(u64::from_ne_bytes(bytes)))
    }

    /// The number behind it, to hand on to another process.
    #[must_use]
    pub const fn seed(self) -> u64 {
        self.0
    }

    /// The hash of a piece's content.
    #[must_use]
    pub fn hash(self, content: &[u8]) -> PieceHash {
        PieceHash(xxh3_128_with_seed(content, self.0).to_be_bytes())
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
        assert_ne!(HashKey::new(1).hash(b"x"), HashKey::new(2).hash(b"x"));
    }
}
