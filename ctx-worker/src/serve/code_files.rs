//! Reads the code of a restored client from its files: several at a time, because libraries have hundreds of megabytes of code,
//! which is hashed, unpacked and searched.

use std::cmp::Reverse;
use std::fs::File;
use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rekindle_images::{CodeHash, code_name};

use crate::checkpoint::engine::small_thread;
use crate::cores::cores;
use crate::resources::code_store::Image;
use crate::resources::not_loaded::NotLoaded;

/// The most files at a time: as many threads of this size as have had their stacks mapped before there was a client, see
/// [`crate::serve::start`].
const THREADS_MAX: usize = 16;

struct CodeFile {
    hash: String,
    bytes: u64,
    file: File,
}

/// Reads images from files, each of which has the hash that comes with it, for devices of this compute capability.
///
/// # Errors
/// A file cannot be read, or has other content or no code.
pub(crate) fn read(files: Vec<(String, File)>, capability: (u32, u32)) -> Result<Vec<Image>, NotLoaded> {
    let mut files: Vec<_> = files
        .into_iter()
        .map(|(hash, file)| CodeFile { hash, bytes: file.metadata().map_or(0, |it| it.len()), file })
        .collect();
    // The largest come first: otherwise one thread would still read the largest when the others have nothing left.
    files.sort_by_key(|it| Reverse(it.bytes));
    let next = AtomicUsize::new(0);
    let work = || -> Result<Vec<Image>, NotLoaded> {
        let mine = std::iter::from_fn(|| files.get(next.fetch_add(1, Relaxed)));
        mine.map(|file| file.read(capability)).collect()
    };
    std::thread::scope(|scope| {
        // This thread reads too. A thread that cannot be started is no loss but of time.
        let others = files.len().min(cores()).min(THREADS_MAX).saturating_sub(1);
        let threads: Vec<_> = (0..others).filter_map(|_| small_thread("code").spawn_scoped(scope, work).ok()).collect();
        let mut images = work();
        for thread in threads {
            let more = thread.join().unwrap_or(Err(NotLoaded::Image("a thread that read code has ended unexpectedly")));
            images = images.and_then(|mut all| {
                all.extend(more?);
                Ok(all)
            });
        }
        images
    })
}

impl CodeFile {
    fn read(&self, capability: (u32, u32)) -> Result<Image, NotLoaded> {
        let failed = |source| NotLoaded::ReadCode { hash: self.hash.clone(), source };
        let mut bytes = Vec::with_capacity(usize::try_from(self.bytes).unwrap_or(0).saturating_add(Image::EXTRA));
        (&self.file).read_to_end(&mut bytes).map_err(failed)?;
        let hash = CodeHash::of(&bytes);
        let wanted = self.hash.parse();
        if wanted != Ok(hash) {
            return Err(NotLoaded::CodeContent(wanted.map_or_else(|_| self.hash.clone(), code_name)));
        }
        Image::new(hash, bytes, capability).map_err(|why| NotLoaded::BrokenCode { hash: self.hash.clone(), why })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::{Seek, Write};

    use super::*;

    /// An image with these parts, in a file, and its hash.
    fn file(parts: &[&[u8]]) -> (String, File) {
        let words = std::iter::once(parts.len()).chain(parts.iter().map(|part| part.len()));
        let mut bytes: Vec<u8> = words.flat_map(|word| (word as u64).to_le_bytes()).collect();
        bytes.extend(parts.concat());
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&bytes).unwrap();
        file.rewind().unwrap();
        (CodeHash::of(&bytes).to_string(), file)
    }

    #[test]
    fn all_files_are_read_whatever_their_sizes() {
        let text =
            |number: usize| format!(".version 7.0\n.target sm_75\n.global .u32 a{number};{}", " ".repeat(number * 37));
        let files: Vec<_> = (0..100).map(|number| file(&[text(number).as_bytes()])).collect();
        let expected: BTreeSet<_> = files.iter().map(|(hash, _)| hash.clone()).collect();
        let images = read(files, (9, 0)).unwrap();
        assert_eq!(images.iter().map(|image| image.hash.to_string()).collect::<BTreeSet<_>>(), expected);
        for image in &images {
            assert_eq!(CodeHash::of(image.bytes()), image.hash);
            // The driver gets the text where a word begins, and a NUL after it.
            let content = image.single().unwrap();
            image.with_pointer(|pointer| {
                assert_eq!(pointer.align_offset(8), 0);
                // SAFETY: an image is followed by a NUL.
                assert_eq!(unsafe { std::ffi::CStr::from_ptr(pointer.cast()) }.to_bytes(), content);
            });
        }
    }

    #[test]
    fn one_bad_file_fails_them_all() {
        let bad = || (file(&[b"one"]).0, file(&[b"two"]).1);
        let failed = |bad| {
            let mut files: Vec<_> = (0..9).map(|number: u8| file(&[&[number; 99]])).collect();
            files.insert(4, bad);
            read(files, (9, 0)).err().unwrap()
        };
        assert!(matches!(failed(bad()), NotLoaded::CodeContent(_)));
        let mut short = tempfile::tempfile().unwrap();
        short.write_all(&[1]).unwrap();
        short.rewind().unwrap();
        assert!(matches!(failed((CodeHash::of(&[1]).to_string(), short)), NotLoaded::BrokenCode { .. }));
        assert!(read(Vec::new(), (9, 0)).unwrap().is_empty());
    }
}
