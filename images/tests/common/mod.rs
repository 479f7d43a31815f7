//! A small image with something of everything, for the tests.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;

use rekindle_images::*;

pub(crate) const ID: CheckpointId = CheckpointId::from_bytes(*b"checkpoint no. 1");
pub(crate) const KEY: content::ContentKey = content::ContentKey::from_bytes(*b"sixteen byte key");
pub(crate) const HASH_KEY: HashKey = HashKey::Content(KEY);
pub(crate) const CODE: [&[u8]; 2] = [b"\x7fELF, or so it seems", b".version 8.0 // PTX"];
pub(crate) const UUID: [u8; 16] = [0x11; 16];

pub(crate) fn options() -> CreateOptions {
    CreateOptions { id: ID, key: KEY, replace: false, companion: None, compression: CompressionChoice::Off }
}

pub(crate) fn create(dir: &Path) -> Result<ImageWriter, ImageError> {
    ImageWriter::create(ImageDir::open(dir)?, options())
}

/// Writes the sample image, as a daemon and two workers would.
pub(crate) fn write(dir: &Path) -> Committed {
    let writer = create(dir).unwrap();
    let manifest = fill(&writer).unwrap();
    writer.commit(manifest).unwrap()
}

/// All of the sample image but its commit.
pub(crate) fn fill(writer: &ImageWriter) -> Result<Manifest, ImageError> {
    fill_with(writer, b"counter!")
}

/// The same with this as the first client's global.
pub(crate) fn fill_with(writer: &ImageWriter, counter: &[u8; 8]) -> Result<Manifest, ImageError> {
    let code = [writer.put_code(CODE[0])?, writer.put_code(CODE[1])?];
    let mut manifest = manifest();
    let first = client_with(writer, 0, &[code[0], code[1]], counter)?;
    manifest.clients = vec![first, client(writer, 1, &[code[0]])?];
    Ok(manifest)
}

/// The content of the allocation of the sample's clients: text, zeros, text.
pub(crate) fn content() -> Vec<u8> {
    let mut content = b"device memory ".repeat(20);
    content.resize(content.len() + 5000, 0);
    content.extend_from_slice(b"the end");
    content
}

/// A manifest without clients.
pub(crate) fn manifest() -> Manifest {
    let mut manifest = Manifest::new(1_767_225_599, Protocol::Clone);
    manifest.rekindle_version = "0.1.0".to_owned();
    manifest.protocol_reason = "free memory suffices".to_owned();
    manifest.host = Host {
        name: "node7".to_owned(),
        driver_version: "CUDA 13.0".to_owned(),
        driver_build: "580.159.04".to_owned(),
        gpus: vec![Gpu {
            uuid: UUID,
            name: "NVIDIA H200".to_owned(),
            compute_major: 9,
            compute_minor: 0,
            total_memory: 141 << 30,
            pci: "0000:1b:00.0".to_owned(),
            multiprocessors: 132,
        }],
    };
    manifest.phases = [PhaseName::Quiesce, PhaseName::Copy, PhaseName::Stall]
        .into_iter()
        .zip(1..)
        .map(|(name, n)| Phase { name, start: n * 1_000_000, duration: n * 500_000, bytes: n << 20 })
        .collect();
    manifest
}

/// A client, its content written to the data file of the same number.
pub(crate) fn client(writer: &ImageWriter, index: u32, code: &[CodeHash]) -> Result<Client, ImageError> {
    client_with(writer, index, code, b"counter!")
}

fn client_with(writer: &ImageWriter, index: u32, code: &[CodeHash], counter: &[u8; 8]) -> Result<Client, ImageError> {
    let known = writer.base().map(|base| base.known(7 + index)).unwrap_or_default();
    let data = DataWriter::of([writer.data_file(index)?], writer.key())?.with_known(known);
    let content = content();
    let (text, zeros) = (280, 5280);
    let allocation = vec![
        data.append(0, &content[..text])?,
        data.append(text as u64, &content[text..zeros])?,
        data.append(zeros as u64, &content[zeros..])?,
    ];
    let global = vec![data.append(0, counter)?];
    data.finish()?;
    let zero = |length: usize| Piece {
        offset: 0,
        length: length as u64,
        hash: HashKey::from(writer.key()).hash(&vec![0; length]),
        storage: Storage::Zero,
    };
    Ok(Client {
        index,
        pid: 4242 + index,
        namespace_pid: 7 + index,
        command: "train".to_owned(),
        wire_version: 1,
        socket_path: "/run/rekindle/rekindled.sock".into(),
        socket_ids: vec![31, 32 + index],
        settings: vec![Setting { name: "CUDA_DEVICE_MAX_CONNECTIONS".to_owned(), value: "1".to_owned() }],
        gpus: vec![ClientGpu { ordinal: 0, uuid: UUID }],
        ring: Ring { size: 1 << 20, head: 99_999 },
        shared_state: vec![1, 2, 3],
        worker_version: 1,
        worker_state: vec![4, 5],
        windows: vec![
            Window { kind: WindowKind::Device, address: 0x2000_0000_0000, size: 64 << 30 },
            Window { kind: WindowKind::Pinned, address: 0x2100_0000_0000, size: 1 << 30 },
        ],
        object_kinds: vec![
            ObjectKind { kind: 1, name: "module".to_owned() },
            ObjectKind { kind: 2, name: "stream".to_owned() },
        ],
        // Ten and more, so that an order by text would show.
        objects: (0..12)
            .map(|n| Object {
                sequence: n * 3,
                kind: if n < code.len() as u64 { 1 } else { 2 },
                handle: 0x1000 + n,
                device: 0,
                context: 0xc0,
                args_version: 1,
                args: vec![n as u8; n as usize],
                code: code.get(n as usize).copied().into_iter().collect(),
            })
            .collect(),
        allocations: vec![Allocation {
            device: 0,
            address: 0x2000_0020_0000,
            size: content.len() as u64,
            requested_size: content.len() as u64 - 3,
            flags: 2,
            handle: 0x77,
            pieces: allocation,
        }],
        globals: vec![Global {
            device: 0,
            module: 0x1000,
            name: "counter".to_owned(),
            address: 0x2000_0040_0000,
            size: 8,
            pieces: global,
            initial: (index == 1).then(|| InitialHash::of(b"the addresses of functions")),
        }],
        pinned: vec![
            Pinned { address: 0x2100_0000_0000, size: 4096, flags: 1, pieces: Vec::new() },
            Pinned { address: 0x2100_0000_1000, size: 4096, flags: 3, pieces: vec![zero(4096)] },
        ],
        blobs: vec![Blob { kind: 5, handle: 0x88, device: 0, size: 16, pieces: vec![zero(16)] }],
        grant: (index == 1).then(|| Grant {
            container: "c0ffee".to_owned(),
            all_gpus: false,
            device_memory: Some(1 << 30),
            pinned_memory: None,
            workers: Some(2),
            protocol: Some(Protocol::Cow),
            share: true,
        }),
    })
}

/// The names in a directory, sorted.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Whether anything in the image was found to be wrong, at opening or by verification.
pub(crate) fn is_refused(dir: &Path) -> bool {
    match Image::open(dir) {
        Ok(image) => !image.verify(|_| ()).is_good(),
        Err(_) => true,
    }
}

/// Of what kind an error is.
pub(crate) fn kind<T: std::fmt::Debug>(result: Result<T, ImageError>) -> ErrorKind {
    result.unwrap_err().kind()
}
