//! Messages on the daemon's control socket, and between the daemon and its workers.
//!
//! Every connection to the daemon opens with an [`Opening`], which names both versions; what follows depends on the
//! request in it.
//!
//! A dump, on one connection of the plugin's (hook order as CRIU calls them):
//!
//! ```text
//!   PAUSE_DEVICES(root)      Pause{root} + [image directory]  -> Paused{pids} | Failed      all clients of the tree quiesced
//!   CHECKPOINT_DEVICES(pid)  Frozen{pid}                      -> Frozen{ours}  | Failed      the copy begins with the first
//!   DUMP_UNIX_SK(fd, id)     Socket{id, cookie}               -> Socket{ours}
//!   exit(DUMP, 0)            Finish                           -> Durable | Failed            after the early resume
//!   exit(DUMP, error)        (close)
//! ```
//!
//! When the connection closes, whatever the reason, rings that are still closed open again, and an image that is not
//! durable is removed: a killed CRIU leaves the application running. A kill dump ends the same way, its tasks having
//! been killed before CRIU exits.
//!
//! Who has CRIU make a dump may say before how, and hears what becomes of it (`rekindle checkpoint`), on a connection of its own:
//!
//! ```text
//!   Checkpoint{root}  -> Awaited | Failed     (then CRIU is started, and the dump is told as above)
//!   Progress*         -> Progress             until this connection closes
//! ```
//!
//! With `moment_ms` the answer to `Pause` waits until a client of the tree says `Moment`, which its application has it do.
//!
//! A restore:
//!
//! ```text
//!   init(RESTORE)            Restore + [image directory]      -> NotOurs | Prepared{restore, sockets} | Failed
//!   RESTORE_UNIX_SK(id)      (a connection of its own, in the target) Reattach{restore, socket}
//!   RESUME_DEVICES_LATE(pid) Resume{pid}                      -> Resumed{ours} | Failed      the last one opens the rings
//!   exit(RESTORE, status)    (close)
//! ```
//!
//! When that connection closes before the rings are open, the restore's workers are given up.
//!
//! A worker and its daemon, on the worker's channel, which the worker inherits from the daemon and later, when a daemon
//! is replaced, is a connection of its own to the new one:
//!
//! ```text
//!   spare        Ready (unasked)
//!   attach       (Belong -> Done | Failed)    Adopt   -> Done | Failed     it has answered the client itself, either way
//!   dump         (Quiesce | Advance)* -> Done | Busy | Failed, until all of a tree are at rest together
//!                Reserve -> Done, Precopy -> Done | Failed, Progress+ before the quiesce, where the protocol says so
//!                Save -> Begun | Failed, SaveCode -> Done | Failed, Progress -> Saving | Saved | Failed
//!                (Cancel cuts the copy short)     Alive again and again, Hold -> Done | Failed
//!                Open    -> Done, once a `Saving` has said that it may, or after `Saved`
//!   sharing      Export -> Exported | Failed     Import -> Done | Failed     Shares -> Shares     at any time
//!   restore      MakeShared+, TakeShared*, Code*, Load -> Done | Failed     Pinned*, Connect -> Done | Failed     Open -> Done
//! ```
//!
//! A quiesced worker from whose daemon nothing comes for a time gives up what it was saving and opens its ring by itself:
//! the daemon may be stopped, or hang. `Hold` tells the daemon, should it go on, so that no image is made of it.
//!
//! A channel that closes tells a worker that the daemon is gone: a spare one, and one that is being restored, ends; one
//! that serves a client gives up what it was saving, opens its ring, and sends `Rejoin` until a daemon takes it. It does so
//! at a socket for workers, which is called as the daemon's with `.workers` behind.

use serde::{Deserialize, Serialize};

use crate::access::AccessReport;
use crate::attach::Attach;
use crate::ipc::{PieceId, Shared, Token};
use crate::nvml;

/// Where the daemon listens unless its configuration says otherwise, and where everybody looks for it unless
/// `REKINDLE_SOCKET` does.
pub const DEFAULT_SOCKET: &str = "/run/rekindle/rekindled.sock";

/// What the reason of a [`Reply::Failed`] says when a dump found out, too late to make it good, that a command wrote to
/// memory that it was not expected to write to. The same dump by the protocol `stop` does not depend on that.
pub const WRONG_GUESS: &str = "a guess of what is written was wrong";

/// The first message of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opening {
    /// [`crate::WIRE_VERSION`] of who connects.
    pub wire: u32,
    /// [`crate::TABLE_FINGERPRINT`] of who connects. Only an `Attach` depends on it.
    pub table: u64,
    /// The request, as JSON, so that a daemon of another version can still read the versions and refuse.
    pub request: serde_json::Value,
}

impl Opening {
    /// Wraps a request with this build's versions.
    pub fn new(request: &Request) -> Result<Self, serde_json::Error> {
        let request = serde_json::to_value(request)?;
        Ok(Self { wire: crate::WIRE_VERSION, table: crate::TABLE_FINGERPRINT, request })
    }
}

/// What one can ask of the daemon. `Attach` and `Reattach` hand the connection to a worker; `Pause` and `Restore` open
/// a session that lasts as long as the connection, whose later messages are bare `Request`s.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// The interposer asks for a worker. Comes with the ring's and the staging's memfd.
    Attach(Attach),
    /// The plugin, in a process being restored: this connection takes the place of the dumped one.
    Reattach {
        /// From [`Reply::Prepared`].
        restore: u64,
        /// CRIU's id of the socket.
        socket: u32,
        /// `SO_COOKIE` of this end of the connection: the next dump asks by it. There is no reply, since whatever came
        /// would be queued to the restored process.
        cookie: u64,
    },
    /// A worker whose daemon is gone offers itself to the one that took its place. Comes with a copy of its client's
    /// connection, whose credentials say who the client is. After `Rejoined` this connection is the worker's channel.
    Rejoin {
        /// What the client said when it attached.
        attach: Attach,
        /// What the client was told.
        attached: crate::attach::Attached,
    },

    /// Quiesce all clients of a process tree. Comes with the image directory.
    Pause {
        /// The root of the tree, as CRIU's pid namespace numbers it.
        root: i32,
        /// `criu dump --leave-running`.
        leave_running: bool,
    },
    /// This task is stopped. The first of a session starts the copy.
    Frozen {
        /// The task.
        pid: i32,
    },
    /// Whose socket is this?
    Socket {
        /// CRIU's id, by which the restore asks again.
        id: u32,
        /// `SO_COOKIE` of the socket.
        cookie: u64,
    },
    /// Answer when the image is durable.
    Finish,

    /// Prepare a restore from the image directory that comes with this.
    Restore,
    /// This task is complete but stopped; its shared memory can be taken.
    Resume {
        /// The task, as CRIU's pid namespace numbers it.
        pid: i32,
    },

    /// List the clients.
    List,
    /// Who are you?
    Status,
    /// What has this client asked for?
    Calls {
        /// The client's process, as the asker numbers it.
        pid: i32,
    },
    /// What has been counted of this client's accesses to memory?
    Access {
        /// The client's process, as the asker numbers it.
        pid: i32,
    },
    /// Can this process tree be checkpointed now?
    Check {
        /// Its root, as the asker numbers it.
        pid: i32,
    },

    /// Which protocol is a client to be checkpointed by?
    Protocol {
        /// The client's process, as the asker numbers it.
        pid: i32,
        /// What is to be different from now on.
        change: ProtocolChange,
    },

    /// This process tree is about to be checkpointed by whoever holds this connection, which is a session for as long as
    /// that goes on. `Progress` follows, any number of times.
    Checkpoint {
        /// Its root, as the asker numbers it.
        root: i32,
        /// By this protocol, whatever others say.
        protocol: Option<String>,
        /// Whether a dump of it begins only when one of its processes says `Moment`, and fails if none does for so many
        /// milliseconds.
        moment_ms: Option<u64>,
    },
    /// The asker, a client, is where it wants to be checkpointed. Answered when its worker takes no more commands.
    Moment,
    /// How far is the last dump of the tree?
    Progress,

    /// Let a container use GPUs. Only root and the daemon's own user may. What it was given before it keeps; limits that
    /// are said take the place of others.
    Grant {
        /// The container's id.
        container: String,
        /// The process that it begins with, as the asker numbers it.
        pid: i32,
        /// Which: `all`, numbers as `Status` lists GPUs, or UUIDs (`GPU-...`, which may be cut short).
        gpus: Vec<String>,
        /// Of all its processes together.
        limits: ContainerLimits,
        /// The protocol that they are to be checkpointed by, by its name, if its maker says so.
        protocol: Option<String>,
    },
    /// A container is gone, and what it was given with it. One that is still there keeps it.
    Revoke {
        /// The container's id.
        container: String,
    },

    /// Have the asker's worker get the memory that this names.
    Import {
        /// As the exporter's worker has given it.
        token: Token,
    },

    /// Which GPUs may the asker see?
    Gpus,
    /// How much memory of this GPU is free?
    GpuMemory {
        /// Its place in [`Reply::Gpus`].
        gpu: u32,
    },
    /// Who computes on this GPU?
    GpuProcesses {
        /// Its place in [`Reply::Gpus`].
        gpu: u32,
    },
    /// What does the machine's NVML say?
    GpuAsk(nvml::Question),
}

/// What becomes of the protocol that somebody has chosen for a client.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub enum ProtocolChange {
    /// Nothing: only say which it is.
    Keep,
    /// It is this one, by its name, as long as the client lives.
    Choose(String),
    /// None is chosen: what the program, its container or the configuration says counts again.
    Forget,
}

/// The most that the processes of one container may have together, where there is a limit.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct ContainerLimits {
    /// Bytes of memory on each GPU.
    pub device_memory: Option<u64>,
    /// Bytes of pinned host memory.
    pub pinned_memory: Option<u64>,
    /// Processes that use a GPU at a time, each of which has a worker.
    pub workers: Option<u32>,
}

/// The daemon's answers.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub enum Reply {
    /// The request failed, for this reason; it says what to do.
    Failed {
        /// One line.
        reason: String,
    },
    /// The clients of the tree, quiesced. Empty: the dump is none of ours.
    Paused {
        /// Their pids.
        pids: Vec<i32>,
    },
    /// To `Frozen`.
    Frozen {
        /// Whether the task is a client of ours.
        ours: bool,
    },
    /// To `Socket`.
    Socket {
        /// Whether the socket leads to this daemon or one of its workers.
        ours: bool,
        /// Whether its process asks again when it finds it closed: what it has not read is no loss.
        again: bool,
    },
    /// The image is complete and on disk, commit record included.
    Durable,
    /// There is no image of ours in the directory.
    NotOurs,
    /// Workers are loading; the processes may be rebuilt.
    Prepared {
        /// Names this restore.
        restore: u64,
        /// The sockets to connect anew.
        sockets: Vec<RestoredSocket>,
    },
    /// To `Resume`.
    Resumed {
        /// Whether the task is one of this restore's clients.
        ours: bool,
        /// Whether it was the last, so that the rings are open now.
        open: bool,
    },
    /// To `List`.
    Clients(Vec<ClientInfo>),
    /// To `Status`.
    Status(StatusInfo),
    /// To `Calls`: what was called at all, in the order of the driver table.
    Calls(Vec<CallInfo>),
    /// To `Access`.
    Access(Box<AccessReport>),
    /// To `Check`: the processes of the tree that use a GPU.
    Checked(Vec<CheckInfo>),
    /// To `Rejoin`: [`WorkerRequest`]s follow on this connection.
    Rejoined,
    /// To `Protocol`: what holds now.
    Protocol {
        /// By its name.
        protocol: String,
        /// Who said so.
        reason: String,
    },
    /// To `Checkpoint`: go ahead.
    Awaited,
    /// To `Moment`.
    Moment {
        /// Whether somebody has waited for it.
        awaited: bool,
    },
    /// To `Progress`; none as long as no dump of the tree has come, or where none of its processes is a client.
    Progress(Option<DumpInfo>),
    /// To `Grant`: the UUIDs of all that the container may use now.
    Granted {
        /// As `GPU-...`.
        gpus: Vec<String>,
    },
    /// To `Revoke`.
    Revoked,
    /// To `Import`: the worker has it under this number.
    Imported {
        /// For [`crate::command::PIECE_IMPORT`].
        ticket: u64,
        /// Pieces.
        count: usize,
        /// Whether it is the asker's own.
        own: bool,
    },
    /// To `Import`: nobody whom the asker may share with has memory of this name.
    NotShared,
    /// To `Gpus`.
    Gpus(nvml::Gpus),
    /// To `GpuMemory`.
    GpuMemory(nvml::Memory),
    /// To `GpuProcesses`: those that the asker may know of.
    GpuProcesses(Vec<nvml::Process>),
    /// To `GpuAsk`.
    GpuAnswer(nvml::Answer),
}

/// A dumped socket that the restore connects anew.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct RestoredSocket {
    /// CRIU's id.
    pub id: u32,
    /// The daemon's socket as the process found it.
    pub path: String,
}

/// One client, for `rekindle ps`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct ClientInfo {
    /// The application's pid, as the daemon sees it.
    pub pid: i32,
    /// Its worker's pid.
    pub worker: i32,
    /// Its command's name.
    pub command: String,
    /// `running`, `quiesced`, `saving` or `restoring`; `lost` where its worker has died.
    pub state: String,
    /// Bytes of device memory per device, by the worker's numbering.
    pub device_memory: Vec<u64>,
    /// Bytes of pinned host memory.
    pub pinned_memory: u64,
    /// Commands executed so far.
    pub commands: u64,
    /// The protocol that it is to be checkpointed by; empty where it cannot be.
    #[serde(default)]
    pub protocol: String,
    /// Who said so.
    #[serde(default)]
    pub protocol_reason: String,
    /// The dump that goes on, if one does.
    #[serde(default)]
    pub dump: Option<DumpInfo>,
}

/// A dump, as far as it has come.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct DumpInfo {
    /// What it is at: a phase, by the name that `rekindle inspect` has for it; before these, `moment` while the application
    /// is waited for.
    pub phase: String,
    /// Bytes of GPU memory that the image has by now, about.
    pub done: u64,
    /// And those that there were at its beginning.
    pub bytes: u64,
    /// Since when, in milliseconds.
    pub elapsed_ms: u64,
    /// What became of it, if it is over.
    pub outcome: Option<DumpOutcome>,
}

/// What became of a dump.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub enum DumpOutcome {
    /// There is an image.
    Durable {
        /// Its name.
        id: String,
        /// The protocol that it was made by.
        protocol: String,
        /// Why it was this one.
        protocol_reason: String,
        /// Bytes in our files.
        bytes: u64,
        /// How long each phase took.
        phases: Vec<PhaseInfo>,
    },
    /// There is none, and the processes go on.
    Failed {
        /// One line.
        reason: String,
    },
}

/// A phase of a dump.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct PhaseInfo {
    /// Its name, as `rekindle inspect` has it.
    pub name: String,
    /// Nanoseconds.
    pub duration_ns: u64,
    /// Bytes that it handled; 0 where that means nothing.
    pub bytes: u64,
}

/// How often one driver call was asked for, for `rekindle ps --calls`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct CallInfo {
    /// The symbol.
    pub call: String,
    /// How it travels, as the driver table says: `local`, `send`, `wait`, `hand` or `refused`.
    pub how: String,
    /// Calls.
    pub asked: u64,
    /// Those that were answered with `CUDA_ERROR_NOT_SUPPORTED`.
    pub refused: u64,
}

/// Whether one process can be checkpointed, for `rekindle check`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct CheckInfo {
    /// The process, as the asker numbers it.
    pub pid: i32,
    /// Its command's name.
    pub command: String,
    /// Bytes of device memory, over all devices.
    pub device_memory: u64,
    /// Why it cannot be checkpointed now; none if it can.
    pub reasons: Vec<String>,
}

/// The daemon itself.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct StatusInfo {
    /// Rekindle's version.
    pub version: String,
    /// [`crate::WIRE_VERSION`].
    pub wire: u32,
    /// The driver library that workers load.
    pub cuda_driver: String,
    /// Workers that are ready and unused.
    pub spare: u32,
    /// Workers in use.
    pub used: u32,
    /// The most clients that there may be at a time, if there is a limit.
    #[serde(default)]
    pub max: Option<u32>,
    /// Why no worker comes up, if that is so.
    #[serde(default)]
    pub problem: Option<String>,
    /// What workers have found the driver to be: `cuDriverGetVersion`. None before the first is ready.
    #[serde(default)]
    pub driver_version: Option<i32>,
    /// And the GPUs.
    #[serde(default)]
    pub gpus: Vec<GpuInfo>,
    /// What workers give up.
    #[serde(default)]
    pub sandbox: Option<SandboxInfo>,
}

/// How workers are confined, for `rekindle doctor`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SandboxInfo {
    /// What of the sandbox is there, in words.
    pub parts: String,
    /// What is not, and why.
    pub missing: Vec<String>,
}

/// One GPU, for `rekindle doctor`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct GpuInfo {
    /// As the driver names it.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// Where it is.
    pub pci_bus_id: String,
    /// As `GPU-...`.
    #[serde(default)]
    pub uuid: String,
}

/// What the daemon asks of a worker, one at a time, each but `Cancel` and `Alive` answered by a [`WorkerReply`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum WorkerRequest {
    /// Serve this client. Comes with its connection, ring and staging; the worker sends it the [`crate::attach::Answer`].
    Adopt {
        /// What the client said.
        attach: Attach,
        /// What it may have.
        limits: Limits,
    },
    /// Count what your client has with what others of its container have. Comes with the container's table, before
    /// `Adopt`, or before `Connect`.
    Belong {
        /// Which row of it is yours.
        row: u32,
        /// The GPUs that the container has: the order of its columns.
        gpus: Vec<[u8; 16]>,
        /// What all may have together.
        limits: ContainerLimits,
    },
    /// Stop at a command boundary and wait until every stream is idle. A worker that says `Busy` has stopped too.
    Quiesce {
        /// How long to wait for that.
        timeout_ms: u64,
    },
    /// Execute what comes from the ring up to the next command for the device, that included, and quiesce again:
    /// something may wait for it.
    Advance {
        /// How long to wait, for the command and for the rest.
        timeout_ms: u64,
    },
    /// Open the ring again.
    Open,
    /// Set device memory aside for clones, in the background. Before the quiesce; given back when the copy is over, or
    /// with `Open`.
    Reserve {
        /// How much on each device, where it is free: bytes, or as much as the client has.
        bytes: Option<u64>,
    },
    /// Begin to copy the device memory into the data file that comes with this while the client runs, or copy again what
    /// has changed since the last one. The blob is as in `Save`. `Progress` tells when it is done. `Save` then copies what has changed since, into
    /// the same file.
    Precopy {
        /// As in `Save`.
        hash_key: [u8; 16],
        /// As in `Save`.
        file: u32,
        /// As in `Save`.
        compression: String,
    },
    /// Begin to write the device memory into the data file that comes with this, and say what the image needs. Only
    /// while quiesced. The blob is a table of what need not be written, since another image has it, and may be empty.
    Save {
        /// Goes into every hash; from the image's manifest.
        hash_key: [u8; 16],
        /// The number of the data file.
        file: u32,
        /// Memory that is saved with other clients of the image.
        elsewhere: Vec<PieceId>,
        /// How content is compressed: `off`, `lz4`, `zstd`, `auto`.
        compression: String,
        /// How memory is kept as it is while the client goes on.
        copying: Copying,
        /// Whether `Precopy` was asked for this image.
        precopied: bool,
    },
    /// How far is it?
    Progress,
    /// Write a code image into the file that comes with this.
    SaveCode {
        /// Which, by its content's hash as lowercase hex.
        hash: String,
    },
    /// Give up the `Save` that is going on; it then fails. With `Alive` the only request that comes before the answer
    /// to another and has none of its own; a worker that is not saving (any more) takes no notice.
    Cancel,
    /// Code files for the `Load` that follows, where it has more than one message can carry. They come with this, in
    /// order. Any number of times.
    Code {
        /// Their hashes.
        code: Vec<String>,
    },
    /// Become the client that the blob (its part of the manifest) describes: map, load code, replay, load data. Comes
    /// with the data files in the order of `data`, then the code files in the order of `code`.
    Load {
        /// The data files.
        data: Vec<DataFile>,
        /// How the image's pieces are hashed, as its format numbers that.
        hash_algorithm: u32,
        /// Goes into every hash; from the image's manifest.
        hash_key: [u8; 16],
        /// The hashes of the code files.
        code: Vec<String>,
        /// What the client may have beyond what it has in the image.
        limits: Limits,
    },
    /// Memfds of pinned memory for the `Connect` that follows, where it has more than one message can carry. They come
    /// with this, in order. Any number of times.
    Pinned {
        /// What they are.
        pinned: Vec<crate::attach::Pinned>,
    },
    /// The restored process is there. Comes with its connection, ring, staging, and the memfds of `pinned` in order.
    Connect {
        /// Pinned memory that the process has mapped.
        pinned: Vec<crate::attach::Pinned>,
    },
    /// For `rekindle ps`.
    Describe,
    /// What the client has asked for.
    Calls,
    /// Keep this of the client for the daemon that takes the place of this one: the protocol that was chosen for it.
    Remember {
        /// By its name; none is chosen any more.
        protocol: Option<String>,
    },
    /// Whether the client is to say when it is where it wants to be checkpointed.
    Moment {
        /// Somebody waits for it.
        awaited: bool,
    },
    /// What has been counted of the client's accesses. `Failed` where the reporting mode is off.
    Access,
    /// Whether the client has been at rest ever since it was quiesced. `Failed` if it has gone on by itself, since the
    /// daemon was silent.
    Hold,
    /// The daemon is there. Comes as long as a ring is to stay closed, at any time; not answered.
    Alive,
    /// Whether the client could be saved now.
    Check,
    /// How much memory the devices have, as the driver counts it.
    Memory,
    /// Descriptors of the memory that this names, from a certain piece on.
    Export {
        /// The name.
        token: Token,
        /// The first piece that is wanted.
        first: usize,
    },
    /// Keep this memory for the client, which will ask for it. Comes with the descriptors of its pieces, which may take
    /// several of these.
    Import {
        /// By this number.
        ticket: u64,
        /// What it is.
        shared: Shared,
    },
    /// Which memory does the client share, or may it have shared?
    Shares,
    /// Of the client that the blob describes, to be loaded: make the memory whose content it has and others may share. `Load`
    /// follows, when those that come have all been sent.
    MakeShared {
        /// The first whose descriptor is wanted.
        first: usize,
    },
    /// Memory that others have made for the `Load` that follows. Comes with the descriptors, in this order.
    TakeShared {
        /// Its names.
        ids: Vec<PieceId>,
    },
}

/// A data file of an image or of one that it builds on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct DataFile {
    /// 0 for the image's own, 1 for its parent's, 2 for the parent's parent's.
    pub depth: u32,
    /// Its number in that image.
    pub index: u32,
}

/// The most that one client may have, where there is a limit.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory on each device.
    pub device_memory: Option<u64>,
    /// Bytes of pinned host memory.
    pub pinned_memory: Option<u64>,
}

/// How a worker keeps the state of the quiesce while it copies.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub enum Copying {
    /// The ring stays closed until all is copied.
    #[default]
    Stop,
    /// What fits into the memory that was set aside is cloned on the device; the rest is kept as in `Cow`.
    Clone,
    /// What a command may write is cloned, or copied out, before the command.
    Cow,
}

/// What a worker has done at a quiesce, and is about to do.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Secured {
    /// Bytes whose hashes were made on the device, and how long that took, in nanoseconds.
    pub hashed: u64,
    /// See `hashed`.
    pub hash_ns: u64,
    /// Bytes that were cloned (and hashed in passing), and how long that took, in nanoseconds.
    pub cloned: u64,
    /// See `cloned`.
    pub clone_ns: u64,
    /// Bytes that are copied before the ring may open.
    pub closed: u64,
    /// Bytes that a copy made while the client ran has already.
    pub unchanged: u64,
    /// Bytes in all.
    pub bytes: u64,
}

/// What commands had to wait for after the ring was open.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Waits {
    /// Commands before which memory had to be cloned or copied out.
    pub commands: u64,
    /// Bytes that were cloned for them.
    pub cloned: u64,
    /// How long they waited, in nanoseconds.
    pub ns: u64,
}

/// A code image that a `Save` found.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SavedCode {
    /// Its content's hash, as lowercase hex.
    pub hash: String,
    /// Bytes.
    pub size: u64,
}

/// A worker's answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum WorkerReply {
    /// Said once, unasked, when contexts are ready.
    Ready {
        /// The devices, for the daemon's checks.
        attached: crate::attach::Attached,
    },
    /// Done.
    Done,
    /// To `Quiesce` and `Advance`: no command is executed, but the device is not at rest.
    Busy {
        /// With what.
        what: String,
    },
    /// Not done, and why; the client goes on as before.
    Failed {
        /// One line.
        reason: String,
    },
    /// To `Save`: the copy has begun.
    Begun {
        /// The code images that the manifest refers to.
        code: Vec<SavedCode>,
        /// What has been done at the quiesce.
        secured: Secured,
    },
    /// To `Progress`: it goes on.
    Saving {
        /// Whether the ring may be opened.
        may_open: bool,
        /// Bytes copied.
        copied: u64,
        /// Of so many.
        bytes: u64,
    },
    /// To `Progress`: everything is copied. After a `Save` the client's part of the manifest is the blob.
    Saved {
        /// Bytes of device memory.
        bytes: u64,
        /// What commands had to wait for.
        waits: Waits,
    },
    /// To `Describe`.
    Description {
        /// See [`ClientInfo`].
        device_memory: Vec<u64>,
        /// See [`ClientInfo`].
        pinned_memory: u64,
        /// See [`ClientInfo`].
        commands: u64,
    },
    /// To `Calls`.
    Calls {
        /// By the places of functions in the driver table.
        counts: Vec<crate::calls::Count>,
    },
    /// To `Access`.
    Access {
        /// The counts.
        report: Box<AccessReport>,
    },
    /// To `Check`.
    Checked {
        /// Why it could not; none if it could.
        reasons: Vec<String>,
    },
    /// To `Export`, with the descriptors.
    Exported {
        /// What it is.
        shared: Shared,
    },
    /// To `MakeShared`, with the descriptors of `ids`.
    MadeShared {
        /// How many there are.
        count: usize,
        /// Those that come with this.
        ids: Vec<PieceId>,
        /// What it needs of others.
        needed: Vec<PieceId>,
    },
    /// To `Shares`.
    Shares {
        /// Memory of its own that it has given names.
        own: Vec<PieceId>,
        /// Memory of others that it has.
        others: Vec<PieceId>,
    },
    /// To `Memory`.
    Memory {
        /// Of each device.
        devices: Vec<nvml::Memory>,
    },
}
