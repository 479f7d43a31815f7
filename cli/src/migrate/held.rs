//! Processes at the host that they go to, which are complete, and wait.
//!
//! CRIU restores them, or podman, which runs CRIU. In both cases the daemon holds them before they run (`HoldRestore`). It knows them by
//! CRIU's ancestry, to which this process belongs. podman's conmon, which runs CRIU, leaves podman, so this process adopts it
//! (`PR_SET_CHILD_SUBREAPER`).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, anyhow};
use rekindle_images::Image;
use rekindle_wire::control::{ALLOW_VARIABLE, Allowances, FailureKind, HELD_FILE, Reply, Request, RestoreInfo};

use super::imported::Imported;
use super::place::Place;
use super::stream;
use super::talk::{MEMORY, Restore};
use crate::cpu_image::{self, PARENT, make_served};
use crate::daemon::{self, Session};
use crate::engine::Engine;
use crate::failure::Failure;
use crate::lazy_pages::{LazyPages, moved};
use crate::{criu, span};

/// CRIU's log, in the last image's directory, and what podman says, among the migration's files.
const LOG: &str = "restore.log";
const SAID: &str = "podman.log";
/// The image that CRIU's server of pages reads, among the migration's files.
const SERVED: &str = "served";
/// The phase in which complete processes wait.
const HELD: &str = "held";
/// The pause between two looks at the progress of the restore.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How often to look whether the daemon has noticed why CRIU has ended.
const POLLS: u32 = 500;

/// This host: its daemon and its podman.
#[derive(Clone, Debug)]
pub(super) struct Host {
    pub(super) socket: PathBuf,
    pub(super) podman: Engine,
}

/// Which restore of the processes it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    First,
    /// An earlier one may have left something. The processes have not run.
    Next,
    /// The same, and they may have run, and have ended.
    Again,
}

/// Processes that are complete, and wait.
pub(super) struct Held {
    /// CRIU, or podman.
    restorer: Child,
    /// The daemon kills the processes when this ends before they may run.
    session: Session,
    /// The container, if it is one, and its place.
    imported: Option<Imported>,
    place: Place,
    /// The server of their pages, if they run before they have all of them.
    lazy: Option<LazyPages>,
}

impl Held {
    /// Has the processes restored, and waits until they are complete.
    pub(super) fn restore(dir: &Path, restore: &Restore, host: &Host, attempt: Attempt) -> Result<Self, Failure> {
        // Whatever becomes of this process, no daemon restores the image unless somebody holds the processes.
        let mark = last(dir, restore)?.join(HELD_FILE);
        write_anew(&mark, name(dir).as_bytes()).with_context(|| format!("cannot write {}", mark.display()))?;
        let request =
            Request::HoldRestore { migration: name(dir), again: attempt == Attempt::Again, span: span::begin() };
        let (session, reply) = Session::open(&host.socket, &request)?;
        if reply != Reply::Awaited {
            return Err(daemon::unexpected_answer().into());
        }
        let imported = restore.container.as_deref().map(|id| Imported::new(&host.podman, id));
        if let Some(imported) = imported.as_ref().filter(|_| attempt != Attempt::First) {
            imported.remove(&Place::of(&name(dir)), attempt == Attempt::Again)?;
        }
        let (mut command, lazy) = match &imported {
            None => by_criu(dir, restore)?,
            Some(imported) => (by_podman(imported, dir, restore)?, None),
        };
        let program = command.get_program().to_string_lossy().into_owned();
        // The processes have their own output, and this process's is the connection.
        command.env("REKINDLE_SOCKET", &host.socket).stdin(Stdio::null()).stdout(Stdio::null());
        let restorer = command.spawn().with_context(|| format!("cannot run {program}"))?;
        let mut held = Self { restorer, session, imported, place: Place::of(&name(dir)), lazy };
        loop {
            if progress(&held.session).is_some_and(|it| it.phase == HELD) {
                return Ok(held);
            }
            if let Some(status) = held.restorer.try_wait().with_context(|| format!("cannot wait for {program}"))? {
                let killed = held.lazy.take().and_then(LazyPages::failed_because);
                let failure = match killed {
                    Some(why) => anyhow!("the processes cannot be restored: {why}").into(),
                    None => failure_of(dir, restore, &held, &format!("{program} ended with {status}")),
                };
                return Err(match held.abandon() {
                    Ok(()) => failure,
                    Err(left) => failure.but(left.to_string()),
                });
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Lets the processes run. After an error they do not, unless the daemon knows that they have.
    pub(super) fn own(mut self) -> Result<(), Failure> {
        // podman must live to know of the container.
        if self.imported.is_some() && self.restorer.try_wait().context("cannot wait for podman")?.is_some() {
            self.abandon()?;
            return Err(anyhow!("podman has ended before the container was let run").into());
        }
        let owned = self.session.ask(&Request::Own);
        let status = self.restorer.wait().context("cannot wait for what restores the processes")?;
        owned?;
        if let Some(lazy) = self.lazy.as_mut().filter(|_| status.success()) {
            lazy.must_be_guarded()?;
        }
        match progress(&self.session).and_then(|it| it.failure) {
            Some(failure) => Err(Failure::of_kind(failure.kind, anyhow!("{}", failure.reason))),
            None if status.success() => Ok(()),
            None => Err(ended(status).into()),
        }
    }

    /// The processes do not run here: the daemon kills them.
    pub(super) fn abandon(mut self) -> Result<(), Failure> {
        drop(self.session);
        // CRIU fails.
        let _ = self.restorer.wait();
        // Nobody writes into the migration's directory any more, which may be about to be removed.
        self.lazy.take().into_iter().for_each(LazyPages::end);
        self.imported.as_ref().map_or(Ok(()), |it| it.remove(&self.place, false))
    }
}

/// Writes a file of an image. The source says what is in the image, and may have put something there that leads elsewhere.
fn write_anew(path: &Path, content: &[u8]) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Follows no link.
    File::create_new(path)?.write_all(content)
}

fn ended(status: ExitStatus) -> anyhow::Error {
    anyhow!("what restores the processes ended with {status}")
}

/// The name of the migration whose directory this is.
pub(super) fn name(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The command by which CRIU restores the last image, and the server of the processes' pages.
fn by_criu(migration: &Path, restore: &Restore) -> Result<(Command, Option<LazyPages>), Failure> {
    let dir = last(migration, restore)?;
    check(&dir)?;
    let log = dir.join(LOG);
    let _ = fs::remove_file(&log);
    let program = criu::program(None)?;
    let mut command = Command::new(&program);
    command.args(criu::restore(&dir, &log)?).arg("--restore-detached").args(&restore.options);
    let lazy = restore.lazy.then(|| serve_pages(&program, migration, &dir)).transpose()?;
    if let Some(lazy) = &lazy {
        moved::begin(migration, &lazy.guard())?;
        lazy.tell(&mut command);
    }
    let allowances = Allowances { other_driver: restore.other_driver, other_gpu: restore.other_gpu };
    if allowances != Allowances::default() {
        command.env(ALLOW_VARIABLE, allowances.to_string());
    }
    command.stderr(Stdio::null());
    Ok((command, lazy))
}

/// Starts the server of the processes' pages.
fn serve_pages(program: &Path, migration: &Path, dir: &Path) -> Result<LazyPages, Failure> {
    let served = migration.join(SERVED);
    // An earlier attempt has left it.
    let _ = fs::remove_dir_all(&served);
    let has_parent = dir.join(PARENT).is_symlink();
    if has_parent {
        make_served(dir, &migration.join(MEMORY), &served)?;
    }
    let served = has_parent.then_some(served.as_path());
    Ok(LazyPages::start(program, dir, served, Some(migration))?)
}

/// The command by which podman restores the container.
fn by_podman(imported: &Imported, dir: &Path, restore: &Restore) -> Result<Command, Failure> {
    check(&last(dir, restore)?)?;
    let own = rustix::process::getpid();
    rustix::process::set_child_subreaper(Some(own)).context("cannot adopt what podman starts")?;
    Place::of(&name(dir)).make(dir)?;
    let mut command = imported.restore(dir, &restore.options);
    let said = dir.join(SAID);
    // No pipe: conmon may keep it for as long as the container lives.
    command.stderr(File::create(&said).with_context(|| format!("cannot make {}", said.display()))?);
    Ok(command)
}

/// Whether the image is whole.
fn check(dir: &Path) -> Result<(), Failure> {
    Image::open(dir)?.check_companion()?;
    cpu_image::check_pages(dir)
}

/// The directory of the last image.
pub(super) fn last(dir: &Path, restore: &Restore) -> Result<PathBuf, Failure> {
    let path = stream::below(dir, &format!("{}/x", restore.name)).and_then(|it| Some(it.parent()?.to_owned()));
    Ok(path.ok_or_else(|| anyhow!("{} is no name of an image", restore.name))?)
}

fn progress(session: &Session) -> Option<RestoreInfo> {
    match session.ask(&Request::Progress) {
        Ok(Reply::RestoreProgress(info)) => info.map(|it| *it),
        _ => None,
    }
}

/// Why the restore has failed, as the daemon, CRIU or podman tells it.
fn failure_of(dir: &Path, restore: &Restore, held: &Held, otherwise: &str) -> Failure {
    let mut said = progress(&held.session);
    for _ in 0..POLLS {
        // The daemon may not have noticed yet.
        if said.as_ref().is_none_or(|it| it.failure.is_some()) {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
        said = progress(&held.session);
    }
    let errors = match &held.imported {
        Some(imported) => imported.errors(&fs::read(dir.join(SAID)).unwrap_or_default()),
        None => {
            let log = last(dir, restore).map(|it| fs::read(it.join(LOG)).unwrap_or_default()).unwrap_or_default();
            criu::errors(&String::from_utf8_lossy(&log))
        }
    };
    let (kind, reason) = match (said.and_then(|it| it.failure), errors.into_iter().next()) {
        (Some(failure), Some(error)) if failure.kind == FailureKind::GivenUp => (FailureKind::Other, error),
        (Some(failure), _) => (failure.kind, failure.reason),
        (None, Some(error)) => (FailureKind::Other, error),
        (None, None) => (FailureKind::Other, otherwise.to_owned()),
    };
    Failure::of_kind(kind, anyhow!("the processes cannot be restored: {reason}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_mark_does_not_follow_a_link_of_the_source() {
        let dir = tempfile::tempdir().unwrap();
        let [mark, other] = ["mark", "other"].map(|it| dir.path().join(it));
        fs::write(&other, "what another has").unwrap();
        symlink(&other, &mark).unwrap();
        for content in ["a", "ab"] {
            write_anew(&mark, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&mark).unwrap(), content);
            assert!(fs::symlink_metadata(&mark).unwrap().is_file());
            assert_eq!(fs::read_to_string(&other).unwrap(), "what another has");
        }
        // Also one that leads nowhere.
        let nowhere = dir.path().join("nowhere");
        fs::remove_file(&mark).unwrap();
        symlink(&nowhere, &mark).unwrap();
        write_anew(&mark, b"a").unwrap();
        assert!(!nowhere.exists());
    }
}
