//! The hash of a piece, which also tells whether memory has changed: keyed, of 128 bits, the same to the bit on a GPU
//! (`ctx-worker/kernels/hash.cu`) and here.
//!
//! ```text
//!  content   ├─ chunk of 64 KiB ─┼─ chunk ─┼─ …  the last may be shorter
//!
//!  chunk     128 columns side by side: a column is every 128th unit of 16 bytes
//!              unit 0   unit 1  …  unit 127          column t: units t, t + 128, …, t + 31 × 128
//!              unit 128 …                            (a warp's loads are consecutive)
//!
//!  column    ──NH with the column key──► 256 bits    32 units, 512 bytes
//!  chunk     ──NH with the chunk key───► 256 bits    of its columns' 32 bytes each
//!  content   ──polynomial at a secret point of GF(2^127 - 1)──► 127 bits, with the length
//! ```
//!
//! # Why this
//!
//! A GPU reads 16 bytes in about the time in which it multiplies 50 pairs of 32-bit numbers. NH is the hash that needs
//! the fewest: half a multiply-add and one addition for a 32-bit word and 32 bits of hash, no carries between 64-bit
//! halves, no reduction. Four of them at once, with the key shifted by two words for each (Toeplitz), make 128 bits: 8
//! multiply-adds and 16 additions for 16 bytes. All threads use the same words of the column key at the same time, so
//! that those are constants of the instructions. Sums modulo 2^64 and values of polynomials do not depend on an order,
//! so a grid of any size gives the same hash.
//!
//! # How likely two contents have one hash
//!
//! For two contents that were chosen without knowing the key, of a length of N chunks at most: less than
//! 2^-128 + 2^-128 + 4N / (2^127 - 1), so 2^-114 for 64 MiB. One changed byte is no more and no less than any other
//! change.
//!
//! * NH: `NH(K, M) = sum of (k_2i + m_2i mod 2^32) (k_2i+1 + m_2i+1 mod 2^32) mod 2^64` has the same value for two
//!   different messages of one length with probability 2^-32 at most, and t such values under keys shifted by two words
//!   each are all the same with probability 2^-32t at most: J. Black, S. Halevi, H. Krawczyk, T. Krovetz, P. Rogaway,
//!   "UMAC: Fast and Secure Message Authentication", CRYPTO 1999, theorems 1 and 2. Different contents of one length
//!   differ in a column, and unless the four values of that column are the same, the chunks' NH has different messages.
//!   What is not there (units and columns beyond the end) has no term in the sum; that is the same for two contents of
//!   one length.
//! * Two contents whose chunks' values differ, or whose lengths do, are two different polynomials of degree 4N at most,
//!   which agree in at most 4N points.
//!
//! The key is the snapshot's own and secret while it is used: a party that knows it, or hashes made under it, can make
//! contents that collide. The key is spread out with ChaCha20, so all of the above holds as far as ChaCha20's output is like
//! random bits.

mod chacha;
mod dimensions;
mod field;
mod nh;

use std::fmt;

pub use dimensions::{CHUNK, DIGEST, THREADS};

use self::dimensions::{CHUNK_WORDS, COLUMN_WORDS, COLUMNS, LANES};
use crate::{ImageError, sys};

/// The key of a snapshot's hashes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ContentKey([u8; 16]);

impl ContentKey {
    /// This key.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// A new one, from the kernel's random numbers.
    ///
    /// # Errors
    /// The kernel gave no random numbers.
    pub fn random() -> Result<Self, ImageError> {
        sys::random_bytes().map(Self)
    }

    /// Its bytes, to hand on to another process.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// The key as hashing needs it.
    #[must_use]
    pub fn schedule(&self) -> Schedule {
        Schedule::new(self)
    }
}

impl fmt::Debug for ContentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ContentKey(secret)")
    }
}

/// The hash of a content under a [`ContentKey`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContentHash(u128);

impl ContentHash {
    /// As a GPU writes it: 16 bytes, the lowest first.
    #[must_use]
    pub const fn from_le_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_le_bytes(bytes))
    }

    /// As a GPU writes it.
    #[must_use]
    pub const fn to_le_bytes(self) -> [u8; 16] {
        self.0.to_le_bytes()
    }
}

impl fmt::Display for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ContentHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ContentHash({self})")
    }
}

/// A key, spread out over all words that hashing uses.
pub struct Schedule {
    column: [u32; COLUMN_WORDS],
    chunk: [u32; CHUNK_WORDS],
    point: u128,
    keys: Box<nh::Keys>,
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Schedule(secret)")
    }
}

impl Schedule {
    /// Bytes of [`Schedule::bytes`].
    pub const BYTES: usize = 4 * (COLUMN_WORDS + CHUNK_WORDS) + 16 * (COLUMNS + 4);

    fn new(key: &ContentKey) -> Self {
        let mut words = chacha::Words::new(&key.0);
        let column = std::array::from_fn(|_| words.next());
        let chunk = std::array::from_fn(|_| words.next());
        let point = (0..4).fold(0, |point, _| point << 32 | u128::from(words.next()));
        let keys = Box::new(nh::Keys::new(&column, &chunk));
        Self { column, chunk, point: field::reduce(point), keys }
    }

    /// The hash of a content that is all there.
    #[must_use]
    pub fn hash(&self, content: &[u8]) -> ContentHash {
        let digests: Vec<[u64; LANES]> = content.chunks(CHUNK).map(|chunk| self.keys.digest(chunk)).collect();
        let value = digests.iter().rev().flat_map(|digest| digest.iter().rev());
        let value = value.fold(0, |sum, word| field::multiply(field::add(sum, u128::from(*word)), self.point));
        ContentHash(field::add(value, content.len() as u128))
    }

    /// The bytes that the kernels read: the words of both keys, and powers of the point.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut powers = Vec::with_capacity(COLUMNS + 4);
        let square = field::multiply(self.point, self.point);
        let fourth = field::multiply(square, square);
        let mut power = self.point;
        for _ in 0..COLUMNS {
            powers.push(power);
            power = field::multiply(power, fourth);
        }
        let step = (0..COLUMNS).fold(1, |step, _| field::multiply(step, fourth));
        powers.extend([step, self.point, square, field::multiply(square, self.point)]);
        let words = self.column.iter().chain(&self.chunk).flat_map(|word| word.to_le_bytes());
        words.chain(powers.iter().flat_map(|power| power.to_le_bytes())).collect()
    }

    /// The words of the column key alone, as a kernel's parameter.
    #[must_use]
    pub fn column_bytes(&self) -> Vec<u8> {
        self.column.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::dimensions::{ROW, UNIT};
    use super::*;

    #[test]
    fn every_byte_counts_and_so_does_the_length() {
        let schedule = ContentKey::from_bytes([7; 16]).schedule();
        let mut content: Vec<u8> = (0..2 * CHUNK + 3 * ROW + 5).map(|i| ((i * 31) >> 3) as u8).collect();
        let whole = schedule.hash(&content);
        for at in (0..content.len()).step_by(997).chain([content.len() - 1]) {
            content[at] ^= 0x10;
            assert_ne!(schedule.hash(&content), whole, "byte {at}");
            content[at] ^= 0x10;
        }
        assert_eq!(schedule.hash(&content), whole);
        // Zeros at the end are no padding.
        let lengths = [0, 1, 15, 16, 17, ROW, ROW + 1, CHUNK - 1, CHUNK, CHUNK + 1];
        let mut seen: Vec<_> = lengths.iter().map(|length| schedule.hash(&vec![0; *length])).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), lengths.len());
    }

    #[test]
    fn the_kernels_get_as_many_bytes_as_is_said() {
        assert_eq!(ContentKey::from_bytes([1; 16]).schedule().bytes().len(), Schedule::BYTES);
    }

    #[test]
    fn a_place_counts() {
        let schedule = ContentKey::from_bytes([1; 16]).schedule();
        let mut content = vec![0; 3 * CHUNK];
        let mut seen = Vec::new();
        for at in [0, 4, 8, 12, UNIT, ROW, 5 * ROW + UNIT, CHUNK, 2 * CHUNK] {
            content[at] = 1;
            seen.push(schedule.hash(&content));
            content[at] = 0;
        }
        seen.sort();
        assert!(seen.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn another_key_is_another_hash() {
        let of = |key| ContentKey::from_bytes([key; 16]).schedule().hash(b"content");
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
