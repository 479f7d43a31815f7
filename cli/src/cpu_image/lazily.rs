//! The images that CRIU's server of pages serves from (`criu lazy-pages`), where pages are in a parent image: the server copies no page to a
//! process that it has read from a parent (criu/pagemap.c calls `io_complete` of the image that has the page, and criu/uffd.c sets that of
//! the first image alone; seen with CRIU 4.1 and 4.2), so that a thread would wait for it for ever.
//!
//! ```text
//!   last/pagemap-PID.img, for criu restore:   A, lazy, in the parent | B, present | C, lazy, in the parent
//!   memory/pagemap-PID.img:                   A, present | C, present | D, present
//!   served/pagemap-PID.img, for the server:   A, lazy, present | C, lazy, present | D, present
//! ```
//!
//! The server passes over what is not lazy. Its file of pages is the parent's.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, anyhow};

use super::dumped::{FLAGS, LAZY, PRESENT, list, list_name, pages_name};
use super::entries::{self, Entry};
use super::{IN_PARENT, PAGE};
use crate::failure::Failure;

/// Added to a process's number for that of its file of pages: CRIU counts its own files from 1.
const OF_PARENT: u32 = 1 << 30;

/// Whether processes of an image have pages in its parent that are to be restored when they are touched.
pub(crate) fn has_lazy_parent(image: &Path) -> bool {
    let processes = entries::read(&image.join("pstree.img")).unwrap_or_default();
    let lists = processes.iter().filter_map(|it| u32::try_from(it.number(1)).ok());
    let mut lists = lists.filter_map(|process| entries::read(&image.join(list_name(process))));
    lists.any(|list| list.iter().skip(1).any(|it| it.number(FLAGS) & (LAZY | IN_PARENT) == LAZY | IN_PARENT))
}

/// Makes a directory for the server beside an image with its parent, on the same file system.
///
/// # Errors
/// It cannot be made, or lists cannot be read.
pub(crate) fn make_served(image: &Path, parent: &Path, served: &Path) -> Result<(), Failure> {
    let cannot = || format!("cannot make {}", served.display());
    fs::create_dir(served).with_context(cannot)?;
    let mut ours = HashSet::new();
    for process in entries::read(&image.join("pstree.img")).unwrap_or_default() {
        let Ok(process) = u32::try_from(process.number(1)) else { continue };
        let name = list_name(process);
        let dumped = entries::read(&image.join(&name)).unwrap_or_default();
        let dumped = dumped.get(1..).unwrap_or_default();
        if !dumped.iter().any(|it| it.number(FLAGS) & IN_PARENT != 0) {
            continue;
        }
        let listed = entries::read(&parent.join(&name));
        let entries = listed.as_deref().and_then(|it| served_pages(dumped, it.get(1..)?));
        let number = process | OF_PARENT;
        let list =
            entries.map(|it| list(number, it)).ok_or_else(|| anyhow!("{name} of the parent image is not whole"))?;
        list.and_then(|list| fs::write(served.join(&name), list)).with_context(cannot)?;
        fs::hard_link(parent.join(pages_name(process)), served.join(pages_name(number))).with_context(cannot)?;
        ours.insert(name);
    }
    link_all(image, served, |name| !ours.contains(name)).with_context(cannot)?;
    Ok(())
}

/// Links the files of a directory that are wanted into another.
fn link_all(from: &Path, to: &Path, is_wanted: impl Fn(&str) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() && is_wanted(&entry.file_name().to_string_lossy()) {
            fs::hard_link(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// All pages of a parent, those lazy that the image has there and that are so. None where the parent lacks some of these.
fn served_pages(dumped: &[Entry], parent: &[Entry]) -> Option<Vec<(u64, u64, u64)>> {
    let range = |it: &Entry| {
        let pages = it.number(2).max(it.number(5));
        Some((it.number(1), it.number(1).checked_add(pages.checked_mul(PAGE)?)?))
    };
    let is_served = |it: &&Entry| it.number(FLAGS) & (LAZY | IN_PARENT) == LAZY | IN_PARENT;
    let lazy: Vec<_> = dumped.iter().filter(is_served).map(range).collect::<Option<_>>()?;
    let (mut lazy, mut found) = (lazy.into_iter().peekable(), Vec::new());
    for (mut at, end) in parent.iter().map(range).collect::<Option<Vec<_>>>()? {
        while at < end {
            let (flags, until) = match lazy.peek_mut() {
                // The parent does not have it.
                Some((from, _)) if *from < at => return None,
                Some((from, to)) if *from == at => {
                    let until = end.min(*to);
                    // What is left of it may be in the next entry of the parent.
                    *from = until;
                    if until == *to {
                        lazy.next();
                    }
                    (LAZY | PRESENT, until)
                }
                Some((from, _)) => (PRESENT, end.min(*from)),
                None => (PRESENT, end),
            };
            found.push((at, (until - at) / PAGE, flags));
            at = until;
        }
    }
    lazy.next().is_none().then_some(found)
}

#[cfg(test)]
mod tests {
    use super::super::dumped::{list_of_present, listed};
    use super::super::tests::{number, pages, write};
    use super::*;

    fn lists(dumped: &[(u64, u64, u64)], parent: &[(u64, u64)]) -> Result<Vec<(u64, u64, u64)>, String> {
        let dir = tempfile::tempdir().unwrap();
        let [image, memory, served] = ["last", "memory", "served"].map(|name| dir.path().join(name));
        fs::create_dir(&image).unwrap();
        fs::create_dir(&memory).unwrap();
        write(&image.join("pstree.img"), &[number(1, 9), number(1, 8)]);
        let dumped = dumped.iter().map(|(at, count, flags)| (at * PAGE, *count, *flags));
        fs::write(image.join("pagemap-9.img"), list(1, dumped).unwrap()).unwrap();
        fs::write(image.join("pages-1.img"), b"its own").unwrap();
        write(&image.join("pagemap-8.img"), &[number(1, 2), pages(0, 3)]);
        let parent = parent.iter().map(|(start, end)| start * PAGE..end * PAGE);
        fs::write(memory.join("pagemap-9.img"), list_of_present(9, parent).unwrap()).unwrap();
        fs::write(memory.join("pages-9.img"), b"the parent's").unwrap();
        assert!(has_lazy_parent(&image) && !has_lazy_parent(&memory));
        make_served(&image, &memory, &served).map_err(|failure| failure.to_string())?;
        let (number, found) = listed(&served.join("pagemap-9.img"));
        assert_eq!(fs::read(served.join(pages_name(number))).unwrap(), b"the parent's");
        // All else is as it was.
        assert_eq!(fs::read(served.join("pages-1.img")).unwrap(), b"its own");
        assert_eq!(listed(&served.join("pagemap-8.img")), listed(&image.join("pagemap-8.img")));
        assert!(served.join("pstree.img").exists());
        Ok(found.into_iter().map(|(at, count, flags)| (at / PAGE, count, flags)).collect())
    }

    #[test]
    fn the_server_has_lazy_pages_in_its_first_image_and_passes_over_others() {
        let there = LAZY | IN_PARENT;
        let dumped = [(8, 4, there), (12, 1, PRESENT), (13, 2, IN_PARENT), (20, 5, there), (30, 1, PRESENT)];
        let found = lists(&dumped, &[(8, 16), (19, 22), (22, 40)]).unwrap();
        let expected = [
            (8, 4, LAZY | PRESENT),
            (12, 4, PRESENT),
            (19, 1, PRESENT),
            (20, 2, LAZY | PRESENT),
            (22, 3, LAZY | PRESENT),
            (25, 15, PRESENT),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_parent_that_lacks_pages_is_an_error() {
        for parent in [vec![(9, 20)], vec![(8, 11)], vec![(8, 9), (10, 20)], vec![]] {
            assert!(lists(&[(8, 4, LAZY | IN_PARENT)], &parent).is_err(), "{parent:?}");
        }
        assert!(lists(&[(8, 4, LAZY | IN_PARENT)], &[(8, 12)]).is_ok());
    }
}
