//! Decompression of a fatbin's entries, bounded by the size that the entry's header announces.

use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

use super::CodeError;

/// Bytes unpacked between two looks at the size.
const STEP: usize = 1 << 20;

/// How an entry's payload is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Compression {
    /// A single raw LZ4 block.
    Lz4,
    /// A single zstd frame.
    Zstd,
}

/// Unpacks `packed` to exactly `size` bytes, where `size` comes from the entry's header and may be
/// a lie: no more memory is taken than `packed` can really unpack to, nor than about twice `limit`.
pub(super) fn unpack(compression: Compression, packed: &[u8], size: u64, limit: usize) -> Result<Vec<u8>, CodeError> {
    let size = usize::try_from(size).ok().filter(|&size| size <= limit).ok_or(CodeError::TooLarge {
        what: "unpacked entry",
        size,
        limit: limit as u64,
    })?;
    let unpacked = match compression {
        Compression::Lz4 => lz4(packed, size)?,
        Compression::Zstd => zstd(packed, size)?,
    };
    if unpacked.len() != size {
        return Err(CodeError::Unpack(format!("{} bytes came out, {size} were announced", unpacked.len())));
    }
    Ok(unpacked)
}

/// Unpacks a single raw LZ4 block, without a frame or a length in front.
fn lz4(packed: &[u8], size: usize) -> Result<Vec<u8>, CodeError> {
    // A byte of LZ4 stands for at most 255 bytes, so a header that announces more lies, and
    // nothing need be allocated to find that out.
    if size / 255 > packed.len() {
        return Err(CodeError::Unpack(format!(
            "{} bytes of LZ4 cannot hold the {size} that were announced",
            packed.len()
        )));
    }
    let mut unpacked = vec![0; size];
    let written = lz4_flex::block::decompress_into(packed, &mut unpacked)
        .map_err(|error| CodeError::Unpack(error.to_string()))?;
    unpacked.truncate(written);
    Ok(unpacked)
}

/// Unpacks a single zstd frame.
fn zstd(mut packed: &[u8], size: usize) -> Result<Vec<u8>, CodeError> {
    let failed = |error: ruzstd::decoding::errors::FrameDecoderError| CodeError::Unpack(error.to_string());
    let mut decoder = FrameDecoder::new();
    // nvcc's frames are single segments, whose window is all of the content.
    decoder.set_max_window_size(size.max(STEP) as u64);
    decoder.init(&mut packed).map_err(failed)?;
    let mut unpacked = Vec::new();
    while !decoder.is_finished() {
        decoder.decode_blocks(&mut packed, BlockDecodingStrategy::UptoBytes(STEP)).map_err(failed)?;
        // Counting also what the decoder holds back as its window, lest that grow without end.
        if unpacked.len() + decoder.can_collect() > size {
            break;
        }
        decoder.collect_to_writer(&mut unpacked).map_err(|error| CodeError::Unpack(error.to_string()))?;
    }
    if decoder.can_collect() > 0 {
        return Err(CodeError::Unpack(format!("more came out than the {size} bytes that were announced")));
    }
    Ok(unpacked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lying_size_is_refused_before_it_is_allocated() {
        let limit = 1 << 30;
        for compression in [Compression::Lz4, Compression::Zstd] {
            let error = unpack(compression, &[0; 16], u64::MAX, limit).unwrap_err();
            assert!(matches!(error, CodeError::TooLarge { .. }));
            let error = unpack(compression, &[0; 16], 1 << 29, limit).unwrap_err();
            assert!(matches!(error, CodeError::Unpack(_)));
        }
    }

    #[test]
    fn a_bomb_stops_at_the_announced_size() {
        // A frame with a window of 1 KiB and RLE blocks of 1 KiB of zeros, without an end.
        let mut bomb = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x00];
        for _ in 0..100_000 {
            let header: u32 = (1024 << 3) | (1 << 1);
            bomb.extend_from_slice(&header.to_le_bytes()[..3]);
            bomb.push(0);
        }
        let error = unpack(Compression::Zstd, &bomb, 4096, 1 << 20).unwrap_err();
        assert!(matches!(error, CodeError::Unpack(_)), "{error}");
    }
}
