//! The data and code files of a warm image, in host memory. Restores read these files instead of those in the image's
//! directory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use rekindle_images::{CodeHash, DataFile, DataReader, Image, ImageError};

use super::super::super::host_memory::{self, Room};
use super::super::super::{at_once, lock};
use super::error::WarmError;
use crate::daemon::restore::check;

/// The files, each open for reading only: a worker that gets one cannot change what others read.
pub(in crate::daemon) struct Content {
    data: BTreeMap<DataFile, File>,
    code: BTreeMap<CodeHash, File>,
}

/// A file that is to be copied.
enum Wanted {
    Data(DataFile),
    Code(CodeHash),
}

impl Content {
    /// The number of bytes that a copy of the image's files takes.
    pub(super) fn size(image: &Image) -> Result<u64, ImageError> {
        let length = |file: File| file.metadata().map(|it| it.len()).unwrap_or(0);
        let mut all = 0_u64;
        for wanted in files_of(image) {
            all = all.saturating_add(length(wanted.open(image)?));
        }
        Ok(all)
    }

    /// Copies the files of an image, and of those that it builds on, into this room, and compares the hashes of all content.
    pub(super) fn copy(image: &Image, room: &Room) -> Result<Self, WarmError> {
        let wanted = files_of(image);
        let (next, copied) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(wanted.len())));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = vec![(); cores.min(wanted.len()).max(1)];
        let results = at_once(&threads, |()| {
            while let Some(wanted) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                let mut from = wanted.open(image)?;
                let mut to = room.file().map_err(WarmError::Memory)?;
                io::copy(&mut from, &mut to).map_err(WarmError::Copy)?;
                let to = host_memory::read_only(&to).map_err(WarmError::Memory)?;
                lock(&copied).push((wanted, to));
            }
            Ok(())
        });
        results.into_iter().collect::<Result<(), WarmError>>()?;
        let mut content = Self { data: BTreeMap::new(), code: BTreeMap::new() };
        for (wanted, file) in copied.into_inner().unwrap_or_default() {
            match wanted {
                Wanted::Data(name) => drop(content.data.insert(*name, file)),
                Wanted::Code(hash) => drop(content.code.insert(*hash, file)),
            }
        }
        content.verify(image)?;
        Ok(content)
    }

    /// Compares the hashes of all content in the data files; workers compare those of code.
    fn verify(&self, image: &Image) -> Result<(), WarmError> {
        let files = self.data.iter().map(|(name, file)| Ok((*name, file.try_clone()?)));
        let files = files.collect::<io::Result<Vec<_>>>().map_err(WarmError::Memory)?;
        let manifest = image.manifest();
        let report = DataReader::new(manifest.hash_key, files).verify(manifest);
        Ok(report.into_result()?)
    }

    /// A data file, to be handed to a worker: opened anew, since workers must not share a position in it.
    pub(in crate::daemon) fn data_file(&self, name: DataFile) -> io::Result<File> {
        host_memory::read_only(self.data.get(&name).ok_or(io::ErrorKind::NotFound)?)
    }

    /// A code file, likewise.
    pub(in crate::daemon) fn code_file(&self, hash: CodeHash) -> io::Result<File> {
        host_memory::read_only(self.code.get(&hash).ok_or(io::ErrorKind::NotFound)?)
    }
}

/// The files that workers need to load the image's clients.
fn files_of(image: &Image) -> Vec<Wanted> {
    let clients = || check::attached(image.manifest());
    let data: BTreeSet<DataFile> = clients().flat_map(|it| it.data_files()).collect();
    let code: BTreeSet<CodeHash> = clients().flat_map(check::code_of).collect();
    data.into_iter().map(Wanted::Data).chain(code.into_iter().map(Wanted::Code)).collect()
}

impl Wanted {
    fn open(&self, image: &Image) -> Result<File, ImageError> {
        match self {
            Self::Data(name) => image.data_file(*name),
            Self::Code(hash) => image.code_file(*hash),
        }
    }
}
