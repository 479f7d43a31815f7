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
//! The target's image is the one that CRIU would have written (`cpu_image/left.rs`).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::ops::Range;
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

use super::memory::{Base, Known, What};
use super::stream::{self, PIECE, StreamError};
use crate::cpu_image::{LeftPages, PagesFrom, PagesPart};
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
    let namespace = |of: &str| fs::read_link(format!("/proc/{of}/ns/pid")).ok();
    let ours = namespace("self");
    let tree = Process::trees_of(&[root]).unwrap_or_default();
    let have_our_numbers = ours.is_some() && tree.iter().all(|pid| namespace(&pid.to_string()) == ours);
    let lists = tree.iter().map(|pid| addresses_of(*pid)).sum::<u64>() / ADDRESSES;
    have_our_numbers && bytes / PIPE < pipes() && lists <= bytes / 8 + SMALL_LISTS
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

/// The pages of a process that stands still.
pub(super) struct Pages {
    left: LeftPages,
    /// The file's name on the streams.
    name: String,
    memory: File,
    memory_path: PathBuf,
    written: File,
    written_path: PathBuf,
}

/// What of a piece of a file is to be sent.
pub(super) struct Changed<'a> {
    pages: &'a Pages,
    at: u64,
    split: Vec<(Range<usize>, What)>,
}

impl Pages {
    /// The pages of a process whose image is in this directory of the migration.
    pub(super) fn open(left: LeftPages, name: &str, dir: &Path) -> Result<Self, Failure> {
        // CRIU traces it: it is the one that is dumped, and stands still.
        if !i32::try_from(left.process).is_ok_and(process::is_traced) {
            return Err(anyhow!("process {} does not stand still", left.process).into());
        }
        let memory_path = PathBuf::from(format!("/proc/{}/mem", left.process));
        let written_path = dir.join(&left.file);
        let open = |path: &Path| File::open(path).with_context(|| format!("cannot read {}", path.display()));
        let (memory, written) = (open(&memory_path)?, open(&written_path)?);
        let name = format!("{name}/{}", left.file);
        Ok(Self { left, name, memory, memory_path, written, written_path })
    }

    /// The file's name in its directory, the process, and the bytes that the file is to have.
    pub(super) fn file(&self) -> (&str, u32, u64) {
        (&self.left.file, self.left.process, self.left.bytes())
    }

    /// Reads the process's memory, also what it may not read itself.
    fn read_memory(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let pid = self.left.process.cast_signed();
        let read = read_some(pid, address, into).unwrap_or(0).min(into.len());
        match read {
            all if all == into.len() => Ok(()),
            _ => self.memory.read_exact_at(&mut into[read..], address + read as u64),
        }
    }

    /// Reads what the file is to have from an offset on.
    fn read(&self, at: u64, piece: &mut [u8]) -> Result<(), StreamError> {
        let parts = &self.left.parts;
        let mut next = parts.partition_point(|it| it.at + it.length <= at);
        let mut done = 0;
        while done < piece.len() {
            let Some(PagesPart { at: begin, length, from }) = parts.get(next) else {
                return Err(StreamError::Ended);
            };
            let into = at + done as u64 - begin;
            let count = (length - into).min((piece.len() - done) as u64) as usize;
            let part = &mut piece[done..done + count];
            let (read, path) = match from {
                PagesFrom::Process(address) => (self.read_memory(address + into, part), &self.memory_path),
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

/// What the target does not have of these files, where some begin as copies there, by their names on the streams. All cores look.
pub(super) fn differing<'a>(
    pages: &'a [Pages],
    known: &Known,
    bases: &BTreeMap<String, Base>,
) -> Result<Vec<Changed<'a>>, StreamError> {
    let pieces: Vec<(&Pages, u64)> =
        pages.iter().flat_map(|it| (0..it.left.bytes()).step_by(PIECE).map(move |at| (it, at))).collect();
    let (pieces, next) = (&pieces, &AtomicUsize::new(0));
    let look = || {
        let (mut changed, mut piece) = (Vec::new(), Vec::new());
        while let Some(&(pages, at)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            piece.resize((pages.left.bytes() - at).min(PIECE as u64) as usize, 0);
            pages.read(at, &mut piece)?;
            let split = known.split(&piece, (bases.get(&pages.name).copied(), at));
            if !split.is_empty() {
                changed.push(Changed { pages, at, split });
            }
        }
        Ok(changed)
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from).min(pieces.len());
    let found = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(look)).collect();
        threads.into_iter().map(|it| it.join().unwrap_or(Err(StreamError::Ended))).collect::<Result<Vec<_>, _>>()
    });
    found.map(|it| it.into_iter().flatten().collect())
}

impl Changed<'_> {
    /// Sends it. Returns the bytes of content that were sent.
    pub(super) fn send(&self, to: &mut impl Write, piece: &mut Vec<u8>) -> Result<u64, StreamError> {
        let mut sent = 0;
        for (range, what) in &self.split {
            let (at, length) = (self.at + range.start as u64, range.len());
            match what {
                What::Content => {
                    piece.resize(length, 0);
                    self.pages.read(at, piece)?;
                    stream::send_piece(to, &self.pages.name, at, piece)?;
                    sent += length as u64;
                }
                What::Zeros => stream::send_zeros(to, &self.pages.name, at, length as u32)?,
                What::There(place) => {
                    stream::send_place(to, &self.pages.name, at, length as u32, place.place())?;
                }
            }
        }
        Ok(sent)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const PAGE: usize = 4096;

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

    fn part(at: usize, count: usize, from: PagesFrom) -> PagesPart {
        PagesPart { at: (at * PAGE) as u64, length: (count * PAGE) as u64, from }
    }

    #[test]
    fn a_file_has_its_pages_from_where_they_are_and_what_the_target_has_is_not_sent() {
        let (at, written) = (mapped(), tempfile::NamedTempFile::new().unwrap());
        written.as_file().write_all_at(&[[8; PAGE], [9; PAGE]].concat(), 0).unwrap();
        let process = std::process::id();
        let parts = vec![
            part(0, 1, PagesFrom::File(0)),
            part(1, 3, PagesFrom::Process(at)),
            part(4, 1, PagesFrom::File(PAGE as u64)),
        ];
        let pages = Pages {
            left: LeftPages { file: "pages-1.img".into(), process, parts },
            name: "last/pages-1.img".into(),
            memory: File::open("/proc/self/mem").unwrap(),
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
        let split = |known: &Known| differing(&pages, known, &BTreeMap::new()).unwrap().remove(0).split;
        let known = Known::new(5);
        assert_eq!(split(&known), [(0..5 * PAGE, What::Content)]);
        let mut known = Known::new(5);
        known.takes_page(&[2; PAGE]);
        let found = split(&known);
        assert_eq!(
            found.iter().map(|(range, _)| range.clone()).collect::<Vec<_>>(),
            [0..2 * PAGE, 2 * PAGE..3 * PAGE, 3 * PAGE..5 * PAGE]
        );
        assert!(matches!(found[1].1, What::There(_)));
    }
}
