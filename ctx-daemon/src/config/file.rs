//! The tables of the configuration file, their defaults, and the checks of their values.

use rekindle_ctx_worker::{Reporting, VirtualGpus};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rekindle_wire::control::{Allowances, ContainerLimits, Limits};
use serde::Deserialize;

use super::error::ConfigError;
use super::places::metrics_socket;
use super::settings::{
    CheckpointConfig, DEFAULT_UIDS, GpuConfig, MetricsConfig, MetricsSocket, NativeConfig, SandboxConfig, Spares,
    UidRange,
};
use super::tracing::TracingTable;
use crate::limit::Limit;

/// The default of `remember_s`: a kind that nobody asks for within this time costs more memory than its workers save time.
const DEFAULT_REMEMBER: Duration = Duration::from_secs(600);
/// The default of `idle_ms`: programs that compute pause for less between their commands, and those that wait for people or for
/// other work for longer.
pub(super) const DEFAULT_IDLE: Duration = Duration::from_millis(1000);
/// The default of `room_timeout_ms`: tens of gigabytes are copied in this time also where host memory is slow.
pub(super) const DEFAULT_ROOM: Duration = Duration::from_secs(30);
/// The default of `devices`: the driver opens `/dev/nvidiactl`, `/dev/nvidia-uvm`, `/dev/nvidia0` and so on.
const DEFAULT_DEVICES: &str = "/dev/nvidia";
const DEFAULT_COW_POOL: u64 = 2 << 30;
/// The default of `staging`. An operator decides whether staging is worth the memory.
const DEFAULT_STAGING: u64 = 0;
const DEFAULT_RECOPY_ROUNDS: u32 = 4;
const MOST_RECOPY_ROUNDS: u32 = 64;
/// The default of `file_mib`: the amount that one thread writes in a twentieth of a second. Less is not worth another file.
const DEFAULT_FILE_MIB: u64 = 256;
const DEFAULT_ACCESS_LIMIT_MIB: u64 = 1024;
const MOST_ACCESS_LIMIT_MIB: u64 = 1 << 20;
/// The default of `mtbf_hours`. Meta reports 419 interruptions in 54 days of 16,384 GPUs while Llama 3 was trained (2024): one in
/// 50,000 hours of a GPU.
const DEFAULT_MTBF_HOURS: u64 = 50_000;
/// The default of `connections`: more than the processes that one job runs on one machine.
const DEFAULT_CONNECTIONS: usize = 256;

/// The content of the configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    #[serde(default)]
    pub(super) limits: LimitsTable,
    #[serde(default)]
    pub(super) protect: ProtectTable,
    #[serde(default)]
    pub(super) containers: ContainersTable,
    pub(super) state_dir: Option<PathBuf>,
    pub(super) socket: Option<PathBuf>,
    pub(super) socket_mode: Option<String>,
    pub(super) socket_group: Option<String>,
    pub(super) cuda_driver: Option<PathBuf>,
    pub(super) quiesce_timeout_ms: Option<u64>,
    pub(super) silence_timeout_ms: Option<u64>,
    pub(super) stall_timeout_ms: Option<u64>,
    #[serde(default)]
    pub(super) pool: PoolTable,
    #[serde(default)]
    pub(super) sandbox: SandboxTable,
    #[serde(default)]
    pub(super) gpu: GpuTable,
    #[serde(default)]
    pub(super) native: NativeTable,
    #[serde(default)]
    pub(super) access: AccessTable,
    #[serde(default)]
    pub(super) checkpoint: CheckpointTable,
    #[serde(default)]
    pub(super) image: ImageTable,
    #[serde(default)]
    pub(super) restore: RestoreTable,
    #[serde(default)]
    pub(super) warm: WarmTable,
    #[serde(default)]
    pub(super) metrics: MetricsTable,
    #[serde(default)]
    pub(super) tracing: TracingTable,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MetricsTable {
    pub(super) socket: Option<PathBuf>,
    pub(super) socket_group: Option<String>,
    pub(super) listen: Option<String>,
}

impl MetricsTable {
    /// Checks the settings and fills in the defaults, for a daemon with this control socket.
    pub(super) fn checked(self, control: &Path) -> Result<MetricsConfig, ConfigError> {
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
pub(super) struct WarmTable {
    pub(super) memory_mib: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ProtectTable {
    pub(super) dir: Option<PathBuf>,
    pub(super) mtbf_hours: Option<u64>,
}

impl ProtectTable {
    /// The mean time between failures of one GPU.
    pub(super) fn mtbf(&self) -> Result<Duration, ConfigError> {
        match self.mtbf_hours.unwrap_or(DEFAULT_MTBF_HOURS) {
            0 => {
                let (what, value) = ("protect.mtbf_hours", "0".to_owned());
                Err(ConfigError::Value {
                    what,
                    value,
                    problem: "would be a GPU that never works; leave it out for 50000",
                })
            }
            hours => Ok(Duration::from_secs(hours.saturating_mul(3600))),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RestoreTable {
    pub(super) allow_other_driver: Option<bool>,
    pub(super) allow_other_gpu: Option<bool>,
    pub(super) run_before_loaded: Option<bool>,
}

impl RestoreTable {
    pub(super) fn allowances(&self) -> Allowances {
        Allowances {
            other_driver: self.allow_other_driver.unwrap_or(false),
            other_gpu: self.allow_other_gpu.unwrap_or(false),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ImageTable {
    pub(super) compression: Option<String>,
    pub(super) file_mib: Option<u64>,
}

impl ImageTable {
    /// `file_mib` in bytes.
    pub(super) fn file_bytes(&self) -> Result<u64, ConfigError> {
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
pub(super) struct CheckpointTable {
    pub(super) protocol: Option<String>,
    pub(super) cow_pool: Option<u64>,
    pub(super) recopy_rounds: Option<u32>,
    pub(super) bandwidth: Option<u64>,
    pub(super) application_first: Option<bool>,
    pub(super) staging: Option<u64>,
    pub(super) rehearse: Option<bool>,
}

impl CheckpointTable {
    /// Checks the settings and fills in the defaults.
    pub(super) fn checked(self) -> Result<CheckpointConfig, ConfigError> {
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
pub(super) struct AccessTable {
    pub(super) report: Option<bool>,
    pub(super) limit_mib: Option<u64>,
    pub(super) reads: Option<bool>,
}

impl AccessTable {
    /// The reporting mode, if there is one.
    pub(super) fn mode(&self) -> Result<Option<Reporting>, ConfigError> {
        let mib = self.limit_mib.unwrap_or(DEFAULT_ACCESS_LIMIT_MIB);
        if mib == 0 || mib > MOST_ACCESS_LIMIT_MIB {
            return Err(ConfigError::Value {
                what: "access.limit_mib",
                value: mib.to_string(),
                problem: "is not between 1 and 1048576",
            });
        }
        let mode = if self.reads.unwrap_or(false) { Reporting::Reads } else { Reporting::Writes { limit: mib << 20 } };
        Ok(self.report.unwrap_or(false).then_some(mode))
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GpuTable {
    #[serde(rename = "virtual")]
    pub(super) parts: Option<u32>,
    pub(super) oversubscribe: Option<bool>,
    pub(super) idle_ms: Option<u64>,
    pub(super) room_timeout_ms: Option<u64>,
}

impl GpuTable {
    /// Checks the settings and fills in the defaults.
    pub(super) fn checked(&self) -> Result<GpuConfig, ConfigError> {
        if self.idle_ms == Some(0) {
            let (what, value) = ("gpu.idle_ms", "0".to_owned());
            return Err(ConfigError::Value { what, value, problem: "would be every program; leave it out for 1000" });
        }
        let parts = self.parts.unwrap_or(1);
        if !(1..=VirtualGpus::MOST).contains(&parts) {
            let (what, value) = ("gpu.virtual", parts.to_string());
            return Err(ConfigError::Value { what, value, problem: "is not between 1 and 15" });
        }
        if parts > 1 && self.oversubscribe == Some(true) {
            let (what, value) = ("gpu.oversubscribe", "true".to_owned());
            let problem = "does not work with virtual GPUs: the memory that is missing may be that of programs on others \
                           of the same GPU; leave it out, or gpu.virtual";
            return Err(ConfigError::Value { what, value, problem });
        }
        Ok(GpuConfig {
            parts: (parts > 1).then_some(parts),
            oversubscribe: self.oversubscribe.unwrap_or(false),
            idle: self.idle_ms.map_or(DEFAULT_IDLE, Duration::from_millis),
            room_timeout: configured(self.room_timeout_ms, DEFAULT_ROOM, "gpu.room_timeout_ms"),
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NativeTable {
    pub(super) enabled: Option<bool>,
    pub(super) devices: Option<String>,
}

impl NativeTable {
    /// Checks the settings and fills in the defaults.
    pub(super) fn checked(self) -> Result<NativeConfig, ConfigError> {
        let devices = self.devices.unwrap_or_else(|| DEFAULT_DEVICES.to_owned());
        if !Path::new(&devices).is_absolute() {
            let problem = "is no absolute path; leave it out for \"/dev/nvidia\"";
            return Err(ConfigError::Value { what: "native.devices", value: devices, problem });
        }
        Ok(NativeConfig { enabled: self.enabled.unwrap_or(true), devices })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PoolTable {
    pub(super) spare: Option<usize>,
    pub(super) learned: Option<usize>,
    pub(super) remember_s: Option<u64>,
    pub(super) max: Option<usize>,
    pub(super) slow_start_ms: Option<u64>,
    pub(super) start_timeout_ms: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LimitsTable {
    pub(super) gpu_memory_mib: Option<u64>,
    pub(super) pinned_memory_mib: Option<u64>,
    pub(super) connections: Option<usize>,
    pub(super) userfaultfd: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SandboxTable {
    pub(super) enabled: Option<bool>,
    pub(super) required: Option<bool>,
    pub(super) uid_range: Option<String>,
    #[serde(default)]
    pub(super) read: Vec<PathBuf>,
}

impl SandboxTable {
    /// Checks the settings and fills in the defaults.
    pub(super) fn checked(self) -> Result<SandboxConfig, ConfigError> {
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
pub(super) struct ContainersTable {
    pub(super) gpu_memory_mib: Option<u64>,
    pub(super) pinned_memory_mib: Option<u64>,
    pub(super) workers: Option<u32>,
    pub(super) need_grant: Option<bool>,
    pub(super) charge: Option<String>,
}

impl ContainersTable {
    pub(super) fn limits(&self) -> ContainerLimits {
        let (gpu_memory_mib, pinned_memory_mib) = (self.gpu_memory_mib, self.pinned_memory_mib);
        let Limits { device_memory, pinned_memory } =
            LimitsTable { gpu_memory_mib, pinned_memory_mib, ..LimitsTable::default() }.bytes();
        ContainerLimits { device_memory, pinned_memory, workers: self.workers }
    }
}

impl PoolTable {
    /// The workers to be kept. Where an operator wants no spare workers, the pool learns none by default.
    pub(super) fn spares(&self, option: Option<usize>) -> Spares {
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
    pub(super) fn connections(&self) -> Result<usize, ConfigError> {
        match self.connections.unwrap_or(DEFAULT_CONNECTIONS) {
            0 => {
                let (what, value) = ("limits.connections", "0".to_owned());
                Err(ConfigError::Value { what, value, problem: "would leave no program a GPU; leave it out for 256" })
            }
            connections => Ok(connections),
        }
    }

    pub(super) fn bytes(self) -> Limits {
        let bytes = |mib: Option<u64>| mib.map(|mib| mib.saturating_mul(1 << 20));
        Limits { device_memory: bytes(self.gpu_memory_mib), pinned_memory: bytes(self.pinned_memory_mib) }
    }
}

/// The limit that a setting gives, or its default.
pub(super) fn configured(ms: Option<u64>, default: Duration, setting: &'static str) -> Limit {
    Limit::configured(ms.map_or(default, Duration::from_millis), setting)
}
