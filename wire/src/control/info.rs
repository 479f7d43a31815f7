//! What the daemon tells of its clients, dumps, workers and GPUs.

use serde::{Deserialize, Serialize};

use super::Failure;

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
    /// There is none, why, and the processes go on.
    Failed(Failure),
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
