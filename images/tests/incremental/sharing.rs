//! Content that an image has in those that it builds on, and how it is read.

use std::fs;
use std::path::Path;

use rekindle_images::*;

use crate::chain::{Chain, assert_reads, depths, read};
use crate::common::{self, fill, kind};

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
        // Known content is found again, and each new piece goes to another file.
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

/// An interposer of a few megabytes, in each image of a chain that the same processes are dumped into.
#[test]
fn the_libraries_of_a_build_are_written_once_and_every_image_has_them() {
    let chain = Chain::new();
    let interposer = vec![0x7f; 1 << 20];
    let build = |writer: &ImageWriter| {
        let code = writer.put_code(&interposer).unwrap();
        let libraries = vec![Library { name: "libcuda.so.1".to_owned(), code }];
        Build { id: [0xb1; 16], directory: "/usr/lib/rekindle/builds/b1".into(), libraries }
    };
    for n in 1..=2 {
        let writer = chain.begin(n);
        let manifest = Manifest { builds: vec![build(&writer)], ..fill(&writer).unwrap() };
        writer.commit(manifest).unwrap();
    }
    let library = |image: &Image| {
        let [build] = &image.manifest().builds[..] else { panic!("{:?}", image.manifest().builds) };
        assert_eq!((build.id, build.directory.as_path()), ([0xb1; 16], Path::new("/usr/lib/rekindle/builds/b1")));
        assert_eq!(build.libraries[0].name, "libcuda.so.1");
        image.read_code(build.libraries[0].code).unwrap()
    };
    let image = chain.open(2).unwrap();
    assert!(library(&image) == interposer);
    assert!(image.files().iter().all(|it| it.size < 1 << 20), "{:?}", image.files());
    let summary = image.summary();
    assert_eq!(summary.builds, ["b1".repeat(16)]);
    assert!(summary.bytes.code < 1 << 20, "it is not the programs' code: {}", summary.bytes.code);
    assert!(summary.to_string().contains(&format!("libraries   build {}", "b1".repeat(16))), "{summary}");
    flatten_in_place(&chain.dir(2)).unwrap();
    fs::remove_dir_all(chain.dir(1)).unwrap();
    assert!(library(&chain.open(2).unwrap()) == interposer);
    // A library without its content is no library.
    let writer = chain.begin(3);
    let missing =
        Build { libraries: vec![Library { name: "x".to_owned(), code: CodeHash::of(b"?") }], ..build(&writer) };
    let manifest = Manifest { builds: vec![missing], ..fill(&writer).unwrap() };
    assert!(writer.commit(manifest).is_err());
}
