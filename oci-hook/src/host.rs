//! The parts of this host that a container needs: the interposer, and a daemon that listens.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use clap::Args;
use thiserror::Error;

pub(crate) use rekindle_wire::control::DEFAULT_SOCKET;

/// The variable that says where the daemon's socket is.
pub(crate) const SOCKET_VARIABLE: &str = "REKINDLE_SOCKET";

/// The interposer's file, which must be in its folder.
pub(crate) use rekindle_builds::INTERPOSER;

/// The name by which programs load NVML.
pub(crate) use rekindle_builds::NVML;

/// The names by which programs load the libraries. All but the first are optional.
const LIBRARIES: [&str; 4] = [INTERPOSER, "libcuda.so", NVML, "libnvidia-ml.so"];

/// The libraries in the interposer's folder.
pub(crate) fn libraries(lib_dir: &Path) -> Vec<String> {
    LIBRARIES.into_iter().filter(|name| lib_dir.join(name).exists()).map(str::to_owned).collect()
}

/// Where the parts are, as options say it.
#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    /// The directory of the interposer [default: ../lib/rekindle, relative to this program]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) lib_dir: Option<PathBuf>,
    /// The daemon's socket
    #[arg(long, global = true, env = SOCKET_VARIABLE, value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
}

impl HostArgs {
    /// Those of a program that has no options of its own.
    pub(crate) fn from_environment() -> Self {
        Self {
            lib_dir: None,
            socket: env::var_os(SOCKET_VARIABLE).map_or_else(|| DEFAULT_SOCKET.into(), PathBuf::from),
        }
    }
}

/// The parts that a container gets.
#[derive(Clone, Debug)]
pub(crate) struct Provided {
    /// The folder with the interposer: that of the build which new containers are given.
    pub(crate) lib_dir: PathBuf,
    /// The folder with the daemon's socket. Not the socket itself, since a restarted daemon creates a new one.
    pub(crate) socket_dir: PathBuf,
    /// The socket's name in it.
    pub(crate) socket_name: String,
}

/// A part that this host lacks.
#[derive(Debug, Error)]
pub(crate) enum HostError {
    #[error("cannot tell where this program is: {0}")]
    Program(io::Error),
    #[error("no interposer at {}: {source} (--lib-dir says where it is)", path.display())]
    Interposer { path: PathBuf, source: io::Error },
    #[error("{}", unreachable(path, source))]
    Daemon { path: PathBuf, source: io::Error },
    #[error("the daemon's socket {} has a name that no environment variable can hold", .0.display())]
    Name(PathBuf),
}

/// The message for a failed connection to the daemon, which says what to do.
pub(crate) fn unreachable(path: &Path, error: &io::Error) -> String {
    let path = path.display();
    if error.kind() == io::ErrorKind::PermissionDenied {
        let advice = "run as root, or set socket_group or socket_mode in its configuration";
        return format!("this user may not connect to the daemon at {path}: {error} ({advice})");
    }
    format!("no daemon at {path}: {error} (start rekindled; --socket says where it listens)")
}

/// This program's own file, links resolved.
pub(crate) fn this_program() -> Result<PathBuf, HostError> {
    env::current_exe().and_then(|path| path.canonicalize()).map_err(HostError::Program)
}

/// The folder with the interposer: `given`, or the one beside this program. It is an error if the interposer is not there.
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

/// The folder of the interposer to which the link in a folder leads. Containers are given that: an upgrade changes the link.
fn build_dir(lib_dir: PathBuf) -> PathBuf {
    let interposer = lib_dir.join(INTERPOSER).canonicalize();
    let is_named_so = |it: &PathBuf| it.file_name() == Some(OsStr::new(INTERPOSER));
    let build = interposer.ok().filter(is_named_so).and_then(|it| it.parent().map(Path::to_owned));
    build.unwrap_or(lib_dir)
}

/// Finds all parts.
pub(crate) fn find(given: Option<&Path>, socket: &Path) -> Result<Provided, HostError> {
    let lib_dir = build_dir(lib_dir(given)?);
    let unreachable = |source| HostError::Daemon { path: socket.into(), source };
    // Connecting shows that a daemon listens: a dead daemon may have left the file.
    UnixStream::connect(socket).map_err(unreachable)?;
    let socket = socket.canonicalize().map_err(unreachable)?;
    let (Some(dir), Some(name)) = (socket.parent(), socket.file_name().and_then(|name| name.to_str())) else {
        return Err(HostError::Name(socket));
    };
    Ok(Provided { lib_dir, socket_dir: dir.into(), socket_name: name.into() })
}
