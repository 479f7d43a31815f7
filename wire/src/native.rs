//! Messages between the daemon and the helper process that calls the driver's checkpoint of other processes.

use serde::{Deserialize, Serialize};

/// The UUIDs of a GPU and of the one that takes its place.
pub type GpuPair = ([u8; 16], [u8; 16]);

/// A call of the driver about a process. The pid is of a process, never of another thread: the driver takes a thread's number for
/// a process's, and such a process may not survive that.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub enum Call {
    /// The thread of the process that works for the driver. Only processes that use the driver have one.
    RestoreThread,
    /// Where the process is between running and checkpointed.
    State,
    /// Have the process's calls wait, once its work has ended.
    Lock {
        /// How long that may take; the process runs on after it.
        timeout_ms: u32,
    },
    /// Move its GPU memory into its host memory, and release the GPU.
    Checkpoint,
    /// The reverse.
    Restore {
        /// A pair for each GPU, the one of the checkpoint first; none where the GPUs are the same.
        gpus: Vec<GpuPair>,
    },
    /// Let its calls go on.
    Unlock,
}

impl Call {
    /// The call in words, for messages.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::RestoreThread => "tell its restore thread",
            Self::State => "tell its state",
            Self::Lock { .. } => "lock it",
            Self::Checkpoint => "move its GPU memory to the host",
            Self::Restore { .. } => "give its GPU memory back",
            Self::Unlock => "unlock it",
        }
    }
}

/// The daemon to its helper.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Question {
    /// The process.
    pub pid: i32,
    /// What to call.
    pub call: Call,
}

/// The driver's answer.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Answer {
    /// A `CUresult`.
    pub result: i32,
    /// The thread, or the number of the state, where the call asks for one.
    pub value: i32,
}

/// The helper's first word.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Ready {
    /// The driver is loaded and initialised.
    Ready(About),
    /// It cannot be used for this.
    Failed {
        /// Why, in one line.
        reason: String,
    },
}

/// The driver, as the helper has found it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct About {
    /// `cuDriverGetVersion`.
    pub version: i32,
    /// The machine's GPUs, in the driver's order.
    pub gpus: Vec<Gpu>,
}

/// A GPU of the machine.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Gpu {
    /// `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
    /// The driver's name for it.
    pub name: String,
}
