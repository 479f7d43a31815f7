//! `rekindle cut show`.

use std::path::Path;

use super::manifest::Manifest;
use crate::failure::Failure;
use crate::output;

/// Shows what a cut consists of.
pub(super) fn show(dir: &Path, json: bool) -> Result<(), Failure> {
    let manifest = Manifest::read(dir)?;
    if json {
        return Ok(output::print_json(&manifest)?);
    }
    let mut rows = vec![["HOST", "PID", "PROCESSES", "DIRECTORY"].map(str::to_owned).to_vec()];
    let cells = |it: &super::manifest::Entry| {
        vec![it.host.clone(), it.root.to_string(), it.processes.to_string(), it.dir.display().to_string()]
    };
    rows.extend(manifest.parts.iter().map(cells));
    Ok(output::print(&format!("cut {}\n{}", manifest.cut, output::table(&rows, &[1, 2])))?)
}
