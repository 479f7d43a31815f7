//! The hash by which pieces are named.

use std::fmt;
use std::str::FromStr;

/// A value of 256 bits, shown as 64 hexadecimal digits: BLAKE3 under the store's key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Hash([u8; 32]);

/// A text that is not 64 lower-case hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not 64 lowercase hexadecimal digits")]
pub struct NotHex256;

impl Hash {
    /// The hash of content under a key.
    pub(crate) fn of(key: &[u8; 32], content: &[u8]) -> Self {
        Self(*blake3::keyed_hash(key, content).as_bytes())
    }

    /// The hash of parts under a key; where one part ends matters.
    pub(crate) fn of_parts(key: &[u8; 32], parts: &[&[u8]]) -> Self {
        let mut hasher = blake3::Hasher::new_keyed(key);
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// Whether two are equal, in a time that does not say where they differ.
    pub(crate) fn is(&self, other: &Self) -> bool {
        blake3::Hash::from_bytes(self.0) == blake3::Hash::from_bytes(other.0)
    }

    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes, in the order in which they are shown.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 32] {
        self.0
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hash({self})")
    }
}

impl FromStr for Hash {
    type Err = NotHex256;

    fn from_str(text: &str) -> Result<Self, NotHex256> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(NotHex256),
        };
        if text.len() != 64 {
            return Err(NotHex256);
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Self(bytes))
    }
}

impl From<Hash> for String {
    fn from(hash: Hash) -> Self {
        hash.to_string()
    }
}

impl TryFrom<String> for Hash {
    type Error = NotHex256;

    fn try_from(text: String) -> Result<Self, NotHex256> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shown_hash_reads_back_and_nothing_else_does() {
        let hash = Hash::of(&[1; 32], b"content");
        assert_eq!(hash.to_string().parse(), Ok(hash));
        for text in ["", "0", &"0".repeat(63), &"0".repeat(65), &"G".repeat(64), &"A".repeat(64), &"ä".repeat(32)] {
            assert_eq!(text.parse::<Hash>(), Err(NotHex256), "{text:?}");
        }
    }

    #[test]
    fn the_key_and_the_bounds_of_parts_change_the_hash() {
        assert_ne!(Hash::of(&[1; 32], b"x"), Hash::of(&[2; 32], b"x"));
        assert_ne!(Hash::of_parts(&[1; 32], &[b"ab", b"c"]), Hash::of_parts(&[1; 32], &[b"a", b"bc"]));
    }
}
