//! The guard of a protection: it starts the job, keeps a supervisor at work, and waits for what has lost its parent.
//!
//! ```text
//!   guard ──┬── the command, started once               what the guard inherits, since it is a child subreaper:
//!           └── supervisor, started again if it ends      restored jobs, and what a killed supervisor has started
//! ```
//!
//! It does so little that it hardly fails. If it is killed nevertheless, its supervisor becomes the guard (`supervisor`). With
//! `rekindle-protect@.service`, systemd starts a second guard, which waits for the first to end.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rekindle_protect::phase;
use rustix::process::{WaitOptions, getpid, set_child_subreaper, setsid, wait};

use super::ended::ending;
use super::folder::{Ended, Folder};
use crate::failure::Failure;

/// A supervisor that ends sooner has done nothing.
const AT_ONCE: Duration = Duration::from_secs(10);
/// The verbs that this program starts itself with.
pub(super) const GUARD: &str = "protect-guard";
pub(super) const SUPERVISOR: &str = "protect-supervisor";
pub(super) const JOB: &str = "protect-job";

/// Starts a guard that outlives this process and its terminal.
pub(super) fn start(folder: &Folder) -> anyhow::Result<()> {
    let log = folder.log()?;
    let mut command = own(GUARD, folder.path())?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().context("cannot start the guard")?;
    Ok(())
}

/// This program, with one of the verbs above.
pub(super) fn own(verb: &str, folder: impl AsRef<OsStr>) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("cannot tell where rekindle is")?);
    command.arg(verb).arg(folder);
    Ok(command)
}

/// Guards until the protection has come to its end.
pub(super) fn guard(path: &Path) -> Result<(), Failure> {
    let folder = Folder::at(path);
    let _ = setsid();
    set_child_subreaper(Some(getpid())).context("cannot become a child subreaper")?;
    let _lock = folder.lock_guard()?;
    let mut in_vain: u32 = 0;
    loop {
        let record = folder.record()?;
        if record.phase.is_final() {
            return Ok(());
        }
        if !record.wishes.command.is_empty() && folder.job().is_none() {
            quiet(own(JOB, path)?, &folder)?;
        }
        let began = Instant::now();
        let supervisor = quiet(own(SUPERVISOR, path)?, &folder)?;
        let status = wait_for(&supervisor, &folder)?;
        in_vain = if began.elapsed() < AT_ONCE && !status.success() { in_vain + 1 } else { 0 };
        if !folder.record()?.phase.is_final() {
            eprintln!("rekindle: the supervisor has ended with {status}; another one is started");
            // The first one that is killed is replaced at once.
            std::thread::sleep(phase::pause(in_vain.min(7).saturating_sub(1)));
        }
    }
}

fn quiet(mut command: Command, folder: &Folder) -> anyhow::Result<Child> {
    command.stdin(Stdio::null()).stdout(folder.log()?).stderr(folder.log()?);
    command.spawn().with_context(|| format!("cannot run {}", command.get_program().display()))
}

/// Waits for the supervisor, and for whatever else ends.
fn wait_for(supervisor: &Child, folder: &Folder) -> anyhow::Result<ExitStatus> {
    let supervisor = supervisor.id().cast_signed();
    loop {
        let (pid, status) = match wait(WaitOptions::empty()) {
            Err(rustix::io::Errno::INTR) | Ok(None) => continue,
            Ok(Some((pid, status))) => (pid.as_raw_nonzero().get(), ExitStatus::from_raw(status.as_raw())),
            Err(error) => return Err(error).context("cannot wait for the supervisor"),
        };
        if pid == supervisor {
            return Ok(status);
        }
        // On a full disk the supervisor finds it out by itself.
        if is_job(folder, pid)
            && let Err(error) = folder.note_end(Ended { pid, ending: ending(status) })
        {
            eprintln!("rekindle: cannot note the end of the job: {error:#}");
        }
    }
}

fn is_job(folder: &Folder, pid: i32) -> bool {
    let recorded = || folder.record().ok().and_then(|it| it.job);
    folder.job().or_else(recorded).is_some_and(|it| it.pid == pid)
}
