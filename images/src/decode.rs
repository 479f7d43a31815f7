//! From the messages of `proto/image.proto` to this crate's types.
//!
//! The result is well-formed by itself; `validate` checks that its parts agree.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use protobuf::{EnumOrUnknown, Message};

use crate::ImageError;
use crate::content::ContentKey;
use crate::hash::{CheckpointId, Checksum, CodeHash, HashKey, InitialHash, PieceHash};
use crate::limits::{MAX_DECODED, MAX_OPAQUE};
use crate::manifest::{
    Allocation, Blob, Build, Client, ClientGpu, CodeImage, Compression, Extent, Global, Gpu, Grant, Host, Library,
    Manifest, Native, NativeGpu, Object, ObjectKind, Parent, Phase, PhaseName, Piece, Pinned, Protocol, Ring, Setting,
    Storage, Window, WindowKind,
};
use crate::proto::image as proto;
use crate::record::{CommitRecord, Companion, FileEntry};
use crate::scan::{self, Refused, Shape};

/// Decodes the messages of one file; errors name it.
pub(crate) struct Decoder {
    file: &'static str,
}

/// `into_iter().map(f).collect()` for the fallible conversions.
fn each<A, B>(from: Vec<A>, convert: impl FnMut(A) -> Result<B, ImageError>) -> Result<Vec<B>, ImageError> {
    from.into_iter().map(convert).collect()
}

impl Decoder {
    pub(crate) const fn new(file: &'static str) -> Self {
        Self { file }
    }

    /// The manifest in `bytes`, whose header said `version`.
    pub(crate) fn manifest(&self, bytes: &[u8], version: u32) -> Result<Manifest, ImageError> {
        let from: proto::Manifest = self.parse(bytes, &scan::MANIFEST)?;
        if from.format_version != version {
            return self.corrupt("header and manifest differ in their format version");
        }
        let hash_key = match from.hash_algorithm.enum_value() {
            Ok(proto::HashAlgorithm::HASH_CONTENT) => {
                HashKey::Content(ContentKey::from_bytes(self.array(&from.hash_key, "hash key")?))
            }
            Ok(proto::HashAlgorithm::HASH_XXH3_128) => {
                HashKey::Xxh3(u64::from_le_bytes(self.array(&from.hash_key, "hash key")?))
            }
            Ok(proto::HashAlgorithm::HASH_UNKNOWN) | Err(_) => {
                return unsupported("hash algorithm", from.hash_algorithm.value());
            }
        };
        Ok(Manifest {
            format_version: from.format_version,
            id: CheckpointId::from_bytes(self.array(&from.id, "checkpoint id")?),
            created: from.created,
            rekindle_version: from.rekindle_version,
            host: self.host(from.host.unwrap_or_default())?,
            protocol: protocol(from.protocol),
            protocol_reason: from.protocol_reason,
            phases: from.phases.iter().map(phase).collect(),
            parent: from.parent.0.map(|it| self.parent(*it)).transpose()?,
            hash_key,
            code: each(from.code, |it| {
                Ok(CodeImage {
                    hash: CodeHash::from_bytes(self.array(&it.hash, "hash of a code image")?),
                    size: it.size,
                    parent_depth: it.parent_depth,
                })
            })?,
            clients: each(from.clients, |it| self.client(it))?,
            builds: each(from.builds, |it| self.build(it))?,
            natives: each(from.natives, |it| self.native(it))?,
        })
    }

    fn native(&self, from: proto::Native) -> Result<Native, ImageError> {
        Ok(Native {
            pid: from.pid,
            namespace_pid: from.namespace_pid,
            command: from.command,
            restore_thread: from.restore_thread,
            driver_version: from.driver_version,
            gpus: each(from.gpus, |it| {
                Ok(NativeGpu { uuid: self.array(&it.uuid, "uuid of a native process's GPU")?, name: it.name })
            })?,
        })
    }

    fn build(&self, from: proto::Build) -> Result<Build, ImageError> {
        Ok(Build {
            id: self.array(&from.id, "name of a build")?,
            directory: PathBuf::from(OsString::from_vec(from.directory)),
            libraries: each(from.libraries, |it| {
                let code = CodeHash::from_bytes(self.array(&it.hash, "hash of a library")?);
                Ok(Library { name: it.name, code })
            })?,
        })
    }

    /// The commit record in `bytes`.
    pub(crate) fn commit(&self, bytes: &[u8]) -> Result<CommitRecord, ImageError> {
        let from: proto::Commit = self.parse(bytes, &scan::COMMIT)?;
        Ok(CommitRecord {
            id: CheckpointId::from_bytes(self.array(&from.id, "checkpoint id")?),
            manifest_hash: Checksum::from_bytes(whole(from.manifest_hash_high, from.manifest_hash_low)),
            manifest_length: from.manifest_length,
            files: from.files.into_iter().map(|it| FileEntry { name: it.name, size: it.size }).collect(),
            companion: match (from.companion, from.companion_hash) {
                (name, hash) if name.is_empty() && hash.is_empty() => None,
                (name, hash) => {
                    let hash = Checksum::from_bytes(self.array(&hash, "hash of a companion")?);
                    Some(Companion { name, hash })
                }
            },
            others_overwritten: from.others_overwritten,
        })
    }

    fn parse<M: Message>(&self, bytes: &[u8], shape: &Shape) -> Result<M, ImageError> {
        match scan::scan(bytes, shape) {
            Ok(_) => M::parse_from_bytes(bytes).or_else(|error| self.corrupt(format!("it does not decode: {error}"))),
            Err(Refused::Malformed) => self.corrupt("it is not a protobuf message"),
            Err(Refused::TooLarge(size)) => Err(ImageError::TooLarge {
                file: self.file.to_owned(),
                what: "its message in memory",
                size,
                limit: MAX_DECODED,
            }),
        }
    }

    fn corrupt<T>(&self, what: impl Into<String>) -> Result<T, ImageError> {
        Err(ImageError::corrupt(self.file, what))
    }

    fn array<const N: usize>(&self, bytes: &[u8], what: &str) -> Result<[u8; N], ImageError> {
        bytes.try_into().or_else(|_| self.corrupt(format!("{what} is not {N} bytes long")))
    }

    fn opaque(&self, bytes: Vec<u8>, what: &'static str) -> Result<Vec<u8>, ImageError> {
        if bytes.len() as u64 > MAX_OPAQUE {
            return Err(ImageError::TooLarge {
                file: self.file.to_owned(),
                what,
                size: bytes.len() as u64,
                limit: MAX_OPAQUE,
            });
        }
        Ok(bytes)
    }

    fn host(&self, from: proto::Host) -> Result<Host, ImageError> {
        Ok(Host {
            name: from.name,
            driver_version: from.driver_version,
            driver_build: from.driver_build,
            gpus: each(from.gpus, |it| {
                Ok(Gpu {
                    uuid: self.array(&it.uuid, "uuid of a gpu")?,
                    name: it.name,
                    compute_major: it.compute_major,
                    compute_minor: it.compute_minor,
                    total_memory: it.total_memory,
                    pci: it.pci,
                    multiprocessors: it.multiprocessors,
                })
            })?,
        })
    }

    fn parent(&self, from: proto::Parent) -> Result<Parent, ImageError> {
        Ok(Parent {
            path: path(from.path),
            id: CheckpointId::from_bytes(self.array(&from.id, "id of the parent")?),
            manifest_hash: Checksum::from_bytes(whole(from.manifest_hash_high, from.manifest_hash_low)),
        })
    }

    fn client(&self, from: proto::Client) -> Result<Client, ImageError> {
        let ring = from.ring.unwrap_or_default();
        Ok(Client {
            index: from.index,
            pid: from.pid,
            namespace_pid: from.namespace_pid,
            command: from.command,
            wire_version: from.wire_version,
            socket_path: path(from.socket_path),
            socket_ids: from.socket_ids,
            settings: from.settings.into_iter().map(|it| Setting { name: it.name, value: it.value }).collect(),
            gpus: each(from.gpus, |it| {
                Ok(ClientGpu { ordinal: it.ordinal, uuid: self.array(&it.uuid, "uuid of a client's gpu")? })
            })?,
            ring: Ring { size: ring.size, head: ring.head },
            shared_state: self.opaque(from.shared_state, "shared state of a client")?,
            worker_version: from.worker_version,
            worker_state: self.opaque(from.worker_state, "state of a worker")?,
            windows: each(from.windows, window)?,
            object_kinds: from.object_kinds.into_iter().map(|it| ObjectKind { kind: it.kind, name: it.name }).collect(),
            objects: each(from.objects, |it| self.object(it))?,
            allocations: each(from.allocations, |it| {
                Ok(Allocation {
                    device: it.device,
                    address: it.address,
                    size: it.size,
                    requested_size: it.requested_size,
                    flags: it.flags,
                    handle: it.handle,
                    pieces: each(it.pieces, piece)?,
                })
            })?,
            globals: each(from.globals, |it| {
                Ok(Global {
                    device: it.device,
                    module: it.module,
                    name: it.name,
                    address: it.address,
                    size: it.size,
                    pieces: each(it.pieces, piece)?,
                    initial: match it.initial_hash.as_slice() {
                        [] => None,
                        hash => {
                            Some(InitialHash::from_bytes(self.array(hash, "hash of a variable's initial content")?))
                        }
                    },
                })
            })?,
            pinned: each(from.pinned, |it| {
                Ok(Pinned { address: it.address, size: it.size, flags: it.flags, pieces: each(it.pieces, piece)? })
            })?,
            grant: from.grant.into_option().map(|it| Grant {
                container: it.container,
                all_gpus: it.all_gpus,
                device_memory: Some(it.device_memory).filter(|it| *it != 0),
                pinned_memory: Some(it.pinned_memory).filter(|it| *it != 0),
                workers: Some(it.workers).filter(|it| *it != 0),
                // A later version's protocol is unknown here: a restored process can be checkpointed by another protocol.
                protocol: it.protocol.parse().ok(),
                share: it.share,
            }),
            blobs: each(from.blobs, |it| {
                Ok(Blob {
                    kind: it.kind,
                    handle: it.handle,
                    device: it.device,
                    size: it.size,
                    pieces: each(it.pieces, piece)?,
                })
            })?,
        })
    }

    fn object(&self, from: proto::Object) -> Result<Object, ImageError> {
        Ok(Object {
            sequence: from.sequence,
            kind: from.kind,
            handle: from.handle,
            device: from.device,
            context: from.context,
            args_version: from.args_version,
            args: self.opaque(from.args, "arguments of an object")?,
            code: each(from.code, |it| Ok(CodeHash::from_bytes(self.array(&it, "hash of an object's code")?)))?,
        })
    }
}

impl Client {
    /// The client in `bytes`, which may come from anywhere: sizes are bounded, and nothing
    /// panics. Whether the client agrees with an image is checked at the commit.
    ///
    /// # Errors
    /// The errors of [`Image::open`](crate::Image::open) about a manifest, as far as they concern one client.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, ImageError> {
        let decoder = Decoder::new("client record");
        decoder.client(decoder.parse(bytes, &scan::CLIENT)?)
    }
}

fn unsupported<T>(what: &str, number: i32) -> Result<T, ImageError> {
    Err(ImageError::Unsupported { what: format!("{what} {number}") })
}

/// A restore does not depend on it, so what a later version added is no error.
fn protocol(from: EnumOrUnknown<proto::Protocol>) -> Protocol {
    match from.enum_value() {
        Ok(proto::Protocol::PROTOCOL_STOP) => Protocol::Stop,
        Ok(proto::Protocol::PROTOCOL_CLONE) => Protocol::Clone,
        Ok(proto::Protocol::PROTOCOL_COW) => Protocol::Cow,
        Ok(proto::Protocol::PROTOCOL_RECOPY) => Protocol::Recopy,
        Ok(proto::Protocol::PROTOCOL_AUTO) => Protocol::Auto,
        Ok(proto::Protocol::PROTOCOL_UNKNOWN) | Err(_) => Protocol::Unknown,
    }
}

fn phase(from: &proto::Phase) -> Phase {
    let name = match from.name.enum_value() {
        Ok(proto::PhaseName::PHASE_PRE_COPY) => PhaseName::PreCopy,
        Ok(proto::PhaseName::PHASE_QUIESCE) => PhaseName::Quiesce,
        Ok(proto::PhaseName::PHASE_FREEZE) => PhaseName::Freeze,
        Ok(proto::PhaseName::PHASE_HASH) => PhaseName::Hash,
        Ok(proto::PhaseName::PHASE_CLONE) => PhaseName::Clone,
        Ok(proto::PhaseName::PHASE_COPY) => PhaseName::Copy,
        Ok(proto::PhaseName::PHASE_WRITE) => PhaseName::Write,
        Ok(proto::PhaseName::PHASE_RESUME) => PhaseName::Resume,
        Ok(proto::PhaseName::PHASE_LOAD) => PhaseName::Load,
        Ok(proto::PhaseName::PHASE_REPLAY) => PhaseName::Replay,
        Ok(proto::PhaseName::PHASE_STALL) => PhaseName::Stall,
        Ok(proto::PhaseName::PHASE_WAIT) => PhaseName::Wait,
        Ok(proto::PhaseName::PHASE_UNKNOWN) | Err(_) => PhaseName::Unknown,
    };
    Phase { name, start: from.start, duration: from.duration, bytes: from.bytes }
}

/// Unlike a protocol, a window of an unknown kind cannot be left out of a restore.
fn window(from: proto::Window) -> Result<Window, ImageError> {
    let kind = match from.kind.enum_value() {
        Ok(proto::WindowKind::WINDOW_DEVICE) => WindowKind::Device,
        Ok(proto::WindowKind::WINDOW_PINNED) => WindowKind::Pinned,
        Ok(proto::WindowKind::WINDOW_UNKNOWN) | Err(_) => {
            return unsupported("address window of kind", from.kind.value());
        }
    };
    Ok(Window { kind, address: from.address, size: from.size })
}

fn piece(from: proto::Piece) -> Result<Piece, ImageError> {
    let compression = match from.compression.enum_value() {
        Ok(proto::Compression::COMPRESSION_NONE) => Compression::None,
        Ok(proto::Compression::COMPRESSION_LZ4) => Compression::Lz4,
        Ok(proto::Compression::COMPRESSION_ZSTD) => Compression::Zstd,
        Err(number) => return unsupported("compression method", number),
    };
    let extent = Extent { file: from.file, offset: from.file_offset, length: from.stored_length, compression };
    Ok(Piece {
        offset: from.offset,
        length: from.length,
        hash: PieceHash::from_bytes(whole(from.hash_high, from.hash_low)),
        storage: match (from.zero, from.parent_depth) {
            (true, _) => Storage::Zero,
            (false, 0) => Storage::Stored(extent),
            (false, depth) => Storage::Parent { depth, extent },
        },
    })
}

fn path(bytes: Vec<u8>) -> PathBuf {
    PathBuf::from(OsString::from_vec(bytes))
}

fn whole(high: u64, low: u64) -> [u8; 16] {
    (u128::from(high) << 64 | u128::from(low)).to_be_bytes()
}
