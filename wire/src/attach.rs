//! How a process gets a worker, and the messages on their connection afterwards.
//!
//! ```text
//!   interposer                          daemon                     worker
//!     connect ───────────────────────────>
//!     Attach + [ring, staging] ──────────> takes one from the pool
//!                                          Adopt + [connection, ring, staging] ──>
//!     <─────────────────────────────────────────────── Attached, or Refused
//!     Pinned + [memfd] ─────────────────────────────────────────> (any number, each before its PINNED_MAP)
//! ```
//!
//! From then on the worker holds the connection's other end alone: its closing tells each of the other's death. A
//! connection that closes before `Attached` (a freeze came between, and the process was restored) is begun again.

use serde::{Deserialize, Serialize};

use crate::Dialect;

/// A process's description of itself, sent when it attaches.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Attach {
    /// Its pid as it sees it; the daemon goes by the socket's credentials.
    pub pid: i32,
    /// The command's name, for listings.
    pub command: String,
    /// The path under which it found the daemon's socket; a restored process looks there again.
    pub socket: String,
    /// `SO_COOKIE` of its end of the connection, by which the CRIU plugin tells which client a socket belongs to.
    pub cookie: u64,
    /// Settings that a context must be made with (`CUDA_DEVICE_MAX_CONNECTIONS` and the like), as they are in its
    /// environment, ordered by name; behind them [`PROTOCOL`].
    pub settings: Vec<(String, String)>,
    /// The meaning of the process's commands.
    #[serde(default)]
    pub dialect: Dialect,
}

/// Environment variables that go into [`Attach::settings`]: the driver reads them when a context is made.
pub const SETTINGS: &[&str] = &["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER"];

/// The environment variable by which a program says how it is to be checkpointed. It goes into [`Attach::settings`] too, and
/// is the daemon's affair alone.
pub const PROTOCOL: &str = "REKINDLE_PROTOCOL";

/// Among the settings of a worker that offers itself to another daemon: the protocol that was chosen for its client
/// ([`crate::control::ProtocolChange::Choose`]). No process can say that of itself.
pub const CHOSEN_PROTOCOL: &str = "rekindle protocol";

/// The answer to [`Attach`].
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub enum Answer {
    /// The ring is open.
    Attached(Attached),
    /// There will be no worker for this process, and why.
    Refused {
        /// For the one line on stderr: what is wrong and what to do.
        reason: String,
    },
}

/// Facts that a client keeps, so that it can answer calls without asking the worker again.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Attached {
    /// `cuDriverGetVersion`: the version of CUDA's interface, not the driver's.
    pub driver_version: i32,
    /// The driver's own version, `580.159.04`, as the name of its library's file says it; empty where it does not.
    #[serde(default)]
    pub driver_build: String,
    /// `cuCtxGetApiVersion` of a primary context.
    pub api_version: u32,
    /// The worker's devices, in its order.
    pub devices: Vec<Device>,
}

/// A device, as the driver describes it.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Device {
    /// `cuDeviceGetName`.
    pub name: String,
    /// `cuDeviceGetUuid_v2`.
    pub uuid: [u8; 16],
    /// `cuDeviceTotalMem_v2`, in bytes.
    pub memory: u64,
    /// `cuDeviceGetPCIBusId`.
    pub pci_bus_id: String,
    /// `cuDeviceGetAttribute` for 0, 1, 2, ...: the result and the value.
    pub attributes: Vec<(i32, i32)>,
    /// `cuCtxGetStreamPriorityRange`: least, greatest.
    pub stream_priorities: (i32, i32),
    /// `cuDeviceCanAccessPeer` for each of the worker's devices; empty where the worker does not say it.
    #[serde(default)]
    pub peers: Vec<bool>,
    /// The UUID of the GPU of which a virtual GPU is a part; `None` for a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<[u8; 16]>,
}

/// Announces the memfd that comes with it, before the ring's `PINNED_MAP`.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Pinned {
    /// Where the client has mapped it.
    pub address: u64,
    /// Its size in bytes, a multiple of the page size.
    pub size: u64,
    /// Unique among the client's memfds, and the end of its name: an address may be used again. 0 for another file.
    pub serial: u64,
    /// The offset of the mapping in a file that is no memfd of ours, but one that the client has mapped. Only the daemon says this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_offset: Option<u64>,
}
