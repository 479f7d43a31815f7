//! The OCI runtime's own stages: the container's state on stdin.
//!
//! The runtime runs `createRuntime` on the host when the container's first process exists, with its namespaces and cgroup, but
//! before any program of the image runs. An error there ends the container, and the runtime shows the message. `poststop` runs
//! after the container's end.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rekindle_wire::control::{Reply, Request};
use serde::Deserialize;
use serde_json::Value;
use thiserror::Error;

use crate::annotations::{self, AnnotationError};
use crate::daemon::{self, DaemonError};
use crate::host::INTERPOSER;
use crate::image::{Image, ImageError};
use crate::spec;

/// The fields of the runtime's state of a container that the hook uses.
#[derive(Debug, Deserialize)]
struct State {
    id: String,
    #[serde(default)]
    pid: i32,
    bundle: PathBuf,
}

/// An error at one of the runtime's stages.
#[derive(Debug, Error)]
pub(crate) enum StageError {
    #[error("stdin is no state of a container: {0}")]
    State(serde_json::Error),
    #[error("the state has no process: is this hook at the stage createRuntime?")]
    NoProcess,
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is no JSON: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(transparent)]
    Annotation(#[from] AnnotationError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Daemon(#[from] DaemonError),
}

/// Checks the image, and has the daemon grant the container GPUs: those in `gpus`, which CDI devices name, or those that its
/// annotations ask for.
pub(crate) fn create_runtime(state: &[u8], gpus: &[String], lib_dir: &Path, socket: &Path) -> Result<(), StageError> {
    let state: State = serde_json::from_slice(state).map_err(StageError::State)?;
    if state.pid <= 0 {
        return Err(StageError::NoProcess);
    }
    let config = config(&state.bundle)?;
    if let Some(root) = spec::root(&config, &state.bundle) {
        let image = Image::open(&root)?;
        image.check(&lib_dir.join(INTERPOSER))?;
        image.check_search_path(&spec::library_path(&config), &spec::destinations(&config))?;
    }
    let gpus = match gpus {
        [] => requested(&config)?,
        gpus => gpus.to_vec(),
    };
    if gpus.is_empty() {
        return Ok(());
    }
    let limits = annotations::limits(&config)?;
    let (protocol, share) = (annotations::protocol(&config)?, annotations::share(&config)?);
    let request = Request::Grant { container: state.id, pid: state.pid, gpus, limits, protocol, share };
    daemon::ask(socket, &request).map(drop).map_err(StageError::from)
}

/// Tells the daemon that a container has ended. The daemon also notices that by itself, so it need not be running.
pub(crate) fn poststop(state: &[u8], socket: &Path) -> Result<(), StageError> {
    let state: State = serde_json::from_slice(state).map_err(StageError::State)?;
    match daemon::ask(socket, &Request::Revoke { container: state.id }) {
        Ok(Reply::Revoked) | Err(DaemonError::Unreachable { .. }) => Ok(()),
        Ok(_) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The GPUs that annotations ask for: none if CDI devices have granted GPUs, unless the annotations list GPUs too.
fn requested(config: &Value) -> Result<Vec<String>, AnnotationError> {
    let asked = annotations::gpus(config)?.unwrap_or_default();
    let by_device = spec::has_device_hooks(config) && !annotations::lists_gpus(config);
    Ok(if by_device { Vec::new() } else { asked })
}

fn config(bundle: &Path) -> Result<Value, StageError> {
    let path = bundle.join("config.json");
    let text = fs::read(&path).map_err(|source| StageError::Read { path: path.clone(), source })?;
    serde_json::from_slice(&text).map_err(|source| StageError::Json { path, source })
}
