//! Appending pieces to data files.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::time::Instant;

use crate::ImageError;
use crate::compress::{Chooser, CompressionChoice, compress};
use crate::content::{ContentKey, Schedule};
use crate::direct::Direct;
use crate::hash::PieceHash;
use crate::known::Known;
use crate::limits::{BLOCK, MAX_PIECE_LENGTH, PIECE_LENGTH};
use crate::manifest::{Compression, Extent, Piece, Storage};
use crate::target::{Target, pick};

/// Writes pieces into one data file, or several.
///
/// A writer needs only the open files, so it works in a process that may not open any. All methods
/// take `&self`, and any number of threads may append at once: each piece gets its place first and
/// is written there with no lock held. With several files, each thread writes to a file that no other thread writes to at
/// that time, as long as there is such a file; a thread that is alone writes only to the first.
///
/// A failed write may leave a part of a piece behind, which a verification would find: the
/// caller must give up the checkpoint then. The files are whole when
/// [`finish`](Self::finish) has returned, and durable when the image is committed.
#[derive(Debug)]
pub struct DataWriter {
    /// At least one, each of another number.
    targets: Vec<Target>,
    schedule: Schedule,
    known: Known,
    chooser: Chooser,
    zero: OnceLock<PieceHash>,
}

impl DataWriter {
    /// Appends to data file number `index`, which
    /// [`ImageWriter::data_file`](crate::ImageWriter::data_file) made, behind what is in it.
    ///
    /// # Errors
    /// The file's length cannot be read.
    pub fn new(file: File, index: u32, key: ContentKey) -> Result<Self, ImageError> {
        Self::of([(index, file)], key)
    }

    /// Whether the two write to the same files.
    #[must_use]
    pub fn has_files_of(&self, other: &Self) -> bool {
        let files = |writer: &Self| -> Option<BTreeSet<(u64, u64)>> {
            let status = writer.targets.iter().map(|target| target.file().metadata());
            status.map(|it| it.map(|it| (it.dev(), it.ino())).ok()).collect()
        };
        files(self).is_some_and(|own| files(other) == Some(own))
    }

    /// Appends to these data files, by their numbers, behind what is in them.
    ///
    /// # Errors
    /// A file's length cannot be read; [`ImageError::Invalid`] where there is no file, or a number comes twice.
    pub fn of(files: impl IntoIterator<Item = (u32, File)>, key: ContentKey) -> Result<Self, ImageError> {
        let targets = files.into_iter().map(|(index, file)| Target::new(index, file));
        let targets = targets.collect::<Result<Vec<_>, _>>()?;
        let numbers: BTreeSet<_> = targets.iter().map(|it| it.index).collect();
        if targets.is_empty() || numbers.len() != targets.len() {
            return Err(ImageError::Invalid {
                what: "data files to be written that are none, or one twice".to_owned(),
            });
        }
        let (known, chooser, zero) = (Known::default(), Chooser::default(), OnceLock::new());
        Ok(Self { targets, schedule: key.schedule(), known, chooser, zero })
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

    /// Writes what lies at block boundaries in memory past the page cache: through these files, which are the same ones in
    /// the same order, opened with `O_DIRECT` ([`ImageWriter::direct_file`](crate::ImageWriter::direct_file)).
    #[must_use]
    pub fn with_direct(mut self, files: impl IntoIterator<Item = File>) -> Self {
        let share = self.targets.len() as u64;
        for (target, file) in self.targets.iter_mut().zip(files) {
            target.set_direct(Direct::new(file, share));
        }
        self
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

    /// Bytes reserved so far in all files, padding included: what their lengths will be together.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.targets.iter().map(Target::length).sum()
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
    /// The errors of [`append`](Self::append).
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
                let sync = || self.targets.iter().try_for_each(Target::sync);
                self.chooser.wrote(sync, content, began.elapsed())?;
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
        // Not before all is computed: what counts is who writes.
        let none = || ImageError::Invalid { what: "there is no data file".to_owned() };
        let target = pick(&self.targets).ok_or_else(none)?;
        let offset = target.reserve(length)?;
        target.write_at(offset, stored)?;
        Ok(Extent { file: target.index, offset, length, compression })
    }

    /// The hash of content under the checkpoint's key.
    #[must_use]
    pub fn hash(&self, content: &[u8]) -> PieceHash {
        self.schedule.hash(content).into()
    }

    /// Puts new content in the place of a piece that this writer made before, in the same region at the same offset,
    /// and says where it is now: in the same extent where the piece has one in these files that it fits into, which then
    /// holds it even if it is zero throughout, else as [`append_hashed`](Self::append_hashed) does. The piece given is not
    /// to be used any more. While this runs nobody else may replace or read it.
    ///
    /// # Errors
    /// The errors of [`append`](Self::append); [`ImageError::Invalid`] if the content is not as long as the piece.
    pub fn replace_hashed(&self, piece: &Piece, content: &[u8], hash: PieceHash) -> Result<Piece, ImageError> {
        let length = check_length(content)?;
        if length != piece.length {
            return Err(ImageError::Invalid { what: format!("{length} bytes for a piece of {}", piece.length) });
        }
        let Storage::Stored(extent) = piece.storage else { return self.append_hashed(piece.offset, content, hash) };
        let target = self.targets.iter().find(|it| it.index == extent.file).filter(|target| {
            (extent.compression != Compression::None || extent.length == length)
                && extent.length <= length
                && extent.offset.checked_add(extent.length).is_some_and(|end| end <= target.length())
        });
        let elsewhere = || ImageError::Invalid { what: "a piece to be replaced that was not written here".to_owned() };
        let target = target.ok_or_else(elsewhere)?;
        if extent.compression == Compression::None {
            target.enter().write_at(extent.offset, content)?;
            return Ok(Piece { hash, ..*piece });
        }
        self.recompress(piece, target, &extent, content, hash)
    }

    /// The part of an extent that is no longer used becomes zero, as everything between pieces is.
    fn recompress(
        &self,
        piece: &Piece,
        target: &Target,
        extent: &Extent,
        content: &[u8],
        hash: PieceHash,
    ) -> Result<Piece, ImageError> {
        let room = extent.length.next_multiple_of(BLOCK);
        match compress(extent.compression, content) {
            Some(mut stored) if stored.len() as u64 <= room => {
                let length = stored.len() as u64;
                // The stored bytes that were there may be longer.
                stored.resize(extent.length.max(length) as usize, 0);
                target.enter().write_at(extent.offset, &stored)?;
                Ok(Piece { hash, storage: Storage::Stored(Extent { length, ..*extent }), ..*piece })
            }
            _ => {
                target.enter().erase(extent.offset, extent.length)?;
                self.append_hashed(piece.offset, content, hash)
            }
        }
    }

    /// Appends the whole content of a region, cut into pieces of [`PIECE_LENGTH`].
    ///
    /// # Errors
    /// The errors of [`append`](Self::append).
    pub fn append_all(&self, content: &[u8]) -> Result<Vec<Piece>, ImageError> {
        let starts = (0u64..).step_by(PIECE_LENGTH as usize);
        let pieces = starts.zip(content.chunks(PIECE_LENGTH as usize));
        pieces.map(|(offset, content)| self.append(offset, content)).collect()
    }

    /// Gives the files their final lengths, and returns what these are together. To be called when all appends are done.
    ///
    /// # Errors
    /// A file cannot be made that long.
    pub fn finish(self) -> Result<u64, ImageError> {
        self.seal()
    }

    /// As [`seal`](Self::seal), where pieces have been written that are not in the image. Keeps only `pieces`, which are the
    /// pieces in the manifest: nothing else is left in the files.
    ///
    /// # Errors
    /// The errors of [`append`](Self::append) and of [`finish`](Self::finish).
    pub fn seal_keeping<'a>(&self, pieces: impl IntoIterator<Item = &'a Piece>) -> Result<u64, ImageError> {
        let mut used = vec![Vec::new(); self.targets.len()];
        for piece in pieces {
            let Storage::Stored(extent) = piece.storage else { continue };
            let target = self.targets.iter().position(|it| it.index == extent.file);
            if let Some(used) = target.and_then(|at| used.get_mut(at)) {
                // The commit refuses an extent that ends beyond all files.
                used.push((extent.offset, extent.offset.saturating_add(extent.length)));
            }
        }
        let length = self.seal()?;
        self.targets.iter().zip(used).try_for_each(|(target, used)| target.erase_but(used))?;
        Ok(length)
    }

    /// As [`finish`](Self::finish), where others have the writer too: none of them appends any more.
    ///
    /// # Errors
    /// The errors of [`finish`](Self::finish).
    pub fn seal(&self) -> Result<u64, ImageError> {
        self.targets.iter().map(Target::seal).sum()
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
    use std::os::unix::fs::FileExt;

    const KEY: ContentKey = ContentKey::from_bytes([7; 16]);

    fn hash(content: &[u8]) -> PieceHash {
        KEY.schedule().hash(content).into()
    }

    fn file_of(writer: &DataWriter) -> &File {
        writer.targets[0].file()
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
        let writer = DataWriter::new(kept.reopen().unwrap(), 3, KEY).unwrap().with_direct([direct]);
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
            file_of(&writer).read_exact_at(&mut found, extent.offset).unwrap();
            assert_eq!(found, content);
        }
        let file = file_of(&writer).try_clone().unwrap();
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
            file_of(&writer).read_exact_at(&mut found, 0).unwrap();
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
                let reader = DataReader::new(KEY.into(), [(DataFile::own(3), file_of(&writer).try_clone().unwrap())]);
                let mut found = vec![0; length];
                reader.read(&piece, &mut found).unwrap();
                assert_eq!(found, content);
                reader.read(&behind, &mut found).unwrap();
                // Nothing is left between the two.
                let mut all = vec![0; writer.length() as usize];
                let end = file_of(&writer).metadata().unwrap().len() as usize;
                file_of(&writer).read_exact_at(&mut all[..end], 0).unwrap();
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
        file_of(&file).read_exact_at(&mut found, 0).unwrap();
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
        file_of(&writer).read_exact_at(&mut found, 0).unwrap();
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

    /// Of three files with numbers that do not follow each other.
    fn writer_of_three() -> (DataWriter, Vec<File>) {
        let files: Vec<_> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        let ours = THREE.into_iter().zip(files.iter().map(|it| it.try_clone().unwrap()));
        (DataWriter::of(ours, KEY).unwrap(), files)
    }

    const THREE: [u32; 3] = [7, 65_536, 65_540];

    fn extent(piece: &Piece) -> Extent {
        piece.storage.place().unwrap().1
    }

    /// Writes a piece to each of the files, as if three threads had written them.
    fn in_each(writer: &DataWriter, byte: u8) -> Vec<Piece> {
        let mut busy = Vec::new();
        let append = |_| {
            let piece = writer.append(0, &[byte; 5000]).unwrap();
            busy.push(writer.targets.iter().find(|it| it.index == extent(&piece).file).unwrap().enter());
            piece
        };
        (0..3).map(append).collect()
    }

    #[test]
    fn a_thread_that_is_alone_writes_to_the_first_file_and_others_to_those_that_are_free() {
        let (writer, files) = writer_of_three();
        for _ in 0..10 {
            assert_eq!(extent(&writer.append(0, &[1; 5000]).unwrap()).file, THREE[0]);
        }
        let pieces = in_each(&writer, 2);
        assert_eq!(pieces.iter().map(|it| extent(it).file).collect::<Vec<_>>(), THREE);
        assert_eq!(writer.length(), 13 * 8192);
        assert_eq!(writer.finish().unwrap(), 13 * 8192);
        let lengths = files.iter().map(|it| it.metadata().unwrap().len());
        assert_eq!(lengths.collect::<Vec<_>>(), [11 * 8192, 8192, 8192]);
        let numbered = THREE.into_iter().map(DataFile::own).zip(files);
        let reader = DataReader::new(KEY.into(), numbered);
        let mut found = vec![0; 5000];
        for piece in pieces {
            reader.read(&piece, &mut found).unwrap();
            assert_eq!(found, [2; 5000]);
        }
    }

    #[test]
    fn what_is_replaced_stays_in_its_file_and_what_is_not_used_goes_from_every_file() {
        for choice in [CompressionChoice::Off, CompressionChoice::Lz4] {
            let (writer, files) = writer_of_three();
            let writer = writer.with_compression(choice);
            let (kept, gone, last) = (in_each(&writer, 1), in_each(&writer, 2), in_each(&writer, 3));
            let replace = |piece: &Piece| writer.replace_hashed(piece, &[9; 5000], hash(&[9; 5000])).unwrap();
            let kept: Vec<_> = kept.iter().map(replace).collect();
            assert_eq!(kept.iter().map(|it| extent(it).file).collect::<Vec<_>>(), THREE);
            writer.seal_keeping(kept.iter().chain(&last[1..2])).unwrap();
            for ((file, kept), (gone, last)) in files.iter().zip(&kept).zip(gone.iter().zip(&last)) {
                let read = |piece: &Piece| {
                    let mut found = vec![0; extent(piece).length as usize];
                    file.read_exact_at(&mut found, extent(piece).offset).unwrap();
                    found
                };
                assert!(!is_zero(&read(kept)) && is_zero(&read(gone)));
                assert_eq!(is_zero(&read(last)), extent(last).file != THREE[1]);
            }
            // A piece of another writer's.
            let other = Piece { storage: Storage::Stored(Extent { file: 8, ..extent(&kept[0]) }), ..kept[0] };
            assert!(writer.replace_hashed(&other, &[9; 5000], hash(&[9; 5000])).is_err());
        }
    }

    #[test]
    fn each_file_is_written_past_the_page_cache_by_itself() {
        use std::os::unix::fs::OpenOptionsExt;
        let kept: Vec<_> = (0..3).map(|_| tempfile::NamedTempFile::new().unwrap()).collect();
        let direct = |it: &tempfile::NamedTempFile| {
            File::options().write(true).custom_flags(libc::O_DIRECT).open(it.path()).ok()
        };
        let Some(direct) = kept.iter().map(direct).collect::<Option<Vec<_>>>() else {
            return eprintln!("skipped: no O_DIRECT here");
        };
        let files: Vec<_> = kept.iter().map(|it| it.reopen().unwrap()).collect();
        let ours = THREE.into_iter().zip(files.iter().map(|it| it.try_clone().unwrap()));
        let writer = DataWriter::of(ours, KEY).unwrap().with_direct(direct);
        let mut memory = vec![3; 4 * BLOCK as usize];
        let start = memory.as_ptr().align_offset(BLOCK as usize);
        let content = &mut memory[start..start + 3 * BLOCK as usize];
        let mut busy = Vec::new();
        for (byte, target) in (1..).zip(&writer.targets) {
            content.fill(byte);
            writer.append(0, content).unwrap();
            busy.push(target.enter());
        }
        drop(busy);
        assert_eq!(writer.finish().unwrap(), 9 * BLOCK);
        for (byte, file) in (1..).zip(&files) {
            let mut found = vec![0; 3 * BLOCK as usize];
            file.read_exact_at(&mut found, 0).unwrap();
            assert!(found.iter().all(|it| *it == byte));
            assert_eq!(file.metadata().unwrap().len(), 3 * BLOCK);
        }
    }

    #[test]
    fn files_that_are_none_or_twice_the_same_are_refused() {
        let file = || tempfile::tempfile().unwrap();
        assert!(DataWriter::of([], KEY).is_err());
        assert!(DataWriter::of([(3, file()), (4, file()), (3, file())], KEY).is_err());
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

        // And which one of several; nobody is taken to write to it any more.
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let writer = DataWriter::of([(0, tempfile::tempfile().unwrap()), (65_536, full)], KEY).unwrap();
        let first = writer.targets[0].enter();
        for _ in 0..2 {
            let error = writer.append(0, &[1; 4096]).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::NoSpace);
            assert!(error.to_string().contains("4096 bytes to rekindle-data-65536.raw"), "{error}");
        }
        drop(first);
        assert_eq!(extent(&writer.append(0, &[1; 4096]).unwrap()).file, 0);
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
