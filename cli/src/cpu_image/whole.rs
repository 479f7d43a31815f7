//! Whether CRIU's files of pages have all that belongs into them. CRIU reads for ever where one ends too early, as after a disk was
//! full or a copy was cut off.
//!
//! ```text
//!   pstree.img ──► pagemap-PID.img   the first entry: the file's number; the others: how many pages there are ──► pages-NUMBER.img
//! ```

use std::fs;
use std::path::Path;

use anyhow::anyhow;

use super::entries::{self, Entry};
use super::{IN_PARENT, PAGE};
use crate::failure::Failure;
use crate::output::size;

/// `PE_PRESENT`: the page is in this image. Before CRIU 3.0 entries had no flags.
const PRESENT: u64 = 1 << 2;

/// Fails if a process's file of pages has fewer than the image says. What cannot be read here is left to CRIU.
pub(crate) fn check_pages(dir: &Path) -> Result<(), Failure> {
    // A directory may have files of an earlier dump, of other processes, too.
    let processes = entries::read(&dir.join("pstree.img")).unwrap_or_default();
    for process in processes.iter().map(|it| it.number(1)) {
        let entries = entries::read(&dir.join(format!("pagemap-{process}.img"))).unwrap_or_default();
        let Some((head, pages)) = entries.split_first() else { continue };
        let pages: u64 = pages.iter().filter(|it| is_here(it)).map(|it| it.number(2).max(it.number(5))).sum();
        let (name, needed) = (format!("pages-{}.img", head.number(1)), pages.saturating_mul(PAGE));
        let there = fs::metadata(dir.join(&name)).map_or(0, |it| it.len());
        if there < needed {
            let said = format!(
                "CRIU's part of the image in {} is not whole: {name} has {} of {}; dump or copy it again",
                dir.display(),
                size(there),
                size(needed)
            );
            return Err(Failure::bad_image(anyhow!(said)));
        }
    }
    Ok(())
}

fn is_here(pages: &Entry) -> bool {
    match pages.number(4) {
        0 => pages.number(3) == 0,
        flags => flags & PRESENT != 0 && flags & IN_PARENT == 0,
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{number, pages, write};
    use super::*;

    #[test]
    fn a_file_that_ends_too_early_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let why = || check_pages(dir.path()).err().map(|it| it.to_string());
        let elsewhere = [number(1, 0), number(2, 9), number(4, PRESENT | IN_PARENT)].concat();
        let later = [number(1, 0), number(2, 9), number(4, 2)].concat();
        write(&at("pstree.img"), &[number(1, 9), number(1, 8)]);
        write(&at("pagemap-9.img"), &[number(1, 1), pages(0x2000, 2), elsewhere, later, pages(0x9000, 2)]);
        write(&at("pagemap-8.img"), &[number(1, 2)]);
        // Of an earlier dump.
        write(&at("pagemap-7.img"), &[number(1, 1), pages(0, 100)]);
        assert!(why().is_some_and(|it| it.contains("pages-1.img has 0 B of 16.0 KiB")), "{:?}", why());
        fs::write(at("pages-1.img"), vec![0; 4 * PAGE as usize - 1]).unwrap();
        assert!(why().is_some());
        fs::write(at("pages-1.img"), vec![0; 4 * PAGE as usize]).unwrap();
        assert_eq!(why(), None);
    }
}
