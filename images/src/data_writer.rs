//! Appending pieces to a data file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::compress::{Chooser, CompressionChoice, compress};
use crate::content::{ContentKey, Schedule};
use crate::direct::Direct;
use crate::hash::PieceHash;
use crate::known::Known;
use crate::limits::{BLOCK, MAX_PIECE_LENGTH, PIECE_LENGTH};
use crate::manifest::{Compression, Extent, Piece, Storage};
use crate::names::data_name;
use crate::{ImageError, sys};

/// Writes the pieces of one data file.
///
/// It needs nothing but the open file, so it works in a process that may open none. All methods
/// take `&self`, and any number of threads may append at once: each piece gets its place first and
/// is written there with no lock held.
///
/// A failed write may leave a part of a piece behind, which a verification would find: the
/// checkpoint is to be given up then. The file is whole when
/// [`finish`](Self::finish) has returned; durable when the image is committed.
#[derive(Debug)]
pub struct DataWriter {
    file: File,
    index: u32,
    name: String,
    schedule: Schedule,
    known: Known,
    chooser: Chooser,
    zero: OnceLock<PieceHash>,
    end: AtomicU64,
    direct: Option<Direct>,
}

impl DataWriter {
    /// Appends to data file number `index`, which
    /// [`ImageWriter::data_file`](crate::ImageWriter::data_file) made, behind what is in it.
    ///
    /// # Errors
    /// The file's length cannot be read.
    pub fn new(file: File, index: u32, key: ContentKey) -> Result<Self, ImageError> {
        let name = data_name(index);
        match file.metadata() {
            Ok(status) => {
                let end = AtomicU64::new(status.len().next_multiple_of(BLOCK));
                let (known, chooser, zero) = (Known::default(), Chooser::default(), OnceLock::new());
                Ok(Self { end, file, index, name, schedule: key.schedule(), known, chooser, zero, direct: None })
            }
            Err(error) => Err(ImageError::io("read the size of", name, error)),
        }
    }

    /// Does not write what is in this table, but refers to it.
    #[must_use]
    pub fn with_known(self, known: Known) -> Self {
        Self { known, ..self }
    }

    /// Compresses pieces.
    #[must_use]
    pub fn with_compression(self, choice: CompressionChoice) -> Self {
        Self { chooser: Chooser::new(choice), ..self }
    }

    /// Writes what lies at block boundaries in memory past the page cache: through this file, which is the same one
    /// opened with `O_DIRECT` ([`ImageWriter::direct_file`](crate::ImageWriter::direct_file)).
    #[must_use]
    pub fn with_direct(self, file: File) -> Self {
        Self { direct: Some(Direct::new(file)), ..self }
    }

    /// Where content of this hash and length is already, if it is: nowhere since it is zero (of pieces of
    /// [`PIECE_LENGTH`]), or in an image that this one builds on. Such content need not even be fetched: its piece is
    /// `Piece { offset, length, hash, storage }`.
    #[must_use]
    pub fn known(&self, hash: PieceHash, length: u64) -> Option<Storage> {
        let zero = || self.hash(&vec![0; PIECE_LENGTH as usize]);
        if length == PIECE_LENGTH && hash == *self.zero.get_or_init(zero) {
            return Some(Storage::Zero);
        }
        self.known.get(hash, length)
    }

    /// The file, for writing by other means into what [`reserve`](Self::reserve) gave.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The file's number.
    #[must_use]
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Bytes reserved so far, padding included: what the file's length will be.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    /// Hashes one piece of a region, writes it unless it is zero throughout or [known](Self::with_known), and says
    /// where it is. `offset` is the piece's place in its region.
    ///
    /// # Errors
    /// [`ImageError::NoSpace`] where the disk is full; [`ImageError::Invalid`] if the content is
    /// empty or longer than [`MAX_PIECE_LENGTH`]; [`ImageError::Io`].
    pub fn append(&self, offset: u64, content: &[u8]) -> Result<Piece, ImageError> {
        self.append_hashed(offset, content, self.hash(content))
    }

    /// As [`append`](Self::append), for content whose hash under the checkpoint's key is known
    /// already. Nobody checks it until the image is read.
    ///
    /// # Errors
    /// Those of [`append`](Self::append).
    pub fn append_hashed(&self, offset: u64, content: &[u8], hash: PieceHash) -> Result<Piece, ImageError> {
        let length = check_length(content)?;
        let storage = if is_zero(content) {
            Storage::Zero
        } else if let Some(known) = self.known.get(hash, length) {
            known
        } else {
            let began = Instant::now();
            let method = self.chooser.method();
            let extent = self.store(content, method)?;
            if method == Compression::None {
                self.chooser.wrote(&self.file, content, began.elapsed());
            }
            Storage::Stored(extent)
        };
        Ok(Piece { offset, length, hash, storage })
    }

    /// Writes content by this method, or as it is if it does not shrink.
    pub(crate) fn store(&self, content: &[u8], method: Compression) -> Result<Extent, ImageError> {
        let compressed = compress(method, content);
        let (stored, compression) = match &compressed {
            Some(compressed) => (&**compressed, method),
            None => (content, Compression::None),
        };
        let length = stored.len() as u64;
        let offset = self.reserve(length)?;
        self.write_at(offset, stored)?;
        Ok(Extent { file: self.index, offset, length, compression })
    }

    /// The hash of content under the checkpoint's key.
    #[must_use]
    pub fn hash(&self, content: &[u8]) -> PieceHash {
        self.schedule.hash(content).into()
    }

    /// Puts new content in the place of a piece that this writer made before, in the same region at the same offset,
    /// and says where it is now: in the same extent where the piece has one in this file that it fits into, which then
    /// holds it even if it is zero throughout, else as [`append_hashed`](Self::append_hashed) does. The piece given is not
    /// to be used any more. While this runs nobody else may replace or read it.
    ///
    /// # Errors
    /// Those of [`append`](Self::append); [`ImageError::Invalid`] if the content is not as long as the piece.
    pub fn replace_hashed(&self, piece: &Piece, content: &[u8], hash: PieceHash) -> Result<Piece, ImageError> {
        let length = check_length(content)?;
        if length != piece.length {
            return Err(ImageError::Invalid { what: format!("{length} bytes for a piece of {}", piece.length) });
        }
        match piece.storage {
            Storage::Stored(extent)
                if extent.file == self.index
                    && (extent.compression != Compression::None || extent.length == length)
                    && extent.length <= length
                    && extent.offset.checked_add(extent.length).is_some_and(|end| end <= self.length()) =>
            {
                if extent.compression == Compression::None {
                    self.write_at(extent.offset, content)?;
                    return Ok(Piece { hash, ..*piece });
                }
                self.recompress(piece, &extent, content, hash)
            }
            Storage::Stored(_) => {
                Err(ImageError::Invalid { what: format!("a piece to be replaced that is not in {}", self.name) })
            }
            Storage::Zero | Storage::Parent { .. } => self.append_hashed(piece.offset, content, hash),
        }
    }

    /// What is not used any more of an extent becomes zero, as everything between pieces is.
    fn recompress(&self, piece: &Piece, extent: &Extent, content: &[u8], hash: PieceHash) -> Result<Piece, ImageError> {
        let room = extent.length.next_multiple_of(BLOCK);
        match compress(extent.compression, content) {
            Some(mut stored) if stored.len() as u64 <= room => {
                let length = stored.len() as u64;
                // What was there may be longer.
                stored.resize(extent.length.max(length) as usize, 0);
                self.write_at(extent.offset, &stored)?;
                Ok(Piece { hash, storage: Storage::Stored(Extent { length, ..*extent }), ..*piece })
            }
            _ => {
                self.erase(extent.offset, extent.length)?;
                self.append_hashed(piece.offset, content, hash)
            }
        }
    }

    /// Appends the whole content of a region, cut into pieces of [`PIECE_LENGTH`].
    ///
    /// # Errors
    /// Those of [`append`](Self::append).
    pub fn append_all(&self, content: &[u8]) -> Result<Vec<Piece>, ImageError> {
        let starts = (0u64..).step_by(PIECE_LENGTH as usize);
        let pieces = starts.zip(content.chunks(PIECE_LENGTH as usize));
        pieces.map(|(offset, content)| self.append(offset, content)).collect()
    }

    /// Sets a place aside for `length` bytes: its offset in the file, a multiple of [`BLOCK`].
    ///
    /// # Errors
    /// [`ImageError::Invalid`] where the file would become longer than a file can be.
    pub fn reserve(&self, length: u64) -> Result<u64, ImageError> {
        let next = |end: u64| {
            let next = end.checked_add(length)?.checked_next_multiple_of(BLOCK)?;
            (next <= i64::MAX as u64).then_some(next)
        };
        self.end.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_err(|end| ImageError::Invalid {
            what: format!("{length} bytes more in {}, which has {end}", self.name),
        })
    }

    /// Writes all of `content` at an offset of the file, which the caller has reserved.
    ///
    /// # Errors
    /// [`ImageError::NoSpace`] where the disk is full, else [`ImageError::Io`]; a part may have
    /// been written.
    pub fn write_at(&self, offset: u64, content: &[u8]) -> Result<(), ImageError> {
        let failed = |error| ImageError::write(&self.name, content.len() as u64, error);
        if let Some(direct) = &self.direct
            && direct.write_at(offset, content).map_err(failed)?
        {
            return Ok(());
        }
        self.file.write_all_at(content, offset).map_err(failed)
    }

    /// Gives the file its final length, and returns it. To be called when all appends are done.
    ///
    /// # Errors
    /// The file cannot be made that long.
    pub fn finish(self) -> Result<u64, ImageError> {
        self.seal()
    }

    /// As [`seal`](Self::seal), where pieces have been written that are not in the image: of everything but these, which
    /// are those in the manifest, nothing is left in the file.
    ///
    /// # Errors
    /// Those of [`write_at`](Self::write_at) and of [`finish`](Self::finish).
    pub fn seal_keeping<'a>(&self, pieces: impl IntoIterator<Item = &'a Piece>) -> Result<u64, ImageError> {
        let place = |piece: &Piece| match piece.storage {
            // What ends beyond all files is refused at the commit.
            Storage::Stored(extent) if extent.file == self.index => {
                Some((extent.offset, extent.offset.saturating_add(extent.length)))
            }
            _ => None,
        };
        let mut used: Vec<_> = pieces.into_iter().filter_map(place).collect();
        used.sort_unstable();
        let length = self.seal()?;
        let mut covered = 0;
        for (start, end) in used.into_iter().chain([(length, length)]) {
            // A piece's last block is zero behind it already.
            let from = u64::next_multiple_of(covered, BLOCK);
            if start > from {
                self.erase(from, start.min(length).saturating_sub(from))?;
            }
            covered = covered.max(end.min(length));
        }
        Ok(length)
    }

    /// Makes a range zero.
    fn erase(&self, offset: u64, length: u64) -> Result<(), ImageError> {
        if length == 0 || sys::punch_hole(&self.file, offset, length).is_ok() {
            return Ok(());
        }
        // A file system that has no holes.
        let zeros = vec![0; length.min(PIECE_LENGTH) as usize];
        for at in (0..length).step_by(zeros.len()) {
            self.write_at(offset + at, &zeros[..(length - at).min(PIECE_LENGTH) as usize])?;
        }
        Ok(())
    }

    /// As [`finish`](Self::finish), where others have the writer too: none of them appends any more.
    ///
    /// # Errors
    /// Those of [`finish`](Self::finish).
    pub fn seal(&self) -> Result<u64, ImageError> {
        let length = self.length();
        match self.file.set_len(length) {
            Ok(()) => Ok(length),
            Err(error) => Err(ImageError::write(&self.name, 0, error)),
        }
    }
}

fn check_length(content: &[u8]) -> Result<u64, ImageError> {
    match content.len() as u64 {
        length @ 1..=MAX_PIECE_LENGTH => Ok(length),
        length => Err(ImageError::Invalid { what: format!("a piece of {length} bytes") }),
    }
}

/// Whether all bytes are zero. Blocks are folded without branches, which the compiler vectorises.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(4096).all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_reader::{DataFile, DataReader};
    use std::fs::OpenOptions;

    const KEY: ContentKey = ContentKey::from_bytes([7; 16]);

    fn hash(content: &[u8]) -> PieceHash {
        KEY.schedule().hash(content).into()
    }

    fn writer() -> DataWriter {
        DataWriter::new(tempfile::tempfile().unwrap(), 3, KEY).unwrap()
    }

    #[test]
    fn pieces_are_aligned_and_named() {
        let writer = writer();
        let one = writer.append(0, &[1; 5000]).unwrap();
        let two = writer.append(5000, &[2; 1]).unwrap();
        assert_eq!((one.offset, one.length, one.hash), (0, 5000, hash(&[1; 5000])));
        let extent =
            |offset, length| Storage::Stored(Extent { file: 3, offset, length, compression: Compression::None });
        assert_eq!(one.storage, extent(0, 5000));
        assert_eq!(two.storage, extent(8192, 1));
        assert_eq!(writer.finish().unwrap(), 12288);
    }

    #[test]
    fn what_lies_at_block_boundaries_is_written_past_the_page_cache_and_the_rest_is_not() {
        use std::os::unix::fs::OpenOptionsExt;
        let kept = tempfile::NamedTempFile::new().unwrap();
        let direct = File::options().write(true).custom_flags(libc::O_DIRECT).open(kept.path());
        // Not every file system has it.
        let Ok(direct) = direct else { return eprintln!("skipped: no O_DIRECT here") };
        let writer = DataWriter::new(kept.reopen().unwrap(), 3, KEY).unwrap().with_direct(direct);
        let mut memory = vec![0; 5 * BLOCK as usize];
        let start = memory.as_ptr().align_offset(BLOCK as usize);
        memory[start..].iter_mut().zip(1..).for_each(|(byte, i): (&mut u8, u32)| *byte = (i % 251) as u8);
        let (whole, odd) = (&memory[start..start + 3 * BLOCK as usize], &memory[start + 1..start + 5000]);
        let pieces =
            [writer.append(0, whole).unwrap(), writer.append(0, odd).unwrap(), writer.append(0, whole).unwrap()];
        // Also in the place of what is there.
        let last = writer.replace_hashed(&pieces[2], whole, hash(whole)).unwrap();
        for (piece, content) in [(pieces[0], whole), (pieces[1], odd), (last, whole)] {
            let Storage::Stored(extent) = piece.storage else { panic!("{piece:?}") };
            let mut found = vec![0; content.len()];
            writer.file().read_exact_at(&mut found, extent.offset).unwrap();
            assert_eq!(found, content);
        }
        let file = writer.file().try_clone().unwrap();
        let length = writer.finish().unwrap();
        assert_eq!((length, file.metadata().unwrap().len()), (8 * BLOCK, 8 * BLOCK));
    }

    #[test]
    fn zeros_are_not_stored() {
        let writer = writer();
        let piece = writer.append(0, &[0; 10_000]).unwrap();
        assert_eq!(piece.storage, Storage::Zero);
        assert_eq!(piece.hash, hash(&[0; 10_000]));
        assert_eq!(writer.length(), 0);
    }

    #[test]
    fn new_content_takes_the_place_of_what_was_there() {
        let writer = writer();
        let was_zero = writer.append(0, &[0; 5000]).unwrap();
        let was_there = writer.append(5000, &[1; 5000]).unwrap();
        let length = writer.length();
        // Also with zeros, since what an extent held must not stay behind.
        for byte in [2, 0, 3] {
            let content = [byte; 5000];
            let now = writer.replace_hashed(&was_there, &content, hash(&content)).unwrap();
            assert_eq!(now, Piece { hash: hash(&content), ..was_there });
            let mut found = [9; 5000];
            writer.file().read_exact_at(&mut found, 0).unwrap();
            assert_eq!(found, content);
        }
        assert_eq!(writer.length(), length);
        let now = writer.replace_hashed(&was_zero, &[4; 5000], hash(&[4; 5000])).unwrap();
        assert!(matches!(now.storage, Storage::Stored(extent) if extent.offset == 8192));
        assert_eq!((now.offset, now.length), (0, 5000));
        // Still nothing.
        let now = writer.replace_hashed(&was_zero, &[0; 5000], hash(&[0; 5000])).unwrap();
        assert_eq!(now, was_zero);
    }

    #[test]
    fn new_content_takes_the_place_of_what_was_compressed_there() {
        let length = 20_000;
        let noise = |seed: u64, noisy: usize| -> Vec<u8> {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            };
            (0..length).map(|i| if i < noisy { next() } else { 9 }).collect()
        };
        for choice in [CompressionChoice::Lz4, CompressionChoice::Zstd] {
            let writer = writer().with_compression(choice);
            let mut piece = writer.append(0, &noise(1, 6000)).unwrap();
            assert!(matches!(piece.storage, Storage::Stored(extent) if extent.compression != Compression::None));
            let behind = writer.append(0, &noise(2, 5000)).unwrap();
            // Larger and within the room, smaller, too large for what is left, smaller, not compressible at all.
            for (noisy, moves) in [(7000, false), (10, false), (7000, true), (3000, false), (length, true), (3, false)]
            {
                let content = noise(noisy as u64 + 3, noisy);
                let (before, now) = (piece, writer.replace_hashed(&piece, &content, hash(&content)).unwrap());
                assert_eq!(before.storage.place().unwrap().1.offset != now.storage.place().unwrap().1.offset, moves);
                piece = now;
                let reader = DataReader::new(KEY.into(), [(DataFile::own(3), writer.file().try_clone().unwrap())]);
                let mut found = vec![0; length];
                reader.read(&piece, &mut found).unwrap();
                assert_eq!(found, content);
                reader.read(&behind, &mut found).unwrap();
                // Nothing is left between the two.
                let mut all = vec![0; writer.length() as usize];
                let end = writer.file().metadata().unwrap().len() as usize;
                writer.file().read_exact_at(&mut all[..end], 0).unwrap();
                for (_, extent) in [piece, behind].iter().filter_map(|it| it.storage.place()) {
                    all[extent.offset as usize..(extent.offset + extent.length) as usize].fill(0);
                }
                assert!(is_zero(&all));
            }
        }
    }

    #[test]
    fn what_no_piece_uses_is_gone_from_a_file_that_is_sealed() {
        let file = writer();
        let all: Vec<_> = (0..8_u8).map(|n| file.append(0, &vec![n + 1; 5000]).unwrap()).collect();
        assert_eq!(file.seal_keeping(&[all[6], all[1], all[2], all[2]]).unwrap(), 8 * 8192);
        let mut found = vec![0; 8 * 8192];
        file.file().read_exact_at(&mut found, 0).unwrap();
        for (n, place) in (0_u8..).zip(found.chunks(8192)) {
            let kept = [1, 2, 6].contains(&n);
            assert_eq!(place[..5000], vec![if kept { n + 1 } else { 0 }; 5000]);
            assert!(is_zero(&place[5000..]));
        }
        // A file without any piece in it.
        let writer = writer();
        writer.append(0, &[1; 5000]).unwrap();
        writer.seal_keeping([]).unwrap();
        let mut found = [1; 8192];
        writer.file().read_exact_at(&mut found, 0).unwrap();
        assert!(is_zero(&found));
    }

    #[test]
    fn what_does_not_fit_replaces_nothing() {
        let writer = writer();
        let piece = writer.append(0, &[1; 5000]).unwrap();
        let at = |change: fn(&mut Extent)| {
            let Storage::Stored(mut extent) = piece.storage else { panic!("{piece:?}") };
            change(&mut extent);
            Piece { storage: Storage::Stored(extent), ..piece }
        };
        assert!(writer.replace_hashed(&piece, &[2; 4999], hash(&[2; 4999])).is_err());
        for other in [at(|e| e.file = 9), at(|e| e.offset = 8192), at(|e| e.offset = u64::MAX - 4095)] {
            assert!(writer.replace_hashed(&other, &[2; 5000], hash(&[2; 5000])).is_err());
        }
    }

    #[test]
    fn one_byte_anywhere_makes_content_not_zero() {
        for at in [0, 4095, 4096, 8191, 9999] {
            let mut content = [0; 10_000];
            content[at] = 0x80;
            assert!(!is_zero(&content), "{at}");
        }
    }

    #[test]
    fn a_full_disk_is_told_by_name() {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let writer = DataWriter::new(full, 0, KEY).unwrap();
        let error = writer.append(0, &[1; 4096]).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::NoSpace);
        assert!(error.to_string().contains("4096 bytes to rekindle-data-0.raw"));
    }

    #[test]
    fn a_reservation_past_the_end_of_all_files_is_refused() {
        let writer = writer();
        writer.append(0, &[1; 1]).unwrap();
        assert!(writer.reserve(u64::MAX).is_err());
        assert!(writer.reserve(i64::MAX as u64).is_err());
        assert_eq!(writer.length(), BLOCK);
    }

    #[test]
    fn threads_never_share_a_place() {
        let writer = writer();
        let mut offsets: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|n| {
                    let writer = &writer;
                    scope.spawn(move || {
                        (1..100u64)
                            .map(|i| writer.append(0, &vec![n + 1; (i * 97) as usize]).unwrap())
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            let pieces = threads.into_iter().flat_map(|it| it.join().unwrap());
            let offset = |piece: Piece| match piece.storage {
                Storage::Stored(extent) => extent.offset,
                other => panic!("{other:?}"),
            };
            pieces.map(offset).collect()
        });
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!(offsets.len(), 4 * 99);
    }
}
