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
//! | `ID/memory` | the processes' own memory as it was while they ran: the parent of the last image, for CRIU |
//! | `ID/served` | what CRIU's server of pages reads of both, for processes that run before they have all pages (`cpu_image/lazily.rs`) |
//! | `ID/archive/archive` | podman's archive of a container |
//! | `ID/restore` | how the last one is restored: all that is needed for that is here |
//! | `ID/guard`, `ID/owned`, `ID/whole.GUARD`, `ID/killed.GUARD` | of processes that run before they have all pages of their own (`lazy_pages/moved.rs`) |
//! | `ID/decision` | the socket by which the process that holds the processes hears of the decision |
//! | `ID.out` | of a migration from this host (`source.rs`) |
//! | `ID.running` | the processes run: a decision that is told again changes nothing |

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, anyhow};
use rekindle_images::ImageDir;
use rekindle_wire::control::{FailureKind, Reply, Request};

use super::arriving::{self, Arriving};
use super::compare;
use super::held::{self, Attempt, Held, Host, name};
use super::imported::Imported;
use super::options::Options;
use super::place::Place;
use super::preload::Preloads;
use super::stream;
use super::talk::{self, Directory, MEMORY, Remedy, Restore, Settle, TalkError, ToSource, ToTarget, VERSION};
use super::told;
use crate::cpu_image::PARENT;
use crate::daemon;
use crate::failure::Failure;
use crate::lazy_pages::moved::{self, RUNNING};
use crate::network::announce::Announced;
use crate::output::size;

/// How the last image is restored, among a migration's files.
const RESTORE: &str = "restore";
/// The socket for the decision.
const DECISION: &str = "decision";
/// Why processes are not restored that have been let run, unless that is asked for.
const HAVE_RUN: &str = "they were let run and have ended since, or were killed at that moment";
/// How long the note that processes run is kept, for whoever settles their migration late.
const OLD: Duration = Duration::from_secs(7 * 24 * 3600);

/// Serves the connection that is this process's input and output.
pub(super) fn receive(options: &Options) -> Result<(), Failure> {
    let first = talk::receive::<ToTarget>(&mut io::stdin().lock()).map_err(|error| anyhow!(error))?;
    if let Err(failure) = told::check(&first) {
        return answer(&failed(&failure, false));
    }
    match first {
        ToTarget::Begin(begin) => {
            let begun = match begin.version {
                VERSION => Target::begin(options, &begin.migration, begin.what.memory, || {
                    let needs = begin.what.container.as_ref();
                    let waiting =
                        needs.and_then(|it| that_waits(&options.dir, |restore| restore.has_container(&it.id)));
                    let addresses = &begin.what.addresses;
                    if let Some(other) = that_waits(&options.dir, |restore| restore.has_one_of(addresses)) {
                        return Err(Failure::refused(anyhow!(
                            "migration {other}, which is not settled, has the same address there: settle it first (--settle)"
                        )));
                    }
                    compare::with(&begin.what, &host(options)?, &options.dir, waiting.as_deref())
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
        ToTarget::Settle(decided) => {
            let mut announced = None;
            answer(&settle(options, &decided, &mut announced))
        }
        ToTarget::Runs { migration } => answer(&runs(options, &migration)),
        ToTarget::Ended { migration } => answer(&ended(options, &migration)),
        _ => answer(&failed(&Failure::refused(anyhow!("a connection does not begin with this")), false)),
    }
}

/// Answers the source.
fn answer(message: &ToSource) -> Result<(), Failure> {
    Ok(talk::send(&mut io::stdout().lock(), message).map_err(|error| anyhow!(error))?)
}

fn failed(failure: &Failure, kept: bool) -> ToSource {
    let remedy = if kept { Remedy::Settle } else { Remedy::None };
    ToSource::Failed { kind: failure.kind(), reason: failure.to_string(), kept, remedy }
}

/// The processes run here, or have run, and the source says that they are its own: what is left stays for somebody who knows more.
fn both() -> ToSource {
    failed(
        &Failure::refused(anyhow!("the processes were let run here: both hosts have been told that they own them")),
        false,
    )
}

/// Waits until nobody else works on a migration. None if it is gone.
fn lock(dir: &Path) -> Result<Option<File>, Failure> {
    let locked = || -> io::Result<Option<File>> {
        let opened = match File::open(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        opened.lock()?;
        Ok(dir.exists().then_some(opened))
    };
    Ok(locked().with_context(|| format!("cannot lock {}", dir.display()))?)
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
    host: Host,
    dir: PathBuf,
    /// The directory's lock: who settles the migration without this process has it alone.
    _lock: File,
    /// Bytes of GPU memory that move.
    gpu_memory: u64,
    events: Receiver<Event>,
    preloads: Option<Preloads>,
    /// The name of the directory that was made last.
    begun: Option<String>,
    held: Option<Held>,
    /// The addresses, until the processes run.
    arriving: Option<Arriving>,
    /// The announcement of the addresses, which may go on when the answer has been given.
    announced: Option<Announced>,
    /// Frees memory that came while the processes ran, and that the last image does not refer to.
    freeing: Option<JoinHandle<()>>,
}

impl Target {
    /// Makes the migration's directory, once the comparison has found nothing.
    fn begin(
        options: &Options,
        migration: &str,
        gpu_memory: u64,
        compared: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let dir = directory(options, migration).ok_or_else(|| Failure::refused(anyhow!("a bad name")))?;
        super::parent::make(&options.dir)?;
        compared()?;
        sweep(&options.dir);
        let made = fs::DirBuilder::new().mode(0o700).create(&dir);
        made.with_context(|| format!("cannot make {}", dir.display()))?;
        let lock = lock(&dir)?.ok_or_else(|| anyhow!("{} was removed", dir.display()))?;
        let (sender, events) = mpsc::channel();
        let host = host(options)?;
        let preloads = Preloads::start(&host.socket);
        let target = Self {
            host,
            dir,
            _lock: lock,
            gpu_memory,
            events,
            preloads,
            begun: None,
            held: None,
            freeing: None,
            arriving: None,
            announced: None,
        };
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
            let answered = match told::check(&said).map(|()| said) {
                Err(failure) => failed(&failure, false),
                Ok(ToTarget::Directory(directory)) => self.make(&directory),
                Ok(ToTarget::Preload { name }) => self.preload(&name),
                Ok(ToTarget::Restore(restore)) => self.hold(&restore),
                Ok(ToTarget::Own) => self.own(),
                Ok(ToTarget::Abandon) => self.abandon(),
                Ok(_) => failed(&Failure::refused(anyhow!("this is out of turn")), false),
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
    fn make(&mut self, directory: &Directory) -> ToSource {
        let mut made = || -> Result<(), Failure> {
            if directory.name == MEMORY {
                self.has_room_for(directory.files.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size)))?;
            }
            let name = |file: &str| {
                let name = format!("{}/{file}", directory.name);
                stream::below(&self.dir, &name).ok_or_else(|| anyhow!("{name} is no name of a file of an image"))
            };
            let dir = name("x")?.parent().map(Path::to_owned).unwrap_or_default();
            let is_begun = self.begun.replace(directory.name.clone()).is_some_and(|it| it == directory.name);
            match fs::create_dir(&dir) {
                // The other files of the last dump.
                Err(error) if is_begun && error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made.with_context(|| format!("cannot make {}", dir.display()))?,
            }
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
        match made() {
            Ok(()) => ToSource::Made,
            Err(failure) => failed(&failure, false),
        }
    }

    /// Whether there is room for memory that comes while the processes run, once more for the image if all of it changes, and for GPU memory.
    fn has_room_for(&self, memory: u64) -> Result<(), Failure> {
        let free = ImageDir::open(&self.dir)?.free_space()?;
        let needed = memory.saturating_mul(2).saturating_add(self.gpu_memory);
        if free >= needed {
            return Ok(());
        }
        let (dir, free, needed) = (self.dir.display(), size(free), size(needed));
        Err(Failure::refused(anyhow!("{dir} has {free} free, and that would take {needed}")))
    }

    /// Loads the GPU memory of a round, which is complete, while others come.
    fn preload(&self, name: &str) -> ToSource {
        let file = stream::below(&self.dir, &format!("{name}/x"));
        let Some(dir) = file.as_deref().and_then(Path::parent) else {
            return failed(&Failure::refused(anyhow!("{name} is no name of a round")), false);
        };
        self.preloads.iter().for_each(|it| it.round(dir.to_owned()));
        ToSource::Ready
    }

    /// Restores the processes, and holds them.
    fn hold(&mut self, restore: &Restore) -> ToSource {
        let _preloaded = self.preloads.take().map(Preloads::end);
        if !self.dir.join(&restore.name).join(PARENT).is_symlink() {
            // To free much memory takes long, and what cannot be removed goes with the migration's directory.
            let memory = self.dir.join(MEMORY);
            self.freeing = Some(std::thread::spawn(move || drop(fs::remove_dir_all(memory))));
        }
        let held = write_restore(&self.dir, restore).and_then(|()| {
            self.arriving = Some(Arriving::begin(&restore.addresses, false)?);
            Held::restore(&self.dir, restore, &self.host, Attempt::First)
        });
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
        let owned = self.held.take().map(Held::own);
        self.freed();
        self.arriving = None;
        match owned {
            Some(Ok(())) => runs_here(&self.dir, &self.host, &mut self.announced),
            // The images are whole, and nobody else has these processes.
            Some(Err(_)) | None => restore_kept(&self.dir, &self.host, false, &mut self.announced),
        }
    }

    /// Waits until nobody works in the migration's directory, which is about to be removed.
    fn freed(&mut self) {
        let _ = self.freeing.take().map(JoinHandle::join);
    }

    /// The processes do not go on here.
    fn abandon(&mut self) -> ToSource {
        self.freed();
        if let Some(held) = self.held.take() {
            arriving::mute(&read_restore(&self.dir).unwrap_or_default().addresses);
            if let Err(failure) = held.abandon() {
                return failed(&failure, true);
            }
        }
        self.arriving = None;
        forget(&self.dir, &self.host, None)
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
        if let Ok(ToTarget::Settle(Settle { own, .. })) = talk::receive(&mut asker)
            && events.send(Event::Settled { own, asker }).is_err()
        {
            return;
        }
    }
}

/// Settles a migration whose connection was lost: by the process that holds the processes, or, if that has ended, by what it has
/// left.
fn settle(options: &Options, decided: &Settle, announced: &mut Option<Announced>) -> ToSource {
    let Settle { migration, own, again, container } = decided;
    let Some(dir) = directory(options, migration) else {
        return failed(&Failure::refused(anyhow!("there is no migration {migration}")), false);
    };
    if let Ok(mut holder) = within(&dir, DECISION, UnixStream::connect) {
        let answered =
            talk::send(&mut holder, &ToTarget::Settle(decided.clone())).and_then(|()| talk::receive(&mut holder));
        match answered {
            Ok(answered) => return answered,
            // It has ended meanwhile.
            Err(TalkError::Closed) => {}
            Err(error) => return failed(&anyhow!(error).into(), true),
        }
    }
    // Others may settle it at the same time. What was decided for good by then is looked at with the lock alone.
    let _lock = match lock(&dir) {
        Ok(lock) => lock,
        Err(failure) => return failed(&failure, true),
    };
    if dir.with_extension(RUNNING).exists() {
        return if *own { ToSource::Running } else { both() };
    }
    match (own, host(options)) {
        (false, Ok(host)) => forget(&dir, &host, container.as_deref()),
        (true, Ok(host)) => restore_kept(&dir, &host, *again, announced),
        (_, Err(failure)) => failed(&failure, true),
    }
}

/// The processes have run here to their end, as somebody says: nobody needs what is left.
fn ended(options: &Options, migration: &str) -> ToSource {
    let asked = || -> Result<ToSource, Failure> {
        let dir = directory(options, migration)
            .ok_or_else(|| Failure::refused(anyhow!("there is no migration {migration}")))?;
        let _lock = lock(&dir)?;
        if arrival(&dir, &host(options)?)? == Some(false) {
            remove(&dir);
            return Ok(ToSource::Running);
        }
        Ok(failed(
            &Failure::refused(anyhow!("it is not known there that they have been let run, and have ended")),
            false,
        ))
    };
    asked().unwrap_or_else(|failure| failed(&failure, false))
}

/// Whether the processes run here, or have run to their end.
fn runs(options: &Options, migration: &str) -> ToSource {
    let asked = || -> Result<bool, Failure> {
        let dir = directory(options, migration)
            .ok_or_else(|| Failure::refused(anyhow!("there is no migration {migration}")))?;
        Ok(dir.with_extension(RUNNING).exists() || arrival(&dir, &host(options)?)? == Some(true))
    };
    match asked() {
        Ok(true) => ToSource::Running,
        Ok(false) => failed(&Failure::refused(anyhow!("the processes do not run there")), false),
        Err(failure) => failed(&failure, false),
    }
}

/// Whether the processes have been let run here: none if not, otherwise whether one of them lives.
fn arrival(dir: &Path, host: &Host) -> Result<Option<bool>, Failure> {
    match daemon::ask(&host.socket, &Request::Arrival { migration: name(dir) })? {
        Reply::Arrival(arrival) => Ok(arrival),
        _ => Err(daemon::unexpected_answer().into()),
    }
}

/// Restores what a process has left that held the processes and has ended, unless it has let them run before, and this is not `again`.
fn restore_kept(dir: &Path, host: &Host, again: bool, announced: &mut Option<Announced>) -> ToSource {
    let restored = || -> Result<(), Failure> {
        match arrival(dir, host)? {
            // No daemon knows what was before this host has started anew.
            None if !again && moved::has_run(dir) => return Err(Failure::refused(anyhow!("{HAVE_RUN}"))),
            None => {}
            Some(true) => return is_known_to_run(dir, host),
            // The processes that were let run have ended, and others of the container have not.
            Some(false) if podman_runs_it(dir, host)? => return Ok(()),
            Some(false) if again => {}
            Some(false) => return Err(Failure::refused(anyhow!("{HAVE_RUN}"))),
        }
        let restore = read_restore(dir)?;
        let _arriving = Arriving::begin(&restore.addresses, again)?;
        Held::restore(dir, &restore, host, if again { Attempt::Again } else { Attempt::Next })?.own()
    };
    match restored() {
        Ok(()) => runs_here(dir, host, announced),
        Err(failure) => {
            let kept = dir.join(RESTORE).exists();
            let remedy = match (kept, arrival(dir, host)) {
                (_, Ok(Some(true))) => Remedy::None,
                (false, _) => Remedy::Keep,
                (true, Ok(Some(false))) => Remedy::Again,
                (true, Ok(None)) if moved::has_run(dir) => Remedy::Again,
                (true, Ok(None) | Err(_)) => Remedy::Settle,
            };
            ToSource::Failed { kind: failure.kind(), reason: failure.to_string(), kept, remedy }
        }
    }
}

/// Whether it is a container, and podman knows that it runs.
fn podman_runs_it(dir: &Path, host: &Host) -> Result<bool, Failure> {
    match read_restore(dir) {
        Ok(Restore { container: Some(id), .. }) => Imported::new(&host.podman, &id).is_known_to_run(),
        _ => Ok(false),
    }
}

/// The processes run. A container must be known to podman, too.
fn is_known_to_run(dir: &Path, host: &Host) -> Result<(), Failure> {
    let Ok(Restore { container: Some(id), .. }) = read_restore(dir) else { return Ok(()) };
    if podman_runs_it(dir, host)? {
        return Ok(());
    }
    let end = Imported::new(&host.podman, &id).end_command()?;
    Err(anyhow!(
        "container {id} runs there, and podman, which was killed as it restored it, does not know that. `{end}` there ends it; settled with \
         --again after that, it begins anew with its image, without what it has done since"
    )
    .into())
}

/// This host.
fn host(options: &Options) -> Result<Host, Failure> {
    Ok(Host { socket: options.daemon.socket()?, podman: options.podman() })
}

/// The processes run. podman may start a container anew from now on, as it did where that comes from.
fn runs_here(dir: &Path, host: &Host, announced: &mut Option<Announced>) -> ToSource {
    let restore = read_restore(dir).unwrap_or_default();
    match arriving::up(&restore.addresses) {
        Ok(up) => *announced = up,
        Err(failure) => return failed(&failure, true),
    }
    if let (Some(id), Some(policy)) = (restore.container, restore.restart)
        && let Err(failure) = Imported::new(&host.podman, &id).may_restart(&policy)
    {
        let failure = failure.but(format!("container {id} runs there, without its restart policy"));
        return failed(&failure, true);
    }
    is_running(dir)
}

/// The processes run: nobody needs the images when the processes have all their pages.
fn is_running(dir: &Path) -> ToSource {
    let lazy = read_restore(dir).ok().filter(|it| it.lazy);
    match lazy.and_then(|restore| held::last(dir, &restore).ok()) {
        Some(image) => moved::run(dir, &image),
        None => remove(dir),
    }
    ToSource::Running
}

/// Removes all of a migration whose processes have been let run.
fn remove(dir: &Path) {
    moved::remove(dir);
    if dir.with_extension(RUNNING).exists() {
        Place::of(&name(dir)).remove();
    }
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
            let _ = fs::remove_dir_all(&dir);
        }
        if moved::is_left(&dir) {
            remove(&dir);
        }
    }
    Place::all().for_each(|it| Place::of(&it).remove_if_left());
}

/// The migration to here that is like this and is not settled, if there is one.
fn that_waits(parent: &Path, is_it: impl Fn(&Restore) -> bool) -> Option<String> {
    let dirs = fs::read_dir(parent).into_iter().flatten().flatten().map(|it| it.path());
    let mut waiting = dirs.filter(|dir| !dir.with_extension(RUNNING).exists() && !moved::has_run(dir));
    waiting.find(|dir| read_restore(dir).is_ok_and(|it| is_it(&it))).map(|dir| name(&dir))
}

fn is_old(note: &Path) -> bool {
    let written = fs::metadata(note).and_then(|it| it.modified());
    written.is_ok_and(|it| it.elapsed().is_ok_and(|age| age > OLD))
}

/// Removes all of a migration whose processes go on elsewhere. If nothing says here any more that it was a container, the source may.
fn forget(dir: &Path, host: &Host, container: Option<&str>) -> ToSource {
    let removed = || -> Result<Option<ToSource>, Failure> {
        let container = match (read_restore(dir), container) {
            (Ok(restore), _) => restore.container,
            (Err(_), Some(id)) => Some(id.to_owned()),
            (Err(_), None) => return Ok(None),
        };
        match (arrival(dir, host), container) {
            (Ok(Some(_)), _) => return Ok(Some(both())),
            // Only the daemon knows that nothing of a container runs.
            (Err(failure), Some(_)) => return Err(failure),
            // What podman has made of it, if whoever held that was killed.
            (Ok(None), Some(id)) => Imported::new(&host.podman, &id).remove(&Place::of(&name(dir)), false)?,
            (_, None) => {}
        }
        arriving::down(&read_restore(dir).unwrap_or_default().addresses)?;
        Place::of(&name(dir)).remove();
        Ok(None)
    };
    match removed() {
        Ok(None) => {}
        Ok(Some(answer)) => return answer,
        Err(failure) => return failed(&failure, true),
    }
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

/// How the processes are restored.
fn read_restore(dir: &Path) -> Result<Restore, Failure> {
    let path = dir.join(RESTORE);
    let restore = fs::read(&path).with_context(|| {
        format!(
            "there is no {}: its images are not there, or not any more since that host has started anew",
            path.display()
        )
    })?;
    Ok(serde_json::from_slice(&restore).with_context(|| format!("bad {}", path.display()))?)
}

/// Does something with the path of a socket in a directory, whose own path may be longer than a socket's may be.
fn within<T>(dir: &Path, name: &str, action: impl FnOnce(PathBuf) -> io::Result<T>) -> io::Result<T> {
    let opened = OwnedFd::from(File::open(dir)?);
    action(PathBuf::from(format!("/proc/self/fd/{}", opened.as_fd().as_raw_fd())).join(name))
}
