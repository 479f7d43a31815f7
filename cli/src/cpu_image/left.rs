//! Pages that CRIU has left in the processes: a dump with `--lazy-pages` lists them, and does not write them.
//!
//! ```text
//!   pagemap-PID.img:   A, lazy | B, present | C, lazy
//!   pages-N.img:       B                               as CRIU has written it
//!                      A | B | C                       as it is when somebody has written A and C, too
//! ```
//!
//! CRIU writes the first list where it leaves pages, and one with A and C present as well where it does not (`ppb_xfer_flags` in
//! criu/page-xfer.c). So an image whose pages somebody else writes is one that CRIU could have made.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, anyhow};
use protobuf::CodedInputStream;
use protobuf::rt::WireType;

use super::entries::{self, Entry};
use super::{IN_PARENT, PAGE};
use crate::failure::Failure;

/// `PE_LAZY` and `PE_PRESENT` (criu/include/image.h).
const LAZY: u64 = 1 << 1;
const PRESENT: u64 = 1 << 2;
/// The field of an entry that has them.
const FLAGS: u32 = 4;

/// The pages that an image is to have of one process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LeftPages {
    /// The file's name.
    pub(crate) file: String,
    /// The process's number in the image.
    pub(crate) process: u32,
    /// The file's parts, one behind the other.
    pub(crate) parts: Vec<Part>,
}

/// A part of a file of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Where it begins in the file that has all pages.
    pub(crate) at: u64,
    pub(crate) length: u64,
    pub(crate) from: From,
}

/// Where the content of a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    /// In the process, at this address.
    Process(u64),
    /// At this offset of the file that CRIU has written.
    File(u64),
}

impl LeftPages {
    /// The bytes of all pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.last().map_or(0, |it| it.at + it.length)
    }

    /// From the entries of a list of pages. None if pages are in an earlier image.
    fn of(process: u32, entries: &[Entry]) -> Option<Self> {
        let (head, entries) = entries.split_first()?;
        let (mut at, mut written) = (0_u64, 0_u64);
        let mut parts = Vec::new();
        for entry in entries {
            let flags = entry.number(FLAGS);
            let length = entry.number(2).max(entry.number(5)).checked_mul(PAGE)?;
            let from = match flags {
                _ if flags & IN_PARENT != 0 => return None,
                _ if flags & PRESENT != 0 => From::File(written),
                _ if flags & LAZY != 0 => From::Process(entry.number(1)),
                _ => return None,
            };
            parts.push(Part { at, length, from });
            at = at.checked_add(length)?;
            if matches!(from, From::File(_)) {
                written += length;
            }
        }
        Some(Self { file: format!("pages-{}.img", head.number(1)), process, parts })
    }
}

/// The pages of all processes of the image in a directory. From then on its lists say that all of these are in its files.
///
/// # Errors
/// A list of pages is none of such a dump, or cannot be written.
pub(crate) fn take_left_pages(dir: &Path) -> Result<Vec<LeftPages>, Failure> {
    let processes = entries::read(&dir.join("pstree.img")).unwrap_or_default();
    let mut all = Vec::new();
    for process in processes.iter().map(|it| it.number(1)) {
        let path = dir.join(format!("pagemap-{process}.img"));
        let mut bytes = match fs::read(&path) {
            // One that has ended and was not waited for has none.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            read => read.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let number = u32::try_from(process).ok();
        let left = number.zip(entries::read(&path)).and_then(|(number, entries)| LeftPages::of(number, &entries));
        let marked = left.filter(|_| mark_present(&mut bytes).is_some());
        all.push(marked.ok_or_else(|| anyhow!("{}: CRIU's list of pages is not what was expected", path.display()))?);
        fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if all.is_empty() {
        return Err(anyhow!("{}: CRIU has listed no process's pages", dir.display()).into());
    }
    Ok(all)
}

/// Changes the entries of a list for pages that are left: they are in the file. None if the list cannot be read.
fn mark_present(list: &mut [u8]) -> Option<()> {
    let mut at = entries::MAGIC;
    while at < list.len() {
        let length = list.get(at..)?.first_chunk().map(|it| u32::from_le_bytes(*it) as usize)?;
        let entry = at.checked_add(4)?..at.checked_add(4)?.checked_add(length)?;
        at = entry.end;
        let entry = list.get_mut(entry)?;
        let (place, flags) = flags(entry)?;
        if flags & LAZY != 0
            && let Some(place) = place
        {
            // Flags are three bits, so one byte.
            *entry.get_mut(place)? = u8::try_from(flags | PRESENT).ok().filter(|it| *it < 128)?;
        }
    }
    Some(())
}

/// Where the flags of an entry are, and what they are; no place and 0 if it has none.
fn flags(entry: &[u8]) -> Option<(Option<usize>, u64)> {
    let mut stream = CodedInputStream::from_bytes(entry);
    let mut found = (None, 0);
    while let Some(tag) = stream.read_raw_tag_or_eof().ok()? {
        let place = stream.pos() as usize;
        match WireType::new(tag & 7)? {
            WireType::Varint => {
                let value = stream.read_raw_varint64().ok()?;
                if tag >> 3 == FLAGS {
                    found = (Some(place), value);
                }
            }
            wire => stream.skip_field(wire).ok()?,
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{number, write};
    use super::*;

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
            let list = |extra: u64| {
                let entries = entries.map(|(at, count, flags)| pages(at, count, flags | (extra * (flags & LAZY) * 2)));
                [vec![number(1, 5)], entries.to_vec()].concat()
            };
            write(&at("pagemap-9.img"), &list(0));
            write(&at("pagemap-8.img"), &[number(1, 6), pages(0, 4, LAZY | PRESENT)]);
            let left = take_left_pages(dir.path()).unwrap();
            let part = |at: u64, count: u64, from| Part { at: at * PAGE, length: count * PAGE, from };
            let expected = [
                part(0, 300, From::Process(0x10_0000_0000)),
                part(300, 2, From::File(0)),
                part(302, 1, From::Process(0x30_0000_0000)),
            ];
            assert_eq!((left[0].file.as_str(), left[0].process, &left[0].parts[..]), ("pages-5.img", 9, &expected[..]));
            assert_eq!(left[0].bytes(), 303 * PAGE);
            assert_eq!((left[1].process, &left[1].parts[..]), (8, &[part(0, 4, From::File(0))][..]));
            assert_eq!(left.len(), 2);
            // The list is what CRIU writes where it leaves nothing.
            let marked = fs::read(at("pagemap-9.img")).unwrap();
            write(&at("whole"), &list(1));
            assert_eq!(marked, fs::read(at("whole")).unwrap());
        }
    }

    #[test]
    fn other_lists_are_refused_and_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pagemap-9.img");
        assert!(take_left_pages(dir.path()).is_err());
        write(&dir.path().join("pstree.img"), &[number(1, 9)]);
        for entry in [pages(0, 1, IN_PARENT), pages(0, 1, 0), pages(0, u64::MAX, LAZY), pages(0, 1, LAZY | 1 << 9)] {
            write(&path, &[number(1, 5), entry]);
            let before = fs::read(&path).unwrap();
            assert!(take_left_pages(dir.path()).is_err());
            assert_eq!(fs::read(&path).unwrap(), before);
            fs::write(&path, &before[..before.len() - 1]).unwrap();
            assert!(take_left_pages(dir.path()).is_err());
        }
    }
}
