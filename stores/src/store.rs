//! A store that was opened.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::StoreError;
use crate::hash::Hash;
use crate::key::{Keys, StoreKey};
use crate::lease::Timing;
use crate::manifest::{self, Body, HEAD, Head, IMAGES};
use crate::parallel::{each, lock};
use crate::piece::Coder;
use crate::random;
use crate::transport::{Found, ObjectName, Transport};

/// The object that makes a store of a place.
pub(crate) const STORE: &str = "rekindle-store";
/// The format of stores that this program makes, and the newest that it reads.
const FORMAT: u32 = 1;
/// A store's object is no longer.
const MAX_STORE: u64 = 4096;

/// A store of images.
pub struct Store {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) coder: Coder,
    pub(crate) cut: [u8; 32],
    pub(crate) url: String,
    pub(crate) timing: Timing,
    pub(crate) threads: usize,
    description: Description,
}

/// What the object [`STORE`] says.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Description {
    format: u32,
    /// Random.
    id: String,
    /// Whether the store has a key.
    keyed: bool,
    encrypted: bool,
    /// The keyed hash of all this, which shows whether a key is the store's.
    check: Hash,
}

impl Description {
    fn check(&self, keys: &Keys) -> Hash {
        let flags = [u8::from(self.keyed), u8::from(self.encrypted)];
        Hash::of_parts(&keys.tag, &[b"store", &self.format.to_le_bytes(), self.id.as_bytes(), &flags])
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({} at {})", self.description.id, self.url)
    }
}

impl Store {
    /// Makes a store.
    ///
    /// # Errors
    /// [`StoreError::StoreExists`], [`StoreError::Key`] for an encrypted store without a key, and what the transport
    /// says.
    pub fn create(
        transport: Arc<dyn Transport>,
        url: &str,
        key: Option<&StoreKey>,
        encrypted: bool,
    ) -> Result<Self, StoreError> {
        if encrypted && key.is_none() {
            return Err(StoreError::key("an encrypted store needs a key: --key FILE names it"));
        }
        let keys = Keys::derive(key);
        let mut description = Description {
            format: FORMAT,
            id: random::hex()?,
            keyed: key.is_some(),
            encrypted,
            check: Hash::from_bytes([0; 32]),
        };
        description.check = description.check(&keys);
        let written = serde_json::to_vec(&description).map_err(|error| StoreError::refused(error.to_string()))?;
        if !put_once(&*transport, &name()?, &written)? {
            return Err(StoreError::StoreExists { url: url.to_owned() });
        }
        Ok(Self::new(transport, url, &keys, description))
    }

    /// Opens a store; `None` if there is none.
    ///
    /// # Errors
    /// [`StoreError::Key`] for a key that is not the store's, [`StoreError::Newer`], [`StoreError::Damaged`], and
    /// what the transport says.
    pub fn open(transport: Arc<dyn Transport>, url: &str, key: Option<&StoreKey>) -> Result<Option<Self>, StoreError> {
        let name = name()?;
        let Some(read) = transport.get(&name, Some(0..MAX_STORE))? else { return Ok(None) };
        let bad = |what: &str| StoreError::damaged(format!("{STORE} of {url}"), what);
        let described: serde_json::Value = serde_json::from_slice(&read).map_err(|_| bad("it cannot be read"))?;
        match described.get("format").and_then(serde_json::Value::as_u64) {
            Some(found) if found > u64::from(FORMAT) => {
                let found = u32::try_from(found).unwrap_or(u32::MAX);
                return Err(StoreError::Newer { object: format!("the store at {url}"), found, supported: FORMAT });
            }
            _ => {}
        }
        let description: Description = serde_json::from_value(described).map_err(|_| bad("it cannot be read"))?;
        match (description.keyed, key) {
            (true, None) => {
                return Err(StoreError::key(format!("the store at {url} has a key: --key FILE names it")));
            }
            // Whoever expects a key expects that nobody else can write there.
            (false, Some(_)) => {
                return Err(StoreError::key(format!("the store at {url} was made without a key: leave the key away")));
            }
            _ => {}
        }
        let keys = Keys::derive(key);
        if !description.check(&keys).is(&description.check) {
            return Err(match key {
                Some(_) => StoreError::key(format!("the store at {url} has another key, or its {STORE} was changed")),
                None => bad("it was changed"),
            });
        }
        Ok(Some(Self::new(transport, url, &keys, description)))
    }

    fn new(transport: Arc<dyn Transport>, url: &str, keys: &Keys, description: Description) -> Self {
        let coder = Coder::new(keys, description.encrypted);
        let (url, cut) = (url.to_owned(), keys.cut);
        Self { transport, coder, cut, url, timing: Timing::default(), threads: 8, description }
    }

    /// The same with other times for leases.
    #[must_use]
    pub fn with_timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// The same with so many requests at a time.
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads.max(1);
        self
    }

    /// The store's address.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Whether what is in it can be read only with its key.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.description.encrypted
    }

    /// Whether it has a key, without which nobody can forge what is in it.
    #[must_use]
    pub fn is_keyed(&self) -> bool {
        self.description.keyed
    }

    /// The images in the store, by name. Of one that cannot be read, the error.
    ///
    /// # Errors
    /// The store does not list its objects.
    pub fn images(&self) -> Result<Vec<Result<Head, StoreError>>, StoreError> {
        let found = std::sync::Mutex::new(Vec::new());
        let objects = self.transport.list(IMAGES)?;
        let produce = |give: &mut dyn FnMut(Found) -> bool| {
            objects.into_iter().all(give);
            Ok(())
        };
        each(self.threads, produce, |object| {
            match self.transport.get(&object.name, Some(0..HEAD)) {
                // Removed meanwhile.
                Ok(None) => {}
                Ok(Some(bytes)) => {
                    let head = manifest::read_head(&self.coder, &object.name, &bytes).map(|(head, _)| head);
                    lock(&found).push(head);
                }
                Err(error) => lock(&found).push(Err(error)),
            }
            Ok(())
        })?;
        let mut images = found.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        images.sort_by_key(|it| it.as_ref().map_or(String::new(), |it| it.name.clone()));
        Ok(images)
    }

    /// What the store knows of an image.
    ///
    /// # Errors
    /// [`StoreError::NoImage`], [`StoreError::Damaged`], and what the transport says.
    pub fn image(&self, name: &str) -> Result<StoredImage, StoreError> {
        let object = self.object_of(name)?;
        let no_image = || StoreError::NoImage { name: name.to_owned(), url: self.url.clone() };
        let bytes = self.transport.get(&object, None)?.ok_or_else(no_image)?;
        let (head, body) = manifest::read(&self.coder, &object, bytes)?;
        Ok(StoredImage { head, body })
    }

    /// Whether the store has an image of that name.
    ///
    /// # Errors
    /// The store does not say.
    pub fn has(&self, name: &str) -> Result<bool, StoreError> {
        Ok(self.transport.head(&self.object_of(name)?)?.is_some())
    }

    /// Removes an image. [`collect`](Self::collect) removes what no image needs any more.
    ///
    /// # Errors
    /// [`StoreError::NoImage`], and what the transport says.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        if !self.has(name)? {
            return Err(StoreError::NoImage { name: name.to_owned(), url: self.url.clone() });
        }
        self.transport.delete(&self.object_of(name)?)
    }

    pub(crate) fn object_of(&self, name: &str) -> Result<ObjectName, StoreError> {
        if !manifest::is_image_name(name) {
            return Err(StoreError::usage(format!(
                "{name:?} is no name of an image: it has letters, digits and ._+-@: and begins with none of - and ."
            )));
        }
        manifest::object_of(&self.coder, name)
    }
}

/// An image in a store.
#[derive(Debug)]
pub struct StoredImage {
    /// What `rekindle images ls` shows of it.
    pub head: Head,
    pub(crate) body: Body,
}

/// Part of an image, for `rekindle images show`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StoredFile {
    /// Its path in the image.
    pub path: String,
    /// `folder`, `link` or `file`.
    pub kind: &'static str,
    /// Permissions.
    pub mode: u32,
    /// The time of the last change, in seconds since 1970.
    pub modified: i64,
    /// Bytes, holes among them.
    pub size: u64,
    /// Bytes in holes.
    pub holes: u64,
    /// The number of its pieces.
    pub pieces: usize,
}

impl StoredImage {
    /// The image's folder among those that it is copied with: empty where it builds on no other.
    #[must_use]
    pub fn folder(&self) -> &str {
        &self.body.image
    }

    /// The folders of the images that it builds on, the nearest first.
    #[must_use]
    pub fn parents(&self) -> &[String] {
        &self.body.parents
    }

    /// Its folders, links and files.
    #[must_use]
    pub fn files(&self) -> Vec<StoredFile> {
        use manifest::{Kind, Run};
        let describe = |it: &manifest::Entry| {
            let runs: &[Run] = if let Kind::File(runs) = &it.kind { runs } else { &[] };
            let holes = runs.iter().map(|it| if let Run::Hole(length) = it { *length } else { 0 }).sum();
            let numbers = runs.iter().filter_map(|it| if let Run::Piece(number) = it { Some(*number) } else { None });
            let content: u64 = numbers.clone().filter_map(|it| Some(self.body.pieces.get(it as usize)?.length)).sum();
            StoredFile {
                path: it.path.clone(),
                kind: match it.kind {
                    Kind::Folder => "folder",
                    Kind::Link(_) => "link",
                    Kind::File(_) => "file",
                },
                mode: it.mode,
                modified: it.modified.0,
                size: content + holes,
                holes,
                pieces: numbers.count(),
            }
        };
        self.body.entries.iter().map(describe).collect()
    }
}

fn name() -> Result<ObjectName, StoreError> {
    ObjectName::made(STORE.to_owned())
}

/// Writes an object that nobody has written yet; says whether it is now there as it should be. An answer may be lost
/// after the store has done what it was asked for, so an object that is there already may be this one.
pub(crate) fn put_once(transport: &dyn Transport, name: &ObjectName, content: &[u8]) -> Result<bool, StoreError> {
    if transport.put_if_absent(name, content)? {
        return Ok(true);
    }
    Ok(transport.get(name, None)?.is_some_and(|found| found == content))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::Directory;

    fn place() -> (tempfile::TempDir, Arc<dyn Transport>) {
        let place = tempfile::tempdir().unwrap();
        let transport = Arc::new(Directory::new(place.path()));
        (place, transport)
    }

    #[test]
    fn a_store_opens_with_its_key_alone() {
        let [one, other] = [1, 2].map(|it| StoreKey::from_bytes([it; 32]));
        for (key, encrypted) in [(None, false), (Some(&one), false), (Some(&one), true)] {
            let (_place, transport) = place();
            let open = |key| Store::open(Arc::clone(&transport), "here", key);
            assert!(open(key).unwrap().is_none());
            Store::create(Arc::clone(&transport), "here", key, encrypted).unwrap();
            let error = Store::create(Arc::clone(&transport), "here", key, encrypted).unwrap_err();
            assert!(matches!(error, StoreError::StoreExists { .. }), "{error}");
            assert_eq!(open(key).unwrap().unwrap().is_encrypted(), encrypted);
            assert!(matches!(open(Some(&other)), Err(StoreError::Key { .. })));
            if key.is_some() {
                assert!(matches!(open(None), Err(StoreError::Key { .. })));
            }
        }
        let (_place, transport) = place();
        assert!(matches!(Store::create(transport, "here", None, true), Err(StoreError::Key { .. })));
    }

    #[test]
    fn every_changed_byte_of_a_stores_object_is_found() {
        let key = StoreKey::from_bytes([1; 32]);
        for key in [None, Some(&key)] {
            let (place, transport) = place();
            Store::create(Arc::clone(&transport), "here", key, key.is_some()).unwrap();
            let path = place.path().join(STORE);
            let written = std::fs::read(&path).unwrap();
            for at in 0..written.len() {
                for change in [1, 0x20, 0x80] {
                    let mut changed = written.clone();
                    changed[at] ^= change;
                    std::fs::write(&path, changed).unwrap();
                    assert!(Store::open(Arc::clone(&transport), "here", key).is_err(), "byte {at}");
                }
            }
        }
    }
}
