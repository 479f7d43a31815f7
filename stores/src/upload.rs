//! Putting an image into a store.
//!
//! ```text
//!   lease ─► list what is there ─► pieces that are not ─► say what the image needs ─► is it all there, and
//!                                        ▲                                            not about to be removed?
//!                                        └───────────────────────── no ───────────────────┤ yes
//!                                                                                          ▼
//!                                                                    manifest, unless there is one ─► lease ends
//! ```

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::StoreError;
use crate::archive::{ARCHIVE, Archive, Container};
use crate::cut::{Cutter, LONGEST};
use crate::fetch;
use crate::hash::Hash;
use crate::lease::{CONDEMNED, Lease, get_sealed};
use crate::manifest::{self, Body, Entry, Head, Kind, Piece, Run};
use crate::pack::{self, Builder, LARGE, PACKS, PIECES, Place};
use crate::parallel::{each, lock};
use crate::piece::MAX_LENGTH;
use crate::progress::{Meter, OnProgress};
use crate::store::{Store, StoredImage, put_once};
use crate::transport::{Found, ObjectName};
use crate::tree::{OnDisk, OnDiskKind, Tree, stored_ranges};

/// How often an upload begins anew because objects that it relied on are being removed. From the third time on it relies on none
/// but its own, which no collection removes while its lease lives.
const ATTEMPTS: usize = 5;
const ALONE: usize = 2;

/// What an upload did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Sent {
    /// The image's name in the store.
    pub name: String,
    /// The number of images that it builds on, which were stored with it.
    pub parents: usize,
    /// The container, if the image is an archive of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<Container>,
    /// Files, those of the images that it builds on among them.
    pub files: u64,
    /// The bytes of their content, without holes.
    pub bytes: u64,
    /// What the store has for the image.
    pub stored: u64,
    /// The number of its pieces.
    pub pieces: u64,
    /// The pieces that were not there yet.
    pub sent_pieces: u64,
    /// The bytes that were sent for them.
    pub sent_bytes: u64,
}

/// What the head of a manifest says of the image.
struct About<'a> {
    created: u64,
    host: &'a str,
    checkpoint: &'a str,
    container: Option<&'a Container>,
}

/// The files of an image, their pieces named by number in a list of hashes that comes beside them.
struct Draft {
    image: String,
    parents: Vec<String>,
    entries: Vec<Entry>,
    pieces: Vec<(Hash, u64)>,
}

impl Store {
    /// Stores the image in a directory, and those that it builds on, under this name.
    ///
    /// # Errors
    /// [`StoreError::ImageExists`], [`StoreError::Image`] for an image that is not whole, [`StoreError::Refused`] for
    /// one that changes meanwhile, and what the transport says. What was sent stays; the next upload finds it.
    pub fn put_directory(&self, directory: &Path, name: &str, tell: OnProgress<'_>) -> Result<Sent, StoreError> {
        let tree = Tree::of(directory)?;
        let about = About {
            created: tree.summary.created,
            host: &tree.summary.host,
            checkpoint: &tree.summary.id.to_string(),
            container: None,
        };
        self.upload(name, &about, &|session| session.send_tree(&tree, &Meter::new(tree.size(), tell)))
    }

    /// Stores an archive of a container, which podman has exported, under this name.
    ///
    /// # Errors
    /// As for [`put_directory`](Self::put_directory), and [`StoreError::Archive`].
    pub fn put_archive(&self, archive: &Archive, name: &str, tell: OnProgress<'_>) -> Result<Sent, StoreError> {
        let found = archive.contents();
        let about = About {
            created: found.created,
            host: &found.host,
            checkpoint: &found.checkpoint,
            container: Some(&found.container),
        };
        self.upload(name, &about, &|session| session.send_archive(archive, &Meter::new(found.length, tell)))
    }

    /// Stores an image of another store under this name.
    ///
    /// # Errors
    /// As for [`put_directory`](Self::put_directory), and [`StoreError::Damaged`] for an image that is not whole there.
    pub fn put_stored(
        &self,
        from: &Store,
        image: &StoredImage,
        name: &str,
        tell: OnProgress<'_>,
    ) -> Result<Sent, StoreError> {
        let Head { created, host, checkpoint, container, .. } = &image.head;
        let about = About { created: *created, host, checkpoint, container: container.as_ref() };
        let total = image.body.pieces.iter().map(|it| it.length).sum();
        self.upload(name, &about, &|session| session.send_stored(from, &image.body, &Meter::new(total, tell)))
    }

    fn head(&self, name: &str, about: &About<'_>, body: &Body) -> Head {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |it| it.as_secs());
        Head {
            name: name.to_owned(),
            stored_at: now,
            created: about.created,
            // It comes out of the image, which may say anything.
            host: about.host.chars().take(255).collect(),
            checkpoint: about.checkpoint.to_owned(),
            parents: body.parents.len() as u32,
            container: about.container.cloned(),
            files: body.files(),
            bytes: body.bytes(),
            stored: body.stored(),
            body_length: 0,
            body_hash: Hash::from_bytes([0; 32]),
        }
    }

    fn upload(
        &self,
        name: &str,
        about: &About<'_>,
        pass: &dyn Fn(&Session<'_>) -> Result<Draft, StoreError>,
    ) -> Result<Sent, StoreError> {
        let object = self.object_of(name)?;
        let exists = || StoreError::ImageExists { name: name.to_owned(), url: self.url.clone() };
        if self.transport.head(&object)?.is_some() {
            return Err(exists());
        }
        let lease = Lease::begin(&self.transport, self.timing)?;
        let session = Session::begin(self)?;
        for attempt in 0..ATTEMPTS {
            if attempt >= ALONE {
                session.forget_others();
            }
            let draft = pass(&session)?;
            session.flush()?;
            let body = session.body(draft)?;
            let used: BTreeSet<_> = body.objects.iter().cloned().collect();
            lease.renew()?;
            let said = lease.uses(&self.coder, &used)?;
            let own = if lease.is_valid() { lock(&session.own).clone() } else { BTreeSet::new() };
            let unusable = self.unusable(&used, &own, Some(&said))?;
            if !unusable.is_empty() {
                session.forget(&unusable);
                continue;
            }
            let head = self.head(name, about, &body);
            let written = manifest::write(&self.coder, &object, head, &body)?;
            if !put_once(&*self.transport, &object, &written)? {
                return Err(exists());
            }
            // A machine that slept between the look and the manifest may have lost its lease, and then pieces.
            if !lease.is_valid() && !self.unusable(&used, &BTreeSet::new(), None)?.is_empty() {
                self.transport.delete(&object)?;
                return Err(StoreError::refused(
                    "the upload stood still for so long that its pieces were removed; try again",
                ));
            }
            return Ok(Sent {
                name: name.to_owned(),
                parents: body.parents.len(),
                container: about.container.cloned(),
                files: body.files(),
                bytes: body.bytes(),
                stored: body.stored(),
                pieces: body.pieces.len() as u64,
                sent_pieces: session.sent_pieces.load(Ordering::Relaxed),
                sent_bytes: session.sent_bytes.load(Ordering::Relaxed),
            });
        }
        Err(StoreError::refused(format!("garbage collection of {} removes what is sent; try again later", self.url)))
    }

    /// Which of these objects are not there, or about to be removed by a collection that was alive when this was
    /// written. A collection announces the upload's own objects too, but keeps them for its lease.
    fn unusable(
        &self,
        used: &BTreeSet<ObjectName>,
        own: &BTreeSet<ObjectName>,
        now: Option<&Found>,
    ) -> Result<BTreeSet<ObjectName>, StoreError> {
        let mut condemned = BTreeSet::new();
        for list in self.transport.list(CONDEMNED)? {
            let age = now.map_or(0, |now| now.modified.saturating_sub(list.modified));
            if u128::from(age) < self.timing.dead_after.as_millis() {
                // Gone: it has removed what it wanted to.
                let names: Option<Vec<ObjectName>> = get_sealed(&*self.transport, &self.coder, &list.name)?;
                condemned.extend(names.unwrap_or_default());
            }
        }
        // Afterwards, for the collection whose list is gone.
        let mut missing = used.clone();
        for folder in [PIECES, PACKS] {
            for found in self.transport.list(folder)? {
                if own.contains(&found.name) || !condemned.contains(&found.name) {
                    missing.remove(&found.name);
                }
            }
        }
        Ok(missing)
    }
}

/// Where a piece is.
enum Known {
    /// In the store.
    There(Place),
    /// It is being sent, or in a pack that will be.
    OnItsWay,
}

/// The pieces that are there, and those that are sent.
struct Session<'a> {
    store: &'a Store,
    known: Mutex<HashMap<Hash, Known>>,
    pack: Mutex<Builder>,
    /// The objects that were sent.
    own: Mutex<BTreeSet<ObjectName>>,
    sent_pieces: AtomicU64,
    sent_bytes: AtomicU64,
}

impl<'a> Session<'a> {
    fn begin(store: &'a Store) -> Result<Self, StoreError> {
        let mut known = HashMap::new();
        for Found { name, size, .. } in store.transport.list(PIECES)? {
            if let Some(hash) = pack::hash_in(&name) {
                known.insert(hash, Known::There(Place { object: name, offset: 0, stored: size }));
            }
        }
        let known = Mutex::new(known);
        let packs = store.transport.list(PACKS)?;
        let produce = |give: &mut dyn FnMut(Found) -> bool| {
            packs.into_iter().all(give);
            Ok(())
        };
        each(store.threads, produce, |found| {
            let pieces = match pack::list(&*store.transport, &store.coder, &found) {
                Ok(pieces) => pieces,
                // What it has is sent again.
                Err(error) if error.is_bad_image() => return Ok(()),
                Err(error) => return Err(error),
            };
            let mut known = lock(&known);
            for piece in pieces {
                let place = Place { object: found.name.clone(), offset: piece.offset, stored: piece.stored };
                known.entry(piece.hash).or_insert(Known::There(place));
            }
            Ok(())
        })?;
        let counter = AtomicU64::default;
        let (pack, own) = (Mutex::default(), Mutex::default());
        Ok(Self { store, known, pack, own, sent_pieces: counter(), sent_bytes: counter() })
    }

    /// Sends a piece unless it is there.
    fn add(&self, hash: Hash, content: &[u8]) -> Result<(), StoreError> {
        {
            let mut known = lock(&self.known);
            if known.contains_key(&hash) {
                return Ok(());
            }
            known.insert(hash, Known::OnItsWay);
        }
        let stored = self.store.coder.encode(&hash, content)?;
        self.sent_pieces.fetch_add(1, Ordering::Relaxed);
        if stored.len() >= LARGE {
            let object = pack::piece_name(&hash)?;
            self.put(&object, &stored)?;
            let place = Place { object, offset: 0, stored: stored.len() as u64 };
            lock(&self.known).insert(hash, Known::There(place));
            return Ok(());
        }
        let full = {
            let mut pack = lock(&self.pack);
            pack.push(hash, content.len() as u64, &stored);
            pack.is_full().then(|| std::mem::take(&mut *pack))
        };
        full.map_or(Ok(()), |full| self.send_pack(full))
    }

    /// Sends the pack that is not full.
    fn flush(&self) -> Result<(), StoreError> {
        let pack = std::mem::take(&mut *lock(&self.pack));
        if pack.is_empty() { Ok(()) } else { self.send_pack(pack) }
    }

    fn send_pack(&self, pack: Builder) -> Result<(), StoreError> {
        let (object, content, pieces) = pack.finish(&self.store.coder)?;
        self.put(&object, &content)?;
        let mut known = lock(&self.known);
        for piece in pieces {
            let place = Place { object: object.clone(), offset: piece.offset, stored: piece.stored };
            known.insert(piece.hash, Known::There(place));
        }
        Ok(())
    }

    fn put(&self, object: &ObjectName, content: &[u8]) -> Result<(), StoreError> {
        self.store.transport.put(object, content)?;
        lock(&self.own).insert(object.clone());
        self.sent_bytes.fetch_add(content.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets what is in objects that cannot be relied on.
    fn forget(&self, objects: &BTreeSet<ObjectName>) {
        lock(&self.known).retain(|_, it| matches!(it, Known::There(place) if !objects.contains(&place.object)));
    }

    /// Forgets what is in objects that others have sent.
    fn forget_others(&self) {
        let own = lock(&self.own);
        lock(&self.known).retain(|_, it| matches!(it, Known::There(place) if own.contains(&place.object)));
    }

    /// The files with the places of their pieces, each piece once.
    fn body(&self, draft: Draft) -> Result<Body, StoreError> {
        let Draft { image, parents, mut entries, pieces: drafted } = draft;
        let known = lock(&self.known);
        let mut body = Body { image, parents, ..Body::default() };
        let (mut objects, mut numbers) = (HashMap::new(), HashMap::new());
        let mut numbered = Vec::with_capacity(drafted.len());
        for (hash, length) in drafted {
            if let Some(number) = numbers.get(&hash) {
                numbered.push(*number);
                continue;
            }
            let Some(Known::There(place)) = known.get(&hash) else {
                return Err(StoreError::refused("a piece was not sent: this is an error in rekindle"));
            };
            let object = *objects.entry(place.object.clone()).or_insert_with(|| {
                body.objects.push(place.object.clone());
                body.objects.len() as u32 - 1
            });
            let number = body.pieces.len() as u32;
            body.pieces.push(Piece { hash, length, object, offset: place.offset, stored: place.stored });
            numbers.insert(hash, number);
            numbered.push(number);
        }
        for entry in &mut entries {
            let Kind::File(runs) = &mut entry.kind else { continue };
            for run in runs {
                if let Run::Piece(number) = run {
                    *number = numbered[*number as usize];
                }
            }
        }
        body.entries = entries;
        Ok(body)
    }

    /// Sends what is not there of the pieces that are given; giving one says which run of a file it is, and nothing when there is no
    /// use in going on. Returns the pieces beside what `produce` does.
    fn send<T>(
        &self,
        meter: &Meter<'_>,
        produce: impl FnOnce(&mut dyn FnMut(Vec<u8>) -> Option<Run>) -> Result<T, StoreError>,
    ) -> Result<(T, Vec<(Hash, u64)>), StoreError> {
        let hashes = Mutex::new(Vec::new());
        let mut produced = None;
        let numbered = |give: &mut dyn FnMut((usize, Vec<u8>)) -> bool| {
            let mut number = 0;
            let mut next = |content| {
                number += 1;
                give((number - 1, content)).then(|| Run::Piece(number as u32 - 1))
            };
            produced = Some(produce(&mut next)?);
            Ok(())
        };
        each(self.store.threads, numbered, |(number, content)| {
            let hash = self.store.coder.hash(&content);
            {
                let mut hashes = lock(&hashes);
                if hashes.len() <= number {
                    hashes.resize(number + 1, (hash, 0));
                }
                hashes[number] = (hash, content.len() as u64);
            }
            self.add(hash, &content)?;
            meter.add(content.len() as u64);
            Ok(())
        })?;
        let pieces = hashes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        let nothing = || StoreError::refused("nothing was read: this is an error in rekindle");
        Ok((produced.ok_or_else(nothing)?, pieces))
    }

    /// Sends what is not there of an image on disk.
    fn send_tree(&self, tree: &Tree, meter: &Meter<'_>) -> Result<Draft, StoreError> {
        let cutter = Cutter::new(&self.store.cut);
        let (entries, pieces) = self.send(meter, |give| {
            let mut entries = Vec::new();
            for found in &tree.entries {
                let kind = match &found.kind {
                    OnDiskKind::Folder => Kind::Folder,
                    OnDiskKind::Link(target) => Kind::Link(target.clone()),
                    OnDiskKind::File { size, cuts } => {
                        let file = tree.open(found)?;
                        let mut runs = Vec::new();
                        let mut emit = |content: Vec<u8>| {
                            let run = give(content);
                            runs.extend(run);
                            run.is_some()
                        };
                        let mut reader = Reader { tree, found, file: &file, cutter: &cutter, cuts };
                        let holes = reader.read(*size, &mut emit)?;
                        tree.compare(
                            found,
                            &file.metadata().map_err(StoreError::local("ask about", &tree.root.join(&found.path)))?,
                        )?;
                        Kind::File(with_holes(runs, holes, meter))
                    }
                };
                let OnDisk { path, mode, modified, .. } = found;
                entries.push(Entry { path: path.clone(), mode: *mode, modified: *modified, kind });
            }
            tree.compare_all()?;
            Ok(entries)
        })?;
        Ok(Draft { image: tree.image.clone(), parents: tree.parents.clone(), entries, pieces })
    }

    /// Sends what is not there of an archive.
    fn send_archive(&self, archive: &Archive, meter: &Meter<'_>) -> Result<Draft, StoreError> {
        let cutter = Cutter::new(&self.store.cut);
        let (runs, pieces) = self.send(meter, |give| {
            let mut source = archive.read()?;
            let failed = |error| archive.unreadable(error);
            let (mut runs, mut at) = (Vec::new(), 0);
            for part in &archive.contents().parts {
                let mut left = part.end - at;
                at = part.end;
                let mut buffer = Vec::new();
                while left > 0 || !buffer.is_empty() {
                    let before = buffer.len();
                    let more = if part.is_piece { left } else { left.min((LONGEST - before) as u64) };
                    buffer.resize(before + more as usize, 0);
                    source.read_exact(&mut buffer[before..]).map_err(failed)?;
                    left -= more;
                    let first = if part.is_piece { buffer.len() } else { cutter.first(&buffer) };
                    let rest = buffer.split_off(first);
                    match give(std::mem::replace(&mut buffer, rest)) {
                        Some(run) => runs.push(run),
                        None => return Ok(runs),
                    }
                }
            }
            archive.compare()?;
            Ok(runs)
        })?;
        let (modified, root) = (archive.modified(), String::new());
        let entries = vec![
            Entry { path: root.clone(), mode: 0o700, modified, kind: Kind::Folder },
            Entry { path: ARCHIVE.to_owned(), mode: 0o600, modified, kind: Kind::File(runs) },
        ];
        Ok(Draft { image: root, parents: Vec::new(), entries, pieces })
    }

    /// Sends what is not there of an image in another store.
    fn send_stored(&self, from: &Store, body: &Body, meter: &Meter<'_>) -> Result<Draft, StoreError> {
        let empty = Hash::from_bytes([0; 32]);
        let hashes = Mutex::new(vec![(empty, 0); body.pieces.len()]);
        // Under the same key, a piece has the same name.
        let same = from.coder.hash(b"") == self.store.coder.hash(b"");
        let mut wanted = Vec::new();
        for (number, piece) in body.pieces.iter().enumerate() {
            if same && lock(&self.known).contains_key(&piece.hash) {
                lock(&hashes)[number] = (piece.hash, piece.length);
                meter.add(piece.length);
            } else {
                wanted.push((body.place(piece)?, (number, *piece)));
            }
        }
        let produce = |give: &mut dyn FnMut(fetch::Task<(usize, Piece)>) -> bool| {
            fetch::tasks(wanted).into_iter().all(give);
            Ok(())
        };
        each(self.store.threads, produce, |task| {
            task.run(&*from.transport, |object, (number, piece), stored| {
                let content = from.coder.decode(&piece.hash, piece.length, stored);
                let content = content.map_err(|what| StoreError::damaged(object.as_str(), what))?;
                let hash = self.store.coder.hash(&content);
                lock(&hashes)[number] = (hash, piece.length);
                self.add(hash, &content)?;
                meter.add(piece.length);
                Ok(())
            })
            .map(drop)
        })?;
        let pieces = hashes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        Ok(Draft { image: body.image.clone(), parents: body.parents.clone(), entries: body.entries.clone(), pieces })
    }
}

/// A hole: how many pieces are before it, and its length.
type Hole = (usize, u64);

/// Puts holes between the pieces of a file.
fn with_holes(pieces: Vec<Run>, holes: Vec<Hole>, meter: &Meter<'_>) -> Vec<Run> {
    let mut runs = Vec::with_capacity(pieces.len() + holes.len());
    let mut holes = holes.into_iter().peekable();
    for number in 0..=pieces.len() {
        while let Some((_, length)) = holes.next_if(|(before, _)| *before == number) {
            meter.add(length);
            runs.push(Run::Hole(length));
        }
        runs.extend(pieces.get(number));
    }
    runs
}

/// Reads the pieces of one file.
struct Reader<'a> {
    tree: &'a Tree,
    found: &'a OnDisk,
    file: &'a File,
    cutter: &'a Cutter,
    cuts: &'a [u64],
}

impl Reader<'_> {
    /// Gives the pieces, and returns the holes.
    fn read(&mut self, size: u64, give: &mut dyn FnMut(Vec<u8>) -> bool) -> Result<Vec<Hole>, StoreError> {
        let path = self.tree.root.join(&self.found.path);
        let failed = |error| StoreError::local("read", &path)(error);
        let mut holes = Vec::new();
        let (mut at, mut pieces) = (0, 0);
        for (begin, end) in stored_ranges(self.file, size).map_err(failed)? {
            if begin > at {
                holes.push((pieces, begin - at));
            }
            at = end;
            let inner = self.cuts.partition_point(|it| *it <= begin)..self.cuts.partition_point(|it| *it < end);
            let mut from = begin;
            for to in self.cuts[inner].iter().copied().chain([end]) {
                let mut give = |content| {
                    pieces += 1;
                    give(content)
                };
                // Of a file in which the image has pieces, each is one; all else is cut by content.
                let whole = !self.cuts.is_empty() && to - from <= MAX_LENGTH;
                let done = if whole { self.whole(from, to, &mut give) } else { self.cut(from, to, &mut give) };
                if !done.map_err(failed)? {
                    return Ok(holes);
                }
                from = to;
            }
        }
        if size > at {
            holes.push((pieces, size - at));
        }
        Ok(holes)
    }

    fn whole(&self, from: u64, to: u64, give: &mut dyn FnMut(Vec<u8>) -> bool) -> std::io::Result<bool> {
        let mut content = vec![0; (to - from) as usize];
        self.file.read_exact_at(&mut content, from)?;
        Ok(give(content))
    }

    fn cut(&self, from: u64, to: u64, give: &mut dyn FnMut(Vec<u8>) -> bool) -> std::io::Result<bool> {
        let mut at = from;
        let mut buffer = Vec::with_capacity(LONGEST);
        loop {
            let before = buffer.len();
            let more = ((LONGEST - before) as u64).min(to - at);
            buffer.resize(before + more as usize, 0);
            self.file.read_exact_at(&mut buffer[before..], at)?;
            at += more;
            if buffer.is_empty() {
                return Ok(true);
            }
            let rest = buffer.split_off(self.cutter.first(&buffer));
            if !give(std::mem::replace(&mut buffer, rest)) {
                return Ok(false);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::archive::Contents;
    use crate::directory::Directory;

    /// Whoever has a store's key, or can write to one without a key, puts there what no upload would.
    #[test]
    fn a_store_that_says_of_other_bytes_that_they_are_an_archive_is_not_believed() {
        let place = tempfile::tempdir().unwrap();
        let transport = std::sync::Arc::new(Directory::new(place.path().join("store")));
        let store = Store::create(transport, "here", None, false).unwrap();
        let path = place.path().join("forged");
        for (number, bytes) in [&b"no archive"[..], &[0; 1024], &[]].into_iter().enumerate() {
            fs::write(&path, bytes).unwrap();
            let length = bytes.len() as u64;
            let contents = Contents {
                container: Container { name: "train".to_owned(), id: "f0".to_owned() },
                checkpoint: "0".repeat(32),
                created: 0,
                host: String::new(),
                length,
                parts: vec![crate::archive::Part { end: length, is_piece: false }],
            };
            let archive = Archive::unchecked(&path, contents);
            let name = format!("forged-{number}");
            store.put_archive(&archive, &name, &|_| ()).unwrap();
            let to = place.path().join("copy");
            let error = store.get_to(&store.image(&name).unwrap(), &to, &|_| ()).unwrap_err();
            assert!(error.is_bad_image() && error.to_string().contains("no archive of a container"), "{error}");
            assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2, "nothing is left");
        }
    }
}
