//! What comes out is what went in.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Mutex;

use rekindle_images::Image;
use rekindle_stores::{StoreError, StoredFile};

use crate::common::*;

#[test]
fn a_directory_is_bit_equal_after_it_was_in_a_store_of_any_kind() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    write_image(&dir, &[noise(1, 4 * MIB), noise(2, 3 * MIB), vec![7; 2 * MIB]], &noise(3, 5 * MIB));
    for (name, key, encrypted) in
        [("plain", None, false), ("keyed", Some(key(1)), false), ("encrypted", Some(key(1)), true)]
    {
        let store = address(&place.path().join(name)).create(key.as_ref(), encrypted).unwrap();
        let progress = Mutex::new(None);
        let sent = store.put_directory(&dir, "job", &|it| *progress.lock().unwrap() = Some(it)).unwrap();
        let last = progress.lock().unwrap().unwrap();
        assert_eq!(last.done, last.total);
        assert_eq!(sent.sent_pieces, sent.pieces);
        assert!(sent.bytes > 14 * MIB as u64 && sent.stored < 13 * MIB as u64, "{sent:?}");

        let to = place.path().join(format!("{name} copy"));
        let received = store.get_to(&image(&store, "job"), &to, &|_| ()).unwrap();
        assert_eq!((&received.image, received.files), (&to, sent.files));
        assert_eq!(described(&to), described(&dir));
        assert!(Image::open(&to).unwrap().verify(|_| ()).is_good());
        let report = store.verify(None, &|_| ()).unwrap();
        assert_eq!((report.images, report.problems), (1, vec![]));

        let heads = store.images().unwrap();
        let head = heads[0].as_ref().unwrap();
        assert_eq!((head.name.as_str(), head.host.as_str(), head.created), ("job", "node7", 1_700_000_000));
        let files = image(&store, "job").files();
        let pages: &StoredFile = files.iter().find(|it| it.path == "pages-1.img").unwrap();
        assert_eq!((pages.size, pages.holes), (5 * MIB as u64 + 8192 + (1 << 16), 8192 + (1 << 16)));
    }
}

#[test]
fn an_encrypted_store_shows_neither_content_nor_names() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1]);
    fs::write(dir.join("plain.img"), "a text that nobody should read").unwrap();
    let store = address(&place.path().join("store")).create(Some(&key(1)), true).unwrap();
    put(&store, &dir, "a-name-to-hide");
    for path in objects(&place.path().join("store")) {
        let content = fs::read(&path).unwrap();
        for hidden in [&b"nobody should read"[..], b"a-name-to-hide", b"pages-1"] {
            assert!(!content.windows(hidden.len()).any(|it| it == hidden), "{}", path.display());
        }
        assert!(!path.to_str().unwrap().contains("a-name"));
    }
    // Another owner's equal content has other names.
    let names = |dir: &str| -> Vec<_> {
        let found = objects(&place.path().join(dir).join("pieces"));
        found.iter().map(|it| it.file_name().unwrap().to_str().unwrap()[..64].to_owned()).collect()
    };
    let other = address(&place.path().join("other")).create(Some(&key(2)), true).unwrap();
    put(&other, &dir, "a-name-to-hide");
    assert!(!names("store").is_empty() && names("store").iter().all(|it| !names("other").contains(it)));
}

#[test]
fn an_image_that_builds_on_others_takes_them_along() {
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join("images").join(name);
    small_image(&at("first"), &[1, 2]);
    build_on(&at("second"), "../first");
    build_on(&at("deep/third"), "../../second");
    let store = new_store(&place.path().join("store"));
    let sent = put(&store, &at("deep/third"), "third");
    assert_eq!(sent.parents, 2);
    assert_eq!(store.images().unwrap()[0].as_ref().unwrap().parents, 2);

    let to = place.path().join("copy");
    let received = store.get_to(&image(&store, "third"), &to, &|_| ()).unwrap();
    assert_eq!(received.image, to.join("deep/third"));
    assert_eq!(received.parents, [to.join("second"), to.join("first")]);
    assert_eq!(described(&to), described(&place.path().join("images")));
    fs::remove_dir_all(place.path().join("images")).unwrap();
    assert!(Image::open(to.join("deep/third")).unwrap().verify(|_| ()).is_good());
    // From there it goes into a store again, which has all of it already.
    assert_eq!(put(&store, &to.join("deep/third"), "again").sent_bytes, 0);
}

#[test]
fn an_image_inside_the_one_that_it_builds_on_is_stored_once() {
    let place = tempfile::tempdir().unwrap();
    let first = place.path().join("first");
    small_image(&first, &[1, 2]);
    build_on(&first.join("second"), "..");
    let store = new_store(&place.path().join("store"));
    put(&store, &first.join("second"), "second");
    let to = place.path().join("copy");
    let received = store.get_to(&image(&store, "second"), &to, &|_| ()).unwrap();
    assert_eq!((received.image, received.parents), (to.join("second"), vec![to.clone()]));
    assert_eq!(described(&to), described(&first));
}

#[test]
fn what_is_no_whole_image_is_not_stored() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    let store = new_store(&place.path().join("store"));
    let put = |name: &str| store.put_directory(&dir, name, &|_| ());
    fs::create_dir(&dir).unwrap();
    assert!(matches!(put("a"), Err(StoreError::Image(_))));
    small_image(&dir, &[1]);
    fs::remove_file(dir.join("rekindle.commit")).unwrap();
    assert!(put("a").unwrap_err().is_bad_image());
    fs::remove_dir_all(&dir).unwrap();
    small_image(&dir, &[1]);
    rustix::fs::mknodat(rustix::fs::CWD, dir.join("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let said = put("a").unwrap_err().to_string();
    assert!(said.contains("pipe is neither a file nor a folder"), "{said}");
    fs::remove_file(dir.join("pipe")).unwrap();
    let inventory = dir.join("inventory.img");
    fs::set_permissions(&inventory, fs::Permissions::from_mode(0o4755)).unwrap();
    let said = put("a").unwrap_err().to_string();
    assert!(said.contains("inventory.img is for running as another user"), "{said}");
    fs::set_permissions(&inventory, fs::Permissions::from_mode(0o600)).unwrap();
    // A socket is nothing without its process.
    let socket = UnixListener::bind(dir.join("socket")).unwrap();
    put("a").unwrap();
    drop(socket);
    fs::remove_file(dir.join("socket")).unwrap();
    assert!(matches!(put("a"), Err(StoreError::ImageExists { .. })));
    assert!(matches!(put("-a"), Err(StoreError::Usage { .. })));
}

#[test]
fn a_file_that_changes_while_it_is_read_is_noticed() {
    let place = tempfile::tempdir().unwrap();
    let (dir, path) = (place.path().join("image"), place.path().join("store"));
    small_image(&dir, &[1, 2, 3]);
    new_store(&path);
    let changed = dir.join("more/inner/file");
    let store = hooked(&path, move |it| {
        if it.what == "put" && it.name.starts_with("pieces/") {
            fs::write(&changed, "other").unwrap();
        }
        Ok(())
    });
    // It is read before the first piece is sent, and compared once more after all others were read.
    let said = store.put_directory(&dir, "job", &|_| ()).unwrap_err().to_string();
    assert!(said.contains("was changed while it was read"), "{said}");
    assert!(store.images().unwrap().is_empty());
}

#[test]
fn a_directory_with_something_in_it_is_left_alone_and_a_killed_copy_leaves_no_image() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1, 2]);
    let path = place.path().join("store");
    let store = new_store(&path);
    put(&store, &dir, "job");
    let stored = image(&store, "job");
    let to = place.path().join("to");
    fs::create_dir(&to).unwrap();
    fs::write(to.join("mine"), "").unwrap();
    assert!(matches!(store.get_to(&stored, &to, &|_| ()), Err(StoreError::Refused { .. })));
    fs::remove_file(to.join("mine")).unwrap();

    // What a killed copy has left is no hindrance.
    let left = place.path().join(".to.rekindle-copy");
    fs::create_dir_all(left.join("more")).unwrap();
    fs::write(left.join("rekindle.img"), "half").unwrap();
    store.get_to(&stored, &to, &|_| ()).unwrap();
    assert_eq!(described(&to), described(&dir));
    assert!(!left.exists());

    // What somebody else could change, or a link, is.
    fs::remove_dir_all(&to).unwrap();
    fs::create_dir(&left).unwrap();
    fs::set_permissions(&left, fs::Permissions::from_mode(0o777)).unwrap();
    let said = store.get_to(&stored, &to, &|_| ()).unwrap_err().to_string();
    assert!(said.contains("belongs to somebody else"), "{said}");
    fs::remove_dir(&left).unwrap();
    std::os::unix::fs::symlink(&dir, &left).unwrap();
    assert!(store.get_to(&stored, &to, &|_| ()).is_err());
    assert!(dir.join("inventory.img").exists() && !to.exists());
    fs::remove_file(&left).unwrap();

    // A copy that fails leaves nothing.
    let failing =
        hooked(
            &path,
            |it| if it.what == "get" && it.name.starts_with("pieces/") { Err(gone(it.name)) } else { Ok(()) },
        );
    let to = place.path().join("other");
    assert!(failing.get_to(&stored, &to, &|_| ()).is_err());
    assert!(!to.exists() && !place.path().join(".other.rekindle-copy").exists());
    assert!(!Path::new(&to).exists());
}
