//! Whatever is changed, cut off or taken away is found.

#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rekindle_images::*;

fn image() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    common::write(dir.path());
    assert!(!common::is_refused(dir.path()));
    dir
}

/// Flips `bits` of each byte of the file in turn, and expects each change to be found.
fn flip_each_byte(dir: &Path, name: &str, masks: &[u8]) {
    let path = dir.join(name);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    for (at, &byte) in (0..).zip(&fs::read(&path).unwrap()) {
        for mask in masks {
            file.write_all_at(&[byte ^ mask], at).unwrap();
            assert!(common::is_refused(dir), "{name} byte {at} ^ {mask:#x}");
        }
        file.write_all_at(&[byte], at).unwrap();
    }
    assert!(!common::is_refused(dir));
}

#[test]
fn a_flipped_bit_of_manifest_or_commit_record_is_found() {
    let dir = image();
    let bits: Vec<u8> = (0..8).map(|bit| 1 << bit).collect();
    flip_each_byte(dir.path(), MANIFEST, &bits);
    flip_each_byte(dir.path(), COMMIT, &bits);
}

#[test]
fn a_changed_byte_of_content_or_code_is_found_padding_included() {
    let dir = image();
    for name in common::names(dir.path()) {
        if name != MANIFEST && name != COMMIT {
            flip_each_byte(dir.path(), &name, &[0x10]);
        }
    }
}

#[test]
fn a_bad_piece_is_named() {
    let dir = image();
    let path = dir.path().join(data_name(1));
    let file = OpenOptions::new().write(true).open(path).unwrap();
    // The second stored piece of the allocation lies in the second block.
    file.write_all_at(b"X", 4096).unwrap();
    let report = Image::open(dir.path()).unwrap().verify(|_| ());
    assert_eq!(report.problem_count, 1);
    let problem = &report.problems[0];
    assert_eq!(problem.file, "rekindle-data-1.raw");
    assert_eq!(problem.offset, Some(4096));
    assert_eq!(problem.region.as_deref(), Some("allocation 0x200000200000 on device 0 of client 1"));
    let error = report.into_result().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(
        error.to_string(),
        "rekindle-data-1.raw is corrupt at byte 4096: content does not match its hash \
         (allocation 0x200000200000 on device 0 of client 1)"
    );
}

#[test]
fn the_first_of_several_bad_pieces_comes_first() {
    let dir = image();
    for (index, offset) in [(1, 0), (0, 4096), (0, 1)] {
        let path = dir.path().join(data_name(index));
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(b"\xff", offset).unwrap();
    }
    let report = Image::open(dir.path()).unwrap().verify(|_| ());
    assert_eq!(report.problem_count, 3);
    let places: Vec<_> = report.problems.iter().map(|it| (it.file.as_str(), it.offset)).collect();
    assert_eq!(
        places,
        [("rekindle-data-0.raw", Some(0)), ("rekindle-data-0.raw", Some(4096)), ("rekindle-data-1.raw", Some(0)),]
    );
}

#[test]
fn a_damaged_piece_is_never_handed_out() {
    let dir = image();
    let image = Image::open(dir.path()).unwrap();
    let reader = image.data_reader().unwrap();
    let file = OpenOptions::new().write(true).open(dir.path().join(data_name(0))).unwrap();
    let piece = &image.client(0).unwrap().allocations[0].pieces[0];
    let mut buffer = vec![0; piece.length as usize];

    file.write_all_at(b"X", 0).unwrap();
    let error = reader.read(piece, &mut buffer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    // Cut while it is being read.
    file.set_len(10).unwrap();
    let error = reader.read(piece, &mut buffer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let error = image.data_reader().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn an_image_cut_at_any_length_is_refused() {
    for name in common::names(image().path()) {
        let dir = image();
        let path = dir.path().join(&name);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        for length in (0..path.metadata().unwrap().len()).rev() {
            file.set_len(length).unwrap();
            let error = Image::open(dir.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}, {length} bytes");
        }
    }
}

#[test]
fn a_file_that_grew_is_refused() {
    for name in common::names(image().path()) {
        let dir = image();
        let path = dir.path().join(&name);
        let length = path.metadata().unwrap().len();
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(length + 1).unwrap();
        let error = Image::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}");
    }
}

#[test]
fn a_missing_file_is_named() {
    for name in common::names(image().path()) {
        let dir = image();
        fs::remove_file(dir.path().join(&name)).unwrap();
        let error = Image::open(dir.path()).unwrap_err();
        if name == COMMIT {
            assert_eq!(error.kind(), ErrorKind::Uncommitted);
            assert!(error.to_string().contains("the dump did not finish"));
        } else {
            assert_eq!(error.kind(), ErrorKind::Missing, "{name}");
            assert!(error.to_string().contains(&name), "{error}");
        }
    }
}

#[test]
fn a_file_exchanged_for_a_link_or_a_pipe_is_refused() {
    for name in common::names(image().path()) {
        let dir = image();
        let path = dir.path().join(&name);
        let elsewhere = dir.path().join("elsewhere");
        fs::rename(&path, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        let error = Image::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name} as a link");

        fs::remove_file(&path).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.unwrap().success());
        let error = Image::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{name} as a pipe");
    }
}

#[test]
fn a_commit_record_of_another_checkpoint_is_refused() {
    let (one, other) = (image(), tempfile::tempdir().unwrap());
    let mut options = common::options();
    options.id = CheckpointId::random().unwrap();
    let writer = ImageWriter::create(ImageDir::open(other.path()).unwrap(), options).unwrap();
    let manifest = common::fill(&writer).unwrap();
    writer.commit(manifest).unwrap();
    fs::copy(other.path().join(COMMIT), one.path().join(COMMIT)).unwrap();
    let error = Image::open(one.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn a_directory_without_anything_of_ours_is_not_an_image() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("inventory.img"), b"CRIU").unwrap();
    let error = Image::open(dir.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotAnImage);
    assert!(!error.kind().is_bad_image());
}

#[test]
fn what_a_killed_dump_left_is_uncommitted_not_foreign() {
    for name in ["rekindle-data-0.raw", "rekindle.img.tmp", "rekindle-code-00000000000000000000000000000000.bin"] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(name), b"").unwrap();
        let error = Image::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Uncommitted, "{name}");
    }
}

#[test]
fn a_newer_format_is_refused_by_number_whatever_it_holds() {
    let dir = image();
    for (name, length) in [(COMMIT, 25), (MANIFEST, 40)] {
        let path = dir.path().join(name);
        let mut bytes = fs::read(&path).unwrap();
        bytes[8..12].copy_from_slice(&(FORMAT_VERSION + 6).to_le_bytes());
        fs::write(&path, &bytes).unwrap();
        let error = Image::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NewerFormat);
        assert_eq!(
            error.to_string(),
            format!(
                "{name} has format version {}, and this program reads up to {FORMAT_VERSION}; use a newer rekindle",
                FORMAT_VERSION + 6
            )
        );
        // Its header may be all that we understand of it.
        bytes.truncate(length.max(40));
        fs::write(&path, &bytes).unwrap();
        let error = Image::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NewerFormat);
    }
}

#[test]
fn a_header_cannot_ask_for_more_memory_than_the_limit() {
    for (name, limit) in [(MANIFEST, limits::MAX_MANIFEST), (COMMIT, limits::MAX_COMMIT)] {
        for claimed in [limit + 1, u64::MAX - 40, u64::MAX] {
            let dir = image();
            let path = dir.path().join(name);
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&claimed.to_le_bytes(), 16).unwrap();
            // A file that is as long as its header says, where that can be.
            if claimed == limit + 1 {
                file.set_len(claimed + 40).unwrap();
            }
            let error = Image::open(dir.path()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TooLarge, "{name}, {claimed}");
        }
    }
}
