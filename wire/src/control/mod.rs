//! Messages on the daemon's control socket, and between the daemon and its workers.
//!
//! Every connection to the daemon opens with an [`Opening`], which says which versions of these messages its sender speaks;
//! what follows depends on the request in it.
//!
//! Peers may be of several releases. So a message only ever grows: a new field has a default, for senders that do not send
//! it; a receiver ignores a field that it does not know; a new variant is sent only to peers that speak the version that
//! introduced it.
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
//! Processes of the tree that use NVIDIA's own driver library ("native" ones) are checkpointed by the driver, while a thread of
//! theirs runs that the plugin lets run:
//!
//! ```text
//!   PAUSE_DEVICES(root)      Pause{root} + [image directory]  -> PausedNatives{pids, natives}  these are locked, too
//!   CHECKPOINT_DEVICES(pid)  NativeCheckpoint{pid}            -> NativeDone | Failed     after Frozen, for each native one
//!   exit(DUMP, any)          NativeResume{pid}                -> NativeDone | Failed     for each that goes on
//! ```
//!
//! When the connection closes, whatever the reason, rings that are still closed open again, native processes that live get their
//! GPU memory back and are unlocked, and an image that is not
//! durable is removed: a killed CRIU leaves the application running. A kill dump ends the same way, its tasks having
//! been killed before CRIU exits.
//!
//! A program that has CRIU make a dump (`rekindle checkpoint`) may say beforehand how the dump is to be made, and hears of
//! its progress, on a connection of the program's own:
//!
//! ```text
//!   Checkpoint{root}  -> Awaited | Failed     (then CRIU is started, and the dump is told as above)
//!   Progress*         -> Progress             until this connection closes
//! ```
//!
//! Dumps of several trees are made at one moment if such a program has said so before it starts CRIU for each:
//!
//! ```text
//!   Together{roots}   -> Awaited | Failed
//!   Progress*         -> Together             until this connection closes
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
//! A native process of the image is `Native` in the reply to `Resume`; `NativeResume` follows while its thread runs, and its reply
//! tells whether it was the last.
//!
//! When that connection closes before the rings are open, the daemon gives up the restore's workers.
//!
//! A program that has CRIU restore an image (`rekindle restore`) hears of the progress on a connection of its own:
//!
//! ```text
//!   WatchRestore  -> Awaited | Failed         (then the program starts CRIU, and the restore is told as above)
//!   Progress*     -> RestoreProgress          until this connection closes
//! ```
//!
//! A process tree moves to another host while it runs. Its memory is copied beforehand, any number of times, each time into an
//! image that the next one builds on:
//!
//! ```text
//!   PreCopy{root} + [image directory]  -> PreCopied | Failed
//! ```
//!
//! The daemon of the other host loads the memory of such an image, which was sent there, while the processes run on:
//!
//! ```text
//!   Preload + [image directory]      -> Preloaded | Failed    again and again on this connection
//! ```
//!
//! Then a program on each host has CRIU do its part. The tree stands still from the dump on; the dump and the restore wait, and
//! the daemon of the dump decides once which of the two goes on, and keeps that decision:
//!
//! ```text
//!   here:   Migrate{root, migration} -> Awaited | Failed      (then CRIU is started, and the dump is told as above)
//!           Progress*                -> Progress              phase `hand-over`: the image is durable, the answer to Finish waits
//!           HandOver                 -> HandedOver | Failed   from now on the tree never goes on here, and is killed
//!           (close before HandOver)                           the dump fails, and the tree goes on here
//!   there:  HoldRestore{migration}   -> Awaited | Failed      (then CRIU is started, and the restore is told as above)
//!           Progress*                -> RestoreProgress       phase `held`: all is loaded, the answer to the last Resume waits
//!           Own                      -> Owned | Failed        the processes run
//!           (close before Own)                                the restore fails
//! ```
//!
//! An engine of containers makes its archive when CRIU has ended. So its dump, of a `Migrate` with `container`, leaves the tree
//! running, and yet the tree stands still:
//!
//! ```text
//!   PAUSE_DEVICES(root)      Pause{root} + [image directory]  -> PausedStill{pids}   the tasks stay stopped until `Durable`
//!   exit(DUMP, 0)            Finish                           -> Durable             SIGSTOP is pending for them; CRIU ends
//!   here:   HandOver, when the engine has ended               -> HandedOver          the tree stands still until it is removed
//!           (close before HandOver)                                                  SIGCONT: the tree goes on here
//! ```
//!
//! ```text
//!   any:    Migration{migration}     -> Migration             the decision
//!   any:    TakeBack{migration}      -> Migration             a container goes on here after all
//!           Arrival{migration}       -> Arrival               whether they have run there
//! ```
//!
//! Messages between a worker and its daemon are [`WorkerRequest`] and [`WorkerReply`].

mod failure;
mod info;
mod learned;
mod trace;
mod worker;

use serde::{Deserialize, Serialize};

pub use self::failure::*;
pub use self::info::*;
pub use self::learned::{Learned, LearnedKernel};
pub use self::trace::{CommandSpan, LEAVES_PAGES, NoTraceParent, TRACEPARENT, TraceParent};
pub use self::worker::*;
use crate::access::AccessReport;
use crate::attach::Attach;
use crate::ipc::Token;
use crate::nvml;

/// The socket that the daemon listens on unless its configuration names another, and that all programs connect to unless
/// `REKINDLE_SOCKET` names another.
pub const DEFAULT_SOCKET: &str = "/run/rekindle/rekindled.sock";

/// The first message of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opening {
    /// [`crate::CONTROL_VERSION`] of the sender.
    pub wire: u32,
    /// The oldest version that the sender understands too.
    #[serde(default)]
    pub oldest: u32,
    /// The request, as JSON, so that a daemon that cannot understand it can still read the versions and refuse.
    pub request: serde_json::Value,
}

impl Opening {
    /// Wraps a request with what this build speaks.
    pub fn new(request: &Request) -> Result<Self, serde_json::Error> {
        let request = serde_json::to_value(request)?;
        Ok(Self { wire: crate::version::control_version(), oldest: crate::OLDEST_CONTROL, request })
    }
}

/// The requests to the daemon. `Attach` and `Reattach` hand the connection to a worker; `Pause` and `Restore` open
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
    /// A worker whose daemon is gone offers itself to the daemon that took its place. The request comes with a copy of the
    /// client's connection, which the new daemon compares with the record of the daemon before it. After `Rejoined` this
    /// connection is the worker's channel.
    Rejoin {
        /// The message by which the client attached.
        attach: Attach,
        /// The answer that the client was given.
        attached: crate::attach::Attached,
    },

    /// Quiesce all clients of a process tree. Comes with the image directory.
    Pause {
        /// The root of the tree, as CRIU's pid namespace numbers it.
        root: i32,
        /// `criu dump --leave-running`.
        leave_running: bool,
        /// The span that CRIU belongs to, if its environment names one.
        #[serde(default)]
        traceparent: Option<TraceParent>,
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
    /// In a dump: have the driver move the GPU memory of this native process into its host memory. All its threads are stopped but
    /// the one that `PausedNatives` named.
    NativeCheckpoint {
        /// The process.
        pid: i32,
    },
    /// Have the driver give this native process its GPU memory back, if that was moved, and unlock it. All its threads are stopped
    /// but the one that works for the driver.
    NativeResume {
        /// The process.
        pid: i32,
    },

    /// Does any process of this machine use a GPU by NVIDIA's own driver library? The plugin asks before it knows the tree, since
    /// CRIU must know early how to stop such processes.
    AreNatives,

    /// Prepare a restore from the image directory that comes with this.
    Restore,
    /// The same, on a machine that may differ from the one of the dump in what this says.
    RestoreAllowing(Allowances),
    /// This task is complete but stopped; its shared memory can be taken.
    Resume {
        /// The task, as CRIU's pid namespace numbers it.
        pid: i32,
    },

    /// List the clients.
    List,
    /// Describe the daemon itself.
    Status,
    /// Report how often this client asked for each driver call.
    Calls {
        /// The client's process, as the asker numbers it.
        pid: i32,
    },
    /// Report the counts of this client's accesses to memory.
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
        /// The change to make.
        change: ProtocolChange,
    },

    /// The process that holds this connection is about to checkpoint this process tree. The connection is a session until
    /// the checkpoint is over. `Progress` follows, any number of times.
    Checkpoint {
        /// Its root, as the asker numbers it.
        root: i32,
        /// The protocol to use, which overrides all other choices.
        protocol: Option<String>,
        /// If set, a dump of the tree begins only when one of its processes says `Moment`, and fails if none does for so many
        /// milliseconds.
        moment_ms: Option<u64>,
        /// The asker's span. The spans of the dump belong to it.
        #[serde(default)]
        span: Option<CommandSpan>,
    },
    /// The process that holds this connection is about to have these process trees dumped at one moment: no dump of one goes on
    /// before the trees of all are frozen, and a tree is killed only when the images of all are complete. If one of the dumps
    /// ends before that, or this connection closes, the others fail, and their trees go on. Answered by `Awaited`. `Progress`
    /// follows, any number of times.
    Together {
        /// Their roots, as the asker numbers them.
        roots: Vec<i32>,
    },
    /// The asker, a client, has come to a point where it wants to be checkpointed. Answered when its worker takes no more
    /// commands.
    Moment,
    /// The process that holds this connection is about to start a CRIU that restores an image. The connection is a session.
    /// `Progress` follows, any number of times.
    WatchRestore {
        /// Whether the restored processes are to wait for a moment until this peer has heard that they are about to run, and
        /// has asked again: it has something on their terminal to remove.
        hears_first: bool,
        /// The asker's span. The spans of the restore belong to it.
        #[serde(default)]
        span: Option<CommandSpan>,
    },
    /// Report the progress of the last dump of the tree, or of the restore.
    Progress,

    /// Copy the memory of the tree's clients, while they run, into the directory that comes with this. The result is an image
    /// without the processes' own memory, on which the next dump builds. Answered when it is durable.
    PreCopy {
        /// The root of the tree, as the asker numbers it.
        root: i32,
    },
    /// Load the GPU memory of the image whose directory comes with this, for restores of images that build on it: they copy on the GPU
    /// what has not changed since. Any number of times on a connection, each in the place of the one before. What is loaded goes with the
    /// next such restore, or when this connection closes.
    Preload,
    /// The process that holds this connection is about to have this process tree dumped, in order to have it go on elsewhere. CRIU
    /// is to kill the tree; but when the image is durable, the dump waits until this peer says `HandOver`. If this connection
    /// closes before that, the dump fails, and the tree goes on. `Progress` follows, any number of times.
    Migrate {
        /// The root of the tree, as the asker numbers it.
        root: i32,
        /// The migration's name, which no other has: 1 to 64 letters, digits and hyphens.
        migration: String,
        /// Whether the tree is a container, whose engine works on when CRIU has ended: CRIU leaves the tree, which then stands still
        /// until this peer says `HandOver` or closes this connection.
        #[serde(default)]
        container: bool,
        /// The asker's span. The spans of the dump belong to it.
        #[serde(default)]
        span: Option<CommandSpan>,
    },
    /// On the connection of `Migrate`: the tree is complete elsewhere, and goes on there. It never goes on here.
    HandOver,
    /// What has become of this migration of a tree from this host?
    Migration {
        /// Its name.
        migration: String,
    },
    /// The container of this migration was handed over, and goes on here all the same: somebody knows that it has not gone on elsewhere, and
    /// never will. Refused for trees that were killed.
    TakeBack {
        /// Its name.
        migration: String,
    },
    /// Like `WatchRestore`, for a tree that has been dumped in order to go on here: when its processes are complete and all GPU
    /// memory is loaded, they wait until this peer says `Own`. If this connection closes before that, the restore fails.
    HoldRestore {
        /// The migration's name. Its tree runs here once: of several restores, all but the first that is owned fail.
        migration: String,
        /// Whether the tree may run here once more if all its processes have ended. Somebody knows that they have not run.
        #[serde(default)]
        again: bool,
        /// The asker's span. The spans of the restore belong to it.
        #[serde(default)]
        span: Option<CommandSpan>,
    },
    /// On the connection of `HoldRestore`: the processes may run.
    Own,
    /// Have the processes of this migration been let run here?
    Arrival {
        /// Its name.
        migration: String,
    },

    /// Let a container use GPUs. Only root and the daemon's own user may ask for this. The container keeps the GPUs that it
    /// was given before; limits in this request replace earlier limits.
    Grant {
        /// The container's id.
        container: String,
        /// The first process of the container, as the asker numbers it.
        pid: i32,
        /// The GPUs: `all`, numbers as `Status` lists GPUs, or UUIDs (`GPU-...`, which may be cut short).
        gpus: Vec<String>,
        /// The limits of all processes of the container together.
        limits: ContainerLimits,
        /// The name of the protocol that these processes are to be checkpointed by, if the container's maker names one.
        protocol: Option<String>,
        /// Whether instances of one image of the container may share GPU memory that they only read.
        #[serde(default)]
        share: bool,
    },
    /// A container is gone, and its grant ends. A container that still exists keeps its grant.
    Revoke {
        /// The container's id.
        container: String,
    },

    /// Give the GPU memory of the tree's processes back to their GPUs, with its content kept in host memory; or, where a
    /// directory comes with the request, in unnamed files there. A process resumes with its next command. Answered when all
    /// memory is given back.
    Suspend {
        /// The process that all others descend from, as the asker numbers it.
        pid: i32,
        /// Whether commands wait until `ResumeSuspended`.
        hold: bool,
        /// Whether to give back the workers' CUDA contexts too. When a process resumes, another worker takes it over, on any GPUs
        /// of the same kind. A daemon before control version 12 does not know this, and its reply does not say `deep`.
        #[serde(default)]
        deep: bool,
    },
    /// Load the GPU memory of the tree's suspended processes again, and let them go on. Answered when all is loaded.
    ResumeSuspended {
        /// The process that all others descend from, as the asker numbers it.
        pid: i32,
    },

    /// Keep the image in the directory that comes with this ready for restores: its files in host memory, and workers that have
    /// loaded its clients. Replaces what was asked for this image before. Answered when the workers are ready, or cannot be.
    Warm {
        /// The number of restores for which workers wait.
        copies: u32,
        /// How the content of GPU memory is on the GPU, if it is.
        resident: Option<Resident>,
    },
    /// List the images that are kept ready.
    WarmImages,
    /// No longer keep the image in the directory that comes with this ready.
    ForgetWarm,
    /// No longer keep images ready that have this id, or were read from this directory: it need not exist any more.
    ForgetWarmNamed {
        /// [`WarmInfo::image`] or [`WarmInfo::directory`].
        name: String,
    },

    /// Have the asker's worker get the memory that the token names.
    Import {
        /// The token that the exporter's worker has given.
        token: Token,
    },

    /// Give the asker's worker the file that the asker has mapped shared and writable at this address of the pinned window.
    Register {
        /// Where the mapping begins.
        address: u64,
        /// Bytes of the mapping.
        size: u64,
    },

    /// Open `/dev/userfaultfd` for the asker, which has managed memory and may not make a userfaultfd by itself.
    Userfaultfd,

    /// Which GPUs may the asker see?
    Gpus,
    /// How much memory of this GPU is free?
    GpuMemory {
        /// Its place in [`Reply::Gpus`].
        gpu: u32,
    },
    /// Which processes compute on this GPU?
    GpuProcesses {
        /// Its place in [`Reply::Gpus`].
        gpu: u32,
    },
    /// Have the machine's NVML answer a call.
    GpuAsk(nvml::Question),
}

/// A change to the protocol that was chosen for a client.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub enum ProtocolChange {
    /// No change: only say which protocol holds.
    Keep,
    /// Choose this protocol, by its name, as long as the client lives.
    Choose(String),
    /// Drop the choice: the protocol that the program, its container or the configuration names holds again.
    Forget,
}

/// Where the processes of a migration go on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub enum MigrationState {
    /// The daemon knows of no such migration since the machine has started: if there was one before, its processes have ended with
    /// the machine.
    Unknown,
    /// That is not decided yet: the command that migrates them goes on.
    Undecided,
    /// On this host.
    Kept,
    /// On the other host.
    HandedOver,
}

/// The most GPU resources that the processes of one container may have together, where there is a limit.
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
    /// The request failed, for this reason.
    Failed(Failure),
    /// The clients of the tree, quiesced. Empty: the dump is none of ours.
    Paused {
        /// The clients' pids.
        pids: Vec<i32>,
    },
    /// The clients of the tree, quiesced, and its native processes, locked. To peers that speak control version 16, and only where
    /// there are native processes.
    PausedNatives {
        /// The clients' pids.
        pids: Vec<i32>,
        /// The native processes, in the order in which they were locked.
        natives: Vec<NativeThread>,
    },
    /// Like `Paused`, for a container that is migrated: the tasks may not run before `Finish` was answered, although CRIU leaves them
    /// running. To peers that speak control version 18.
    PausedStill {
        /// The clients' pids.
        pids: Vec<i32>,
    },
    /// To `NativeCheckpoint` and `NativeResume`: the driver has done it.
    NativeDone {
        /// In a restore, whether the process was the last one, so that the rings are open now.
        open: bool,
    },
    /// To `AreNatives`.
    AreNatives(bool),
    /// To `Frozen`.
    Frozen {
        /// Whether the task is a client of ours.
        ours: bool,
    },
    /// To `Progress`, on a connection that began with `Together`.
    Together {
        /// Whether all trees have been frozen at one moment.
        all_were_frozen: bool,
    },
    /// To `Socket`.
    Socket {
        /// Whether the socket leads to this daemon or one of its workers.
        ours: bool,
        /// Whether the process asks again when it finds the socket closed: then unread messages are no loss.
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
        /// Whether the task was the last client, so that the rings are open now.
        open: bool,
    },
    /// To `Resume`: the task is a native process. `NativeResume` must follow, while this thread runs.
    Native(NativeThread),
    /// To `List`.
    Clients(Vec<ClientInfo>),
    /// To `Status`.
    Status(StatusInfo),
    /// To `Calls`: the driver functions that were called at all, in the order of the driver table.
    Calls(Vec<CallInfo>),
    /// To `Access`.
    Access(Box<AccessReport>),
    /// To `Check`: the processes of the tree that use a GPU.
    Checked(Vec<CheckInfo>),
    /// To `Rejoin`: [`WorkerRequest`]s follow on this connection.
    Rejoined,
    /// To `Protocol`: the protocol that holds now.
    Protocol {
        /// The protocol's name.
        protocol: String,
        /// Where the choice of this protocol comes from.
        reason: String,
    },
    /// To `Checkpoint` and `WatchRestore`: go ahead.
    Awaited,
    /// To `PreCopy`.
    PreCopied(PreCopyInfo),
    /// To `Preload`.
    Preloaded(PreloadInfo),
    /// To `HandOver`.
    HandedOver,
    /// To `Migration` and `TakeBack`.
    Migration(MigrationState),
    /// To `Own`.
    Owned,
    /// To `Arrival`: none if they have not; otherwise whether one of them lives.
    Arrival(Option<bool>),
    /// To `Moment`.
    Moment {
        /// Whether a dump has waited for this point.
        awaited: bool,
    },
    /// To `Progress`; none as long as no dump of the tree has come, or where none of its processes is a client.
    Progress(Option<DumpInfo>),
    /// To `Progress` after `WatchRestore`; none as long as no CRIU of the asker's has begun a restore.
    RestoreProgress(Option<Box<RestoreInfo>>),
    /// To `Grant`: the UUIDs of all GPUs that the container may use now.
    Granted {
        /// As `GPU-...`.
        gpus: Vec<String>,
    },
    /// To `Revoke`.
    Revoked,
    /// To `Suspend`: the processes whose memory is given back now.
    Suspended(Vec<SuspendedInfo>),
    /// To `ResumeSuspended`: the tree's processes that use a GPU, which all have their memory.
    WereResumed(Vec<SuspendedInfo>),
    /// To `Warm`: the image. To `WarmImages`, `ForgetWarm` and `ForgetWarmNamed`: all images that are kept ready, the last one used first.
    Warm(Vec<WarmInfo>),
    /// To `Import`: the worker keeps the memory under this number.
    Imported {
        /// For [`crate::command::PIECE_IMPORT`].
        ticket: u64,
        /// Pieces.
        count: usize,
        /// Whether the memory is the asker's own.
        own: bool,
    },
    /// To `Register`: the worker has the file.
    Registered,
    /// To `Userfaultfd`: comes with the file.
    Userfaultfd,
    /// To `Import`: no process that the asker may share with has memory of this name.
    NotShared,
    /// To `Gpus`.
    Gpus(nvml::Gpus),
    /// To `GpuMemory`.
    GpuMemory(nvml::Memory),
    /// To `GpuProcesses`: the processes that the asker may know of.
    GpuProcesses(Vec<nvml::Process>),
    /// To `GpuAsk`.
    GpuAnswer(nvml::Answer),
}

/// The differences between the machine and the dump's machine for which a restore is not refused.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Allowances {
    /// The driver's version may differ.
    pub other_driver: bool,
    /// The GPUs' model, number of multiprocessors, and memory may differ. Their compute capability may never differ.
    pub other_gpu: bool,
}

/// The environment variable in which the plugin finds the allowances, as words between commas.
pub const ALLOW_VARIABLE: &str = "REKINDLE_ALLOW";

/// The file of an image that is restored only while a command holds its processes (`HoldRestore`): the name of their migration.
pub const HELD_FILE: &str = "rekindle-held";

impl Allowances {
    /// The word for [`Self::other_driver`].
    pub const OTHER_DRIVER: &str = "other-driver";
    /// The word for [`Self::other_gpu`].
    pub const OTHER_GPU: &str = "other-gpu";

    /// Reads words between commas.
    ///
    /// # Errors
    ///
    /// A word that is none of these.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut found = Self::default();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            match word {
                Self::OTHER_DRIVER => found.other_driver = true,
                Self::OTHER_GPU => found.other_gpu = true,
                _ => return Err(word.to_owned()),
            }
        }
        Ok(found)
    }

    /// The allowances of either.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        Self { other_driver: self.other_driver || other.other_driver, other_gpu: self.other_gpu || other.other_gpu }
    }
}

impl std::fmt::Display for Allowances {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words = [(self.other_driver, Self::OTHER_DRIVER), (self.other_gpu, Self::OTHER_GPU)];
        let words: Vec<_> = words.into_iter().filter(|(on, _)| *on).map(|(_, word)| word).collect();
        f.write_str(&words.join(","))
    }
}

/// A native process, and the thread in it that works for the driver.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct NativeThread {
    /// The process, as the peer numbers it.
    pub pid: i32,
    /// The thread, as the peer numbers it.
    pub tid: i32,
}

/// A dumped socket that the restore connects anew.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct RestoredSocket {
    /// CRIU's id.
    pub id: u32,
    /// The daemon's socket as the process found it.
    pub path: String,
}
