//! From this crate's types to the messages of `proto/image.proto`.

use std::os::unix::ffi::OsStrExt;

use protobuf::{Message, MessageField};

use crate::ImageError;
use crate::hash::HashKey;
use crate::manifest::{
    Allocation, Blob, Build, Client, Compression, Global, Gpu, Grant, Host, Library, Manifest, Native, NativeGpu,
    Object, Parent, Phase, PhaseName, Piece, Pinned, Protocol, Storage, Window, WindowKind,
};
use crate::proto::image as proto;
use crate::record::CommitRecord;

/// The message that goes into `rekindle.img`.
pub(crate) fn manifest(from: &Manifest) -> Result<Vec<u8>, ImageError> {
    let (algorithm, key) = match from.hash_key {
        HashKey::Content(key) => (proto::HashAlgorithm::HASH_CONTENT, key.to_bytes().to_vec()),
        HashKey::Xxh3(seed) => (proto::HashAlgorithm::HASH_XXH3_128, seed.to_le_bytes().to_vec()),
    };
    bytes(&proto::Manifest {
        format_version: from.format_version,
        id: from.id.to_bytes().to_vec(),
        created: from.created,
        rekindle_version: from.rekindle_version.clone(),
        host: MessageField::some(host(&from.host)),
        protocol: protocol(from.protocol).into(),
        protocol_reason: from.protocol_reason.clone(),
        phases: from.phases.iter().map(phase).collect(),
        parent: from.parent.as_ref().map(parent).into(),
        hash_algorithm: algorithm.into(),
        hash_key: key,
        code: from
            .code
            .iter()
            .map(|it| proto::CodeImage {
                hash: it.hash.to_bytes().to_vec(),
                size: it.size,
                parent_depth: it.parent_depth,
                ..Default::default()
            })
            .collect(),
        clients: from.clients.iter().map(client).collect(),
        builds: from.builds.iter().map(build).collect(),
        natives: from.natives.iter().map(native).collect(),
        ..Default::default()
    })
}

fn native(from: &Native) -> proto::Native {
    let gpu = |it: &NativeGpu| proto::NativeGpu { uuid: it.uuid.to_vec(), name: it.name.clone(), ..Default::default() };
    proto::Native {
        pid: from.pid,
        namespace_pid: from.namespace_pid,
        command: from.command.clone(),
        restore_thread: from.restore_thread,
        driver_version: from.driver_version,
        gpus: from.gpus.iter().map(gpu).collect(),
        ..Default::default()
    }
}

fn build(from: &Build) -> proto::Build {
    let library = |it: &Library| proto::Library {
        name: it.name.clone(),
        hash: it.code.to_bytes().to_vec(),
        ..Default::default()
    };
    proto::Build {
        id: from.id.to_vec(),
        directory: from.directory.as_os_str().as_bytes().to_vec(),
        libraries: from.libraries.iter().map(library).collect(),
        ..Default::default()
    }
}

/// The message that goes into `rekindle.commit`.
pub(crate) fn commit(from: &CommitRecord) -> Result<Vec<u8>, ImageError> {
    let (high, low) = halves(from.manifest_hash.to_bytes());
    bytes(&proto::Commit {
        id: from.id.to_bytes().to_vec(),
        manifest_hash_high: high,
        manifest_hash_low: low,
        manifest_length: from.manifest_length,
        files: from
            .files
            .iter()
            .map(|it| proto::File { name: it.name.clone(), size: it.size, ..Default::default() })
            .collect(),
        companion: from.companion.as_ref().map(|it| it.name.clone()).unwrap_or_default(),
        companion_hash: from.companion.as_ref().map(|it| it.hash.to_bytes().to_vec()).unwrap_or_default(),
        others_overwritten: from.others_overwritten,
        ..Default::default()
    })
}

impl Client {
    /// The client encoded by itself, as a worker sends it to the daemon.
    ///
    /// # Errors
    /// [`ImageError::Invalid`] if it is too large for an image.
    pub fn to_bytes(&self) -> Result<Vec<u8>, ImageError> {
        bytes(&client(self))
    }
}

fn bytes(message: &impl Message) -> Result<Vec<u8>, ImageError> {
    // Encoding into memory fails only beyond what protobuf can express (2 GiB).
    message.write_to_bytes().map_err(|error| ImageError::Invalid { what: error.to_string() })
}

fn host(from: &Host) -> proto::Host {
    proto::Host {
        name: from.name.clone(),
        driver_version: from.driver_version.clone(),
        driver_build: from.driver_build.clone(),
        gpus: from.gpus.iter().map(gpu).collect(),
        ..Default::default()
    }
}

fn gpu(from: &Gpu) -> proto::Gpu {
    proto::Gpu {
        uuid: from.uuid.to_vec(),
        name: from.name.clone(),
        compute_major: from.compute_major,
        compute_minor: from.compute_minor,
        total_memory: from.total_memory,
        pci: from.pci.clone(),
        multiprocessors: from.multiprocessors,
        ..Default::default()
    }
}

fn protocol(from: Protocol) -> proto::Protocol {
    match from {
        Protocol::Stop => proto::Protocol::PROTOCOL_STOP,
        Protocol::Clone => proto::Protocol::PROTOCOL_CLONE,
        Protocol::Cow => proto::Protocol::PROTOCOL_COW,
        Protocol::Recopy => proto::Protocol::PROTOCOL_RECOPY,
        Protocol::Auto => proto::Protocol::PROTOCOL_AUTO,
        Protocol::Unknown => proto::Protocol::PROTOCOL_UNKNOWN,
    }
}

fn phase(from: &Phase) -> proto::Phase {
    let name = match from.name {
        PhaseName::PreCopy => proto::PhaseName::PHASE_PRE_COPY,
        PhaseName::Quiesce => proto::PhaseName::PHASE_QUIESCE,
        PhaseName::Freeze => proto::PhaseName::PHASE_FREEZE,
        PhaseName::Hash => proto::PhaseName::PHASE_HASH,
        PhaseName::Clone => proto::PhaseName::PHASE_CLONE,
        PhaseName::Copy => proto::PhaseName::PHASE_COPY,
        PhaseName::Write => proto::PhaseName::PHASE_WRITE,
        PhaseName::Resume => proto::PhaseName::PHASE_RESUME,
        PhaseName::Load => proto::PhaseName::PHASE_LOAD,
        PhaseName::Replay => proto::PhaseName::PHASE_REPLAY,
        PhaseName::Stall => proto::PhaseName::PHASE_STALL,
        PhaseName::Wait => proto::PhaseName::PHASE_WAIT,
        PhaseName::Unknown => proto::PhaseName::PHASE_UNKNOWN,
    };
    proto::Phase {
        name: name.into(),
        start: from.start,
        duration: from.duration,
        bytes: from.bytes,
        ..Default::default()
    }
}

fn parent(from: &Parent) -> proto::Parent {
    let (high, low) = halves(from.manifest_hash.to_bytes());
    proto::Parent {
        path: from.path.as_os_str().as_bytes().to_vec(),
        id: from.id.to_bytes().to_vec(),
        manifest_hash_high: high,
        manifest_hash_low: low,
        ..Default::default()
    }
}

fn client(from: &Client) -> proto::Client {
    proto::Client {
        index: from.index,
        pid: from.pid,
        namespace_pid: from.namespace_pid,
        command: from.command.clone(),
        wire_version: from.wire_version,
        socket_path: from.socket_path.as_os_str().as_bytes().to_vec(),
        socket_ids: from.socket_ids.clone(),
        settings: from
            .settings
            .iter()
            .map(|it| proto::Setting { name: it.name.clone(), value: it.value.clone(), ..Default::default() })
            .collect(),
        gpus: from
            .gpus
            .iter()
            .map(|it| proto::ClientGpu { ordinal: it.ordinal, uuid: it.uuid.to_vec(), ..Default::default() })
            .collect(),
        ring: MessageField::some(proto::Ring { size: from.ring.size, head: from.ring.head, ..Default::default() }),
        shared_state: from.shared_state.clone(),
        worker_version: from.worker_version,
        worker_state: from.worker_state.clone(),
        windows: from.windows.iter().map(window).collect(),
        object_kinds: from
            .object_kinds
            .iter()
            .map(|it| proto::ObjectKind { kind: it.kind, name: it.name.clone(), ..Default::default() })
            .collect(),
        objects: from.objects.iter().map(object).collect(),
        allocations: from.allocations.iter().map(allocation).collect(),
        globals: from.globals.iter().map(global).collect(),
        pinned: from.pinned.iter().map(pinned).collect(),
        blobs: from.blobs.iter().map(blob).collect(),
        grant: from.grant.as_ref().map(grant).into(),
        ..Default::default()
    }
}

fn grant(from: &Grant) -> proto::Grant {
    proto::Grant {
        container: from.container.clone(),
        all_gpus: from.all_gpus,
        device_memory: from.device_memory.unwrap_or(0),
        pinned_memory: from.pinned_memory.unwrap_or(0),
        workers: from.workers.unwrap_or(0),
        protocol: from.protocol.map(|it| it.as_str().to_owned()).unwrap_or_default(),
        share: from.share,
        ..Default::default()
    }
}

fn window(from: &Window) -> proto::Window {
    let kind = match from.kind {
        WindowKind::Device => proto::WindowKind::WINDOW_DEVICE,
        WindowKind::Pinned => proto::WindowKind::WINDOW_PINNED,
    };
    proto::Window { kind: kind.into(), address: from.address, size: from.size, ..Default::default() }
}

fn object(from: &Object) -> proto::Object {
    proto::Object {
        sequence: from.sequence,
        kind: from.kind,
        handle: from.handle,
        device: from.device,
        context: from.context,
        args_version: from.args_version,
        args: from.args.clone(),
        code: from.code.iter().map(|it| it.to_bytes().to_vec()).collect(),
        ..Default::default()
    }
}

fn allocation(from: &Allocation) -> proto::Allocation {
    proto::Allocation {
        device: from.device,
        address: from.address,
        size: from.size,
        requested_size: from.requested_size,
        flags: from.flags,
        handle: from.handle,
        pieces: from.pieces.iter().map(piece).collect(),
        ..Default::default()
    }
}

fn global(from: &Global) -> proto::Global {
    proto::Global {
        device: from.device,
        module: from.module,
        name: from.name.clone(),
        address: from.address,
        size: from.size,
        pieces: from.pieces.iter().map(piece).collect(),
        initial_hash: from.initial.map(|it| it.to_bytes().to_vec()).unwrap_or_default(),
        ..Default::default()
    }
}

fn pinned(from: &Pinned) -> proto::Pinned {
    proto::Pinned {
        address: from.address,
        size: from.size,
        flags: from.flags,
        pieces: from.pieces.iter().map(piece).collect(),
        ..Default::default()
    }
}

fn blob(from: &Blob) -> proto::Blob {
    proto::Blob {
        kind: from.kind,
        handle: from.handle,
        size: from.size,
        device: from.device,
        pieces: from.pieces.iter().map(piece).collect(),
        ..Default::default()
    }
}

fn piece(from: &Piece) -> proto::Piece {
    let (hash_high, hash_low) = halves(from.hash.to_bytes());
    let mut to = proto::Piece { offset: from.offset, length: from.length, hash_high, hash_low, ..Default::default() };
    let extent = match from.storage {
        Storage::Zero => {
            to.zero = true;
            return to;
        }
        Storage::Stored(extent) => extent,
        Storage::Parent { depth, extent } => {
            to.parent_depth = depth;
            extent
        }
    };
    to.file = extent.file;
    to.file_offset = extent.offset;
    to.stored_length = extent.length;
    to.compression = match extent.compression {
        Compression::None => proto::Compression::COMPRESSION_NONE,
        Compression::Lz4 => proto::Compression::COMPRESSION_LZ4,
        Compression::Zstd => proto::Compression::COMPRESSION_ZSTD,
    }
    .into();
    to
}

/// A hash as two numbers: in a message these cost no allocation of their own.
fn halves(bytes: [u8; 16]) -> (u64, u64) {
    let value = u128::from_be_bytes(bytes);
    ((value >> 64) as u64, value as u64)
}
