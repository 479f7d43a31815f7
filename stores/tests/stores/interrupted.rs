//! Uploads that end before their end.

use crate::common::*;

#[test]
fn an_upload_that_was_cut_off_anywhere_goes_on_where_it_was() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2, 3, 4]);
    let whole = {
        let path = place.path().join("whole");
        new_store(&path);
        let operations = Count::default();
        let counted = operations.clone();
        let store = hooked(&path, move |_| {
            counted.next();
            Ok(())
        });
        operations.add(0_u64.wrapping_sub(operations.get()));
        let sent = put(&store, &dir, "job");
        (operations.get(), sent)
    };
    let (operations, all) = whole;
    assert!(operations > 15, "{operations}");
    for last in 0..operations {
        let path = place.path().join(format!("cut at {last}"));
        let store = new_store(&path);
        let operations = Count::default();
        let sent = Count::default();
        let failed = {
            let (operations, sent) = (operations.clone(), sent.clone());
            let store = hooked(&path, move |it| {
                // The first opens the store. From then on nothing is reached any more, as if the client were gone.
                if operations.next() > last {
                    return Err(gone(it.name));
                }
                if it.what == "put" && (it.name.starts_with("pieces/") || it.name.starts_with("packs/")) {
                    sent.add(it.bytes as u64);
                }
                Ok(())
            });
            store.put_directory(&dir, "job", &|_| ()).is_err()
        };
        if !store.has("job").unwrap() {
            assert!(failed, "{last}");
            assert!(store.images().unwrap().is_empty());
            let again = put(&store, &dir, "job");
            // Pieces come into packs in another order, and what packs say of them has another size. No piece is so short.
            let difference = (again.sent_bytes + sent.get()).abs_diff(all.sent_bytes);
            assert!(difference < 100, "cut at {last}: {difference} bytes too many or too few, {again:?} of {all:?}");
        }
        is_whole(&store, "job", &dir);
        assert_eq!(store.verify(None, &|_| ()).unwrap().problems, []);
    }
}

#[test]
fn of_two_uploads_under_one_name_one_succeeds() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("store");
    let dirs = [1, 2].map(|number| {
        let dir = place.path().join(format!("image {number}"));
        small_image(&dir, &[number]);
        dir
    });
    let store = new_store(&path);
    let other = {
        let path = path.clone();
        let dir = dirs[1].clone();
        move || put(&rekindle_stores_open(&path), &dir, "job")
    };
    let first = hooked(&path, move |it| {
        // The other is done just before this one's manifest.
        if it.what == "put" && it.name.starts_with("images/") {
            other();
        }
        Ok(())
    });
    let error = first.put_directory(&dirs[0], "job", &|_| ()).unwrap_err();
    assert!(matches!(error, rekindle_stores::StoreError::ImageExists { .. }), "{error}");
    is_whole(&store, "job", &dirs[1]);
}

fn rekindle_stores_open(path: &std::path::Path) -> rekindle_stores::Store {
    address(path).open(None).unwrap().unwrap()
}
