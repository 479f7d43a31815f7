//! The configuration of the devices, from the environment.
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `SIMGPU_DEVICES` | how many devices there are | 2 |
//! | `CUDA_VISIBLE_DEVICES` | which of them there are for this process, and in which order: numbers or UUIDs | all |
//! | `SIMGPU_MEMORY` | memory of each, in bytes or with `K`, `M`, `G` behind the number | `4G` |
//! | `SIMGPU_MACHINE` | a file, by which processes have the same devices (`memory/machine.rs`) | devices of its own |
//! | `SIMGPU_DEVICE_FILE` | a file that stands for the driver's devices: others can checkpoint this process (`checkpoint/`) | none |
//! | `SIMGPU_CONTEXT_MEMORY` | bytes of a device's memory that each context takes | 0 |
//! | `SIMGPU_COPY_GBPS` | 10^9 bytes a second that a device copies to and from the host, each way | unlimited |
//! | `SIMGPU_VERSION` | what `cuDriverGetVersion` says | `13000` |
//! | `SIMGPU_CC` | compute capability | `9.0` |
//! | `SIMGPU_NAME` | the devices' name | `Rekindle software GPU` |
//! | `SIMGPU_MULTIPROCESSORS` | how many each has | 16 |
//! | `SIMGPU_PEERS` | whether devices can access each other's memory | `1` |
//! | `SIMGPU_QUEUE_DEPTH` | how many commands a hardware queue takes before submitting one blocks | 1021 |
//! | `CUDA_DEVICE_MAX_CONNECTIONS` | how many hardware queues a context's streams share (1 to 32) | 8 |
//! | `SIMGPU_CODE_OFFSET` | how many bytes into its memory a module's code begins: functions move, and variables do not | 0 |
//! | `SIMGPU_FAULT` | what goes wrong when, see [`crate::fault`] | nothing |
//! | `SIMGPU_LOG` | `1`: a line on stderr for what is refused and what fails; `2`: for every call | off |

use std::sync::OnceLock;

/// The configuration, read when it is first needed.
#[derive(Debug)]
pub(crate) struct Config {
    /// The devices, by their numbers among all devices of the machine.
    pub(crate) devices: Vec<usize>,
    /// Bytes of memory of each.
    pub(crate) memory: u64,
    /// Bytes of memory that each context takes.
    pub(crate) context_memory: u64,
    /// Bytes a second of a copy between device and host.
    pub(crate) copy_rate: Option<f64>,
    /// Whether devices can access each other's memory.
    pub(crate) peers: bool,
    /// The version that it claims to be.
    pub(crate) version: i32,
    /// Compute capability: major, minor.
    pub(crate) capability: (u32, u32),
    /// The devices' name.
    pub(crate) name: String,
    /// How many multiprocessors each has.
    pub(crate) multiprocessors: u32,
    /// Commands that a hardware queue takes before submitting one blocks.
    pub(crate) queue_depth: usize,
    /// Hardware queues of a context.
    pub(crate) connections: usize,
    /// Bytes before a module's first function.
    pub(crate) code_offset: u64,
    /// Whether refusals and failures are logged on stderr.
    pub(crate) log: bool,
    /// Whether every call is logged.
    pub(crate) trace: bool,
}

/// The default version: CUDA 13.0.
const DRIVER_VERSION: i32 = 13_000;

/// The default number of multiprocessors. It is lower than an H200's: grids are often made as large as the device, and the CPU
/// runs their blocks one after the other.
const MULTIPROCESSORS: u32 = 16;

/// The most devices that access masks have room for.
pub(crate) const MAX_DEVICES: usize = 64;

/// The configuration of this process.
pub(crate) fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config::read(|name| std::env::var(name).ok()))
}

impl Config {
    fn read(get: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str| get(name).and_then(|text| text.trim().parse::<usize>().ok());
        let devices = number("SIMGPU_DEVICES").unwrap_or(2).min(MAX_DEVICES);
        Self {
            devices: match get("CUDA_VISIBLE_DEVICES") {
                Some(list) => visible(&list, devices),
                None => (0..devices).collect(),
            },
            memory: get("SIMGPU_MEMORY").and_then(|t| bytes(&t)).unwrap_or(4 << 30),
            context_memory: get("SIMGPU_CONTEXT_MEMORY").and_then(|t| bytes(&t)).unwrap_or(0),
            copy_rate: get("SIMGPU_COPY_GBPS")
                .and_then(|t| t.trim().parse::<f64>().ok())
                .filter(|rate| *rate > 0.0)
                .map(|rate| rate * 1e9),
            peers: number("SIMGPU_PEERS") != Some(0),
            version: number("SIMGPU_VERSION").and_then(|it| i32::try_from(it).ok()).unwrap_or(DRIVER_VERSION),
            capability: get("SIMGPU_CC").and_then(|t| capability(&t)).unwrap_or((9, 0)),
            name: get("SIMGPU_NAME").unwrap_or_else(|| "Rekindle software GPU".to_owned()),
            multiprocessors: number("SIMGPU_MULTIPROCESSORS").map_or(MULTIPROCESSORS, |n| n.clamp(1, 1024) as u32),
            queue_depth: number("SIMGPU_QUEUE_DEPTH").unwrap_or(1021).max(1),
            connections: number("CUDA_DEVICE_MAX_CONNECTIONS").unwrap_or(8).clamp(1, 32),
            code_offset: number("SIMGPU_CODE_OFFSET").unwrap_or(0).min(32) as u64,
            trace: get("SIMGPU_LOG").is_some_and(|t| t == "2"),
            log: get("SIMGPU_LOG").is_some_and(|t| !t.is_empty() && t != "0"),
        }
    }
}

/// The devices that a list names, up to the first word that names no device; none at all if a device is named twice.
fn visible(list: &str, count: usize) -> Vec<usize> {
    let mut found = Vec::new();
    for word in list.split(',').map(str::trim) {
        let by_number = word.parse().ok().filter(|number| *number < count);
        let by_uuid = || {
            let of = |number: &usize| word.len() > "GPU-".len() && uuid_text(*number).starts_with(word);
            let mut matches = (0..count).filter(of);
            matches.next().filter(|_| matches.next().is_none())
        };
        let Some(number) = by_number.or_else(by_uuid) else { break };
        if found.contains(&number) {
            return Vec::new();
        }
        found.push(number);
    }
    found
}

/// A device's UUID as it is named in that list.
fn uuid_text(number: usize) -> String {
    let digits: String = uuid(number).iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| &digits[part]);
    format!("GPU-{}", parts.join("-"))
}

/// The UUID of a device, by its number among all devices.
pub(crate) fn uuid(number: usize) -> [u8; 16] {
    let mut uuid = *b"rekindle-simgpu\0";
    uuid[15] = number as u8;
    uuid
}

/// The PCI address of a device, by its number among all devices: domain, bus, device.
pub(crate) fn pci(number: usize) -> [i32; 3] {
    [0, 0x10 + number as i32, 0]
}

fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.chars().last()? {
        'K' | 'k' => (&text[..text.len() - 1], 10),
        'M' | 'm' => (&text[..text.len() - 1], 20),
        'G' | 'g' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn capability(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.trim().split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Logs a line on stderr, where the environment asks for that.
macro_rules! log {
    ($($arg:tt)*) => {
        if $crate::config::config().log {
            eprintln!("simgpu: {}", format_args!($($arg)*));
        }
    };
}
pub(crate) use log;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_hold_where_nothing_or_nonsense_is_said() {
        for config in [Config::read(|_| None), Config::read(|_| Some("x".into()))] {
            assert_eq!((config.memory, config.capability), (4 << 30, (9, 0)));
            assert!(config.copy_rate.is_none());
        }
    }

    #[test]
    fn a_process_sees_the_devices_that_its_list_names() {
        let second = "GPU-72656b69-6e64-6c65-2d73-696d67707501";
        assert_eq!(uuid_text(1), second);
        assert_eq!(visible(&format!("{second},0"), 3), [1, 0]);
        assert_eq!(visible("2,7,0", 3), [2]);
        assert!(visible("GPU-72656b69", 3).is_empty(), "it may be any of them");
        assert!(visible("1,1", 3).is_empty());
        assert!(visible("", 3).is_empty());
    }

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!(bytes("512M"), Some(512 << 20));
        assert_eq!(bytes(" 7 "), Some(7));
        assert_eq!(bytes("99999999999G"), None);
        assert_eq!(capability("8.6"), Some((8, 6)));
    }
}
