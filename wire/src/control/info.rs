//! The daemon's descriptions of its clients, dumps, workers and GPUs.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Failure;

/// A client, for `rekindle ps`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct ClientInfo {
    /// The application's pid, as the daemon sees it.
    pub pid: i32,
    /// Its worker's pid.
    pub worker: i32,
    /// Its command's name.
    pub command: String,
    /// `running`, `suspended`, `quiesced`, `saving`, `loading` or `restoring`; `lost` where its worker has died.
    pub state: String,
    /// Bytes of device memory per device, by the worker's numbering.
    pub device_memory: Vec<u64>,
    /// Nanoseconds in which the client had unfinished work on each device, since its worker serves it. The worker samples this: see
    /// `ctx-worker/src/schedule/gpu_time.rs`. Empty where the worker is of an older release.
    #[serde(default)]
    pub gpu_time_ns: Vec<u64>,
    /// Bytes of pinned host memory.
    pub pinned_memory: u64,
    /// Commands executed so far.
    pub commands: u64,
    /// The protocol that the client is to be checkpointed by; empty where the client cannot be checkpointed.
    #[serde(default)]
    pub protocol: String,
    /// Where the choice of this protocol comes from.
    #[serde(default)]
    pub protocol_reason: String,
    /// The dump under way, if there is one.
    #[serde(default)]
    pub dump: Option<DumpInfo>,
    /// Set while the client's GPU memory is given back to the GPU.
    #[serde(default)]
    pub suspended: Option<Suspension>,
    /// Milliseconds for which the client has had no command and nothing ran for it.
    #[serde(default)]
    pub idle_ms: u64,
    /// For which program the daemon has suspended the client by itself; none where an operator has.
    #[serde(default)]
    pub suspended_for: Option<String>,
    /// Why the last attempt to have another worker take this client over has failed, while the client is suspended deeply.
    #[serde(default)]
    pub not_moved: Option<String>,
    /// Whose it is.
    #[serde(default)]
    pub owner: Owner,
}

/// Whose a client is.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Owner {
    /// The user that the process runs as, by its number on the daemon's host; none if the process is gone.
    pub user: Option<u32>,
    /// The container that was given the process's GPUs, by the name that the container engine has for it.
    pub container: Option<String>,
    /// The process's cgroup in the v2 hierarchy, as the daemon sees it: `/system.slice/train.service`.
    pub cgroup: Option<String>,
}

/// A suspended client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Suspension {
    /// Bytes of GPU memory that are given back.
    pub bytes: u64,
    /// Whether the client's commands wait until somebody asks to resume the client.
    pub hold: bool,
    /// Whether the client is to resume and its GPU has no room for it yet; for a client that is suspended deeply, whether it is to
    /// resume and no worker has taken it over yet.
    pub waits_for_room: bool,
    /// Whether the client's worker has given back its CUDA contexts too: another worker takes the client over.
    #[serde(default)]
    pub deep: bool,
}

/// A client that was suspended or resumed on request.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SuspendedInfo {
    /// The process, as the asker numbers it.
    pub pid: i32,
    /// Its command's name.
    pub command: String,
    /// Bytes of GPU memory that were given back, or loaded. 0: there was nothing to do.
    pub bytes: u64,
    /// Milliseconds that this took.
    pub ms: u64,
    /// Whether it was suspended deeply.
    #[serde(default)]
    pub deep: bool,
}

/// How the content of a warm image is on the GPU.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum Resident {
    /// Each waiting worker has it: a restore has nothing to load.
    Each,
    /// Once, and each restore copies it on the GPU.
    Once,
    /// Once, and restored programs use it together: each has memory of its own for what it writes.
    Shared,
}

/// An image that is kept ready for restores, for `rekindle warm`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct WarmInfo {
    /// Its id.
    pub image: String,
    /// The directory that it was read from.
    pub directory: String,
    /// Bytes of host memory that its files take.
    pub bytes: u64,
    /// How the content of GPU memory is on the GPU, if it is.
    pub resident: Option<Resident>,
    /// The number of restores for which workers are to wait.
    pub copies: u32,
    /// The number of restores for which workers wait now.
    pub ready: u32,
    /// Restores of it since it is warm.
    pub restores: u64,
    /// Milliseconds since the last one, or since it was asked for.
    pub idle_ms: u64,
    /// Why no more workers wait, until more do.
    pub problem: Option<String>,
}

/// The progress of a dump.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct DumpInfo {
    /// The present phase, by the name that `rekindle inspect` has for it; before the first phase, `moment` while the dump
    /// waits for the application.
    pub phase: String,
    /// Bytes of GPU memory that the image has by now, approximately.
    pub done: u64,
    /// Bytes of GPU memory when the dump began.
    pub bytes: u64,
    /// Milliseconds since the dump began.
    pub elapsed_ms: u64,
    /// The outcome of the dump, if it is over.
    pub outcome: Option<DumpOutcome>,
}

/// The outcome of a dump.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub enum DumpOutcome {
    /// The image was made and is durable.
    Durable {
        /// The image's name.
        id: String,
        /// The protocol that the image was made by.
        protocol: String,
        /// Why this protocol was used.
        protocol_reason: String,
        /// Bytes in our files.
        bytes: u64,
        /// How long each phase took.
        phases: Vec<PhaseInfo>,
    },
    /// No image was made, for this reason. The processes go on.
    Failed(Failure),
}

/// A phase of a dump or of a restore.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct PhaseInfo {
    /// The phase's name, as `rekindle inspect` has it.
    pub name: String,
    /// Nanoseconds.
    pub duration_ns: u64,
    /// Bytes that the phase handled; 0 where a number of bytes means nothing.
    pub bytes: u64,
}

/// The progress of a restore.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct RestoreInfo {
    /// The present phase, by the name that `rekindle inspect` has for it.
    pub phase: String,
    /// Bytes of GPU memory whose content is loaded.
    pub done: u64,
    /// Bytes of GPU memory.
    pub bytes: u64,
    /// How long each part took so far. Parts that follow each other, from CRIU's first request until the processes run.
    pub phases: Vec<PhaseInfo>,
    /// The processes that use a GPU.
    pub clients: Vec<RestoredInfo>,
    /// Nanoseconds from CRIU's first request until the processes could run; none before that.
    pub running_ns: Option<u64>,
    /// Nanoseconds until all content was loaded; none before that.
    pub loaded_ns: Option<u64>,
    /// Why the restore has failed, if it has. After the processes run: why content could not be loaded.
    pub failure: Option<Failure>,
}

/// A client that comes back, or has come back.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct RestoredInfo {
    /// The process's pid, as the daemon sees it; none before it is complete.
    pub pid: Option<i32>,
    /// Its pid in its own namespace, as at the dump.
    pub namespace_pid: u32,
    /// Its command's name.
    pub command: String,
    /// Bytes of GPU memory.
    pub bytes: u64,
    /// Bytes among them that were zeros, which were set and not copied.
    pub zero_bytes: u64,
    /// Bytes among them that were on the GPU already, and were copied there.
    #[serde(default)]
    pub copied_bytes: u64,
    /// How long each step of its load took so far.
    pub phases: Vec<PhaseInfo>,
}

/// A copy of memory that was made while its programs ran.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct PreCopyInfo {
    /// Bytes that the copy takes: what has changed since the copy that it builds on.
    pub bytes: u64,
    /// Bytes of GPU memory that the programs have.
    pub memory: u64,
    /// Milliseconds that it took.
    pub ms: u64,
}

/// GPU memory that was loaded for a restore to come.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct PreloadInfo {
    /// Bytes of GPU memory.
    pub bytes: u64,
    /// Bytes among them that were on the GPU already, from the time before.
    pub copied: u64,
    /// How long it took, in milliseconds.
    pub ms: u64,
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
    /// Calls that were answered with `CUDA_ERROR_NOT_SUPPORTED`.
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
    /// What saves its GPU memory, and what that costs, in one line. Empty if nothing does, or the daemon is older.
    #[serde(default)]
    pub way: String,
}

/// The daemon itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct StatusInfo {
    /// Rekindle's version.
    pub version: String,
    /// [`crate::CONTROL_VERSION`].
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
    /// Why no worker starts, if none does.
    #[serde(default)]
    pub problem: Option<String>,
    /// The driver's version as workers found it: `cuDriverGetVersion`. None before the first worker is ready.
    #[serde(default)]
    pub driver_version: Option<i32>,
    /// The GPUs that workers found.
    #[serde(default)]
    pub gpus: Vec<GpuInfo>,
    /// The rights that workers give up.
    #[serde(default)]
    pub sandbox: Option<SandboxInfo>,
    /// The kinds of workers that the pool knows, the usual one first. Empty for askers who are not operators.
    #[serde(default)]
    pub kinds: Vec<WorkerKindInfo>,
    /// What `rekindle protect` has to know of the configuration.
    #[serde(default)]
    pub protect: Option<ProtectInfo>,
}

/// The daemon's configuration of protected jobs.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct ProtectInfo {
    /// The folder of the records, and of the images where the user names no other.
    pub dir: PathBuf,
    /// Milliseconds between two failures of one GPU, on average.
    pub mtbf_ms: u64,
}

/// A kind of workers, for `rekindle pool`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct WorkerKindInfo {
    /// `usual`, or the environment variables that a worker of this kind has, as in a shell.
    pub kind: String,
    /// Workers that are ready and unused.
    pub ready: u32,
    /// Workers that are starting.
    pub starting: u32,
    /// Workers that the pool keeps ready.
    pub kept: u32,
    /// Workers that clients have taken lately.
    pub taken: u32,
    /// Why the last start failed, until one succeeds.
    pub problem: Option<String>,
}

/// How workers are confined, for `rekindle doctor`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SandboxInfo {
    /// The parts of the sandbox that are in force, in words.
    pub parts: String,
    /// The parts that are missing, and why.
    pub missing: Vec<String>,
}

/// A GPU, for `rekindle doctor`.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct GpuInfo {
    /// The driver's name for the GPU.
    pub name: String,
    /// Bytes of memory.
    pub memory: u64,
    /// The GPU's PCI address.
    pub pci_bus_id: String,
    /// The UUID, as `GPU-...`.
    #[serde(default)]
    pub uuid: String,
}
