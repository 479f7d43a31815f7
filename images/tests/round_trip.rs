//! Reading an image gives the content that was written.

#![allow(clippy::unwrap_used)]

mod common;

use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::Mutex;

use common::{CODE, HASH_KEY, ID, KEY, content};
use rekindle_images::*;

#[test]
fn an_image_reads_back_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    let mut expected = common::fill(&writer).unwrap();
    let committed = writer.commit(expected.clone()).unwrap();

    let image = Image::open(dir.path()).unwrap();
    let manifest = image.manifest();
    // The writer fills these in.
    assert_eq!((manifest.id, manifest.hash_key), (ID, HASH_KEY));
    assert_eq!(manifest.format_version, FORMAT_VERSION);
    expected.id = ID;
    expected.hash_key = HASH_KEY;
    expected.code = manifest.code.clone();
    assert_eq!(*manifest, expected);

    assert_eq!(committed.id, ID);
    assert_eq!(committed.manifest_hash, image.manifest_hash());
    let names = common::names(dir.path());
    assert_eq!(committed.files, names.len());
    let size = |name: &String| dir.path().join(name).metadata().unwrap().len();
    assert_eq!(committed.bytes, names.iter().map(size).sum::<u64>());
}

#[test]
fn native_processes_are_in_the_manifest_and_in_its_summary_and_none_is_there_twice() {
    let native = |namespace_pid| Native {
        pid: 4711,
        namespace_pid,
        command: "train".to_owned(),
        restore_thread: 9,
        driver_version: 13_000,
        gpus: vec![NativeGpu { uuid: [7; 16], name: "NVIDIA H200".to_owned() }],
    };
    let commit = |natives: Vec<Native>| {
        let dir = tempfile::tempdir().unwrap();
        let options = CreateOptions::new().unwrap();
        let writer = ImageWriter::create(ImageDir::open(dir.path()).unwrap(), options).unwrap();
        writer.commit(Manifest { natives, ..Manifest::new(0, Protocol::Stop) }).map(|_| dir)
    };
    let natives = vec![native(7), native(8)];
    let dir = commit(natives.clone()).unwrap();
    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.manifest().natives, natives);
    let summary = Summary::of(image.manifest());
    assert_eq!(summary.natives[1].namespace_pid, 8);
    assert!(summary.to_string().contains("train (pid 4711), by the driver's own checkpoint"), "{summary}");
    for bad in [vec![native(7), native(7)], vec![native(0)], vec![Native { restore_thread: 0, ..native(7) }]] {
        assert!(commit(bad).unwrap_err().to_string().contains("native process"));
    }
}

#[test]
fn content_reads_back_piece_by_piece_and_in_one_go() {
    let dir = tempfile::tempdir().unwrap();
    common::write(dir.path());
    let image = Image::open(dir.path()).unwrap();
    let reader = image.data_reader().unwrap();
    let allocation = &image.client(1).unwrap().allocations[0];

    let mut got = vec![0xff; content().len()];
    for piece in &allocation.pieces {
        let range = piece.offset as usize..(piece.offset + piece.length) as usize;
        reader.read(piece, &mut got[range]).unwrap();
    }
    assert_eq!(got, content());

    for threads in [1, 2, 8] {
        let mut got = vec![0xff; content().len()];
        let threads = NonZeroUsize::new(threads).unwrap();
        reader.read_all(&allocation.pieces, &mut got, threads).unwrap();
        assert_eq!(got, content());
    }
}

#[test]
fn a_buffer_of_another_length_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    common::write(dir.path());
    let image = Image::open(dir.path()).unwrap();
    let reader = image.data_reader().unwrap();
    let pieces = &image.client(0).unwrap().allocations[0].pieces;
    let length = content().len();
    for wrong in [0, length - 1, length + 1] {
        let error = reader.read_all(pieces, &mut vec![0; wrong], NonZeroUsize::MIN).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    let error = reader.read(&pieces[0], &mut [0; 3]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
}

#[test]
fn code_is_stored_once_under_the_name_of_its_content() {
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    let hash = writer.put_code(CODE[0]).unwrap();
    assert_eq!(writer.put_code(CODE[0]).unwrap(), hash);
    let length = CODE[0].len() as u64;
    assert!(writer.code_file(hash, length).unwrap().is_none());
    writer.commit(common::manifest()).unwrap();

    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.manifest().code, [CodeImage { hash, size: length, parent_depth: 0 }]);
    assert_eq!(image.read_code(hash).unwrap(), CODE[0]);
    let file = dir.path().join(format!("rekindle-code-{hash}.bin"));
    assert_eq!(std::fs::read(file).unwrap(), CODE[0]);
}

#[test]
fn another_process_may_fill_a_code_file() {
    use std::io::Write;
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    let hash = CodeHash::of(CODE[1]);
    let mut file = writer.code_file(hash, CODE[1].len() as u64).unwrap().unwrap();
    file.write_all(CODE[1]).unwrap();
    writer.commit(common::manifest()).unwrap();
    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.read_code(hash).unwrap(), CODE[1]);
}

#[test]
fn a_directory_may_be_given_by_its_descriptor() {
    let dir = tempfile::tempdir().unwrap();
    let fd = std::fs::File::open(dir.path()).unwrap();
    let open = || ImageDir::from_fd(fd.as_fd(), "the image directory").unwrap();
    let writer = ImageWriter::create(open(), common::options()).unwrap();
    let manifest = common::fill(&writer).unwrap();
    // The directory may have moved meanwhile.
    let moved = tempfile::tempdir().unwrap();
    std::fs::rename(dir.path(), moved.path()).unwrap();
    writer.commit(manifest).unwrap();
    assert!(Image::open_at(open()).unwrap().verify(|_| ()).is_good());
    assert!(Image::open(moved.path()).is_ok());
}

#[test]
fn an_image_without_clients_is_an_image() {
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    writer.commit(common::manifest()).unwrap();
    assert!(!common::is_refused(dir.path()));
}

#[test]
fn a_verification_counts_what_it_read() {
    let dir = tempfile::tempdir().unwrap();
    common::write(dir.path());
    let image = Image::open(dir.path()).unwrap();
    let seen = Mutex::new(Vec::new());
    let report = image.verify(|progress| seen.lock().unwrap().push(progress));
    assert!(report.is_good(), "{report:?}");
    assert_eq!((report.pieces, report.code_images), (12, 2));
    let code: u64 = CODE.iter().map(|code| code.len() as u64).sum();
    assert_eq!(report.bytes, 2 * (280 + 7 + 8) + code);
    let last = seen.lock().unwrap().iter().map(|it| it.done).max();
    assert_eq!(last, Some(report.bytes));
    assert!(report.into_result().is_ok());
}

#[test]
fn large_content_is_cut_and_verified_by_several_threads() {
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    let content: Vec<u8> = (0..20_000_001u32).map(|n| (n ^ n >> 8) as u8).collect();
    let data = DataWriter::of([writer.data_file(0).unwrap()], writer.key()).unwrap();
    let pieces = data.append_all(&content).unwrap();
    assert_eq!(pieces.len(), 5);
    data.finish().unwrap();
    let mut manifest = common::manifest();
    manifest.clients = vec![Client {
        allocations: vec![Allocation { size: content.len() as u64, pieces, ..Allocation::default() }],
        ..Client::default()
    }];
    writer.commit(manifest).unwrap();

    let image = Image::open(dir.path()).unwrap();
    assert!(image.verify(|_| ()).is_good());
    let mut got = vec![0; content.len()];
    let threads = NonZeroUsize::new(3).unwrap();
    image.data_reader().unwrap().read_all(&image.client(0).unwrap().allocations[0].pieces, &mut got, threads).unwrap();
    assert!(got == content);
}

#[test]
fn only_the_owner_may_read_an_image() {
    let dir = tempfile::tempdir().unwrap();
    common::write(dir.path());
    for name in common::names(dir.path()) {
        let mode = dir.path().join(&name).metadata().unwrap().permissions();
        assert_eq!(mode.mode() & 0o7777, 0o600, "{name}");
    }
}

#[test]
fn a_client_travels_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    let client = common::client(&writer, 5, &[CodeHash::of(b"x")]).unwrap();
    assert_eq!(Client::from_bytes(&client.to_bytes().unwrap()).unwrap(), client);
}

#[test]
fn a_summary_says_what_is_in_an_image() {
    let dir = tempfile::tempdir().unwrap();
    common::write(dir.path());
    let summary = Image::open(dir.path()).unwrap().summary();
    assert_eq!(summary.created_utc, "2025-12-31T23:59:59Z");
    assert_eq!((summary.protocol, summary.format_version), ("clone", FORMAT_VERSION));
    let size = content().len() as u64;
    let bytes = summary.clients[0].bytes;
    assert_eq!((bytes.device, bytes.globals, bytes.pinned), (size, 8, 8192));
    assert_eq!((bytes.stored, bytes.zero), (295, 5000 + 4096 + 16));
    assert_eq!(summary.bytes.device, 2 * size);
    // Shared code counts once.
    assert_eq!(summary.bytes.code, bytes.code);
    let objects: Vec<_> = summary.objects.iter().map(|it| (it.kind.as_str(), it.count)).collect();
    assert_eq!(objects, [("module", 3), ("stream", 21)]);

    let json = serde_json::to_value(&summary).unwrap();
    assert_eq!(json["id"], ID.to_string());
    assert_eq!(json["clients"][1]["pid"], 4243);
    assert_eq!(json["phases"][2]["name"], "stall");
    assert_eq!(json["stall_ns"], json["phases"][2]["duration_ns"]);

    let text = summary.to_string();
    for part in ["clone: free memory suffices", "NVIDIA H200", "train", "quiesce", "of the application by its GPU"] {
        assert!(text.contains(part), "{part:?} in:\n{text}");
    }
}

#[test]
fn a_summary_does_not_command_the_terminal() {
    let mut manifest = common::manifest();
    manifest.host.name = "\x1b]0;owned\x07".to_owned();
    manifest.clients = vec![Client { command: "a\nb\x1b[2J".to_owned(), ..Client::default() }];
    let text = Summary::of(&manifest).to_string();
    assert!(text.contains("?]0;owned?") && text.contains("a?b?[2J"), "{text}");
}

/// So many that an order by text, where 10 comes before 9, would show.
#[test]
fn twelve_clients_come_back_in_their_order_each_with_its_own_content() {
    let dir = tempfile::tempdir().unwrap();
    let writer = common::create(dir.path()).unwrap();
    let mut manifest = common::manifest();
    let content = |index: u32| vec![index as u8 + 1; 100 + index as usize];
    for index in 0..12 {
        let mut client = common::client(&writer, index, &[]).unwrap();
        let data = DataWriter::of([writer.data_file(100 + index).unwrap()], writer.key()).unwrap();
        client.blobs[0].pieces = data.append_all(&content(index)).unwrap();
        client.blobs[0].size = content(index).len() as u64;
        data.finish().unwrap();
        manifest.clients.push(client);
    }
    writer.commit(manifest).unwrap();

    let image = Image::open(dir.path()).unwrap();
    let indices: Vec<u32> = image.manifest().clients.iter().map(|it| it.index).collect();
    assert_eq!(indices, (0..12).collect::<Vec<_>>());
    assert!(image.data_files().is_sorted());
    let reader = image.data_reader().unwrap();
    for client in &image.manifest().clients {
        assert!(client.objects.is_sorted_by_key(|it| it.sequence));
        assert_eq!(Client::from_bytes(image.encoded_client(client.index).unwrap()).unwrap(), *client);
        let mut got = vec![0; content(client.index).len()];
        reader.read_all(&client.blobs[0].pieces, &mut got, NonZeroUsize::MIN).unwrap();
        assert_eq!(got, content(client.index));
    }
    assert!(image.encoded_client(12).is_err());
    assert!(image.verify(|_| ()).is_good());
}

#[test]
fn content_past_4_gib_of_a_data_file_reads_back() {
    // The file is sparse: what is before takes no room.
    let file = tempfile::tempfile().unwrap();
    file.set_len(5 << 30).unwrap();
    let data = DataWriter::new(file.try_clone().unwrap(), 0, KEY).unwrap();
    let piece = data.append(7 << 30, &content()[..280]).unwrap();
    assert!(matches!(piece.storage, Storage::Stored(extent) if extent.offset >= 5 << 30));
    data.finish().unwrap();
    let mut got = vec![0; 280];
    DataReader::new(HASH_KEY, [(DataFile::own(0), file)]).read(&piece, &mut got).unwrap();
    assert_eq!(got, content()[..280]);
}

#[test]
fn compressed_content_reads_back_and_damage_to_it_is_found() {
    for choice in [CompressionChoice::Lz4, CompressionChoice::Zstd] {
        let dir = tempfile::tempdir().unwrap();
        let writer = common::create(dir.path()).unwrap();
        let mut manifest = common::manifest();
        let content = b"device memory ".repeat(1 << 19);
        let data = DataWriter::of([writer.data_file(0).unwrap()], writer.key()).unwrap().with_compression(choice);
        let pieces = data.append_all(&content).unwrap();
        data.finish().unwrap();
        let blob = Blob { size: content.len() as u64, pieces, ..Blob::default() };
        manifest.clients.push(Client { blobs: vec![blob], ..Client::default() });
        let committed = writer.commit(manifest).unwrap();
        assert!(committed.bytes < content.len() as u64 / 4, "{committed:?}");

        let check = |dir: &std::path::Path| {
            let image = Image::open(dir).unwrap();
            let report = image.verify(|_| ());
            assert!(report.is_good(), "{report:?}");
            let bytes = image.summary().bytes;
            assert!(bytes.compressed > 0 && bytes.compressed == bytes.stored);
            let mut got = vec![0; content.len()];
            let pieces = &image.manifest().clients[0].blobs[0].pieces;
            image.data_reader().unwrap().read_all(pieces, &mut got, NonZeroUsize::MIN).unwrap();
            assert!(got == content);
        };
        check(dir.path());
        // The content stays compressed where it is written again.
        let out = tempfile::tempdir().unwrap();
        flatten(&Image::open(dir.path()).unwrap(), ImageDir::open(out.path()).unwrap()).unwrap();
        check(out.path());

        let path = dir.path().join(data_name(0));
        let bytes = std::fs::read(&path).unwrap();
        let image = Image::open(dir.path()).unwrap();
        let (_, extent) = image.manifest().clients[0].blobs[0].pieces[1].storage.place().unwrap();
        for at in (0..extent.length).step_by(extent.length as usize / 12 + 1).chain([extent.length - 1]) {
            let mut changed = bytes.clone();
            changed[(extent.offset + at) as usize] ^= 0x10;
            std::fs::write(&path, &changed).unwrap();
            assert_eq!(image.verify(|_| ()).problem_count, 1, "{choice}, byte {at}");
        }
    }
}
