//! The processes' memory in CRIU's image, and Rekindle's part of it, which lengthens the freeze.
//!
//! ```text
//!   pagemap-shmem-ID.img   memory that processes share ─ memfd.img says by which name
//!   pagemap-PID.img        pages of a process's own ─ mm-PID.img and files.img say of which file their mapping is
//! ```
//! The messages are CRIU's (images/pagemap.proto, memfd.proto, mm.proto, vma.proto, fdinfo.proto, regfile.proto).

mod dumped;
mod entries;
mod lazily;
mod whole;

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::Path;

use rekindle_wire::layout::{PINNED_NAME, SHARED_NAME, STAGING_NAME};
use serde::Serialize;

pub(crate) use self::dumped::{
    DumpedPages, From as PagesFrom, Part as PagesPart, list_name, list_of_present, pages_name,
};
#[cfg(test)]
pub(crate) use self::dumped::{Mappings, listed};
use self::entries::Entry;
pub(crate) use self::lazily::{has_lazy_parent, make_served};
#[cfg(test)]
pub(crate) use self::tests::write_mappings;
pub(crate) use self::whole::{PARENT, check_pages};
use crate::output::size;

const PAGE: u64 = 4096;
/// `PE_PARENT`: the page is in an earlier image.
const IN_PARENT: u64 = 1;
/// `VMA_FILE_PRIVATE`, of a mapping's status.
const FILE_PRIVATE: u64 = 1 << 6;
/// The interposer's libraries, as programs load them.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// Bytes of memory in CRIU's image, by owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct CpuImage {
    /// The rings: commands and replies.
    pub(crate) ring: u64,
    /// The bounce buffer.
    pub(crate) staging: u64,
    /// Variables of the interposer.
    pub(crate) interposer: u64,
    /// The program's pinned memory.
    pub(crate) pinned: u64,
    /// Other memory that processes share.
    pub(crate) shared: u64,
    /// The processes' own memory.
    pub(crate) private: u64,
}

impl CpuImage {
    /// The memory in the images of a directory; `None` where no image of CRIU can be read.
    pub(crate) fn of(dir: &Path) -> Option<Self> {
        let mut all = Self::default();
        let names = memfds(dir);
        let libraries = libraries(dir);
        let mut any = false;
        for file in fs::read_dir(dir).ok()?.flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            let Some(name) = name.strip_prefix("pagemap-").and_then(|it| it.strip_suffix(".img")) else { continue };
            let pages = Pages::of(&file.path())?;
            match name.strip_prefix("shmem-") {
                Some(id) => *all.shared_memory(names.get(&id.parse().ok()?)) += pages.bytes(),
                None => {
                    let ours = interposer(&dir.join(format!("mm-{name}.img")), &libraries);
                    let inside: u64 = ours.iter().map(|range| pages.bytes_in(range)).sum();
                    all.interposer += inside;
                    all.private += pages.bytes() - inside;
                }
            }
            any = true;
        }
        any.then_some(all)
    }

    fn shared_memory(&mut self, name: Option<&String>) -> &mut u64 {
        match name {
            Some(name) if name.as_bytes() == SHARED_NAME.to_bytes() => &mut self.ring,
            Some(name) if name.as_bytes() == STAGING_NAME.to_bytes() => &mut self.staging,
            Some(name) if name.starts_with(PINNED_NAME) => &mut self.pinned,
            _ => &mut self.shared,
        }
    }

    /// The bytes that would not be there without Rekindle.
    pub(crate) fn ours(&self) -> u64 {
        self.ring + self.staging + self.interposer
    }

    fn all(&self) -> u64 {
        self.ours() + self.pinned + self.shared + self.private
    }
}

impl fmt::Display for CpuImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\ncpu memory")?;
        writeln!(f, "  {:<10}{:>12}", "all", size(self.all()))?;
        let parts = [("ring", self.ring), ("staging", self.staging), ("interposer", self.interposer)];
        let parts = parts.map(|(name, bytes)| format!("{name} {}", size(bytes))).join(", ");
        writeln!(f, "  {:<10}{:>12}  {parts}", "rekindle", size(self.ours()))?;
        writeln!(f, "  {:<10}{:>12}", "pinned", size(self.pinned))
    }
}

/// Ranges of pages, as address or offset and length.
struct Pages(Vec<(u64, u64)>);

impl Pages {
    fn of(path: &Path) -> Option<Self> {
        let entries = entries::read(path)?;
        // The first entry says in which file the pages are. Before CRIU 4.2 the number of pages had 32 bits, in another field.
        let pages = entries.iter().skip(1).filter(|it| it.number(4) & IN_PARENT == 0 && it.number(3) == 0);
        let count = |it: &Entry| it.number(2).max(it.number(5)).saturating_mul(PAGE);
        Some(Self(pages.map(|it| (it.number(1), count(it))).collect()))
    }

    fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, bytes)| bytes).sum()
    }

    fn bytes_in(&self, range: &std::ops::Range<u64>) -> u64 {
        let inside =
            |&(at, bytes): &(u64, u64)| at.saturating_add(bytes).min(range.end).saturating_sub(at.max(range.start));
        self.0.iter().map(inside).sum()
    }
}

/// The names of memfds, by the number of their memory.
fn memfds(dir: &Path) -> HashMap<u64, String> {
    let entries = entries::read(&dir.join("memfd.img")).unwrap_or_default();
    entries.iter().map(|it| (it.number(5), it.text(1))).collect()
}

/// The numbers of files that are the interposer's.
fn libraries(dir: &Path) -> Vec<u64> {
    let files = entries::read(&dir.join("files.img")).unwrap_or_default();
    let regular = files.iter().flat_map(|it| it.entries(3));
    let ours = |path: &str| LIBRARIES.contains(&path.rsplit('/').next().unwrap_or(path));
    regular.filter(|it| ours(&it.text(6))).map(|it| it.number(1)).collect()
}

/// How far the processes had written a file at the dump that they had open for appending only. CRIU does not record how long such a
/// file was.
pub(crate) fn written(dir: &Path, path: &Path) -> Option<u64> {
    let files = entries::read(&dir.join("files.img"))?;
    let regular = files.iter().flat_map(|it| it.entries(3));
    regular.filter(|it| Path::new(&it.text(6)) == path).map(|it| it.number(3)).max()
}

/// The ranges where these libraries are mapped in a process, with the anonymous memory right behind them, which has the rest of
/// their variables.
fn interposer(mm: &Path, libraries: &[u64]) -> Vec<std::ops::Range<u64>> {
    let mut found: Vec<std::ops::Range<u64>> = Vec::new();
    for mapping in entries::read(mm).unwrap_or_default().iter().flat_map(|it| it.entries(14)) {
        let (start, end, of_file) = (mapping.number(1), mapping.number(2), mapping.number(7) & FILE_PRIVATE != 0);
        let follows = !of_file && found.last().is_some_and(|it| it.end == start);
        if follows || (of_file && libraries.contains(&mapping.number(4))) {
            found.push(start..end);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varint(mut value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while value > 127 {
            bytes.push(value as u8 | 128);
            value >>= 7;
        }
        bytes.push(value as u8);
        bytes
    }

    pub(super) fn number(field: u64, value: u64) -> Vec<u8> {
        [varint(field << 3), varint(value)].concat()
    }

    fn bytes(field: u64, value: &[u8]) -> Vec<u8> {
        [varint(field << 3 | 2), varint(value.len() as u64), value.to_vec()].concat()
    }

    pub(super) fn write(path: &Path, entries: &[Vec<u8>]) {
        let mut file = vec![0; 8];
        for entry in entries {
            file.extend((entry.len() as u32).to_le_bytes());
            file.extend(entry);
        }
        fs::write(path, file).unwrap();
    }

    pub(super) fn pages(at: u64, count: u64) -> Vec<u8> {
        [number(1, at), number(2, count), number(4, 4)].concat()
    }

    pub(super) fn mapping(start: u64, end: u64, file: u64, status: u64) -> Vec<u8> {
        bytes(14, &[number(1, start), number(2, end), number(4, file), number(7, status)].concat())
    }

    /// An mm-PID.img without mappings that matter.
    pub(crate) fn write_mappings(path: &Path) {
        write(path, &[mapping(0, 4096, 0, 0)]);
    }

    pub(super) fn with_flags(start: u64, end: u64, prot: u64, flags: i32) -> Vec<u8> {
        let flags = u64::from(flags.unsigned_abs());
        bytes(14, &[number(1, start), number(2, end), number(5, prot), number(6, flags), number(7, 0)].concat())
    }

    #[test]
    fn memory_is_whose_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert_eq!(CpuImage::of(dir.path()), None);
        let memfd = |name: &[u8], id| [bytes(1, name), number(5, id)].concat();
        write(&at("memfd.img"), &[memfd(b"rekindle-ring", 1), memfd(b"rekindle-pinned-7", 2), memfd(b"else", 3)]);
        let file = |id, path: &[u8]| bytes(3, &[number(1, id), bytes(6, path)].concat());
        write(&at("files.img"), &[file(5, b"/usr/lib/libc.so.6"), file(6, b"/usr/lib/rekindle/libcuda.so.1")]);
        let mappings = [
            mapping(0x1000, 0x3000, 6, FILE_PRIVATE),
            mapping(0x3000, 0x4000, 0, 0),
            mapping(0x4000, 0x6000, 5, FILE_PRIVATE),
            mapping(0x6000, 0x9000, 0, 0),
        ];
        write(&at("mm-9.img"), &[mappings.concat()]);
        write(&at("pagemap-9.img"), &[number(1, 1), pages(0x2000, 2), pages(0x5000, 3)]);
        write(&at("pagemap-shmem-1.img"), &[number(1, 2), pages(0, 5)]);
        // An entry of CRIU 4.2, and one whose pages an earlier image has.
        let wide = [number(1, 0), number(2, 0), number(4, 4), number(5, 70)].concat();
        let earlier = [number(1, 0), number(2, 9), number(4, IN_PARENT)].concat();
        write(&at("pagemap-shmem-2.img"), &[number(1, 3), wide, earlier]);
        write(&at("pagemap-shmem-3.img"), &[number(1, 4), pages(0, 1)]);
        let found = CpuImage::of(dir.path()).unwrap();
        let page = |count| count * PAGE;
        let expected = CpuImage {
            ring: page(5),
            pinned: page(70),
            shared: page(1),
            interposer: page(2),
            private: page(3),
            staging: 0,
        };
        assert_eq!((found, found.ours()), (expected, page(7)));
        fs::write(at("pagemap-shmem-3.img"), [0; 9]).unwrap();
        assert_eq!(CpuImage::of(dir.path()), None);
    }
}
