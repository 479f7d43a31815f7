//! Images for the tests, directories to compare, and transports that do more than they should.

use std::fmt;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rekindle_images::{
    Allocation, Base, Client, CreateOptions, DataWriter, Image, ImageDir, ImageWriter, Manifest, Protocol, Storage,
};
use rekindle_stores::{Address, Found, ObjectName, Store, StoreError, StoreKey, StoredImage, Transport};

pub(crate) const MIB: usize = 1 << 20;

/// Content that does not repeat, other for each seed.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..length.div_ceil(8)).flat_map(|_| next()).take(length).collect()
}

/// Writes an image whose GPU memory are these pieces, and files as CRIU leaves them, with these pages.
pub(crate) fn write_image(dir: &Path, gpu: &[Vec<u8>], pages: &[u8]) {
    fs::create_dir_all(dir).unwrap();
    let writer = ImageWriter::create(ImageDir::open(dir).unwrap(), CreateOptions::new().unwrap()).unwrap();
    let (_, file) = writer.data_file(0).unwrap();
    let data = DataWriter::new(file, 0, writer.key()).unwrap();
    let mut at = 0;
    let mut pieces = Vec::new();
    for content in gpu {
        pieces.push(data.append(at, content).unwrap());
        at += content.len() as u64;
    }
    data.finish().unwrap();
    let mut manifest = Manifest::new(1_700_000_000, Protocol::Stop);
    manifest.host.name = "node7".to_owned();
    let allocation = Allocation { address: 0x2000_0000_0000, size: at, pieces, ..Allocation::default() };
    manifest.clients = vec![Client { command: "train".to_owned(), allocations: vec![allocation], ..Client::default() }];
    writer.commit(manifest).unwrap();

    let file = File::create(dir.join("pages-1.img")).unwrap();
    file.write_all_at(pages, 8192).unwrap();
    // A hole before, and one behind.
    file.set_len(pages.len() as u64 + 8192 + (1 << 16)).unwrap();
    fs::write(dir.join("inventory.img"), "of CRIU").unwrap();
    fs::write(dir.join("empty.img"), "").unwrap();
    File::create(dir.join("hole.img")).unwrap().set_len(1 << 20).unwrap();
    fs::create_dir_all(dir.join("more/inner")).unwrap();
    fs::write(dir.join("more/inner/file"), "deep").unwrap();
    let _ = symlink("../elsewhere", dir.join("link"));
    fs::set_permissions(dir.join("inventory.img"), fs::Permissions::from_mode(0o640)).unwrap();
    fs::set_permissions(dir.join("more/inner"), fs::Permissions::from_mode(0o550)).unwrap();
    let past = SystemTime::UNIX_EPOCH + Duration::new(1_234_567_890, 123_456_789);
    File::open(dir.join("inventory.img")).unwrap().set_modified(past).unwrap();
    File::open(dir.join("more/inner")).unwrap().set_modified(past).unwrap();
}

/// A small image whose content these numbers say.
pub(crate) fn small_image(dir: &Path, numbers: &[u64]) {
    let gpu: Vec<_> = numbers.iter().map(|number| noise(*number, 300 << 10)).collect();
    write_image(dir, &gpu, &noise(numbers[0] ^ 0xffff, 5000));
}

/// An image in `second` that has all of its content in the one at `way` from there.
pub(crate) fn build_on(second: &Path, way: &str) {
    fs::create_dir_all(second).unwrap();
    let dir = ImageDir::open(second).unwrap();
    let base = Base::open(&dir, Path::new(way)).unwrap();
    let known = base.known(0);
    let mut manifest = Manifest { parent: None, ..base.image().manifest().clone() };
    for piece in &mut manifest.clients[0].allocations[0].pieces {
        let stored = known.get(piece.hash, piece.length).unwrap();
        assert!(matches!(stored, Storage::Parent { .. }));
        piece.storage = stored;
    }
    let writer = ImageWriter::create_on(dir, CreateOptions::new().unwrap(), Some(base)).unwrap();
    writer.commit(manifest).unwrap();
    assert!(Image::open(second).unwrap().depth() > 0);
}

/// All that there is to compare of a directory: paths, kinds, modes, times, links, content and where the holes are.
pub(crate) fn described(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    describe(dir, dir, &mut found);
    found.sort();
    found
}

fn describe(root: &Path, path: &Path, found: &mut Vec<String>) {
    let status = fs::symlink_metadata(path).unwrap();
    let kind = status.file_type();
    let what = if kind.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            describe(root, &entry.unwrap().path(), found);
        }
        "folder".to_owned()
    } else if kind.is_symlink() {
        fs::read_link(path).unwrap().display().to_string()
    } else {
        let content = fs::read(path).unwrap();
        let sum = content
            .iter()
            .fold(content.len() as u64, |sum, byte| sum.rotate_left(5).wrapping_mul(31) ^ u64::from(*byte));
        format!("{} bytes, {sum:016x}, stored {:?}", content.len(), stored(&File::open(path).unwrap(), status.len()))
    };
    let name = path.strip_prefix(root).unwrap().display();
    found.push(format!("{name} {:o} {}.{:09} {what}", status.mode(), status.mtime(), status.mtime_nsec()));
}

/// The ranges of a file that are no holes.
fn stored(file: &File, size: u64) -> Vec<(u64, u64)> {
    use rustix::fs::{SeekFrom, seek};
    let mut ranges = Vec::new();
    let mut at = 0;
    while let Ok(begin) = seek(file, SeekFrom::Data(at)) {
        at = seek(file, SeekFrom::Hole(begin)).unwrap();
        ranges.push((begin, at.min(size)));
    }
    ranges
}

pub(crate) fn key(number: u8) -> StoreKey {
    StoreKey::from_bytes([number; 32])
}

pub(crate) fn address(path: &Path) -> Address {
    Address::parse(path.to_str().unwrap()).unwrap()
}

/// A new store without a key in a directory.
pub(crate) fn new_store(path: &Path) -> Store {
    address(path).create(None, false).unwrap()
}

/// The same store over a transport that does what `hook` wants before each operation.
pub(crate) fn hooked(
    path: &Path,
    hook: impl Fn(&Operation<'_>) -> Result<(), StoreError> + Send + Sync + 'static,
) -> Store {
    let inner = rekindle_stores::transport(&address(path)).unwrap();
    let transport = Arc::new(Hooked { inner, hook: Box::new(hook) });
    // One request at a time, so that a test can count them.
    Store::open(transport, &path.display().to_string(), None).unwrap().unwrap().with_threads(1)
}

pub(crate) fn put(store: &Store, dir: &Path, name: &str) -> rekindle_stores::Sent {
    store.put_directory(dir, name, &|_| ()).unwrap()
}

/// Gets an image out again, and makes sure that it is the one in `dir`.
pub(crate) fn is_whole(store: &Store, name: &str, dir: &Path) {
    let place = tempfile::tempdir().unwrap();
    let to = place.path().join("copy");
    store.get_to(&image(store, name), &to, &|_| ()).unwrap();
    assert_eq!(described(&to), described(dir), "{name}");
}

pub(crate) fn image(store: &Store, name: &str) -> StoredImage {
    store.image(name).unwrap()
}

/// An operation, and the object or folder that it is about.
#[derive(Debug)]
pub(crate) struct Operation<'a> {
    pub(crate) what: &'static str,
    pub(crate) name: &'a str,
    pub(crate) bytes: usize,
}

type Hook = Box<dyn Fn(&Operation<'_>) -> Result<(), StoreError> + Send + Sync>;

/// A transport that does something before each operation, which may be to fail.
struct Hooked {
    inner: Arc<dyn Transport>,
    hook: Hook,
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooked")
    }
}

impl Hooked {
    fn before(&self, what: &'static str, name: &str, bytes: usize) -> Result<(), StoreError> {
        (self.hook)(&Operation { what, name, bytes })
    }
}

impl Transport for Hooked {
    fn put(&self, name: &ObjectName, content: &[u8]) -> Result<(), StoreError> {
        self.before("put", name.as_str(), content.len())?;
        self.inner.put(name, content)
    }

    fn put_if_absent(&self, name: &ObjectName, content: &[u8]) -> Result<bool, StoreError> {
        self.before("put", name.as_str(), content.len())?;
        self.inner.put_if_absent(name, content)
    }

    fn get(&self, name: &ObjectName, range: Option<Range<u64>>) -> Result<Option<Vec<u8>>, StoreError> {
        self.before("get", name.as_str(), 0)?;
        self.inner.get(name, range)
    }

    fn head(&self, name: &ObjectName) -> Result<Option<Found>, StoreError> {
        self.before("head", name.as_str(), 0)?;
        self.inner.head(name)
    }

    fn list(&self, folder: &str) -> Result<Vec<Found>, StoreError> {
        self.before("list", folder, 0)?;
        self.inner.list(folder)
    }

    fn delete(&self, name: &ObjectName) -> Result<(), StoreError> {
        self.before("delete", name.as_str(), 0)?;
        self.inner.delete(name)
    }
}

/// The error of a server that is gone.
pub(crate) fn gone(name: &str) -> StoreError {
    StoreError::Remote { action: "reach", object: name.to_owned(), what: "gone".to_owned() }
}

/// Counts operations.
#[derive(Clone, Default)]
pub(crate) struct Count(Arc<AtomicU64>);

impl Count {
    /// The number before this one.
    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }

    pub(crate) fn add(&self, more: u64) {
        self.0.fetch_add(more, Ordering::SeqCst);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The files of a store with content.
pub(crate) fn objects(store: &Path) -> Vec<std::path::PathBuf> {
    fn walk(dir: &Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, found) } else { found.push(path) }
        }
    }
    let mut found = Vec::new();
    walk(store, &mut found);
    found.sort();
    found
}
