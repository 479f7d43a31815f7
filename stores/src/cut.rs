//! Where content is cut into pieces.
//!
//! A data file of an image is cut where the image itself has pieces: the next image of the program has the same
//! pieces in another order. All else is cut where a rolling hash of the last 64 bytes says so: after bytes were put
//! in, cuts are soon at the same content again. The hash is keyed.

/// No cut is before this many bytes, unless the content ends.
pub(crate) const SHORTEST: usize = 512 << 10;
/// A cut is there at the latest.
pub(crate) const LONGEST: usize = 8 << 20;
/// Of so many places behind [`SHORTEST`], one is a cut on average: 2^20.
const MASK: u64 = ((1 << 20) - 1) << (64 - 20);
/// How many bytes the rolling hash remembers.
const WINDOW: usize = 64;

/// Chooses where to cut.
pub(crate) struct Cutter {
    table: [u64; 256],
}

impl Cutter {
    pub(crate) fn new(key: &[u8; 32]) -> Self {
        let mut bytes = [0; 256 * 8];
        blake3::Hasher::new_keyed(key).finalize_xof().fill(&mut bytes);
        let mut table = [0; 256];
        for (value, bytes) in table.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *value = u64::from_le_bytes(*bytes);
        }
        Self { table }
    }

    /// The length of the first piece of this content, of which the caller has at least [`LONGEST`] bytes unless it
    /// ends.
    pub(crate) fn first(&self, content: &[u8]) -> usize {
        if content.len() <= SHORTEST {
            return content.len();
        }
        let longest = content.len().min(LONGEST);
        let mut hash = 0_u64;
        for (at, byte) in content[..longest].iter().enumerate().skip(SHORTEST - WINDOW) {
            hash = (hash << 1).wrapping_add(self.table[usize::from(*byte)]);
            if at >= SHORTEST && hash & MASK == 0 {
                return at + 1;
            }
        }
        longest
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn random(length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        blake3::Hasher::new().finalize_xof().fill(&mut bytes);
        bytes
    }

    fn pieces<'a>(cutter: &Cutter, mut content: &'a [u8]) -> Vec<&'a [u8]> {
        let mut pieces = Vec::new();
        while !content.is_empty() {
            let (piece, rest) = content.split_at(cutter.first(content));
            pieces.push(piece);
            content = rest;
        }
        pieces
    }

    #[test]
    fn pieces_are_neither_short_nor_long() {
        let content = random(40 << 20);
        let pieces = pieces(&Cutter::new(&[1; 32]), &content);
        assert_eq!(pieces.concat(), content);
        let (_, but_last) = pieces.split_last().unwrap();
        assert!(but_last.iter().all(|it| (SHORTEST..=LONGEST).contains(&it.len())));
        assert!((10..60).contains(&pieces.len()), "{}", pieces.len());
    }

    #[test]
    fn bytes_put_in_change_few_pieces() {
        let cutter = Cutter::new(&[1; 32]);
        let content = random(40 << 20);
        let mut changed = content.clone();
        changed.splice((10 << 20)..(10 << 20), *b"seven b");
        let before: BTreeSet<_> = pieces(&cutter, &content).into_iter().collect();
        let new = pieces(&cutter, &changed).into_iter().filter(|it| !before.contains(it)).count();
        assert!((1..=2).contains(&new), "{new}");
    }

    #[test]
    fn another_key_cuts_elsewhere() {
        let content = random(20 << 20);
        let [one, other] = [1, 2].map(|key| pieces(&Cutter::new(&[key; 32]), &content).len());
        let first = |key| Cutter::new(&[key; 32]).first(&content);
        assert!(one != other || first(1) != first(2));
    }
}
