//! The pages of a process in an image that CRIU has just written, and where they are: in CRIU's file, or in the process still. A dump with
//! `--lazy-pages` lists pages, and does not write them. Others may be in a parent image, as CRIU calls it.
//!
//! ```text
//!   pagemap-PID.img:           A, lazy | B, present | C, lazy
//!   pages-N.img:               B                               as CRIU has written it
//!   written anew, of which A is in the parent image:
//!   pagemap-PID.img:           A, lazy, in the parent | B, present | C, lazy, present
//!   pages-N.img:               B | C                           as it is when somebody has written C, too
//!   parent/pagemap-PID.img, parent/pages-PID.img:  A
//! ```
//!
//! CRIU writes the first list where it leaves pages, one with present pages where it does not, and one with pages in the parent where those
//! are as they were in an earlier dump (`ppb_xfer_flags` and `generate_iovs` in criu/page-xfer.c and criu/mem.c). It reads all of these
//! (`read_pagemap_page` in criu/pagemap.c). So an image whose pages somebody else writes is one that CRIU could have made.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, anyhow};
use protobuf::CodedOutputStream;

use super::entries::{self, Entry};
use super::{IN_PARENT, PAGE};
use crate::failure::Failure;

/// `PE_LAZY` and `PE_PRESENT` (criu/include/image.h).
pub(super) const LAZY: u64 = 1 << 1;
pub(super) const PRESENT: u64 = 1 << 2;
/// `VMA_EXT_PLUGIN`, of a mapping's status.
const EXT_PLUGIN: u64 = 1 << 27;
/// The field of an entry that has them.
pub(super) const FLAGS: u32 = 4;
/// The most pages of an entry, 64 MiB. CRIU's server of pages has a buffer for the longest one, and counts its bytes with 31 bits
/// (`collect_iovs` in criu/uffd.c): it fails at an entry of 2 GiB. CRIU itself writes entries of what a pipe takes.
const MOST: u64 = 16 << 10;
/// The words at the beginning of such a list (`IMG_COMMON_MAGIC` and `PAGEMAP_MAGIC` in criu/include/magic.h).
const MAGICS: [u32; 2] = [0x5456_4319, 0x5608_4025];

/// The name of the list of a process's pages.
pub(crate) fn list_name(process: u32) -> String {
    format!("pagemap-{process}.img")
}

/// The name of a file of pages.
pub(crate) fn pages_name(number: u32) -> String {
    format!("pages-{number}.img")
}

/// The pages of one process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DumpedPages {
    /// The number of the file of pages.
    pub(crate) number: u32,
    /// The process's number in the image.
    pub(crate) process: u32,
    /// All pages, by their addresses.
    pub(crate) parts: Vec<Part>,
    pub(crate) mappings: Mappings,
}

/// What of a process's mappings decides about its parent image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mappings {
    /// Addresses of which CRIU reads pages in the last image alone, whatever its list says (`premap_priv_vmas` and
    /// `restore_priv_vma_content` in criu/mem.c): of huge pages, and of plugins.
    pub(crate) without_parent: Vec<Range<u64>>,
    /// The bytes of memory that may not be written, and that the kernel does not count before it may. Where there is a parent image, CRIU
    /// maps it writable at first.
    pub(crate) unwritable: u64,
}

impl Mappings {
    /// Of a process, by its mm-PID.img. None if that cannot be read.
    fn read(path: &Path) -> Option<Self> {
        let mm = entries::read(path)?;
        let mut found = Self::default();
        for mapping in mm.first()?.entries(14) {
            let (range, prot) = (mapping.number(1)..mapping.number(2), mapping.number(5));
            let (flags, status) = (mapping.number(6), mapping.number(7));
            let is = |flag: libc::c_int| flags & u64::from(flag.unsigned_abs()) != 0;
            if is(libc::MAP_HUGETLB) || status & EXT_PLUGIN != 0 {
                found.without_parent.push(range);
            } else if is(libc::MAP_PRIVATE) && prot & 2 == 0 && !is(libc::MAP_NORESERVE) {
                found.unwritable = found.unwritable.saturating_add(range.end.saturating_sub(range.start));
            }
        }
        found.without_parent.sort_by_key(|it| it.start);
        Some(found)
    }

    /// Whether the parent image counts for a page.
    pub(crate) fn have_parent(&self, address: u64) -> bool {
        let next = self.without_parent.partition_point(|it| it.end <= address);
        self.without_parent.get(next).is_none_or(|it| address < it.start)
    }
}

/// Pages that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Where it begins among all pages, in bytes.
    pub(crate) at: u64,
    pub(crate) length: u64,
    /// Its address in the process.
    pub(crate) address: u64,
    pub(crate) from: From,
    /// Whether CRIU restores it when it is touched, if it is asked to.
    pub(crate) is_lazy: bool,
}

/// Where the content of a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// In the process.
    Process,
    /// At this offset of the file that CRIU has written.
    File(u64),
}

impl DumpedPages {
    /// The pages of all processes of the image in a directory.
    ///
    /// # Errors
    /// A list of pages is none of such a dump, or has pages in a parent.
    pub(crate) fn of_image(dir: &Path) -> Result<Vec<Self>, Failure> {
        let processes = entries::read(&dir.join("pstree.img")).unwrap_or_default();
        let mut all = Vec::new();
        for process in processes.iter().filter_map(|it| u32::try_from(it.number(1)).ok()) {
            let path = dir.join(list_name(process));
            // One that has ended and was not waited for has none.
            if !path.try_exists().with_context(|| format!("cannot read {}", path.display()))? {
                continue;
            }
            all.push(Self::of_list(process, &path)?);
        }
        if all.is_empty() {
            return Err(anyhow!("{}: CRIU has listed no process's pages", dir.display()).into());
        }
        Ok(all)
    }

    /// The pages of a process, by their list.
    pub(crate) fn of_list(process: u32, path: &Path) -> Result<Self, Failure> {
        let mappings = Mappings::read(&path.with_file_name(format!("mm-{process}.img")));
        let pages = entries::read(path).zip(mappings).and_then(|(entries, it)| Self::of(process, &entries, it));
        Ok(pages.ok_or_else(|| anyhow!("{}: CRIU's list of pages is not what was expected", path.display()))?)
    }

    /// From the entries of a list of pages. None if pages are in an earlier image.
    fn of(process: u32, entries: &[Entry], mappings: Mappings) -> Option<Self> {
        let (head, entries) = entries.split_first()?;
        let (mut at, mut written) = (0_u64, 0_u64);
        let mut parts = Vec::new();
        for entry in entries {
            let flags = entry.number(FLAGS);
            let length = entry.number(2).max(entry.number(5)).checked_mul(PAGE)?;
            let from = match flags {
                _ if flags & !(LAZY | PRESENT) != 0 => return None,
                _ if flags & PRESENT != 0 => From::File(written),
                _ if flags & LAZY != 0 => From::Process,
                _ => return None,
            };
            parts.push(Part { at, length, address: entry.number(1), from, is_lazy: flags & LAZY != 0 });
            at = at.checked_add(length)?;
            if matches!(from, From::File(_)) {
                written += length;
            }
        }
        Some(Self { number: u32::try_from(head.number(1)).ok()?, process, parts, mappings })
    }

    /// The name of the file of pages.
    pub(crate) fn file(&self) -> String {
        pages_name(self.number)
    }

    /// The bytes of all pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.last().map_or(0, |it| it.at + it.length)
    }

    /// Whether pages are in the process still.
    pub(crate) fn has_left_pages(&self) -> bool {
        self.parts.iter().any(|it| it.from == From::Process)
    }

    /// Writes the list anew: of all pages, these are in the parent image, and all others in the file, one behind the other. Where there are
    /// pages in the parent, CRIU restores no others when they are touched (`lazily.rs`).
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn list_again(&self, dir: &Path, in_parent: &[bool]) -> io::Result<()> {
        let has_parent = in_parent.contains(&true);
        let mut pages = in_parent.iter().copied();
        let mut entries = Vec::new();
        for part in &self.parts {
            for page in 0..part.length / PAGE {
                let is_in_parent = pages.next().unwrap_or(false);
                let is_lazy = part.is_lazy && is_in_parent == has_parent;
                let flags = if is_lazy { LAZY } else { 0 } | if is_in_parent { IN_PARENT } else { PRESENT };
                let address = part.address + page * PAGE;
                match entries.last_mut() {
                    Some((from, count, before)) if *before == flags && *from + *count * PAGE == address => *count += 1,
                    _ => entries.push((address, 1, flags)),
                }
            }
        }
        fs::write(dir.join(list_name(self.process)), list(self.number, entries)?)
    }
}

/// A list of pages that are in a file of this number, one behind the other: ranges of addresses.
pub(crate) fn list_of_present(number: u32, ranges: impl IntoIterator<Item = Range<u64>>) -> io::Result<Vec<u8>> {
    list(number, ranges.into_iter().map(|it| (it.start, (it.end - it.start) / PAGE, PRESENT)))
}

/// The number of the file that a list is about, and of each of its entries an address, the number of pages, and flags.
#[cfg(test)]
pub(crate) fn listed(path: &Path) -> (u32, Vec<(u64, u64, u64)>) {
    let entries = entries::read(path).unwrap();
    let pages = entries[1..].iter().map(|it| (it.number(1), it.number(2), it.number(FLAGS)));
    (entries[0].number(1) as u32, pages.collect())
}

/// A list of pages: of each entry an address, the number of pages, and flags.
pub(super) fn list(number: u32, entries: impl IntoIterator<Item = (u64, u64, u64)>) -> io::Result<Vec<u8>> {
    let mut list: Vec<u8> = MAGICS.into_iter().flat_map(u32::to_le_bytes).collect();
    write(&mut list, &[(1, number.into())])?;
    for (mut address, mut pages, flags) in entries {
        while pages > 0 {
            let some = pages.min(MOST);
            write(&mut list, &[(1, address), (2, some), (FLAGS, flags)])?;
            (address, pages) = (address + some * PAGE, pages - some);
        }
    }
    Ok(list)
}

/// Appends an entry with these numbers in these fields.
fn write(list: &mut Vec<u8>, fields: &[(u32, u64)]) -> io::Result<()> {
    let mut entry = Vec::new();
    let mut output = CodedOutputStream::vec(&mut entry);
    fields.iter().try_for_each(|(field, value)| output.write_uint64(*field, *value)).map_err(io::Error::other)?;
    output.flush().map_err(io::Error::other)?;
    drop(output);
    list.extend((entry.len() as u32).to_le_bytes());
    list.extend(entry);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{mapping, number, with_flags, write};
    use super::*;

    #[test]
    fn mappings_that_are_not_restored_from_a_parent_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mm-9.img");
        assert!(Mappings::read(&path).is_none());
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mm = [
            with_flags(0x1000, 0x3000, 3, private),
            with_flags(0x4000, 0x8000, 3, private | libc::MAP_HUGETLB),
            with_flags(0x8000, 0x9000, 0, private),
            with_flags(0x9000, 0xa000, 1, private | libc::MAP_NORESERVE),
            mapping(0xb000, 0xc000, 0, EXT_PLUGIN),
        ];
        write(&path, &[mm.concat()]);
        let found = Mappings::read(&path).unwrap();
        let expected = Mappings { without_parent: vec![0x4000..0x8000, 0xb000..0xc000], unwritable: 0x1000 };
        assert_eq!(found, expected);
        let have = [0x1000, 0x3fff, 0x4000, 0x7fff, 0x8000, 0xb000, 0xc000].map(|at| found.have_parent(at));
        assert_eq!(have, [true, true, false, false, true, false, true]);
    }

    /// An entry as CRIU 4.2 writes it, and as earlier ones do.
    fn pages(at: u64, count: u64, flags: u64) -> Vec<u8> {
        [number(1, at), number(2, 0), number(4, flags), number(5, count)].concat()
    }

    fn pages_before(at: u64, count: u64, flags: u64) -> Vec<u8> {
        [number(1, at), number(2, count), number(4, flags)].concat()
    }

    #[test]
    fn pages_that_were_left_have_their_places_among_those_that_were_written() {
        for pages in [pages, pages_before] {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            write(&at("pstree.img"), &[number(1, 9), number(1, 8), number(1, 7)]);
            let entries = [(0x10_0000_0000, 300, LAZY), (0x20_0000_0000, 2, PRESENT), (0x30_0000_0000, 1, LAZY)];
            let entries = entries.map(|(at, count, flags)| pages(at, count, flags));
            write(&at("pagemap-9.img"), &[vec![number(1, 5)], entries.to_vec()].concat());
            write(&at("pagemap-8.img"), &[number(1, 6), pages(0, 4, LAZY | PRESENT)]);
            for mm in ["mm-9.img", "mm-8.img"] {
                write(&at(mm), &[mapping(0, PAGE, 0, 0)]);
            }
            let found = DumpedPages::of_image(dir.path()).unwrap();
            let part = |at: u64, count: u64, address, from, is_lazy| Part {
                at: at * PAGE,
                length: count * PAGE,
                address,
                from,
                is_lazy,
            };
            let expected = [
                part(0, 300, 0x10_0000_0000, From::Process, true),
                part(300, 2, 0x20_0000_0000, From::File(0), false),
                part(302, 1, 0x30_0000_0000, From::Process, true),
            ];
            assert_eq!(
                (found[0].file().as_str(), found[0].process, &found[0].parts[..]),
                ("pages-5.img", 9, &expected[..])
            );
            assert!(found[0].bytes() == 303 * PAGE && found[0].has_left_pages() && !found[1].has_left_pages());
            assert_eq!((found[1].process, &found[1].parts[..]), (8, &[part(0, 4, 0, From::File(0), true)][..]));
            assert_eq!(found.len(), 2);

            // Pages of all kinds are in the parent.
            let mut in_parent = vec![false; 303];
            in_parent[1..299].fill(true);
            in_parent[301..].fill(true);
            found[0].list_again(dir.path(), &in_parent).unwrap();
            let (number, listed) = listed(&at("pagemap-9.img"));
            let expected = [
                (0x10_0000_0000, 1, PRESENT),
                (0x10_0000_0000 + PAGE, 298, LAZY | IN_PARENT),
                (0x10_0000_0000 + 299 * PAGE, 1, PRESENT),
                (0x20_0000_0000, 1, PRESENT),
                (0x20_0000_0000 + PAGE, 1, IN_PARENT),
                (0x30_0000_0000, 1, LAZY | IN_PARENT),
            ];
            assert_eq!((number, &listed[..]), (5, &expected[..]));
            // None is.
            found[0].list_again(dir.path(), &[false; 303]).unwrap();
            let (_, listed) = super::listed(&at("pagemap-9.img"));
            let flags: Vec<_> = listed.iter().map(|it| it.2).collect();
            assert_eq!(flags, [LAZY | PRESENT, PRESENT, LAZY | PRESENT]);
        }
    }

    #[test]
    fn a_list_is_one_that_criu_reads() {
        let ranges = [0x1000..0x4000, 0x10_0000_0000..0x10_0000_0000 + (2 * MOST + 2) * PAGE];
        let list = list_of_present(77, ranges).unwrap();
        assert_eq!(list[..8], [0x19, 0x43, 0x56, 0x54, 0x25, 0x40, 0x08, 0x56]);
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &list).unwrap();
        let (number, pages) = listed(file.path());
        assert_eq!(number, 77);
        let at = |pages: u64| 0x10_0000_0000 + pages * PAGE;
        let expected =
            [(0x1000, 3, PRESENT), (at(0), MOST, PRESENT), (at(MOST), MOST, PRESENT), (at(2 * MOST), 2, PRESENT)];
        assert_eq!(pages, expected);
    }

    #[test]
    fn other_lists_are_refused_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pagemap-9.img");
        assert!(DumpedPages::of_image(dir.path()).is_err());
        write(&dir.path().join("pstree.img"), &[number(1, 9)]);
        write(&dir.path().join("mm-9.img"), &[mapping(0, PAGE, 0, 0)]);
        for entry in [pages(0, 1, IN_PARENT), pages(0, 1, 0), pages(0, u64::MAX, LAZY), pages(0, 1, LAZY | 1 << 9)] {
            write(&path, &[number(1, 5), entry]);
            let before = fs::read(&path).unwrap();
            assert!(DumpedPages::of_image(dir.path()).is_err());
            assert_eq!(fs::read(&path).unwrap(), before);
            fs::write(&path, &before[..before.len() - 1]).unwrap();
            assert!(DumpedPages::of_image(dir.path()).is_err());
        }
    }
}
