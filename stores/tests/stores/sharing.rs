//! Only what is new is sent.

use std::fs;

use crate::common::*;

#[test]
fn a_second_image_sends_only_what_changed() {
    let place = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|it| place.path().join(it));
    let gpu: Vec<_> = (0..8).map(|number| noise(number, MIB)).collect();
    let pages = noise(99, 8 * MIB);
    write_image(&first, &gpu, &pages);
    // The pieces in another order, one of them new; and in the pages some bytes more.
    let mut changed = gpu;
    changed.reverse();
    changed[3] = noise(1000, MIB);
    let mut more = pages;
    more.splice(MIB..MIB, noise(1001, 4096));
    write_image(&second, &changed, &more);

    let path = place.path().join("store");
    let store = new_store(&path);
    let bytes = Count::default();
    let sent = {
        let counted = bytes.clone();
        let counting = hooked(&path, move |it| {
            if it.what == "put" {
                counted.add(it.bytes as u64);
            }
            Ok(())
        });
        let sent = put(&counting, &first, "first");
        assert!(bytes.get() >= sent.sent_bytes);
        let before = bytes.get();
        assert!(before > 16 * MIB as u64);
        let sent = put(&counting, &second, "second");
        // All that was sent, manifests and leases among it: one piece of a MiB, and one or two of the pages.
        let all = bytes.get() - before;
        assert!(all >= sent.sent_bytes && all < sent.sent_bytes + 64 * 1024, "{all}: {sent:?}");
        sent
    };
    assert!(sent.sent_bytes > MIB as u64 && sent.sent_bytes < 9 * MIB as u64, "{sent:?}");
    let gpu_sent = sent.sent_pieces;
    assert!(gpu_sent < sent.pieces / 2 + 3, "{sent:?}");
    is_whole(&store, "first", &first);
    is_whole(&store, "second", &second);

    // The same once more sends nothing but a manifest.
    let again = put(&store, &second, "third");
    assert_eq!((again.sent_pieces, again.sent_bytes), (0, 0));
}

#[test]
fn short_pieces_are_few_objects() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("image");
    small_image(&dir, &[1]);
    for number in 0..300 {
        fs::write(dir.join(format!("core-{number}.img")), noise(number, 2000)).unwrap();
    }
    let path = place.path().join("store");
    let store = new_store(&path);
    put(&store, &dir, "job");
    assert_eq!(objects(&path.join("packs")).len(), 1);
    assert_eq!(objects(&path.join("pieces")).len(), 1);
    let gets = Count::default();
    let counted = gets.clone();
    let counting = hooked(&path, move |it| {
        if it.what == "get" && it.name.starts_with("packs/") {
            counted.next();
        }
        Ok(())
    });
    is_whole(&counting, "job", &dir);
    assert_eq!(gets.get(), 1);
}

#[test]
fn stores_copy_from_each_other_under_the_same_key_and_under_others() {
    let place = tempfile::tempdir().unwrap();
    let [first, second] = ["first", "second"].map(|it| place.path().join(it));
    small_image(&first, &[1, 2, 3]);
    small_image(&second, &[1, 2, 4]);
    let from_path = place.path().join("from");
    let from = new_store(&from_path);
    put(&from, &first, "first");
    put(&from, &second, "second");
    let read = Count::default();
    let counted = read.clone();
    let counting = hooked(&from_path, move |it| {
        if it.what == "get" && it.name.starts_with("pieces/") {
            counted.next();
        }
        Ok(())
    });

    let to = new_store(&place.path().join("to"));
    to.put_stored(&counting, &image(&from, "first"), "first", &|_| ()).unwrap();
    assert_eq!(read.get(), 3);
    // What is there already is not even read.
    let sent = to.put_stored(&counting, &image(&from, "second"), "renamed", &|_| ()).unwrap();
    assert_eq!(read.get(), 4);
    assert!(sent.sent_bytes > 300 << 10 && sent.sent_bytes < 400 << 10, "{sent:?}");
    is_whole(&to, "renamed", &second);

    let encrypted = address(&place.path().join("encrypted")).create(Some(&key(3)), true).unwrap();
    encrypted.put_stored(&to, &image(&to, "renamed"), "second", &|_| ()).unwrap();
    is_whole(&encrypted, "second", &second);
    let head = encrypted.images().unwrap().remove(0).unwrap();
    let original = from.images().unwrap().remove(1).unwrap();
    assert_eq!((head.created, head.checkpoint, head.bytes), (original.created, original.checkpoint, original.bytes));
}
