//! The guard as whoever restores has it: CRIU brings the processes' own pages when they are touched, and all others meanwhile.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use anyhow::{Context, anyhow};
use rekindle_wire::lazy_pages::{GUARDED, VARIABLE};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{DONE, KILLED, LOG, Processes, READY};

/// In the guard's folder, where CRIU writes the root of the restored tree.
const PID_FILE: &str = "pid";

/// A server of pages that waits for CRIU. If this is dropped before the guard has heard of processes, the server ends, and no
/// process can run that needs it.
pub(crate) struct LazyPages {
    guard: Child,
    says: BufReader<ChildStdout>,
    /// The guard's folder, with the server's socket.
    folder: PathBuf,
}

impl LazyPages {
    /// Starts the guard and its server, and waits until CRIU can begin. The server reads the image in `served`, if that is another than the one
    /// in `dir` that is restored. The guard also says in the directory of a migration, if there is one, how it has ended.
    pub(crate) fn start(
        criu: &Path,
        dir: &Path,
        served: Option<&Path>,
        migration: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot tell where rekindle is")?;
        let criu = std::path::absolute(criu).context("cannot tell the current directory")?;
        let _ = std::fs::remove_file(dir.join(LOG));
        let mut command = Command::new(&program);
        command.args(["lazy-pages", "--criu"]).arg(criu).arg(dir).current_dir("/");
        for (option, value) in [("--served", served), ("--migration", migration)] {
            value.map(|value| command.arg(option).arg(value));
        }
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

    /// The name by which the guard is known.
    pub(crate) fn guard(&self) -> String {
        super::guard::name(&self.folder)
    }

    /// Tells `criu restore` where the server is, and its plugin where the guard is. Relative paths among CRIU's options are in the
    /// guard's folder then.
    pub(crate) fn tell(&self, restore: &mut Command) {
        restore.arg("--lazy-pages").arg("--work-dir").arg(&self.folder).env(VARIABLE, &self.folder);
        restore.arg("--pidfile").arg(self.folder.join(PID_FILE));
    }

    /// Called when the processes run: makes sure that the guard knows them. CRIU's plugin has told it, unless CRIU has not loaded the
    /// plugin. Then the processes are killed.
    pub(crate) fn must_be_guarded(&mut self) -> anyhow::Result<()> {
        // The plugin goes on when the guard has said so.
        let said = if self.has_said() { self.hear()? } else { "CRIU has not loaded Rekindle's plugin".to_owned() };
        if said == GUARDED {
            return Ok(());
        }
        let root = std::fs::read_to_string(self.folder.join(PID_FILE)).ok().and_then(|it| it.trim().parse().ok());
        let killed = root.and_then(|root| Some(Processes::of_tree(root).ok()?.kill()));
        Err(anyhow!("the processes ran without a guard and are killed ({}): {said}", killed.unwrap_or_default()))
    }

    /// Waits until the processes have all their pages, or have ended.
    pub(crate) fn wait(&mut self) -> anyhow::Result<()> {
        let said = self.hear()?;
        if said == DONE { Ok(()) } else { Err(anyhow!("{}", said.strip_prefix(KILLED).unwrap_or(&said).to_owned())) }
    }

    /// Why a CRIU has failed, if that is the server's fault: CRIU knows only that its processes are dead, or that the guard's folder is gone.
    pub(crate) fn failed_because(mut self) -> Option<String> {
        // What the guard says from here on of a server that has brought nothing yet is because of this.
        let was_first = self.has_said();
        drop(self.guard.stdin.take());
        let mut said = self.hear().ok()?;
        if said == GUARDED {
            said = self.hear().ok()?;
        }
        match said.strip_prefix(KILLED) {
            Some(why) => Some(why.to_owned()),
            None => Some(said).filter(|said| was_first && said != DONE),
        }
    }

    /// Waits until the guard and its server have ended. The processes have ended, or there are none.
    pub(crate) fn end(mut self) {
        drop(self.guard.stdin.take());
        let _ = self.guard.wait();
    }

    /// Whether the guard has said something that was not heard.
    fn has_said(&self) -> bool {
        let now = poll(&mut [PollFd::new(self.says.get_ref(), PollFlags::IN)], Some(&Timespec::default()));
        !self.says.buffer().is_empty() || now.is_ok_and(|ready| ready > 0)
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
