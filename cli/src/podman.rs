//! Questions to podman.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, anyhow};

use crate::failure::Failure;

/// The podman program: the one that was named, or the one in PATH.
pub(crate) fn program(named: Option<&Path>) -> PathBuf {
    named.map_or_else(|| "podman".into(), Path::to_owned)
}

/// The first process of a container that runs.
pub(crate) fn pid(program: &Path, name: &str) -> Result<i32, Failure> {
    let mut inspect = Command::new(program);
    inspect.args(["container", "inspect", "--format", "{{.State.Pid}}", name]).stdin(Stdio::null());
    let output = inspect.output().with_context(|| format!("cannot run {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    match said.trim().parse() {
        Ok(pid) if output.status.success() && pid > 0 => Ok(pid),
        Ok(_) if output.status.success() => Err(Failure::refused(anyhow!("container {name} is not running"))),
        _ => {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(Failure::refused(anyhow!("podman knows no container {name}: {said}")))
        }
    }
}
