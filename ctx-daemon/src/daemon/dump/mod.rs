//! A dump: CRIU's plugin says what CRIU is doing, on one connection.
//!
//! ```text
//!            Pause (pre-copy)          Frozen (first)              Finish
//!  opened ──────────► quiesced ───────────────────► saving ───────────────► finishing ──► durable
//!            │  │       tree held, rings closed       │  sockets noted       │  rings open    │
//!            │  └─► not ours ───────────────────────────── Finish: an older image is removed  │
//!            ▼                                        ▼                      ▼   go on)       │
//!          failed ◄───────────── whatever goes wrong, or the connection closes                │
//!            └─► image removed, rings open, tree free        rings open, tree free ◄── closes ┘
//! ```
//!
//! An older image in the directory stays whole until the new one is committed, or until a dump of a tree without clients
//! has succeeded. CRIU overwrites its own files from the freeze on: before that the older image is marked, so that it is
//! never restored with files of another dump.
//!
//! The image's GPU side is the state at the quiesce. Rings stay closed until CRIU has written the processes' memory,
//! although the copy may be done before: what an open ring executes may write to memory that the application shares, and
//! that is in CRIU's image.
//!
//! A failure is told in reply to whatever is asked next. Nothing that a dump holds outlives its connection.

mod base;
mod beside;
mod error;
mod files;
mod freeze;
mod manifest;
mod precopy;
mod progress;
mod protocol;
mod quiesce;
mod save;
mod socket;

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::{CompressionChoice, CreateOptions, ImageDir, ImageError, ImageWriter, PhaseName, Protocol};
use rekindle_wire::control::{Failing, Failure, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use tracing::{debug, info, warn};

use self::error::{DumpError, SaveError};
pub(super) use self::files::MOST as MOST_DATA_FILES;
use self::freeze::FreezeWatch;
use self::manifest::{Unattached, Whose};
pub(super) use self::manifest::{driver_build, driver_version, gpu, is_unattached};
use self::precopy::Planned;
pub(super) use self::progress::Progress;
use self::protocol::Chosen;
use self::quiesce::ClosedRing;
use self::save::SaveJob;
use super::checkpoints::DumpGuard;
use super::clients::{Client, HoldGuard, Pending};
use super::ipc;
use super::message::{self, MAX_REQUEST};
use super::moment::wait_for_moment;
use super::pidns::PidView;
use super::process::{self, Process};
use super::room::HoldsRoom;
use super::sys::{self, Credentials};
use super::{Daemon, at_once};

/// A dump in progress.
struct Dump<'a> {
    daemon: &'a Arc<Daemon>,
    stream: &'a UnixStream,
    view: PidView,
    /// As the daemon sees it.
    root: i32,
    leave_running: bool,
    began: Instant,
    /// Pre-copies were made.
    quiesce_began: Instant,
    stage: Stage,
    sockets: Vec<(Whose, u32)>,
    progress: Arc<Progress>,
    /// From when memory is set aside until the copy is over.
    clones: Option<HoldsRoom>,
    /// Where another image is to be made at the same quiesce, by `stop`.
    beside: Option<ImageDir>,
    /// Last, so that a failure in dropping the rest does not let the tree go.
    _hold: HoldGuard,
}

enum Stage {
    /// There is no client in the tree. A process of it may have been frozen in the middle of a question.
    NotOurs(ImageDir),
    /// The state is in the hands of whoever changes it. It stays so when that fails.
    Taken,
    Quiesced {
        writer: Box<ImageWriter>,
        planned: Vec<Planned>,
        rings: Vec<ClosedRing>,
        idle_at: Instant,
        freeze: FreezeWatch,
    },
    Saving(SaveJob),
    Durable(#[expect(dead_code, reason = "held until the connection closes")] SaveJob),
    Failed(Failure),
}

/// Serves a dump from its `Pause` on, until the connection closes.
pub(super) fn serve(
    daemon: &Arc<Daemon>,
    stream: &UnixStream,
    peer: Credentials,
    root: i32,
    leave_running: bool,
    fds: Vec<OwnedFd>,
) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let ours = PidView::of(peer.pid).and_then(|view| view.to_ours(root));
    let under = daemon.checkpoints.begin(ours.unwrap_or(root));
    if let Err(error) = wait_for_moment(daemon, stream, &under) {
        warn!(root, "dump failed: {error}");
        let failure = error.failure();
        under.progress.failed(&failure);
        return message::fail(stream, failure);
    }
    let (mut dump, reply) = match Dump::pause(daemon, stream, peer, root, leave_running, fds, &under) {
        Ok(begun) => begun,
        Err(error) => {
            warn!(root, "dump failed: {error}");
            let failure = error.failure();
            under.progress.failed(&failure);
            return message::fail(stream, failure);
        }
    };
    message::reply(stream, &reply);
    loop {
        let request = match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) => message.body,
            Err(FrameError::Closed) => break,
            Err(error) => {
                warn!(root, "dump: closing the connection: {error}");
                message::fail(stream, error);
                break;
            }
        };
        match dump.serve(request) {
            Ok(reply) => message::reply(stream, &reply),
            Err(DumpError::Closed) => {
                warn!(root, "dump given up: its connection closed before the image was durable");
                break;
            }
            Err(error) => {
                let failure = error.failure();
                if !matches!(error, DumpError::Failed(_) | DumpError::Order(_)) {
                    warn!(root, "dump failed: {failure}");
                    under.progress.failed(&failure);
                    // What was held is let go at once: CRIU may take its time to give up.
                    dump.stage = Stage::Failed(failure.clone());
                }
                message::fail(stream, failure);
            }
        }
    }
    match dump.stage {
        Stage::NotOurs(_) | Stage::Taken | Stage::Durable(_) | Stage::Failed(_) => debug!(root, "dump over"),
        Stage::Quiesced { .. } | Stage::Saving(_) => {
            warn!(root, "dump given up: its connection closed before the image was durable");
        }
    }
}

impl<'a> Dump<'a> {
    /// Holds the tree and quiesces its clients. On an error all of them run.
    fn pause(
        daemon: &'a Arc<Daemon>,
        stream: &'a UnixStream,
        peer: Credentials,
        root: i32,
        leave_running: bool,
        fds: Vec<OwnedFd>,
        under: &DumpGuard<'_>,
    ) -> Result<(Self, Reply), DumpError> {
        let progress = &under.progress;
        let began = Instant::now();
        let view = PidView::of(peer.pid)?;
        let root = view.to_ours(root)?;
        let (dir, beside) = image_directories(fds)?;
        let hold = daemon
            .registry
            .hold(root, daemon.config.quiesce_timeout.begins())
            .map_err(|other| DumpError::Overlaps { root, other })?;
        let mut dump = Self {
            daemon,
            stream,
            view,
            root,
            leave_running,
            began,
            quiesce_began: began,
            stage: Stage::Taken,
            sockets: Vec::new(),
            progress: Arc::clone(progress),
            clones: None,
            beside,
            _hold: hold,
        };
        let (clients, pending) = dump.find(process::tree)?;
        dump.nobody_has_lost_its_worker(!clients.is_empty() || !pending.is_empty())?;
        if clients.is_empty() && pending.is_empty() {
            dump.stage = Stage::NotOurs(dir);
            return Ok((dump, Reply::Paused { pids: Vec::new() }));
        }
        let writer = begin_image(dir, daemon.config.compression)?;
        let memory = dump.memory_of(&clients)?;
        let needed = memory.iter().flatten().sum();
        check_space(&writer, needed)?;
        progress.clients(clients.iter().map(|it| &**it), needed);
        let planned = dump.plan(&clients, &memory, 0);
        let precopies = planned.iter().any(|it| it.chosen.protocol == Protocol::Recopy);
        if precopies {
            progress.phase(PhaseName::PreCopy);
        }
        let holders = planned.iter().filter(|it| it.chosen.reserves(0).is_some());
        dump.clones = Some(daemon.rooms.hold(holders.map(|it| Arc::clone(&it.client.worker))));
        let planned = dump.prepare(&writer, planned)?;
        progress.phase(PhaseName::Quiesce);
        if precopies {
            // The moment of the image is this one.
            wait_for_moment(daemon, stream, under).inspect_err(|_| release(&planned))?;
        }
        let quiesce_began = Instant::now();
        let rings = quiesce::quiesce(&clients, daemon.config.quiesce_timeout).inspect_err(|_| release(&planned))?;
        let idle_at = Instant::now();
        dump.quiesce_began = quiesce_began;
        ipc::within(daemon, &clients)?;
        let ms = began.elapsed().as_millis() as u64;
        info!(root, clients = clients.len(), ms, "quiesced");
        let processes = clients.iter().map(|it| it.process);
        let processes = processes.chain(pending.iter().map(|it| it.process));
        let pids = processes.filter_map(|it| view.to_theirs(it.pid)).collect();
        progress.phase(PhaseName::Freeze);
        let freeze = FreezeWatch::start(clients.iter().map(|it| it.process).collect());
        let writer = Box::new(writer);
        dump.stage = Stage::Quiesced { writer, planned, rings, idle_at, freeze };
        Ok((dump, Reply::Paused { pids }))
    }

    /// How much memory each client has on each device. The first that their workers hear of this dump: they may be
    /// stopped, or in a long call, just as when they are to come to rest.
    fn memory_of(&self, clients: &[Arc<Client>]) -> Result<Vec<Vec<u64>>, SaveError> {
        let deadline = self.daemon.config.quiesce_timeout.begins();
        let memory = at_once(clients, |client| {
            client.worker.device_memory(deadline).map_err(|error| SaveError::of(client, &error))
        });
        memory.into_iter().collect()
    }

    /// Decides how each client is dumped, which has so much memory on each device.
    fn plan(&self, clients: &[Arc<Client>], memory: &[Vec<u64>], first: u32) -> Vec<Planned> {
        let planned = (first..).zip(clients.iter().zip(memory)).map(|(index, (client, memory))| {
            let bytes = memory.iter().sum();
            let (asked, who) = self.daemon.protocol_of(client);
            let chosen = Chosen::new(asked, &who, bytes, self.leave_running);
            info!(%client, "{}: {}", chosen.protocol.as_str(), chosen.reason);
            let files = files::worth(bytes, self.daemon.config.file_bytes);
            Planned::new(Arc::clone(client), (index, files), chosen, self.daemon.links.join(client, memory))
        });
        planned.collect()
    }

    /// Does what can be done while the clients run.
    fn prepare(&self, writer: &ImageWriter, mut planned: Vec<Planned>) -> Result<Vec<Planned>, DumpError> {
        let config = &self.daemon.config.checkpoint;
        let goes_on = || !matches!(sys::wait_readable([self.stream.as_fd()], Some(Duration::ZERO)), Ok([true]));
        let (quiesce, stall) = (self.daemon.config.quiesce_timeout, self.daemon.config.stall_timeout);
        let let_go = quiesce.begins();
        planned.iter().try_for_each(|it| quiesce::wait_until_let_go(&it.client, let_go))?;
        let (stage, clients) = (&self.daemon.stage, planned.len());
        let prepare = |it: &mut Planned| {
            it.pace(quiesce)?;
            let staged = stage.lend(&it.client.worker, clients, stall);
            it.staged = staged.map_err(|error| SaveError::of(&it.client, &error))?.map(Arc::new);
            it.reserve(config.cow_pool, stall)?;
            it.precopy(writer, config.recopy_rounds, stall, goes_on)
        };
        let results: Vec<Result<(), SaveError>> = std::thread::scope(|scope| {
            let asked: Vec<_> = planned.iter_mut().map(|it| scope.spawn(|| prepare(it))).collect();
            asked.into_iter().filter_map(|it| it.join().ok()).collect()
        });
        match results.into_iter().collect::<Result<(), _>>() {
            Ok(()) => Ok(planned),
            Err(error) => {
                release(&planned);
                Err(error.into())
            }
        }
    }

    fn serve(&mut self, request: Request) -> Result<Reply, DumpError> {
        if let Stage::Failed(failure) = &self.stage {
            return Err(DumpError::Failed(failure.clone()));
        }
        match request {
            Request::Frozen { pid } => self.frozen(pid),
            Request::Socket { id, cookie } => self.socket(id, cookie),
            Request::Finish => self.finish(),
            _ => Err(DumpError::Order("something else")),
        }
    }

    /// The clients of the tree as it is now, and the processes whose handshake has begun: in the tree that runs, or is frozen.
    fn find(&self, tree: fn(i32) -> io::Result<Vec<i32>>) -> Result<(Vec<Arc<Client>>, Vec<Pending>), DumpError> {
        let tree = tree(self.root).map_err(DumpError::Tree)?;
        let registry = &self.daemon.registry;
        Ok((registry.clients_among(&tree), registry.pending_among(&tree)))
    }

    /// A process without its worker has no GPU state to save, and would find that out after a restore only.
    fn nobody_has_lost_its_worker(&self, ours: bool) -> Result<(), DumpError> {
        let tree = process::tree(self.root).map_err(DumpError::Tree)?;
        match self.daemon.lost.in_tree(&tree, ours) {
            Some(why) => Err(DumpError::WithoutWorker(why)),
            None => Ok(()),
        }
    }

    fn frozen(&mut self, pid: i32) -> Result<Reply, DumpError> {
        let pid = self.view.to_ours(pid)?;
        match &self.stage {
            Stage::Quiesced { .. } => self.start_saving()?,
            Stage::Saving(job) => job.check()?,
            Stage::NotOurs(dir) => {
                disown_older_image(dir);
                return Ok(Reply::Frozen { ours: false });
            }
            Stage::Taken | Stage::Durable(_) | Stage::Failed(_) => return Err(DumpError::Order("Frozen")),
        }
        let registry = &self.daemon.registry;
        let ours = !registry.clients_among(&[pid]).is_empty() || !registry.pending_among(&[pid]).is_empty();
        Ok(Reply::Frozen { ours })
    }

    /// The tree is frozen, so it is as it will be dumped: what changed since the quiesce is made up for.
    fn start_saving(&mut self) -> Result<(), DumpError> {
        let stage = std::mem::replace(&mut self.stage, Stage::Taken);
        let (writer, mut planned, mut rings, mut idle_at, frozen_at) = match stage {
            Stage::Quiesced { writer, planned, rings, idle_at, freeze } => {
                (*writer, planned, rings, idle_at, freeze.stopped_at())
            }
            Stage::NotOurs(dir) => {
                let writer = begin_image(dir, self.daemon.config.compression)?;
                (writer, Vec::new(), Vec::new(), Instant::now(), Instant::now())
            }
            _ => return Err(DumpError::Order("Frozen")),
        };
        for ring in &rings {
            if ring.client().worker.is_dead() && ring.client().process.is_alive() {
                return Err(DumpError::LostWorker(ring.client().to_string()));
            }
        }
        rings.retain(|it| !it.client().worker.is_dead());
        let (mut clients, _) = self.find(process::frozen_tree)?;
        clients.retain(|it| !rings.iter().any(|ring| Arc::ptr_eq(ring.client(), it)));
        if !clients.is_empty() {
            rings.extend(quiesce::quiesce(&clients, self.daemon.config.quiesce_timeout)?);
            idle_at = Instant::now();
        }
        let is_there = |it: &Planned| rings.iter().any(|ring| Arc::ptr_eq(ring.client(), &it.client));
        if let Some(gone) = planned.iter().find(|it| it.files.is_some() && !is_there(it)) {
            return Err(DumpError::EndedMeanwhile(gone.client.to_string()));
        }
        planned.retain(is_there);
        let next = planned.iter().map(|it| it.index + 1).max().unwrap_or(0);
        let memory = self.memory_of(&clients)?;
        planned.extend(self.plan(&clients, &memory, next));
        writer.disown()?;
        let clients: Vec<_> = planned.iter().map(|it| Arc::clone(&it.client)).collect();
        if let Some(dir) = self.beside.take() {
            self.save_beside(dir, &planned)?;
        }
        let sharing = ipc::within(self.daemon, &clients)?;
        let how = save::How {
            began: self.began,
            quiesce_began: self.quiesce_began,
            idle_at,
            frozen_at,
            leave_running: self.leave_running,
            quiesce: self.daemon.config.quiesce_timeout,
            stall: self.daemon.config.stall_timeout,
            sharing,
            progress: Arc::clone(&self.progress),
        };
        let job = SaveJob::start(writer, rings, planned, how);
        self.stage = Stage::Saving(job.map_err(DumpError::Thread)?);
        Ok(())
    }

    /// Notes whose socket it is, if it is one of ours. With it a tree without clients becomes ours as well.
    fn socket(&mut self, id: u32, cookie: u64) -> Result<Reply, DumpError> {
        let whose = match &self.stage {
            Stage::Saving(job) => self.whose(job.clients(), cookie),
            Stage::NotOurs(_) => self.whose(&[], cookie),
            _ => None,
        };
        let Some((whose, again)) = whose else {
            return Ok(Reply::Socket { ours: false, again: false });
        };
        if matches!(self.stage, Stage::NotOurs(_)) {
            self.start_saving()?;
        }
        // It is asked again for one that has something to be read.
        self.sockets.retain(|(_, before)| *before != id);
        self.sockets.push((whose, id));
        Ok(Reply::Socket { ours: true, again })
    }

    /// Whose a socket is, and whether what it has not read yet may be lost, since it asks again.
    fn whose(&self, clients: &[Arc<Client>], cookie: u64) -> Option<(Whose, bool)> {
        let path = &self.daemon.config.socket;
        // A process that is gone, or of which we may see nothing, has no socket of ours.
        let leads_here = |process: Process| socket::leads_to(process.pid, cookie, path).unwrap_or(false);
        let of_client = |client: &&Arc<Client>| match client.attach.cookie {
            0 => leads_here(client.process),
            known => known == cookie,
        };
        if let Some(client) = clients.iter().find(of_client) {
            return Some((Whose::Client(client.process), false));
        }
        let (_, pending) = self.find(process::frozen_tree).ok()?;
        let of_pending = |pending: &&Pending| match &pending.attach {
            None => leads_here(pending.process),
            Some(attach) => attach.cookie == cookie,
        };
        if let Some(Pending { process, attach, .. }) = pending.iter().find(of_pending) {
            return Some((Whose::Unattached(Unattached::new(*process, attach.as_ref(), path)), false));
        }
        // A question, which may have its answer already.
        let tree = process::frozen_tree(self.root).ok()?;
        let mut tree = tree.into_iter().filter_map(|pid| Process::with_pid(pid).ok());
        let asks = tree.find(|process| leads_here(*process))?;
        Some((Whose::Unattached(Unattached::new(asks, None, path)), true))
    }

    /// Waits until the image is durable. The plugin has resumed the tasks, if they are to go on.
    fn finish(&mut self) -> Result<Reply, DumpError> {
        let job = match std::mem::replace(&mut self.stage, Stage::Taken) {
            Stage::Saving(job) => job,
            // Nobody's GPU state is in this dump. An older image beside it would have a restore look for processes that it
            // does not have.
            Stage::NotOurs(dir) => {
                remove_older_image(&dir);
                self.stage = Stage::NotOurs(dir);
                return Ok(Reply::Durable);
            }
            stage => {
                self.stage = stage;
                return Err(DumpError::Order("Finish"));
            }
        };
        for client in job.clients() {
            let dumped =
                |(whose, _): &(Whose, u32)| matches!(whose, Whose::Client(process) if *process == client.process);
            if !self.sockets.iter().any(dumped) {
                return Err(DumpError::NoSocket(client.to_string()));
            }
        }
        job.finish(std::mem::take(&mut self.sockets));
        let committed = job.wait(self.stream)?;
        self.clones = None;
        self.progress.durable(&committed);
        info!(
            root = self.root,
            id = %committed.id,
            bytes = committed.bytes,
            files = committed.files,
            ms = self.began.elapsed().as_millis() as u64,
            "durable"
        );
        self.stage = Stage::Durable(job);
        Ok(Reply::Durable)
    }
}

/// What was prepared for a dump that does not begin is given back in the background.
fn release(planned: &[Planned]) {
    planned.iter().for_each(|it| quiesce::release(&it.client));
}

/// What CRIU writes last, with a name of its own for each of its runs in it since 4.1 (`dump_criu_run_id` of
/// `images/inventory.proto`): it tells the dumps that are made into a directory from each other.
const INVENTORY: &str = "inventory.img";

/// CRIU is replacing its own images in there.
fn begin_image(dir: ImageDir, compression: CompressionChoice) -> Result<ImageWriter, ImageError> {
    let base = base::find(&dir)?;
    let options = CreateOptions { replace: true, compression, companion: Some(INVENTORY), ..CreateOptions::new()? };
    ImageWriter::create_on(dir, options, base)
}

/// The image's, and the one beside it if there is one.
fn image_directories(fds: Vec<OwnedFd>) -> Result<(ImageDir, Option<ImageDir>), DumpError> {
    let open = |dir: OwnedFd| ImageDir::from_fd(dir.as_fd(), message::shown(&dir));
    let mut fds = fds.into_iter();
    match (fds.next(), fds.next(), fds.next()) {
        (Some(dir), beside, None) => Ok((open(dir)?, beside.map(open).transpose()?)),
        _ => Err(DumpError::NoDirectory),
    }
}

/// How many bytes of GPU memory there are, before anything is stopped. What is zero throughout takes no space, so this may
/// refuse what would have fitted. What it lets through and does not fit fails later, as does an image that builds on
/// another and has more of its own than there is room for: that is not known before memory is hashed.
fn check_space(writer: &ImageWriter, needed: u64) -> Result<(), DumpError> {
    let free = writer.dir().free_space()?;
    if needed > free && writer.base().is_none() {
        let directory = writer.dir().path().display().to_string();
        return Err(DumpError::Space { needed, free, directory, replaces: writer.replaces() });
    }
    Ok(())
}

/// CRIU's image of a tree without GPU state must not lie beside our image of another dump: a restore would take the two
/// for one.
fn remove_older_image(dir: &ImageDir) {
    if let Err(error) = dir.try_clone().and_then(ImageWriter::remove_image) {
        warn!(directory = %dir.path().display(), "cannot remove an older image: {error}");
    }
}

/// The same until that dump has come to its end. Of a tree that is not ours nothing fails; should this not succeed, a
/// restore still finds that CRIU's inventory is another.
fn disown_older_image(dir: &ImageDir) {
    let options = CreateOptions::new().map(|it| CreateOptions { replace: true, ..it });
    let writer = options.and_then(|options| ImageWriter::create(dir.try_clone()?, options));
    if let Err(error) = writer.and_then(|it| it.disown()) {
        warn!(directory = %dir.path().display(), "cannot mark an older image: {error}");
    }
}
