//! The driver's cache on disk for libraries that compile. NVRTC keeps its output there, and cuDNN compiles by NVRTC for each
//! shape that it meets, so a cache that works saves hundreds of milliseconds at a time. The meaning of the table's slots is
//! known from how NVRTC 13.0 calls them:
//!
//! | slot | function |
//! |---|---|
//! | 1 | makes a key of the kind of output (1 PTX, 2 binary), the source, options, and the compiling library |
//! | 2 | drops a key |
//! | 3 | finds the content kept under a key |
//! | 4 | keeps content under a key |
//! | 6 | drops content that slot 3 found |
//!
//! As with the driver, the cache lies in `$CUDA_CACHE_PATH`, or `~/.nv/ComputeCache`; `CUDA_CACHE_DISABLE=1` turns it off and
//! `CUDA_CACHE_MAXSIZE` says how many bytes it may have. Our cache has a folder of its own there, with a file for each key:
//!
//! ```text
//!   "RKCACHE1" | hash of key, part and content, 16 bytes | content
//! ```
//!
//! A file is written under a unique name and then moved, so that processes may share the folder, also from other machines and
//! containers. A file that is damaged, or of another key, is treated as missing. The least recently used files are removed
//! first.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use xxhash_rust::xxh3::Xxh3;

use super::host::{answer, put};
use crate::types::{
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND, CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OUT_OF_MEMORY, CUresult,
};

const MAGIC: &[u8; 8] = b"RKCACHE1";
const HEADER: usize = 8 + 16;
/// The driver's limit where nothing else is said.
const LIMIT: u64 = 1 << 30;
/// No larger content is kept.
const LARGEST: usize = 64 << 20;
/// After so many contents kept by this process, the process checks whether the cache is over its limit.
const TRIM_EVERY: u64 = 64;

/// The key that content is kept under.
pub(super) struct Key(u128);

/// The hash in a file's head, which shows that the file is this key's and whole.
fn hash(key: u128, part: c_int, content: &[u8]) -> [u8; 16] {
    let mut hash = Xxh3::new();
    hash.update(&key.to_le_bytes());
    hash.update(&part.to_le_bytes());
    hash.update(content);
    hash.digest128().to_le_bytes()
}

/// A folder of kept contents.
struct Cache {
    folder: PathBuf,
    limit: u64,
}

impl Cache {
    /// The cache that the environment names.
    fn open() -> Option<Self> {
        if std::env::var_os("CUDA_CACHE_DISABLE").is_some_and(|v| v == "1") {
            return None;
        }
        let path = std::env::var_os("CUDA_CACHE_PATH").map(PathBuf::from);
        let home = || Some(Path::new(&std::env::var_os("HOME")?).join(".nv/ComputeCache"));
        let folder = path.or_else(home).filter(|p| p.is_absolute())?.join("rekindle");
        let limit = std::env::var("CUDA_CACHE_MAXSIZE").ok().and_then(|v| v.parse().ok()).unwrap_or(LIMIT);
        Some(Self { folder, limit })
    }

    fn path(&self, key: u128, part: c_int) -> PathBuf {
        self.folder.join(format!("{key:032x}-{part}"))
    }

    fn find(&self, key: u128, part: c_int) -> Option<Vec<u8>> {
        let path = self.path(key, part);
        let mut bytes = fs::read(&path).ok()?;
        let (header, content) = bytes.split_at_checked(HEADER)?;
        if header[..8] != *MAGIC || header[8..] != hash(key, part, content) {
            return None;
        }
        // Used just now. Whether that could be noted changes nothing.
        let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        bytes.drain(..HEADER);
        Some(bytes)
    }

    fn keep(&self, key: u128, part: c_int, content: &[u8]) -> std::io::Result<()> {
        static KEPT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(&self.folder)?;
        let kept = KEPT.fetch_add(1, Ordering::Relaxed);
        // Numbers of processes recur in containers, and after a restore: the time, and that the file must be new, keep
        // two from writing to one.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let new = self.folder.join(format!("{}-{kept}-{now}.new", std::process::id()));
        let mut file = File::create_new(&new)?;
        let written = file
            .write_all(MAGIC)
            .and_then(|()| file.write_all(&hash(key, part, content)))
            .and_then(|()| file.write_all(content))
            .and_then(|()| fs::rename(&new, self.path(key, part)));
        if written.is_err() {
            let _ = fs::remove_file(&new);
        } else if kept.is_multiple_of(TRIM_EVERY) {
            self.trim();
        }
        written
    }

    /// Removes what was used longest ago, until there is an eighth of the room again.
    fn trim(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        let mut files: Vec<_> = entries
            .flatten()
            .filter_map(|entry| {
                let about = entry.metadata().ok()?;
                Some((about.modified().ok()?, about.len(), entry.path()))
            })
            .collect();
        let mut bytes: u64 = files.iter().map(|f| f.1).sum();
        if bytes <= self.limit {
            return;
        }
        files.sort();
        for (_, size, path) in files {
            if bytes <= self.limit / 8 * 7 {
                break;
            }
            if fs::remove_file(path).is_ok() {
                bytes -= size;
            }
        }
    }
}

/// Makes a key of everything that decides what comes out.
///
/// # Safety
/// `out` is null or writable, `source` has `size` bytes, and the texts are null or end in a NUL.
#[allow(clippy::too_many_arguments, reason = "the table's")]
pub(super) unsafe extern "C" fn make_key(
    out: *mut *mut Key,
    kind: c_int,
    source: *const u8,
    size: u32,
    options: *const c_char,
    host: *const c_char,
    version: *const c_char,
    target: c_int,
    flags: c_int,
) -> CUresult {
    answer(|driver| {
        if out.is_null() || source.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut hash = Xxh3::new();
        let mut add = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        // SAFETY: the caller's promise.
        add(unsafe { std::slice::from_raw_parts(source, size as usize) });
        for text in [options, host, version] {
            // SAFETY: as above.
            add(if text.is_null() { b"" } else { unsafe { CStr::from_ptr(text) }.to_bytes() });
        }
        [kind, target, flags, driver.driver_version()].iter().for_each(|number| add(&number.to_le_bytes()));
        // SAFETY: not null, so writable by the caller's promise.
        unsafe { put(out, Box::into_raw(Box::new(Key(hash.digest128())))) }
    })
}

/// # Safety
/// `key` is null, or came from [`make_key`] and is not used again.
pub(super) unsafe extern "C" fn drop_key(key: *mut Key) -> CUresult {
    answer(|_| {
        if !key.is_null() {
            // SAFETY: made by a box, by the caller's promise.
            drop(unsafe { Box::from_raw(key) });
        }
        Ok(())
    })
}

/// # Safety
/// `key` is null or came from [`make_key`]; the others are null or writable.
pub(super) unsafe extern "C" fn find(
    key: *const Key,
    part: c_int,
    content: *mut *mut c_void,
    size: *mut u32,
) -> CUresult {
    answer(|_| {
        if key.is_null() || content.is_null() || size.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: a key, by the caller's promise.
        let key = unsafe { &*key }.0;
        let found = Cache::open().and_then(|cache| cache.find(key, part)).ok_or(CUDA_ERROR_NOT_FOUND)?;
        // SAFETY: an allocation of C's, since whoever drops it does not say how large it is.
        let memory = unsafe { libc::malloc(found.len().max(1)) };
        if memory.is_null() {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        // SAFETY: as many bytes as were allocated; both places are writable by the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(found.as_ptr(), memory.cast(), found.len());
            put(content, memory)?;
            put(size, found.len() as u32)
        }
    })
}

/// # Safety
/// `key` is null or came from [`make_key`]; `content` has `size` bytes.
pub(super) unsafe extern "C" fn keep(key: *const Key, part: c_int, content: *const u8, size: u32) -> CUresult {
    answer(|_| {
        if key.is_null() || content.is_null() || size as usize > LARGEST {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: a key and as many bytes, by the caller's promise.
        let (key, content) = unsafe { ((*key).0, std::slice::from_raw_parts(content, size as usize)) };
        let cache = Cache::open().ok_or(CUDA_ERROR_NOT_FOUND)?;
        cache.keep(key, part, content).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)
    })
}

/// # Safety
/// `content` is null, or came from [`find`] and is not used again.
pub(super) unsafe extern "C" fn drop_content(content: *mut c_void) -> CUresult {
    // SAFETY: what `find` has allocated.
    unsafe { libc::free(content) };
    crate::types::CUDA_SUCCESS
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    struct Folder(Cache);

    impl Folder {
        fn new(name: &str, limit: u64) -> Self {
            let folder = std::env::temp_dir().join(format!("rekindle-cache-{name}-{}", std::process::id()));
            Self(Cache { folder, limit })
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0.folder);
        }
    }

    #[test]
    fn what_is_kept_is_found_and_what_is_damaged_is_not() {
        let Folder(cache) = &Folder::new("found", LIMIT);
        assert_eq!(cache.find(1, 0), None);
        cache.keep(1, 0, b"some code").unwrap();
        cache.keep(2, 0, b"").unwrap();
        assert_eq!(cache.find(1, 0).as_deref(), Some(&b"some code"[..]));
        assert_eq!(cache.find(2, 0).as_deref(), Some(&b""[..]));
        assert_eq!((cache.find(1, 1), cache.find(3, 0)), (None, None));
        let path = cache.path(1, 0);
        fs::copy(&path, cache.path(9, 0)).unwrap();
        assert_eq!(cache.find(9, 0), None, "another key's");
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, damaged).unwrap();
            assert_eq!(cache.find(1, 0), None, "byte {at}");
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(cache.find(1, 0), None, "cut at {at}");
        }
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let Folder(cache) = &Folder::new("trimmed", 1000);
        let age = |key: u128, seconds: u64| {
            let then = SystemTime::now() - Duration::from_secs(seconds);
            File::open(cache.path(key, 0)).unwrap().set_modified(then).unwrap();
        };
        for key in 1..=4 {
            cache.keep(key, 0, &[7; 300]).unwrap();
            age(key, 100 - key as u64);
        }
        cache.find(1, 0).unwrap();
        cache.trim();
        let left: Vec<bool> = (1..=4).map(|key| cache.find(key, 0).is_some()).collect();
        assert_eq!(left, [true, false, false, true]);
        cache.trim();
        assert!(cache.find(1, 0).is_some() && cache.find(4, 0).is_some());
    }
}
