//! The checkpoint image on disk: format, writer, reader, verification.
//!
//! An image is a few files in a directory that it shares with others (CRIU's image directory):
//!
//! ```text
//!  rekindle.commit ──────────► rekindle.img ─────────► rekindle-code-HASH.bin   code, as it was
//!  id, files and sizes,        manifest: host, phases,   (named by content)     given to the driver
//!  checksum of the manifest    clients, objects, and
//!  (written last)              for each region where ─► rekindle-data-N.raw      ┌───────┬─────┬──
//!                              its pieces are            (raw content)           │ piece │ 0…0 │ …
//!                                                                                └───────┴─────┴──
//!                                                                                each at n × 4096
//! ```
//!
//! * `rekindle.img` and `rekindle.commit` are protobuf messages (`proto/image.proto`) in an
//!   envelope of magic bytes, format version, length and checksum.
//! * A code file is named by the hash of its content, so equal code is stored once.
//! * A client has one or several data files, in which its pieces are in the order in which its writers wrote them; the
//!   manifest names the data file of each piece.
//! * A data file consists of pieces, compressed each by itself or not at all, each aligned to [`BLOCK`] and followed by
//!   zeros up to the next; the manifest describes the pieces, and carries a keyed hash of each ([`content`]). Content that is
//!   zero throughout is not stored.
//!
//! An image may build on another one, its parent ([`Base`]): pieces and code images that an ancestor has are not
//! written again, and the manifest says in which ancestor they are.
//!
//! Each byte of each file is covered by a checksum or must be zero: any change is found by
//! [`Image::open`] or [`Image::verify`].
//!
//! # Writers
//!
//! A privileged process owns the directory: [`ImageWriter`] creates files, writes code, manifest
//! and commit record. Content comes from unprivileged processes that are given open data files
//! and nothing else: [`DataWriter`] appends pieces and says where they are. The privileged process
//! checks these claims against the files before the commit.
//!
//! # Readers
//!
//! [`Image::open`] accepts only a committed, consistent image of a known version with all its
//! files in place; [`DataReader`] gives out pieces after it has compared their hashes;
//! [`Image::verify`] compares the hashes of all pieces. The image is not trusted: no size in it is used
//! before it was compared with a limit ([`limits`]).
//!
//! A restore leaves `rekindle-restore.json` beside the image ([`LastRestore`]), which belongs to no image: it is not in the
//! commit record, every reader does without it, and the next writer in the directory removes it.
//!
//! This crate does not depend on CUDA or CRIU.
//!
//! # Layers
//!
//! A file imports only from lines below its own:
//!
//! ```text
//!   flatten                                            an image with parents ─► one without
//!   writer, verify                                     making an image; comparing all of its content
//!   base, recovery                                     what a new image builds on; what a killed writer has left
//!   image                                              a committed image with those that it builds on
//!   chain                                              those
//!   layer, last_restore         validate               a committed image by itself; what its last restore was like
//!   commit                      region, data_writer
//!   decode, encode, envelope    data_reader, known, target
//!   record, scan                compress, direct, inspect, blob_kind
//!   proto, way                  manifest
//!   dir, names, hash, content, limits, sys, error
//! ```

#![deny(unsafe_code)]

mod base;
mod blob_kind;
mod chain;
mod commit;
mod compress;
pub mod content;
mod data_reader;
mod data_writer;
mod decode;
mod dir;
mod direct;
mod encode;
mod envelope;
mod error;
mod flatten;
mod hash;
mod image;
mod inspect;
mod known;
mod last_restore;
mod layer;
pub mod limits;
mod manifest;
mod names;
mod proto;
mod record;
mod recovery;
mod region;
mod scan;
#[allow(unsafe_code)]
mod sys;
mod target;
mod validate;
mod verify;
mod way;
mod writer;

#[cfg(test)]
extern crate self as rekindle_images;
#[cfg(test)]
mod hostile;
#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod sample;

pub use base::Base;
pub use blob_kind::{BlobKind, UnknownBlobKind};
pub use compress::{CompressionChoice, NoCompression};
pub use data_reader::{DataFile, DataReader};
pub use data_writer::DataWriter;
pub use dir::ImageDir;
pub use error::{ErrorKind, ImageError};
pub use flatten::{flatten, flatten_in_place};
pub use hash::{CheckpointId, Checksum, CodeHash, HashKey, Hasher, InitialHash, NotHex128, PieceHash};
pub use image::Image;
pub use inspect::{
    ByteSummary, ClientSummary, GpuSummary, NativeSummary, ObjectSummary, ParentSummary, PhaseSummary, Summary,
};
pub use known::Known;
pub use last_restore::{Account, LastRestore, RestorePhase, RestoredClient};
pub use limits::{BLOCK, FORMAT_VERSION, PIECE_LENGTH};
pub use manifest::{
    Allocation, Blob, Build, Client, ClientGpu, CodeImage, Compression, Extent, Global, Gpu, Grant, Host, Library,
    Manifest, Native, NativeGpu, Object, ObjectKind, Parent, Phase, PhaseName, Piece, Pinned, Protocol, Ring, Setting,
    Storage, UnknownProtocol, Window, WindowKind,
};
pub use names::{COMMIT, MANIFEST, code_name, data_name, is_image_file};
pub use record::FileEntry;
pub use region::{Region, RegionKind};
pub use verify::{Problem, Progress, Report};
pub use writer::{Committed, CreateOptions, ImageWriter};
