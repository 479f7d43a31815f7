//! The files that a worker may open (landlock). It may read the driver's libraries and some settings of the machine. It may
//! write only the driver's devices and its own threads' names. Files that arrive as descriptors (an image's files, a client's
//! memory) are open already.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use super::error::SandboxError;

/// The requested version; an older kernel applies what it supports. Later versions would also keep workers from sockets in the
/// file system, and so from a daemon that replaces their own.
const VERSION: ABI = ABI::V7;

/// Where distributions keep libraries, and where the loader finds further paths.
const LIBRARIES: &[&str] = &["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache"];
/// The driver's configuration, and the time zone of its log.
const SETTINGS: &[&str] = &["/etc/nvidia", "/usr/share/nvidia", "/etc/localtime"];
/// Information that the driver reads about the kernel and the machine.
const MACHINE: &[&str] = &[
    "/proc/self",
    "/proc/driver",
    "/proc/sys",
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/filesystems",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/stat",
    "/proc/version",
    "/sys/bus/pci",
    "/sys/class",
    "/sys/devices",
    "/sys/module",
    "/dev/random",
    "/dev/urandom",
    "/dev/zero",
];
/// The driver writes its threads' names; otherwise `cuInit` fails.
const THREADS: &str = "/proc/self/task";
const DEVICES: &str = "/dev";
/// The prefix of the names of the driver's devices; some of them are directories.
const DEVICE_NAMES: &str = "nvidia";

/// Restricts this thread and the threads that it starts. `driver` is the driver's library as the loader found it. `more` are
/// the paths that the configuration adds for reading.
pub(super) fn restrict(driver: &Path, more: &[PathBuf]) -> Result<(), SandboxError> {
    let failed = |error: RulesetError| SandboxError { step: "landlock", source: std::io::Error::other(error) };
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(VERSION))
        .and_then(|it| it.handle_access(AccessNet::from_all(VERSION)))
        .and_then(|it| it.scope(Scope::from_all(VERSION)))
        .and_then(|it| it.create())
        .map_err(failed)?;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    for path in LIBRARIES.iter().chain(SETTINGS).chain(MACHINE).map(Path::new) {
        rules = allow(rules, path, read).map_err(failed)?;
    }
    for folder in folders_of(driver).iter().chain(more) {
        rules = allow(rules, folder, read).map_err(failed)?;
    }
    let names = read | AccessFs::WriteFile | AccessFs::Truncate;
    rules = allow(rules, Path::new(THREADS), names).map_err(failed)?;
    let write = read | AccessFs::WriteFile | AccessFs::IoctlDev;
    for device in devices() {
        rules = allow(rules, &device, write).map_err(failed)?;
    }
    rules = allow(rules, Path::new("/dev/null"), AccessFs::ReadFile | AccessFs::WriteFile).map_err(failed)?;
    match rules.restrict_self().map_err(failed)?.ruleset {
        RulesetStatus::NotEnforced => {
            Err(SandboxError { step: "landlock", source: std::io::Error::other("this kernel does not enforce it") })
        }
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(()),
    }
}

/// Adds a rule for the files at or below a path; a missing path needs no rule.
fn allow(rules: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> Result<RulesetCreated, RulesetError> {
    let Ok(at) = PathFd::new(path) else { return Ok(rules) };
    let access = if path.is_dir() { access } else { access & AccessFs::from_file(VERSION) };
    let rules = rules.add_rule(PathBeneath::new(&at, access));
    // Open as long as the worker lives: a rule applies to an inode, and the kernel may replace /proc's inodes when nobody uses
    // them.
    std::mem::forget(at);
    rules
}

/// The directories of the driver's library, by its name and with links resolved: its other libraries lie beside it.
fn folders_of(driver: &Path) -> Vec<PathBuf> {
    let folder = |path: &Path| path.parent().filter(|it| it.is_absolute()).map(Path::to_owned);
    let real = std::fs::canonicalize(driver).ok();
    folder(driver).into_iter().chain(real.as_deref().and_then(folder)).collect()
}

/// The driver's devices. They exist before a worker starts: a worker cannot create them.
fn devices() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(DEVICES).into_iter().flatten().flatten();
    let driver = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with(DEVICE_NAMES);
    entries.filter(|it| driver(&it.file_name())).map(|it| it.path()).collect()
}
