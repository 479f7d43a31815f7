//! Compression of pieces, each by itself.
//!
//! A piece that does not shrink by a sixteenth is stored as it is. A reader knows a piece's length before decompressing it,
//! and no stored bytes can make the piece longer. A piece's hash is the hash of its content.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::limits::BLOCK;
use crate::manifest::Compression;

/// The fastest of zstd's levels that are meant for everything; slower ones gain little on memory.
const ZSTD_LEVEL: i32 = 1;

/// How many bytes are written before `auto` decides: enough that a disk's latency is not taken for its speed.
const MEASURED: u64 = 16 << 20;

/// How many bytes `auto` compresses to find out what that gives.
const SAMPLE: usize = 1 << 20;

/// Whether and how the pieces of an image are to be compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CompressionChoice {
    /// Not at all.
    #[default]
    Off,
    /// By LZ4: fast, also to read.
    Lz4,
    /// By Zstandard: smaller.
    Zstd,
    /// The method that makes the image durable soonest, as measured: the time to write the first 16 MiB of each process, and
    /// the time to compress a sample of them. No compression where the disk is faster than compression.
    Auto,
}

impl CompressionChoice {
    const ALL: [Self; 4] = [Self::Off, Self::Lz4, Self::Zstd, Self::Auto];

    /// Its name, as in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for CompressionChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A text that names no [`CompressionChoice`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no compression: it is off, lz4, zstd or auto")]
pub struct NoCompression(String);

impl FromStr for CompressionChoice {
    type Err = NoCompression;

    fn from_str(text: &str) -> Result<Self, NoCompression> {
        Self::ALL.into_iter().find(|it| it.as_str() == text).ok_or_else(|| NoCompression(text.to_owned()))
    }
}

/// The content in fewer bytes; `None` if it does not shrink enough.
pub(crate) fn compress(method: Compression, content: &[u8]) -> Option<Vec<u8>> {
    let compressed = match method {
        Compression::None => return None,
        Compression::Lz4 => lz4_flex::block::compress(content),
        Compression::Zstd => zstd::bulk::compress(content, ZSTD_LEVEL).ok()?,
    };
    let blocks = |length: usize| (length as u64).div_ceil(BLOCK);
    let shrinks = compressed.len() <= content.len() - content.len() / 16;
    (shrinks && blocks(compressed.len()) < blocks(content.len())).then_some(compressed)
}

/// Fills `content` with what was compressed; `false` if that is not what is stored.
pub(crate) fn decompress(method: Compression, stored: &[u8], content: &mut [u8]) -> bool {
    let length = match method {
        Compression::None => return false,
        Compression::Lz4 => lz4_flex::block::decompress_into(stored, content).ok(),
        Compression::Zstd => zstd::bulk::decompress_to_buffer(stored, content).ok(),
    };
    length == Some(content.len())
}

/// Chooses a method while pieces are being written. Any number of threads may ask and tell.
#[derive(Debug, Default)]
pub(crate) struct Chooser {
    choice: CompressionChoice,
    written: AtomicU64,
    /// Nanoseconds.
    took: AtomicU64,
    chosen: OnceLock<Compression>,
}

impl Chooser {
    pub(crate) fn new(choice: CompressionChoice) -> Self {
        Self { choice, ..Self::default() }
    }

    /// For the next piece.
    pub(crate) fn method(&self) -> Compression {
        match self.choice {
            CompressionChoice::Off => Compression::None,
            CompressionChoice::Lz4 => Compression::Lz4,
            CompressionChoice::Zstd => Compression::Zstd,
            CompressionChoice::Auto => self.chosen.get().copied().unwrap_or_default(),
        }
    }

    /// A piece was written as it is, in this time. Who makes the measured bytes full waits, by `sync`, until they are
    /// durable.
    pub(crate) fn wrote<E>(
        &self,
        sync: impl FnOnce() -> Result<(), E>,
        content: &[u8],
        took: Duration,
    ) -> Result<(), E> {
        if self.choice != CompressionChoice::Auto || self.chosen.get().is_some() {
            return Ok(());
        }
        let took = self.took.fetch_add(took.as_nanos() as u64, Ordering::Relaxed) + took.as_nanos() as u64;
        let before = self.written.fetch_add(content.len() as u64, Ordering::Relaxed);
        let written = before + content.len() as u64;
        if before >= MEASURED || written < MEASURED {
            return Ok(());
        }
        let began = Instant::now();
        sync()?;
        let seconds = (Duration::from_nanos(took) + began.elapsed()).as_secs_f64();
        let sample = &content[..content.len().min(SAMPLE)];
        let measured = [Compression::Lz4, Compression::Zstd].map(|method| measure(method, sample));
        // Set once: only one thread comes here.
        let _ = self.chosen.set(choose(written as f64 / seconds, &measured));
        Ok(())
    }
}

/// The measured speed and ratio of a compression method.
#[derive(Debug, Clone, Copy)]
struct Measured {
    method: Compression,
    /// Bytes of content a second.
    speed: f64,
    /// Bytes after compression for each byte before.
    ratio: f64,
}

fn measure(method: Compression, sample: &[u8]) -> Measured {
    let began = Instant::now();
    let compressed = compress(method, sample);
    let seconds = began.elapsed().as_secs_f64().max(1e-9);
    let ratio = compressed.map_or(1.0, |it| it.len() as f64 / sample.len() as f64);
    Measured { method, speed: sample.len() as f64 / seconds, ratio }
}

/// The quickest way to have a byte on a disk that takes `written` bytes a second, if a thread compresses and then writes.
fn choose(written: f64, measured: &[Measured]) -> Compression {
    let plain = (Compression::None, 1.0 / written);
    let ways = measured.iter().map(|it| (it.method, 1.0 / it.speed + it.ratio / written));
    ways.fold(plain, |best, way| if way.1 < best.1 { way } else { best }).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const METHODS: [Compression; 2] = [Compression::Lz4, Compression::Zstd];

    #[test]
    fn what_shrinks_comes_back_and_what_does_not_is_left_alone() {
        let text = b"device memory ".repeat(5000);
        let mut state = 1_u64;
        let noise: Vec<u8> = (0..70_000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        for method in METHODS {
            let stored = compress(method, &text).unwrap();
            assert!(stored.len() < text.len() / 10);
            let mut content = vec![0; text.len()];
            assert!(decompress(method, &stored, &mut content) && content == text);
            assert_eq!(compress(method, &noise), None);
            // Less than a block cannot become fewer blocks.
            assert_eq!(compress(method, &text[..4096]), None);
            // Not as long as is said, in either direction.
            for length in [text.len() - 1, text.len() + 1] {
                assert!(!decompress(method, &stored, &mut vec![0; length]));
            }
        }
    }

    #[test]
    fn a_choice_has_its_name() {
        for choice in CompressionChoice::ALL {
            assert_eq!(choice.as_str().parse(), Ok(choice));
        }
        assert!("gzip".parse::<CompressionChoice>().unwrap_err().to_string().contains("off, lz4, zstd or auto"));
    }

    #[test]
    fn the_quickest_way_to_the_disk_is_taken() {
        let measured = |speed: [f64; 2], ratio: [f64; 2]| {
            [0, 1].map(|i| Measured { method: METHODS[i], speed: speed[i], ratio: ratio[i] })
        };
        let shrinks = measured([800e6, 400e6], [0.5, 0.3]);
        // A slow link, a disk, memory.
        assert_eq!(choose(100e6, &shrinks), Compression::Zstd);
        assert_eq!(choose(300e6, &shrinks), Compression::Lz4);
        assert_eq!(choose(3e9, &shrinks), Compression::None);
        // Compressing content that does not shrink is not worth the time on any disk.
        assert_eq!(choose(1e6, &measured([800e6, 400e6], [1.0, 1.0])), Compression::None);
    }

    #[test]
    fn it_is_decided_once_what_was_measured_is_written() {
        let chooser = Chooser::new(CompressionChoice::Auto);
        let content = vec![7; 4 << 20];
        let mut syncs = 0;
        for written in 1..=4 {
            assert_eq!((chooser.method(), syncs), (Compression::None, 0));
            // 4 MiB a second.
            let sync = || {
                syncs += 1;
                Ok::<_, ()>(())
            };
            chooser.wrote(sync, &content, Duration::from_secs(1)).unwrap();
            assert_eq!(chooser.chosen.get().is_some(), written == 4);
        }
        assert_eq!(syncs, 1);
        assert_ne!(chooser.method(), Compression::None);
        // A failed synchronization is reported: content that is not on the disk is no image.
        let chooser = Chooser::new(CompressionChoice::Auto);
        let wrote: Vec<_> = (0..4).map(|_| chooser.wrote(|| Err("lost"), &content, Duration::from_secs(1))).collect();
        assert_eq!(wrote, [Ok(()), Ok(()), Ok(()), Err("lost")]);
    }

    proptest! {
        #[test]
        fn nothing_that_is_stored_makes_a_reader_panic(
            stored in proptest::collection::vec(any::<u8>(), 0..200), length in 0_usize..10_000,
            at in any::<prop::sample::Index>(), byte: u8,
        ) {
            for method in METHODS {
                decompress(method, &stored, &mut vec![0; length]);
                // Most of it right.
                let mut good = compress(method, &b"device memory ".repeat(1000)).unwrap();
                let at = at.index(good.len());
                good[at] = byte;
                decompress(method, &good, &mut vec![0; length]);
                decompress(method, &good[..at], &mut vec![0; 14_000]);
            }
        }
    }
}
