//! The files that a writer makes in a directory, and the moment from which they count as an image.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::io::Write;
use std::path::Path;

use common::{CODE, create, fill, kind, names};
use rekindle_images::*;

/// Files of others, some with names close to ours.
const FOREIGN: [&str; 6] =
    ["core-1.img", "inventory.img", "rekindle", "rekindle-data-0.raw.bak", "rekindle-notes.txt", "rekindle.img.old"];

fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in FOREIGN {
        fs::write(dir.path().join(name), name).unwrap();
    }
    dir
}

fn assert_only_foreign(dir: &Path) {
    assert_eq!(names(dir), FOREIGN);
    for name in FOREIGN {
        assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), name);
    }
}

/// A writer whose process is killed: nothing is cleaned up.
fn kill(writer: ImageWriter) {
    std::mem::forget(writer);
}

#[test]
fn an_aborted_image_leaves_only_what_was_there() {
    let dir = directory();
    let writer = create(dir.path()).unwrap();
    fill(&writer).unwrap();
    writer.abort().unwrap();
    assert_only_foreign(dir.path());
}

#[test]
fn a_dropped_image_leaves_only_what_was_there() {
    let dir = directory();
    let writer = create(dir.path()).unwrap();
    fill(&writer).unwrap();
    drop(writer);
    assert_only_foreign(dir.path());
}

#[test]
fn a_refused_commit_leaves_only_what_was_there() {
    let dir = directory();
    let writer = create(dir.path()).unwrap();
    let mut manifest = fill(&writer).unwrap();
    manifest.clients[0].allocations[0].size += 1;
    assert_eq!(kind(writer.commit(manifest)), ErrorKind::Invalid);
    assert_only_foreign(dir.path());
}

#[test]
fn a_commit_leaves_the_files_of_others_alone() {
    let dir = directory();
    common::write(dir.path());
    for name in FOREIGN {
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), name);
    }
}

#[test]
fn an_image_killed_before_its_commit_is_refused_and_then_replaced_unasked() {
    let dir = directory();
    let writer = create(dir.path()).unwrap();
    fill(&writer).unwrap();
    writer.sync().unwrap();
    kill(writer);
    assert_eq!(kind(Image::open(dir.path())), ErrorKind::Uncommitted);

    // The lock lives as long as the killed process; this one has to go on without it.
    let copy = directory();
    for name in names(dir.path()) {
        fs::copy(dir.path().join(&name), copy.path().join(&name)).unwrap();
    }
    common::write(copy.path());
    assert!(!common::is_refused(copy.path()));
}

#[test]
fn a_commit_interrupted_after_any_of_its_steps_is_whole_or_refused() {
    let dir = directory();
    common::write(dir.path());
    let (manifest, commit) = (dir.path().join(MANIFEST), dir.path().join(COMMIT));
    let with = |path: &Path, suffix| path.with_file_name(format!("{}.tmp", suffix));
    let refused = || assert_eq!(kind(Image::open(dir.path())), ErrorKind::Uncommitted);

    // Backwards from the whole image: commit record written but not renamed, ...
    fs::rename(&commit, with(&commit, COMMIT)).unwrap();
    refused();
    fs::write(with(&commit, COMMIT), b"REKC").unwrap();
    refused();
    fs::remove_file(with(&commit, COMMIT)).unwrap();
    refused();
    fs::rename(&manifest, with(&manifest, MANIFEST)).unwrap();
    refused();
    fs::remove_file(with(&manifest, MANIFEST)).unwrap();
    refused();
}

#[test]
fn a_committed_image_is_replaced_only_on_demand() {
    let dir = directory();
    common::write(dir.path());
    let before = names(dir.path());
    assert_eq!(kind(create(dir.path())), ErrorKind::Exists);
    assert_eq!(names(dir.path()), before);
    assert!(!common::is_refused(dir.path()));

    let mut options = common::options();
    options.replace = true;
    options.id = CheckpointId::random().unwrap();
    let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), options).unwrap();
    writer.commit(common::manifest()).unwrap();
    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.manifest().id, options.id);
    // Nothing of the first one is left.
    assert!(image.files().is_empty());
    assert_eq!(names(dir.path()).len(), FOREIGN.len() + 2);
}

/// Begins a second image in a directory that has the sample.
fn replace(dir: &Path) -> ImageWriter {
    let id = CheckpointId::from_bytes(SECOND);
    let options = CreateOptions { replace: true, id, companion: Some("inventory.img"), ..common::options() };
    ImageWriter::create(ImageDir::open(dir).unwrap(), options).unwrap()
}

const SECOND: [u8; 16] = *b"checkpoint no. 2";

/// A copy of a directory, which no writer has locked.
fn copy(dir: &Path) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for name in names(dir) {
        fs::copy(dir.join(&name), copy.path().join(&name)).unwrap();
    }
    copy
}

/// Checks that a whole image with this id is there and can be replaced, after which only the new image is left.
fn assert_is_whole_and_replaced(dir: &Path, id: CheckpointId) {
    let image = Image::open(dir).unwrap();
    assert_eq!(image.manifest().id, id);
    assert_eq!(Manifest::peek(image.dir()).unwrap().id, id);
    assert!(image.verify(|_| ()).is_good());
    drop(image);
    let writer = replace(dir);
    let manifest = fill(&writer).unwrap();
    writer.commit(manifest).unwrap();
    let image = Image::open(dir).unwrap();
    assert_eq!(image.manifest().id, CheckpointId::from_bytes(SECOND));
    assert!(image.verify(|_| ()).is_good());
    let files: Vec<_> = image.files().iter().map(|it| it.name.clone()).collect();
    let others = FOREIGN.into_iter().chain([MANIFEST, COMMIT]).map(str::to_owned);
    let mut expected: Vec<_> = files.into_iter().chain(others).collect();
    expected.sort();
    assert_eq!(names(dir), expected);
}

#[test]
fn a_second_image_killed_before_its_commit_leaves_the_first_whole() {
    let stages: [fn(&ImageWriter); 4] = [
        |_| (),
        |writer| drop(writer.data_file(0).unwrap()),
        |writer| {
            writer.put_code(CODE[0]).unwrap();
        },
        |writer| drop(fill(writer).unwrap()),
    ];
    for stage in stages {
        let dir = directory();
        common::write(dir.path());
        let writer = replace(dir.path());
        stage(&writer);
        kill(writer);
        let copy = copy(dir.path());
        assert_is_whole_and_replaced(copy.path(), common::ID);
    }
}

#[test]
fn a_second_image_given_up_before_its_commit_leaves_the_first_as_it_was() {
    let dir = directory();
    common::write(dir.path());
    let before = names(dir.path());
    let writer = replace(dir.path());
    fill(&writer).unwrap();
    drop(writer);
    assert_eq!(names(dir.path()), before);
    let writer = replace(dir.path());
    let manifest = fill(&writer).unwrap();
    assert_eq!(kind(writer.commit_if(manifest, || false)), ErrorKind::GivenUp);
    assert_eq!(names(dir.path()), before);
    assert_is_whole_and_replaced(dir.path(), common::ID);
}

#[test]
fn a_commit_over_an_older_image_killed_after_any_step_leaves_one_of_the_two_whole() {
    let dir = directory();
    common::write(dir.path());
    let writer = replace(dir.path());
    let manifest = fill(&writer).unwrap();
    let mut before = None;
    writer.commit_if(manifest, || before.replace(copy(dir.path())).is_none()).unwrap();
    let before = before.unwrap();
    let at = |steps| {
        let dir = copy(before.path());
        for name in [COMMIT, MANIFEST].iter().take(steps) {
            fs::rename(dir.path().join(format!("{name}.tmp")), dir.path().join(name)).unwrap();
        }
        dir
    };
    assert_is_whole_and_replaced(at(0).path(), common::ID);
    for steps in 1..=2 {
        assert_is_whole_and_replaced(at(steps).path(), CheckpointId::from_bytes(SECOND));
    }
    // Only the last step is left: files that nobody names.
    assert!(names(at(2).path()).len() > names(dir.path()).len());
}

#[test]
fn code_that_the_older_image_has_is_shared_and_written_again_only_where_that_is_damaged() {
    let dir = directory();
    common::write(dir.path());
    let file = dir.path().join(code_name(CodeHash::of(CODE[0])));
    let writer = replace(dir.path());
    assert!(writer.code_file(CodeHash::of(CODE[0]), CODE[0].len() as u64).unwrap().is_none());
    drop(writer);
    assert_eq!(fs::read(&file).unwrap(), CODE[0]);
    fs::write(&file, vec![7; CODE[0].len()]).unwrap();
    let writer = replace(dir.path());
    let manifest = fill(&writer).unwrap();
    writer.commit(manifest).unwrap();
    assert_eq!(fs::read(&file).unwrap(), CODE[0]);
    assert!(Image::open(dir.path()).unwrap().verify(|_| ()).is_good());
}

#[test]
fn an_image_is_told_from_the_files_of_another_dump() {
    let dir = directory();
    let inventory = dir.path().join("inventory.img");
    let check = || Image::open(dir.path()).unwrap().check_companion();
    // Of before that was recorded.
    common::write(dir.path());
    fs::write(&inventory, "second").unwrap();
    check().unwrap();

    let writer = replace(dir.path());
    let manifest = fill(&writer).unwrap();
    writer.commit(manifest).unwrap();
    check().unwrap();
    for content in [Some("third"), None] {
        match content {
            Some(content) => fs::write(&inventory, content).unwrap(),
            None => fs::remove_file(&inventory).unwrap(),
        }
        let error = check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OtherDump);
        assert!(error.kind().is_bad_image() && error.to_string().contains("are of another dump"), "{error}");
    }
    fs::write(&inventory, "second").unwrap();
    check().unwrap();

    // The next dump has begun to write over them, and is killed before it has come to the one that is compared.
    let writer = replace(dir.path());
    assert!(writer.replaces());
    writer.disown().unwrap();
    drop(writer);
    assert_eq!(check().unwrap_err().kind(), ErrorKind::OtherDump);
    assert!(Image::open(dir.path()).unwrap().verify(|_| ()).is_good());
    let writer = replace(dir.path());
    let manifest = fill(&writer).unwrap();
    writer.commit(manifest).unwrap();
    check().unwrap();
}

#[test]
fn a_removed_image_leaves_only_what_was_there() {
    let dir = directory();
    common::write(dir.path());
    ImageWriter::remove_image(ImageDir::open(dir.path()).unwrap()).unwrap();
    assert_only_foreign(dir.path());
}

#[test]
fn two_writers_cannot_share_a_directory() {
    let dir = directory();
    let writer = create(dir.path()).unwrap();
    assert_eq!(kind(create(dir.path())), ErrorKind::Busy);
    let manifest = fill(&writer).unwrap();
    writer.commit(manifest).unwrap();
    assert_eq!(kind(create(dir.path())), ErrorKind::Exists);
}

#[test]
fn a_planted_link_is_removed_and_not_followed() {
    let dir = directory();
    let target = dir.path().join("inventory.img");
    for name in [MANIFEST, "rekindle.img.tmp", "rekindle-data-0.raw"] {
        std::os::unix::fs::symlink(&target, dir.path().join(name)).unwrap();
    }
    let writer = create(dir.path()).unwrap();
    // Planted while the image is being written.
    std::os::unix::fs::symlink(&target, dir.path().join(data_name(1))).unwrap();
    assert_eq!(kind(writer.data_file(1)), ErrorKind::Io);
    drop(writer.data_file(0).unwrap());
    writer.commit(common::manifest()).unwrap();
    assert_eq!(fs::read_to_string(target).unwrap(), "inventory.img");
}

#[test]
fn further_data_files_have_numbers_of_their_own_and_are_not_kept_for_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), CreateOptions::new().unwrap()).unwrap();
    drop(writer.data_file(0).unwrap());
    let (numbers, files): (Vec<_>, Vec<_>) = (0..3).map(|_| writer.another_data_file().unwrap()).unzip();
    assert_eq!(numbers, [1 << 16, (1 << 16) + 1, (1 << 16) + 2]);
    assert!(numbers.iter().all(|it| dir.path().join(data_name(*it)).exists()));
    let data = DataWriter::of([(numbers[1], files[1].try_clone().unwrap())], writer.key()).unwrap();
    let pieces = data.append_all(&[1; 5000]).unwrap();
    data.finish().unwrap();
    let blob = Blob { kind: 1, size: 5000, pieces, ..Blob::default() };
    let client = Client { blobs: vec![blob], ..Client::default() };
    writer.commit(Manifest { clients: vec![client], ..Manifest::new(0, Protocol::Stop) }).unwrap();
    let image = Image::open(dir.path()).unwrap();
    // The client's first is there in any case.
    assert_eq!(image.data_files().collect::<Vec<_>>(), [0, numbers[1]]);
    assert!(!dir.path().join(data_name(numbers[0])).exists() && !dir.path().join(data_name(numbers[2])).exists());
    assert!(image.verify(|_| ()).is_good());

    // Of an image that was given up none is left.
    let options = CreateOptions { replace: true, ..CreateOptions::new().unwrap() };
    let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), options).unwrap();
    let (_, mut file) = writer.another_data_file().unwrap();
    std::io::Write::write_all(&mut file, &[1; 5000]).unwrap();
    drop(writer.another_data_file().unwrap());
    writer.abort().unwrap();
    assert_eq!(Image::open(dir.path()).unwrap().files().len() + 2, fs::read_dir(dir.path()).unwrap().count());
}

#[test]
fn a_data_file_is_made_once_and_cannot_be_read_by_whom_it_is_handed_to() {
    let dir = directory();
    let writer = create(dir.path()).unwrap();
    let (_, file) = writer.data_file(3).unwrap();
    assert_eq!(kind(writer.data_file(3)), ErrorKind::Invalid);
    assert!(std::io::read_to_string(file).is_err());
}

#[test]
fn a_code_file_filled_with_something_else_is_not_committed() {
    for content in [&b"something else, as long"[..], b"shorter"] {
        let dir = directory();
        let writer = create(dir.path()).unwrap();
        let hash = CodeHash::of(b"what it should have been");
        let mut file = writer.code_file(hash, 23).unwrap().unwrap();
        file.write_all(content).unwrap();
        assert_eq!(kind(writer.commit(common::manifest())), ErrorKind::Corrupt);
        assert_only_foreign(dir.path());
    }
}

#[test]
fn a_piece_that_was_never_written_is_not_committed() {
    // Changes to a client's record that a hostile or defective worker may report.
    type Change = fn(&mut Client);
    fn extent(client: &mut Client) -> &mut Extent {
        match &mut client.allocations[0].pieces[0].storage {
            Storage::Stored(extent) => extent,
            other => panic!("{other:?}"),
        }
    }
    let changes: [(&str, Change); 14] = [
        ("a file that is not there", |c| extent(c).file = 9),
        ("beyond the file", |c| extent(c).offset = 1 << 20),
        ("an overflow", |c| extent(c).offset = u64::MAX - 4095),
        ("not aligned", |c| extent(c).offset = 1),
        ("too few bytes", |c| extent(c).length -= 1),
        ("a piece too few", |c| c.allocations[0].pieces.truncate(2)),
        ("no pieces", |c| c.allocations[0].pieces.clear()),
        ("double", |c| {
            let piece = c.allocations[0].pieces[0];
            c.allocations[0].pieces.push(piece);
        }),
        ("out of order", |c| c.allocations[0].pieces.swap(0, 1)),
        ("an empty piece", |c| c.allocations[0].pieces[0].length = 0),
        ("addresses that wrap", |c| c.allocations[0].address = u64::MAX),
        ("a parent that is not there", |c| {
            let extent = *extent(c);
            c.allocations[0].pieces[0].storage = Storage::Parent { depth: 1, extent };
        }),
        ("objects out of order", |c| c.objects.swap(9, 10)),
        ("code that is not there", |c| {
            c.objects[0].code = vec![CodeHash::of(b"?")];
        }),
    ];
    for (what, change) in changes {
        let dir = directory();
        let writer = create(dir.path()).unwrap();
        let mut manifest = fill(&writer).unwrap();
        change(&mut manifest.clients[0]);
        assert_eq!(kind(writer.commit(manifest)), ErrorKind::Invalid, "{what}");
        assert_only_foreign(dir.path());
    }
}

#[test]
fn a_buffer_does_not_fit_in_a_manifest() {
    let dir = directory();
    let writer = create(dir.path()).unwrap();
    let mut manifest = fill(&writer).unwrap();
    manifest.clients[0].worker_state = vec![0; limits::MAX_OPAQUE as usize + 1];
    assert_eq!(kind(writer.commit(manifest)), ErrorKind::TooLarge);
    assert_only_foreign(dir.path());
}

#[test]
fn threads_may_add_code_at_once() {
    let dir = directory();
    let writer = create(dir.path()).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for n in 0..50u32 {
                    writer.put_code(&n.to_le_bytes().repeat(100)).unwrap();
                }
            });
        }
    });
    writer.commit(common::manifest()).unwrap();
    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.manifest().code.len(), 50);
    assert!(image.verify(|_| ()).is_good());
}

#[test]
fn free_space_is_that_of_the_file_system() {
    let dir = directory();
    let space = ImageDir::open(dir.path()).unwrap().free_space().unwrap();
    assert!(space > 0);
}

#[test]
fn all_files_of_a_directory_are_made_durable_whatever_else_is_there() {
    let dir = directory();
    std::os::unix::fs::symlink("nowhere", dir.path().join("rekindle-parent")).unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
    fs::write(dir.path().join("pages-1.img"), vec![7; (64 << 20) + 1]).unwrap();
    let mut steps = 0;
    ImageDir::open(dir.path()).unwrap().sync_files(|| steps += 1).unwrap();
    // For each file, and each part of it.
    assert_eq!(steps, 2 * FOREIGN.len() + 3);
}
