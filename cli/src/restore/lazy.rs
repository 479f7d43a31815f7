//! `rekindle restore --lazy`: CRIU brings the processes' own pages when they are touched, and all others meanwhile. `lazy_pages` says
//! what guards the processes.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, anyhow};
use rekindle_wire::lazy_pages::VARIABLE;

use crate::lazy_pages::{DONE, KILLED, LOG, READY};

/// A server of pages that waits for CRIU. If this is dropped before the guard has heard of processes, the server ends, and no
/// process can run that needs it.
pub(super) struct LazyPages {
    guard: Child,
    says: BufReader<ChildStdout>,
    /// The guard's folder, with the server's socket.
    folder: PathBuf,
}

impl LazyPages {
    /// Starts the guard and its server, and waits until CRIU can begin.
    pub(super) fn start(criu: &Path, dir: &Path) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot tell where rekindle is")?;
        let _ = std::fs::remove_file(dir.join(LOG));
        let mut command = Command::new(&program);
        command.args(["lazy-pages", "--criu"]).arg(criu).arg(dir).current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut guard = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
        let output = guard.stdout.take().context("the guard has no output")?;
        let mut lazy = Self { guard, says: BufReader::new(output), folder: PathBuf::new() };
        let said = lazy.hear()?;
        match said.strip_prefix(READY) {
            Some(folder) => lazy.folder = folder.into(),
            None => return Err(anyhow!("cannot start criu lazy-pages: {said}")),
        }
        Ok(lazy)
    }

    /// Tells `criu restore` where the server is, and its plugin where the guard is. Relative paths among CRIU's options are in the
    /// guard's folder then.
    pub(super) fn tell(&self, restore: &mut Command) {
        restore.arg("--lazy-pages").arg("--work-dir").arg(&self.folder).env(VARIABLE, &self.folder);
    }

    /// Waits until the processes have all their pages, or have ended.
    pub(super) fn wait(&mut self) -> anyhow::Result<()> {
        let said = self.hear()?;
        if said == DONE { Ok(()) } else { Err(anyhow!("{}", said.strip_prefix(KILLED).unwrap_or(&said).to_owned())) }
    }

    /// Why the processes were killed, if they were, after a CRIU that has failed: it knows only that they are dead.
    pub(super) fn killed_because(mut self) -> Option<String> {
        drop(self.guard.stdin.take());
        let said = self.hear().ok()?;
        said.strip_prefix(KILLED).map(str::to_owned)
    }

    /// The next line that the guard says.
    fn hear(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.says.read_line(&mut line).context("cannot hear of criu lazy-pages")?;
        if line.pop() != Some('\n') {
            let ended = self.guard.wait().map_or_else(|error| error.to_string(), |it| it.to_string());
            return Err(anyhow!("the guard of criu lazy-pages has ended ({ended})"));
        }
        Ok(line)
    }
}
