//! A migration at the host that the processes go to: what `rekindle migrate` runs there, with a connection as its input and output.
//!
//! ```text
//!   Begin ─► compared ─► Directory* ─► Restore ─► held ──┬── Own ─────► running
//!                │                        │              └── Abandon ─► nothing is left
//!                └────────────────────────┴─ the connection is lost ─► nothing is left
//!
//!   held, and the connection is lost ─► Settle, by another connection (`rekindle migrate --settle`)
//! ```
//!
//! Files of a migration, below the directory for all of them:
//!
//! | | |
//! |---|---|
//! | `ID/0`, `ID/1`, ..., `ID/last` | images, each of which builds on the one before |
//! | `ID/restore` | how the last one is restored: all that is needed for that is here |
//! | `ID/decision` | the socket by which the process that holds the processes hears of the decision |
//! | `ID.out` | of a migration from this host (`source.rs`) |
//! | `ID.running` | the processes run: a decision that is told again changes nothing |

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use anyhow::{Context, anyhow};
use rekindle_images::Image;
use rekindle_wire::control::{ALLOW_VARIABLE, Allowances, FailureKind, Reply, Request, RestoreInfo};

use super::compare;
use super::options::Options;
use super::stream;
use super::talk::{self, Directory, Restore, TalkError, ToSource, ToTarget, VERSION};
use crate::daemon::{self, Session};
use crate::failure::Failure;
use crate::{cpu_image, criu, span};

/// How the last image is restored, among a migration's files.
const RESTORE: &str = "restore";
/// The socket for the decision.
const DECISION: &str = "decision";
/// The end of the name of the file that says that the processes run.
const RUNNING: &str = "running";
/// CRIU's log, in the last image's directory.
const LOG: &str = "restore.log";
/// The phase in which complete processes wait.
const HELD: &str = "held";
/// How long the note that processes run is kept, for whoever settles their migration late.
const OLD: Duration = Duration::from_secs(7 * 24 * 3600);
/// The pause between two looks at the progress of the restore.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// How often to look whether the daemon has noticed why CRIU has ended.
const POLLS: u32 = 500;

/// Serves the connection that is this process's input and output.
pub(super) fn receive(options: &Options) -> Result<(), Failure> {
    let first = talk::receive::<ToTarget>(&mut io::stdin().lock()).map_err(|error| anyhow!(error))?;
    match first {
        ToTarget::Begin(begin) => {
            let begun = match begin.version {
                VERSION => Target::begin(options, &begin.migration, || {
                    compare::with(&begin.what, &options.daemon.socket()?, &options.dir)
                }),
                other => Err(Failure::of_kind(
                    FailureKind::Version,
                    anyhow!(
                        "it speaks version {VERSION} of migrations, and the source version {other}: install one version of Rekindle on both hosts"
                    ),
                )),
            };
            match begun {
                Ok(target) => target.serve(),
                Err(failure) => answer(&failed(&failure, false)),
            }
        }
        ToTarget::Stream { migration } => match directory(options, &migration).filter(|it| it.is_dir()) {
            Some(dir) => {
                answer(&ToSource::Ready)?;
                let received = stream::receive(&mut io::stdin().lock(), &mut io::stdout().lock(), &dir);
                Ok(received.map_err(|error| anyhow!(error))?)
            }
            None => answer(&failed(&Failure::refused(anyhow!("there is no migration {migration}")), false)),
        },
        ToTarget::Settle { migration, own } => answer(&settle(options, &migration, own)),
        _ => answer(&failed(&Failure::refused(anyhow!("a connection does not begin with this")), false)),
    }
}

/// Answers the source.
fn answer(message: &ToSource) -> Result<(), Failure> {
    Ok(talk::send(&mut io::stdout().lock(), message).map_err(|error| anyhow!(error))?)
}

fn failed(failure: &Failure, kept: bool) -> ToSource {
    ToSource::Failed { kind: failure.kind(), reason: failure.to_string(), kept }
}

/// The directory of a migration; none for a name that no migration has.
fn directory(options: &Options, migration: &str) -> Option<PathBuf> {
    let is_name = !migration.is_empty() && migration.chars().all(|it| it.is_ascii_alphanumeric() || it == '-');
    is_name.then(|| options.dir.join(migration))
}

/// What reaches the process that receives a migration.
enum Event {
    /// The source says something.
    Said(ToTarget),
    /// The connection to the source is lost.
    Lost,
    /// Somebody settles the migration, and waits for an answer.
    Settled { own: bool, asker: UnixStream },
}

/// A migration to here.
struct Target {
    socket: PathBuf,
    dir: PathBuf,
    events: Receiver<Event>,
    held: Option<Held>,
}

/// Processes that are complete, and wait.
struct Held {
    criu: Child,
    /// The daemon kills the processes when this ends before they may run.
    session: Session,
}

impl Target {
    /// Makes the migration's directory, once the comparison has found nothing.
    fn begin(
        options: &Options,
        migration: &str,
        compared: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let dir = directory(options, migration).ok_or_else(|| Failure::refused(anyhow!("a bad name")))?;
        super::parent::make(&options.dir)?;
        compared()?;
        sweep(&options.dir);
        let made = fs::DirBuilder::new().mode(0o700).create(&dir);
        made.with_context(|| format!("cannot make {}", dir.display()))?;
        let (sender, events) = mpsc::channel();
        let target = Self { socket: options.daemon.socket()?, dir, events, held: None };
        let listening = within(&target.dir, DECISION, UnixListener::bind);
        let listener = listening.with_context(|| format!("cannot listen in {}", target.dir.display()))?;
        let for_settlers = sender.clone();
        std::thread::spawn(move || hear_settlers(&listener, &for_settlers));
        std::thread::spawn(move || hear_source(&sender));
        Ok(target)
    }

    fn serve(mut self) -> Result<(), Failure> {
        // An answer that does not arrive is no failure: the connection's end is an event.
        let _ = answer(&ToSource::Ready);
        while let Ok(event) = self.events.recv() {
            let (said, asker) = match event {
                Event::Said(said) => (said, None),
                Event::Settled { own: true, asker } => (ToTarget::Own, Some(asker)),
                Event::Settled { own: false, asker } => (ToTarget::Abandon, Some(asker)),
                // Only the source knows whether the processes are its own still.
                Event::Lost if self.held.is_some() => continue,
                Event::Lost => (ToTarget::Abandon, None),
            };
            let answered = match said {
                ToTarget::Directory(directory) => self.make(&directory),
                ToTarget::Restore(restore) => self.hold(&restore),
                ToTarget::Own => self.own(),
                ToTarget::Abandon => self.abandon(),
                _ => failed(&Failure::refused(anyhow!("this is out of turn")), false),
            };
            let is_over =
                matches!(answered, ToSource::Running | ToSource::Abandoned | ToSource::Failed { kept: true, .. });
            let _ = match asker {
                Some(mut asker) => talk::send(&mut asker, &answered).map_err(|error| anyhow!(error).into()),
                None => answer(&answered),
            };
            if is_over {
                break;
            }
        }
        Ok(())
    }

    /// Makes the files of an image, without their content.
    fn make(&self, directory: &Directory) -> ToSource {
        let made = || -> Result<(), Failure> {
            let name = |file: &str| {
                let name = format!("{}/{file}", directory.name);
                stream::below(&self.dir, &name).ok_or_else(|| anyhow!("{name} is no name of a file of an image"))
            };
            let dir = name("x")?.parent().map(Path::to_owned).unwrap_or_default();
            fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
            for (file, size) in &directory.files {
                let path = name(file)?;
                let made = File::create_new(&path).and_then(|it| it.set_len(*size));
                made.with_context(|| format!("cannot make {}", path.display()))?;
            }
            for (link, to) in &directory.links {
                let path = name(link)?;
                symlink(to, &path).with_context(|| format!("cannot make {}", path.display()))?;
            }
            Ok(())
        };
        made().map_or_else(|failure| failed(&failure, false), |()| ToSource::Ready)
    }

    /// Restores the processes, and holds them.
    fn hold(&mut self, restore: &Restore) -> ToSource {
        let held = write_restore(&self.dir, restore).and_then(|()| Held::restore(&self.dir, restore, &self.socket));
        match held {
            Ok(held) => {
                self.held = Some(held);
                ToSource::Held
            }
            Err(failure) => failed(&failure, false),
        }
    }

    /// The processes go on here.
    fn own(&mut self) -> ToSource {
        match self.held.take().map(Held::own) {
            Some(Ok(())) => is_running(&self.dir),
            // The images are whole, and nobody else has these processes.
            Some(Err(_)) | None => restore_kept(&self.dir, &self.socket),
        }
    }

    /// The processes do not go on here.
    fn abandon(&mut self) -> ToSource {
        if let Some(Held { mut criu, session }) = self.held.take() {
            drop(session);
            // The daemon kills the processes, and CRIU fails.
            let _ = criu.wait();
        }
        forget(&self.dir)
    }
}

/// Hears what the source says.
fn hear_source(events: &Sender<Event>) {
    let mut input = io::stdin().lock();
    loop {
        let event = match talk::receive(&mut input) {
            Ok(said) => Event::Said(said),
            Err(_) => Event::Lost,
        };
        let is_over = matches!(event, Event::Lost);
        if events.send(event).is_err() || is_over {
            return;
        }
    }
}

/// Hears those who settle the migration.
fn hear_settlers(listener: &UnixListener, events: &Sender<Event>) {
    for mut asker in listener.incoming().flatten() {
        if let Ok(ToTarget::Settle { own, .. }) = talk::receive(&mut asker)
            && events.send(Event::Settled { own, asker }).is_err()
        {
            return;
        }
    }
}

/// Settles a migration whose connection was lost: by the process that holds the processes, or, if that has ended, by what it has
/// left.
fn settle(options: &Options, migration: &str, own: bool) -> ToSource {
    let Some(dir) = directory(options, migration) else {
        return failed(&Failure::refused(anyhow!("there is no migration {migration}")), false);
    };
    if dir.with_extension(RUNNING).exists() {
        return match own {
            true => ToSource::Running,
            false => failed(
                &Failure::refused(anyhow!("the processes run here: both hosts have been told that they own them")),
                false,
            ),
        };
    }
    if let Ok(mut holder) = within(&dir, DECISION, UnixStream::connect) {
        let message = ToTarget::Settle { migration: migration.to_owned(), own };
        let answered = talk::send(&mut holder, &message).and_then(|()| talk::receive(&mut holder));
        match answered {
            Ok(answered) => return answered,
            // It has ended meanwhile.
            Err(TalkError::Closed) => {}
            Err(error) => return failed(&anyhow!(error).into(), true),
        }
    }
    match (own, options.daemon.socket()) {
        (false, _) => forget(&dir),
        (true, Ok(socket)) => restore_kept(&dir, &socket),
        (true, Err(error)) => failed(&error.into(), true),
    }
}

/// Restores what a process has left that held the processes and has ended, unless it has let them run before.
fn restore_kept(dir: &Path, socket: &Path) -> ToSource {
    let restored = || -> Result<(), Failure> {
        match daemon::ask(socket, &Request::Arrival { migration: name(dir) })? {
            Reply::Arrival(None) => {}
            Reply::Arrival(Some(true)) => return Ok(()),
            Reply::Arrival(Some(false)) => {
                return Err(Failure::refused(anyhow!(
                    "they were let run here and have ended since, or were killed at that moment. If they have not run, `rekindle \
                     restore -d {}` restores them",
                    dir.join("last").display()
                )));
            }
            _ => return Err(daemon::unexpected_answer().into()),
        }
        let path = dir.join(RESTORE);
        let restore =
            fs::read(&path).with_context(|| format!("there is no {}: nothing of it is here", path.display()))?;
        let restore: Restore = serde_json::from_slice(&restore).with_context(|| format!("bad {}", path.display()))?;
        Held::restore(dir, &restore, socket)?.own()
    };
    match restored() {
        Ok(()) => is_running(dir),
        Err(failure) => failed(&failure, dir.join(RESTORE).exists()),
    }
}

/// The name of the migration whose directory this is.
fn name(dir: &Path) -> String {
    dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The processes run: nobody needs the images.
fn is_running(dir: &Path) -> ToSource {
    let noted = File::create(dir.with_extension(RUNNING)).and_then(|it| it.sync_all());
    if noted.is_ok() {
        let _ = fs::remove_dir_all(dir);
    }
    ToSource::Running
}

/// Removes what receivers have left that were killed before all was here, and old notes that processes run.
fn sweep(parent: &Path) {
    for dir in fs::read_dir(parent).into_iter().flatten().flatten().map(|it| it.path()) {
        if dir.extension().is_some_and(|it| it == RUNNING) && is_old(&dir) {
            let _ = fs::remove_file(&dir);
        }
        let is_left = dir.extension().is_none()
            && !dir.join(RESTORE).exists()
            && within(&dir, DECISION, UnixStream::connect)
                .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        if is_left {
            let _ = fs::remove_dir_all(dir);
        }
    }
}

fn is_old(note: &Path) -> bool {
    let written = fs::metadata(note).and_then(|it| it.modified());
    written.is_ok_and(|it| it.elapsed().is_ok_and(|age| age > OLD))
}

/// Removes all of a migration whose processes go on elsewhere.
fn forget(dir: &Path) -> ToSource {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            failed(&anyhow!(error).context(format!("cannot remove {}", dir.display())).into(), false)
        }
        _ => ToSource::Abandoned,
    }
}

/// Notes how the processes are restored. From now on this host has all that they need.
fn write_restore(dir: &Path, restore: &Restore) -> Result<(), Failure> {
    let path = dir.join(RESTORE);
    let written = || -> io::Result<()> {
        let mut file = File::create_new(&path)?;
        file.write_all(&serde_json::to_vec(restore)?)?;
        file.sync_all()
    };
    Ok(written().with_context(|| format!("cannot write {}", path.display()))?)
}

impl Held {
    /// Has CRIU restore the processes, and waits until they are complete.
    fn restore(dir: &Path, restore: &Restore, socket: &Path) -> Result<Self, Failure> {
        let request = Request::HoldRestore { migration: name(dir), span: span::begin() };
        let (session, reply) = Session::open(socket, &request)?;
        if reply != Reply::Awaited {
            return Err(daemon::unexpected_answer().into());
        }
        let mut criu = start(dir, restore, socket)?;
        loop {
            if progress(&session).is_some_and(|it| it.phase == HELD) {
                return Ok(Self { criu, session });
            }
            if let Some(status) = criu.try_wait().context("cannot wait for criu")? {
                return Err(failure_of(dir, restore, &session, status));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Lets the processes run.
    fn own(self) -> Result<(), Failure> {
        let Self { mut criu, session } = self;
        let owned = session.ask(&Request::Own);
        let status = criu.wait().context("cannot wait for criu")?;
        owned?;
        match progress(&session).and_then(|it| it.failure) {
            Some(failure) => Err(Failure::of_kind(failure.kind, anyhow!("{}", failure.reason))),
            None if status.success() => Ok(()),
            None => Err(anyhow!("criu ended with {status}").into()),
        }
    }
}

/// Starts CRIU on the last image.
fn start(dir: &Path, restore: &Restore, socket: &Path) -> Result<Child, Failure> {
    let dir = last(dir, restore)?;
    Image::open(&dir)?.check_companion()?;
    cpu_image::check_pages(&dir)?;
    let log = dir.join(LOG);
    let _ = fs::remove_file(&log);
    let program = criu::program(None)?;
    let mut command = Command::new(&program);
    command.args(criu::restore(&dir, &log)?).arg("--restore-detached").args(&restore.options);
    let allowances = Allowances { other_driver: restore.other_driver, other_gpu: restore.other_gpu };
    if allowances != Allowances::default() {
        command.env(ALLOW_VARIABLE, allowances.to_string());
    }
    // The processes have their own output, and this process's is the connection.
    command.env("REKINDLE_SOCKET", socket).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command.spawn().with_context(|| format!("cannot run {}", program.display()))?)
}

/// The directory of the last image.
fn last(dir: &Path, restore: &Restore) -> Result<PathBuf, Failure> {
    let path = stream::below(dir, &format!("{}/x", restore.name)).and_then(|it| Some(it.parent()?.to_owned()));
    Ok(path.ok_or_else(|| anyhow!("{} is no name of an image", restore.name))?)
}

fn progress(session: &Session) -> Option<RestoreInfo> {
    match session.ask(&Request::Progress) {
        Ok(Reply::RestoreProgress(info)) => info.map(|it| *it),
        _ => None,
    }
}

/// Why CRIU has failed, as the daemon or CRIU tells it.
fn failure_of(dir: &Path, restore: &Restore, session: &Session, status: ExitStatus) -> Failure {
    let mut said = progress(session);
    for _ in 0..POLLS {
        // The daemon may not have noticed yet.
        if said.as_ref().is_none_or(|it| it.failure.is_some()) {
            break;
        }
        std::thread::sleep(POLL_INTERVAL);
        said = progress(session);
    }
    let log = last(dir, restore).map(|it| fs::read(it.join(LOG)).unwrap_or_default()).unwrap_or_default();
    let errors = criu::errors(&String::from_utf8_lossy(&log));
    let (kind, reason) = match (said.and_then(|it| it.failure), errors.into_iter().next()) {
        (Some(failure), Some(error)) if failure.kind == FailureKind::GivenUp => (FailureKind::Other, error),
        (Some(failure), _) => (failure.kind, failure.reason),
        (None, Some(error)) => (FailureKind::Other, error),
        (None, None) => (FailureKind::Other, format!("criu ended with {status}")),
    };
    Failure::of_kind(kind, anyhow!("the processes cannot be restored: {reason}"))
}

/// Does something with the path of a socket in a directory, whose own path may be longer than a socket's may be.
fn within<T>(dir: &Path, name: &str, action: impl FnOnce(PathBuf) -> io::Result<T>) -> io::Result<T> {
    let opened = OwnedFd::from(File::open(dir)?);
    action(PathBuf::from(format!("/proc/self/fd/{}", opened.as_fd().as_raw_fd())).join(name))
}
