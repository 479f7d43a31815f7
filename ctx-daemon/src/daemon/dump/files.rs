//! The data files of a client: several where it has much memory, since a file takes one write at a time.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;

use rekindle_images::{Client as Record, DataFile, ImageError, ImageWriter};

/// The most data files of a client in one image. A worker has no more threads that write.
pub(in crate::daemon) const MOST: usize = 16;

/// The data files of a client in an image that is being made.
#[derive(Debug)]
pub(super) struct Files {
    numbers: Vec<u32>,
    files: Vec<File>,
    /// The same files, opened for writing past the page cache; none where that is not worth it.
    direct: Vec<File>,
}

/// The number of files for so much memory, where each is to hold `each` bytes.
pub(in crate::daemon) fn worth(bytes: u64, each: u64) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let files = usize::try_from(bytes.div_ceil(each.max(1))).unwrap_or(usize::MAX);
    files.clamp(1, MOST.min(cores))
}

impl Files {
    /// Makes the files. The first has the client's own number where the image that is replaced has no file of that number.
    pub(super) fn make(writer: &ImageWriter, index: u32, count: usize) -> Result<Self, ImageError> {
        let mut made = vec![writer.data_file(index)?];
        for _ in 1..count {
            made.push(writer.another_data_file()?);
        }
        let (numbers, files): (Vec<_>, Vec<_>) = made.into_iter().unzip();
        let direct = numbers.iter().map(|index| writer.direct_file(*index)).collect::<Option<Vec<_>>>();
        Ok(Self { numbers, files, direct: direct.unwrap_or_default() })
    }

    /// The files' numbers, as a worker is told them.
    pub(super) fn numbers(&self) -> Vec<u32> {
        self.numbers.clone()
    }

    /// The files.
    pub(super) fn files(&self) -> &[File] {
        &self.files
    }

    /// The number of blocks that the files take; it grows with every write.
    pub(super) fn blocks(&self) -> u64 {
        self.files.iter().filter_map(|file| file.metadata().ok()).map(|it| it.blocks()).sum()
    }

    /// The descriptors that go with the request to a worker: 32 at most.
    pub(super) fn descriptors(&self) -> Vec<RawFd> {
        self.files.iter().chain(&self.direct).map(AsRawFd::as_raw_fd).collect()
    }

    /// Whether everything that a worker has written of its client, by the worker's word, lies in these files or in a base. A
    /// worker must not name other clients' files.
    pub(super) fn have_all_of(&self, record: &Record) -> bool {
        let own: BTreeSet<_> = self.numbers.iter().map(|index| DataFile::own(*index)).collect();
        record.data_files().iter().all(|file| file.depth > 0 || own.contains(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_images::{Allocation, CreateOptions, DataWriter, ImageDir};
    use std::os::fd::AsFd;

    #[test]
    fn much_memory_has_more_files_and_none_has_one() {
        let cores = std::thread::available_parallelism().unwrap().get();
        for (bytes, files) in [(0, 1), (1, 1), (4096, 1), (4097, 2), (3 * 4096, 3), (u64::MAX, 16)] {
            assert_eq!(worth(bytes, 4096), files.min(cores).min(MOST), "{bytes}");
        }
        assert!(worth(u64::MAX, 0) > 0);
    }

    #[test]
    fn clients_files_never_meet_and_a_worker_keeps_to_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), CreateOptions::new().unwrap()).unwrap();
        let all: Vec<_> = (0..3).map(|index| Files::make(&writer, index, 16).unwrap()).collect();
        let mut numbers: Vec<_> = all.iter().flat_map(Files::numbers).collect();
        assert!((0..).zip(&all).all(|(index, files)| files.numbers()[0] == index && files.files().len() == 16));
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 48);
        assert!(all[0].descriptors().len() <= 2 * MOST);

        let append = |files: &Files, which: usize| {
            let file = File::from(files.files()[which].as_fd().try_clone_to_owned().unwrap());
            let data = DataWriter::new(file, files.numbers()[which], writer.key()).unwrap();
            Allocation { size: 5000, pieces: data.append_all(&[1; 5000]).unwrap(), ..Allocation::default() }
        };
        let mut record = Record { allocations: vec![append(&all[1], 0), append(&all[1], 15)], ..Record::default() };
        assert!(all[1].have_all_of(&record) && !all[0].have_all_of(&record));
        record.allocations.push(append(&all[2], 3));
        assert!(!all[1].have_all_of(&record));
    }
}
