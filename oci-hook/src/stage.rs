//! The OCI runtime's own stages: the container's state on stdin.
//!
//! `createRuntime` runs on the host when the container's first process exists, in its namespaces and its cgroup, and
//! nothing of the image has run: a failure here ends it, and the runtime shows why. `poststop` runs when it is gone.

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

/// What the runtime says of a container, of which there is more.
#[derive(Debug, Deserialize)]
struct State {
    id: String,
    #[serde(default)]
    pid: i32,
    bundle: PathBuf,
}

/// Why a container does not get what it asks for.
#[derive(Debug, Error)]
pub(crate) enum StageError {
    #[error("stdin is no state of a container: {0}")]
    State(serde_json::Error),
    #[error("the state says of no process: is this hook at the stage createRuntime?")]
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

/// Checks the image, and has the daemon let the container use GPUs: those of `gpus`, as CDI's devices say them, or those
/// that its annotations ask for.
pub(crate) fn create_runtime(state: &[u8], gpus: &[String], lib_dir: &Path, socket: &Path) -> Result<(), StageError> {
    let state: State = serde_json::from_slice(state).map_err(StageError::State)?;
    if state.pid <= 0 {
        return Err(StageError::NoProcess);
    }
    let config = config(&state.bundle)?;
    if let Some(root) = spec::root(&config, &state.bundle) {
        let image = Image::open(&root)?;
        image.check(&lib_dir.join(INTERPOSER))?;
        image.finds_ours(&spec::library_path(&config), &spec::destinations(&config))?;
    }
    let gpus = match gpus {
        [] => asked(&config)?,
        gpus => gpus.to_vec(),
    };
    if gpus.is_empty() {
        return Ok(());
    }
    let limits = annotations::limits(&config)?;
    let protocol = annotations::protocol(&config)?;
    let request = Request::Grant { container: state.id, pid: state.pid, gpus, limits, protocol };
    daemon::ask(socket, &request).map(drop).map_err(StageError::from)
}

/// Says that a container is gone. The daemon notices that by itself as well: without one there is nothing to say.
pub(crate) fn poststop(state: &[u8], socket: &Path) -> Result<(), StageError> {
    let state: State = serde_json::from_slice(state).map_err(StageError::State)?;
    match daemon::ask(socket, &Request::Revoke { container: state.id }) {
        Ok(Reply::Revoked) | Err(DaemonError::Away { .. }) => Ok(()),
        Ok(_) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// By annotation. One that has devices of CDI's too has those, unless it lists more.
fn asked(config: &Value) -> Result<Vec<String>, AnnotationError> {
    let asked = annotations::gpus(config)?.unwrap_or_default();
    let by_device = spec::has_device_hooks(config) && !annotations::lists_gpus(config);
    Ok(if by_device { Vec::new() } else { asked })
}

fn config(bundle: &Path) -> Result<Value, StageError> {
    let path = bundle.join("config.json");
    let text = fs::read(&path).map_err(|source| StageError::Read { path: path.clone(), source })?;
    serde_json::from_slice(&text).map_err(|source| StageError::Json { path, source })
}
