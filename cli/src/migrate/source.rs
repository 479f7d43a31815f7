//! A migration at the host that the processes come from.
//!
//! ```text
//!   compare ─► rounds: pre-copy, send ─► criu dump ─► send ─► held there ─► hand over ─► own ─► running there
//!      │          └───────────┴──────────────┴─────────┴──────────┘            │
//!      └─ refused             a failure: the processes go on here              └─ a lost connection: say it again
//! ```
//!
//! The processes run until `criu dump`, and stand still from then on until they run there, or here again. The daemon decides that,
//! once, at `HandOver`; nothing that this command does or fails to do can make both go on. For a container read `podman container
//! checkpoint`, which ends before the archive is sent.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rekindle_wire::control::{
    CheckInfo, DumpInfo, DumpOutcome, FailureKind, MigrationState, Reply, Request, StatusInfo,
};

use super::container::{self, Container};
use super::frozen::{self, Changes, Pages};
use super::leaving::{self, Leaving};
use super::link::{Link, Way};
use super::memory::{self, Known};
use super::options::{Options, Subject};
use super::report::{Pause, Report, Round};
use super::rounds::Rounds;
use super::sending::{SHARE, forget_content, list, send_all};
use super::settle;
use super::stream::{self, PIECE};
use super::talk::{ARCHIVE, Begin, Directory, MEMORY, Remedy, Restore, Settle, ToSource, ToTarget, VERSION, What};
use crate::checkpoint::base;
use crate::cpu_image::{DumpedPages, PARENT};
use crate::criu;
use crate::daemon::{self, Session};
use crate::failure::Failure;
use crate::{output, protect, random, span};

/// The directory of the last dump among the migration's. A container's has the migration's name besides (`Container::link`).
const LAST: &str = "last";
/// The end of the name of a migration's directory here. The target of another migration may use the same parent.
const OWN: &str = "out";
/// CRIU's log, in that directory.
const LOG: &str = "dump.log";
/// The phase in which the daemon waits for the decision.
const HAND_OVER: &str = "hand-over";
/// The phases in which the processes stand still.
const STILL: [&str; 4] = ["freeze", "copy", "write", HAND_OVER];
/// The pause between two looks at the progress of the dump.
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// With more memory that may not be written, the last image has no parent: CRIU would map all of it writable at first, which a kernel may
/// refuse. Libraries of frameworks are some gigabytes of it.
const MOST_UNWRITABLE: u64 = 16 << 30;
/// How long the daemon may take to notice that CRIU has ended.
const NOTICE: Duration = Duration::from_secs(2);

/// A migration from here.
pub(super) struct Source<'a> {
    options: &'a Options,
    way: &'a dyn Way,
    socket: PathBuf,
    pid: i32,
    /// The container whose first process that is, if a container moves.
    container: Option<Container>,
    /// The addresses that move with it.
    leaving: Leaving,
    /// The migration's name.
    name: String,
    /// Its directory, which is removed with this, and which others know by the lock to be in use.
    dir: PathBuf,
    lock: File,
    /// What the target has of the processes' own memory; none if that has no room for it.
    known: Option<Known>,
    /// The bytes of that memory, when it was looked at last.
    own: u64,
    /// The files of the last image that the target has before the others.
    sent: Vec<String>,
    /// The connection for messages, and those for content.
    link: Link,
    streams: Vec<Link>,
    report: Report,
}

impl Drop for Source<'_> {
    fn drop(&mut self) {
        if let Some(container) = &self.container {
            container.unlink();
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A tree that stands still, whose image is complete.
struct Dumped {
    /// Since when it stands still.
    since: Instant,
    /// For how long their own memory was read and sent.
    memory_ms: u64,
    /// CRIU, which waits for the decision. podman, which had to write an archive, has ended.
    criu: Option<Child>,
}

/// Why a tree is not dumped, and CRIU, if it has not ended.
struct NotDumped(Failure, Option<Child>);

impl<T: Into<Failure>> From<T> for NotDumped {
    fn from(failure: T) -> Self {
        Self(failure.into(), None)
    }
}

impl<'a> Source<'a> {
    /// Compares the hosts, and opens the connections.
    pub(super) fn begin(options: &'a Options, way: &'a dyn Way, subject: Subject<'_>) -> Result<Self, Failure> {
        let socket = options.daemon.socket()?;
        let name = random::name()?;
        let (container, pid) = match subject {
            Subject::Process(pid) => {
                criu::program(options.criu.as_deref())?;
                (None, pid)
            }
            Subject::Container(container) => {
                let (container, pid) = Container::find(options.podman(), container, &name, &socket)?;
                (Some(container), pid)
            }
        };
        protect::must_not_be_protected(&socket, pid)?;
        container::sweep(&socket);
        leaving::sweep(|migration| matches!(settle::decision(&socket, migration), Ok(MigrationState::Kept)));
        let leaving = Leaving::find(options.addresses(), pid, &name, &socket)?;
        let needs = container.as_ref().map(Container::needs).transpose()?.map(Box::new);
        let addresses = leaving.addresses().to_vec();
        let what = What { container: needs, addresses, ..what(options, &socket, pid)? };
        let (dir, lock) = make_own(&options.dir, &name)?;
        let mut link = way.open()?;
        let begin = Begin { version: VERSION, migration: name.clone(), what };
        expect(way, link.ask(&ToTarget::Begin(begin)), &ToSource::Ready)?;
        let stream = || -> Result<Link, Failure> {
            let mut link = way.open()?;
            expect(way, link.ask(&ToTarget::Stream { migration: name.clone() }), &ToSource::Ready)?;
            Ok(link)
        };
        let streams = (0..options.streams).map(|_| stream()).collect::<Result<_, _>>()?;
        let known = Some(Known::new(random::number()? as u64));
        let mut report = Report::new(&name, pid, container.as_ref().map(Container::name), way.host());
        report.addresses = leaving.ips();
        let (own, sent) = (0, Vec::new());
        Ok(Self {
            options,
            way,
            socket,
            pid,
            container,
            leaving,
            name,
            dir,
            lock,
            known,
            own,
            sent,
            link,
            streams,
            report,
        })
    }

    /// Moves the processes. The report says where they are, whatever has happened.
    pub(super) fn migrate(mut self) -> (Report, Result<(), Failure>) {
        let began = Instant::now();
        let result = match self.copy_while_running() {
            Ok(before) => self.dump_and_hand_over(before.as_deref()),
            Err(failure) => Err(self.abandon(failure)),
        };
        let mut report = std::mem::take(&mut self.report);
        report.total_ms = millis(began);
        (report, result)
    }

    /// Copies memory to the target while the processes run. Returns the directory of the last copy of GPU memory.
    fn copy_while_running(&mut self) -> Result<Option<PathBuf>, Failure> {
        self.copy_memory()?;
        let mut rounds = Rounds::new(Duration::from_millis(self.options.pause_ms));
        let mut before: Option<PathBuf> = None;
        while rounds.goes_on() {
            let began = Instant::now();
            let name = self.report.rounds.len().to_string();
            let dir = self.make(&name)?;
            if let Some(before) = &before {
                base::link(&dir, before)?;
            }
            let opened = File::open(&dir).with_context(|| format!("cannot open {}", dir.display()))?;
            let request = Request::PreCopy { root: self.pid };
            let Reply::PreCopied(info) = daemon::ask_long(&self.socket, &request, &[opened.as_raw_fd()])? else {
                return Err(daemon::unexpected_answer().into());
            };
            let sent = self.send(&name)?;
            // The next copy needs the hashes alone.
            forget_content(&dir)?;
            let took = began.elapsed();
            self.report.rounds.push(Round { bytes: info.bytes, sent, ms: took.as_millis() as u64 });
            rounds.done(took, info.bytes);
            if rounds.is_to_be_loaded() {
                expect(self.way, self.link.ask(&ToTarget::Preload { name }), &ToSource::Ready)?;
            }
            before = Some(dir);
        }
        self.copy_memory()?;
        Ok(before)
    }

    /// Copies what of the processes' own memory the target does not have yet.
    fn copy_memory(&mut self) -> Result<(), Failure> {
        let began = Instant::now();
        let own = memory::own(self.pid, SHARE);
        self.own = own.private_bytes();
        if self.known.is_none() {
            return Ok(());
        }
        if self.report.memory.is_empty() {
            let lists = memory::lists(&own).context("cannot list the processes' memory")?;
            match self.link.ask(&ToTarget::Directory(memory::directory(&own, &lists))) {
                // Then all of it comes while the processes stand still.
                Ok(ToSource::Failed { reason, .. }) => {
                    output::warn(format_args!(
                        "the processes' own memory is sent at the end alone: {}: {reason}",
                        self.way.host()
                    ));
                    self.known = None;
                }
                answer => {
                    expect(self.way, answer, &ToSource::Made)?;
                    send_all(self.way, &mut self.streams, &lists, |to, (name, list), _| {
                        let mut pieces = list.chunks(PIECE).zip((0..).step_by(PIECE));
                        pieces.try_for_each(|(piece, at)| stream::send_piece(to, name, at, piece))?;
                        Ok(list.len() as u64)
                    })?;
                }
            }
            self.known.iter_mut().for_each(|it| it.has_files_for(&own));
        }
        let Some(known) = &mut self.known else { return Ok(()) };
        let mut extents = own.extents;
        extents.retain(|it| known.takes(it));
        let new = Mutex::new(Vec::new());
        let sent = send_all(self.way, &mut self.streams, &extents, |to, extent, piece| {
            let mut some = Vec::new();
            let sent = memory::send(to, extent, piece, known, &mut some)?;
            new.lock().unwrap_or_else(PoisonError::into_inner).extend(some);
            Ok(sent)
        })?;
        known.add(new.into_inner().unwrap_or_else(PoisonError::into_inner));
        let bytes = extents.iter().map(|it| it.length).sum();
        self.report.memory.push(Round { bytes, sent, ms: millis(began) });
        Ok(())
    }

    /// Dumps the processes, has the target restore them, and hands them over.
    fn dump_and_hand_over(&mut self, before: Option<&Path>) -> Result<(), Failure> {
        let span = span::begin();
        let (root, migration, container) = (self.pid, self.name.clone(), self.container.is_some());
        let migrate = Request::Migrate { root, migration, container, span };
        let order = match Session::open(&self.socket, &migrate) {
            Ok((order, Reply::Awaited)) => order,
            Ok(_) => return Err(self.abandon(daemon::unexpected_answer().into())),
            Err(failure) => return Err(self.abandon(failure)),
        };
        let Dumped { since, memory_ms, criu } = match self.dump(&order, before) {
            Ok(dumped) => dumped,
            Err(NotDumped(failure, criu)) => return Err(self.keep(order, criu, failure)),
        };
        let dump_ms = millis(since).saturating_sub(memory_ms);
        let mut pause = Pause { dump_ms, memory_ms, ..Pause::default() };
        let mut began = Instant::now();
        let restored = self.send_last().and_then(|sent| {
            self.report.last_sent += sent;
            pause.send_ms = millis(std::mem::replace(&mut began, Instant::now()));
            let restore = Restore {
                name: self.last(),
                options: self.options.kept().options().map(str::to_owned).collect(),
                container: self.container.as_ref().map(|it| it.id().to_owned()),
                restart: self.container.as_ref().and_then(|it| it.restart_policy()).map(str::to_owned),
                addresses: self.leaving.addresses().to_vec(),
                other_driver: self.options.allow_other_driver,
                other_gpu: self.options.allow_other_gpu,
                lazy: self.options.lazy,
            };
            expect(self.way, self.link.ask(&ToTarget::Restore(restore)), &ToSource::Held)?;
            pause.restore_ms = millis(std::mem::replace(&mut began, Instant::now()));
            self.leaving.note()?;
            // Others may have come in since.
            self.container.as_ref().map_or(Ok(()), Container::is_alone)
        });
        if let Err(failure) = restored {
            return Err(self.keep(order, criu, failure));
        }
        if let Err(failure) = hand_over(&order) {
            // Was it decided before the daemon failed?
            match decision(&self.socket, &self.name, order) {
                Ok(MigrationState::HandedOver) => {}
                Ok(MigrationState::Kept) => return Err(self.keep_decided(criu, failure)),
                Ok(_) | Err(_) => return Err(self.undecided(failure)),
            }
        }
        self.report.is_moved();
        let frozen = self.container.as_ref().map_or(Ok(()), Container::freeze);
        // The next try to settle it freezes it first, too.
        frozen.map_err(|failure| failure.but(format!("its copy waits there for `{}`", self.settle_command())))?;
        if let Err(failure) = self.leaving.are_gone() {
            // Two hosts would have an address. The guard keeps trying.
            self.leaving.are_undecided();
            return Err(failure.but(format!("its copy waits there for `{}`", self.settle_command())));
        }
        let owned = self.own();
        pause.hand_over_ms = millis(began);
        (self.report.pause_ms, self.report.pause) = (Some(millis(since)), Some(pause));
        if let Some(mut criu) = criu {
            // It kills what is left here.
            let _ = criu.wait();
        }
        self.leaving.unlock();
        owned?;
        let removed = self.container.as_ref().map_or(Ok(()), Container::remove);
        removed.map_err(|failure| settle::not_removed(self.options, &self.name, self.way.host(), failure))
    }

    /// The name of the directory of the last dump.
    fn last(&self) -> String {
        if self.container.is_some() { format!("{LAST}-{}", self.name) } else { LAST.to_owned() }
    }

    /// The command that settles this migration.
    fn settle_command(&self) -> String {
        self.options.settle_command(&self.name, self.way.host(), &[])
    }

    /// Sends the last image, and podman's archive of a container. Returns the bytes of their content.
    fn send_last(&mut self) -> Result<u64, Failure> {
        let last = self.last();
        let mut sent = 0;
        if self.sent.is_empty() && self.known.is_some() {
            sent += self.send_memory(&self.dir.join(&last))?;
        }
        sent += self.send(&last)?;
        Ok(sent + if self.container.is_some() { self.send(ARCHIVE)? } else { 0 })
    }

    /// Has CRIU or podman dump the tree, until the image is complete.
    fn dump(&mut self, order: &Session, before: Option<&Path>) -> Result<Dumped, NotDumped> {
        let last = self.last();
        let dir = self.make(&last)?;
        if let Some(before) = before {
            base::link(&dir, before)?;
        }
        let log = dir.join(LOG);
        let (mut command, left) = match &mut self.container {
            None => {
                let mut command = by_criu(self.options, self.pid, &dir, &log)?;
                command.args(self.leaving.option());
                let left = frozen::is_best_left(self.pid, self.own).then(|| frozen::PageKeeper::arrange(&mut command));
                (command, left.transpose().context("cannot make a connection for CRIU")?)
            }
            Some(container) => {
                container.link(&self.lock, &last)?;
                container.forbid_restart()?;
                (container.checkpoint(&make(&self.dir, ARCHIVE)?.join(ARCHIVE), self.options.kept()), None)
            }
        };
        let (mut left, inherited) = left.unzip();
        let program = command.get_program().to_string_lossy().into_owned();
        command.env("REKINDLE_SOCKET", &self.socket);
        self.leaving.stand_still()?;
        let mut dumper = command.spawn().with_context(|| format!("cannot run {program}"))?;
        drop(inherited);
        let (mut still_since, mut memory_ms) = (None, 0);
        loop {
            let info = progress(order);
            if info.as_ref().is_some_and(|it| STILL.contains(&it.phase.as_str())) {
                still_since.get_or_insert_with(Instant::now);
            }
            if let (Some(since), Some(HAND_OVER)) = (still_since, info.as_ref().map(|it| it.phase.as_str())) {
                if left.is_some() {
                    let failure = anyhow!("{program} has left pages in the processes, and has not said so").into();
                    return Err(NotDumped(failure, Some(dumper)));
                }
                return Ok(Dumped { since, memory_ms, criu: Some(dumper) });
            }
            if left.as_mut().is_some_and(frozen::PageKeeper::is_ready) {
                let began = Instant::now();
                let sent = self.send_memory(&dir);
                // CRIU goes on.
                left = None;
                match sent {
                    Ok(sent) => self.report.last_sent += sent,
                    Err(failure) => return Err(NotDumped(failure, Some(dumper))),
                }
                memory_ms = millis(began);
            }
            if let Some(status) = dumper.try_wait().with_context(|| format!("cannot wait for {program}"))? {
                let errors = match &self.container {
                    Some(container) if status.success() => {
                        container.unlink();
                        let since = still_since.unwrap_or_else(Instant::now);
                        return Ok(Dumped { since, memory_ms, criu: None });
                    }
                    Some(container) => container.errors(&said(&mut dumper)),
                    None => criu::errors(&String::from_utf8_lossy(&fs::read(&log).unwrap_or_default())),
                };
                return Err(failed(&failure_of(order), &errors, &format!("{program} ended with {status}")).into());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Sends the pages of the last image that the target does not have: CRIU has left them in the processes, or written them. Returns the
    /// bytes of their content that were sent.
    fn send_memory(&mut self, dir: &Path) -> Result<u64, Failure> {
        let name = self.last();
        let dumped = DumpedPages::of_image(dir)?;
        let pages = dumped.into_iter().map(|it| Pages::open(it, &name, dir)).collect::<Result<Vec<_>, _>>()?;
        let nothing = Known::new(0);
        let known = self.known.as_ref().unwrap_or(&nothing);
        let unwritable = pages.iter().map(Pages::unwritable).fold(0, u64::saturating_add);
        let mut changes =
            frozen::changes(&pages, known, |_| unwritable <= MOST_UNWRITABLE).map_err(|error| anyhow!(error))?;
        // Of a process that has a parent image, CRIU brings what is not there before the process runs.
        let changed: BTreeSet<u32> = changes.iter().filter_map(Changes::of_changed_process).collect();
        if self.options.lazy && !changed.is_empty() && changes.iter().any(Changes::have_parent) {
            changes = frozen::changes(&pages, known, |it| !changed.contains(&it)).map_err(|error| anyhow!(error))?;
        }
        let listed = changes.iter().try_for_each(|it| it.list(dir));
        listed.with_context(|| format!("cannot write CRIU's lists of pages in {}", dir.display()))?;
        let mut directory = Directory { name, ..Directory::default() };
        directory.files = changes.iter().map(Changes::file).collect();
        if changes.iter().any(Changes::have_parent) {
            directory.links.push((PARENT.to_owned(), format!("../{MEMORY}")));
        }
        self.report.unchanged = changes.iter().map(Changes::in_parent).sum();
        self.sent = directory.files.iter().map(|(file, _)| file.clone()).collect();
        self.makes(directory)?;
        let changed: Vec<_> = changes.into_iter().flat_map(Changes::changed).collect();
        send_all(self.way, &mut self.streams, &changed, |to, it, piece| it.send(to, piece))
    }

    /// Tells the target that the processes are its own, until it is heard or that lasts too long.
    fn own(&mut self) -> Result<(), Failure> {
        let answer = match self.link.ask(&ToTarget::Own) {
            Ok(answer) => answer,
            Err(error) => {
                output::warn(format_args!("{error}; the processes are handed over: trying again"));
                settle::tell(self.way, &self.decided(true)).map_err(|failure| {
                    let host = self.way.host();
                    let keep = settle::advice(self.options, &self.name, host, Remedy::Keep);
                    failure.but(format!(
                        "the processes are handed over to {host}, which does not answer{keep}. Otherwise they wait there for `{}`",
                        self.settle_command()
                    ))
                })?
            }
        };
        match answer {
            ToSource::Running => Ok(()),
            ToSource::Failed { kind, reason, kept, remedy } => {
                let what = if kept { ", where their image is complete" } else { "" };
                let host = self.way.host();
                let remedy = settle::advice(self.options, &self.name, host, remedy);
                let said = format!("the processes are handed over to {host}{what}: {reason}{remedy}");
                Err(Failure::of_kind(kind, anyhow!(said)))
            }
            other => Err(unexpected(self.way, &other)),
        }
    }

    /// The processes go on here: ends the dump, and tells the target.
    fn keep(&mut self, order: Session, criu: Option<Child>, failure: Failure) -> Failure {
        match decision(&self.socket, &self.name, order) {
            Ok(MigrationState::Kept) => self.keep_decided(criu, failure),
            Ok(MigrationState::HandedOver) => failure,
            Ok(_) | Err(_) => self.undecided(failure),
        }
    }

    fn keep_decided(&mut self, criu: Option<Child>, failure: Failure) -> Failure {
        if let Some(container) = &self.container {
            container.stays();
        }
        if let Some(mut criu) = criu {
            // It fails, and lets the processes run.
            let _ = criu.wait();
        }
        self.leaving.stay();
        self.abandon(failure)
    }

    /// The daemon does not say what it has decided.
    fn undecided(&mut self, failure: Failure) -> Failure {
        self.leaving.are_undecided();
        failure.but(format!(
            "the daemon does not answer, and has decided where the processes go on: start it, and run `{}`",
            self.settle_command()
        ))
    }

    /// The processes go on here: the target forgets the migration.
    fn abandon(&mut self, failure: Failure) -> Failure {
        let told = match self.link.ask(&ToTarget::Abandon) {
            Ok(answer) => Ok(answer),
            Err(_) if self.report.last_sent == 0 => return failure,
            Err(_) => settle::tell(self.way, &self.decided(false)),
        };
        let why = match told {
            Ok(ToSource::Abandoned) => return failure,
            Ok(ToSource::Failed { reason, .. }) => reason,
            Ok(other) => format!("it answers {other:?}"),
            Err(error) => error.to_string(),
        };
        output::warn(format_args!(
            "the processes go on here; {} may keep a copy that never runs ({why}): `{}` removes it",
            self.way.host(),
            self.settle_command()
        ));
        failure
    }

    /// What the target hears of the decision by another connection.
    fn decided(&self, own: bool) -> Settle {
        let container = self.container.as_ref().map(|it| it.id().to_owned());
        Settle { migration: self.name.clone(), own, again: false, container }
    }

    /// Makes one of the migration's directories.
    fn make(&self, name: &str) -> Result<PathBuf, Failure> {
        make(&self.dir, name)
    }

    /// Has the target make files.
    fn makes(&mut self, directory: Directory) -> Result<(), Failure> {
        match self.link.ask(&ToTarget::Directory(directory)) {
            Ok(ToSource::Made) => Ok(()),
            answer => Err(refusal(self.way, answer)),
        }
    }

    /// Sends one of the migration's directories. Returns the bytes of its files' content.
    fn send(&mut self, name: &str) -> Result<u64, Failure> {
        let dir = self.dir.join(name);
        let (mut directory, mut extents) = list(name, &dir)?;
        let is_there = |file: &str| name == self.last() && self.sent.iter().any(|it| it == file);
        directory.files.retain(|(file, _)| !is_there(file));
        extents.retain(|it| !it.name.rsplit('/').next().is_some_and(is_there));
        self.makes(directory)?;
        let known = self.known.as_ref();
        send_all(self.way, &mut self.streams, &extents, |to, extent, piece| match known {
            Some(known) if memory::has_pages(extent) => memory::send_dumped(to, extent, piece, known),
            _ => stream::send(to, extent, piece),
        })
    }
}

/// Milliseconds since then.
fn millis(since: Instant) -> u64 {
    since.elapsed().as_millis() as u64
}

/// Makes a directory in this one.
fn make(dir: &Path, name: &str) -> Result<PathBuf, Failure> {
    let dir = dir.join(name);
    fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// Makes the directory of a migration from here, and locks it. Removes those of commands that were killed.
fn make_own(parent: &Path, name: &str) -> Result<(PathBuf, File), Failure> {
    let make = |dir: &Path| fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    super::parent::make(parent)?;
    let is_own = |path: &PathBuf| path.extension().is_some_and(|it| it == OWN);
    let before = fs::read_dir(parent).into_iter().flatten().flatten().map(|it| it.path()).filter(is_own);
    for dir in before {
        if File::open(&dir).is_ok_and(|it| it.try_lock().is_ok()) {
            let _ = fs::remove_dir_all(&dir);
        }
    }
    let dir = parent.join(name).with_extension(OWN);
    let made = make(&dir).and_then(|()| File::open(&dir)).and_then(|it| it.lock().map(|()| it));
    let lock = made.with_context(|| format!("cannot make {}", dir.display()))?;
    Ok((dir, lock))
}

/// The command by which CRIU dumps a process tree.
fn by_criu(options: &Options, pid: i32, dir: &Path, log: &Path) -> Result<Command, Failure> {
    let mut command = Command::new(criu::program(options.criu.as_deref())?);
    command.args(criu::dump(pid, dir, log)?).args(options.kept().options());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

/// What a program that has ended has written.
fn said(ended: &mut Child) -> Vec<u8> {
    let mut said = Vec::new();
    if let Some(pipe) = &mut ended.stderr {
        let _ = pipe.read_to_end(&mut said);
    }
    said
}

/// What moves.
fn what(options: &Options, socket: &Path, pid: i32) -> Result<What, Failure> {
    let Reply::Checked(processes) = daemon::ask(socket, &Request::Check { pid })? else {
        return Err(daemon::unexpected_answer().into());
    };
    if let Some(process) = processes.iter().find(|it| !it.reasons.is_empty()) {
        let CheckInfo { pid, command, reasons, .. } = process;
        return Err(Failure::refused(anyhow!("process {pid} ({command}) cannot be moved now: {}", reasons.join("; "))));
    }
    if processes.is_empty() {
        return Err(Failure::refused(anyhow!("no process of the tree of {pid} uses a GPU through Rekindle")));
    }
    let status = status(socket)?;
    let Reply::Clients(clients) = daemon::ask(socket, &Request::List)? else {
        return Err(daemon::unexpected_answer().into());
    };
    let ours = clients.iter().filter(|it| processes.iter().any(|process| process.pid == it.pid));
    let mut used = vec![0_u64; status.gpus.len()];
    for client in ours {
        for (used, memory) in used.iter_mut().zip(&client.device_memory) {
            *used = used.saturating_add(*memory);
        }
    }
    Ok(What {
        host: host_name(),
        driver_version: status.driver_version,
        gpus: status.gpus.into_iter().zip(used).filter(|(_, used)| *used > 0).collect(),
        memory: processes.iter().map(|it| it.device_memory).fold(0, u64::saturating_add),
        other_driver: options.allow_other_driver,
        other_gpu: options.allow_other_gpu,
        container: None,
        addresses: Vec::new(),
    })
}

/// The daemon's account of itself.
pub(super) fn status(socket: &Path) -> Result<StatusInfo, Failure> {
    match daemon::ask(socket, &Request::Status)? {
        Reply::Status(status) => Ok(status),
        _ => Err(daemon::unexpected_answer().into()),
    }
}

/// This host's name.
pub(super) fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim_end().to_owned()
}

fn progress(order: &Session) -> Option<DumpInfo> {
    match order.ask(&Request::Progress) {
        Ok(Reply::Progress(info)) => info,
        _ => None,
    }
}

/// Why the dump has failed, once the daemon has noticed it.
fn failure_of(order: &Session) -> Option<DumpInfo> {
    let began = Instant::now();
    loop {
        let info = progress(order);
        if info.as_ref().is_none_or(|it| it.outcome.is_some()) || began.elapsed() > NOTICE {
            return info;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The failure of a dump, as the daemon or CRIU tells it.
fn failed(info: &Option<DumpInfo>, errors: &[String], otherwise: &str) -> Failure {
    let said = info.as_ref().and_then(|it| it.outcome.as_ref());
    let (kind, reason) = match (said, errors.first()) {
        // The daemon has only noticed that CRIU ended; CRIU knows why.
        (Some(DumpOutcome::Failed(failure)), Some(error)) if failure.kind == FailureKind::GivenUp => {
            (failure.kind, error.as_str())
        }
        (Some(DumpOutcome::Failed(failure)), _) => (failure.kind, failure.reason.as_str()),
        (_, Some(error)) => (FailureKind::Other, error.as_str()),
        _ => (FailureKind::Other, otherwise),
    };
    Failure::of_kind(kind, anyhow!("the processes cannot be dumped: {reason}"))
}

fn hand_over(order: &Session) -> Result<(), Failure> {
    match order.ask(&Request::HandOver)? {
        Reply::HandedOver => Ok(()),
        _ => Err(daemon::unexpected_answer().into()),
    }
}

/// What the daemon has decided, now that this connection is closed.
fn decision(socket: &Path, name: &str, order: Session) -> Result<MigrationState, Failure> {
    drop(order);
    let began = Instant::now();
    loop {
        match settle::decision(socket, name) {
            // It has not noticed yet that the connection is closed, or another daemon starts.
            Ok(MigrationState::Undecided) | Err(_) if began.elapsed() < NOTICE => {}
            decided => return decided,
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The answer must be this one.
fn expect(way: &dyn Way, answer: Result<ToSource, super::talk::TalkError>, expected: &ToSource) -> Result<(), Failure> {
    match answer {
        Ok(answer) if answer == *expected => Ok(()),
        answer => Err(refusal(way, answer)),
    }
}

/// The failure that an answer is which was not expected.
fn refusal(way: &dyn Way, answer: Result<ToSource, super::talk::TalkError>) -> Failure {
    match answer {
        Ok(ToSource::Failed { kind, reason, .. }) => Failure::of_kind(kind, anyhow!("{}: {reason}", way.host())),
        Ok(other) => unexpected(way, &other),
        Err(error) => anyhow!("{}: {error}", way.host()).into(),
    }
}

fn unexpected(way: &dyn Way, answer: &ToSource) -> Failure {
    anyhow!("{} answers {answer:?}: install one version of Rekindle on both hosts", way.host()).into()
}
