//! The header and the checksum around the messages in `rekindle.img` and `rekindle.commit`.
//!
//! ```text
//!    0            8          12         16          24            24+n          40+n
//!    ┌────────────┬──────────┬──────────┬───────────┬─────────────┬─────────────┐
//!    │ magic      │ version  │ zero     │ n: length │ protobuf    │ XXH3-128 of │
//!    │ 8 bytes    │ u32      │ u32      │ u64       │ message     │ all before  │
//!    └────────────┴──────────┴──────────┴───────────┴─────────────┴─────────────┘
//! ```
//!
//! Numbers are little endian, the checksum is in XXH3's canonical order. The version can be read
//! without protobuf, and stays where it is in every version to come.

use std::fs::File;
use std::os::unix::fs::FileExt;

use xxhash_rust::xxh3::xxh3_128;

use crate::ImageError;
use crate::dir::ImageDir;
use crate::hash::Checksum;
use crate::limits::FORMAT_VERSION;

const HEADER: usize = 24;
const CHECKSUM: usize = 16;
const TOO_SHORT: &str = "it is too short";

/// Which of the two files it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) magic: [u8; 8],
    /// Of the message, in bytes.
    pub(crate) limit: u64,
}

/// The manifest's envelope.
pub(crate) const MANIFEST: Kind =
    Kind { name: crate::names::MANIFEST, magic: *b"REKINDLE", limit: crate::limits::MAX_MANIFEST };

/// The same of a manifest whose name is still to be given.
pub(crate) const NEW_MANIFEST: Kind = Kind { name: crate::names::MANIFEST_TEMPORARY, ..MANIFEST };

/// The commit record's envelope.
pub(crate) const COMMIT: Kind =
    Kind { name: crate::names::COMMIT, magic: *b"REKCOMIT", limit: crate::limits::MAX_COMMIT };

/// A message out of its envelope, its checksum verified.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) version: u32,
    pub(crate) message: Vec<u8>,
    pub(crate) checksum: Checksum,
    /// Of the whole file, in bytes.
    pub(crate) length: u64,
}

/// Puts a message in its envelope: the file's bytes and the checksum they end with.
pub(crate) fn seal(kind: Kind, message: &[u8]) -> Result<(Vec<u8>, Checksum), ImageError> {
    let length = message.len() as u64;
    check_length(kind, length)?;
    let mut bytes = Vec::with_capacity(HEADER + message.len() + CHECKSUM);
    bytes.extend_from_slice(&kind.magic);
    bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
    bytes.extend_from_slice(&0u32.to_le_bytes());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(message);
    let checksum = Checksum::from_bytes(xxh3_128(&bytes).to_be_bytes());
    bytes.extend_from_slice(&checksum.to_bytes());
    Ok((bytes, checksum))
}

/// Reads the file of this kind, if the directory has one.
pub(crate) fn open(dir: &ImageDir, kind: Kind) -> Result<Option<Opened>, ImageError> {
    let Some((file, length)) = dir.open_file(kind.name)? else {
        return Ok(None);
    };
    if length < (HEADER + CHECKSUM) as u64 {
        return Err(ImageError::corrupt(kind.name, TOO_SHORT));
    }
    let mut header = [0; HEADER];
    read(&file, kind, &mut header, 0)?;
    check_header(kind, &header, length)?;
    // Bounded by the check above.
    let mut bytes = vec![0; length as usize];
    read(&file, kind, &mut bytes, 0)?;
    unseal(kind, bytes).map(Some)
}

/// Takes a message out of its envelope.
pub(crate) fn unseal(kind: Kind, mut bytes: Vec<u8>) -> Result<Opened, ImageError> {
    let length = bytes.len() as u64;
    let corrupt = |what: &str| Err(ImageError::corrupt(kind.name, what));
    let Some(header) = bytes.first_chunk().filter(|_| bytes.len() >= HEADER + CHECKSUM) else {
        return corrupt(TOO_SHORT);
    };
    let version = check_header(kind, header, length)?;
    let body = bytes.len() - CHECKSUM;
    let checksum = xxh3_128(&bytes[..body]).to_be_bytes();
    if bytes[body..] != checksum {
        return corrupt("its checksum does not match");
    }
    bytes.truncate(body);
    bytes.drain(..HEADER);
    Ok(Opened { version, message: bytes, checksum: Checksum::from_bytes(checksum), length })
}

/// Whether a file of this length may begin so, and the version that it has.
fn check_header(kind: Kind, header: &[u8; HEADER], length: u64) -> Result<u32, ImageError> {
    let corrupt = |what: &str| Err(ImageError::corrupt(kind.name, what));
    let (magic, version, zero, message) = fields(header);
    if magic != kind.magic {
        return corrupt("it does not begin with the magic bytes");
    }
    if version > FORMAT_VERSION {
        return Err(ImageError::NewerFormat { file: kind.name.to_owned(), found: version, supported: FORMAT_VERSION });
    }
    if version == 0 || zero != 0 {
        return corrupt("its header is damaged");
    }
    check_length(kind, message)?;
    if length != message + (HEADER + CHECKSUM) as u64 {
        return corrupt("its length is not what its header says");
    }
    Ok(version)
}

fn check_length(kind: Kind, length: u64) -> Result<(), ImageError> {
    if length > kind.limit {
        return Err(ImageError::TooLarge {
            file: kind.name.to_owned(),
            what: "its message",
            size: length,
            limit: kind.limit,
        });
    }
    Ok(())
}

fn fields(header: &[u8; HEADER]) -> ([u8; 8], u32, u32, u64) {
    let &[m0, m1, m2, m3, m4, m5, m6, m7, v0, v1, v2, v3, z0, z1, z2, z3, l0, l1, l2, l3, l4, l5, l6, l7] = header;
    (
        [m0, m1, m2, m3, m4, m5, m6, m7],
        u32::from_le_bytes([v0, v1, v2, v3]),
        u32::from_le_bytes([z0, z1, z2, z3]),
        u64::from_le_bytes([l0, l1, l2, l3, l4, l5, l6, l7]),
    )
}

fn read(file: &File, kind: Kind, buffer: &mut [u8], offset: u64) -> Result<(), ImageError> {
    file.read_exact_at(buffer, offset).map_err(|error| ImageError::io("read", kind.name, error))
}
