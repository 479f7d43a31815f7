//! Images that build on others.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use common::{fill, kind, names};
use rekindle_images::*;

/// Directories beside each other, each with CRIU's link to the one before.
struct Chain(tempfile::TempDir);

impl Chain {
    fn new() -> Self {
        let chain = Self(tempfile::tempdir().unwrap());
        fs::create_dir(chain.dir(0)).unwrap();
        common::write(&chain.dir(0));
        chain
    }

    fn dir(&self, n: u32) -> PathBuf {
        self.0.path().join(n.to_string())
    }

    fn open(&self, n: u32) -> Result<Image, ImageError> {
        Image::open(self.dir(n))
    }

    /// Begins image `n`.
    fn begin(&self, n: u32) -> ImageWriter {
        fs::create_dir(self.dir(n)).unwrap();
        symlink(format!("../{}", n - 1), self.dir(n).join(Base::CRIU_LINK)).unwrap();
        let dir = ImageDir::open(self.dir(n)).unwrap();
        let base = Base::find(&dir).unwrap();
        assert!(base.is_some());
        let options = CreateOptions { id: CheckpointId::from_bytes([n as u8; 16]), ..CreateOptions::new().unwrap() };
        ImageWriter::create_on(dir, options, base).unwrap()
    }

    /// Image `n`, of the same clients, the first of which has this at its global.
    fn add(&self, n: u32, counter: &[u8; 8]) -> Committed {
        let writer = self.begin(n);
        let manifest = common::fill_with(&writer, counter).unwrap();
        writer.commit(manifest).unwrap()
    }
}

fn read(image: &Image, pieces: &[Piece]) -> Vec<u8> {
    let mut content = vec![0; pieces.iter().map(|it| it.length as usize).sum()];
    image.data_reader().unwrap().read_all(pieces, &mut content, NonZeroUsize::MIN).unwrap();
    content
}

/// That everything reads as in the sample, but for the counter.
fn assert_reads(image: &Image, counter: &[u8]) {
    let report = image.verify(|_| ());
    assert!(report.is_good(), "{report:?}");
    for client in &image.manifest().clients {
        assert_eq!(read(image, &client.allocations[0].pieces), common::content());
    }
    assert_eq!(read(image, &image.manifest().clients[0].globals[0].pieces), counter);
    assert_eq!(read(image, &image.manifest().clients[1].globals[0].pieces), b"counter!");
    for (hash, code) in image.manifest().code.iter().map(|it| it.hash).zip(sorted_code()) {
        assert_eq!(image.read_code(hash).unwrap(), code);
    }
}

fn sorted_code() -> Vec<&'static [u8]> {
    let mut code = common::CODE.to_vec();
    code.sort_by_key(|code| CodeHash::of(code));
    code
}

fn depths(client: &Client) -> Vec<Option<u32>> {
    let depth = |piece: &Piece| piece.storage.place().map(|(file, _)| file.depth);
    client.regions().flat_map(|region| region.pieces).map(depth).collect()
}

#[test]
fn what_has_not_changed_is_not_written_again_and_reads_as_before() {
    let chain = Chain::new();
    chain.add(1, b"counter!");
    let image = chain.open(1).unwrap();
    assert_eq!(image.depth(), 1);
    assert!(image.files().iter().all(|file| file.size == 0), "{:?}", image.files());
    assert!(image.manifest().code.iter().all(|code| code.parent_depth == 1));
    assert_eq!(image.manifest().hash_key, common::HASH_KEY);
    assert_reads(&image, b"counter!");
    let summary = image.summary();
    assert_eq!((summary.bytes.stored, summary.bytes.parent), (0, 2 * 295));
    assert_eq!(summary.parent.unwrap().path, "../0");
}

#[test]
fn a_piece_is_read_from_where_it_is_however_long_the_chain() {
    let chain = Chain::new();
    for (n, counter) in (1..).zip([b"counter1", b"counter2", b"counter2", b"counter1"]) {
        chain.add(n, counter);
    }
    let image = chain.open(4).unwrap();
    assert_reads(&image, b"counter1");
    // Text, zeros, text; the counter, which was this in image 1; pinned memory; a blob.
    assert_eq!(depths(&image.manifest().clients[0]), [Some(4), None, Some(4), Some(0), None, None]);
    // Image 3 found it in its parent, which has it again in its own file.
    assert_eq!(depths(&chain.open(3).unwrap().manifest().clients[0])[3], Some(1));
    assert_eq!(image.data_files_of(&image.manifest().clients[1]), [DataFile { depth: 4, index: 1 }].into());
}

/// Each image of the chain has another number of data files for the same process.
#[test]
fn a_process_has_another_number_of_data_files_in_each_image_of_a_chain() {
    let chain = Chain::new();
    let mut expected = Vec::new();
    for (n, count) in (1_u8..).zip([3, 1, 2, 5]) {
        let writer = chain.begin(u32::from(n));
        let mut files = vec![writer.data_file(0).unwrap()];
        files.extend((1..count).map(|_| writer.another_data_file().unwrap()));
        let known = writer.base().unwrap().known(7);
        // A writer of its own for each: what threads do at the same time.
        let files = files.into_iter().map(|(index, file)| DataWriter::new(file, index, writer.key()).unwrap());
        let files: Vec<_> = files.map(|it| it.with_known(known.clone())).collect();
        expected.extend((0..count).map(|i| [n, i as u8].repeat(3000)));
        // What was there is found, and what is new goes to another file each.
        let before = expected.len() - count;
        let file = |at: usize| &files[at.saturating_sub(before)];
        let pieces = expected.iter().enumerate().map(|(at, it)| file(at).append(6000 * at as u64, it).unwrap());
        let pieces: Vec<_> = pieces.collect();
        files.into_iter().for_each(|it| assert!(it.finish().is_ok()));
        let mut manifest = common::manifest();
        let size = 6000 * pieces.len() as u64;
        let blobs = vec![Blob { kind: 1, size, pieces, ..Blob::default() }];
        manifest.clients = vec![Client { namespace_pid: 7, blobs, ..Client::default() }];
        writer.commit(manifest).unwrap();
    }
    let image = chain.open(4).unwrap();
    let client = &image.manifest().clients[0];
    let of = |depth| client.data_files().iter().filter(|it| it.depth == depth).count();
    assert_eq!([of(0), of(1), of(2), of(3), of(4)], [5, 2, 1, 3, 0]);
    assert!(image.verify(|_| ()).is_good());
    assert_eq!(read(&image, &client.blobs[0].pieces), expected.concat());
    // By itself it has one.
    drop(image);
    assert!(flatten_in_place(&chain.dir(4)).unwrap());
    let flat = chain.open(4).unwrap();
    assert_eq!(flat.data_files().collect::<Vec<_>>(), [0]);
    assert!(flat.verify(|_| ()).is_good());
    assert_eq!(read(&flat, &flat.manifest().clients[0].blobs[0].pieces), expected.concat());
}

#[test]
fn an_image_that_needs_nothing_of_its_parent_stands_alone() {
    let chain = Chain::new();
    let writer = chain.begin(1);
    let mut manifest = common::manifest();
    let data = DataWriter::of([writer.data_file(0).unwrap()], writer.key()).unwrap();
    let pieces = data.append_all(b"something else").unwrap();
    data.finish().unwrap();
    manifest.clients.push(Client { blobs: vec![Blob { size: 14, pieces, ..Blob::default() }], ..Client::default() });
    writer.commit(manifest).unwrap();
    fs::remove_dir_all(chain.dir(0)).unwrap();
    let image = chain.open(1).unwrap();
    assert_eq!((image.depth(), image.manifest().parent.clone()), (0, None));
}

fn refused(chain: &Chain, said: &str) {
    let error = chain.open(2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Parent);
    assert!(error.kind().is_bad_image());
    assert!(error.to_string().contains(said), "{said:?} in: {error}");
    // Its manifest can still be looked at.
    let manifest = Manifest::peek(&ImageDir::open(chain.dir(2)).unwrap()).unwrap();
    assert!(Summary::of(&manifest).to_string().contains("parent      ../1"));
}

#[test]
fn a_parent_that_is_gone_or_another_is_told_wherever_it_is_in_the_chain() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 6] = [
        ("is missing from", |dir| fs::remove_dir_all(dir).unwrap()),
        ("it has no rekindle.img", |dir| {
            for name in names(dir).iter().filter(|name| name.starts_with("rekindle")) {
                fs::remove_file(dir.join(name)).unwrap();
            }
        }),
        ("is not committed", |dir| fs::remove_file(dir.join(COMMIT)).unwrap()),
        ("rekindle-data-0.raw is missing", |dir| fs::remove_file(dir.join(data_name(0))).unwrap()),
        ("and 00000000000000000000000000000001 was built on", |dir| rewrite(dir, [77; 16])),
        ("has been changed or written again", |dir| rewrite(dir, [1; 16])),
    ];
    for (said, damage) in damages {
        let chain = Chain::new();
        chain.add(1, b"counter1");
        chain.add(2, b"counter2");
        // The parent of all has another id.
        if !said.contains("0001") && !said.contains("again") {
            damage(&chain.dir(0));
            refused(&chain, said);
            continue;
        }
        damage(&chain.dir(1));
        refused(
            &chain,
            &said.replace("00000000000000000000000000000001", &CheckpointId::from_bytes([1; 16]).to_string()),
        );
    }
}

/// Another image in place of this one.
fn rewrite(dir: &Path, id: [u8; 16]) {
    let options = CreateOptions { id: CheckpointId::from_bytes(id), replace: true, ..common::options() };
    let writer = ImageWriter::create(ImageDir::open(dir).unwrap(), options).unwrap();
    let manifest = fill(&writer).unwrap();
    writer.commit(manifest).unwrap();
}

#[test]
fn damage_in_a_parent_is_found_and_named() {
    let chain = Chain::new();
    chain.add(1, b"counter1");
    let data = chain.dir(0).join(data_name(0));
    let mut bytes = fs::read(&data).unwrap();
    bytes[3] ^= 1;
    fs::write(&data, bytes).unwrap();
    let report = chain.open(1).unwrap().verify(|_| ());
    assert_eq!(report.problem_count, 1);
    assert_eq!(report.problems[0].file, "rekindle-data-0.raw of its parent");
}

#[test]
fn what_a_worker_says_of_a_parent_is_compared_with_it() {
    type Lie = fn(&mut Manifest);
    fn first(manifest: &mut Manifest) -> &mut Piece {
        &mut manifest.clients[0].allocations[0].pieces[0]
    }
    fn extent(piece: &mut Piece) -> (&mut u32, &mut Extent) {
        match &mut piece.storage {
            Storage::Parent { depth, extent } => (depth, extent),
            other => panic!("{other:?}"),
        }
    }
    let lies: [(&str, Lie); 7] = [
        ("another's piece", |m| *first(m) = m.clients[1].allocations[0].pieces[0]),
        ("another hash", |m| first(m).hash = PieceHash::from_bytes([1; 16])),
        ("another place", |m| extent(first(m)).1.offset = 4096),
        ("another file", |m| extent(first(m)).1.file = 1),
        ("no file", |m| extent(first(m)).1.file = 1000),
        ("too deep", |m| *extent(first(m)).0 = 2),
        ("not deep", |m| *extent(first(m)).0 = 0),
    ];
    for (what, lie) in lies {
        let chain = Chain::new();
        let writer = chain.begin(1);
        let mut manifest = fill(&writer).unwrap();
        lie(&mut manifest);
        assert_eq!(kind(writer.commit(manifest)), ErrorKind::Invalid, "{what}");
        assert_eq!(names(&chain.dir(1)), ["parent"]);
    }
}

#[test]
fn without_a_base_nothing_can_be_said_to_be_in_a_parent() {
    let chain = Chain::new();
    chain.add(1, b"counter!");
    let manifest = chain.open(1).unwrap().manifest().clone();
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    assert_eq!(kind(writer.commit(manifest)), ErrorKind::Invalid);
}

#[test]
fn processes_of_the_same_pid_in_different_namespaces_know_nothing() {
    let chain = Chain::new();
    let writer = chain.begin(1);
    assert_eq!(writer.base().unwrap().known(7).len(), 3);
    assert!(writer.base().unwrap().known(4242).is_empty());
    let mut manifest = fill(&writer).unwrap();
    manifest.clients[1] = Client { index: 1, namespace_pid: 7, ..Client::default() };
    writer.commit(manifest).unwrap();
    assert!(chain.begin(2).base().unwrap().known(7).is_empty());
}

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
    // One of our own comes first.
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
fn a_chain_has_an_end() {
    let chain = Chain::new();
    for n in 1..=limits::MAX_ANCESTORS as u32 {
        chain.add(n, b"counter!");
    }
    let last = limits::MAX_ANCESTORS as u32;
    assert_reads(&chain.open(last).unwrap(), b"counter!");
    fs::create_dir(chain.dir(last + 1)).unwrap();
    let dir = ImageDir::open(chain.dir(last + 1)).unwrap();
    assert_eq!(kind(Base::open(&dir, Path::new(&format!("../{last}")))), ErrorKind::Unsupported);
}

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

/// A new dump into a directory that has an image.
fn replace(dir: &Path, id: [u8; 16], base: bool) -> Result<ImageWriter, ImageError> {
    let dir = ImageDir::open(dir).unwrap();
    let base = if base { Base::find(&dir).unwrap() } else { None };
    let options = CreateOptions { id: CheckpointId::from_bytes(id), replace: true, ..common::options() };
    ImageWriter::create_on(dir, options, base)
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

#[test]
fn an_image_is_not_committed_on_a_parent_that_is_not_as_it_was() {
    type Change = fn(&Chain);
    let changes: [(&str, Change); 5] = [
        ("is missing from", |chain| fs::rename(chain.dir(1), chain.dir(100)).unwrap()),
        ("is not committed", |chain| fs::remove_file(chain.dir(1).join(COMMIT)).unwrap()),
        ("rekindle-data-1.raw is missing", |chain| fs::remove_file(chain.dir(0).join(data_name(1))).unwrap()),
        ("was built on", |chain| {
            fs::rename(chain.dir(1), chain.dir(100)).unwrap();
            fs::create_dir(chain.dir(1)).unwrap();
            common::write(&chain.dir(1));
        }),
        ("has been changed or written again", |chain| {
            // As where there are no locks.
            flatten(&chain.open(1).unwrap(), {
                fs::create_dir(chain.dir(100)).unwrap();
                ImageDir::open(chain.dir(100)).unwrap()
            })
            .unwrap();
            fs::rename(chain.dir(1), chain.dir(101)).unwrap();
            fs::rename(chain.dir(100), chain.dir(1)).unwrap();
        }),
    ];
    for (said, change) in changes {
        let chain = Chain::new();
        chain.add(1, b"counter1");
        let writer = chain.begin(2);
        let manifest = common::fill_with(&writer, b"counter2").unwrap();
        change(&chain);
        let error = writer.commit(manifest).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Parent, "{said}: {error}");
        assert!(error.to_string().contains(said), "{said:?} in: {error}");
        assert_eq!(names(&chain.dir(2)), ["parent"]);
    }
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
        // It may lead to another image, or nowhere, or be gone.
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
    // What needs it no more is built on.
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
