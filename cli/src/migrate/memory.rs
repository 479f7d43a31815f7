//! The processes' own memory, sent while they run.
//!
//! CRIU dumps that memory when the processes stand still. Most of it is then what it was before, so the target has it already.
//!
//! ```text
//!   they run:          /proc/PID/mem ──┬── a page that is new ────────────────────► its content, in memory/pages-PID.img
//!                                      └── known, or of zeros ────────────────────► nothing
//!   they stand still:  the last image ─┬── what was at its address at first ──────► nothing: it is in the parent image
//!                                      ├── another page that is known ────────────► where it is in memory/pages-PID.img
//!                                      └── any other ─────────────────────────────► its content
//! ```
//!
//! The directory `memory` is the parent of the last image, as CRIU calls it: `memory/pagemap-PID.img` lists the pages that a process had at
//! first, which lie in the order of their addresses in `memory/pages-PID.img`. What is new later comes behind. So nothing is copied that has not
//! changed, and the target has memory once.
//!
//! Pages of the last image are read where CRIU has left them, or from CRIU's files (`frozen.rs`). A process is known by its number in the
//! image, which is another one than here for those of a container.
//!
//! A page is known by a hash of 128 bits, seeded with a random number of the migration. So it does not matter when a page was written, whose
//! it was, or whether CRIU dumps it at all: what was sent is only used where the content is the same.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rekindle_wire::window;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::numbers::Numbers;
use super::stream::{self, Extent, PIECE, StreamError, is_zeros};
use super::talk::{Directory, MEMORY};
use crate::cpu_image::{list_name, list_of_present, pages_name};
use crate::process::Process;

/// The size of a page, in CRIU's images too.
pub(super) const PAGE: usize = 4096;
/// The beginning of the names of files in which CRIU has pages.
const PAGES: &str = "pages-";
/// The bits of `/proc/PID/pagemap` (admin-guide/mm/pagemap): the page is in memory; it is of a file, or shared.
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;
/// How many pages are looked up at a time.
const LOOKED_UP: usize = 1 << 16;
/// A mapping that is longer is passed over: to look at each of its pages would take too long.
const LONGEST: u64 = 64 << 30;

/// A page that was sent: in which process's file, and where in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pid: u32,
    offset: u64,
}

impl Place {
    /// The process, and the offset in its file.
    pub(super) fn place(self) -> (u32, u64) {
        (self.pid, self.offset)
    }
}

/// A file of the target's.
#[derive(Debug)]
struct FileThere {
    /// Where each of the extents that are sent first has its place, by its address. Pages follow each other: at their addresses they would
    /// be behind the end of the largest file that some file systems have.
    places: BTreeMap<u64, u64>,
    /// The end of what the file has.
    end: AtomicU64,
}

/// The pages that the target has.
#[derive(Debug)]
pub(super) struct Known {
    seed: u64,
    pages: HashMap<u128, Place>,
    /// The hashes of the pages of a process's file, and 0 for each of zeros.
    written: HashMap<u32, Vec<u128>>,
    /// The files there, by name.
    files: BTreeMap<String, FileThere>,
    /// What the parent image has of each process: ranges of addresses, one behind the other in its file.
    parent: BTreeMap<u32, Vec<InParent>>,
    /// The bytes for which the target still has room.
    room: AtomicU64,
}

/// Pages of the parent image.
#[derive(Debug)]
struct InParent {
    addresses: Range<u64>,
    /// Where they are in their file.
    offset: u64,
}

/// What of some pages is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Nothing: the parent image has them.
    Same,
    /// Their content.
    Content,
    /// That they are zeros.
    Zeros,
    /// Where they are: the first one there, the others behind it.
    There(Place),
}

impl Known {
    pub(super) fn new(seed: u64) -> Self {
        let (pages, written, files, parent) = (HashMap::new(), HashMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { seed, pages, written, files, parent, room: AtomicU64::new(0) }
    }

    /// The target has made files for this memory, and has room for so much in all of them.
    pub(super) fn has_files_for(&mut self, own: &Own) {
        self.room = AtomicU64::new(own.extents.iter().map(|it| it.length).sum());
        for extent in &own.extents {
            let made = || FileThere { places: BTreeMap::new(), end: AtomicU64::new(0) };
            let file = self.files.entry(extent.name.clone()).or_insert_with(made);
            file.places.insert(extent.offset, *file.end.get_mut());
            *file.end.get_mut() += extent.length;
        }
        for (pid, ranges) in &own.private {
            let mut offset = 0;
            let in_parent = ranges.iter().map(|it| {
                let begin = offset;
                offset += it.end - it.start;
                InParent { addresses: it.clone(), offset: begin }
            });
            self.parent.insert(*pid, in_parent.collect());
        }
    }

    /// Whether the target has a file for an extent: a process may have come since.
    pub(super) fn takes(&self, extent: &Extent) -> bool {
        self.files.contains_key(&extent.name)
    }

    /// Takes room for so many bytes, if there is so much left.
    fn takes_room(&self, bytes: u64) -> bool {
        let less = |left: u64| left.checked_sub(bytes);
        self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    /// The target has these pages now. What is sent from here on comes behind them.
    pub(super) fn add(&mut self, pages: Vec<(u128, Place)>) {
        for (hash, place) in &pages {
            let (written, page) = (self.written.entry(place.pid).or_default(), place.offset as usize / PAGE);
            written.resize(written.len().max(page + 1), 0);
            written[page] = *hash;
        }
        self.pages.extend(pages);
        self.files.values_mut().for_each(|file| file.places.clear());
    }

    /// The target has this page.
    #[cfg(test)]
    pub(super) fn takes_page(&mut self, page: &[u8]) {
        let place = (self.hash(page), Place { pid: 7, offset: 0 });
        self.add(vec![place]);
    }

    /// The target has room for so much.
    #[cfg(test)]
    pub(super) fn has_room(&mut self, bytes: u64) {
        self.room = AtomicU64::new(bytes);
    }

    /// The parent image has these pages of a process at an address.
    #[cfg(test)]
    pub(super) fn has_parent(&mut self, pid: u32, address: u64, pages: &[&[u8]]) {
        let (range, name) = (address..address + (pages.len() * PAGE) as u64, format!("{MEMORY}/{}", pages_name(pid)));
        let (offset, length) = (range.start, range.end - range.start);
        let extents = vec![Extent { name, path: PathBuf::new(), offset, length }];
        self.has_files_for(&Own { extents, private: BTreeMap::from([(pid, vec![range])]) });
        let places = (0..).step_by(PAGE).map(|offset| Place { pid, offset });
        let hashes = pages.iter().map(|page| self.hash(page)).zip(places).collect();
        self.add(hashes);
    }

    /// What the parent image has of a process at an address: a page's hash, 0 for one of zeros, or none.
    pub(super) fn in_parent(&self, pid: u32, address: u64) -> Option<u128> {
        let all = self.parent.get(&pid)?;
        let InParent { addresses, offset } = all.get(all.partition_point(|it| it.addresses.end <= address))?;
        let page = (offset + address.checked_sub(addresses.start)?) as usize / PAGE;
        // What was not sent, since it was of zeros or has gone meanwhile, is a hole.
        Some(self.written.get(&pid).and_then(|it| it.get(page)).copied().unwrap_or(0))
    }

    /// By what a page is known.
    fn hash(&self, page: &[u8]) -> u128 {
        xxh3_128_with_seed(page, self.seed)
    }

    /// What is to be sent of a piece of pages, in ranges of bytes. `in_parent` tells what the parent image has of the page with this number.
    pub(super) fn split(&self, piece: &[u8], in_parent: impl Fn(usize) -> Option<u128>) -> Vec<(Range<usize>, What)> {
        let mut split: Vec<(Range<usize>, What)> = Vec::new();
        let mut at = 0;
        for page in piece.chunks(PAGE) {
            let (from, to) = (at, at + page.len());
            at = to;
            let hash = if is_zeros(page) { 0 } else { self.hash(page) };
            let place = self.pages.get(&hash).filter(|_| page.len() == PAGE);
            let what = match hash {
                hash if in_parent(from / PAGE) == Some(hash) && page.len() == PAGE => What::Same,
                0 => What::Zeros,
                _ => place.map_or(What::Content, |it| What::There(*it)),
            };
            match split.last_mut() {
                Some((before, of)) if before.end == from && follows(of, before.len(), &what) => before.end = to,
                _ => split.push((from..to, what)),
            }
        }
        split
    }
}

/// Whether pages that begin so many bytes later are to be sent as one with those before.
fn follows(before: &What, bytes: usize, what: &What) -> bool {
    match (before, what) {
        (What::Same, What::Same) | (What::Content, What::Content) | (What::Zeros, What::Zeros) => true,
        (What::There(first), What::There(next)) => {
            first.pid == next.pid && first.offset.checked_add(bytes as u64) == Some(next.offset)
        }
        _ => false,
    }
}

/// Sends a part of a process's memory, as far as the receiver does not know it and has room for it, and adds it to `new`. What the process
/// has unmapped meanwhile is passed over. Returns the bytes that were sent.
pub(super) fn send(
    to: &mut impl Write,
    extent: &Extent,
    piece: &mut Vec<u8>,
    known: &Known,
    new: &mut Vec<(u128, Place)>,
) -> Result<u64, StreamError> {
    let pid = process_of(&extent.name);
    let there = known.files.get(&extent.name);
    let (Some(pid), Some(there), Ok(file)) = (pid, there, File::open(&extent.path)) else { return Ok(0) };
    let first = there.places.get(&extent.offset);
    let mut sent = 0;
    for offset in (extent.offset..extent.offset + extent.length).step_by(PIECE) {
        piece.resize((extent.offset + extent.length - offset).min(PIECE as u64) as usize, 0);
        if file.read_exact_at(piece, offset).is_err() {
            continue;
        }
        let split = known.split(piece, |_| None).into_iter();
        for (range, _) in split.filter(|(_, what)| *what == What::Content) {
            let from = range.start as u64;
            let part = &piece[range];
            if !known.takes_room(part.len() as u64) {
                continue;
            }
            let at = match first {
                Some(first) => first + (offset - extent.offset) + from,
                None => there.end.fetch_add(part.len() as u64, Ordering::Relaxed),
            };
            stream::send_piece(to, &extent.name, at, part)?;
            sent += part.len() as u64;
            let places = (at..).step_by(PAGE).map(|offset| Place { pid, offset });
            new.extend(part.chunks_exact(PAGE).map(|page| known.hash(page)).zip(places));
        }
    }
    Ok(sent)
}

/// Sends a part of a file with pages of memory, which is of zeros at the receiver; of those that the receiver knows, where they are. Returns
/// the bytes of content that were sent.
pub(super) fn send_dumped(
    to: &mut impl Write,
    extent: &Extent,
    piece: &mut Vec<u8>,
    known: &Known,
) -> Result<u64, StreamError> {
    let failed = |source| StreamError::Read { path: extent.path.clone(), source };
    let file = File::open(&extent.path).map_err(failed)?;
    let mut sent = 0;
    for offset in (extent.offset..extent.offset + extent.length).step_by(PIECE) {
        piece.resize((extent.offset + extent.length - offset).min(PIECE as u64) as usize, 0);
        file.read_exact_at(piece, offset).map_err(failed)?;
        for (range, what) in known.split(piece, |_| None) {
            let (at, part) = (offset + range.start as u64, &piece[range]);
            match what {
                What::Content => {
                    stream::send_piece(to, &extent.name, at, part)?;
                    sent += part.len() as u64;
                }
                What::Zeros | What::Same => {}
                What::There(place) => {
                    stream::send_place(to, &extent.name, at, part.len() as u32, place.place())?;
                }
            }
        }
    }
    Ok(sent)
}

/// The directory of such memory at the target, with the bytes that each process has now, and these lists.
pub(super) fn directory(own: &Own, lists: &[(String, Vec<u8>)]) -> Directory {
    let mut files = BTreeMap::<String, u64>::new();
    for pid in own.private.keys() {
        files.insert(pages_name(*pid), 0);
    }
    for Extent { name, length, .. } in &own.extents {
        *files.entry(file_of(name).to_owned()).or_default() += length;
    }
    files.extend(lists.iter().map(|(name, list)| (file_of(name).to_owned(), list.len() as u64)));
    Directory { name: MEMORY.to_owned(), files: files.into_iter().collect(), ..Directory::default() }
}

/// CRIU's lists of what the processes have, by their names on the streams.
pub(super) fn lists(own: &Own) -> io::Result<Vec<(String, Vec<u8>)>> {
    let list = |(pid, ranges): (&u32, &Vec<Range<u64>>)| {
        let list = list_of_present(*pid, ranges.iter().cloned())?;
        Ok((format!("{MEMORY}/{}", list_name(*pid)), list))
    };
    own.private.iter().map(list).collect()
}

/// The file in its directory that a name on the streams stands for.
fn file_of(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or_default()
}

/// The process whose pages a file has, by its name on the streams.
fn process_of(name: &str) -> Option<u32> {
    file_of(name).strip_prefix(PAGES)?.strip_suffix(".img")?.parse().ok()
}

/// Whether an extent is of a file in which CRIU has pages.
pub(super) fn has_pages(extent: &Extent) -> bool {
    file_of(&extent.name).starts_with(PAGES)
}

/// The memory of a tree's processes.
#[derive(Debug)]
pub(super) struct Own {
    /// Of each process, what it alone has, and behind that what it may share.
    pub(super) extents: Vec<Extent>,
    /// The addresses of what each process alone has: CRIU has that in the process's file, and other memory elsewhere.
    pub(super) private: BTreeMap<u32, Vec<Range<u64>>>,
}

impl Own {
    /// The bytes of what each process alone has.
    pub(super) fn private_bytes(&self) -> u64 {
        self.private.values().flatten().map(|it| it.end - it.start).sum()
    }
}

/// The memory of a tree that CRIU would dump, no extent longer than `most` bytes. Of processes that end meanwhile there is none.
pub(super) fn own(root: i32, most: u64) -> Own {
    let mut seen = BTreeSet::new();
    let numbers = Numbers::of(root);
    let pids = Process::trees_of(&[root]).unwrap_or_default();
    let mut own = Own { extents: Vec::new(), private: BTreeMap::new() };
    for pid in pids {
        let Some(number) = numbers.in_image(pid) else { continue };
        let name = format!("{MEMORY}/{}", pages_name(number));
        let path = PathBuf::from(format!("/proc/{pid}/mem"));
        let (private, shared) = present(pid, &mut seen);
        own.private.insert(number, private.clone());
        for Range { start, end } in private.into_iter().chain(shared) {
            let mut offset = start;
            while offset < end {
                let length = most.min(end - offset);
                own.extents.push(Extent { name: name.clone(), path: path.clone(), offset, length });
                offset += length;
            }
        }
    }
    own
}

/// The ranges of a process's memory that are there and no file's: those that it alone has, and those that it may share. Shared memory that
/// was seen before is left out.
fn present(pid: i32, seen: &mut BTreeSet<String>) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
    let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
    let (mut private, mut shared): (Vec<Range<u64>>, Vec<Range<u64>>) = Default::default();
    let Ok(pagemap) = File::open(format!("/proc/{pid}/pagemap")) else { return (private, shared) };
    let mut reached = 0;
    for line in String::from_utf8_lossy(&maps).lines() {
        let Some(mut mapping) = Mapping::parse(line) else { continue };
        // The kernel lists a mapping that grows meanwhile again, from its beginning on. No page has two places.
        mapping.range.start = mapping.range.start.max(reached);
        reached = reached.max(mapping.range.end);
        if let Some(object) = mapping.object
            && !seen.insert(object.to_owned())
        {
            continue;
        }
        let found = if mapping.object.is_some() { &mut shared } else { &mut private };
        let unwanted = if mapping.object.is_some() { 0 } else { OF_FILE };
        let mut at = mapping.range.start;
        let mut entries = vec![0; LOOKED_UP * size_of::<u64>()];
        while at < mapping.range.end {
            let pages = ((mapping.range.end - at) as usize / PAGE).min(LOOKED_UP);
            let some = &mut entries[..pages * size_of::<u64>()];
            // It has ended, or the mapping is of a device.
            if pages == 0 || pagemap.read_exact_at(some, at / PAGE as u64 * size_of::<u64>() as u64).is_err() {
                break;
            }
            for (page, entry) in some.chunks_exact(size_of::<u64>()).enumerate() {
                let entry = u64::from_ne_bytes(entry.try_into().unwrap_or_default());
                let from = at + (page * PAGE) as u64;
                if entry & PRESENT == 0 || entry & unwanted != 0 {
                    continue;
                }
                match found.last_mut() {
                    Some(before) if before.end == from => before.end += PAGE as u64,
                    _ => found.push(from..from + PAGE as u64),
                }
            }
            at += (pages * PAGE) as u64;
        }
    }
    (private, shared)
}

/// A mapping whose pages CRIU dumps.
#[derive(Debug, PartialEq, Eq)]
struct Mapping<'a> {
    range: Range<u64>,
    /// The part of an object, as `OFFSET DEVICE INODE`, of memory that processes may share.
    object: Option<&'a str>,
}

impl<'a> Mapping<'a> {
    /// From a line of `/proc/PID/maps`: readable memory of the process's own, or that it may share. Not memory of GPUs, which has its own
    /// way to the target.
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.splitn(6, ' ').map(str::trim).filter(|it| !it.is_empty());
        let (range, rights, offset) = (words.next()?, words.next()?, words.next()?);
        let (_device, inode) = (words.next()?, words.next()?);
        let path = words.next().unwrap_or_default();
        let (start, end) = range.split_once('-')?;
        let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
        let is_shared = rights.ends_with('s');
        let is_memory = ["/memfd:", "/dev/zero", "/SYSV"].iter().any(|it| path.starts_with(it));
        let is_of_kernel = path.starts_with("[v");
        let devices = window::DEVICE_BASE..window::DEVICE_BASE + window::DEVICE_SIZE * window::MAX_DEVICES as u64;
        let others = window::reserved().start..window::aliases().end;
        let is_gpus = [devices, others].iter().any(|it| it.contains(&range.start));
        let is_wanted = rights.starts_with('r') && !is_of_kernel && !is_gpus && (!is_shared || is_memory);
        let object = is_shared.then(|| line_part(line, offset, inode));
        (is_wanted && range.end > range.start && range.end - range.start <= LONGEST).then_some(Self { range, object })
    }
}

/// The part of a line from one of its words to another.
fn line_part<'a>(line: &'a str, from: &str, to: &str) -> &'a str {
    let begin = from.as_ptr() as usize - line.as_ptr() as usize;
    let end = to.as_ptr() as usize + to.len() - line.as_ptr() as usize;
    &line[begin..end]
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pages(of: &[u8]) -> Vec<u8> {
        of.iter().flat_map(|it| [*it; PAGE]).collect()
    }

    fn there(page: usize) -> What {
        What::There(Place { pid: 7, offset: (page * PAGE) as u64 })
    }

    #[test]
    fn what_is_known_is_told_from_what_is_not_and_from_zeros() {
        let mut known = Known::new(5);
        let all = pages(&[1, 2, 3, 4]);
        let places = all.chunks(PAGE).enumerate();
        let places = places.map(|(at, page)| (known.hash(page), Place { pid: 7, offset: (at * PAGE) as u64 }));
        let places = places.collect();
        known.add(places);
        let piece = pages(&[2, 3, 9, 9, 0, 4, 1]);
        let at = |from: usize, to: usize| from * PAGE..to * PAGE;
        let expected = [
            (at(0, 2), there(1)),
            (at(2, 4), What::Content),
            (at(4, 5), What::Zeros),
            (at(5, 6), there(3)),
            (at(6, 7), there(0)),
        ];
        let none = |_| None;
        assert_eq!(known.split(&piece, none), expected);
        // The end of a file that is no page.
        assert_eq!(known.split(&piece[..PAGE + 10], none)[1..], [(PAGE..PAGE + 10, What::Content)]);
        assert_eq!(Known::new(6).split(&all, none), [(0..4 * PAGE, What::Content)], "another seed knows nothing");
    }

    #[test]
    fn what_the_parent_image_has_at_its_address_is_the_same_and_nothing_else() {
        let mut known = Known::new(5);
        let at = |page: u64| 0x7000_0000 + page * PAGE as u64;
        // A page of zeros in the middle is a hole.
        known.has_parent(7, at(0), &[&pages(&[1]), &pages(&[2]), &pages(&[0])]);
        let hash = |of: u8| known.hash(&pages(&[of]));
        assert_eq!([at(0), at(1)].map(|it| known.in_parent(7, it)), [Some(hash(1)), Some(hash(2))]);
        assert!(
            [(7, at(0) - PAGE as u64), (7, at(3)), (8, at(0))].iter().all(|it| known.in_parent(it.0, it.1).is_none())
        );
        let split = |of: &[u8]| known.split(&pages(of), |page| known.in_parent(7, at(page as u64)));
        let range = |from: usize, to: usize| from * PAGE..to * PAGE;
        assert_eq!(split(&[1, 2]), [(range(0, 2), What::Same)]);
        let expected = [
            (range(0, 1), there(1)),
            (range(1, 2), What::Same),
            (range(2, 3), What::Content),
            (range(3, 4), What::Zeros),
        ];
        assert_eq!(split(&[2, 2, 9, 0]), expected);
    }

    #[test]
    fn zeros_that_the_parent_image_has_as_a_hole_are_the_same() {
        let mut known = Known::new(5);
        let (name, path) = (format!("{MEMORY}/{}", pages_name(7)), PathBuf::new());
        let extents = vec![Extent { name, path, offset: 0, length: 2 * PAGE as u64 }];
        let private = BTreeMap::from([(7, std::iter::once(0..2 * PAGE as u64).collect())]);
        known.has_files_for(&Own { extents, private });
        assert_eq!(known.in_parent(7, PAGE as u64), Some(0));
        let split = known.split(&pages(&[0, 1]), |page| known.in_parent(7, (page * PAGE) as u64));
        assert_eq!(split, [(0..PAGE, What::Same), (PAGE..2 * PAGE, What::Content)]);
    }

    #[test]
    fn mappings_that_criu_dumps_are_told_from_others() {
        let wanted = |line: &'static str| Mapping::parse(line).map(|it| (it.range.start, it.object));
        assert_eq!(
            wanted("5581a000-5582b000 rw-p 00000000 00:00 0                          [heap]"),
            Some((0x5581a000, None))
        );
        assert_eq!(wanted("7f00-8f00 r--p 00000000 08:01 4242   /usr/lib/a b.so"), Some((0x7f00, None)));
        assert_eq!(
            wanted("7f00-8f00 rw-s 00000000 00:01 77   /memfd:x (deleted)"),
            Some((0x7f00, Some("00000000 00:01 77")))
        );
        assert_eq!(wanted("7f00-8f00 rw-s 00000000 08:01 4242   /home/data"), None, "the target has the file");
        assert_eq!(wanted("7f00-8f00 rw-s 00000000 00:19 7   /dev/shm/x (deleted)"), None, "CRIU has it among files");
        assert_eq!(wanted("7f00-8f00 ---p 00000000 00:00 0"), None);
        assert_eq!(wanted("7ffe0000-7ffe4000 r--p 00000000 00:00 0                  [vvar]"), None);
        assert_eq!(
            wanted("7ffe0000-7ffe4000 rw-p 00000000 00:00 0                  [stack]"),
            Some((0x7ffe0000, None))
        );
        assert_eq!(wanted("200000000000-200000200000 rw-p 00000000 00:00 0"), None, "a GPU's");
        assert_eq!(wanted("1000-7f0000001000 rw-p 00000000 00:00 0"), None);
        assert_eq!(wanted("nonsense"), None);
    }

    #[test]
    fn the_memory_of_this_process_is_found() {
        let content = pages(&[1, 2, 3, 4, 5]);
        let Own { extents: found, private } = own(std::process::id() as i32, 3 * PAGE as u64);
        let all: u64 = found.iter().map(|it| it.length).sum();
        let alone: u64 = private.values().flatten().map(|it| it.end - it.start).sum();
        assert!(private.len() == 1 && (1..=all).contains(&alone), "{private:?} of {all}");
        assert!(found.iter().all(|it| it.length <= 3 * PAGE as u64 && it.offset.is_multiple_of(PAGE as u64)));
        let middle = content.as_ptr() as u64 + 2 * PAGE as u64;
        assert!(found.iter().any(|it| (it.offset..it.offset + it.length).contains(&middle)));
        assert!(own(i32::MAX, 1).extents.is_empty());
    }

    /// Sends extents, and ends with the mark.
    fn send_all(
        to: &UnixStream,
        extents: &[Extent],
        mut each: impl FnMut(&mut &UnixStream, &Extent, &mut Vec<u8>) -> u64,
    ) -> u64 {
        let (mut output, mut piece) = (to, Vec::new());
        let sent = extents.iter().map(|it| each(&mut output, it, &mut piece)).sum();
        stream::mark(&mut output, &mut &*to).unwrap();
        sent
    }

    #[test]
    fn a_dump_of_memory_that_was_sent_arrives_whole_and_little_of_it_is_sent_again() {
        const SENT: usize = 3 * PIECE / PAGE;
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // Each page is another one.
        let page = |number: usize| [&number.to_le_bytes()[..], &[7; PAGE - size_of::<usize>()]].concat();
        let mut buffer = vec![0; (SENT + 1) * PAGE];
        let begin = buffer.as_ptr().align_offset(PAGE);
        let content = &mut buffer[begin..begin + SENT * PAGE];
        content.copy_from_slice(&(0..SENT).flat_map(page).collect::<Vec<_>>());
        content[5 * PAGE..9 * PAGE].fill(0);
        let pid = std::process::id() as i32;
        let is_content = |it: &Extent| {
            let begin = content.as_ptr() as u64;
            it.offset < begin + content.len() as u64 && it.offset + it.length > begin
        };
        let mut own = own(pid, 1 << 20);
        own.extents.retain(is_content);
        let mut known = Known::new(3);
        known.has_files_for(&own);
        assert!(own.extents.iter().all(|it| known.takes(it)));
        let lists = lists(&own).unwrap();
        let directory = directory(&own, &lists);
        let extents = own.extents;
        assert_eq!(directory.files.len(), 2, "{directory:?}");
        // What CRIU dumps: other pages, those that were sent in another order and at other offsets, and zeros.
        let mut dumped: Vec<u8> = (SENT..SENT + 10).flat_map(page).collect();
        dumped.extend((0..2 * PIECE / PAGE).rev().flat_map(page));
        dumped.extend(vec![0; 30 * PAGE]);
        dumped.extend((10..PIECE / PAGE).flat_map(page));
        for (dir, file, size) in
            [(MEMORY, pages_name(pid.unsigned_abs()), 0), ("last", "pages-1.img".to_owned(), dumped.len())]
        {
            fs::create_dir(there.path().join(dir)).unwrap();
            File::create(there.path().join(dir).join(file)).unwrap().set_len(size as u64).unwrap();
        }
        let path = here.path().join("pages-1.img");
        fs::write(&path, &dumped).unwrap();
        let pages = stream::extents("last/pages-1.img", &path, 16 << 20).unwrap();
        assert!(has_pages(&pages[0]));

        let (ours, theirs) = UnixStream::pair().unwrap();
        let (first, last) = std::thread::scope(|scope| {
            // Closed when it ends.
            let (theirs, to) = (theirs, there.path());
            let receiver = scope.spawn(move || stream::receive(&mut &theirs, &mut &theirs, to));
            let mut new = Vec::new();
            let first = send_all(&ours, &extents, |to, it, piece| send(to, it, piece, &known, &mut new).unwrap());
            known.add(new);
            let last = send_all(&ours, &pages, |to, it, piece| send_dumped(to, it, piece, &known).unwrap());
            ours.shutdown(std::net::Shutdown::Write).unwrap();
            receiver.join().unwrap().unwrap();
            (first, last)
        });
        assert!(fs::read(there.path().join("last/pages-1.img")).unwrap() == dumped);
        assert!(first >= ((SENT - 4) * PAGE) as u64, "{first}");
        // Ten that are new, and those that were zeros when they were sent.
        assert_eq!(last, ((10 + 4) * PAGE) as u64);
    }
}
