//! A piece of content as it is stored.
//!
//! ```text
//!   sealed for ("piece", hash):  0 │ content              hash: of the content, under the store's key
//!                                1 │ content, by zstd
//! ```

use crate::StoreError;
use crate::hash::Hash;
use crate::key::Keys;
use crate::seal::Sealer;

/// The longest piece, in bytes: the image's own with its padding, or what [`crate::cut`] makes.
pub(crate) const MAX_LENGTH: u64 = rekindle_images::limits::MAX_PIECE_LENGTH + rekindle_images::BLOCK;

const PLAIN: u8 = 0;
const ZSTD: u8 = 1;
/// More time finds hardly more in the memory of programs.
const LEVEL: i32 = 1;
/// So much of a piece is compressed to see whether it pays.
const SAMPLE: usize = 64 << 10;

/// Makes pieces of content and content of pieces, for one store.
pub(crate) struct Coder {
    name: [u8; 32],
    sealer: Sealer,
}

impl Coder {
    pub(crate) fn new(keys: &Keys, encrypted: bool) -> Self {
        Self { name: keys.name, sealer: Sealer::new(keys, encrypted) }
    }

    pub(crate) fn sealer(&self) -> &Sealer {
        &self.sealer
    }

    /// The hash by which content is named.
    pub(crate) fn hash(&self, content: &[u8]) -> Hash {
        Hash::of(&self.name, content)
    }

    /// The hash that names something else.
    pub(crate) fn name_of(&self, parts: &[&[u8]]) -> Hash {
        Hash::of_parts(&self.name, parts)
    }

    /// Content as it is stored.
    pub(crate) fn encode(&self, hash: &Hash, content: &[u8]) -> Result<Vec<u8>, StoreError> {
        let context: [&[u8]; 2] = [b"piece", &hash.to_bytes()];
        match compress(content) {
            Some(compressed) => self.sealer.seal(&context, &[&[ZSTD], &compressed]),
            None => self.sealer.seal(&context, &[&[PLAIN], content]),
        }
    }

    /// Whether a stored piece is as it was written.
    pub(crate) fn check_seal(&self, hash: &Hash, stored: Vec<u8>) -> Result<(), &'static str> {
        let opened = self.sealer.open(&[b"piece", &hash.to_bytes()], stored);
        opened.map(drop).map_err(|_| "it was changed, or made with another key")
    }

    /// The content of a stored piece: what was hashed, or an error that says what is wrong.
    pub(crate) fn decode(&self, hash: &Hash, length: u64, stored: Vec<u8>) -> Result<Vec<u8>, &'static str> {
        let context: [&[u8]; 2] = [b"piece", &hash.to_bytes()];
        let mut opened = self.sealer.open(&context, stored).map_err(|_| "it was changed, or made with another key")?;
        let content = match opened.first() {
            Some(&PLAIN) => {
                opened.drain(..1);
                opened
            }
            // It was written by who has the key, and gets no more memory than the piece has bytes.
            Some(&ZSTD) if length <= MAX_LENGTH => zstd::bulk::decompress(&opened[1..], length as usize)
                .map_err(|_| "it cannot be decompressed to the length that it should have")?,
            _ => return Err("it is stored in a way that this program does not know"),
        };
        if content.len() as u64 != length {
            return Err("it has another length");
        }
        if !self.hash(&content).is(hash) {
            return Err("its content does not match its hash");
        }
        Ok(content)
    }
}

/// The content compressed, if that pays.
fn compress(content: &[u8]) -> Option<Vec<u8>> {
    let pays = |compressed: usize, content: usize| compressed + content / 16 < content;
    let middle = (content.len() / 2).saturating_sub(SAMPLE / 2);
    let sample = &content[middle..content.len().min(middle + SAMPLE)];
    let compressed = zstd::bulk::compress(sample, LEVEL).ok()?;
    if !pays(compressed.len(), sample.len()) {
        return None;
    }
    let compressed = zstd::bulk::compress(content, LEVEL).ok()?;
    pays(compressed.len(), content.len()).then_some(compressed)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn coder(encrypted: bool) -> Coder {
        Coder::new(&Keys::derive(None), encrypted)
    }

    #[test]
    fn zeros_are_short_and_noise_is_as_long_as_it_was() {
        let coder = coder(false);
        let mut noise = vec![0; 1 << 20];
        blake3::Hasher::new().finalize_xof().fill(&mut noise);
        for (content, at_most) in [(vec![0; 1 << 20], 1000), (noise, (1 << 20) + 1 + Sealer::overhead())] {
            let hash = coder.hash(&content);
            let stored = coder.encode(&hash, &content).unwrap();
            assert!(stored.len() as u64 <= at_most, "{}", stored.len());
            assert_eq!(coder.decode(&hash, content.len() as u64, stored).unwrap(), content);
        }
    }

    proptest! {
        #[test]
        fn a_piece_is_read_as_it_was_or_not_at_all(
            content in proptest::collection::vec(0_u8..4, 0..3000), encrypted: bool, at: usize, change in 1_u8..,
        ) {
            let coder = coder(encrypted);
            let hash = coder.hash(&content);
            let mut stored = coder.encode(&hash, &content).unwrap();
            prop_assert_eq!(&coder.decode(&hash, content.len() as u64, stored.clone()).unwrap(), &content);
            prop_assert!(coder.decode(&hash, content.len() as u64 + 1, stored.clone()).is_err());
            let at = at % stored.len();
            stored[at] ^= change;
            prop_assert!(coder.decode(&hash, content.len() as u64, stored).is_err());
        }
    }
}
