//! Images of every format version that was ever written stay readable.

#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;

use rekindle_images::*;
use serde_json::Value;

fn fixture(version: u32) -> PathBuf {
    let fixtures = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    fixtures.join(format!("v{version}"))
}

/// Checks that `new` says all that `old` says; `new` may say more.
fn assert_includes(new: &Value, old: &Value, at: &str) {
    match (new, old) {
        (Value::Object(new), Value::Object(old)) => {
            for (key, old) in old {
                assert_includes(&new[key], old, &format!("{at}.{key}"));
            }
        }
        (Value::Array(new), Value::Array(old)) => {
            assert_eq!(new.len(), old.len(), "{at}");
            for (index, (new, old)) in new.iter().zip(old).enumerate() {
                assert_includes(new, old, &format!("{at}[{index}]"));
            }
        }
        _ => assert_eq!(new, old, "{at}"),
    }
}

#[test]
fn every_version_reads_as_it_was_written() {
    for version in 1..=FORMAT_VERSION {
        reads_as_it_was_written(version);
    }
}

fn reads_as_it_was_written(version: u32) {
    let image = Image::open(fixture(version)).unwrap();
    assert_eq!(image.manifest().format_version, version);
    assert_eq!(matches!(image.manifest().hash_key, HashKey::Xxh3(_)), version == 1);
    let report = image.verify(|_| ());
    assert!(report.is_good(), "{report:?}");
    assert_eq!((report.pieces, report.code_images), (12, 2));

    let expected = std::fs::read_to_string(fixture(version).join("summary.json")).unwrap();
    let expected = serde_json::from_str(&expected).unwrap();
    let summary = serde_json::to_value(image.summary()).unwrap();
    assert_includes(&summary, &expected, "summary");

    let client = image.client(1).unwrap();
    assert_eq!(client.socket_ids, [31, 33]);
    assert_eq!((client.ring.size, client.ring.head), (1 << 20, 99_999));
    assert_eq!(client.windows[1].kind, WindowKind::Pinned);
    let object = &client.objects[11];
    assert_eq!((object.sequence, &*object.args), (33, &[11; 11][..]));
    let code = image.read_code(client.objects[0].code[0]).unwrap();
    assert_eq!(code, b"\x7fELF, or so it seems");
    let allocation = &client.allocations[0];
    assert_eq!(allocation.address, 0x2000_0020_0000);
    let mut content = vec![0; allocation.pieces[2].length as usize];
    let reader = image.data_reader().unwrap();
    reader.read(&allocation.pieces[2], &mut content).unwrap();
    assert_eq!(content, b"the end");
}

/// A piece of the first version that was changed is found by its own hash.
#[test]
fn a_changed_byte_in_an_image_of_version_1_is_found() {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(1)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    let data = dir.path().join(data_name(1));
    let mut bytes = std::fs::read(&data).unwrap();
    bytes[3] ^= 1;
    std::fs::write(&data, bytes).unwrap();
    let image = Image::open(dir.path()).unwrap();
    assert_eq!(image.verify(|_| ()).problem_count, 1);
    let piece = image.client(1).unwrap().allocations[0].pieces[0];
    let mut buffer = vec![0; piece.length as usize];
    let error = image.data_reader().unwrap().read(&piece, &mut buffer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn there_is_a_fixture_of_the_current_version() {
    assert!(fixture(FORMAT_VERSION).is_dir());
}

#[test]
#[ignore = "writes the fixture of a new format version; an existing one is never changed"]
fn write_fixture() {
    let dir = fixture(FORMAT_VERSION);
    std::fs::create_dir(&dir).unwrap();
    common::write(&dir);
    let summary = Image::open(&dir).unwrap().summary();
    let summary = serde_json::to_string_pretty(&summary).unwrap();
    std::fs::write(dir.join("summary.json"), summary + "\n").unwrap();
}
