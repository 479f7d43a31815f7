//! Paths of the installed tree and of the programs under test, which `tests/e2e/run` sets. A test that asks for any of
//! them waits first until it may run ([`schedule`]).

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use crate::{Result, schedule};

/// The built tree, laid out as it is distributed.
const STAGE: &str = "REKINDLE_STAGE";
/// The folder of the programs in `tests/apps`.
const APPS: &str = "REKINDLE_APPS";
/// The repository, which need not lie where these tests were compiled.
const SOURCE: &str = "REKINDLE_SOURCE";
/// The folder of container images with other C libraries.
const IMAGES: &str = "REKINDLE_IMAGES";
/// NCCL's library.
const NCCL: &str = "REKINDLE_NCCL";

/// An executable of Rekindle: `rekindled`, `rekindle`, `rekindle-oci-hook`.
pub fn program(name: &str) -> Result<PathBuf> {
    existing(folder(STAGE)?.join("bin").join(name))
}

/// The folder of the interposer, for the loader's search path.
pub fn interposer() -> Result<PathBuf> {
    library("lib/rekindle")
}

/// The folder of the software GPU's driver library. With that folder in the loader's search path, programs run on the
/// software GPU directly.
pub fn software_gpu() -> Result<PathBuf> {
    library("lib/rekindle/simgpu")
}

/// A program of `tests/apps`.
pub fn app(name: &str) -> Result<PathBuf> {
    existing(apps()?.join(name))
}

/// The folder of the programs of `tests/apps`.
pub fn apps() -> Result<PathBuf> {
    folder(APPS)
}

/// The root directory of a container image with another C library (`scripts/lib/images`); `None` if it does not exist.
pub fn image(name: &str) -> Result<Option<PathBuf>> {
    Ok(Some(folder(IMAGES)?.join(name)).filter(|root| root.is_dir()))
}

/// NCCL's library (`scripts/lib/nccl`).
pub fn nccl() -> Result<PathBuf> {
    existing(folder(NCCL)?)
}

/// Copies a program to a path where any user can execute it. A child process writes the file: a descriptor that is open
/// for writing in this process may be inherited by a child of another test, which would hold it for a moment longer and
/// make the file impossible to execute.
pub fn install(program: &Path, path: &Path) -> Result {
    let status = Command::new("install").args(["-m", "755"]).arg(program).arg(path).status()?;
    ensure!(status.success(), "cannot write {}", path.display());
    Ok(())
}

/// Writes a shell script, by a child process as [`install`] does.
pub fn write_script(path: &Path, text: &str) -> Result {
    let writes = r#"printf %s "$1" >"$0" && chmod 755 "$0""#;
    let status = Command::new("sh").args(["-c", writes]).arg(path).arg(text).status()?;
    ensure!(status.success(), "cannot write {}", path.display());
    Ok(())
}

/// The command `criu`, after a check that it loads the plugin of the stage and no other.
pub fn criu() -> Result<Command> {
    const CONFIGURATION: &str = "/etc/criu/default.conf";
    let plugin = existing(folder(STAGE)?.join("lib/rekindle/criu/rekindle.so"))?;
    let folder = plugin.parent().unwrap_or(Path::new("/")).display().to_string();
    // CRIU's configuration takes no path with spaces: `scripts/lib/enter` mounts such a folder elsewhere.
    let folder = if folder.contains(char::is_whitespace) { "/opt/criu-plugins" } else { &folder };
    let wanted = format!("libdir {folder}");
    let configured = std::fs::read_to_string(CONFIGURATION).unwrap_or_default();
    if !configured.lines().any(|line| line == wanted) {
        bail!("{CONFIGURATION} does not say \"{wanted}\": {}", advice());
    }
    Ok(Command::new("criu"))
}

/// The repository's folder, whose scripts know how to call podman.
pub fn repository() -> Result<PathBuf> {
    folder(SOURCE)
}

/// An executable of this package, which cargo places in the parent folder of the test executables.
pub fn helper(name: &str) -> Result<PathBuf> {
    let test = env::current_exe()?;
    let folder = test.parent().and_then(Path::parent).with_context(|| format!("{} is in no build", test.display()))?;
    existing(folder.join(name))
}

/// Removes Rekindle's, CUDA's and the loader's variables from a command's environment: a developer's exported variables
/// must not affect a test.
pub fn clean_environment(command: &mut Command) {
    let kept = |name: &OsString| {
        let name = name.to_string_lossy();
        !["REKINDLE_", "SIMGPU_", "CUDA_", "LD_"].iter().any(|prefix| name.starts_with(prefix))
    };
    let environment: Vec<_> = env::vars_os().filter(|(name, _)| kept(name)).collect();
    command.env_clear().envs(environment);
}

fn library(folder_in_stage: &str) -> Result<PathBuf> {
    let dir = folder(STAGE)?.join(folder_in_stage);
    existing(dir.join("libcuda.so.1"))?;
    Ok(dir)
}

fn folder(variable: &str) -> Result<PathBuf> {
    schedule::enter();
    let value = env::var_os(variable).with_context(|| format!("{variable} is not set: {}", advice()))?;
    // Resolved, since podman and CRIU compare paths as text.
    Ok(existing(value.into())?.canonicalize()?)
}

fn existing(path: PathBuf) -> Result<PathBuf> {
    path.metadata().with_context(|| format!("{} is missing: {}", path.display(), advice()))?;
    Ok(path)
}

fn advice() -> &'static str {
    "run these tests with tests/e2e/run, which builds and stages what they need"
}
