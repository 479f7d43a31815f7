//! Images that build on others, made into ones that build on none.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rekindle_images::*;

use crate::chain::{Chain, assert_reads, depths, replace};
use crate::common::{self, kind, names};

#[test]
fn a_flattened_image_needs_no_other() {
    let chain = Chain::new();
    chain.add(1, b"counter1");
    chain.add(2, b"counter2");
    let out = chain.dir(100);
    fs::create_dir(&out).unwrap();
    flatten(&chain.open(2).unwrap(), ImageDir::open(&out).unwrap()).unwrap();
    assert!(flatten_in_place(&chain.dir(2)).unwrap());
    // Once is enough, and the first never had a parent.
    assert!(!flatten_in_place(&chain.dir(2)).unwrap());
    assert!(!flatten_in_place(&chain.dir(0)).unwrap());
    for n in [0, 1] {
        fs::remove_dir_all(chain.dir(n)).unwrap();
    }
    for dir in [out, chain.dir(2)] {
        let image = Image::open(&dir).unwrap();
        assert_eq!((image.depth(), image.manifest().id), (0, CheckpointId::from_bytes([2; 16])));
        assert_reads(&image, b"counter2");
        assert!(image.manifest().clients.iter().all(|it| depths(it).iter().flatten().all(|depth| *depth == 0)));
        // Each client has a file of its own.
        let files = |client: &Client| image.data_files_of(client);
        assert!(image.manifest().clients.iter().all(|it| files(it) == [DataFile::own(it.index)].into()));
        assert!(!dir.join("rekindle-flatten").exists());
    }
}

#[test]
fn a_damaged_chain_is_not_flattened_and_stays_as_it_is() {
    let chain = Chain::new();
    chain.add(1, b"counter1");
    let data = chain.dir(0).join(data_name(1));
    let mut bytes = fs::read(&data).unwrap();
    bytes[1] ^= 1;
    fs::write(&data, &bytes).unwrap();
    let before = names(&chain.dir(1));
    assert_eq!(kind(flatten_in_place(&chain.dir(1))), ErrorKind::Corrupt);
    assert_eq!(names(&chain.dir(1)), before);
    bytes[1] ^= 1;
    fs::write(&data, &bytes).unwrap();
    assert_reads(&chain.open(1).unwrap(), b"counter1");
}

/// Killed after any of the steps in which the new files take the place of the old ones.
#[test]
fn a_flattening_that_was_killed_goes_on_when_asked_again() {
    for steps in 0.. {
        let chain = Chain::new();
        chain.add(1, b"counter1");
        let dir = chain.dir(1);
        fs::create_dir(beside(&dir)).unwrap();
        flatten(&chain.open(1).unwrap(), ImageDir::open(beside(&dir)).unwrap()).unwrap();
        fs::remove_dir_all(chain.dir(0)).unwrap();
        let mut done = 0;
        let mut step = |act: &dyn Fn()| {
            if done < steps {
                act();
                done += 1;
            }
        };
        step(&|| fs::remove_file(dir.join(COMMIT)).unwrap());
        let files: Vec<_> =
            names(&beside(&dir)).into_iter().filter(|name| name != COMMIT && name != MANIFEST).collect();
        for name in files.iter().map(String::as_str).chain([MANIFEST, COMMIT]) {
            step(&|| fs::rename(beside(&dir).join(name), dir.join(name)).unwrap());
        }
        let all = done < steps;
        if done > 0 && !dir.join(COMMIT).exists() {
            assert_eq!(kind(Image::open(&dir)), ErrorKind::Uncommitted);
        }
        flatten_in_place(&dir).unwrap();
        assert!(!beside(&dir).exists());
        assert_reads(&Image::open(&dir).unwrap(), b"counter1");
        if all {
            break;
        }
    }
}

/// Where a flattening makes its image.
fn beside(dir: &Path) -> PathBuf {
    dir.join("rekindle-flatten")
}

/// A chain of two, the second of which was being flattened: its new image is committed beside it, and nothing has moved.
fn flattened_beside() -> Chain {
    let chain = Chain::new();
    chain.add(1, b"counter1");
    let dir = chain.dir(1);
    fs::create_dir(beside(&dir)).unwrap();
    flatten(&chain.open(1).unwrap(), ImageDir::open(beside(&dir)).unwrap()).unwrap();
    chain
}

#[test]
fn what_a_flattening_has_left_does_not_take_the_place_of_a_newer_image() {
    // Stopped before and after it has begun to move its files.
    for moving in [false, true] {
        for base in [false, true] {
            let chain = flattened_beside();
            let dir = chain.dir(1);
            if moving {
                fs::remove_file(dir.join(COMMIT)).unwrap();
                fs::rename(beside(&dir).join(data_name(0)), dir.join(data_name(0))).unwrap();
            }
            let writer = replace(&dir, [9; 16], base).unwrap();
            assert!(!beside(&dir).exists(), "it is still there while the new image is written");
            let manifest = common::fill_with(&writer, b"counter9").unwrap();
            writer.commit(manifest).unwrap();
            assert_eq!(flatten_in_place(&dir).unwrap(), base);
            let image = Image::open(&dir).unwrap();
            assert_eq!(image.manifest().id, CheckpointId::from_bytes([9; 16]));
            assert_reads(&image, b"counter9");
        }
    }
}

#[test]
fn what_was_made_of_another_image_is_not_moved_over_the_one_that_is_there() {
    for committed in [true, false] {
        let chain = flattened_beside();
        let dir = chain.dir(1);
        // As if whoever dumped again had not looked.
        let away = chain.dir(100);
        fs::rename(beside(&dir), &away).unwrap();
        let writer = replace(&dir, [9; 16], true).unwrap();
        let manifest = common::fill_with(&writer, b"counter9").unwrap();
        writer.commit(manifest).unwrap();
        fs::rename(&away, beside(&dir)).unwrap();
        if !committed {
            // Killed before its end.
            fs::remove_file(dir.join(COMMIT)).unwrap();
            assert_eq!(kind(flatten_in_place(&dir)), ErrorKind::Uncommitted);
            assert!(!beside(&dir).exists());
            continue;
        }
        assert!(flatten_in_place(&dir).unwrap());
        assert!(!beside(&dir).exists());
        let image = Image::open(&dir).unwrap();
        assert_eq!((image.depth(), image.manifest().id), (0, CheckpointId::from_bytes([9; 16])));
        assert_reads(&image, b"counter9");
    }
}

#[test]
fn a_flattening_that_cannot_be_whole_moves_nothing() {
    let chain = flattened_beside();
    let dir = chain.dir(1);
    fs::remove_file(beside(&dir).join(data_name(1))).unwrap();
    fs::remove_file(dir.join(data_name(1))).unwrap();
    let before = (names(&dir), names(&beside(&dir)));
    assert_eq!(kind(flatten_in_place(&dir)), ErrorKind::Missing);
    assert_eq!((names(&dir), names(&beside(&dir))), before);
}

#[test]
fn an_image_that_is_being_moved_over_is_replaced_only_on_demand() {
    let chain = flattened_beside();
    let dir = chain.dir(1);
    fs::remove_file(dir.join(COMMIT)).unwrap();
    assert_eq!(kind(common::create(&dir)), ErrorKind::Exists);
    assert!(flatten_in_place(&dir).unwrap());
    assert_reads(&Image::open(&dir).unwrap(), b"counter1");
}

#[test]
fn a_planted_link_in_place_of_a_flattening_is_not_followed() {
    let chain = flattened_beside();
    let (dir, away) = (chain.dir(1), chain.dir(100));
    fs::rename(beside(&dir), &away).unwrap();
    symlink(&away, beside(&dir)).unwrap();
    let before = names(&away);
    drop(replace(&dir, [9; 16], true).unwrap());
    assert_eq!(kind(flatten_in_place(&dir)), ErrorKind::Io);
    assert_reads(&chain.open(1).unwrap(), b"counter1");
    assert_eq!(names(&away), before);
}
