//! Objects that are not what was written.

use std::fs;

use rekindle_stores::{Store, StoreError};

use crate::common::*;

#[test]
fn every_flipped_byte_is_found_before_it_is_used() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    write_image(&dir, &[noise(1, 300 << 10)], &[3; 20_000]);
    for (name, key) in [("plain", None), ("encrypted", Some(key(1)))] {
        let path = place.path().join(name);
        let store = address(&path).create(key.as_ref(), key.is_some()).unwrap();
        put(&store, &dir, "job");
        let expected = described(&dir);
        for object in objects(&path) {
            let content = fs::read(&object).unwrap();
            // The unit tests flip all bits of what is sealed; here the ends, and some bytes between.
            let length = content.len();
            let step = (length / 30).max(1);
            let positions = (0..length.min(20)).chain((20..length).step_by(step)).chain([length - 1]);
            for at in positions {
                let mut changed = content.clone();
                changed[at] ^= 1 << (at % 8);
                fs::write(&object, changed).unwrap();
                let shown = format!("{} at {at}", object.display());
                let Ok(Some(store)) = address(&path).open(key.as_ref()) else {
                    assert!(object.ends_with("rekindle-store"), "{shown}");
                    continue;
                };
                let report = store.verify(None, &|_| ()).unwrap();
                assert!(!report.problems.is_empty(), "{shown}");
                // The image is refused, or as it was where the byte belongs to none of it.
                let to = place.path().join("copy");
                match store.image("job").and_then(|image| store.get_to(&image, &to, &|_| ())) {
                    Ok(_) => {
                        assert_eq!(described(&to), expected, "{shown}");
                        fs::remove_dir_all(&to).unwrap();
                    }
                    Err(error) => assert!(error.is_bad_image(), "{shown}: {error}"),
                }
            }
            fs::write(&object, content).unwrap();
        }
        assert_eq!(store.verify(None, &|_| ()).unwrap().problems, []);
    }
}

#[test]
fn objects_that_are_cut_off_gone_or_exchanged_are_named_with_their_images() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2]);
    let path = place.path().join("store");
    let store = new_store(&path);
    put(&store, &dir, "job");
    put(&store, &dir, "twin");
    for object in objects(&path.join("pieces")).into_iter().chain(objects(&path.join("packs"))) {
        let content = fs::read(&object).unwrap();
        let name = object.strip_prefix(&path).unwrap().to_str().unwrap();
        for change in ["shorter", "longer", "empty", "gone"] {
            match change {
                "shorter" => fs::write(&object, &content[..content.len() - 1]).unwrap(),
                "longer" => fs::write(&object, [&content[..], b"x"].concat()).unwrap(),
                "empty" => fs::write(&object, "").unwrap(),
                _ => fs::remove_file(&object).unwrap(),
            }
            for what in [None, Some("job")] {
                let problems = store.verify(what, &|_| ()).unwrap().problems;
                // What an image needs is where it was: bytes more behind it are found if all is read, and in a pack
                // the list is there, which no image needs.
                let is_end = change == "longer" || (change == "shorter" && name.starts_with("packs/"));
                if !is_end || what.is_none() {
                    assert!(problems.iter().any(|it| it.object == name), "{name} {change}: {problems:?}");
                }
                let images: Vec<_> = problems.iter().flat_map(|it| it.images.clone()).collect();
                if change == "gone" {
                    assert!(images.contains(&"job".to_owned()), "{problems:?}");
                    assert_eq!(images.contains(&"twin".to_owned()), what.is_none(), "{problems:?}");
                }
            }
            fs::write(&object, &content).unwrap();
        }
    }
    // One image's manifest under the name of another.
    let manifests = objects(&path.join("images"));
    fs::copy(&manifests[0], &manifests[1]).unwrap();
    let listed = store.images().unwrap();
    assert_eq!(listed.iter().filter(|it| it.is_err()).count(), 1);
    let bad: Vec<_> = ["job", "twin"].map(|it| store.image(it).err()).into_iter().flatten().collect();
    assert!(matches!(&bad[..], [StoreError::Damaged { what, .. }] if what.contains("head")), "{bad:?}");
    assert!(matches!(store.image("none"), Err(StoreError::NoImage { .. })));
}

#[test]
fn nobody_forges_an_image_without_the_key() {
    let place = tempfile::tempdir().unwrap();
    let [dir, forged] = ["image", "forged"].map(|it| place.path().join(it));
    small_image(&dir, &[1]);
    small_image(&forged, &[2]);
    let path = place.path().join("store");
    let owners = address(&path).create(Some(&key(1)), false).unwrap();
    put(&owners, &dir, "job");
    // Somebody who can write to the place, and has no key or another, makes a store of their own and puts its objects
    // there.
    for other in [None, Some(key(2))] {
        let theirs = place.path().join(if other.is_some() { "keyed" } else { "plain" });
        let store: Store = address(&theirs).create(other.as_ref(), false).unwrap();
        put(&store, &forged, "job");
        let opened = |path| address(path).open(Some(&key(1)));
        assert!(matches!(opened(&theirs), Err(StoreError::Key { .. })));
        let manifests = objects(&theirs.join("images"));
        let mine = objects(&path.join("images"));
        let kept = fs::read(&mine[0]).unwrap();
        fs::copy(&manifests[0], &mine[0]).unwrap();
        assert!(opened(&path).unwrap().unwrap().image("job").unwrap_err().is_bad_image());
        fs::write(&mine[0], kept).unwrap();
    }
    is_whole(&owners, "job", &dir);
}
