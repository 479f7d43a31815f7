//! Tests of images whose checksums are right and whose content is malicious.

use std::fs;
use std::path::Path;

use proptest::prelude::*;

use crate::decode::Decoder;
use crate::hash::Checksum;
use crate::limits::{FORMAT_VERSION, MAX_DECODED};
use crate::record::{CommitRecord, FileEntry};
use crate::{Client, ErrorKind, Image, ImageError, Manifest, encode, envelope, sample};

/// An image of these messages, with all checksums in order.
fn write(dir: &Path, manifest: &[u8], files: Vec<FileEntry>) {
    let (bytes, checksum) = envelope::seal(envelope::MANIFEST, manifest).unwrap();
    fs::write(dir.join(crate::MANIFEST), &bytes).unwrap();
    write_commit(dir, checksum, bytes.len() as u64, files);
}

fn write_commit(dir: &Path, manifest_hash: Checksum, length: u64, files: Vec<FileEntry>) {
    let record = CommitRecord {
        id: sample::ID,
        manifest_hash,
        manifest_length: length,
        files,
        companion: None,
        others_overwritten: false,
    };
    let message = encode::commit(&record).unwrap();
    let (bytes, _) = envelope::seal(envelope::COMMIT, &message).unwrap();
    fs::write(dir.join(crate::COMMIT), bytes).unwrap();
}

fn open(manifest: &[u8], files: Vec<FileEntry>) -> Result<Image, ImageError> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), manifest, files);
    Image::open(dir.path())
}

fn entry(name: &str, size: u64) -> FileEntry {
    FileEntry { name: name.to_owned(), size }
}

fn empty_manifest() -> Manifest {
    let mut manifest = sample::manifest();
    manifest.id = sample::ID;
    manifest
}

/// The sample's manifest, as it is encoded.
fn sample_message() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    sample::write(dir.path());
    let dir = crate::ImageDir::open(dir.path()).unwrap();
    let opened = envelope::open(&dir, envelope::MANIFEST).unwrap().unwrap();
    opened.message
}

#[test]
fn the_images_made_here_are_accepted_when_nothing_is_wrong() {
    let manifest = encode::manifest(&empty_manifest()).unwrap();
    assert!(open(&manifest, Vec::new()).is_ok());
}

#[test]
fn a_commit_record_cannot_lead_out_of_the_directory() {
    let manifest = encode::manifest(&empty_manifest()).unwrap();
    for name in [
        "/etc/passwd",
        "../rekindle-data-0.raw",
        "rekindle.img",
        "rekindle.commit",
        "inventory.img",
        "",
        "rekindle-data-0.raw\0",
    ] {
        let error = open(&manifest, vec![entry(name, 0)]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name:?}");
    }
}

#[test]
fn a_file_listed_twice_is_refused() {
    let manifest = encode::manifest(&empty_manifest()).unwrap();
    let file = entry("rekindle-data-0.raw", 0);
    let error = open(&manifest, vec![file.clone(), file]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn a_manifest_of_another_id_than_the_commit_record_is_refused() {
    let mut manifest = empty_manifest();
    manifest.id = crate::CheckpointId::from_bytes([9; 16]);
    let error = open(&encode::manifest(&manifest).unwrap(), Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn a_manifest_that_disagrees_with_its_header_is_refused() {
    let mut manifest = empty_manifest();
    manifest.format_version = FORMAT_VERSION + 1;
    let error = open(&encode::manifest(&manifest).unwrap(), Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn every_rule_of_the_writer_holds_for_the_reader() {
    let mut manifest = empty_manifest();
    manifest.clients = vec![Client::default(), Client::default()];
    let error = open(&encode::manifest(&manifest).unwrap(), Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("two clients have index 0"));
}

#[test]
fn an_unknown_field_is_ignored() {
    let mut message = encode::manifest(&empty_manifest()).unwrap();
    // Field 99, bytes, "new".
    message.extend_from_slice(&[0x9a, 0x06, 3, b'n', b'e', b'w']);
    assert!(open(&message, Vec::new()).is_ok());
}

#[test]
fn a_small_file_cannot_take_much_memory() {
    let limit_for = |item: &[u8], count: usize| {
        let mut message = encode::manifest(&empty_manifest()).unwrap();
        message.extend_from_slice(&item.repeat(count));
        open(&message, Vec::new()).unwrap_err().kind()
    };
    // Empty clients: two bytes each.
    assert_eq!(limit_for(&[0x6a, 0], 4 << 20), ErrorKind::TooLarge);
    // Unknown fields.
    let unknown = (MAX_DECODED / 128) as usize;
    assert_eq!(limit_for(&[0xf8, 0x07, 0], unknown), ErrorKind::TooLarge);
}

#[test]
fn nested_groups_are_refused_before_they_are_decoded() {
    let error = open(&[0x7b; 1 << 20], Vec::new()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn an_enormous_hole_does_not_hold_up_a_verification() {
    let dir = tempfile::tempdir().unwrap();
    let file = fs::File::create(dir.path().join("rekindle-data-0.raw")).unwrap();
    // As large as the file system permits.
    let size = [1 << 60, 1 << 50, 1 << 43, 1 << 40].into_iter().find(|size| file.set_len(*size).is_ok()).unwrap();
    let manifest = encode::manifest(&empty_manifest()).unwrap();
    write(dir.path(), &manifest, vec![entry("rekindle-data-0.raw", size)]);
    let report = Image::open(dir.path()).unwrap().verify(|_| ());
    assert!(report.is_good(), "{report:?}");
    // And what lies behind it is found.
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", size / 2).unwrap();
    let report = Image::open(dir.path()).unwrap().verify(|_| ());
    assert_eq!(report.problem_count, 1);
}

#[test]
fn zeros_that_do_not_have_the_hash_of_zeros_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let writer = sample::create(dir.path()).unwrap();
    let mut manifest = sample::fill(&writer).unwrap();
    manifest.clients[0].blobs[0].pieces[0].hash = sample::HASH_KEY.hash(b"not zero");
    writer.commit(manifest).unwrap();
    let report = Image::open(dir.path()).unwrap().verify(|_| ());
    assert_eq!(report.problem_count, 1);
    let region = report.problems[0].region.as_deref();
    assert_eq!(region, Some("content of kind 5 of object 0x88 of client 0"));
}

proptest! {
    /// A manifest may say anything of where and how its pieces are stored, in this image or others.
    #[test]
    fn no_extent_makes_the_reader_panic_or_give_out_what_was_not_hashed(
        extents in proptest::collection::vec(
            (0_u64..9000, 0_u64..20_000, 0_u64..9000, 0_u8..3, 0_u32..3, 0_u32..3, any::<bool>()), 1..5),
    ) {
        let file = tempfile::tempfile()?;
        let data = crate::DataWriter::new(file.try_clone()?, 0, sample::KEY).unwrap();
        let good = crate::DataWriter::with_compression(data, crate::CompressionChoice::Zstd);
        good.append(0, &b"device memory ".repeat(700)).unwrap();
        good.finish().unwrap();
        let reader = crate::DataReader::new(sample::HASH_KEY, [(crate::DataFile::own(0), file)]);
        for (length, offset, stored, method, number, depth, aligned) in extents {
            let compression =
                [crate::Compression::None, crate::Compression::Lz4, crate::Compression::Zstd][usize::from(method)];
            let offset = if aligned { offset / 4096 * 4096 } else { u64::MAX - offset };
            let extent = crate::Extent { file: number, offset, length: stored, compression };
            let storage = crate::Storage::Parent { depth, extent };
            let piece = crate::Piece { offset: 0, length, hash: sample::HASH_KEY.hash(b"not that"), storage };
            prop_assert!(reader.read(&piece, &mut vec![0; length as usize]).is_err());
            let mut manifest = empty_manifest();
            let blob = crate::Blob { size: length, pieces: vec![piece], ..Default::default() };
            manifest.clients.push(Client { blobs: vec![blob], ..Client::default() });
            prop_assert!(open(&encode::manifest(&manifest).unwrap(), Vec::new()).is_err());
        }
    }

    #[test]
    fn no_bytes_make_a_decoder_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Decoder::new("x").manifest(&bytes, FORMAT_VERSION);
        let _ = Decoder::new("x").commit(&bytes);
        let _ = Client::from_bytes(&bytes);
    }

    #[test]
    fn no_file_makes_the_reader_panic(
        manifest in proptest::collection::vec(any::<u8>(), 0..100),
        commit in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        let dir = tempfile::tempdir()?;
        fs::write(dir.path().join(crate::MANIFEST), manifest)?;
        fs::write(dir.path().join(crate::COMMIT), commit)?;
        prop_assert!(Image::open(dir.path()).is_err());
    }

    /// Changes that leave most of the structure alone get further than random bytes.
    #[test]
    fn no_change_to_a_manifest_makes_the_reader_panic(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        thread_local!(static MESSAGE: Vec<u8> = sample_message());
        let mut message = MESSAGE.with(Clone::clone);
        for (at, byte) in changes {
            let at = at.index(message.len());
            message[at] = byte;
        }
        if let Ok(manifest) = Decoder::new("x").manifest(&message, FORMAT_VERSION) {
            let _ = crate::validate::check(&manifest, &[&Default::default()]);
            let _ = manifest.summary_text();
        }
    }
}

impl Manifest {
    fn summary_text(&self) -> String {
        crate::Summary::of(self).to_string()
    }
}
