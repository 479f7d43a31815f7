//! The configuration: command-line options override the configuration file, which overrides defaults.
//!
//! ```toml
//! socket = "/run/rekindle/rekindled.sock"
//! socket_mode = "0660"        # who may connect, and so use the GPUs; clients in containers connect as root
//! socket_group = "gpu"        # not changed unless given
//! cuda_driver = "libcuda.so.1"
//! state_dir = "/run/rekindle-state"   # what containers were given, and whose workers are; no container may see it
//! quiesce_timeout_ms = 9000   # a dump fails when the GPUs do not come to rest in this time, or a worker does not answer
//! silence_timeout_ms = 30000  # a worker that is quiesced goes on when its daemon says nothing for this time
//! stall_timeout_ms = 600000   # a dump fails when its image does not come further for this time, a restore when a worker
//!                             # that loads does nothing
//!
//! [pool]
//! spare = 1                   # workers kept ready, with contexts
//! learned = 1                 # workers kept ready besides, of the kinds that clients have asked for again and again
//! remember_s = 600            # for how long
//! max = 64                    # clients at a time; more are refused. No limit unless given
//! slow_start_ms = 15000       # a worker that starts more slowly is logged, and another is started in its place
//! start_timeout_ms = 120000   # and killed after this time
//!
//! [limits]                    # of one client; more is out of memory. No limit unless given
//! gpu_memory_mib = 40960      # on each device
//! pinned_memory_mib = 8192
//! connections = 256           # of one user or container at a time, those being attached included; 256 unless given
//!
//! [sandbox]                   # what workers give up; see docs/security.md
//! enabled = true
//! required = false            # true: without every part of it the daemon does not start
//! uid_range = "1900000000-1900065535"  # users that nothing else uses; each worker gets one
//! read = []                   # what workers may read besides the driver's libraries, where those lie apart
//!
//! [gpu]
//! oversubscribe = false       # true: idle programs are suspended when another one finds no GPU memory
//! idle_ms = 1000              # a program is idle when it has had no command, and nothing has run for it, for this time
//! room_timeout_ms = 30000     # an allocation that waits for programs to be suspended is out of memory after this time
//!
//! [containers]                # of all processes of one container together, and the most that it may ask for
//! gpu_memory_mib = 40960      # on each device
//! pinned_memory_mib = 8192
//! workers = 8                 # processes that use a GPU
//! need_grant = true           # a process in another pid namespace that was given no GPU is refused
//!
//! [checkpoint]
//! protocol = "auto"           # or stop, clone, cow, recopy: where neither program nor container says one
//! cow_pool = 2147483648       # bytes on each GPU for copies of memory that is written before it is copied
//! recopy_rounds = 4           # the most rounds of pre-copy before the program is held
//! bandwidth = 10000000000     # the most bytes a second that a copy takes of a GPU's link. No limit unless given
//! application_first = true    # before each piece that is copied, the program's own transfers in that direction
//! staging = 268435456         # bytes of host memory, taken at the start, for copies on their way to a disk; none unless given
//! rehearse = false            # a spare worker loads each image's code before the image is complete, to prove that it can be restored
//!
//! [image]
//! file_mib = 256              # GPU memory for which a process gets a further data file (16 at most): several are faster
//! compression = "off"         # or lz4, zstd, auto: the fastest way to a durable image, as measured at each dump
//!
//! [restore]                   # differences that are refused unless allowed here, or for one restore
//! allow_other_driver = false  # with another version of the driver than at the dump
//! allow_other_gpu = false     # on GPUs of another model, number of multiprocessors or memory
//! run_before_loaded = true    # processes run again before the content of their GPU memory is loaded
//!
//! [warm]
//! memory_mib = 65536          # host memory of all images that are kept ready for restores; half of the host's unless given
//!
//! [access]                    # for measurements with little memory: every command waits for the GPU, twice
//! report = false              # compare each command's writes with the prediction; `rekindle ps --access`
//! limit_mib = 1024            # with more GPU memory than this nothing is compared
//!
//! [metrics]                   # for Prometheus, over HTTP: GET /metrics
//! socket = "/run/rekindle-metrics/metrics.sock"  # a Unix socket, which no container may see; "" for none
//! socket_group = "prometheus" # who may connect besides root; not changed unless given
//! listen = "127.0.0.1:9464"   # an address of TCP besides, where everybody may ask; none unless given
//! ```

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use rekindle_images::{CompressionChoice, NoCompression, Protocol, UnknownProtocol};
use rekindle_wire::control::{Allowances, ContainerLimits, Limits};
use serde::Deserialize;
use thiserror::Error;

use crate::limit::Limit;

/// The configuration file that is read unless the command line names another.
const DEFAULT_FILE: &str = "/etc/rekindle/rekindled.toml";
/// The default driver library; the loader searches for it.
const DEFAULT_DRIVER: &str = "libcuda.so.1";
/// The default mode of the socket, for its owner and group: whoever may connect may use the GPUs.
const DEFAULT_MODE: u32 = 0o660;
/// The default of `quiesce_timeout_ms`. CRIU's alarm rings after 10 s; the plugin holds it off, but other callers of CRIU's
/// plugins may not.
const DEFAULT_QUIESCE: Duration = Duration::from_millis(9000);
/// The default of `silence_timeout_ms`: longer than any daemon is busy, and shorter than an operator waits before killing the
/// job.
const DEFAULT_SILENCE: Duration = Duration::from_secs(30);
/// The default of `stall_timeout_ms`. Flushing the page cache of a machine with much memory takes minutes.
const DEFAULT_STALL: Duration = Duration::from_secs(600);
/// The default of `slow_start_ms`. A worker's start on a machine with eight GPUs takes many seconds.
const DEFAULT_SLOW_START: Duration = Duration::from_secs(15);
const DEFAULT_START: Duration = Duration::from_secs(120);
/// The default of `remember_s`: a kind that nobody asks for within this time costs more memory than its workers save time.
const DEFAULT_REMEMBER: Duration = Duration::from_secs(600);
/// The default of `idle_ms`: programs that compute pause for less between their commands, and those that wait for people or for
/// other work for longer.
const DEFAULT_IDLE: Duration = Duration::from_millis(1000);
/// The default of `room_timeout_ms`: tens of gigabytes are copied in this time also where host memory is slow.
const DEFAULT_ROOM: Duration = Duration::from_secs(30);
const DEFAULT_COW_POOL: u64 = 2 << 30;
/// The default of `staging`. An operator decides whether staging is worth the memory.
const DEFAULT_STAGING: u64 = 0;
const DEFAULT_RECOPY_ROUNDS: u32 = 4;
const MOST_RECOPY_ROUNDS: u32 = 64;
/// The default of `file_mib`: the amount that one thread writes in a twentieth of a second. Less is not worth another file.
const DEFAULT_FILE_MIB: u64 = 256;
const DEFAULT_ACCESS_LIMIT_MIB: u64 = 1024;
const MOST_ACCESS_LIMIT_MIB: u64 = 1 << 20;
/// The default of `connections`: more than the processes that one job runs on one machine.
const DEFAULT_CONNECTIONS: usize = 256;
/// The longest path of the control socket: a socket's address less the final zero and the suffix of the workers' endpoint.
const SOCKET_PATH_MAX: usize = 108 - rekindle_ctx_worker::rejoin::WORKERS_SUFFIX.len();
/// The default range of workers' users, which neither distributions nor systemd assign.
const DEFAULT_UIDS: UidRange = UidRange { first: 1_900_000_000, last: 1_900_065_535 };

/// The command line.
#[derive(Debug, Default, Args)]
pub(crate) struct ServeOptions {
    /// The socket to listen on [default: /run/rekindle/rekindled.sock]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The driver library that workers load [default: libcuda.so.1, found by the loader]
    #[arg(long, value_name = "PATH")]
    cuda_driver: Option<PathBuf>,
    /// The configuration file [default: /etc/rekindle/rekindled.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// How many workers to keep ready [default: 1]
    #[arg(long, value_name = "N")]
    spare: Option<usize>,
    /// The program to start instead of the worker; for tests
    #[arg(long, hide = true, value_name = "PATH")]
    worker_program: Option<PathBuf>,
}

/// The configuration in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) socket: SocketConfig,
    pub(crate) workers: WorkerConfig,
    pub(crate) clients: ClientConfig,
    pub(crate) timeouts: Timeouts,
    pub(crate) gpu: GpuConfig,
    pub(crate) checkpoint: CheckpointConfig,
    pub(crate) image: ImageConfig,
    pub(crate) restore: RestoreConfig,
    pub(crate) metrics: MetricsConfig,
    /// The state directory for the next daemon: what containers were given, and which worker serves which client.
    pub(crate) state_dir: PathBuf,
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
    /// How many bytes are hashed around commands, in the reporting mode.
    pub(crate) report_access: Option<u64>,
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
    /// Whether a process in another pid namespace must have been given something.
    pub(crate) grants_required: bool,
}

/// How long workers may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timeouts {
    pub(crate) quiesce: Limit,
    /// How long a dump or a restore may make no progress.
    pub(crate) stall: Limit,
}

/// Whether programs may have more GPU memory together than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuConfig {
    pub(crate) oversubscribe: bool,
    /// How long a program must have been idle before it is suspended for another.
    pub(crate) idle: Duration,
    /// How long an allocation waits for programs to be suspended.
    pub(crate) room_timeout: Limit,
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
    fn parse(text: String) -> Result<Self, ConfigError> {
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

/// Why the configuration cannot be loaded.
#[derive(Debug, Error)]
pub(crate) enum ConfigError {
    #[error("cannot read the configuration {}: {source}", .file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("{}: {source}", .file.display())]
    Parse { file: PathBuf, source: Box<toml::de::Error> },
    #[error("{what}: {value:?} {problem}")]
    Value { what: &'static str, value: String, problem: &'static str },
    #[error("image.compression: {0}")]
    Compression(#[from] NoCompression),
    #[error("checkpoint.protocol: {0}")]
    Protocol(#[from] UnknownProtocol),
    #[error("cannot tell where this program is or runs: {0}")]
    Here(std::io::Error),
}

/// The content of the configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    limits: LimitsTable,
    #[serde(default)]
    containers: ContainersTable,
    state_dir: Option<PathBuf>,
    socket: Option<PathBuf>,
    socket_mode: Option<String>,
    socket_group: Option<String>,
    cuda_driver: Option<PathBuf>,
    quiesce_timeout_ms: Option<u64>,
    silence_timeout_ms: Option<u64>,
    stall_timeout_ms: Option<u64>,
    #[serde(default)]
    pool: PoolTable,
    #[serde(default)]
    sandbox: SandboxTable,
    #[serde(default)]
    gpu: GpuTable,
    #[serde(default)]
    access: AccessTable,
    #[serde(default)]
    checkpoint: CheckpointTable,
    #[serde(default)]
    image: ImageTable,
    #[serde(default)]
    restore: RestoreTable,
    #[serde(default)]
    warm: WarmTable,
    #[serde(default)]
    metrics: MetricsTable,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct MetricsTable {
    socket: Option<PathBuf>,
    socket_group: Option<String>,
    listen: Option<String>,
}

impl MetricsTable {
    /// Checks the settings and fills in the defaults, for a daemon with this control socket.
    fn checked(self, control: &Path) -> Result<MetricsConfig, ConfigError> {
        let socket = match self.socket {
            None => MetricsSocket::Default(metrics_socket(control)),
            Some(path) if path.as_os_str().is_empty() => MetricsSocket::None,
            Some(path) => MetricsSocket::Given(std::path::absolute(path).map_err(ConfigError::Here)?),
        };
        let listen = self.listen.map(|text| {
            let no_address = |_| ConfigError::Value {
                what: "metrics.listen",
                value: text.clone(),
                problem: "is no address with a port; write it as \"127.0.0.1:9464\" or \"[::1]:9464\"",
            };
            text.parse().map_err(no_address)
        });
        Ok(MetricsConfig { socket, socket_group: self.socket_group, listen: listen.transpose()? })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct WarmTable {
    memory_mib: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RestoreTable {
    allow_other_driver: Option<bool>,
    allow_other_gpu: Option<bool>,
    run_before_loaded: Option<bool>,
}

impl RestoreTable {
    fn allowances(&self) -> Allowances {
        Allowances {
            other_driver: self.allow_other_driver.unwrap_or(false),
            other_gpu: self.allow_other_gpu.unwrap_or(false),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ImageTable {
    compression: Option<String>,
    file_mib: Option<u64>,
}

impl ImageTable {
    /// `file_mib` in bytes.
    fn file_bytes(&self) -> Result<u64, ConfigError> {
        match self.file_mib.unwrap_or(DEFAULT_FILE_MIB) {
            0 => {
                let (what, value) = ("image.file_mib", "0".to_owned());
                Err(ConfigError::Value { what, value, problem: "would be files for nothing; leave it out for 256" })
            }
            mib => Ok(mib.saturating_mul(1 << 20)),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointTable {
    protocol: Option<String>,
    cow_pool: Option<u64>,
    recopy_rounds: Option<u32>,
    bandwidth: Option<u64>,
    application_first: Option<bool>,
    staging: Option<u64>,
    rehearse: Option<bool>,
}

impl CheckpointTable {
    /// Checks the settings and fills in the defaults.
    fn checked(self) -> Result<CheckpointConfig, ConfigError> {
        let recopy_rounds = self.recopy_rounds.unwrap_or(DEFAULT_RECOPY_ROUNDS);
        if !(1..=MOST_RECOPY_ROUNDS).contains(&recopy_rounds) {
            let (what, value) = ("checkpoint.recopy_rounds", recopy_rounds.to_string());
            return Err(ConfigError::Value { what, value, problem: "is not between 1 and 64" });
        }
        if self.bandwidth == Some(0) {
            let (what, value) = ("checkpoint.bandwidth", "0".to_owned());
            return Err(ConfigError::Value { what, value, problem: "would never end; leave it out for no limit" });
        }
        Ok(CheckpointConfig {
            protocol: self.protocol.map(|it| it.parse()).transpose()?,
            cow_pool: self.cow_pool.unwrap_or(DEFAULT_COW_POOL),
            recopy_rounds,
            bandwidth: self.bandwidth,
            application_first: self.application_first.unwrap_or(true),
            staging: self.staging.unwrap_or(DEFAULT_STAGING),
            rehearse: self.rehearse.unwrap_or(false),
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct AccessTable {
    report: Option<bool>,
    limit_mib: Option<u64>,
}

impl AccessTable {
    /// The limit in bytes, if the mode is on.
    fn limit(&self) -> Result<Option<u64>, ConfigError> {
        let mib = self.limit_mib.unwrap_or(DEFAULT_ACCESS_LIMIT_MIB);
        if mib == 0 || mib > MOST_ACCESS_LIMIT_MIB {
            return Err(ConfigError::Value {
                what: "access.limit_mib",
                value: mib.to_string(),
                problem: "is not between 1 and 1048576",
            });
        }
        Ok(self.report.unwrap_or(false).then_some(mib << 20))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuTable {
    oversubscribe: Option<bool>,
    idle_ms: Option<u64>,
    room_timeout_ms: Option<u64>,
}

impl GpuTable {
    /// Checks the settings and fills in the defaults.
    fn checked(&self) -> Result<GpuConfig, ConfigError> {
        if self.idle_ms == Some(0) {
            let (what, value) = ("gpu.idle_ms", "0".to_owned());
            return Err(ConfigError::Value { what, value, problem: "would be every program; leave it out for 1000" });
        }
        Ok(GpuConfig {
            oversubscribe: self.oversubscribe.unwrap_or(false),
            idle: self.idle_ms.map_or(DEFAULT_IDLE, Duration::from_millis),
            room_timeout: configured(self.room_timeout_ms, DEFAULT_ROOM, "gpu.room_timeout_ms"),
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolTable {
    spare: Option<usize>,
    learned: Option<usize>,
    remember_s: Option<u64>,
    max: Option<usize>,
    slow_start_ms: Option<u64>,
    start_timeout_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitsTable {
    gpu_memory_mib: Option<u64>,
    pinned_memory_mib: Option<u64>,
    connections: Option<usize>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct SandboxTable {
    enabled: Option<bool>,
    required: Option<bool>,
    uid_range: Option<String>,
    #[serde(default)]
    read: Vec<PathBuf>,
}

impl SandboxTable {
    /// Checks the settings and fills in the defaults.
    fn checked(self) -> Result<SandboxConfig, ConfigError> {
        Ok(SandboxConfig {
            enabled: self.enabled.unwrap_or(true),
            required: self.required.unwrap_or(false),
            uids: self.uid_range.map_or(Ok(DEFAULT_UIDS), UidRange::parse)?,
            read: self.read,
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ContainersTable {
    gpu_memory_mib: Option<u64>,
    pinned_memory_mib: Option<u64>,
    workers: Option<u32>,
    need_grant: Option<bool>,
}

impl ContainersTable {
    fn limits(&self) -> ContainerLimits {
        let (gpu_memory_mib, pinned_memory_mib) = (self.gpu_memory_mib, self.pinned_memory_mib);
        let Limits { device_memory, pinned_memory } =
            LimitsTable { gpu_memory_mib, pinned_memory_mib, connections: None }.bytes();
        ContainerLimits { device_memory, pinned_memory, workers: self.workers }
    }
}

impl PoolTable {
    /// The workers to be kept. Where an operator wants no spare workers, the pool learns none by default.
    fn spares(&self, option: Option<usize>) -> Spares {
        let usual = option.or(self.spare).unwrap_or(1);
        Spares {
            usual,
            learned: self.learned.unwrap_or(usual.min(1)),
            remember: self.remember_s.map_or(DEFAULT_REMEMBER, Duration::from_secs),
        }
    }
}

impl LimitsTable {
    /// The number of connections that one user or container may have.
    fn connections(&self) -> Result<usize, ConfigError> {
        match self.connections.unwrap_or(DEFAULT_CONNECTIONS) {
            0 => {
                let (what, value) = ("limits.connections", "0".to_owned());
                Err(ConfigError::Value { what, value, problem: "would leave no program a GPU; leave it out for 256" })
            }
            connections => Ok(connections),
        }
    }

    fn bytes(self) -> Limits {
        let bytes = |mib: Option<u64>| mib.map(|mib| mib.saturating_mul(1 << 20));
        Limits { device_memory: bytes(self.gpu_memory_mib), pinned_memory: bytes(self.pinned_memory_mib) }
    }
}

impl Config {
    /// Reads the file and merges it with the options.
    pub(crate) fn load(options: ServeOptions) -> Result<Self, ConfigError> {
        let file = match &options.config {
            Some(path) => read(path)?,
            None => match read(Path::new(DEFAULT_FILE)) {
                Err(ConfigError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                    File::default()
                }
                result => result?,
            },
        };
        Self::merge(options, file)
    }

    fn merge(options: ServeOptions, file: File) -> Result<Self, ConfigError> {
        let socket = options.socket.or(file.socket);
        let socket = socket.unwrap_or_else(|| rekindle_wire::control::DEFAULT_SOCKET.into());
        // Absolute: clients see the path as it was bound.
        let socket = std::path::absolute(socket).map_err(ConfigError::Here)?;
        if socket.as_os_str().len() >= SOCKET_PATH_MAX {
            return Err(ConfigError::Value {
                what: "socket",
                value: socket.display().to_string(),
                problem: "is longer than the 99 bytes that this socket's path may have",
            });
        }
        let cuda_driver = options.cuda_driver.or(file.cuda_driver);
        let program = options.worker_program.map_or_else(std::env::current_exe, Ok).map_err(ConfigError::Here)?;
        let connections = file.limits.connections()?;
        Ok(Self {
            workers: WorkerConfig {
                cuda_driver: driver(cuda_driver.unwrap_or_else(|| DEFAULT_DRIVER.into()))?,
                program,
                spares: file.pool.spares(options.spare),
                slow_start: file.pool.slow_start_ms.map_or(DEFAULT_SLOW_START, Duration::from_millis),
                start_timeout: file.pool.start_timeout_ms.map_or(DEFAULT_START, Duration::from_millis),
                silence_timeout: file.silence_timeout_ms.map_or(DEFAULT_SILENCE, Duration::from_millis),
                sandbox: file.sandbox.checked()?,
                report_access: file.access.limit()?,
            },
            clients: ClientConfig {
                max: file.pool.max,
                limits: file.limits.bytes(),
                of_container: file.containers.limits(),
                grants_required: file.containers.need_grant.unwrap_or(true),
            },
            timeouts: Timeouts {
                quiesce: configured(file.quiesce_timeout_ms, DEFAULT_QUIESCE, "quiesce_timeout_ms"),
                stall: configured(file.stall_timeout_ms, DEFAULT_STALL, "stall_timeout_ms"),
            },
            gpu: file.gpu.checked()?,
            checkpoint: file.checkpoint.checked()?,
            image: ImageConfig {
                file_bytes: file.image.file_bytes()?,
                compression: file.image.compression.map(|it| it.parse()).transpose()?.unwrap_or_default(),
            },
            restore: RestoreConfig {
                allowances: file.restore.allowances(),
                run_before_loaded: file.restore.run_before_loaded.unwrap_or(true),
                warm_memory: file.warm.memory_mib.map(|mib| mib.saturating_mul(1 << 20)),
            },
            metrics: file.metrics.checked(&socket)?,
            state_dir: state_dir(file.state_dir, &socket)?,
            socket: SocketConfig {
                path: socket,
                mode: file.socket_mode.map_or(Ok(DEFAULT_MODE), mode)?,
                group: file.socket_group,
                connections,
            },
        })
    }
}

fn read(path: &Path) -> Result<File, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { file: path.to_owned(), source })?;
    toml::from_str(&text).map_err(|source| ConfigError::Parse { file: path.to_owned(), source: Box::new(source) })
}

/// The state directory. Its default is beside the socket's folder, since containers see the socket's folder:
/// `/run/rekindle-state`.
fn state_dir(given: Option<PathBuf>, socket: &Path) -> Result<PathBuf, ConfigError> {
    if let Some(dir) = given {
        return std::path::absolute(dir).map_err(ConfigError::Here);
    }
    let dir = beside_folder(socket, "-state");
    // Daemons with the same folder have separate state directories.
    Ok(if is_default(socket) { dir } else { dir.join(socket.file_name().unwrap_or_default()) })
}

/// The default of the metrics' socket, which is beside the control socket's folder as well, in a folder that everybody may
/// enter: `/run/rekindle-metrics/metrics.sock`.
fn metrics_socket(control: &Path) -> PathBuf {
    let dir = beside_folder(control, "-metrics");
    // Not longer than a socket's path may be, since the control socket's is not.
    if is_default(control) { dir.join("metrics.sock") } else { dir.join(control.file_name().unwrap_or_default()) }
}

/// The folder beside that of the control socket whose name ends so.
fn beside_folder(control: &Path, suffix: &str) -> PathBuf {
    let mut name = control.parent().unwrap_or(Path::new("/run/rekindle")).as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

fn is_default(control: &Path) -> bool {
    control == Path::new(rekindle_wire::control::DEFAULT_SOCKET)
}

/// The limit that a setting gives, or its default.
fn configured(ms: Option<u64>, default: Duration, setting: &'static str) -> Limit {
    Limit::configured(ms.map_or(default, Duration::from_millis), setting)
}

/// Parses a mode in octal, as chmod takes it; TOML would read a bare 0660 as an error or, as 660, as something else.
fn mode(text: String) -> Result<u32, ConfigError> {
    match u32::from_str_radix(&text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err(ConfigError::Value {
            what: "socket_mode",
            value: text,
            problem: "is no mode; write it in octal, as \"0660\"",
        }),
    }
}

/// The loader searches for a bare name; a path is made absolute, since workers run elsewhere.
fn driver(path: PathBuf) -> Result<PathBuf, ConfigError> {
    if path.components().count() == 1 && !path.is_absolute() {
        Ok(path)
    } else {
        std::path::absolute(path).map_err(ConfigError::Here)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        let file = toml::from_str(text).map_err(|error| error.to_string())?;
        Config::merge(ServeOptions::default(), file).map_err(|error| error.to_string())
    }

    fn spares(usual: usize, learned: usize) -> Spares {
        Spares { usual, learned, remember: Duration::from_secs(600) }
    }

    #[test]
    fn without_anything_the_documented_defaults_hold() {
        let config = parse("").unwrap();
        assert_eq!(config.socket.path, Path::new("/run/rekindle/rekindled.sock"));
        assert_eq!(config.workers.cuda_driver, Path::new("libcuda.so.1"));
        assert_eq!((config.socket.mode, config.workers.spares, config.clients.max), (0o660, spares(1, 1), None));
        let seconds = [config.workers.slow_start, config.workers.start_timeout, config.workers.silence_timeout]
            .map(|it| it.as_secs());
        assert_eq!(seconds, [15, 120, 30]);
    }

    #[test]
    fn workers_are_sandboxed_unless_it_is_said_otherwise() {
        let sandbox = parse("").unwrap().workers.sandbox;
        assert_eq!((sandbox.enabled, sandbox.required, sandbox.uids), (true, false, DEFAULT_UIDS));
        let sandbox = parse("[sandbox]\nenabled = false\nuid_range = \"5000 - 5009\"").unwrap().workers.sandbox;
        assert_eq!((sandbox.enabled, sandbox.uids.count()), (false, 10));
        for range in ["0-9", "9-8", "7", "-1-5", "1-4294967295"] {
            let text = format!("[sandbox]\nuid_range = \"{range}\"");
            assert!(parse(&text).unwrap_err().contains("no range of users"), "{range}");
        }
    }

    #[test]
    fn limits_are_in_mib() {
        let limits = parse("[limits]\ngpu_memory_mib = 3\n").unwrap().clients.limits;
        assert_eq!(limits, Limits { device_memory: Some(3 << 20), pinned_memory: None });
        assert_eq!(parse("").unwrap().socket.connections, 256);
        assert_eq!(parse("[limits]\nconnections = 7").unwrap().socket.connections, 7);
        assert!(parse("[limits]\nconnections = 0").unwrap_err().contains("limits.connections"));
    }

    #[test]
    fn a_protocol_that_does_not_exist_is_refused() {
        let checkpoint = parse("").unwrap().checkpoint;
        let expected = CheckpointConfig {
            protocol: None,
            cow_pool: 2 << 30,
            recopy_rounds: 4,
            bandwidth: None,
            application_first: true,
            staging: 0,
            rehearse: false,
        };
        assert_eq!(checkpoint, expected);
        let checkpoint = parse("[checkpoint]\nprotocol = \"cow\"\nbandwidth = 7\nstaging = 0").unwrap().checkpoint;
        assert_eq!((checkpoint.protocol, checkpoint.bandwidth, checkpoint.staging), (Some(Protocol::Cow), Some(7), 0));
        for unknown in ["cov", "unknown", "", "Auto"] {
            let error = parse(&format!("[checkpoint]\nprotocol = \"{unknown}\"")).unwrap_err();
            assert!(error.contains("checkpoint.protocol") && error.contains("auto, stop"), "{error}");
        }
        for odd in ["recopy_rounds = 0", "recopy_rounds = 65", "bandwidth = 0"] {
            assert!(parse(&format!("[checkpoint]\n{odd}")).unwrap_err().contains("checkpoint."), "{odd}");
        }
    }

    #[test]
    fn images_are_compressed_as_is_said() {
        assert_eq!(parse("").unwrap().image.file_bytes, 256 << 20);
        assert_eq!(parse("[image]\nfile_mib = 3").unwrap().image.file_bytes, 3 << 20);
        assert!(parse("[image]\nfile_mib = 0").unwrap_err().contains("image.file_mib"));
        assert_eq!(parse("").unwrap().image.compression, CompressionChoice::Off);
        assert_eq!(parse("[image]\ncompression = \"auto\"").unwrap().image.compression, CompressionChoice::Auto);
        let error = parse("[image]\ncompression = \"gzip\"").unwrap_err();
        assert!(error.contains("image.compression") && error.contains("off, lz4, zstd or auto"), "{error}");
    }

    #[test]
    fn programs_are_suspended_for_others_only_where_that_is_asked_for() {
        let gpu = parse("").unwrap().gpu;
        assert_eq!((gpu.oversubscribe, gpu.idle, gpu.room_timeout.time), (false, DEFAULT_IDLE, DEFAULT_ROOM));
        let gpu = parse("[gpu]\noversubscribe = true\nidle_ms = 5\nroom_timeout_ms = 7").unwrap().gpu;
        assert_eq!((gpu.oversubscribe, gpu.idle.as_millis()), (true, 5));
        assert_eq!(gpu.room_timeout.to_string(), "7 ms (gpu.room_timeout_ms)");
        assert!(parse("[gpu]\nidle_ms = 0").unwrap_err().contains("gpu.idle_ms"));
    }

    #[test]
    fn accesses_are_reported_only_where_that_is_asked_for() {
        assert_eq!(parse("").unwrap().workers.report_access, None);
        assert_eq!(parse("[access]\nreport = true").unwrap().workers.report_access, Some(1 << 30));
        assert_eq!(parse("[access]\nreport = true\nlimit_mib = 2").unwrap().workers.report_access, Some(2 << 20));
        assert!(parse("[access]\nlimit_mib = 0").unwrap_err().contains("access.limit_mib"));
    }

    #[test]
    fn a_containers_limits_and_where_they_are_kept() {
        let config = parse("[containers]\ngpu_memory_mib = 2\nworkers = 4\n").unwrap();
        let expected = ContainerLimits { device_memory: Some(2 << 20), pinned_memory: None, workers: Some(4) };
        assert_eq!((config.clients.of_container, config.clients.grants_required), (expected, true));
        assert_eq!(config.state_dir, Path::new("/run/rekindle-state"));
        assert_eq!(parse("socket = \"/a/b/s\"").unwrap().state_dir, Path::new("/a/b-state/s"));
        assert!(!parse("[containers]\nneed_grant = false").unwrap().clients.grants_required);
    }

    #[test]
    fn metrics_are_served_where_no_container_sees_them_and_over_tcp_only_if_that_is_asked_for() {
        let metrics = |text| parse(text).unwrap().metrics;
        let default = |path: &str| MetricsSocket::Default(path.into());
        let unchanged = metrics("");
        assert_eq!((unchanged.socket, unchanged.listen), (default("/run/rekindle-metrics/metrics.sock"), None));
        assert_eq!(metrics("socket = \"/a/b/s\"").socket, default("/a/b-metrics/s"));
        let given = metrics("[metrics]\nsocket = \"/m\"\nlisten = \"[::1]:9464\"\nsocket_group = \"7\"");
        assert_eq!(given.socket, MetricsSocket::Given("/m".into()));
        assert_eq!(given.listen, Some(([0, 0, 0, 0, 0, 0, 0, 1], 9464).into()));
        assert_eq!(given.socket_group.as_deref(), Some("7"));
        assert_eq!(metrics("[metrics]\nsocket = \"\"").socket, MetricsSocket::None);
        for odd in ["9464", "127.0.0.1", "localhost:9464", ""] {
            let error = parse(&format!("[metrics]\nlisten = {odd:?}")).unwrap_err();
            assert!(error.contains("metrics.listen") && error.contains("127.0.0.1:9464"), "{error}");
        }
        // The longest control socket has a default for the metrics that can be bound.
        let longest = format!("/{}", "x/".repeat((SOCKET_PATH_MAX - 3) / 2)) + "s";
        let MetricsSocket::Default(path) = metrics(&format!("socket = {longest:?}")).socket else { panic!("given") };
        assert!(path.as_os_str().len() < 108, "{}", path.display());
    }

    #[test]
    fn options_win_over_the_file() {
        let text = "socket = \"/a\"\nsocket_mode = \"0666\"\n[pool]\nspare = 3\n";
        let options = ServeOptions { socket: Some("/b".into()), ..ServeOptions::default() };
        let config = Config::merge(options, toml::from_str(text).unwrap()).unwrap();
        assert_eq!(config.socket.path, Path::new("/b"));
        assert_eq!((config.socket.mode, config.workers.spares), (0o666, spares(3, 1)));
    }

    #[test]
    fn who_wants_no_spare_workers_gets_none_that_are_learned() {
        let of = |text| parse(text).unwrap().workers.spares;
        assert_eq!(of("[pool]\nspare = 0"), spares(0, 0));
        assert_eq!(of("[pool]\nspare = 0\nlearned = 2"), spares(0, 2));
        let shorter = Spares { remember: Duration::from_secs(9), ..spares(2, 0) };
        assert_eq!(of("[pool]\nspare = 2\nlearned = 0\nremember_s = 9"), shorter);
    }

    #[test]
    fn mistakes_are_named() {
        assert!(parse("sokcet = \"/a\"").unwrap_err().contains("sokcet"));
        assert!(parse("[limits]\ngpu_memory = 1").unwrap_err().contains("gpu_memory_mib"));
        assert!(parse("socket_mode = \"rw\"").unwrap_err().contains("in octal"));
        let long = format!("socket = \"/{}\"", "x".repeat(120));
        assert!(parse(&long).unwrap_err().contains("99 bytes"));
    }
}
