//! Garbage collection, beside uploads and without.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use rekindle_stores::{Collected, Store, StoreError, Timing};

use crate::common::*;

fn open(path: &Path) -> Store {
    address(path).open(None).unwrap().unwrap()
}

/// Makes all objects of a store look as if they were written long ago.
fn age(path: &Path) {
    let past = SystemTime::now() - Duration::from_secs(3 * 24 * 60 * 60);
    for object in objects(path) {
        File::open(object).unwrap().set_modified(past).unwrap();
    }
}

#[test]
fn what_no_image_needs_is_removed_and_nothing_else() {
    let place = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|it| place.path().join(it));
    small_image(&first, &[1, 2, 3]);
    small_image(&second, &[3, 4]);
    let path = place.path().join("store");
    let store = new_store(&path);
    put(&store, &first, "first");
    put(&store, &second, "second");
    assert_eq!(store.collect(false).unwrap().removed_objects, 0);
    store.remove("first").unwrap();
    assert!(matches!(store.remove("first"), Err(StoreError::NoImage { .. })));
    let would = store.collect(true).unwrap();
    // Two pieces; of the pack with what is short, the other image needs some.
    assert_eq!((would.images, would.removed_objects), (1, 2));
    let before = objects(&path).len();
    let did = store.collect(false).unwrap();
    assert_eq!(did, Collected { ..would });
    assert_eq!(objects(&path).len(), before - 2);
    is_whole(&store, "second", &second);
    assert_eq!(store.verify(None, &|_| ()).unwrap().problems, []);
    store.remove("second").unwrap();
    assert_eq!(store.collect(false).unwrap().objects, 0);
    assert_eq!(objects(&path).len(), 1);
    put(&store, &first, "first");
    is_whole(&store, "first", &first);
}

/// The store that each of the next tests begins with: nothing needs what is in it, an upload could use it, and it is
/// old.
fn with_old_pieces(path: &Path, dir: &Path) {
    let store = new_store(path);
    put(&store, dir, "old");
    store.remove("old").unwrap();
    age(path);
}

/// How many operations something takes, begun by a store's opening.
fn operations(path: &Path, work: impl FnOnce(&Store)) -> u64 {
    let count = Count::default();
    let counted = count.clone();
    let store = hooked(path, move |_| {
        counted.next();
        Ok(())
    });
    work(&store);
    count.get()
}

/// A store that has something done once, before the operation with this number.
fn interrupted(path: &Path, at: u64, other: impl Fn() + Send + Sync + 'static) -> Store {
    let count = Count::default();
    let done = Arc::new(AtomicBool::new(false));
    hooked(path, move |_| {
        if count.next() == at && !done.swap(true, Ordering::SeqCst) {
            other();
        }
        Ok(())
    })
}

#[test]
fn a_collection_at_any_moment_of_an_upload_takes_nothing_from_it() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2, 3]);
    let probe = place.path().join("probe");
    with_old_pieces(&probe, &dir);
    let operations = operations(&probe, |store| drop(put(store, &dir, "job")));
    for at in 0..operations {
        let path = place.path().join(at.to_string());
        with_old_pieces(&path, &dir);
        let collector = path.clone();
        let store = interrupted(&path, at, move || {
            open(&collector).collect(false).unwrap();
        });
        put(&store, &dir, "job");
        is_whole(&store, "job", &dir);
        assert_eq!(open(&path).collect(false).unwrap().images, 1);
        is_whole(&store, "job", &dir);
        fs::remove_dir_all(&path).unwrap();
    }
}

#[test]
fn an_upload_at_any_moment_of_a_collection_loses_nothing() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2, 3]);
    let probe = place.path().join("probe");
    with_old_pieces(&probe, &dir);
    let operations = operations(&probe, |store| assert_eq!(store.collect(false).unwrap().removed_objects, 4));
    for at in 0..operations {
        let path = place.path().join(at.to_string());
        with_old_pieces(&path, &dir);
        let (uploader, from) = (path.clone(), dir.clone());
        let store = interrupted(&path, at, move || drop(put(&open(&uploader), &from, "job")));
        // It may find that the manifest that it has just seen is not there yet, or is.
        store.collect(false).unwrap();
        is_whole(&store, "job", &dir);
        assert_eq!(store.verify(None, &|_| ()).unwrap().problems, []);
        fs::remove_dir_all(&path).unwrap();
    }
}

#[test]
fn an_upload_and_a_removal_at_any_moment_of_a_collection_lose_nothing() {
    // An image needs the pieces until the moment in which another one begins to.
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2]);
    let begin = |path: &Path| {
        put(&new_store(path), &dir, "old");
        age(path);
    };
    let probe = place.path().join("probe");
    begin(&probe);
    let operations = operations(&probe, |store| {
        store.collect(false).unwrap();
    });
    for at in 0..operations {
        for removed_first in [true, false] {
            let path = place.path().join(format!("{at} {removed_first}"));
            begin(&path);
            let (other, from) = (path.clone(), dir.clone());
            let store = interrupted(&path, at, move || {
                let store = open(&other);
                if removed_first {
                    store.remove("old").unwrap();
                }
                put(&store, &from, "new");
                if !removed_first {
                    store.remove("old").unwrap();
                }
            });
            store.collect(false).unwrap();
            is_whole(&store, "new", &dir);
            fs::remove_dir_all(&path).unwrap();
        }
    }
}

#[test]
fn two_collections_and_uploads_at_once_leave_whole_images() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("store");
    let dirs: Vec<_> = (0..3)
        .map(|number| {
            let dir = place.path().join(format!("image {number}"));
            small_image(&dir, &[1, 10 + number]);
            dir
        })
        .collect();
    new_store(&path);
    std::thread::scope(|scope| {
        for (number, dir) in dirs.iter().enumerate() {
            let path = &path;
            scope.spawn(move || {
                let store = open(path);
                for round in 0..6 {
                    let name = format!("job-{number}-{round}");
                    put(&store, dir, &name);
                    is_whole(&store, &name, dir);
                    if round < 5 {
                        store.remove(&name).unwrap();
                    }
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..10 {
                    open(&path).collect(false).unwrap();
                }
            });
        }
    });
    let store = open(&path);
    assert_eq!(store.collect(false).unwrap().images, 3);
    for (number, dir) in dirs.iter().enumerate() {
        is_whole(&store, &format!("job-{number}-5"), dir);
    }
    assert_eq!(store.verify(None, &|_| ()).unwrap().problems, []);
}

#[test]
fn the_pieces_of_a_running_upload_are_kept_and_those_of_a_dead_one_are_not() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2, 3]);
    let path = place.path().join("store");
    new_store(&path);
    // Killed before its manifest: nothing of it is reached any more, its lease stays.
    let dead = Arc::new(AtomicBool::new(false));
    let store = hooked(&path, {
        let dead = Arc::clone(&dead);
        move |it| {
            if it.name.starts_with("images/") && it.what == "put" {
                dead.store(true, Ordering::SeqCst);
            }
            if dead.load(Ordering::SeqCst) { Err(gone(it.name)) } else { Ok(()) }
        }
    });
    store.put_directory(&dir, "job", &|_| ()).unwrap_err();
    assert_eq!(objects(&path.join("leases")).len(), 3);
    // For all that others know it is alive.
    let collected = open(&path).collect(false).unwrap();
    assert_eq!((collected.uploads, collected.removed_objects, collected.kept_objects), (1, 0, 4));
    // Its lease expires.
    age(&path.join("leases"));
    let collected = open(&path).collect(false).unwrap();
    assert_eq!((collected.uploads, collected.removed_objects), (0, 4));
    assert_eq!(objects(&path).len(), 1);
}

#[test]
fn a_manifest_that_cannot_be_read_stops_a_collection() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1]);
    let path = place.path().join("store");
    let store = new_store(&path);
    put(&store, &dir, "job");
    let manifest = objects(&path.join("images")).remove(0);
    let content = fs::read(&manifest).unwrap();
    fs::write(&manifest, &content[..content.len() - 1]).unwrap();
    let said = store.collect(false).unwrap_err().to_string();
    assert!(said.contains("nothing is removed"), "{said}");
    fs::write(&manifest, content).unwrap();
    is_whole(&store, "job", &dir);
    // Nor has the collection left anything.
    assert!(!path.join("gc").exists() || objects(&path.join("gc")).is_empty());
}

#[test]
fn an_upload_that_stood_still_until_its_lease_was_dead_looks_once_more() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2]);
    for (lifetime, is_lost) in [(Duration::ZERO, true), (Duration::from_secs(600), false)] {
        let path = place.path().join(format!("{is_lost}"));
        new_store(&path);
        let pieces = path.join("pieces");
        // A collection that takes the upload for dead removes a piece just before the manifest is written.
        let store = hooked(&path, move |it| {
            if is_lost && it.what == "put" && it.name.starts_with("images/") {
                fs::remove_file(objects(&pieces).remove(0)).unwrap();
            }
            Ok(())
        });
        let store = store.with_timing(Timing { lifetime, ..Timing::default() });
        let result = store.put_directory(&dir, "job", &|_| ());
        assert_eq!(store.has("job").unwrap(), !is_lost);
        match result {
            Ok(_) => assert!(!is_lost),
            Err(error) => assert!(is_lost && error.to_string().contains("stood still for so long"), "{error}"),
        }
        put(&open(&path), &dir, "again");
        is_whole(&store, "again", &dir);
    }
}

#[test]
fn a_collection_removes_nothing_after_others_take_it_for_dead() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2]);
    let path = place.path().join("store");
    with_old_pieces(&path, &dir);
    let store = open(&path).with_timing(Timing { lifetime: Duration::ZERO, ..Timing::default() });
    let said = store.collect(false).unwrap_err().to_string();
    assert!(said.contains("collect again"), "{said}");
    assert_eq!(objects(&path.join("pieces")).len(), 2);
    assert_eq!(open(&path).collect(false).unwrap().removed_objects, 3);
}
