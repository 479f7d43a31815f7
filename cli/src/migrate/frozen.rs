//! The processes' own memory, read where it is while they stand still.
//!
//! `criu dump --lazy-pages` writes no pages that a process alone has. When all else is written it waits for somebody to ask it for pages, by the
//! protocol of its page server (criu/page-xfer.c), until that one closes the connection. Nobody asks: the processes stand still, so this command
//! reads their memory itself, on all cores, and sends what the target does not have. CRIU neither writes a copy of that memory, nor is
//! one read.
//!
//! ```text
//!   criu dump: freeze ─ all but pages ─ ready ································· closed ─ exit(DUMP): waits for the decision
//!                                         └─ /proc/PID/mem ─ what differs ─ send ─┘
//! ```
//!
//! Where CRIU has written the pages, they are read in its files. In either case the target's image is one that CRIU could have written
//! (`cpu_image/dumped.rs`): what has not changed is in its parent, which the target has already (`memory.rs`).

use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, anyhow};
use rekindle_wire::control::LEAVES_PAGES;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{FdFlags, fcntl_setfd};

use super::memory::{Known, PAGE, What};
use super::numbers::Numbers;
use super::stream::{self, PIECE, StreamError};
use crate::cpu_image::{DumpedPages, PagesFrom, PagesPart};
use crate::failure::Failure;
use crate::process::{self, Process};

/// A CRIU that leaves pages where they are, and waits. It goes on to the end of its dump when this is dropped.
pub(super) struct PageKeeper {
    _connection: UnixStream,
    ready: PipeReader,
}

/// What CRIU inherits; closed here when it runs. It has both ends of the pipe: if this command is killed and CRIU could not say that it is
/// ready, it would end its dump as one that has failed, and leave the processes' connections locked.
pub(super) struct Inherited {
    _connection: UnixStream,
    _told: (PipeReader, PipeWriter),
}

impl PageKeeper {
    /// Has a command that dumps a tree leave pages where they are.
    pub(super) fn arrange(command: &mut Command) -> io::Result<(Self, Inherited)> {
        let (connection, of_criu) = UnixStream::pair()?;
        let (ready, told) = io::pipe()?;
        let also_ready = ready.try_clone()?;
        for inherited in [of_criu.as_fd(), told.as_fd(), also_ready.as_fd()] {
            fcntl_setfd(inherited, FdFlags::empty())?;
        }
        command.args(["--lazy-pages", "--ps-socket"]).arg(of_criu.as_raw_fd().to_string());
        command.arg("--status-fd").arg(told.as_raw_fd().to_string()).env(LEAVES_PAGES, "1");
        Ok((Self { _connection: connection, ready }, Inherited { _connection: of_criu, _told: (also_ready, told) }))
    }

    /// Whether all but pages is written.
    pub(super) fn is_ready(&mut self) -> bool {
        let mut said = [PollFd::new(&self.ready, PollFlags::IN)];
        let is_said = poll(&mut said, Some(&Timespec::default())).is_ok_and(|count| count > 0);
        // A CRIU that has ended says nothing, and closes it.
        is_said && self.ready.read(&mut [0]).is_ok_and(|bytes| bytes > 0)
    }
}

/// Whether the memory of a tree, so many bytes, is best read so: its processes have the same numbers in their image and here, CRIU has
/// descriptors enough for it, and does not need much memory and time itself.
pub(super) fn is_best_left(root: i32, bytes: u64) -> bool {
    let tree = Process::trees_of(&[root]).unwrap_or_default();
    let lists = tree.iter().map(|pid| addresses_of(*pid)).sum::<u64>() / ADDRESSES;
    Numbers::of(root).are_ours() && bytes / PIPE < pipes() && lists <= bytes / 8 + SMALL_LISTS
}

/// CRIU has and copies a list with 16 bytes for each page that a process alone might have, whether it is there or not.
const ADDRESSES: u64 = 4096 / 16;
/// Lists of this size cost nothing.
const SMALL_LISTS: u64 = 16 << 20;

/// The bytes of the addresses at which a process has mapped what it does not share.
fn addresses_of(pid: i32) -> u64 {
    let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    let length = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let is_private = rest.as_bytes().get(3) == Some(&b'p');
        let number = |hex| u64::from_str_radix(hex, 16).ok();
        number(to)?.checked_sub(number(from)?).filter(|_| is_private)
    };
    String::from_utf8_lossy(&maps).lines().filter_map(length).fold(0, u64::saturating_add)
}

/// The bytes that a pipe holds at least, whoever makes it.
const PIPE: u64 = 1 << 20;

/// Half of the pipes that a CRIU run by this process may have: it keeps all pages that it leaves in pipes.
fn pipes() -> u64 {
    let number = |path: &str| fs::read_to_string(path).ok().and_then(|it| it.trim().parse::<u64>().ok());
    // It raises its limit as far as it may (criu/rlimit.c).
    let most = if may_raise_limits() { number("/proc/sys/fs/nr_open") } else { None };
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    most.or(limit.maximum).unwrap_or(u64::MAX) / 4
}

/// Whether this process has CAP_SYS_RESOURCE.
fn may_raise_limits() -> bool {
    const SYS_RESOURCE: u32 = 24;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|it| u64::from_str_radix(it.trim(), 16).ok()).unwrap_or(0);
    effective >> SYS_RESOURCE & 1 == 1
}

/// The pages of a process in an image that was just dumped.
pub(super) struct Pages {
    dumped: DumpedPages,
    /// The file's name on the streams.
    name: String,
    /// The process's memory, where CRIU has left pages there.
    memory: Option<File>,
    memory_path: PathBuf,
    written: File,
    written_path: PathBuf,
}

impl Pages {
    /// The pages of a process whose image is in this directory of the migration.
    pub(super) fn open(dumped: DumpedPages, name: &str, dir: &Path) -> Result<Self, Failure> {
        let is_left = dumped.has_left_pages();
        // CRIU traces it: it is the one that is dumped, and stands still.
        if is_left && !i32::try_from(dumped.process).is_ok_and(process::is_traced) {
            return Err(anyhow!("process {} does not stand still", dumped.process).into());
        }
        let memory_path = PathBuf::from(format!("/proc/{}/mem", dumped.process));
        let written_path = dir.join(dumped.file());
        let open = |path: &Path| File::open(path).with_context(|| format!("cannot read {}", path.display()));
        let memory = is_left.then(|| open(&memory_path)).transpose()?;
        let written = open(&written_path)?;
        let name = format!("{name}/{}", dumped.file());
        Ok(Self { dumped, name, memory, memory_path, written, written_path })
    }

    /// The bytes of the process's memory that CRIU would map writable at first if there were a parent image.
    pub(super) fn unwritable(&self) -> u64 {
        self.dumped.mappings.unwritable
    }

    /// Reads the process's memory, also what it may not read itself.
    fn read_memory(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let pid = self.dumped.process.cast_signed();
        let read = read_some(pid, address, into).unwrap_or(0).min(into.len());
        match &self.memory {
            _ if read == into.len() => Ok(()),
            Some(memory) => memory.read_exact_at(&mut into[read..], address + read as u64),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// The number of the part that has the byte at a place among all pages.
    fn part(&self, at: u64) -> usize {
        self.dumped.parts.partition_point(|it| it.at + it.length <= at)
    }

    /// The address of the page at a place among all pages.
    fn address(&self, at: u64) -> Option<u64> {
        self.dumped.parts.get(self.part(at)).map(|it| it.address + (at - it.at))
    }

    /// Reads pages, from a place among all of them on.
    fn read(&self, at: u64, piece: &mut [u8]) -> Result<(), StreamError> {
        let mut next = self.part(at);
        let mut done = 0;
        while done < piece.len() {
            let Some(PagesPart { at: begin, length, address, from, .. }) = self.dumped.parts.get(next) else {
                return Err(StreamError::Ended);
            };
            let into = at + done as u64 - begin;
            let count = (length - into).min((piece.len() - done) as u64) as usize;
            let part = &mut piece[done..done + count];
            let (read, path) = match from {
                PagesFrom::Process => (self.read_memory(address + into, part), &self.memory_path),
                PagesFrom::File(offset) => (self.written.read_exact_at(part, offset + into), &self.written_path),
            };
            read.map_err(|source| StreamError::Read { path: path.clone(), source })?;
            (done, next) = (done + count, next + 1);
        }
        Ok(())
    }
}

/// Reads memory of a process, as much as it can read itself. The kernel locks the process's mappings once for many pages, where a read of
/// `/proc/PID/mem` locks them for each.
fn read_some(pid: i32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: the local range is ours to write; the other is an address in another process, which the kernel checks.
    let read = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(read).map_err(|_| io::Error::last_os_error())
}

/// What of a process's pages the target does not have.
pub(super) struct Changes<'a> {
    pages: &'a Pages,
    /// For each page, whether it is in the parent image.
    in_parent: Vec<bool>,
    /// The bytes of all others: those of the file.
    bytes: u64,
    changed: Vec<Changed<'a>>,
}

/// Pages that are to be sent.
pub(super) struct Changed<'a> {
    pages: &'a Pages,
    /// Where they are among all pages.
    at: u64,
    length: usize,
    /// Where they are in the file.
    to: u64,
    what: What,
}

/// Looks what the target does not have of these pages, where the parent image counts for these processes. All cores look.
pub(super) fn changes<'a>(
    pages: &'a [Pages],
    known: &Known,
    has_parent: impl Fn(u32) -> bool + Sync,
) -> Result<Vec<Changes<'a>>, StreamError> {
    let places = pages.iter().enumerate();
    let places = places.flat_map(|(of, it)| (0..it.dumped.bytes()).step_by(PIECE).map(move |at| (of, at)));
    let (places, next) = (&places.collect::<Vec<_>>(), &AtomicUsize::new(0));
    let look = || {
        let (mut found, mut piece) = (Vec::new(), Vec::new());
        while let Some(&(of, at)) = places.get(next.fetch_add(1, Ordering::Relaxed)) {
            let pages = &pages[of];
            piece.resize((pages.dumped.bytes() - at).min(PIECE as u64) as usize, 0);
            pages.read(at, &mut piece)?;
            let in_parent = |page: usize| {
                let (process, address) = (pages.dumped.process, pages.address(at + (page * PAGE) as u64)?);
                let may = has_parent(process) && pages.dumped.mappings.have_parent(address);
                may.then(|| known.in_parent(process, address)).flatten()
            };
            found.push((of, at, known.split(&piece, in_parent)));
        }
        Ok(found)
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(places.len());
    let found = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(look)).collect();
        threads.into_iter().map(|it| it.join().unwrap_or(Err(StreamError::Ended))).collect::<Result<Vec<_>, _>>()
    });
    let mut found: Vec<_> = found?.into_iter().flatten().collect();
    found.sort_unstable_by_key(|(of, at, _)| (*of, *at));
    let none = |pages| Changes { pages, in_parent: Vec::new(), bytes: 0, changed: Vec::new() };
    let mut changes: Vec<_> = pages.iter().map(none).collect();
    for (of, at, split) in found {
        split.into_iter().for_each(|(range, what)| changes[of].add(at + range.start as u64, range.len(), what));
    }
    Ok(changes)
}

impl<'a> Changes<'a> {
    /// The next pages.
    fn add(&mut self, at: u64, length: usize, what: What) {
        let is_same = matches!(what, What::Same);
        self.in_parent.extend(std::iter::repeat_n(is_same, length / PAGE));
        if is_same {
            return;
        }
        // The file is of zeros.
        if !matches!(what, What::Zeros) {
            self.changed.push(Changed { pages: self.pages, at, length, to: self.bytes, what });
        }
        self.bytes += length as u64;
    }

    /// The file's name in its directory, and the bytes that it is to have.
    pub(super) fn file(&self) -> (String, u64) {
        (self.pages.dumped.file(), self.bytes)
    }

    /// The process, if most of its pages are not in the parent image.
    pub(super) fn of_changed_process(&self) -> Option<u32> {
        let in_parent = self.in_parent.iter().filter(|it| **it).count();
        (in_parent * 2 < self.in_parent.len()).then_some(self.pages.dumped.process)
    }

    /// The bytes of the pages in the parent image.
    pub(super) fn in_parent(&self) -> u64 {
        self.in_parent.iter().filter(|it| **it).count() as u64 * PAGE as u64
    }

    /// Whether there are pages in the parent image.
    pub(super) fn have_parent(&self) -> bool {
        self.in_parent.contains(&true)
    }

    /// Writes CRIU's list of the pages in this directory.
    pub(super) fn list(&self, dir: &Path) -> io::Result<()> {
        self.pages.dumped.list_again(dir, &self.in_parent)
    }

    /// What is to be sent.
    pub(super) fn changed(self) -> Vec<Changed<'a>> {
        self.changed
    }
}

impl Changed<'_> {
    /// Sends it. Returns the bytes of content that were sent.
    pub(super) fn send(&self, to: &mut impl Write, piece: &mut Vec<u8>) -> Result<u64, StreamError> {
        match self.what {
            What::Content => {
                piece.resize(self.length, 0);
                self.pages.read(self.at, piece)?;
                stream::send_piece(to, &self.pages.name, self.to, piece)?;
                Ok(self.length as u64)
            }
            What::There(place) => {
                stream::send_place(to, &self.pages.name, self.to, self.length as u32, place.place())?;
                Ok(0)
            }
            What::Same | What::Zeros => Ok(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::FileExt;

    use super::super::memory::{self, Own};
    use super::super::stream::Extent;
    use super::super::talk::MEMORY;
    use crate::cpu_image::{Mappings, list_name, list_of_present, listed, pages_name, write_mappings};

    use super::*;

    #[test]
    fn addresses_without_memory_count_too() {
        const LENGTH: usize = 1 << 40;
        let pid = std::process::id().cast_signed();
        let before = addresses_of(pid);
        // SAFETY: new memory, which nothing else knows.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            libc::mmap(std::ptr::null_mut(), LENGTH, libc::PROT_NONE, flags, -1, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        assert!(addresses_of(pid) >= before + LENGTH as u64 && !is_best_left(pid, 1 << 30));
        // SAFETY: what was mapped above.
        assert_eq!(unsafe { libc::munmap(at, LENGTH) }, 0);
        assert!(is_best_left(pid, 1 << 30) && !is_best_left(pid, 1 << 60));
    }

    /// The ranges of those pages that are there, from address 0 on.
    fn ranges(there: &[Option<u8>]) -> Vec<std::ops::Range<u64>> {
        let mut ranges: Vec<std::ops::Range<u64>> = Vec::new();
        for (number, _) in there.iter().enumerate().filter(|(_, page)| page.is_some()) {
            let at = (number * PAGE) as u64;
            match ranges.last_mut() {
                Some(before) if before.end == at => before.end += PAGE as u64,
                _ => ranges.push(at..at + PAGE as u64),
            }
        }
        ranges
    }

    /// Memory of process 7 with these pages, in a file.
    fn own(path: &Path, there: &[Option<u8>]) -> Own {
        let content: Vec<u8> = there.iter().flat_map(|it| [it.unwrap_or(77); PAGE]).collect();
        fs::write(path, content).unwrap();
        let ranges = ranges(there);
        let name = format!("{MEMORY}/{}", pages_name(7));
        let extent = |it: &std::ops::Range<u64>| Extent {
            name: name.clone(),
            path: path.to_owned(),
            offset: it.start,
            length: it.end - it.start,
        };
        Own { extents: ranges.iter().map(extent).collect(), private: BTreeMap::from([(7, ranges)]) }
    }

    /// The content of the pages in a directory, by their addresses: in its own file, or in that of its parent. The first byte of each.
    fn read_image(dir: &Path, parent: Option<&BTreeMap<u64, u8>>) -> BTreeMap<u64, u8> {
        let list = listed(&dir.join(list_name(7)));
        let file = fs::read(dir.join(pages_name(list.0))).unwrap();
        let (mut pages, mut found) = (file.chunks(PAGE), BTreeMap::new());
        for (address, count, flags) in list.1 {
            for address in (address..).step_by(PAGE).take(count as usize) {
                let in_parent = flags & 1 == 1;
                assert_ne!(in_parent, flags & 4 == 4, "it is in one of both");
                let content = if in_parent { parent.unwrap()[&address] } else { pages.next().unwrap()[0] };
                assert_eq!(found.insert(address, content), None);
            }
        }
        assert!(parent.is_none() || pages.next().is_none(), "nothing is left in the file");
        found
    }

    proptest::proptest! {
        /// Whatever is sent at first and later, and whatever is dumped then: the image and its parent have what was dumped.
        #[test]
        fn an_image_and_its_parent_are_as_the_dumped_one(
            first in proptest::collection::vec(proptest::option::of(0_u8..5), 1..30),
            second in proptest::collection::vec(proptest::option::of(0_u8..7), 1..30),
            changed in proptest::collection::vec(proptest::option::weighted(0.3, proptest::option::of(0_u8..8)), 0..40),
            is_used in proptest::bool::weighted(0.8),
        ) {
            let (dir, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            // Much stays as it was.
            let mut dumped = first.clone();
            dumped.resize(dumped.len().max(changed.len()), None);
            dumped.iter_mut().zip(changed).filter_map(|(it, to)| Some((it, to?))).for_each(|(it, to)| *it = to);
            let (memory, last) = (there.path().join(MEMORY), there.path().join("last"));
            fs::create_dir(&memory).unwrap();
            fs::create_dir(&last).unwrap();
            let at_first = own(&dir.path().join("first"), &first);
            let later = own(&dir.path().join("second"), &second);
            for (name, list) in memory::lists(&at_first).unwrap() {
                fs::write(there.path().join(name), list).unwrap();
            }
            let size = at_first.private_bytes();
            File::create_new(memory.join(pages_name(7))).unwrap().set_len(size).unwrap();
            let mut known = Known::new(3);
            known.has_files_for(&at_first);
            known.has_room(1 << 30);

            // CRIU's image, with all pages in its file.
            let content: Vec<u8> = dumped.iter().flatten().flat_map(|it| [*it; PAGE]).collect();
            let (list, ranges) = (dir.path().join(list_name(7)), ranges(&dumped));
            fs::write(dir.path().join(pages_name(1)), content).unwrap();
            fs::write(&list, list_of_present(1, ranges).unwrap()).unwrap();
            write_mappings(&dir.path().join("mm-7.img"));
            let expected = read_image(dir.path(), None);
            let pages = [Pages::open(DumpedPages::of_list(7, &list).unwrap(), "last", dir.path()).unwrap()];

            let (ours, theirs) = UnixStream::pair().unwrap();
            std::thread::scope(|scope| {
                let (theirs, to) = (theirs, there.path());
                let receiver = scope.spawn(move || stream::receive(&mut &theirs, &mut &theirs, to));
                let (mut output, mut piece) = (&ours, Vec::new());
                for extents in [&at_first.extents, &later.extents] {
                    let mut new = Vec::new();
                    for extent in extents {
                        memory::send(&mut output, extent, &mut piece, &known, &mut new).unwrap();
                    }
                    known.add(new);
                }
                stream::mark(&mut output, &mut &ours).unwrap();
                let changes = changes(&pages, &known, |_| is_used).unwrap().remove(0);
                changes.list(dir.path()).unwrap();
                fs::copy(&list, last.join(list_name(7))).unwrap();
                let (file, size) = changes.file();
                File::create_new(last.join(file)).unwrap().set_len(size).unwrap();
                for changed in changes.changed() {
                    changed.send(&mut output, &mut piece).unwrap();
                }
                ours.shutdown(std::net::Shutdown::Write).unwrap();
                receiver.join().unwrap().unwrap();
            });
            // The file of the parent has more behind what is listed.
            let parent = read_image(&memory, None);
            proptest::prop_assert_eq!(read_image(&last, Some(&parent)), expected);
        }
    }

    /// Memory of this process, three pages of 1, 2 and 3, of which it may not read the second.
    fn mapped() -> u64 {
        // SAFETY: new memory, which nothing else knows.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let at = libc::mmap(std::ptr::null_mut(), 3 * PAGE, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            for page in 0..3 {
                at.cast::<u8>().add(page * PAGE).write_bytes(page as u8 + 1, PAGE);
            }
            assert_eq!(libc::mprotect(at.cast::<u8>().add(PAGE).cast(), PAGE, libc::PROT_NONE), 0);
            at as u64
        }
    }

    fn part(at: usize, count: usize, address: u64, from: PagesFrom) -> PagesPart {
        PagesPart { at: (at * PAGE) as u64, length: (count * PAGE) as u64, address, from, is_lazy: true }
    }

    #[test]
    fn a_file_has_its_pages_from_where_they_are_and_what_the_target_has_is_not_sent() {
        let (at, written) = (mapped(), tempfile::NamedTempFile::new().unwrap());
        written.as_file().write_all_at(&[[8; PAGE], [9; PAGE]].concat(), 0).unwrap();
        let process = std::process::id();
        let parts = vec![
            part(0, 1, PAGE as u64, PagesFrom::File(0)),
            part(1, 3, at, PagesFrom::Process),
            part(4, 1, 9 * PAGE as u64, PagesFrom::File(PAGE as u64)),
        ];
        let pages = Pages {
            dumped: DumpedPages { number: 1, process, parts, mappings: Mappings::default() },
            name: "last/pages-1.img".into(),
            memory: Some(File::open("/proc/self/mem").unwrap()),
            memory_path: "/proc/self/mem".into(),
            written: written.reopen().unwrap(),
            written_path: written.path().into(),
        };
        let mut all = vec![0; 5 * PAGE];
        pages.read(0, &mut all).unwrap();
        let firsts: Vec<u8> = all.chunks(PAGE).map(|page| page[0]).collect();
        assert!(firsts == [8, 1, 2, 3, 9] && all.chunks(PAGE).all(|page| page.iter().all(|it| *it == page[0])));
        let mut middle = vec![0; PAGE];
        pages.read(PAGE as u64 + 100, &mut middle).unwrap();
        assert_eq!((middle[0], middle[PAGE - 1]), (1, 2));
        assert!(pages.read(5 * PAGE as u64, &mut middle).is_err());

        let pages = [pages];
        let whats = |known: &Known| {
            let changes = changes(&pages, known, |_| true).unwrap().remove(0);
            assert_eq!(changes.of_changed_process().is_some(), changes.in_parent.iter().filter(|it| **it).count() < 3);
            let (in_parent, bytes) = (changes.in_parent.clone(), changes.bytes as usize / PAGE);
            let changed = changes.changed().into_iter();
            let changed = changed.map(|it| (it.at as usize / PAGE, it.length / PAGE, it.to as usize / PAGE, it.what));
            (in_parent, bytes, changed.collect::<Vec<_>>())
        };
        assert_eq!(whats(&Known::new(5)), (vec![false; 5], 5, vec![(0, 5, 0, What::Content)]));
        // The target has the page of 2, at another address.
        let mut known = Known::new(5);
        known.takes_page(&[2; PAGE]);
        let (in_parent, bytes, changed) = whats(&known);
        assert_eq!((in_parent, bytes), (vec![false; 5], 5));
        assert_eq!(changed.iter().map(|it| (it.0, it.1, it.2)).collect::<Vec<_>>(), [(0, 2, 0), (2, 1, 2), (3, 2, 3)]);
        assert!(matches!(changed[1].3, What::There(_)));
        // Its parent image has the pages of 1 and 3 at their addresses, where the page of 2 was another.
        let mut known = Known::new(5);
        known.has_parent(process, at, &[&[1; PAGE], &[7; PAGE], &[3; PAGE]]);
        let (in_parent, bytes, changed) = whats(&known);
        assert_eq!((in_parent, bytes), (vec![false, true, false, true, false], 3));
        let expected = [(0, 1, 0, What::Content), (2, 1, 1, What::Content), (4, 1, 2, What::Content)];
        assert_eq!(changed, expected);
    }
}
