//! The content of a manifest, as Rust types.
//!
//! These are the types that the rest of the product works with; `proto/image.proto` is how they
//! lie on disk. Sizes and offsets are bytes, times nanoseconds, unless a field says otherwise.

use std::path::PathBuf;
use std::str::FromStr;

use crate::content::ContentKey;
use crate::hash::{CheckpointId, Checksum, CodeHash, HashKey, InitialHash, PieceHash};
use crate::limits::FORMAT_VERSION;

/// A checkpoint, without the content of its memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Manifest {
    /// The version of the format. Filled in by
    /// [`ImageWriter::commit`](crate::ImageWriter::commit).
    pub format_version: u32,
    /// The checkpoint's name. Filled in by [`ImageWriter::commit`](crate::ImageWriter::commit).
    pub id: CheckpointId,
    /// When the checkpoint was taken, in seconds since 1970 (UTC).
    pub created: u64,
    /// Version of the product that wrote the image.
    pub rekindle_version: String,
    /// The machine that the checkpoint was taken on.
    pub host: Host,
    /// The protocol that was used.
    pub protocol: Protocol,
    /// Why this protocol was used.
    pub protocol_reason: String,
    /// How long each phase took.
    pub phases: Vec<Phase>,
    /// The image this one builds on, if it is incremental.
    pub parent: Option<Parent>,
    /// How the pieces are hashed, and the key. Filled in by
    /// [`ImageWriter::commit`](crate::ImageWriter::commit).
    pub hash_key: HashKey,
    /// Every code image, each once. Filled in by
    /// [`ImageWriter::commit`](crate::ImageWriter::commit).
    pub code: Vec<CodeImage>,
    /// The processes that had GPU state.
    pub clients: Vec<Client>,
    /// The builds of Rekindle's libraries that the processes of the tree have mapped.
    pub builds: Vec<Build>,
    /// The processes that used NVIDIA's own driver library. CRIU's files have their GPU memory.
    pub natives: Vec<Native>,
}

/// A process that uses NVIDIA's own driver library, and that the driver has checkpointed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Native {
    /// Its pid as the daemon numbered it.
    pub pid: u32,
    /// Its pid as it sees itself.
    pub namespace_pid: u32,
    /// Its command's name.
    pub command: String,
    /// The thread in it that works for the driver, as the process sees it.
    pub restore_thread: u32,
    /// `cuDriverGetVersion` of the dump's machine.
    pub driver_version: u32,
    /// All GPUs of the dump's machine, in the driver's order.
    pub gpus: Vec<NativeGpu>,
}

/// A GPU of the machine of a process that the driver has checkpointed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NativeGpu {
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Its name.
    pub name: String,
}

impl Manifest {
    /// A manifest with no host, phases or clients, for the caller to fill. At the commit the writer
    /// overwrites the fields that it knows better.
    #[must_use]
    pub fn new(created: u64, protocol: Protocol) -> Self {
        Self {
            format_version: FORMAT_VERSION,
            id: CheckpointId::from_bytes([0; 16]),
            created,
            rekindle_version: env!("CARGO_PKG_VERSION").to_owned(),
            host: Host::default(),
            protocol,
            protocol_reason: String::new(),
            phases: Vec::new(),
            parent: None,
            hash_key: HashKey::Content(ContentKey::from_bytes([0; 16])),
            code: Vec::new(),
            clients: Vec::new(),
            builds: Vec::new(),
            natives: Vec::new(),
        }
    }
}

/// The machine a checkpoint was taken on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Version of CUDA's interface that the driver has: `CUDA 13.0`.
    pub driver_version: String,
    /// The driver's own version, `580.159.04`, and the kernel module's where it is another. Empty if it was not known.
    pub driver_build: String,
    /// The GPUs that the clients used.
    pub gpus: Vec<Gpu>,
}

/// A GPU, as far as a restore must compare it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Its name.
    pub name: String,
    /// Compute capability, major.
    pub compute_major: u32,
    /// Compute capability, minor.
    pub compute_minor: u32,
    /// Memory in bytes.
    pub total_memory: u64,
    /// PCI address, `domain:bus:device.function`.
    pub pci: String,
    /// How many multiprocessors it has; 0 if that was not recorded.
    pub multiprocessors: u32,
}

/// How a checkpoint was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Protocol {
    /// The application waits for the whole copy.
    Stop,
    /// The application waits for a copy on the device.
    Clone,
    /// Memory that the application is about to write is copied first.
    Cow,
    /// Memory that the application wrote meanwhile is copied again.
    Recopy,
    /// Chosen per allocation.
    Auto,
    /// Written by a later version; a restore does not depend on it.
    Unknown,
}

/// The error for a name that names no protocol that a user can ask for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no protocol: say auto, stop, clone, cow or recopy")]
pub struct UnknownProtocol(String);

impl FromStr for Protocol {
    type Err = UnknownProtocol;

    fn from_str(name: &str) -> Result<Self, UnknownProtocol> {
        let found = Self::CHOICES.into_iter().find(|it| it.as_str() == name);
        // As much of it as anybody reads: it may be a whole file.
        found.ok_or_else(|| UnknownProtocol(name.chars().take(64).collect()))
    }
}

impl Protocol {
    /// The protocols that a user can ask for.
    pub const CHOICES: [Self; 5] = [Self::Auto, Self::Stop, Self::Clone, Self::Cow, Self::Recopy];

    /// Its name, as in configuration and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Clone => "clone",
            Self::Cow => "cow",
            Self::Recopy => "recopy",
            Self::Auto => "auto",
            Self::Unknown => "unknown",
        }
    }
}

/// The phases of a checkpoint and of a restore, named once for manifest, log and output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum PhaseName {
    /// Copying while the application runs, before the quiesce.
    PreCopy,
    /// From closing the rings until all is idle.
    Quiesce,
    /// CRIU's freeze of the CPU side.
    Freeze,
    /// Hashing on the device.
    Hash,
    /// Copying on the device.
    Clone,
    /// Copying to the host.
    Copy,
    /// Writing until durable.
    Write,
    /// Opening the rings and letting the tasks run.
    Resume,
    /// Loading content.
    Load,
    /// Making objects again.
    Replay,
    /// The time that the GPU side cost the application: from all idle to open rings, less the freeze.
    Stall,
    /// The time that commands waited once rings were open, since they would have written memory that was not copied yet.
    Wait,
    /// Written by a later version.
    Unknown,
}

impl PhaseName {
    /// Its name, as in log and output.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PreCopy => "pre-copy",
            Self::Quiesce => "quiesce",
            Self::Freeze => "freeze",
            Self::Hash => "hash",
            Self::Clone => "clone",
            Self::Copy => "copy",
            Self::Write => "write",
            Self::Resume => "resume",
            Self::Load => "load",
            Self::Replay => "replay",
            Self::Stall => "stall",
            Self::Wait => "wait",
            Self::Unknown => "unknown",
        }
    }
}

/// How long one phase took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Phase {
    /// The phase.
    pub name: PhaseName,
    /// Nanoseconds since the checkpoint was asked for.
    pub start: u64,
    /// The phase's duration in nanoseconds.
    pub duration: u64,
    /// Bytes that the phase handled; 0 where a number of bytes means nothing.
    pub bytes: u64,
}

/// The image that an incremental image builds on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// Its directory, relative to this image's.
    pub path: PathBuf,
    /// Its name.
    pub id: CheckpointId,
    /// The checksum of the parent's manifest, which shows whether the parent was exchanged.
    pub manifest_hash: Checksum,
}

/// A code image; its file is named after the hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CodeImage {
    /// Hash of the content.
    pub hash: CodeHash,
    /// Bytes.
    pub size: u64,
    /// The ancestor that has the file; 0 is this image itself.
    pub parent_depth: u32,
}

/// A build of the libraries that applications map. The processes need the same files when they are restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Build {
    /// Its name, a hash of the libraries.
    pub id: [u8; 16],
    /// Where it lay on the machine of the dump.
    pub directory: PathBuf,
    /// Its libraries.
    pub libraries: Vec<Library>,
}

/// A library of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// The name of its file.
    pub name: String,
    /// The code image that has its content.
    pub code: CodeHash,
}

/// A process that had GPU state.
///
/// A worker makes this record and sends it to the daemon as [`Client::to_bytes`]; on restore the
/// daemon sends the record to the worker.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Client {
    /// The client's number in this image, which is unique there.
    pub index: u32,
    /// Its process, as the daemon saw it.
    pub pid: u32,
    /// Its process, as it sees itself.
    pub namespace_pid: u32,
    /// Its command name.
    pub command: String,
    /// Version of the protocol between interposer and worker.
    pub wire_version: u32,
    /// The daemon's socket as a path in the process's mount namespace.
    pub socket_path: PathBuf,
    /// The CPU image's ids of the sockets that lead to the daemon.
    pub socket_ids: Vec<u32>,
    /// The environment that a pooled worker must have been started with.
    pub settings: Vec<Setting>,
    /// The GPUs that the process calls device 0, 1, ...
    pub gpus: Vec<ClientGpu>,
    /// Its command ring.
    pub ring: Ring,
    /// The executor's shared state beside the ring, in the encoding of `wire_version`.
    pub shared_state: Vec<u8>,
    /// Version of the encoding of `worker_state`.
    pub worker_version: u32,
    /// The worker's own state.
    pub worker_state: Vec<u8>,
    /// Address ranges that must be free on restore.
    pub windows: Vec<Window>,
    /// Names of the kinds in `objects`, for people.
    pub object_kinds: Vec<ObjectKind>,
    /// The object log, ascending by sequence.
    pub objects: Vec<Object>,
    /// Device memory.
    pub allocations: Vec<Allocation>,
    /// Device globals.
    pub globals: Vec<Global>,
    /// Pinned host memory.
    pub pinned: Vec<Pinned>,
    /// Content at no device address.
    pub blobs: Vec<Blob>,
    /// The grant of its container, if it was in one that had a grant.
    pub grant: Option<Grant>,
}

/// The grant of a container. Its GPUs are those of [`Client::gpus`]: the client sees no others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grant {
    /// The container's name at that time, as its engine gave it.
    pub container: String,
    /// Whether the container was given all GPUs of the machine.
    pub all_gpus: bool,
    /// Bytes of memory on each GPU, of all its processes together; none for no limit.
    pub device_memory: Option<u64>,
    /// Bytes of pinned memory.
    pub pinned_memory: Option<u64>,
    /// Processes that use a GPU.
    pub workers: Option<u32>,
    /// The protocol that the container's processes are to be checkpointed by.
    pub protocol: Option<Protocol>,
    /// Whether instances of one image of the container may share GPU memory that they only read.
    pub share: bool,
}

/// An environment variable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Setting {
    /// Name.
    pub name: String,
    /// Value.
    pub value: String,
}

/// A GPU as a client sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientGpu {
    /// The client's number for it.
    pub ordinal: u32,
    /// The UUID of a GPU in [`Host::gpus`].
    pub uuid: [u8; 16],
}

/// A client's command ring.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ring {
    /// Bytes.
    pub size: u64,
    /// Position of the first command not executed yet.
    pub head: u64,
}

/// The use of a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowKind {
    /// Device memory.
    Device,
    /// Pinned host memory.
    Pinned,
}

/// A range of addresses that must be free on restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Its use.
    pub kind: WindowKind,
    /// First address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// The name of a kind of object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObjectKind {
    /// The number in [`Object::kind`].
    pub kind: u32,
    /// The name.
    pub name: String,
}

/// A record of the object log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Object {
    /// Its place in the order of replay, strictly ascending.
    pub sequence: u64,
    /// Its kind; the worker's numbers.
    pub kind: u32,
    /// The client's handle.
    pub handle: u64,
    /// The client's number of the device.
    pub device: u32,
    /// Handle of the context, 0 where there is none.
    pub context: u64,
    /// Version of the encoding of `args`.
    pub args_version: u32,
    /// The arguments that it was made with, in the worker's encoding.
    pub args: Vec<u8>,
    /// The code images that it needs.
    pub code: Vec<CodeHash>,
}

/// An allocation of device memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allocation {
    /// The client's number of the device.
    pub device: u32,
    /// The address at which the client sees the memory.
    pub address: u64,
    /// Bytes it covers; its pieces cover exactly these.
    pub size: u64,
    /// Bytes the application asked for.
    pub requested_size: u64,
    /// [`POOLED`](Self::POOLED), [`PHYSICAL`](Self::PHYSICAL) or 0.
    pub flags: u64,
    /// The allocation's handle; 0 where it has none.
    pub handle: u64,
    /// The content.
    pub pieces: Vec<Piece>,
}

impl Allocation {
    /// In [`flags`](Self::flags): the memory came from the pool that its handle names, instead of belonging to a context.
    pub const POOLED: u64 = 1;
    /// In [`flags`](Self::flags): the memory is the physical allocation that its handle names, at the address where it was
    /// saved.
    pub const PHYSICAL: u64 = 2;
}

/// A device global.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Global {
    /// The client's number of the device.
    pub device: u32,
    /// Handle of its module.
    pub module: u64,
    /// Its symbol.
    pub name: String,
    /// The global's address at the dump; a restore compares.
    pub address: u64,
    /// Bytes; its pieces cover exactly these.
    pub size: u64,
    /// The content.
    pub pieces: Vec<Piece>,
    /// The hash of its content when its code was loaded, if that has addresses and was read; a restore compares.
    pub initial: Option<InitialHash>,
}

/// An allocation of pinned host memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pinned {
    /// The address of the memory, in the client and in the worker.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// The worker's flags.
    pub flags: u64,
    /// The content, or nothing where the CPU image holds it.
    pub pieces: Vec<Piece>,
}

/// Content at no device address: an array, the deferred commands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Blob {
    /// The number of its [`BlobKind`](crate::BlobKind), which a later version may have more of.
    pub kind: u32,
    /// The handle of the object that the content belongs to.
    pub handle: u64,
    /// The client's number of the device.
    pub device: u32,
    /// Bytes; its pieces cover exactly these.
    pub size: u64,
    /// The content.
    pub pieces: Vec<Piece>,
}

/// A run of content in a region. The pieces of a region follow each other without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Where in the region it begins.
    pub offset: u64,
    /// Bytes of content.
    pub length: u64,
    /// Hash of the content under the checkpoint's key.
    pub hash: PieceHash,
    /// Where the content is.
    pub storage: Storage,
}

/// Where the content of a piece is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// The content is stored nowhere, since it is zero throughout.
    Zero,
    /// The content is in a data file of this image.
    Stored(Extent),
    /// The content is in a data file of an ancestor.
    Parent {
        /// 1 is the parent, 2 the parent's parent.
        depth: u32,
        /// The place in that image.
        extent: Extent,
    },
}

/// A range of a data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extent {
    /// N of `rekindle-data-N.raw`.
    pub file: u32,
    /// Where the range begins, a multiple of [`BLOCK`](crate::BLOCK).
    pub offset: u64,
    /// Bytes in the file.
    pub length: u64,
    /// How the content in the range is compressed.
    pub compression: Compression,
}

/// How the content of a piece is compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Compression {
    /// The content is not compressed.
    #[default]
    None,
    /// LZ4, one block of it.
    Lz4,
    /// Zstandard, one frame of it.
    Zstd,
}
