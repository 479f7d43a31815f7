//! What this host has to give to a container: the interposer, and a daemon that listens.

use std::env;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub(crate) use rekindle_wire::control::DEFAULT_SOCKET;

/// What makes a folder the interposer's.
pub(crate) const INTERPOSER: &str = "libcuda.so.1";

/// What programs look for NVML by.
pub(crate) const NVML: &str = "libnvidia-ml.so.1";

/// Libraries that programs look for by these names; of those after the first it is what is there that is given.
const LIBRARIES: [&str; 4] = [INTERPOSER, "libcuda.so", NVML, "libnvidia-ml.so"];

/// The libraries in the interposer's folder.
pub(crate) fn libraries(lib_dir: &Path) -> Vec<String> {
    LIBRARIES.into_iter().filter(|name| lib_dir.join(name).exists()).map(str::to_owned).collect()
}

/// What a container is given.
#[derive(Debug)]
pub(crate) struct Provided {
    /// The folder with the interposer.
    pub(crate) lib_dir: PathBuf,
    /// The folder with the daemon's socket. Not the socket itself: a daemon that starts anew makes a new one.
    pub(crate) socket_dir: PathBuf,
    /// The socket's name in it.
    pub(crate) socket_name: String,
}

/// What this host lacks.
#[derive(Debug, Error)]
pub(crate) enum HostError {
    #[error("cannot tell where this program is: {0}")]
    Program(io::Error),
    #[error("no interposer at {}: {source} (--lib-dir says where it is)", path.display())]
    Interposer { path: PathBuf, source: io::Error },
    #[error("{}", away(path, source))]
    Daemon { path: PathBuf, source: io::Error },
    #[error("the daemon's socket {} has a name that no environment variable can hold", .0.display())]
    Name(PathBuf),
}

/// That a daemon cannot be connected to, and what to do.
pub(crate) fn away(path: &Path, error: &io::Error) -> String {
    let path = path.display();
    if error.kind() == io::ErrorKind::PermissionDenied {
        let advice = "be root, or have socket_group or socket_mode in its configuration let this user in";
        return format!("this user may not connect to the daemon at {path}: {error} ({advice})");
    }
    format!("no daemon at {path}: {error} (start rekindled; --socket says where it listens)")
}

/// This program's own file, links resolved.
pub(crate) fn this_program() -> Result<PathBuf, HostError> {
    env::current_exe().and_then(|path| path.canonicalize()).map_err(HostError::Program)
}

/// The folder with the interposer, which is there: the one that is given, or the one beside this program.
pub(crate) fn lib_dir(given: Option<&Path>) -> Result<PathBuf, HostError> {
    let dir = match given {
        Some(dir) => dir.to_path_buf(),
        None => this_program()?.parent().unwrap_or(Path::new("/")).join("../lib/rekindle"),
    };
    let interposer = dir.join(INTERPOSER);
    // Resolved, since podman and CRIU compare paths as text.
    let found = interposer.metadata().and_then(|_| dir.canonicalize());
    found.map_err(|source| HostError::Interposer { path: interposer, source })
}

/// Looks for all of it.
pub(crate) fn find(given: Option<&Path>, socket: &Path) -> Result<Provided, HostError> {
    let lib_dir = lib_dir(given)?;
    let away = |source| HostError::Daemon { path: socket.into(), source };
    // A connection without a word; the file alone may be a dead daemon's.
    UnixStream::connect(socket).map_err(away)?;
    let socket = socket.canonicalize().map_err(away)?;
    let (Some(dir), Some(name)) = (socket.parent(), socket.file_name().and_then(|name| name.to_str())) else {
        return Err(HostError::Name(socket));
    };
    Ok(Provided { lib_dir, socket_dir: dir.into(), socket_name: name.into() })
}
