//! An archive of a container that podman has exported, as an image.
//!
//! ```text
//!   the archive, unpacked by zstd       in the store
//!
//!   config.dump, spec.dump, …           ─► cut by content, many small members together
//!   checkpoint/core-1.img, …
//!   checkpoint/pages-1.img              ─► cut by content from its own beginning
//!   checkpoint/rekindle-data-0.raw      ─► cut where the image in the archive has pieces
//! ```
//!
//! So the pieces are those that the image would have in a directory: the next archive of the container finds again what has not
//! changed, wherever it lies. Stored is every byte of the archive, so it has what podman wrote: order, owners, modes, extended
//! attributes, links. Compression is not kept, since pieces are compressed.
//!
//! In the store, an archive is a directory with one file, [`ARCHIVE`], and a head that says which container it is of. Releases that
//! know nothing of that copy it as such a directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io::{self, BufReader, Read, Seek};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rekindle_images::{MANIFEST, Manifest, limits};
use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::piece::MAX_LENGTH;
use crate::tar::{self, Kind, Member, Source, TarError};
use crate::tree;

/// The archive's name in the directory that it is copied to.
pub const ARCHIVE: &str = "container.tar";

/// What a file compressed with zstd begins with (RFC 8878). podman exports such archives by default.
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// And one compressed with gzip (RFC 1952).
const GZIP: [u8; 2] = [0x1f, 0x8b];
/// The directory in an archive that has CRIU's images and Rekindle's.
const CHECKPOINT: &str = "checkpoint";
/// podman's description of the container, and of what its runtime is told.
const CONFIG: &str = "config.dump";
const SPEC: &str = "spec.dump";
const LONGEST_CONFIG: u64 = 16 << 20;
/// The manifest with its envelope.
const LONGEST_MANIFEST: u64 = limits::MAX_MANIFEST + 4096;
/// A name or an id is no longer.
const LONGEST_NAME: usize = 255;
/// A member at least as long is cut from its own beginning.
const ALONE: u64 = 64 << 10;

/// The container of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Container {
    /// Its name when the archive was made.
    pub name: String,
    /// Its id, which it keeps when it is restored under its own name.
    pub id: String,
}

impl Container {
    fn is_plain(&self) -> bool {
        let plain = |it: &String| (1..=LONGEST_NAME).contains(&it.len()) && !it.contains(char::is_control);
        plain(&self.name) && plain(&self.id)
    }
}

/// A stretch of an archive, behind the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) end: u64,
    /// Whether it is a piece of the image, which is not cut.
    pub(crate) is_piece: bool,
}

/// An archive that was looked through.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    status: Metadata,
    contents: Contents,
}

/// What was found in an archive.
#[derive(Debug)]
pub(crate) struct Contents {
    pub(crate) container: Container,
    pub(crate) checkpoint: String,
    pub(crate) created: u64,
    pub(crate) host: String,
    /// Bytes without compression.
    pub(crate) length: u64,
    pub(crate) parts: Vec<Part>,
}

impl Archive {
    /// Whether a file, or a directory that an archive was copied to, has an archive: where it is then.
    #[must_use]
    pub fn at(path: &Path) -> Option<PathBuf> {
        if path.is_file() {
            return Some(path.to_owned());
        }
        let inside = path.join(ARCHIVE);
        (inside.is_file() && !path.join(MANIFEST).exists()).then_some(inside)
    }

    /// Looks through an archive: at its members, not at the content of most.
    ///
    /// # Errors
    /// [`StoreError::Archive`] for a file that is no whole archive of a container with an image of Rekindle, and
    /// [`StoreError::Local`].
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let file = File::open(path).map_err(StoreError::local("open", path))?;
        let status = file.metadata().map_err(StoreError::local("ask about", path))?;
        let contents = contents(&mut *input(file, &status).map_err(|error| of_tar(error, path))?);
        Ok(Self { path: path.to_owned(), status, contents: contents.map_err(|error| of_tar(error, path))? })
    }

    /// For tests: a file that nobody has looked through.
    #[cfg(test)]
    pub(crate) fn unchecked(path: &Path, contents: Contents) -> Self {
        #[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
        Self { path: path.to_owned(), status: path.metadata().unwrap(), contents }
    }

    /// The container.
    #[must_use]
    pub fn container(&self) -> &Container {
        &self.contents.container
    }

    /// The name of the checkpoint.
    #[must_use]
    pub fn checkpoint(&self) -> &str {
        &self.contents.checkpoint
    }

    pub(crate) fn contents(&self) -> &Contents {
        &self.contents
    }

    /// When the file was written last.
    pub(crate) fn modified(&self) -> (i64, u32) {
        tree::modified(&self.status)
    }

    /// Reads it from its beginning, without compression.
    pub(crate) fn read(&self) -> Result<Box<dyn Source>, StoreError> {
        let file = File::open(&self.path).map_err(StoreError::local("open", &self.path))?;
        input(file, &self.status).map_err(|error| of_tar(error, &self.path))
    }

    /// Makes sure that it is still the file that was looked through.
    pub(crate) fn compare(&self) -> Result<(), StoreError> {
        let now = self.path.metadata().map_err(StoreError::local("ask about", &self.path))?;
        let identity = |it: &Metadata| (it.dev(), it.ino(), it.len(), tree::modified(it));
        if identity(&now) == identity(&self.status) {
            return Ok(());
        }
        Err(StoreError::refused(format!(
            "{} was changed while it was read; try again when nobody writes",
            self.path.display()
        )))
    }

    /// What a failure to read it means.
    pub(crate) fn unreadable(&self, error: io::Error) -> StoreError {
        of_tar(of_io(error), &self.path)
    }
}

fn of_tar(error: TarError, path: &Path) -> StoreError {
    match error {
        TarError::Bad(what) => StoreError::Archive { path: path.to_owned(), what },
        TarError::Io(source) => StoreError::local("read", path)(source),
    }
}

/// What zstd complains of is no error of the system's.
fn of_io(error: io::Error) -> TarError {
    match error.raw_os_error() {
        None if error.kind() == io::ErrorKind::UnexpectedEof => error.into(),
        None => TarError::Bad(format!("it cannot be decompressed: {error}")),
        Some(_) => TarError::Io(error),
    }
}

/// A file that is not compressed, of which so many bytes are left.
struct Plain {
    file: BufReader<File>,
    left: u64,
}

impl Read for Plain {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.left = self.left.saturating_sub(read as u64);
        Ok(read)
    }
}

impl Source for Plain {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or(io::ErrorKind::UnexpectedEof)?;
        self.file.seek_relative(bytes.cast_signed())
    }
}

struct Compressed(zstd::Decoder<'static, BufReader<File>>);

impl Read for Compressed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Source for Compressed {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut self.0).take(bytes), &mut io::sink())?;
        if skipped == bytes { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

fn input(mut file: File, status: &Metadata) -> Result<Box<dyn Source>, TarError> {
    let mut magic = Vec::new();
    (&mut file).take(ZSTD.len() as u64).read_to_end(&mut magic)?;
    file.rewind()?;
    if magic.starts_with(&GZIP) {
        return Err(TarError::Bad("it is compressed by gzip: `gzip --decompress` it first".to_owned()));
    }
    Ok(match magic == ZSTD {
        true => Box::new(Compressed(zstd::Decoder::new(file)?)),
        false => Box::new(Plain { file: BufReader::with_capacity(64 << 10, file), left: status.len() }),
    })
}

/// Looks through an archive.
pub(crate) fn contents(source: &mut dyn Source) -> Result<Contents, TarError> {
    let bad = |what: &str| TarError::Bad(what.to_owned());
    let manifest_path = format!("{CHECKPOINT}/{MANIFEST}");
    let (mut container, mut manifest, mut has_spec) = (None, None, false);
    let mut members = Vec::new();
    let is_wanted = |it: &Member| {
        it.kind == Kind::File
            && ((it.path == CONFIG && it.size <= LONGEST_CONFIG)
                || (it.path == manifest_path && it.size <= LONGEST_MANIFEST))
    };
    let length = tar::read(source, &is_wanted, &mut |member, content| {
        match content {
            Some(content) if member.path == CONFIG => {
                let read = serde_json::from_slice(&content).ok().filter(Container::is_plain);
                container = Some(read.ok_or_else(|| bad("what it says of the container cannot be read"))?);
            }
            Some(content) => {
                let read = Manifest::of_file(content);
                manifest =
                    Some(read.map_err(|error| TarError::Bad(format!("the image in it cannot be read: {error}")))?);
            }
            None if member.kind == Kind::File => {
                has_spec |= member.path == SPEC;
                let name = member.path.strip_prefix(CHECKPOINT).and_then(|it| it.strip_prefix('/'));
                let is_image = name.is_some_and(rekindle_images::is_image_file);
                if is_image || member.size >= ALONE {
                    let name = name.filter(|_| is_image).map(str::to_owned);
                    members.push((member.begin, member.size, name));
                }
            }
            None => {}
        }
        Ok(())
    })
    .map_err(|error| if let TarError::Io(error) = error { of_io(error) } else { error })?;
    let container = container.filter(|_| has_spec);
    let container = container.ok_or_else(|| bad("it lacks what podman needs to make the container again"))?;
    let manifest = manifest.ok_or_else(|| bad("it has no image of Rekindle"))?;
    if manifest.parent.is_some() {
        return Err(bad("its image builds on another one, which is not in it"));
    }
    Ok(Contents {
        container,
        checkpoint: manifest.id.to_string(),
        created: manifest.created,
        parts: parts(&members, &tree::cuts_of(&manifest), length),
        host: manifest.host.name,
        length,
    })
}

/// Where an archive is cut that has such members: where each begins, its length, and its name if it is a file of the image.
fn parts(members: &[(u64, u64, Option<String>)], cuts: &BTreeMap<String, BTreeSet<u64>>, length: u64) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut at = 0;
    let mut until = |end: u64, is_piece: bool| {
        if end > at {
            parts.push(Part { end, is_piece: is_piece && end - at <= MAX_LENGTH });
            at = end;
        }
    };
    for (begin, size, name) in members {
        until(*begin, false);
        let cuts = name.as_ref().and_then(|it| cuts.get(it));
        for cut in cuts.into_iter().flatten().filter(|it| *it < size) {
            until(begin + cut, true);
        }
        until(begin + size, cuts.is_some());
    }
    until(length, false);
    parts
}

/// For the fuzzer: reads an archive from any bytes. Its parts are all of it, each where there are bytes.
#[doc(hidden)]
pub fn fuzz_archive(bytes: &[u8]) {
    if let Ok(contents) = contents(&mut { bytes }) {
        assert_eq!(contents.length, bytes.len() as u64);
        let mut at = 0;
        for Part { end, .. } in contents.parts {
            assert!(end > at);
            at = end;
        }
        assert_eq!(at, contents.length);
    }
}
