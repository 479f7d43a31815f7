//! Archives of containers.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use proptest::prelude::*;
use rekindle_images::Image;
use rekindle_stores::{ARCHIVE, Archive, Container, Store, StoreError};

use crate::common::*;

const ID: &str = "00f1f2f3";

fn container() -> Container {
    Container { name: "train".to_owned(), id: ID.to_owned() }
}

/// What podman puts into an archive, with an image of this GPU memory and these pages.
fn contents(dir: &Path, gpu: &[Vec<u8>], pages: &[u8]) {
    write_image(&dir.join("checkpoint"), gpu, pages);
    fs::write(dir.join("config.dump"), format!(r#"{{"spec": {{}}, "id": "{ID}", "name": "train"}}"#)).unwrap();
    fs::write(dir.join("spec.dump"), "{}").unwrap();
    fs::write(dir.join("ctr.log"), "said").unwrap();
}

/// Packs a directory with these options of GNU tar.
fn pack(dir: &Path, archive: &Path, options: &[&str]) {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--create", "--file"]).arg(archive).args(options).arg("--directory").arg(dir);
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|it| it.unwrap().file_name()).collect();
    names.sort();
    assert!(tar.args(names).status().unwrap().success());
}

/// An archive of a container with a small image.
fn small(place: &Path, name: &str, gpu: &[Vec<u8>], pages: &[u8]) -> PathBuf {
    let (dir, archive) = (place.join(name), place.join(format!("{name}.tar")));
    contents(&dir, gpu, pages);
    pack(&dir, &archive, &["--format=posix", "--exclude=inner"]);
    archive
}

fn put_archive(store: &Store, archive: &Path, name: &str) -> rekindle_stores::Sent {
    store.put_archive(&Archive::open(archive).unwrap(), name, &|_| ()).unwrap()
}

/// Gets an archive out again, and makes sure that it has these bytes.
fn comes_back(store: &Store, name: &str, bytes: &[u8]) {
    let place = tempfile::tempdir().unwrap();
    let to = place.path().join("copy");
    let received = store.get_to(&image(store, name), &to, &|_| ()).unwrap();
    assert_eq!((&received.image, &received.container), (&to.join(ARCHIVE), &Some(container())));
    assert_eq!(fs::read_dir(&to).unwrap().count(), 1);
    assert!(fs::read(received.image).unwrap() == bytes, "{name} is another archive");
    assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
}

#[test]
fn an_archive_comes_back_from_a_store_of_any_kind() {
    let place = tempfile::tempdir().unwrap();
    let gpu = [noise(1, 4 * MIB), noise(2, 3 * MIB), vec![7; 2 * MIB]];
    let archive = small(place.path(), "archive", &gpu, &noise(3, 5 * MIB));
    let bytes = fs::read(&archive).unwrap();
    let compressed = archive.with_extension("tar.zst");
    fs::write(&compressed, zstd::encode_all(&bytes[..], 1).unwrap()).unwrap();
    for (name, key, encrypted) in
        [("plain", None, false), ("keyed", Some(key(1)), false), ("encrypted", Some(key(1)), true)]
    {
        let store = address(&place.path().join(name)).create(key.as_ref(), encrypted).unwrap();
        let sent = put_archive(&store, &archive, "job");
        assert_eq!((sent.files, sent.bytes, &sent.container), (1, bytes.len() as u64, &Some(container())));
        assert_eq!(sent.sent_pieces, sent.pieces);
        comes_back(&store, "job", &bytes);
        let head = store.images().unwrap().remove(0).unwrap();
        let of_image = Image::open(place.path().join("archive/checkpoint")).unwrap();
        assert_eq!(head.checkpoint, of_image.manifest().id.to_string());
        assert_eq!((head.host.as_str(), head.created, head.container), ("node7", 1_700_000_000, Some(container())));

        // podman compresses archives unless it is told not to: the pieces are the same.
        let again = put_archive(&store, &compressed, "compressed");
        assert_eq!((again.sent_pieces, again.bytes), (0, sent.bytes));
        comes_back(&store, "compressed", &bytes);
        let report = store.verify(None, &|_| ()).unwrap();
        assert_eq!((report.images, report.problems), (2, vec![]));

        // Also by way of another store.
        let other = new_store(&place.path().join(format!("{name} other")));
        other.put_stored(&store, &image(&store, "job"), "moved", &|_| ()).unwrap();
        assert_eq!(image(&other, "moved").head.container, Some(container()));
        comes_back(&other, "moved", &bytes);
    }
}

#[test]
fn the_next_archive_costs_what_has_changed_and_shares_with_images_in_directories() {
    let place = tempfile::tempdir().unwrap();
    let gpu: Vec<_> = (0..8).map(|number| noise(number, MIB)).collect();
    let pages = noise(99, 8 * MIB);
    let first = small(place.path(), "first", &gpu, &pages);
    // The pieces in another order, one of them new; in the pages some bytes more, and another log before all.
    let mut changed = gpu;
    changed.reverse();
    changed[3] = noise(1000, MIB);
    let mut more = pages;
    more.splice(MIB..MIB, noise(1001, 4096));
    let second = place.path().join("second.tar");
    let dir = place.path().join("second");
    contents(&dir, &changed, &more);
    fs::write(dir.join("a.log"), noise(5, 300)).unwrap();
    pack(&dir, &second, &["--exclude=inner"]);

    let store = new_store(&place.path().join("store"));
    let sent = put_archive(&store, &first, "first");
    assert!(sent.sent_bytes > 16 * MIB as u64, "{sent:?}");
    // One piece of a MiB, and one or two of the pages.
    let sent = put_archive(&store, &second, "second");
    assert!(sent.sent_bytes > MIB as u64 && sent.sent_bytes < 9 * MIB as u64, "{sent:?}");
    comes_back(&store, "first", &fs::read(&first).unwrap());
    comes_back(&store, "second", &fs::read(&second).unwrap());

    // Nothing of the GPU memory, and no more of the pages than where they begin and end.
    let sent = put(&store, &dir.join("checkpoint"), "directory");
    assert!(sent.sent_bytes < 8 * MIB as u64 && sent.bytes > 16 * MIB as u64, "{sent:?}");
    let only_gpu = place.path().join("gpu");
    write_image(&only_gpu, &changed, &[1; 100]);
    let sent = put(&store, &only_gpu, "gpu");
    assert!(sent.sent_bytes < 64 << 10 && sent.bytes > 8 * MIB as u64, "{sent:?}");

    // What only the removed ones needed goes, and nothing else.
    for name in ["first", "directory", "gpu"] {
        store.remove(name).unwrap();
    }
    assert!(store.collect(false).unwrap().removed_objects > 0);
    comes_back(&store, "second", &fs::read(&second).unwrap());
    assert_eq!(store.verify(None, &|_| ()).unwrap().problems, []);
}

#[test]
fn whatever_gnu_tar_packs_comes_back() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("odd");
    contents(&dir, &[noise(1, 200 << 10)], &noise(2, 200 << 10));
    let deep = dir.join("checkpoint").join("d".repeat(90)).join("e".repeat(90)).join("f".repeat(90));
    fs::create_dir_all(&deep).unwrap();
    let long = deep.join("g".repeat(200));
    fs::write(&long, noise(3, 1000)).unwrap();
    fs::hard_link(&long, dir.join("checkpoint/second-name")).unwrap();
    symlink("d".repeat(90), dir.join("checkpoint/short")).unwrap();
    symlink(long.strip_prefix(dir.join("checkpoint")).unwrap(), dir.join("checkpoint/zlong")).unwrap();
    fs::write(dir.join("checkpoint/ümlaut €"), "").unwrap();
    let sparse = File::create(dir.join("checkpoint/sparse")).unwrap();
    sparse.set_len(64 * MIB as u64).unwrap();
    // More stretches than the header of a sparse file has room for.
    (1..40).for_each(|at| sparse.write_all_at(&noise(at, 5000), at * MIB as u64).unwrap());
    // A file system without them makes the test no weaker than the archives of random members below.
    let _ = rustix::fs::setxattr(&long, "user.note", b"said", rustix::fs::XattrFlags::empty());
    let store = new_store(&place.path().join("store"));
    for (number, options) in [
        &["--format=posix"][..],
        &["--format=posix", "--xattrs", "--sparse"],
        &["--format=posix", "--sparse", "--sparse-version=0.1"],
        &["--format=posix", "--sparse", "--sparse-version=0.0"],
        &["--format=gnu"],
        &["--format=gnu", "--sparse"],
        &["--format=oldgnu", "--sparse", "--blocking-factor=1"],
    ]
    .into_iter()
    .enumerate()
    {
        let archive = place.path().join(format!("{number}.tar"));
        pack(&dir, &archive, options);
        let name = format!("odd-{number}");
        put_archive(&store, &archive, &name);
        comes_back(&store, &name, &fs::read(&archive).unwrap());
    }
}

#[test]
fn what_is_no_archive_of_a_container_is_not_stored() {
    let place = tempfile::tempdir().unwrap();
    let store = new_store(&place.path().join("store"));
    let refused = |why: &str, archive: &Path| match Archive::open(archive) {
        Err(error @ StoreError::Archive { .. }) => {
            assert!(error.is_bad_image() && error.to_string().contains(why), "{why}: {error}");
        }
        other => panic!("{why}: {other:?}"),
    };
    let dir = place.path().join("source");
    let archive = place.path().join("archive.tar");
    let changed = |why: &str, change: &dyn Fn(&Path)| {
        contents(&dir, &[noise(1, 5000)], &noise(2, 5000));
        change(&dir);
        pack(&dir, &archive, &["--absolute-names"]);
        refused(why, &archive);
        fs::remove_dir_all(&dir).unwrap();
    };
    let remove = |name: &'static str| move |dir: &Path| fs::remove_file(dir.join(name)).unwrap();
    changed("lacks what podman needs", &remove("config.dump"));
    changed("lacks what podman needs", &remove("spec.dump"));
    changed("no image of Rekindle", &remove("checkpoint/rekindle.img"));
    changed("the image in it cannot be read", &|dir| {
        let file = File::options().write(true).open(dir.join("checkpoint/rekindle.img")).unwrap();
        file.write_all_at(b"x", 30).unwrap();
    });
    changed("what it says of the container", &|dir| fs::write(dir.join("config.dump"), r#"{"id": "7"}"#).unwrap());
    changed("what it says of the container", &|dir| {
        fs::write(dir.join("config.dump"), r#"{"id": "7", "name": "a\u001bb"}"#).unwrap();
    });
    changed("leads out of it", &|dir| symlink("/etc/passwd", dir.join("checkpoint/away")).unwrap());
    changed("leads out of it", &|dir| symlink("../../passwd", dir.join("checkpoint/away")).unwrap());
    changed("is a device or a pipe", &|dir| {
        let made = Command::new("mkfifo").arg(dir.join("checkpoint/pipe")).status().unwrap();
        assert!(made.success());
    });

    let whole = small(place.path(), "whole", &[noise(1, 5000)], &noise(2, 5000));
    let bytes = fs::read(&whole).unwrap();
    for length in [0, 100, 512, 600, 5120, bytes.len() / 2 / 512 * 512] {
        fs::write(&archive, &bytes[..length]).unwrap();
        refused("", &archive);
    }
    fs::write(&archive, zstd::encode_all(&bytes[..], 1).unwrap()).unwrap();
    Archive::open(&archive).unwrap();
    let compressed = fs::read(&archive).unwrap();
    fs::write(&archive, &compressed[..compressed.len() / 2]).unwrap();
    refused("", &archive);
    assert!(Command::new("gzip").arg("--keep").arg(&whole).status().unwrap().success());
    refused("gzip --decompress", &whole.with_extension("tar.gz"));

    // Somebody writes to it between the look and the upload.
    let looked = Archive::open(&whole).unwrap();
    fs::write(&whole, &bytes[..bytes.len() - 512]).unwrap();
    assert!(store.put_archive(&looked, "job", &|_| ()).is_err());
    fs::write(&whole, &bytes).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    File::options().write(true).open(&whole).unwrap().set_modified(later).unwrap();
    let error = store.put_archive(&looked, "job", &|_| ()).unwrap_err();
    assert!(error.to_string().contains("was changed while it was read"), "{error}");
    assert_eq!(store.images().unwrap().len(), 0);
}

#[test]
fn every_flipped_byte_of_a_store_with_an_archive_is_found() {
    let place = tempfile::tempdir().unwrap();
    let archive = small(place.path(), "archive", &[noise(1, 300 << 10)], &noise(2, 100 << 10));
    let bytes = fs::read(&archive).unwrap();
    let path = place.path().join("store");
    put_archive(&new_store(&path), &archive, "job");
    for object in objects(&path) {
        let content = fs::read(&object).unwrap();
        for at in (0..content.len()).step_by((content.len() / 30).max(1)) {
            let mut changed = content.clone();
            changed[at] ^= 1;
            fs::write(&object, changed).unwrap();
            let shown = format!("{} at {at}", object.display());
            let Ok(Some(store)) = address(&path).open(None) else { continue };
            assert!(!store.verify(None, &|_| ()).unwrap().problems.is_empty(), "{shown}");
            let to = place.path().join("copy");
            // It is refused, or as it was where the byte belongs to none of it.
            match store.image("job").and_then(|image| store.get_to(&image, &to, &|_| ())) {
                Ok(_) => {
                    assert!(fs::read(to.join(ARCHIVE)).unwrap() == bytes, "{shown}");
                    fs::remove_dir_all(&to).unwrap();
                }
                Err(error) => assert!(error.is_bad_image() && !to.exists(), "{shown}: {error}"),
            }
        }
        fs::write(&object, content).unwrap();
    }
    comes_back(&address(&path).open(None).unwrap().unwrap(), "job", &bytes);
}

/// A member of an archive as Go or GNU tar may write it.
#[derive(Debug, Clone)]
enum Odd {
    File(String, Vec<u8>),
    Folder(String),
    Link(String, String),
    /// To the file before it.
    HardLink(String),
    Sparse(String, Vec<u8>, u8),
}

fn header(path: &str, size: u64, kind: u8, target: &str, mode: u32) -> Vec<u8> {
    let mut block = vec![0; 512];
    block[..path.len()].copy_from_slice(path.as_bytes());
    block[157..157 + target.len()].copy_from_slice(target.as_bytes());
    for (at, width, number) in
        [(100, 7, u64::from(mode)), (108, 7, 1000), (116, 7, 1000), (124, 11, size), (136, 11, 9)]
    {
        block[at..at + width].copy_from_slice(format!("{number:0width$o}").as_bytes());
    }
    block[156] = kind;
    block[257..265].copy_from_slice(b"ustar\x0000");
    block[148..156].fill(b' ');
    let sum: u64 = block.iter().map(|it| u64::from(*it)).sum();
    block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    block
}

fn with_content(mut block: Vec<u8>, content: &[u8]) -> Vec<u8> {
    block.extend_from_slice(content);
    block.resize(block.len().next_multiple_of(512), 0);
    block
}

fn records(records: &[(&str, &str)]) -> Vec<u8> {
    let mut all = Vec::new();
    for (key, value) in records {
        let rest = format!(" {key}={value}\n");
        let mut length = rest.len();
        while length != rest.len() + length.to_string().len() {
            length = rest.len() + length.to_string().len();
        }
        all.extend_from_slice(format!("{length}{rest}").as_bytes());
    }
    with_content(header("PaxHeaders.0/x", all.len() as u64, b'x', "", 0o644), &all)
}

/// The header of a member, its long names before it in one of the two ways.
fn named(path: &str, size: u64, kind: u8, target: &str, is_gnu: bool) -> Vec<u8> {
    let mut all = Vec::new();
    let [short, short_target] = [path, target].map(|it| &it[..it.len().min(99)]);
    if is_gnu {
        for (kind, long) in [(b'L', path), (b'K', target)].into_iter().filter(|it| it.1.len() > 99) {
            let long = format!("{long}\0");
            all.extend(with_content(header("././@LongLink", long.len() as u64, kind, "", 0), long.as_bytes()));
        }
    } else {
        let attribute = ("SCHILY.xattr.user.note", "a=b\nc");
        all.extend(match target.is_empty() {
            true => records(&[("path", path), attribute]),
            false => records(&[("path", path), ("linkpath", target), attribute]),
        });
    }
    all.extend(header(short, size, kind, short_target, 0o4755));
    all
}

fn odd_member() -> impl Strategy<Value = (Odd, bool)> {
    let name =
        prop_oneof!["[a-zé. -]{1,12}", "[a-z]{90,180}"].prop_filter("no path", |it| !matches!(it.as_str(), "." | ".."));
    let content = prop_oneof![
        Just(Vec::new()),
        proptest::collection::vec(any::<u8>(), 0..2000),
        (any::<u8>(), 0_usize..200_000).prop_map(|(byte, length)| vec![byte; length])
    ];
    let member = (name, content, 0_u8..5, any::<u8>()).prop_map(|(name, content, kind, more)| match kind {
        0 => Odd::File(name, content),
        1 => Odd::Folder(name),
        2 => Odd::Link(name.clone(), format!("../{name}")),
        3 => Odd::HardLink(name),
        _ => Odd::Sparse(name, content, more % 3),
    });
    (member, any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn odd_archives_come_back(members in proptest::collection::vec(odd_member(), 0..12), zeros in 2_usize..20, compress: bool) {
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join("source");
        contents(&dir, &[noise(1, 20_000)], &noise(2, 3000));
        let manifest = fs::read(dir.join("checkpoint/rekindle.img")).unwrap();
        let mut bytes = Vec::new();
        for name in ["config.dump", "spec.dump"] {
            let content = fs::read(dir.join(name)).unwrap();
            bytes.extend(with_content(header(name, content.len() as u64, b'0', "", 0o600), &content));
        }
        bytes.extend(header("checkpoint/", 0, b'5', "", 0o700));
        bytes.extend(with_content(header("checkpoint/rekindle.img", manifest.len() as u64, b'0', "", 0o600), &manifest));
        for (number, (member, is_gnu)) in members.iter().enumerate() {
            let path = |name: &str| format!("checkpoint/{number}{name}");
            bytes.extend(match member {
                Odd::File(name, content) =>
                    with_content(named(&path(name), content.len() as u64, b'0', "", *is_gnu), content),
                Odd::Folder(name) => named(&format!("{}/", path(name)), 0, b'5', "", *is_gnu),
                Odd::Link(name, target) => named(&path(name), 0, b'2', target, *is_gnu),
                Odd::HardLink(name) => named(&path(name), 0, b'1', "checkpoint/rekindle.img", *is_gnu),
                Odd::Sparse(name, content, more) => {
                    let mut block = named(&path(name), content.len() as u64, b'S', "", *is_gnu);
                    let at = block.len() - 512;
                    block[at + 482] = u8::from(*more > 0);
                    block[at + 148..at + 156].fill(b' ');
                    let sum: u64 = block[at..].iter().map(|it| u64::from(*it)).sum();
                    block[at + 148..at + 155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
                    for left in (0..*more).rev() {
                        let mut map = vec![b'1'; 512];
                        map[504] = left;
                        block.extend(map);
                    }
                    with_content(block, content)
                }
            });
        }
        bytes.resize(bytes.len() + zeros * 512, 0);
        let archive = place.path().join("archive");
        fs::write(&archive, if compress { zstd::encode_all(&bytes[..], 1).unwrap() } else { bytes.clone() }).unwrap();
        let store = new_store(&place.path().join("store"));
        put_archive(&store, &archive, "job");
        comes_back(&store, "job", &bytes);
    }
}
