//! Images, and the program.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};

use rekindle_images::{
    Allocation, Client, CreateOptions, DataWriter, Image, ImageDir, ImageWriter, Manifest, Protocol,
};

/// Without what the tester has set.
pub(crate) fn rekindle() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("AWS_") || name.starts_with("REKINDLE_") || name.to_lowercase().ends_with("_proxy") {
            command.env_remove(name);
        }
    }
    command.env_remove("CREDENTIALS_DIRECTORY");
    command.arg("images");
    command
}

pub(crate) fn ran(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// What a command prints that succeeds.
pub(crate) fn said(command: &mut Command) -> String {
    let (code, out, err) = ran(command);
    assert_eq!(code, 0, "{command:?}: {out}{err}");
    out
}

pub(crate) fn json(command: &mut Command) -> serde_json::Value {
    serde_json::from_str(&said(command.arg("--json"))).unwrap()
}

/// Content that does not repeat, other for each seed.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..length.div_ceil(8)).flat_map(|_| next()).take(length).collect()
}

/// An image with a piece of 300 KiB for each of these numbers, and a file as CRIU leaves them.
pub(crate) fn write_image(dir: &Path, numbers: &[u64]) {
    fs::create_dir_all(dir).unwrap();
    let writer = ImageWriter::create(ImageDir::open(dir).unwrap(), CreateOptions::new().unwrap()).unwrap();
    let (_, file) = writer.data_file(0).unwrap();
    let data = DataWriter::new(file, 0, writer.key()).unwrap();
    let mut pieces = Vec::new();
    for (number, at) in numbers.iter().zip(0..) {
        pieces.push(data.append(at * (300 << 10), &noise(*number, 300 << 10)).unwrap());
    }
    data.finish().unwrap();
    let mut manifest = Manifest::new(1_700_000_000, Protocol::Stop);
    manifest.host.name = "node7".to_owned();
    let size = numbers.len() as u64 * (300 << 10);
    let allocation = Allocation { address: 0x2000_0000_0000, size, pieces, ..Allocation::default() };
    manifest.clients = vec![Client { command: "train".to_owned(), allocations: vec![allocation], ..Client::default() }];
    writer.commit(manifest).unwrap();
    fs::write(dir.join("inventory.img"), "of CRIU").unwrap();
    fs::set_permissions(dir.join("inventory.img"), fs::Permissions::from_mode(0o640)).unwrap();
}

/// Makes sure that two directories have the same files, and the image in the second is good.
pub(crate) fn are_equal(one: &Path, other: &Path) {
    let files = |dir: &Path| {
        let mut files: Vec<_> = fs::read_dir(dir)
            .unwrap()
            .map(|entry| {
                let path = entry.unwrap().path();
                let status = fs::metadata(&path).unwrap();
                let name = path.file_name().unwrap().to_owned();
                (name, status.mode(), status.mtime(), status.mtime_nsec(), fs::read(&path).unwrap())
            })
            .collect();
        files.sort();
        files
    };
    assert!(files(one) == files(other));
    assert!(Image::open(other).unwrap().verify(|_| ()).is_good());
}
