//! The configuration: command-line options override the configuration file, which overrides defaults.
//!
//! `packaging/rekindled.toml` describes every setting and shows its default. Tests compare it with what is read here.
//!
//! - [`mod@file`]: the tables of the file; [`settings`]: the configuration in force; [`error`]: what can be wrong
//! - [`tracing`]: the collector of spans
//! - [`places`]: where things lie unless it says so
//! - [`check`]: `rekindled check-config`; [`here`]: what a configuration asks for that this machine does not have

mod check;
mod error;
mod file;
mod here;
mod places;
mod settings;
mod tracing;

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

pub(crate) use self::check::Report;
pub(crate) use self::error::ConfigError;
use self::file::{File, configured};
pub(crate) use self::here::Host;
use self::places::{library_dir, protect_dir, state_dir};
pub(crate) use self::settings::{
    Charge, CheckpointConfig, ClientConfig, Config, ImageConfig, MetricsConfig, MetricsSocket, NativeConfig,
    ProtectConfig, RestoreConfig, SandboxConfig, SocketConfig, Spares, Timeouts, UidRange, WorkerConfig,
};

pub(crate) use self::tracing::{Collector, TracingConfig};

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
/// The longest path of the control socket: a socket's address less the final zero and the suffix of the workers' endpoint.
const SOCKET_PATH_MAX: usize = 108 - rekindle_ctx_worker::rejoin::WORKERS_SUFFIX.len();

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
    /// The folder of Rekindle's libraries [default: ../lib/rekindle, relative to this program]
    #[arg(long, value_name = "DIR")]
    lib_dir: Option<PathBuf>,
    /// How many workers to keep ready [default: 1]
    #[arg(long, value_name = "N")]
    spare: Option<usize>,
    /// The program to start instead of the worker; for tests
    #[arg(long, hide = true, value_name = "PATH")]
    worker_program: Option<PathBuf>,
}

impl Config {
    /// Reads the file and merges it with the options.
    pub(crate) fn load(options: ServeOptions) -> Result<Self, ConfigError> {
        let file = match &options.config {
            Some(path) => parse(&read(path)?, path)?,
            None => read_default()?.map_or(Ok(File::default()), |text| parse(&text, Path::new(DEFAULT_FILE)))?,
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
        let gives_userfaultfd = file.limits.userfaultfd.unwrap_or(false);
        let state_dir = state_dir(file.state_dir, &socket)?;
        Ok(Self {
            workers: WorkerConfig {
                cuda_driver: driver(cuda_driver.unwrap_or_else(|| DEFAULT_DRIVER.into()))?,
                program,
                spares: file.pool.spares(options.spare),
                slow_start: file.pool.slow_start_ms.map_or(DEFAULT_SLOW_START, Duration::from_millis),
                start_timeout: file.pool.start_timeout_ms.map_or(DEFAULT_START, Duration::from_millis),
                silence_timeout: file.silence_timeout_ms.map_or(DEFAULT_SILENCE, Duration::from_millis),
                sandbox: file.sandbox.checked()?,
                report_access: file.access.mode()?,
            },
            clients: ClientConfig {
                max: file.pool.max,
                limits: file.limits.bytes(),
                of_container: file.containers.limits(),
                userfaultfd: gives_userfaultfd,
                grants_required: file.containers.need_grant.unwrap_or(true),
                charge: file.containers.charge.map(Charge::parse).transpose()?.unwrap_or_default(),
            },
            timeouts: Timeouts {
                quiesce: configured(file.quiesce_timeout_ms, DEFAULT_QUIESCE, "quiesce_timeout_ms"),
                stall: configured(file.stall_timeout_ms, DEFAULT_STALL, "stall_timeout_ms"),
            },
            gpu: file.gpu.checked()?,
            native: file.native.checked()?,
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
            tracing: file.tracing.checked(|name| std::env::var(name).ok())?,
            protect: ProtectConfig {
                mtbf: file.protect.mtbf()?,
                dir: protect_dir(file.protect.dir, &state_dir, &socket)?,
            },
            library_dir: library_dir(options.lib_dir)?,
            state_dir,
            socket: SocketConfig {
                path: socket,
                mode: file.socket_mode.map_or(Ok(DEFAULT_MODE), mode)?,
                group: file.socket_group,
                connections,
            },
        })
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Read { file: path.to_owned(), source })
}

/// The text of the default file; none if there is no such file.
fn read_default() -> Result<Option<String>, ConfigError> {
    match read(Path::new(DEFAULT_FILE)) {
        Err(error) if error.is_absence() => Ok(None),
        text => text.map(Some),
    }
}

fn parse(text: &str, path: &Path) -> Result<File, ConfigError> {
    toml::from_str(text).map_err(|source| ConfigError::Parse { file: path.to_owned(), source: Box::new(source) })
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
    use rekindle_images::{CompressionChoice, Protocol};
    use rekindle_wire::control::{ContainerLimits, Limits};

    use super::file::{DEFAULT_IDLE, DEFAULT_ROOM};
    use super::settings::DEFAULT_UIDS;
    use rekindle_ctx_worker::Reporting;

    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        let file = super::parse(text, Path::new("file")).map_err(|error| error.to_string())?;
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

    /// The annotated file as an administrator installs it.
    const ANNOTATED: &str = include_str!("../../../packaging/rekindled.toml");

    /// The lines of the annotated file that begin with `prefix` and a setting, without the prefix, and all others as they are.
    fn uncommented(prefix: &str, text: &str) -> String {
        let setting = |line: &str| line.starts_with(|c: char| c.is_ascii_lowercase()) && line.contains(" = ");
        let line = |line: &str| match line.strip_prefix(prefix) {
            Some(rest) if setting(rest) => format!("{rest}\n"),
            _ => format!("{line}\n"),
        };
        text.lines().map(line).collect()
    }

    #[test]
    fn the_annotated_file_shows_the_defaults() {
        let default = parse("").unwrap();
        assert_eq!(parse(ANNOTATED).unwrap(), default);
        let mut shown = parse(&uncommented("#", ANNOTATED)).unwrap();
        // The same protocol as without a setting; only who has chosen it differs.
        assert_eq!(shown.checkpoint.protocol.take(), Some(Protocol::Auto));
        assert_eq!(shown, default);
    }

    #[test]
    fn an_example_is_of_a_setting_without_a_default() {
        let mut table = "";
        for line in ANNOTATED.lines() {
            if line.starts_with('[') {
                table = line;
            }
            let Some((example, _)) = line.strip_prefix("#   ").and_then(|it| Some((it, it.split_once(" = ")?))) else {
                continue;
            };
            assert_ne!(parse(&format!("{table}\n{example}")).unwrap(), parse("").unwrap(), "{example}");
        }
    }

    /// The settings of a table, or of the file itself, as the parser knows them. It lists them when it finds another.
    fn known(table: Option<&str>) -> Option<Vec<String>> {
        const OTHER: &str = "no_such_setting";
        let head = table.map_or(String::new(), |it| format!("[{it}]\n"));
        let error = toml::from_str::<File>(&format!("{head}{OTHER} = 0")).unwrap_err().message().to_owned();
        // "unknown field `no_such_setting`, expected `a` or `b`", with any number of names.
        let names: Vec<_> = error.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        (names.first()? == OTHER).then(|| names[1..].to_vec())
    }

    #[test]
    fn the_annotated_file_has_every_setting_and_no_other() {
        let mut expected = Vec::new();
        for name in known(None).unwrap() {
            match known(Some(&name)) {
                Some(inner) => expected.extend(inner.iter().map(|it| format!("{name}.{it}"))),
                None => expected.push(name),
            }
        }
        assert!(expected.contains(&"socket".to_owned()) && expected.contains(&"warm.memory_mib".to_owned()));

        let everything = uncommented("#   ", &uncommented("#", ANNOTATED));
        let root: toml::Table = everything.parse().unwrap();
        let mut shown = Vec::new();
        for (name, value) in &root {
            match value.as_table() {
                Some(inner) => shown.extend(inner.keys().map(|it| format!("{name}.{it}"))),
                None => shown.push(name.clone()),
            }
        }
        expected.sort();
        shown.sort();
        assert_eq!(shown, expected);
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
    fn protected_jobs_are_on_a_disk_or_in_the_state_directory_that_is_named() {
        let dir = |text: &str| parse(text).map(|it| it.protect.dir);
        assert_eq!(dir(""), Ok("/var/lib/rekindle/protect".into()));
        assert_eq!(dir("state_dir = \"/s\""), Ok("/s/protect".into()));
        assert_eq!(dir("socket = \"/x/s\""), Ok("/x-state/s/protect".into()));
        assert_eq!(dir("state_dir = \"/s\"\n[protect]\ndir = \"/p\""), Ok("/p".into()));
        assert_eq!(parse("[protect]\nmtbf_hours = 2").unwrap().protect.mtbf, Duration::from_secs(7200));
        assert!(parse("[protect]\nmtbf_hours = 0").unwrap_err().contains("protect.mtbf_hours"));
    }

    #[test]
    fn limits_are_in_mib() {
        let limits = parse("[limits]\ngpu_memory_mib = 3\n").unwrap().clients.limits;
        assert_eq!(limits, Limits { device_memory: Some(3 << 20), pinned_memory: None });
        assert_eq!(parse("").unwrap().socket.connections, 256);
        assert!(!parse("").unwrap().clients.userfaultfd);
        assert!(parse("[limits]\nuserfaultfd = true").unwrap().clients.userfaultfd);
        assert_eq!(parse("[limits]\nconnections = 7").unwrap().socket.connections, 7);
        assert!(parse("[limits]\nconnections = 0").unwrap_err().contains("limits.connections"));
    }

    #[test]
    fn workers_are_charged_to_the_daemon_unless_it_is_said_otherwise() {
        let charge = |text: &str| parse(&format!("[containers]\n{text}")).map(|it| it.clients.charge);
        assert_eq!((charge(""), charge("charge = \"no\"")), (Ok(Charge::No), Ok(Charge::No)));
        assert_eq!(charge("charge = \"parent\""), Ok(Charge::Parent));
        for odd in ["", "container", "Parent"] {
            let error = charge(&format!("charge = {odd:?}")).unwrap_err();
            assert!(error.contains("containers.charge") && error.contains("\"parent\""), "{error}");
        }
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
    fn a_gpu_is_shown_as_several_where_that_is_asked_for() {
        let parts = |text: &str| parse(&format!("[gpu]\n{text}")).map(|it| it.gpu.parts);
        assert_eq!((parts(""), parts("virtual = 1")), (Ok(None), Ok(None)));
        assert_eq!((parts("virtual = 2"), parts("virtual = 15")), (Ok(Some(2)), Ok(Some(15))));
        for odd in [0, 16, 1000] {
            let error = parts(&format!("virtual = {odd}")).unwrap_err();
            assert!(error.contains("gpu.virtual") && error.contains("between 1 and 15"), "{error}");
        }
        for odd in ["-1", "\"2\"", "1.5"] {
            assert!(parts(&format!("virtual = {odd}")).unwrap_err().contains("virtual"), "{odd}");
        }
        assert!(parts("virtual = 1\noversubscribe = true").is_ok());
        assert!(parts("virtual = 2\noversubscribe = true").unwrap_err().contains("gpu.oversubscribe"));
    }

    #[test]
    fn the_driver_checkpoints_native_processes_unless_it_is_said_otherwise() {
        let native = parse("").unwrap().native;
        assert_eq!((native.enabled, native.devices.as_str()), (true, "/dev/nvidia"));
        let native = parse("[native]\nenabled = false\ndevices = \"/x\"").unwrap().native;
        assert_eq!((native.enabled, native.devices.as_str()), (false, "/x"));
        assert!(parse("[native]\ndevices = \"\"").unwrap_err().contains("native.devices"));
    }

    #[test]
    fn accesses_are_reported_only_where_that_is_asked_for() {
        assert_eq!(parse("").unwrap().workers.report_access, None);
        assert_eq!(
            parse("[access]\nreport = true").unwrap().workers.report_access,
            Some(Reporting::Writes { limit: 1 << 30 })
        );
        assert_eq!(
            parse("[access]\nreport = true\nlimit_mib = 2").unwrap().workers.report_access,
            Some(Reporting::Writes { limit: 2 << 20 })
        );
        assert_eq!(
            parse("[access]\nreport = true\nreads = true").unwrap().workers.report_access,
            Some(Reporting::Reads)
        );
        assert_eq!(parse("[access]\nreads = true").unwrap().workers.report_access, None);
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
