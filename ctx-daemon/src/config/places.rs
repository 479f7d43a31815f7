//! Where things lie unless the configuration says it.

use std::path::{Path, PathBuf};

use super::error::ConfigError;

/// Where records and images of protected jobs outlive a reboot.
const PERSISTENT: &str = "/var/lib/rekindle/protect";

/// The folder of Rekindle's libraries. Its default is where they are installed with this program, links resolved.
pub(super) fn library_dir(given: Option<PathBuf>) -> Result<PathBuf, ConfigError> {
    if let Some(dir) = given {
        // Links resolved, since processes map the files at their own paths.
        return dir.canonicalize().or_else(|_| std::path::absolute(dir)).map_err(ConfigError::Here);
    }
    let program = std::env::current_exe().and_then(|it| it.canonicalize()).map_err(ConfigError::Here)?;
    let prefix = program.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let dir = prefix.join("lib/rekindle");
    Ok(dir.canonicalize().unwrap_or(dir))
}

/// The state directory. Its default is beside the socket's folder, since containers see the socket's folder:
/// `/run/rekindle-state`.
pub(super) fn state_dir(given: Option<PathBuf>, socket: &Path) -> Result<PathBuf, ConfigError> {
    if let Some(dir) = given {
        return std::path::absolute(dir).map_err(ConfigError::Here);
    }
    let dir = beside_folder(socket, "-state");
    // Daemons with the same folder have separate state directories.
    Ok(if is_default(socket) { dir } else { dir.join(socket.file_name().unwrap_or_default()) })
}

/// The folder of protected jobs, in the state directory. The default state directory is in `/run`, which is not large and is empty
/// after a reboot: instead of there, the folder is `/var/lib/rekindle/protect`.
pub(super) fn protect_dir(given: Option<PathBuf>, state: &Path, socket: &Path) -> Result<PathBuf, ConfigError> {
    let is_in_run = is_default(socket) && state == beside_folder(socket, "-state");
    let dir = given.unwrap_or_else(|| if is_in_run { PERSISTENT.into() } else { state.join("protect") });
    std::path::absolute(dir).map_err(ConfigError::Here)
}

/// The default of the metrics' socket, which is beside the control socket's folder as well, in a folder that everybody may
/// enter: `/run/rekindle-metrics/metrics.sock`.
pub(super) fn metrics_socket(control: &Path) -> PathBuf {
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
