//! A stream of content: pieces of files, in any order.
//!
//! ```text
//!   u16 length of the name | u64 offset | u32 length of the piece          | name, DIRECTORY/FILE | piece
//!   u16 length of the name | u64 offset | u32 length of the piece + 2^31   | name, DIRECTORY/FILE | u32 process | u64 offset there
//!   u16 0                                    all so far: the receiver answers with one byte
//! ```
//!
//! Numbers are little endian. Holes and pieces of zeros are not sent: the receiver makes files of holes, with their sizes. The second kind
//! of piece is of memory that was sent before (`memory.rs`): the receiver has its content in the file `memory/pages-PROCESS.img`.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::SeekFrom;
use thiserror::Error;

use super::talk::MEMORY;
use crate::cpu_image::pages_name;

/// The largest piece.
pub(super) const PIECE: usize = 1 << 20;
/// Added to the length of a piece whose content the receiver has.
const THERE: u32 = 1 << 31;
/// The receiver's answer to the mark.
const ALL_WRITTEN: u8 = b'w';

/// Why content does not arrive.
#[derive(Debug, Error)]
pub(super) enum StreamError {
    #[error("a connection for content has ended in the middle of a file")]
    Ended,
    #[error("a connection for content has failed: {0}")]
    Io(io::Error),
    #[error("the other host has not written what was sent")]
    NotWritten,
    #[error("{0} is no name of a file of an image")]
    Name(String),
    #[error("a piece of {0} bytes is too large")]
    Piece(usize),
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: io::Error },
}

impl From<io::Error> for StreamError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Ended,
            _ => Self::Io(error),
        }
    }
}

/// A part of a file that has content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    /// The file's name, `DIRECTORY/FILE`.
    pub(super) name: String,
    /// Where it is.
    pub(super) path: PathBuf,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// The parts of a file that are no holes, none longer than `most` bytes.
pub(super) fn extents(name: &str, path: &Path, most: u64) -> Result<Vec<Extent>, StreamError> {
    let failed = |source| StreamError::Read { path: path.to_owned(), source };
    let file = File::open(path).map_err(failed)?;
    let mut found = Vec::new();
    let mut at = 0;
    loop {
        let from = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(from) => from,
            // No content from there on.
            Err(rustix::io::Errno::NXIO) => return Ok(found),
            Err(error) => return Err(failed(error.into())),
        };
        let to = rustix::fs::seek(&file, SeekFrom::Hole(from)).map_err(|error| failed(error.into()))?;
        let mut offset = from;
        while offset < to {
            let length = most.min(to - offset);
            found.push(Extent { name: name.to_owned(), path: path.to_owned(), offset, length });
            offset += length;
        }
        at = to;
    }
}

/// Sends a part of a file. Returns the bytes that were sent.
pub(super) fn send(to: &mut impl Write, extent: &Extent, piece: &mut Vec<u8>) -> Result<u64, StreamError> {
    let failed = |source| StreamError::Read { path: extent.path.clone(), source };
    let file = File::open(&extent.path).map_err(failed)?;
    let (mut offset, end) = (extent.offset, extent.offset + extent.length);
    let mut sent = 0;
    while offset < end {
        let length = (end - offset).min(PIECE as u64) as usize;
        piece.resize(length, 0);
        file.read_exact_at(piece, offset).map_err(failed)?;
        if !is_zeros(piece) {
            send_piece(to, &extent.name, offset, piece)?;
            sent += length as u64;
        }
        offset += length as u64;
    }
    Ok(sent)
}

fn begin_piece(to: &mut impl Write, name: &str, offset: u64, length: u32) -> Result<(), StreamError> {
    let size = u16::try_from(name.len()).map_err(|_| StreamError::Name(name.to_owned()))?;
    to.write_all(&size.to_le_bytes())?;
    to.write_all(&offset.to_le_bytes())?;
    to.write_all(&length.to_le_bytes())?;
    Ok(to.write_all(name.as_bytes())?)
}

/// Sends where the receiver has a piece: in the file of this process's memory, at this offset.
pub(super) fn send_place(
    to: &mut impl Write,
    name: &str,
    offset: u64,
    length: u32,
    (pid, there): (u32, u64),
) -> Result<(), StreamError> {
    begin_piece(to, name, offset, length | THERE)?;
    to.write_all(&pid.to_le_bytes())?;
    Ok(to.write_all(&there.to_le_bytes())?)
}

/// Sends a piece.
pub(super) fn send_piece(to: &mut impl Write, name: &str, offset: u64, piece: &[u8]) -> Result<(), StreamError> {
    begin_piece(to, name, offset, piece.len() as u32)?;
    Ok(to.write_all(piece)?)
}

pub(super) fn is_zeros(piece: &[u8]) -> bool {
    piece.iter().all(|it| *it == 0)
}

/// Ends what was sent so far, and waits until the receiver has written it.
pub(super) fn mark(to: &mut impl Write, from: &mut impl Read) -> Result<(), StreamError> {
    to.write_all(&0_u16.to_le_bytes())?;
    to.flush()?;
    let mut answer = [0];
    from.read_exact(&mut answer)?;
    if answer == [ALL_WRITTEN] { Ok(()) } else { Err(StreamError::NotWritten) }
}

/// Writes what comes into files below `dir`, until the stream ends.
pub(super) fn receive(from: &mut impl Read, to: &mut impl Write, dir: &Path) -> Result<(), StreamError> {
    let mut open: Option<(String, File)> = None;
    let mut memory = Memory::default();
    let (mut name, mut piece) = (Vec::new(), Vec::new());
    loop {
        let mut length = [0; 2];
        match from.read_exact(&mut length) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let length = u16::from_le_bytes(length);
        if length == 0 {
            open = None;
            to.write_all(&[ALL_WRITTEN])?;
            to.flush()?;
            continue;
        }
        let (mut offset, mut size) = ([0; 8], [0; 4]);
        from.read_exact(&mut offset)?;
        from.read_exact(&mut size)?;
        let size = u32::from_le_bytes(size);
        let is_there = size & THERE != 0;
        let size = (size & !THERE) as usize;
        if size > PIECE {
            return Err(StreamError::Piece(size));
        }
        name.resize(usize::from(length), 0);
        piece.resize(size, 0);
        from.read_exact(&mut name)?;
        if is_there {
            memory.read(from, dir, &mut piece)?;
        } else {
            from.read_exact(&mut piece)?;
        }
        let name = String::from_utf8_lossy(&name);
        if open.as_ref().is_none_or(|(before, _)| *before != name) {
            open = Some((name.clone().into_owned(), open_below(dir, &name)?));
        }
        if let Some((_, file)) = &open {
            let written = file.write_all_at(&piece, u64::from_le_bytes(offset));
            written.map_err(|source| StreamError::Write { path: dir.join(&*name), source })?;
        }
    }
}

/// Memory that was received before.
#[derive(Default)]
struct Memory {
    open: Option<(u32, File)>,
}

impl Memory {
    /// Fills a piece with the content at the place that comes next.
    fn read(&mut self, from: &mut impl Read, dir: &Path, piece: &mut [u8]) -> Result<(), StreamError> {
        let (mut pid, mut offset) = ([0; 4], [0; 8]);
        from.read_exact(&mut pid)?;
        from.read_exact(&mut offset)?;
        let pid = u32::from_le_bytes(pid);
        let path = dir.join(MEMORY).join(pages_name(pid));
        let failed = |source| StreamError::Read { path: path.clone(), source };
        if self.open.as_ref().is_none_or(|(before, _)| *before != pid) {
            let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path);
            self.open = Some((pid, opened.map_err(failed)?));
        }
        match &self.open {
            Some((_, file)) => file.read_exact_at(piece, u64::from_le_bytes(offset)).map_err(failed),
            None => Ok(()),
        }
    }
}

/// The file of this name, `DIRECTORY/FILE`, which exists.
fn open_below(dir: &Path, name: &str) -> Result<File, StreamError> {
    let path = below(dir, name).ok_or_else(|| StreamError::Name(name.to_owned()))?;
    let opened = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(&path);
    opened.map_err(|source| StreamError::Write { path, source })
}

/// The path of a name of two parts, none of which leads up; none for another name.
pub(super) fn below(dir: &Path, name: &str) -> Option<PathBuf> {
    let parts: Vec<_> = Path::new(name).components().collect();
    let is_plain = parts.len() == 2 && parts.iter().all(|it| matches!(it, Component::Normal(_)));
    is_plain.then(|| dir.join(name))
}

/// Gives the memory of a file's content back, and keeps its size: nobody reads it any more.
pub(super) fn forget(file: &File) -> io::Result<()> {
    let size = file.metadata()?.len();
    if size == 0 {
        return Ok(());
    }
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file.as_fd(), flags, 0, size)?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A file with a hole, a stretch of zeros and content of more than a piece.
    fn file(path: &Path) -> Vec<u8> {
        let mut content = vec![0; 5 * PIECE + 77];
        content[..100].fill(1);
        let (from, to) = (3 * PIECE - 50, 4 * PIECE + 10);
        content[from..to].fill(2);
        let file = File::create(path).unwrap();
        file.set_len(content.len() as u64).unwrap();
        file.write_all_at(&content[..PIECE], 0).unwrap();
        file.write_all_at(&content[from..to], from as u64).unwrap();
        content
    }

    #[test]
    fn files_arrive_as_they_are_without_their_holes_and_zeros() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for dir in [here.path(), there.path()] {
            fs::create_dir(dir.join("0")).unwrap();
        }
        let content = file(&here.path().join("0/a"));
        File::create(there.path().join("0/a")).unwrap().set_len(content.len() as u64).unwrap();
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let mut sent = 0;
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                let mut answers = theirs.try_clone().unwrap();
                receive(&mut theirs, &mut answers, there.path())
            });
            let found = extents("0/a", &here.path().join("0/a"), 64 << 10).unwrap();
            assert!(found.iter().all(|it| it.length <= 64 << 10));
            let mut piece = Vec::new();
            sent = found.iter().map(|it| send(&mut ours, it, &mut piece).unwrap()).sum();
            let mut answers = ours.try_clone().unwrap();
            mark(&mut ours, &mut answers).unwrap();
            ours.shutdown(std::net::Shutdown::Write).unwrap();
            receiver.join().unwrap().unwrap();
        });
        assert!(fs::read(there.path().join("0/a")).unwrap() == content);
        assert!(sent < 2 * PIECE as u64, "{sent}");
        forget(&OpenOptions::new().write(true).open(here.path().join("0/a")).unwrap()).unwrap();
        assert_eq!(fs::metadata(here.path().join("0/a")).unwrap().len(), content.len() as u64);
        assert!(extents("0/a", &here.path().join("0/a"), 1).unwrap().is_empty());
    }

    #[test]
    fn no_name_leads_out_of_the_directory() {
        let dir = Path::new("/d");
        assert_eq!(below(dir, "0/a"), Some("/d/0/a".into()));
        for name in ["a", "/etc/passwd", "../a/b", "0/../a", "0/..", "0/a/b", "", "0/"] {
            assert_eq!(below(dir, name), None, "{name}");
        }
        let there = tempfile::tempdir().unwrap();
        fs::create_dir(there.path().join("0")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", there.path().join("0/a")).unwrap();
        for name in ["0/a", "../b/c", "0/new"] {
            let said = [&(name.len() as u16).to_le_bytes()[..], &[0; 8], &1_u32.to_le_bytes(), name.as_bytes(), b"x"];
            let received = receive(&mut said.concat().as_slice(), &mut io::sink(), there.path());
            assert!(received.is_err(), "{name}");
        }
        let too_large = [&3_u16.to_le_bytes()[..], &[0; 8], &u32::MAX.to_le_bytes(), b"0/a"].concat();
        assert!(matches!(
            receive(&mut too_large.as_slice(), &mut io::sink(), there.path()),
            Err(StreamError::Piece(_))
        ));
    }
}
