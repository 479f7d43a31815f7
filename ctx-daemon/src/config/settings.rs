//! The configuration in force.

use rekindle_ctx_worker::Reporting;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use rekindle_images::{CompressionChoice, Protocol};
use rekindle_wire::control::{Allowances, ContainerLimits, Limits};

use super::error::ConfigError;
use super::tracing::TracingConfig;
use crate::limit::Limit;

/// The default range of workers' users, which neither distributions nor systemd assign.
pub(super) const DEFAULT_UIDS: UidRange = UidRange { first: 1_900_000_000, last: 1_900_065_535 };

/// The configuration in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) socket: SocketConfig,
    pub(crate) workers: WorkerConfig,
    pub(crate) clients: ClientConfig,
    pub(crate) timeouts: Timeouts,
    pub(crate) gpu: GpuConfig,
    pub(crate) native: NativeConfig,
    pub(crate) checkpoint: CheckpointConfig,
    pub(crate) image: ImageConfig,
    pub(crate) restore: RestoreConfig,
    pub(crate) metrics: MetricsConfig,
    pub(crate) tracing: TracingConfig,
    pub(crate) protect: ProtectConfig,
    /// The state directory for the next daemon: what containers were given, and which worker serves which client.
    pub(crate) state_dir: PathBuf,
    /// The folder of the libraries that applications map.
    pub(crate) library_dir: PathBuf,
}

/// What `rekindle protect` is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProtectConfig {
    /// The folder of the records and images.
    pub(crate) dir: PathBuf,
    /// The mean time between failures of one GPU.
    pub(crate) mtbf: Duration,
}

/// The control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SocketConfig {
    /// Its path; absolute.
    pub(crate) path: PathBuf,
    pub(crate) mode: u32,
    /// Its group: a name or a number.
    pub(crate) group: Option<String>,
    /// Connections of one user or container at a time.
    pub(crate) connections: usize,
}

/// How many workers wait for clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Spares {
    /// Workers of the usual kind, always.
    pub(crate) usual: usize,
    /// Workers of all kinds together, beyond `usual`: of those that clients have asked for again and again.
    pub(crate) learned: usize,
    /// How long the pool remembers what clients have asked for.
    pub(crate) remember: Duration,
}

/// How workers are started, and how many wait for clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorkerConfig {
    pub(crate) cuda_driver: PathBuf,
    pub(crate) program: PathBuf,
    pub(crate) spares: Spares,
    pub(crate) slow_start: Duration,
    pub(crate) start_timeout: Duration,
    /// How long the daemon may be silent before a quiesced worker goes on by itself.
    pub(crate) silence_timeout: Duration,
    pub(crate) sandbox: SandboxConfig,
    /// What workers report of accesses to memory.
    pub(crate) report_access: Option<Reporting>,
}

/// How many clients there may be, and how much each may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClientConfig {
    /// The most clients at a time.
    pub(crate) max: Option<usize>,
    /// The limits of one client.
    pub(crate) limits: Limits,
    /// The limits of one container.
    pub(crate) of_container: ContainerLimits,
    /// Whether a process that may not make a userfaultfd gets the file that makes one.
    pub(crate) userfaultfd: bool,
    /// Whether a process in another pid namespace must have been given something.
    pub(crate) grants_required: bool,
    /// What pays for the workers of containers.
    pub(crate) charge: Charge,
}

/// To which cgroup the memory and the processors that a container's workers use are charged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Charge {
    /// The daemon's own.
    #[default]
    No,
    /// One beside the container's, so that the limits of what both are in hold.
    Parent,
}

impl Charge {
    pub(super) fn parse(text: String) -> Result<Self, ConfigError> {
        match text.as_str() {
            "no" => Ok(Self::No),
            "parent" => Ok(Self::Parent),
            _ => Err(ConfigError::Value {
                what: "containers.charge",
                value: text,
                problem: "is neither \"no\" nor \"parent\"",
            }),
        }
    }
}

/// How long workers may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timeouts {
    pub(crate) quiesce: Limit,
    /// How long a dump or a restore may make no progress.
    pub(crate) stall: Limit,
}

/// How GPUs are shown, and whether programs may have more GPU memory together than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuConfig {
    /// The virtual GPUs that each GPU is shown as; `None`: GPUs are shown as they are.
    pub(crate) parts: Option<u32>,
    pub(crate) oversubscribe: bool,
    /// How long a program must have been idle before it is suspended for another.
    pub(crate) idle: Duration,
    /// How long an allocation waits for programs to be suspended.
    pub(crate) room_timeout: Limit,
}

/// How processes are dumped that use NVIDIA's own driver library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NativeConfig {
    /// Whether the driver checkpoints them; otherwise they are left to CRIU and its other plugins.
    pub(crate) enabled: bool,
    /// How the paths of the driver's device files begin.
    pub(crate) devices: String,
}

/// How images are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ImageConfig {
    pub(crate) compression: CompressionChoice,
    /// Bytes of GPU memory that are worth a data file.
    pub(crate) file_bytes: u64,
}

/// How programs are restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RestoreConfig {
    /// The differences between this machine and that of the dump that a restore allows.
    pub(crate) allowances: Allowances,
    /// Whether restored processes run before the content of their GPU memory is loaded.
    pub(crate) run_before_loaded: bool,
    /// Bytes of host memory for warm images; none where the file says nothing.
    pub(crate) warm_memory: Option<u64>,
}

/// Where the metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MetricsConfig {
    pub(crate) socket: MetricsSocket,
    /// The socket's group: a name or a number.
    pub(crate) socket_group: Option<String>,
    /// The address of TCP.
    pub(crate) listen: Option<SocketAddr>,
}

/// The Unix socket of the metrics; paths are absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MetricsSocket {
    None,
    /// Nobody has asked for this place, so the daemon also starts if it cannot be used.
    Default(PathBuf),
    Given(PathBuf),
}

/// How programs are checkpointed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointConfig {
    /// The configured protocol; none where the file sets none.
    pub(crate) protocol: Option<Protocol>,
    /// The size of the copy-on-write pool on each GPU, in bytes.
    pub(crate) cow_pool: u64,
    /// The number of pre-copy rounds; at least one.
    pub(crate) recopy_rounds: u32,
    /// The bandwidth limit, in bytes a second.
    pub(crate) bandwidth: Option<u64>,
    /// Whether transfers of programs come before copies.
    pub(crate) application_first: bool,
    /// The staging memory, in bytes.
    pub(crate) staging: u64,
    /// Whether each image is rehearsed before it is complete.
    pub(crate) rehearse: bool,
}

/// The workers' sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SandboxConfig {
    pub(crate) enabled: bool,
    /// Whether the daemon refuses to start without every part of the sandbox.
    pub(crate) required: bool,
    /// The range of the workers' users.
    pub(crate) uids: UidRange,
    /// Paths that workers may read besides the driver's libraries.
    pub(crate) read: Vec<PathBuf>,
}

#[cfg(test)]
impl Default for SandboxConfig {
    fn default() -> Self {
        Self { enabled: true, required: false, uids: DEFAULT_UIDS, read: Vec::new() }
    }
}

/// A range of users, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UidRange {
    pub(crate) first: u32,
    pub(crate) last: u32,
}

impl UidRange {
    /// Parses `FIRST-LAST`. The range must have neither root nor the number that stands for no user (-1).
    pub(super) fn parse(text: String) -> Result<Self, ConfigError> {
        let numbers = text.split_once('-').map(|(first, last)| (first.trim().parse(), last.trim().parse()));
        match numbers {
            Some((Ok(first), Ok(last))) if 0 < first && first <= last && last < u32::MAX => Ok(Self { first, last }),
            _ => Err(ConfigError::Value {
                what: "sandbox.uid_range",
                value: text,
                problem: "is no range of users; write it as \"1900000000-1900065535\"",
            }),
        }
    }

    /// The number of users in the range.
    pub(crate) fn count(self) -> u32 {
        self.last - self.first + 1
    }

    /// Whether the range has this user.
    pub(crate) fn contains(self, uid: u32) -> bool {
        (self.first..=self.last).contains(&uid)
    }
}

impl std::fmt::Display for UidRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}
