//! Whether CRIU's files of pages have all that belongs into them. CRIU reads for ever where one ends too early, as after a disk was
//! full or a copy was cut off.
//!
//! ```text
//!   pstree.img ──► pagemap-PID.img, mm-PID.img ──┐
//!   memfd.img ─────────────────────────────────► pagemap-shmem-ID.img
//!   each: the first entry has the file's number, the others how many pages there are ──► pages-NUMBER.img
//!                                                      or that they are in the parent ──► parent/pagemap-..., parent/pages-...
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::anyhow;

use super::entries::{self, Entry};
use super::{IN_PARENT, PAGE};
use crate::failure::Failure;
use crate::output::size;

/// `PE_PRESENT`: the page is in this image. Before CRIU 3.0 entries had no flags.
const PRESENT: u64 = 1 << 2;
/// `VMA_ANON_SHARED`, of a mapping's status.
const ANON_SHARED: u64 = 1 << 8;

/// The name by which CRIU finds the parent of an image, an earlier one, in its directory.
pub(crate) const PARENT: &str = "parent";
/// As many images may be parents of each other.
const ANCESTORS: usize = 64;

/// Fails if a file of pages has fewer than the image says. What cannot be read here is left to CRIU.
pub(crate) fn check_pages(dir: &Path) -> Result<(), Failure> {
    pagemaps(dir).iter().try_for_each(|name| check_list(dir, name, ANCESTORS))
}

/// Checks the pages of one list, and those of its parents.
fn check_list(dir: &Path, name: &str, ancestors: usize) -> Result<(), Failure> {
    let entries = entries::read(&dir.join(name)).unwrap_or_default();
    let Some((head, listed)) = entries.split_first() else { return Ok(()) };
    if listed.iter().any(is_left) {
        return Err(Failure::bad_image(anyhow!(
            "CRIU's part of the image in {} is not whole: `criu dump --lazy-pages` has left pages in the processes; dump without it",
            dir.display()
        )));
    }
    let pages: u64 = listed.iter().filter(|it| is_here(it)).map(|it| it.number(2).max(it.number(5))).sum();
    let (file, needed) = (format!("pages-{}.img", head.number(1)), pages.saturating_mul(PAGE));
    let there = fs::metadata(dir.join(&file)).map_or(0, |it| it.len());
    if there < needed {
        let said = format!(
            "CRIU's part of the image in {} is not whole: {file} has {} of {}; dump or copy it again",
            dir.display(),
            size(there),
            size(needed)
        );
        return Err(Failure::bad_image(anyhow!(said)));
    }
    match ancestors.checked_sub(1) {
        Some(left) if listed.iter().any(is_in_parent) => {
            let parent = dir.join(PARENT);
            if !parent.join(name).exists() {
                return Err(Failure::bad_image(anyhow!(
                    "CRIU's part of the image in {} is not whole: it has pages in its parent, and {name} is not in {}; copy that directory, too",
                    dir.display(),
                    parent.display()
                )));
            }
            check_list(&parent, name, left)
        }
        // CRIU finds out.
        _ => Ok(()),
    }
}

fn is_in_parent(pages: &Entry) -> bool {
    pages.number(4) & IN_PARENT != 0 || pages.number(3) != 0
}

/// The image's lists of pages. A directory may have files of an earlier dump, of other processes and memory, too.
fn pagemaps(dir: &Path) -> BTreeSet<String> {
    let read = |name: &str| entries::read(&dir.join(name)).unwrap_or_default();
    let mut names = BTreeSet::new();
    for process in read("pstree.img").iter().map(|it| it.number(1)) {
        names.insert(format!("pagemap-{process}.img"));
        let mappings = read(&format!("mm-{process}.img"));
        let shared = mappings.iter().flat_map(|it| it.entries(14)).filter(|it| it.number(7) & ANON_SHARED != 0);
        names.extend(shared.map(|it| format!("pagemap-shmem-{}.img", it.number(4))));
    }
    names.extend(read("memfd.img").iter().map(|it| format!("pagemap-shmem-{}.img", it.number(5))));
    names
}

/// Whether the pages are in no image.
fn is_left(pages: &Entry) -> bool {
    let flags = pages.number(4);
    flags != 0 && flags & (PRESENT | IN_PARENT) == 0
}

fn is_here(pages: &Entry) -> bool {
    match pages.number(4) {
        0 => pages.number(3) == 0,
        flags => flags & PRESENT != 0 && flags & IN_PARENT == 0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{mapping, number, pages, write};
    use super::*;

    #[test]
    fn a_file_that_ends_too_early_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let why = || check_pages(dir.path()).err().map(|it| it.to_string());
        let elsewhere = [number(1, 0), number(2, 9), number(4, PRESENT | IN_PARENT)].concat();
        let later = [number(1, 0), number(2, 9), number(4, 2)].concat();
        write(&at("pstree.img"), &[number(1, 9), number(1, 8)]);
        write(&at("pagemap-9.img"), &[number(1, 1), pages(0x2000, 2), later]);
        assert!(why().is_some_and(|it| it.contains("--lazy-pages")), "{:?}", why());
        write(&at("pagemap-9.img"), &[number(1, 1), pages(0x2000, 2), elsewhere, pages(0x9000, 2)]);
        write(&at("pagemap-8.img"), &[number(1, 2)]);
        // Of an earlier dump.
        write(&at("pagemap-7.img"), &[number(1, 1), pages(0, 100)]);
        assert!(why().is_some_and(|it| it.contains("pages-1.img has 0 B of 16.0 KiB")), "{:?}", why());
        fs::write(at("pages-1.img"), vec![0; 4 * PAGE as usize - 1]).unwrap();
        assert!(why().is_some());
        fs::write(at("pages-1.img"), vec![0; 4 * PAGE as usize]).unwrap();
        // Its parent is missing, or is not whole.
        assert!(why().is_some_and(|it| it.contains("pagemap-9.img is not in")), "{:?}", why());
        fs::create_dir(at(PARENT)).unwrap();
        write(&at(PARENT).join("pagemap-9.img"), &[number(1, 3), pages(0, 9)]);
        assert!(why().is_some_and(|it| it.contains("pages-3.img has 0 B")), "{:?}", why());
        fs::write(at(PARENT).join("pages-3.img"), vec![0; 9 * PAGE as usize]).unwrap();
        assert_eq!(why(), None);
        // Memory that processes share.
        for (file, entry) in [("mm-8.img", mapping(0x1000, 0x2000, 3, ANON_SHARED)), ("memfd.img", number(5, 3))] {
            write(&at(file), &[entry]);
            write(&at("pagemap-shmem-3.img"), &[number(1, 5), pages(0, 1)]);
            assert!(why().is_some_and(|it| it.contains("pages-5.img")), "{file}");
            fs::remove_file(at(file)).unwrap();
            assert_eq!(why(), None, "{file}");
        }
    }
}
