//! Where the process that takes part in a cut can be reached on its host.
//!
//! ```text
//!   /run/rekindle-cuts/CUT-PART/script     CRIU's action script
//!                              /gate       the socket to which that connects
//!                              /settle     the socket for those who settle
//! ```
//!
//! The directory is locked as long as that process lives, and removed with it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};

use super::super::manifest;
use super::gate;
use crate::failure::Failure;
use crate::migrate;

/// The directory of all.
const ALL: &str = "/run/rekindle-cuts";
const SCRIPT: &str = "script";
const GATE: &str = "gate";
const SETTLE: &str = "settle";

/// The place of one part.
#[derive(Debug)]
pub(super) struct Place {
    dir: PathBuf,
    /// Keeps others away.
    _lock: File,
}

impl Place {
    /// Makes it, for CRIU's tree with this root.
    pub(super) fn make(cut: &str, index: usize, root: i32) -> Result<Self, Failure> {
        let dir = path(cut, index)?;
        let made = || -> anyhow::Result<Option<File>> {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(ALL)?;
            // No other one is made meanwhile.
            let all = File::open(ALL)?;
            all.lock()?;
            remove_those_left();
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
            let lock = File::open(&dir)?;
            if lock.try_lock().is_err() {
                return Ok(None);
            }
            let own = std::env::current_exe()?;
            let quoted = |path: &Path| migrate::quoted(&path.to_string_lossy());
            let script = gate::script(&quoted(&own), &quoted(&dir.join(GATE)), root);
            fs::write(dir.join(SCRIPT), script)?;
            fs::set_permissions(dir.join(SCRIPT), fs::Permissions::from_mode(0o700))?;
            Ok(Some(lock))
        };
        let lock = made().with_context(|| format!("cannot make {}", dir.display()))?;
        let lock = lock.ok_or_else(|| {
            Failure::refused(anyhow!(
                "another command restores this part of the cut here, or waits to be settled: `rekindle cut settle` ends that"
            ))
        })?;
        Ok(Self { dir, _lock: lock })
    }

    /// What CRIU executes at each moment.
    pub(super) fn script(&self) -> PathBuf {
        self.dir.join(SCRIPT)
    }

    /// The socket for CRIU's script.
    pub(super) fn listen_for_gates(&self) -> Result<UnixListener, Failure> {
        listen(&self.dir.join(GATE))
    }

    /// The socket for those who settle.
    pub(super) fn listen_for_settlers(&self) -> Result<UnixListener, Failure> {
        listen(&self.dir.join(SETTLE))
    }

    /// From now on CRIU's script fails.
    pub(super) fn closes_gate(&self) {
        let _ = fs::remove_file(self.dir.join(GATE));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Removes the places of processes that were killed.
fn remove_those_left() {
    for entry in fs::read_dir(ALL).into_iter().flatten().flatten() {
        if File::open(entry.path()).is_ok_and(|it| it.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn path(cut: &str, index: usize) -> Result<PathBuf, Failure> {
    if !manifest::is_name(cut) {
        return Err(Failure::refused(anyhow!("{cut:?} is no name of a cut")));
    }
    Ok(Path::new(ALL).join(format!("{cut}-{index}")))
}

/// Whether a process takes part.
pub(super) fn is_in_use(cut: &str, index: usize) -> bool {
    // Without the lock nobody has it, or can find it.
    path(cut, index)
        .and_then(|it| File::open(it).map_err(|it| anyhow!(it).into()))
        .is_ok_and(|it| it.try_lock().is_err())
}

/// Connects to the process that takes part, if there is one.
pub(super) fn settle(cut: &str, index: usize) -> Result<Option<UnixStream>, Failure> {
    let path = path(cut, index)?.join(SETTLE);
    match UnixStream::connect(&path) {
        Ok(stream) => Ok(Some(stream)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => Ok(None),
        Err(error) => Err(anyhow!(error).context(format!("cannot reach {}", path.display())).into()),
    }
}

fn listen(path: &Path) -> Result<UnixListener, Failure> {
    let listened = || -> io::Result<UnixListener> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        UnixListener::bind(path)
    };
    Ok(listened().with_context(|| format!("cannot listen at {}", path.display()))?)
}
