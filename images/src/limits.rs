//! The format's version and the bounds that reader and writer hold to.
//!
//! Every size that comes out of a file is compared with one of these before anything is allocated
//! for it, so that a hostile image costs at most this much memory.

/// Version of the format that this crate writes, and the newest that it reads.
///
/// 1 hashed pieces with XXH3-128; 2 hashes them as [`crate::content`] says, and may build on a parent.
pub const FORMAT_VERSION: u32 = 2;

/// Alignment of a piece in its data file, in bytes: what direct I/O wants everywhere.
pub const BLOCK: u64 = 4096;

/// The length into which [`DataWriter::append_all`](crate::DataWriter::append_all) cuts content,
/// in bytes.
pub const PIECE_LENGTH: u64 = 4 << 20;

/// The longest piece, in bytes.
pub const MAX_PIECE_LENGTH: u64 = 64 << 20;

/// The longest manifest, in bytes.
pub const MAX_MANIFEST: u64 = 256 << 20;

/// The longest commit record, in bytes.
pub const MAX_COMMIT: u64 = 16 << 20;

/// The longest account of a restore that is read, in bytes.
pub const MAX_LAST_RESTORE: u64 = 4 << 20;

/// The most memory that a decoded manifest may take, in bytes. A message of two bytes can decode to
/// hundreds, so the length of the file alone bounds nothing.
pub const MAX_DECODED: u64 = 1 << 30;

/// The longest code image, in bytes.
pub const MAX_CODE: u64 = 1 << 30;

/// The longest opaque field (arguments of an object, state of a worker), in bytes. What is longer
/// is content and belongs in a [`Blob`](crate::Blob).
pub const MAX_OPAQUE: u64 = 4 << 20;

/// The most images that one may build on, one behind the other.
pub const MAX_ANCESTORS: usize = 64;

/// The most data and code files in an image.
pub const MAX_FILES: usize = 1 << 16;

/// Data files below this number are their clients' first, by the clients' indices; those from here on are further ones of
/// any client.
pub const FIRST_FREE_DATA_FILE: u32 = MAX_FILES as u32;
