//! A client's record of any content, and a directory whose manifest and commit record are these bytes.

#![no_main]

use std::fs;

use libfuzzer_sys::fuzz_target;
use rekindle_images::{COMMIT, Client, Image, MANIFEST, data_name};

fuzz_target!(|data: &[u8]| {
    if let Ok(client) = Client::from_bytes(data) {
        let bytes = client.to_bytes().expect("what was read can be written");
        assert_eq!(Client::from_bytes(&bytes).expect("what was written can be read"), client);
    }
    // The first byte says how much of the rest is the manifest.
    let Some((&share, data)) = data.split_first() else { return };
    let (manifest, commit) = data.split_at(data.len() * usize::from(share) / 256);
    let Ok(dir) = tempfile::tempdir() else { return };
    let last_restore = ("rekindle-restore.json", data);
    let written = [(MANIFEST, manifest), (COMMIT, commit), (data_name(0).as_str(), data), last_restore]
        .iter()
        .all(|(name, bytes)| fs::write(dir.path().join(name), bytes).is_ok());
    if written && let Ok(image) = Image::open(dir.path()) {
        image.verify(|_| ());
        let _ = image.last_restore().map(|it| it.to_string());
    }
});
