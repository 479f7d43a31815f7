//! What must not happen to a job as long as it is protected.

use std::path::Path;

use anyhow::anyhow;

use super::begin::configuration;
use super::folder::Folder;
use crate::failure::Failure;

/// Refuses to end a process here on purpose while it is protected: its supervisor would restore it, and it might run twice.
pub(crate) fn must_not_be_protected(socket: &Path, pid: i32) -> Result<(), Failure> {
    // Whoever cannot ask, or may not look, cannot end processes of the owner of protections either.
    let Ok(configuration) = configuration(socket) else { return Ok(()) };
    let Ok(all) = Folder::all(&configuration.dir) else { return Ok(()) };
    let protects = |it: &Folder| {
        it.record().is_ok_and(|it| {
            let processes = it.tree.iter().chain(&it.job);
            !it.phase.is_final() && processes.into_iter().any(|process| process.pid == pid)
        })
    };
    let Some(folder) = all.iter().find(|it| protects(it)) else { return Ok(()) };
    let name = folder.name();
    Err(Failure::refused(anyhow!(
        "process {pid} is protected as {name}, whose supervisor would restore it here: `rekindle protect --stop {name}` first"
    )))
}
