//! The digests of chunks on a processor: with AVX2 where it has that, else a word at a time.

use super::dimensions::{CHUNK_WORDS, COLUMN_WORDS, COLUMNS, LANES, ROW, UNIT};

/// Words of 64 bits in a row: each holds two of the message's words.
const WIDTH: usize = ROW / 8;
/// Words that are taken at once.
const BLOCK: usize = 4;
/// Rows that are taken together, so that sums are fetched and put back less often.
const BATCH: usize = 2;

/// Of each lane and column two sums, of the first and the second half of its units.
type Sums = [[u64; WIDTH]; LANES];

/// Both keys, two words in one, as the loops take them.
pub(super) struct Keys {
    /// Entry i is key words 2i to 2i + 3, twice: lane l of round r takes entry 2r + l.
    column: [[u64; BLOCK]; COLUMN_WORDS / 2 - 1],
    chunk: [u64; CHUNK_WORDS / 2],
}

impl Keys {
    pub(super) fn new(column: &[u32; COLUMN_WORDS], chunk: &[u32; CHUNK_WORDS]) -> Self {
        let pair = |words: &[u32], i: usize| u64::from(words[2 * i]) | u64::from(words[2 * i + 1]) << 32;
        Self {
            column: std::array::from_fn(|i| std::array::from_fn(|j| pair(column, i + j % 2))),
            chunk: std::array::from_fn(|i| pair(chunk, i)),
        }
    }

    /// The digest of a chunk, which is not longer than one.
    pub(super) fn digest(&self, chunk: &[u8]) -> [u64; LANES] {
        #[cfg(target_arch = "x86_64")]
        if let Some(digest) = wide::digest(self, chunk) {
            return digest;
        }
        plain(self, chunk)
    }
}

/// A word at a time.
fn plain(keys: &Keys, chunk: &[u8]) -> [u64; LANES] {
    digest(keys, chunk, absorb, fold)
}

/// A product of NH: of the sums, modulo 2^32, of two words with two words of the key.
#[inline(always)]
fn product(words: u64, key: u64) -> u64 {
    let low = (words as u32).wrapping_add(key as u32);
    let high = ((words >> 32) as u32).wrapping_add((key >> 32) as u32);
    u64::from(low) * u64::from(high)
}

/// A digest by these two loops: one adds the products of some rows to the sums, given the key from the first row's on;
/// the other is the second level, over the columns' sums.
#[inline(always)]
fn digest(
    keys: &Keys,
    chunk: &[u8],
    absorb: impl Fn(&mut Sums, &[[u8; ROW]], &[[u64; BLOCK]]),
    fold: impl Fn(&[[u64; LANES]], &[u64]) -> [u64; LANES],
) -> [u64; LANES] {
    let mut sums = [[0; WIDTH]; LANES];
    let (rows, rest) = chunk.as_chunks::<ROW>();
    for (batch, rows) in rows.chunks(BATCH).enumerate() {
        absorb(&mut sums, rows, &keys.column[2 * BATCH * batch..]);
    }
    for (at, bytes) in rest.chunks(UNIT).enumerate() {
        let mut padded = [0; UNIT];
        padded[..bytes.len()].copy_from_slice(bytes);
        for (half, word) in padded.as_chunks::<8>().0.iter().enumerate() {
            for (lane, sums) in sums.iter_mut().enumerate() {
                let product = product(u64::from_le_bytes(*word), keys.column[2 * rows.len() + lane][half]);
                sums[2 * at + half] = sums[2 * at + half].wrapping_add(product);
            }
        }
    }
    // Columns beyond the end of a chunk of less than a row have no part in the second level.
    let there = if rows.is_empty() { rest.len().div_ceil(UNIT) } else { COLUMNS };
    let mut columns = [[0; LANES]; COLUMNS];
    for (lane, sums) in sums.iter().enumerate() {
        for (column, halves) in columns.iter_mut().zip(sums.as_chunks::<2>().0) {
            column[lane] = halves[0].wrapping_add(halves[1]);
        }
    }
    fold(&columns[..there], &keys.chunk)
}

fn absorb(sums: &mut Sums, rows: &[[u8; ROW]], keys: &[[u64; BLOCK]]) {
    for (row, keys) in rows.iter().zip(keys.chunks(2).zip(keys[2..].chunks(2))) {
        let keys = [keys.0[0], keys.0[1], keys.1[0], keys.1[1]];
        for (at, word) in row.as_chunks::<8>().0.iter().enumerate() {
            for (sums, key) in sums.iter_mut().zip(&keys) {
                sums[at] = sums[at].wrapping_add(product(u64::from_le_bytes(*word), key[at % 2]));
            }
        }
    }
}

fn fold(columns: &[[u64; LANES]], key: &[u64]) -> [u64; LANES] {
    std::array::from_fn(|lane| {
        let products = columns.as_flattened().iter().zip(&key[lane..]).map(|(words, key)| product(*words, *key));
        products.fold(0, u64::wrapping_add)
    })
}

/// The same loops with AVX2, four words at a time.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod wide {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_add_epi32, _mm256_add_epi64, _mm256_loadu_si256, _mm256_mul_epu32,
        _mm256_setzero_si256, _mm256_srli_epi64, _mm256_storeu_si256,
    };

    use super::super::dimensions::{LANES, ROW};
    use super::{BLOCK, Keys, Sums};

    /// How far ahead memory is fetched.
    const AHEAD: usize = 8 * ROW;

    /// `None` on a processor without AVX2.
    pub(super) fn digest(keys: &Keys, chunk: &[u8]) -> Option<[u64; LANES]> {
        // SAFETY: the processor has the feature, or it is not called.
        std::arch::is_x86_feature_detected!("avx2").then(|| unsafe { avx2(keys, chunk) })
    }

    #[target_feature(enable = "avx2")]
    fn avx2(keys: &Keys, chunk: &[u8]) -> [u64; LANES] {
        super::digest(keys, chunk, |sums, rows, keys| absorb(sums, rows, keys), |columns, key| fold(columns, key))
    }

    #[target_feature(enable = "avx2")]
    fn load(words: &[u64; BLOCK]) -> __m256i {
        // SAFETY: 32 bytes, at any alignment.
        unsafe { _mm256_loadu_si256(words.as_ptr().cast()) }
    }

    #[target_feature(enable = "avx2")]
    fn load_bytes(bytes: &[u8; 8 * BLOCK]) -> __m256i {
        // SAFETY: 32 bytes, at any alignment.
        unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
    }

    /// Has the processor fetch what comes some rows later, which it does not by itself: each page begins anew for it.
    #[target_feature(enable = "avx2")]
    fn fetch(bytes: &[u8; 8 * BLOCK]) {
        _mm_prefetch::<_MM_HINT_T0>(bytes.as_ptr().wrapping_add(AHEAD).cast());
    }

    #[target_feature(enable = "avx2")]
    fn store(words: &mut [u64; BLOCK], value: __m256i) {
        // SAFETY: 32 bytes, at any alignment.
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), value) }
    }

    /// The sums and the products of NH of four pairs of words.
    #[target_feature(enable = "avx2")]
    fn add_products(sums: __m256i, words: __m256i, key: __m256i) -> __m256i {
        let keyed = _mm256_add_epi32(words, key);
        _mm256_add_epi64(sums, _mm256_mul_epu32(keyed, _mm256_srli_epi64::<32>(keyed)))
    }

    #[target_feature(enable = "avx2")]
    fn absorb(sums: &mut Sums, rows: &[[u8; ROW]], keys: &[[u64; BLOCK]]) {
        let [s0, s1, s2, s3] = sums;
        let sums = s0.as_chunks_mut().0.iter_mut().zip(s1.as_chunks_mut().0);
        let sums = sums.zip(s2.as_chunks_mut().0.iter_mut().zip(s3.as_chunks_mut().0));
        for (block, ((s0, s1), (s2, s3))) in sums.enumerate() {
            let (mut a0, mut a1, mut a2, mut a3) = (load(s0), load(s1), load(s2), load(s3));
            for (row, keys) in rows.iter().zip(keys.windows(LANES).step_by(2)) {
                let words = &row.as_chunks().0[block];
                fetch(words);
                let words = load_bytes(words);
                a0 = add_products(a0, words, load(&keys[0]));
                a1 = add_products(a1, words, load(&keys[1]));
                a2 = add_products(a2, words, load(&keys[2]));
                a3 = add_products(a3, words, load(&keys[3]));
            }
            store(s0, a0);
            store(s1, a1);
            store(s2, a2);
            store(s3, a3);
        }
    }

    #[target_feature(enable = "avx2")]
    fn fold(columns: &[[u64; LANES]], key: &[u64]) -> [u64; LANES] {
        let mut sums = [_mm256_setzero_si256(); LANES];
        for (column, key) in columns.iter().zip(key.windows(BLOCK + LANES - 1).step_by(LANES)) {
            let words = load(column);
            for (sum, key) in sums.iter_mut().zip(key.windows(BLOCK)) {
                let Some(key) = key.first_chunk() else { continue };
                *sum = add_products(*sum, words, load(key));
            }
        }
        sums.map(|sum| {
            let mut parts = [0; BLOCK];
            store(&mut parts, sum);
            parts.into_iter().fold(0, u64::wrapping_add)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CHUNK, ContentKey, Schedule};
    use super::*;
    use proptest::prelude::*;

    /// NH as the first page says it, word for word.
    fn said(schedule: &Schedule, chunk: &[u8]) -> [u64; LANES] {
        let absorb = |sums: &mut [u64; LANES], message: &[u32], key: &[u32]| {
            for (lane, sum) in sums.iter_mut().enumerate() {
                for (words, key) in message.as_chunks::<2>().0.iter().zip(key[2 * lane..].as_chunks::<2>().0) {
                    let (left, right) = (words[0].wrapping_add(key[0]), words[1].wrapping_add(key[1]));
                    *sum = sum.wrapping_add(u64::from(left) * u64::from(right));
                }
            }
        };
        let mut columns = [[0; LANES]; COLUMNS];
        for (unit, bytes) in chunk.chunks(UNIT).enumerate() {
            let mut padded = [0; UNIT];
            padded[..bytes.len()].copy_from_slice(bytes);
            let words: Vec<u32> = padded.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            absorb(&mut columns[unit % COLUMNS], &words, &schedule.column[unit / COLUMNS * 4..]);
        }
        let mut digest = [0; LANES];
        for (t, column) in columns[..chunk.len().div_ceil(UNIT).min(COLUMNS)].iter().enumerate() {
            let words: Vec<u32> = column.iter().flat_map(|sum| [*sum as u32, (sum >> 32) as u32]).collect();
            absorb(&mut digest, &words, &schedule.chunk[2 * LANES * t..]);
        }
        digest
    }

    fn check(key: [u8; 16], chunk: &[u8]) {
        let schedule = ContentKey::from_bytes(key).schedule();
        let expected = said(&schedule, chunk);
        assert_eq!(plain(&schedule.keys, chunk), expected, "{} bytes", chunk.len());
        assert_eq!(schedule.keys.digest(chunk), expected, "{} bytes, wide", chunk.len());
    }

    #[test]
    fn lengths_around_all_boundaries_have_the_digest_that_is_said() {
        let content: Vec<u8> = (0..CHUNK).map(|i| (i * i + i / 251) as u8).collect();
        for boundary in [0, UNIT, ROW, BATCH * ROW, (BATCH + 1) * ROW, CHUNK - ROW, CHUNK] {
            for length in boundary.saturating_sub(17)..=(boundary + 17).min(CHUNK) {
                check([7; 16], &content[..length]);
            }
        }
        check([0xff; 16], &vec![0xff; CHUNK]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_chunk_has_the_digest_that_is_said(
            key: [u8; 16], length in 0..=CHUNK, seed: u64, at in any::<prop::sample::Index>(), few: [u8; 64],
        ) {
            let mut state = seed | 1;
            let mut chunk: Vec<u8> = (0..length).map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            }).collect();
            if length > few.len() {
                let at = at.index(length - few.len());
                chunk[at..at + few.len()].copy_from_slice(&few);
            }
            check(key, &chunk);
        }
    }

    /// `cargo test -p rekindle-images --release -- --ignored --nocapture speed`
    #[test]
    #[ignore = "measures"]
    fn speed() {
        let schedule = ContentKey::from_bytes([1; 16]).schedule();
        let content: Vec<u8> = (0..64_u32 << 20).map(|i| (i ^ (i >> 9)) as u8).collect();
        let best = |what: &str, hash: &dyn Fn() -> u64| {
            let once = || {
                let began = std::time::Instant::now();
                std::hint::black_box(hash());
                began.elapsed().as_secs_f64()
            };
            let seconds = (0..8).map(|_| once()).fold(f64::INFINITY, f64::min);
            println!("{what}: {:.1} GB/s", content.len() as f64 / seconds / 1e9);
        };
        best("wide", &|| schedule.hash(&content).0 as u64);
        best("plain", &|| {
            content.chunks(CHUNK).map(|chunk| plain(&schedule.keys, chunk)[0]).fold(0, u64::wrapping_add)
        });
        best("xxh3-128", &|| xxhash_rust::xxh3::xxh3_128(&content) as u64);
    }
}
