//! Which image a new one builds on: links to it, and locks that keep it as it is.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rekindle_images::*;

use crate::chain::{Chain, assert_reads, replace, rewrite};
use crate::common::{self, kind, names};

#[test]
fn a_directory_without_a_parent_of_ours_has_no_base() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    fs::create_dir(&image).unwrap();
    let opened = || ImageDir::open(&image).unwrap();
    let find = || Base::find(&opened()).map(|base| base.is_some());
    assert!(!find().unwrap());
    // Nothing there, as CRIU takes it too.
    symlink("../before", image.join("parent")).unwrap();
    assert!(!find().unwrap());
    // After CRIU's pre-dump.
    fs::create_dir(dir.path().join("before")).unwrap();
    fs::write(dir.path().join("before/pages-1.img"), b"").unwrap();
    assert!(!find().unwrap());
    common::write(&dir.path().join("before"));
    assert!(find().unwrap());
    fs::remove_file(dir.path().join("before").join(COMMIT)).unwrap();
    assert_eq!(kind(find()), ErrorKind::Uncommitted);
    // Itself.
    fs::remove_file(image.join("parent")).unwrap();
    symlink("../image", image.join("parent")).unwrap();
    common::write(&image);
    assert_eq!(kind(find()), ErrorKind::Invalid);
    // A link of our own comes first.
    symlink("../before", image.join(Base::LINK)).unwrap();
    common::write(&dir.path().join("before"));
    assert!(find().unwrap());
    fs::remove_file(image.join(Base::LINK)).unwrap();
    // Of the first version, whose hashes say nothing here.
    let first = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/v1");
    fs::remove_file(image.join("parent")).unwrap();
    symlink(first, image.join("parent")).unwrap();
    assert_eq!(kind(find()), ErrorKind::Unsupported);
}

#[test]
fn an_image_needs_the_link_only_until_it_is_committed() {
    let target = |chain: &Chain| chain.open(1).unwrap().manifest().parent.clone().unwrap().path;
    for (name, relative) in [(Base::LINK, true), (Base::CRIU_LINK, true), (Base::LINK, false), (Base::CRIU_LINK, false)]
    {
        let chain = Chain::new();
        let dir = chain.dir(1);
        fs::create_dir(&dir).unwrap();
        symlink(if relative { PathBuf::from("../0") } else { chain.dir(0) }, dir.join(name)).unwrap();
        let writer = replace(&dir, [1; 16], true).unwrap();
        let manifest = common::fill_with(&writer, b"counter1").unwrap();
        writer.commit(manifest).unwrap();
        assert_eq!(target(&chain), Path::new("../0"), "{name} {relative}");
        // The link may lead to another image, or nowhere, or be gone.
        for other in ["../100", "../101"] {
            fs::remove_file(dir.join(name)).unwrap();
            symlink(other, dir.join(name)).unwrap();
            fs::create_dir_all(chain.dir(100)).unwrap();
            assert_reads(&chain.open(1).unwrap(), b"counter1");
        }
        fs::remove_file(dir.join(name)).unwrap();
        assert_reads(&chain.open(1).unwrap(), b"counter1");
        // Both may be moved together, as before.
        let away = tempfile::tempdir().unwrap();
        for n in [0, 1] {
            fs::rename(chain.dir(n), away.path().join(n.to_string())).unwrap();
        }
        assert_reads(&Image::open(away.path().join("1")).unwrap(), b"counter1");
    }
}

#[test]
fn an_image_that_says_the_name_of_the_link_is_read_through_it() {
    let chain = Chain::new();
    let dir = chain.dir(1);
    fs::create_dir(&dir).unwrap();
    symlink("../0", dir.join(Base::LINK)).unwrap();
    let opened = ImageDir::open(&dir).unwrap();
    let base = Base::open(&opened, Path::new(Base::LINK)).unwrap();
    let writer = ImageWriter::create_on(opened, CreateOptions::new().unwrap(), Some(base)).unwrap();
    let manifest = common::fill_with(&writer, b"counter1").unwrap();
    writer.commit(manifest).unwrap();
    assert_eq!(chain.open(1).unwrap().manifest().parent.as_ref().unwrap().path, Path::new(Base::LINK));
    assert_reads(&chain.open(1).unwrap(), b"counter1");
    chain.add(2, b"counter2");
    assert_reads(&chain.open(2).unwrap(), b"counter2");
    // In place of the link, the directory.
    fs::remove_file(dir.join(Base::LINK)).unwrap();
    fs::rename(chain.dir(0), dir.join(Base::LINK)).unwrap();
    assert_reads(&chain.open(2).unwrap(), b"counter2");
    let writer = replace(&dir, [3; 16], true).unwrap();
    let manifest = common::fill_with(&writer, b"counter3").unwrap();
    writer.commit(manifest).unwrap();
    assert_reads(&chain.open(1).unwrap(), b"counter3");
}

#[test]
fn nobody_writes_to_what_an_image_is_being_built_on() {
    let chain = Chain::new();
    chain.add(1, b"counter1");
    chain.add(2, b"counter2");
    let (third, fourth) = (chain.begin(3), {
        // Another on the same parent.
        fs::create_dir(chain.dir(4)).unwrap();
        symlink("../2", chain.dir(4).join(Base::LINK)).unwrap();
        let dir = ImageDir::open(chain.dir(4)).unwrap();
        let base = Base::find(&dir).unwrap();
        ImageWriter::create_on(dir, CreateOptions::new().unwrap(), base).unwrap()
    });
    let untouched = |n: u32| {
        let before = names(&chain.dir(n));
        for result in [replace(&chain.dir(n), [9; 16], false).map(drop), flatten_in_place(&chain.dir(n)).map(drop)] {
            let error = result.unwrap_err();
            assert!(matches!(error, ImageError::BuiltOn { .. }) && error.kind() == ErrorKind::Busy, "{n}: {error}");
        }
        assert_eq!(names(&chain.dir(n)), before);
    };
    (0..=2).for_each(untouched);
    // Readers are not hindered.
    assert_reads(&chain.open(2).unwrap(), b"counter2");
    flatten(&chain.open(2).unwrap(), {
        fs::create_dir(chain.dir(100)).unwrap();
        ImageDir::open(chain.dir(100)).unwrap()
    })
    .unwrap();
    let manifest = common::fill_with(&third, b"counter3").unwrap();
    third.commit(manifest).unwrap();
    assert_reads(&chain.open(3).unwrap(), b"counter3");
    // The other still builds on them.
    (0..=2).for_each(untouched);
    assert!(flatten_in_place(&chain.dir(3)).unwrap());
    let manifest = common::fill_with(&fourth, b"counter4").unwrap();
    fourth.commit(manifest).unwrap();
    assert!(flatten_in_place(&chain.dir(4)).unwrap());
    for n in (0..=2).rev() {
        flatten_in_place(&chain.dir(n)).unwrap();
        drop(replace(&chain.dir(n), [9; 16], false).unwrap());
    }
    assert_reads(&chain.open(3).unwrap(), b"counter3");
    assert_reads(&chain.open(4).unwrap(), b"counter4");
}

#[test]
fn what_is_being_written_cannot_be_built_on_yet() {
    let chain = Chain::new();
    chain.add(1, b"counter1");
    let find = |n: u32| {
        let dir = chain.dir(100 + n);
        fs::create_dir_all(&dir).unwrap();
        let _ = symlink(format!("../{n}"), dir.join(Base::LINK));
        Base::find(&ImageDir::open(dir).unwrap()).map(|base| base.is_some())
    };
    // Neither it itself nor what builds on it.
    let writer = replace(&chain.dir(0), [9; 16], false).unwrap();
    assert_eq!((kind(find(0)), kind(find(1))), (ErrorKind::Busy, ErrorKind::Busy));
    drop(writer);
    // Its writer does not keep others from what it builds on.
    let chain = Chain::new();
    let writer = chain.begin(1);
    fs::create_dir(chain.dir(2)).unwrap();
    symlink("../0", chain.dir(2).join(Base::LINK)).unwrap();
    assert!(Base::find(&ImageDir::open(chain.dir(2)).unwrap()).unwrap().is_some());
    let manifest = common::fill_with(&writer, b"counter1").unwrap();
    writer.commit(manifest).unwrap();
    chain.open(1).unwrap();
}

#[test]
fn what_an_image_needs_is_not_overwritten_by_one_that_builds_on_it() {
    let chain = Chain::new();
    chain.add(1, b"counter1");
    chain.add(2, b"counter2");
    let link = |n: u32, to: u32| {
        let _ = fs::remove_file(chain.dir(n).join(Base::LINK));
        symlink(format!("../{to}"), chain.dir(n).join(Base::LINK)).unwrap();
        Base::find(&ImageDir::open(chain.dir(n)).unwrap()).map(|base| base.is_some())
    };
    // Its parent, and that one's.
    for (n, to) in [(1, 2), (0, 2), (0, 1)] {
        let error = link(n, to).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Overwrites);
        assert!(!error.kind().is_bad_image());
        let said = error.to_string();
        let whole = chain.dir(to).canonicalize().unwrap();
        assert!(said.contains(&format!("rekindle flatten {}", whole.display())), "{said}");
        assert!(said.contains(&chain.dir(n).display().to_string()), "{said}");
        assert_reads(&chain.open(2).unwrap(), b"counter2");
    }
    // Also where something behind it is missing, which may be put back.
    fs::rename(chain.dir(0), chain.dir(100)).unwrap();
    assert_eq!(kind(link(1, 2)), ErrorKind::Overwrites);
    fs::rename(chain.dir(100), chain.dir(0)).unwrap();
    // An image that no longer needs the other can be built on.
    assert!(flatten_in_place(&chain.dir(2)).unwrap());
    assert!(link(1, 2).unwrap());
    let writer = replace(&chain.dir(1), [3; 16], true).unwrap();
    let manifest = common::fill_with(&writer, b"counter3").unwrap();
    writer.commit(manifest).unwrap();
    assert_reads(&chain.open(1).unwrap(), b"counter3");
    // And one that has lost it already is in nobody's way.
    assert_eq!(kind(link(2, 1)), ErrorKind::Overwrites);
    rewrite(&chain.dir(2), [4; 16]);
    assert_eq!(kind(link(2, 1)), ErrorKind::Parent);
}
