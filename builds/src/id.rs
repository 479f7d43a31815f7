//! The name of a build.

use std::fmt;
use std::str::FromStr;

use sha2::{Digest, Sha256};

/// The name of a build: the first 16 bytes of the SHA-256 of what `sha256sum` prints for its libraries, each a line of the hash of
/// the file, two spaces and the file's name, in the order of [`LIBRARIES`](crate::LIBRARIES). It is written as 32 hexadecimal
/// digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BuildId([u8; 16]);

impl BuildId {
    /// The name with these bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes of the name.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// The name of a build with these libraries, each its name and the hash of its content.
    pub(crate) fn of<'a>(libraries: impl IntoIterator<Item = (&'a str, [u8; 32])>) -> Self {
        let mut all = Sha256::new();
        for (name, hash) in libraries {
            let hash: String = hash.iter().map(|it| format!("{it:02x}")).collect();
            all.update(format!("{hash}  {name}\n"));
        }
        let mut id = [0; 16];
        id.copy_from_slice(&all.finalize()[..16]);
        Self(id)
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that names no build.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} names no build, whose name has 32 hexadecimal digits")]
pub struct NoBuildId(String);

impl FromStr for BuildId {
    type Err = NoBuildId;

    fn from_str(text: &str) -> Result<Self, NoBuildId> {
        let wrong = || NoBuildId(text.to_owned());
        // One build has one name: only lower case.
        if text.len() != 32 || !text.bytes().all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(wrong());
        }
        u128::from_str_radix(text, 16).map(|it| Self(it.to_be_bytes())).map_err(|_| wrong())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_it_is_written() {
        let id = BuildId::from_bytes(std::array::from_fn(|at| at as u8 * 17));
        assert_eq!(id.to_string(), "00112233445566778899aabbccddeeff");
        assert_eq!(id.to_string().parse::<BuildId>().unwrap(), id);
        for text in [
            "",
            "0011",
            "00112233445566778899AABBCCDDEEFF",
            "00112233445566778899aabbccddeef/",
            "é0112233445566778899aabbccddeef",
        ] {
            assert!(text.parse::<BuildId>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_name_depends_on_each_librarys_content_and_name() {
        let id = |of: &[(&'static str, u8)]| BuildId::of(of.iter().map(|(name, byte)| (*name, [*byte; 32])));
        let one = id(&[("a", 1), ("b", 2)]);
        for other in [&[("a", 1)][..], &[("a", 1), ("b", 3)], &[("a", 1), ("c", 2)], &[("a", 2), ("b", 1)]] {
            assert_ne!(id(other), one);
        }
    }
}
