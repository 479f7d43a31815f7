//! Reading pieces back.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::ImageError;
use crate::compress::decompress;
use crate::hash::{HashKey, Hasher};
use crate::manifest::{Compression, Extent, Piece, Storage};
use crate::names::data_name;

/// Which data file: of which image, counted from the one that is read, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DataFile {
    /// 0 is the image itself, 1 its parent, 2 the parent's parent.
    pub depth: u32,
    /// N of `rekindle-data-N.raw`.
    pub index: u32,
}

impl DataFile {
    /// A file of the image itself.
    #[must_use]
    pub const fn own(index: u32) -> Self {
        Self { depth: 0, index }
    }
}

impl std::fmt::Display for DataFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.depth {
            0 => write!(f, "{}", data_name(self.index)),
            1 => write!(f, "{} of its parent", data_name(self.index)),
            depth => write!(f, "{} of the {depth}th image behind it", data_name(self.index)),
        }
    }
}

impl Storage {
    /// The data file and the place in it; `None` for a piece that is stored nowhere.
    #[must_use]
    pub fn place(&self) -> Option<(DataFile, Extent)> {
        match *self {
            Self::Zero => None,
            Self::Stored(extent) => Some((DataFile::own(extent.file), extent)),
            Self::Parent { depth, extent } => Some((DataFile { depth, index: extent.file }, extent)),
        }
    }
}

/// Reads the pieces of an image's data files and checks their hashes.
///
/// Like [`DataWriter`](crate::DataWriter) it needs nothing but open files, and any number of
/// threads may read at once.
#[derive(Debug)]
pub struct DataReader {
    key: HashKey,
    hasher: Hasher,
    files: BTreeMap<DataFile, File>,
}

impl DataReader {
    /// Reads from these files, of one image and of those that it builds on.
    pub fn new(key: HashKey, files: impl IntoIterator<Item = (DataFile, File)>) -> Self {
        Self { key, hasher: key.hasher(), files: files.into_iter().collect() }
    }

    /// The files.
    pub fn files(&self) -> impl Iterator<Item = (DataFile, &File)> {
        self.files.iter().map(|(name, file)| (*name, file))
    }

    /// The files, which nobody reads any more.
    pub fn into_files(self) -> impl Iterator<Item = File> {
        self.files.into_values()
    }

    /// The key under which pieces are hashed.
    #[must_use]
    pub fn key(&self) -> HashKey {
        self.key
    }

    /// Fills `buffer` with the content of a piece. On success it is what was hashed when the
    /// image was written; on failure `buffer` holds anything.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`] if the content is not what was written, [`ImageError::Missing`]
    /// without the file, [`ImageError::Invalid`] if the buffer is not as long as the piece.
    pub fn read(&self, piece: &Piece, buffer: &mut [u8]) -> Result<(), ImageError> {
        self.read_unchecked(piece, buffer)?;
        let Some((file, extent)) = piece.storage.place() else {
            // The manifest's own checksum vouches for it.
            return Ok(());
        };
        if self.hasher.hash(buffer) != piece.hash {
            return Err(ImageError::corrupt_at(&file.to_string(), extent.offset, "content does not match its hash"));
        }
        Ok(())
    }

    /// As [`read`](Self::read), but does not compare the hash: the caller does that, as a GPU can.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read), [`ImageError::Corrupt`] only where that shows without the hash.
    pub fn read_unchecked(&self, piece: &Piece, buffer: &mut [u8]) -> Result<(), ImageError> {
        if buffer.len() as u64 != piece.length {
            return Err(ImageError::Invalid { what: format!("{} bytes asked for of {}", buffer.len(), piece.length) });
        }
        let Some((file, extent)) = piece.storage.place() else {
            buffer.fill(0);
            return Ok(());
        };
        let name = file.to_string();
        let corrupt = |what: &str| ImageError::corrupt_at(&name, extent.offset, what);
        let file = self.file(file)?;
        let fill = |buffer: &mut [u8]| {
            file.read_exact_at(buffer, extent.offset).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => corrupt("it is too short"),
                _ => ImageError::io("read", &*name, error),
            })
        };
        match extent.compression {
            Compression::None => fill(buffer)?,
            // No more than the content itself, for which there was room.
            _ if extent.length >= piece.length => return Err(corrupt("it is longer than what it holds")),
            method => {
                let mut stored = vec![0; extent.length as usize];
                fill(&mut stored)?;
                if !decompress(method, &stored, buffer) {
                    return Err(corrupt("it cannot be decompressed"));
                }
            }
        }
        Ok(())
    }

    /// Fills `buffer` with the content of pieces that follow each other, using up to `threads`
    /// threads. The first failure ends it.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read); [`ImageError::Invalid`] if the buffer is not as long as
    /// the pieces together.
    pub fn read_all(&self, pieces: &[Piece], buffer: &mut [u8], threads: NonZeroUsize) -> Result<(), ImageError> {
        let mut rest = buffer;
        let mut work = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let length = usize::try_from(piece.length).unwrap_or(usize::MAX);
            let Some((part, behind)) = rest.split_at_mut_checked(length) else {
                return Err(ImageError::Invalid { what: "a buffer shorter than the content".to_owned() });
            };
            work.push((piece, part));
            rest = behind;
        }
        if !rest.is_empty() {
            return Err(ImageError::Invalid { what: "a buffer longer than the content".to_owned() });
        }
        let threads = threads.get().min(work.len());
        let work = Mutex::new(work.into_iter());
        let one = || {
            loop {
                let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some((piece, part)) = next else {
                    return Ok(());
                };
                if let Err(error) = self.read(piece, part) {
                    // The others stop at their next piece.
                    let mut work = work.lock().unwrap_or_else(PoisonError::into_inner);
                    work.by_ref().for_each(drop);
                    return Err(error);
                }
            }
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(one)).collect();
            let mine = one();
            others.into_iter().fold(mine, |result, other| {
                let other = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                result.and(other)
            })
        })
    }

    pub(crate) fn file(&self, file: DataFile) -> Result<&File, ImageError> {
        self.files
            .get(&file)
            .ok_or_else(|| ImageError::Missing { file: file.to_string(), dir: "the files at hand".into() })
    }
}
