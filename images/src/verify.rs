//! Reading a whole image and comparing every hash.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::data_reader::{DataFile, DataReader};
use crate::data_writer::is_zero;
use crate::hash::{CodeHash, HashKey, Hasher, PieceHash};
use crate::image::Image;
use crate::manifest::{Client, CodeImage, Manifest, Piece, Storage};
use crate::names::data_name;
use crate::region::Region;
use crate::{ImageError, sys};

/// The most problems that a [`Report`] lists; beyond, they are only counted.
const LISTED: usize = 100;

/// More threads than this do not read faster.
const MAX_THREADS: usize = 8;

/// Below this, starting a thread takes longer than it saves; in bytes.
const PER_THREAD: u64 = 8 << 20;

/// Space between pieces is read in blocks of this many bytes.
const GAP_BLOCK: u64 = 64 << 10;

/// The progress of a verification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of content read so far.
    pub done: u64,
    /// Bytes of content in all.
    pub total: u64,
}

/// The result of a verification.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// Pieces compared, zero ones included.
    pub pieces: u64,
    /// Code images compared.
    pub code_images: u64,
    /// Bytes of content read.
    pub bytes: u64,
    /// How many places are bad.
    pub problem_count: u64,
    /// The first of them, in the order of files and offsets.
    pub problems: Vec<Problem>,
}

/// A place in an image that is not what was written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct Problem {
    /// The file.
    pub file: String,
    /// Where in the file, in bytes, if a place can be named.
    pub offset: Option<u64>,
    /// The region that the content belongs to, if there is one.
    pub region: Option<String>,
    /// A description of the damage.
    pub what: String,
}

impl Report {
    /// Whether everything is as it was written.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.problem_count == 0
    }

    /// The first problem as an error.
    ///
    /// # Errors
    /// [`ImageError::Corrupt`] if there is one.
    pub fn into_result(self) -> Result<(), ImageError> {
        match self.problems.into_iter().next() {
            None => Ok(()),
            Some(first) => Err(ImageError::Corrupt {
                what: match first.region {
                    Some(region) => format!("{} ({region})", first.what),
                    None => first.what,
                },
                file: first.file,
                offset: first.offset,
            }),
        }
    }
}

/// A piece of work for one thread.
enum Task<'a> {
    Piece(&'a Piece, Region<'a>),
    Code(CodeImage),
    /// A range between the pieces of a file.
    Gap {
        file: u32,
        start: u64,
        end: u64,
    },
}

impl Image {
    /// Reads every byte of every data and code file, with several threads, and compares it with
    /// its hash. Of the images that this one builds on, what belongs to this one.
    /// No failure stops the verification: content that cannot be read is a problem in the report.
    ///
    /// `progress` is called from all of these threads, after each piece.
    pub fn verify(&self, progress: impl Fn(Progress) + Sync) -> Report {
        let findings = Findings::default();
        let reader = match self.data_reader() {
            Ok(reader) => reader,
            Err(error) => {
                findings.add(error, None);
                return findings.report(0, 0, 0);
            }
        };
        let (pieces, mut tasks) = pieces_of(self.manifest(), &findings);
        tasks.extend(self.gaps());
        let code = &self.manifest().code;
        tasks.extend(code.iter().map(|it| Task::Code(*it)));
        let read_code = |hash| self.read_code(hash).map(drop);
        let read = work(&reader, &tasks, &findings, &read_code, &progress);
        findings.report(pieces, code.len() as u64, read)
    }

    /// The ranges of each data file that no piece covers.
    fn gaps(&self) -> Vec<Task<'_>> {
        let mut ranges: BTreeMap<u32, Vec<(u64, u64)>> = self.data_files().map(|file| (file, Vec::new())).collect();
        let regions = self.manifest().clients.iter().flat_map(Client::regions);
        for piece in regions.flat_map(|region| region.pieces) {
            if let Storage::Stored(extent) = piece.storage
                && let Some(ranges) = ranges.get_mut(&extent.file)
            {
                // No overflow: every extent of an open image ends within its file.
                ranges.push((extent.offset, extent.offset + extent.length));
            }
        }
        let mut gaps = Vec::new();
        for (file, mut ranges) in ranges {
            ranges.sort_unstable();
            let size = self.sizes().data.get(&file).copied().unwrap_or(0);
            let mut covered = 0;
            for (start, end) in ranges.into_iter().chain([(size, size)]) {
                if start > covered {
                    let start = std::mem::replace(&mut covered, start);
                    let end = covered;
                    gaps.push(Task::Gap { file, start, end });
                }
                covered = covered.max(end);
            }
        }
        gaps
    }
}

impl DataReader {
    /// Reads all pieces of the clients in a manifest, with several threads, and compares them with their hashes. Nothing else
    /// is verified, neither code nor what lies between pieces.
    #[must_use]
    pub fn verify(&self, manifest: &Manifest) -> Report {
        let findings = Findings::default();
        let (pieces, tasks) = pieces_of(manifest, &findings);
        let no_code = |_| Ok(());
        let read = work(self, &tasks, &findings, &no_code, &|_| {});
        findings.report(pieces, 0, read)
    }
}

/// The number of all pieces in a manifest, and the tasks of those that are stored, in the order in which the disk has them.
/// Pieces of zeros are compared at once.
fn pieces_of<'a>(manifest: &'a Manifest, findings: &Findings) -> (u64, Vec<Task<'a>>) {
    let (mut pieces, mut tasks) = (0, Vec::new());
    let mut zeros = Zeros::new(manifest.hash_key);
    for region in manifest.clients.iter().flat_map(Client::regions) {
        for piece in region.pieces {
            pieces += 1;
            match piece.storage {
                Storage::Zero if zeros.hash(piece.length) != piece.hash => {
                    let what = "content said to be zero does not match its hash";
                    findings.add(ImageError::corrupt(crate::MANIFEST, what), Some(&region));
                }
                Storage::Zero => {}
                _ => tasks.push(Task::Piece(piece, region)),
            }
        }
    }
    tasks.sort_by_key(|task| match task {
        Task::Piece(piece, _) => piece.storage.place(),
        _ => None,
    });
    (pieces, tasks)
}

/// Does the tasks, and returns how many bytes of content were read.
fn work(
    reader: &DataReader,
    tasks: &[Task<'_>],
    findings: &Findings,
    read_code: &(impl Fn(CodeHash) -> Result<(), ImageError> + Sync),
    progress: &(impl Fn(Progress) + Sync),
) -> u64 {
    let total = tasks.iter().map(Task::length).sum();
    let (next, done) = (AtomicUsize::new(0), AtomicU64::new(0));
    let one = || {
        let mut buffer = Vec::new();
        while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (result, region) = match task {
                Task::Piece(piece, region) => {
                    // Bounded: every piece of an open image is at most MAX_PIECE_LENGTH.
                    buffer.resize(piece.length as usize, 0);
                    (reader.read(piece, &mut buffer), Some(region))
                }
                Task::Code(code) => (read_code(code.hash), None),
                Task::Gap { file, start, end } => (check_gap(reader, *file, *start, *end), None),
            };
            if let Err(error) = result {
                findings.add(error, region);
            }
            let length = task.length();
            let done = done.fetch_add(length, Ordering::Relaxed) + length;
            if length != 0 {
                progress(Progress { done, total });
            }
        }
    };
    let useful = usize::try_from(total / PER_THREAD).unwrap_or(usize::MAX);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let threads = useful.clamp(1, MAX_THREADS.min(cores));
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(one);
        }
        one();
    });
    done.into_inner()
}

impl Task<'_> {
    /// Content in a task, in bytes.
    fn length(&self) -> u64 {
        match self {
            Task::Piece(piece, _) => piece.length,
            Task::Code(code) => code.size,
            Task::Gap { .. } => 0,
        }
    }
}

/// Checks that a range of a data file is zero. The check skips holes, so that a file that claims to be
/// enormous takes no time.
fn check_gap(reader: &DataReader, index: u32, start: u64, end: u64) -> Result<(), ImageError> {
    let name = data_name(index);
    let failed = |error| ImageError::io("read", &*name, error);
    let file = reader.file(DataFile::own(index))?;
    let mut buffer = Vec::new();
    let mut at = start;
    while at < end {
        if at - start >= GAP_BLOCK {
            match data_after(file, at).map_err(failed)? {
                Some(data) if data < end => at = data.max(at),
                _ => return Ok(()),
            }
        }
        let length = (end - at).min(GAP_BLOCK);
        buffer.resize(length as usize, 0);
        file.read_exact_at(&mut buffer, at).map_err(failed)?;
        if !is_zero(&buffer) {
            let what = "there is something where no content was written";
            return Err(ImageError::corrupt_at(&name, at, what));
        }
        at += length;
    }
    Ok(())
}

/// Where data follows; a file system that does not know says here.
fn data_after(file: &File, at: u64) -> io::Result<Option<u64>> {
    match sys::next_data(file, at) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(Some(at)),
        result => result,
    }
}

/// The hashes of zeros, each length computed once.
struct Zeros {
    hasher: Hasher,
    hashes: HashMap<u64, PieceHash>,
}

impl Zeros {
    fn new(key: HashKey) -> Self {
        Self { hasher: key.hasher(), hashes: HashMap::new() }
    }

    fn hash(&mut self, length: u64) -> PieceHash {
        let hasher = &self.hasher;
        // Bounded, as every piece.
        let hash = || hasher.hash(&vec![0; length as usize]);
        *self.hashes.entry(length).or_insert_with(hash)
    }
}

#[derive(Default)]
struct Findings {
    count: AtomicU64,
    listed: Mutex<Vec<Problem>>,
}

impl Findings {
    fn add(&self, error: ImageError, region: Option<&Region<'_>>) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let region = region.map(ToString::to_string);
        let problem = match error {
            ImageError::Corrupt { file, offset, what } => Problem { file, offset, region, what },
            ImageError::Missing { file, .. } => {
                Problem { file, offset: None, region, what: "it is missing".to_owned() }
            }
            ImageError::Io { file, source, .. } => {
                Problem { file, offset: None, region, what: format!("it cannot be read: {source}") }
            }
            other => Problem { file: crate::MANIFEST.to_owned(), offset: None, region, what: other.to_string() },
        };
        let mut listed = self.listed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(at) = listed.binary_search(&problem) {
            listed.insert(at, problem);
            listed.truncate(LISTED);
        }
    }

    fn report(self, pieces: u64, code_images: u64, bytes: u64) -> Report {
        Report {
            pieces,
            code_images,
            bytes,
            problem_count: self.count.into_inner(),
            problems: self.listed.into_inner().unwrap_or_else(PoisonError::into_inner),
        }
    }
}
