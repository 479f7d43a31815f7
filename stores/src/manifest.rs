//! What a store knows of an image: a short head, and a body that lists its files.
//!
//! ```text
//!   images/HASH   │ magic, 8 │ length of the head, 4 │ head, sealed │ body, by zstd, sealed │
//!
//!   head   name, time, host, checkpoint, container, sizes; length and hash of the body      what `ls` shows
//!   body   the image and those that it builds on; folders, links and files with mode and time; of each file its runs:
//!          a piece or a hole; of each piece its hash, its length and where it is
//! ```
//!
//! Both are JSON. The object's name is the hash of the image's name, and both parts are sealed for it, so that one
//! image cannot be put in the place of another. A manifest is not trusted even so: all that is in it is checked
//! before it is used.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::archive::{ARCHIVE, Container};
use crate::hash::Hash;
use crate::pack::Place;
use crate::piece::{Coder, MAX_LENGTH};
use crate::seal::Sealer;
use crate::transport::ObjectName;

/// The folder of manifests.
pub(crate) const IMAGES: &str = "images";
/// So much of a manifest's object has its head for sure.
pub(crate) const HEAD: u64 = 16 << 10;

const MAGIC: &[u8; 8] = b"rkstore1";
const BEFORE_HEAD: usize = MAGIC.len() + 4;
/// The longest body, in bytes before compression.
const MAX_BODY: u64 = 1 << 30;
const LEVEL: i32 = 3;

/// What `rekindle images ls` shows of an image in a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The image's name in the store.
    pub name: String,
    /// When it was put there, in seconds since 1970, by the clock of who did.
    pub stored_at: u64,
    /// When the checkpoint was taken, in seconds since 1970.
    pub created: u64,
    /// The name of the machine on which it was taken.
    pub host: String,
    /// The checkpoint's own name.
    pub checkpoint: String,
    /// The number of images that it builds on, which are stored with it.
    pub parents: u32,
    /// The container, if the image is an archive of one that podman has exported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<Container>,
    /// Files, those of the images that it builds on among them.
    pub files: u64,
    /// The bytes of their content, without holes.
    pub bytes: u64,
    /// The bytes that the store has for it. Other images may need some of them too.
    pub stored: u64,
    /// The length of the body.
    pub body_length: u64,
    /// The hash of the body.
    pub body_hash: Hash,
}

/// The files of an image and where their content is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Body {
    /// The image's folder, relative to the root of all: empty where that is the root itself.
    pub(crate) image: String,
    /// The folders of the images that it builds on, the nearest first.
    pub(crate) parents: Vec<String>,
    /// All folders, links and files, each folder before what is in it. The first is the root, with an empty path.
    pub(crate) entries: Vec<Entry>,
    /// The objects that hold the pieces.
    pub(crate) objects: Vec<ObjectName>,
    /// The pieces, each once.
    pub(crate) pieces: Vec<Piece>,
}

/// A folder, a link or a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    /// Relative to the root.
    pub(crate) path: String,
    /// The mode's lower twelve bits.
    pub(crate) mode: u32,
    /// The time of the last change, seconds since 1970 and nanoseconds.
    pub(crate) modified: (i64, u32),
    pub(crate) kind: Kind,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
pub(crate) enum Kind {
    Folder,
    Link(String),
    File(Vec<Run>),
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "lowercase")]
pub(crate) enum Run {
    /// So many bytes that the file system does not store.
    Hole(u64),
    /// The piece with this number.
    Piece(u32),
}

/// A piece and where it is. Serialised as an array, since there are many.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(Hash, u64, u32, u64, u64)", into = "(Hash, u64, u32, u64, u64)")]
pub(crate) struct Piece {
    pub(crate) hash: Hash,
    pub(crate) length: u64,
    /// The number of its object.
    pub(crate) object: u32,
    pub(crate) offset: u64,
    pub(crate) stored: u64,
}

impl From<(Hash, u64, u32, u64, u64)> for Piece {
    fn from((hash, length, object, offset, stored): (Hash, u64, u32, u64, u64)) -> Self {
        Self { hash, length, object, offset, stored }
    }
}

impl From<Piece> for (Hash, u64, u32, u64, u64) {
    fn from(it: Piece) -> Self {
        (it.hash, it.length, it.object, it.offset, it.stored)
    }
}

/// Whether an image may have this name: letters, digits and `.`, `_`, `+`, `-`, `@`, `:`, and no dot or dash first.
#[must_use]
pub fn is_image_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-@:".contains(&byte);
    (1..=128).contains(&name.len()) && !name.starts_with(['.', '-']) && name.bytes().all(allowed)
}

/// The object of the image with this name.
pub(crate) fn object_of(coder: &Coder, name: &str) -> Result<ObjectName, StoreError> {
    ObjectName::made(format!("{IMAGES}/{}", coder.name_of(&[b"image", name.as_bytes()])))
}

impl Body {
    /// Where a piece is.
    pub(crate) fn place(&self, piece: &Piece) -> Result<Place, StoreError> {
        let object = self.objects.get(piece.object as usize);
        let object = object.ok_or_else(|| StoreError::damaged("a manifest", "a piece is in no object"))?.clone();
        Ok(Place { object, offset: piece.offset, stored: piece.stored })
    }

    /// The piece with this number.
    pub(crate) fn piece(&self, number: u32) -> Result<&Piece, StoreError> {
        self.pieces.get(number as usize).ok_or_else(|| StoreError::damaged("a manifest", "a file has no such piece"))
    }

    /// The bytes of files without their holes.
    pub(crate) fn bytes(&self) -> u64 {
        let runs = self.entries.iter().filter_map(|it| if let Kind::File(runs) = &it.kind { Some(runs) } else { None });
        let length = |run: &Run| if let Run::Hole(_) = run { 0 } else { self.length(run) };
        runs.flatten().map(length).fold(0, u64::saturating_add)
    }

    /// The bytes of a part of a file.
    pub(crate) fn length(&self, run: &Run) -> u64 {
        match run {
            Run::Hole(length) => *length,
            Run::Piece(number) => self.pieces.get(*number as usize).map_or(0, |it| it.length),
        }
    }

    /// What the store has for it.
    pub(crate) fn stored(&self) -> u64 {
        self.pieces.iter().map(|it| it.stored).fold(0, u64::saturating_add)
    }

    /// The number of files.
    pub(crate) fn files(&self) -> u64 {
        self.entries.iter().filter(|it| matches!(it.kind, Kind::File(_))).count() as u64
    }

    /// Whether it has an archive and nothing else.
    fn is_archive(&self) -> bool {
        match self.entries.as_slice() {
            [_, Entry { path, kind: Kind::File(_), .. }] => self.image.is_empty() && path == ARCHIVE,
            _ => false,
        }
    }

    /// Whether its parts agree, and nothing in it leads out of the folder that it is written to.
    fn check(&self) -> Result<(), String> {
        let mut folders = HashSet::new();
        let mut paths = HashSet::new();
        for (number, entry) in self.entries.iter().enumerate() {
            let Entry { path, mode, modified, kind } = entry;
            let bad = |what: &str| Err(format!("{path:?} {what}"));
            if (number == 0) != path.is_empty() {
                return bad("is not where the root should be");
            }
            if number > 0 && !is_below(path) {
                return bad("is no path below the image");
            }
            // So no link is on the way to anything.
            let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
            if number > 0 && !folders.contains(parent) {
                return bad("is in no folder of the image");
            }
            if !paths.insert(path.as_str()) {
                return bad("is there twice");
            }
            if *mode > 0o7777 || modified.1 >= 1_000_000_000 {
                return bad("has a mode or a time that cannot be");
            }
            match kind {
                // Who copies it as root would make a program that runs as root for everybody.
                Kind::File(_) if *mode > 0o777 => return bad("runs as another user"),
                Kind::Folder => {
                    folders.insert(path.as_str());
                }
                Kind::Link(_) | Kind::File(_) if number == 0 => return bad("is no folder"),
                Kind::Link(target) if target.is_empty() || target.len() > 4095 || target.contains('\0') => {
                    return bad("leads to what is no path");
                }
                Kind::Link(_) => {}
                Kind::File(runs) => {
                    let mut size = 0_u64;
                    for run in runs {
                        let length = match run {
                            Run::Hole(length) => *length,
                            Run::Piece(piece) => match self.pieces.get(*piece as usize) {
                                Some(piece) => piece.length,
                                None => return bad("has a piece that the image lacks"),
                            },
                        };
                        size = match size.checked_add(length) {
                            Some(size) if length > 0 && size <= i64::MAX as u64 => size,
                            _ => return bad("has a length that cannot be"),
                        };
                    }
                }
            }
        }
        if self.entries.is_empty() {
            return Err("it has no files".to_owned());
        }
        if let Some(folder) = [&self.image].into_iter().chain(&self.parents).find(|it| !folders.contains(it.as_str())) {
            return Err(format!("the image's folder {folder:?} is not there"));
        }
        for piece in &self.pieces {
            let inside = piece.offset.checked_add(piece.stored).is_some();
            if piece.length == 0
                || piece.length > MAX_LENGTH
                || piece.stored > MAX_LENGTH + 1 + Sealer::overhead()
                || !inside
            {
                return Err(format!("piece {} has a length that cannot be", piece.hash));
            }
            if piece.object as usize >= self.objects.len() {
                return Err(format!("piece {} is in no object", piece.hash));
            }
        }
        Ok(())
    }
}

/// Whether a path is relative, in its shortest form, and leads nowhere else.
fn is_below(path: &str) -> bool {
    path.len() <= 4095
        && path.split('/').all(|part| !matches!(part, "" | "." | "..") && part.len() <= 255 && !part.contains('\0'))
}

/// Writes a manifest. The head's length and hash of the body are filled in.
pub(crate) fn write(coder: &Coder, object: &ObjectName, mut head: Head, body: &Body) -> Result<Vec<u8>, StoreError> {
    body.check().map_err(|what| StoreError::refused(format!("the image cannot be stored: {what}")))?;
    let failed = |error: &dyn std::fmt::Display| StoreError::refused(format!("cannot write a manifest: {error}"));
    let body = serde_json::to_vec(body).map_err(|error| failed(&error))?;
    if body.len() as u64 > MAX_BODY {
        return Err(StoreError::refused("the image has more files and pieces than a manifest may have"));
    }
    head.body_length = body.len() as u64;
    head.body_hash = coder.hash(&body);
    let head = serde_json::to_vec(&head).map_err(|error| failed(&error))?;
    let name = object.as_str().as_bytes();
    let head = coder.sealer().seal(&[b"head", name], &[&head])?;
    let compressed = zstd::bulk::compress(&body, LEVEL).map_err(|error| failed(&error))?;
    let body = coder.sealer().seal(&[b"body", name], &[&compressed])?;
    if BEFORE_HEAD as u64 + head.len() as u64 > HEAD {
        return Err(StoreError::refused("the names of the image are too long for the head of a manifest"));
    }
    Ok([&MAGIC[..], &(head.len() as u32).to_le_bytes(), &head, &body].concat())
}

/// Reads the head of a manifest, of which these are the first bytes, and says where the body begins.
pub(crate) fn read_head(coder: &Coder, object: &ObjectName, bytes: &[u8]) -> Result<(Head, usize), StoreError> {
    let bad = |what: &str| StoreError::damaged(object.as_str(), what);
    let (magic, rest) = bytes.split_first_chunk::<8>().ok_or_else(|| bad("it is too short"))?;
    if magic[..7] == MAGIC[..7] && magic[7] > MAGIC[7] && magic[7].is_ascii_digit() {
        let found = u32::from(magic[7] - b'0');
        return Err(StoreError::Newer { object: object.to_string(), found, supported: 1 });
    }
    if magic != MAGIC {
        return Err(bad("it does not begin like a manifest"));
    }
    let (length, rest) = rest.split_first_chunk::<4>().ok_or_else(|| bad("it is too short"))?;
    let length = u32::from_le_bytes(*length) as usize;
    let sealed = rest.get(..length).ok_or_else(|| bad("it is too short"))?.to_vec();
    let opened = coder.sealer().open(&[b"head", object.as_str().as_bytes()], sealed);
    let opened = opened.map_err(|_| bad("its head was changed, or made with another key"))?;
    let head: Head = serde_json::from_slice(&opened).map_err(|_| bad("its head cannot be read"))?;
    if !is_image_name(&head.name) || object_of(coder, &head.name)? != *object {
        return Err(bad("it is the manifest of another image"));
    }
    Ok((head, BEFORE_HEAD + length))
}

/// Reads a manifest.
pub(crate) fn read(coder: &Coder, object: &ObjectName, mut bytes: Vec<u8>) -> Result<(Head, Body), StoreError> {
    let bad = |what: &str| StoreError::damaged(object.as_str(), what);
    let (head, begin) = read_head(coder, object, &bytes)?;
    bytes.drain(..begin);
    let opened = coder.sealer().open(&[b"body", object.as_str().as_bytes()], bytes);
    let opened = opened.map_err(|_| bad("its body was changed, or made with another key"))?;
    if head.body_length > MAX_BODY {
        return Err(bad("its body is too long"));
    }
    let body = zstd::bulk::decompress(&opened, head.body_length as usize);
    let body = body.map_err(|_| bad("its body cannot be decompressed"))?;
    if !coder.hash(&body).is(&head.body_hash) {
        return Err(bad("its head belongs to another body"));
    }
    let body = parse(&body).map_err(|what| bad(&what))?;
    if head.container.is_some() && !body.is_archive() {
        return Err(bad("it is that of an archive, and has other files"));
    }
    Ok((head, body))
}

/// Reads and checks the body of a manifest, as JSON.
fn parse(bytes: &[u8]) -> Result<Body, String> {
    let body: Body = serde_json::from_slice(bytes).map_err(|error| format!("it cannot be read: {error}"))?;
    body.check()?;
    Ok(body)
}

/// For the fuzzer: reads the body of a manifest from any bytes, and if it can be read, writes it again.
#[doc(hidden)]
pub fn fuzz_body(bytes: &[u8]) {
    if let Ok(body) = parse(bytes) {
        let written = serde_json::to_vec(&body).unwrap_or_default();
        assert_eq!(parse(&written).as_ref(), Ok(&body));
        let _ = (body.bytes(), body.stored(), body.files());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::key::Keys;

    fn coder() -> Coder {
        Coder::new(&Keys::derive(None), false)
    }

    fn sample() -> (Head, Body) {
        let hash = Hash::of(&[0; 32], b"x");
        let entry = |path: &str, kind| Entry { path: path.to_owned(), mode: 0o600, modified: (1, 2), kind };
        let body = Body {
            image: "second".to_owned(),
            parents: vec!["first".to_owned()],
            entries: vec![
                entry("", Kind::Folder),
                entry("first", Kind::Folder),
                entry("second", Kind::Folder),
                entry("second/parent", Kind::Link("../first".to_owned())),
                entry("second/a", Kind::File(vec![Run::Hole(4096), Run::Piece(0), Run::Piece(0)])),
            ],
            objects: vec![ObjectName::parse("pieces/aa/b-1").unwrap()],
            pieces: vec![Piece { hash, length: 10, object: 0, offset: 0, stored: 12 }],
        };
        let head = Head {
            name: "job-1".to_owned(),
            stored_at: 3,
            created: 2,
            host: "node".to_owned(),
            checkpoint: "0".repeat(32),
            parents: 1,
            container: None,
            files: body.files(),
            bytes: body.bytes(),
            stored: body.stored(),
            body_length: 0,
            body_hash: hash,
        };
        (head, body)
    }

    #[test]
    fn a_manifest_reads_back_and_every_changed_byte_is_found() {
        let (coder, (head, body)) = (coder(), sample());
        let object = object_of(&coder, "job-1").unwrap();
        let written = write(&coder, &object, head.clone(), &body).unwrap();
        let (found, read_body) = read(&coder, &object, written.clone()).unwrap();
        assert_eq!((found.name, found.bytes, read_body), (head.name.clone(), 20, body.clone()));
        for at in 0..written.len() {
            let mut changed = written.clone();
            changed[at] ^= 1;
            assert!(read(&coder, &object, changed).is_err(), "byte {at}");
            assert!(read(&coder, &object, written[..at].to_vec()).is_err(), "length {at}");
        }
        let other = object_of(&coder, "job-2").unwrap();
        assert!(read(&coder, &other, written.clone()).is_err());
        let mut newer = written;
        newer[7] = b'2';
        assert!(matches!(read(&coder, &object, newer), Err(StoreError::Newer { found: 2, .. })));
    }

    #[test]
    fn a_manifest_of_an_archive_has_that_and_nothing_else() {
        let coder = coder();
        let object = object_of(&coder, "job-1").unwrap();
        let (mut head, mut body) = sample();
        let read =
            |head: &Head, body: &Body| read(&coder, &object, write(&coder, &object, head.clone(), body).unwrap());
        // An older release has written none, and would not know what it is.
        let of_older = serde_json::to_value(&head).unwrap();
        assert!(of_older.get("container").is_none());
        head.container = Some(Container { name: "train".to_owned(), id: "f0".to_owned() });
        assert!(read(&head, &body).is_err());
        (body.image, body.parents) = (String::new(), Vec::new());
        body.entries.truncate(1);
        assert!(read(&head, &body).is_err());
        for (path, is_good) in [("other", false), (ARCHIVE, true)] {
            let kind = Kind::File(vec![Run::Piece(0)]);
            let archive = Entry { path: path.to_owned(), mode: 0o600, modified: (1, 2), kind };
            let body = Body { entries: vec![body.entries[0].clone(), archive], ..body.clone() };
            let found = read(&head, &body);
            assert_eq!(found.is_ok(), is_good, "{path}: {found:?}");
            assert!(found.is_err() || found.unwrap().0.container == head.container);
        }
    }

    #[test]
    fn what_leads_elsewhere_or_does_not_agree_is_refused() {
        type Change = fn(&mut Body);
        let changes: [(&str, Change); 15] = [
            ("set-user-id", |it| it.entries[4].mode = 0o4755),
            ("root", |it| it.entries[0].path = "x".to_owned()),
            ("absolute", |it| it.entries[4].path = "/etc/passwd".to_owned()),
            ("up", |it| it.entries[4].path = "second/../../x".to_owned()),
            ("dot", |it| it.entries[4].path = "second/./x".to_owned()),
            ("through a link", |it| it.entries[4].path = "second/parent/a".to_owned()),
            ("twice", |it| it.entries[4].path = "second/parent".to_owned()),
            ("no folder", |it| it.entries[4].path = "third/a".to_owned()),
            ("mode", |it| it.entries[4].mode = 0o10000),
            ("no piece", |it| it.pieces.clear()),
            ("no object", |it| it.objects.clear()),
            ("long piece", |it| it.pieces[0].length = u64::MAX),
            ("long holes", |it| it.entries[4].kind = Kind::File(vec![Run::Hole(u64::MAX), Run::Hole(2)])),
            ("no parent", |it| it.parents = vec!["second/parent".to_owned()]),
            ("empty", |it| it.entries.clear()),
        ];
        for (what, change) in changes {
            let (_, mut body) = sample();
            change(&mut body);
            assert!(body.check().is_err(), "{what}");
            assert!(parse(&serde_json::to_vec(&body).unwrap()).is_err(), "{what}");
        }
    }

    #[test]
    fn names_of_images_are_plain() {
        for name in ["job", "job-1.tar", "a:b@c+d_E"] {
            assert!(is_image_name(name), "{name}");
        }
        for name in ["", ".", "..", "-rf", "a/b", "a b", "ä", "a\0", &"a".repeat(129)] {
            assert!(!is_image_name(name), "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            fuzz_body(&bytes);
            let object = object_of(&coder(), "x").unwrap();
            prop_assert!(read(&coder(), &object, bytes).is_err());
        }

        #[test]
        fn a_changed_body_is_read_or_refused(at: usize, by in "[a-z0-9\"{}:,\\[\\]./-]{0,4}", gone in 0_usize..6) {
            let mut text = serde_json::to_string(&sample().1).unwrap();
            let at = at % text.len();
            text.replace_range(at..(at + gone).min(text.len()), &by);
            fuzz_body(text.as_bytes());
            if let Ok(body) = parse(text.as_bytes()) {
                prop_assert!(body.entries.iter().skip(1).all(|it| is_below(&it.path)));
            }
        }
    }
}
