//! The beginning of a dump, while its clients run: memory and files are prepared, memory is copied where the protocol says so,
//! and the clients are quiesced.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::{ImageDir, ImageWriter, PhaseName, Protocol};
use rekindle_wire::control::Reply;
use rekindle_wire::version;
use tracing::info;

use super::super::checkpoints::DumpGuard;
use super::super::clients::{Client, ClientState};
use super::super::groups::Stage;
use super::super::migrate::MigrationError;
use super::super::moment::wait_for_moment;
use super::super::native::Held;
use super::super::quiesce;
use super::super::{ipc, message, process, suspend, sys};
use super::error::{DumpError, SaveError};
use super::freeze::FreezeWatch;
use super::not_ours::NotOurs;
use super::precopy::Planned;
use super::quiesced::{Begun, Quiesced};
use super::save::protocol_of_all;
use super::tree::Tree;

/// A dump that has just begun.
pub(super) struct Pausing {
    dir: ImageDir,
    beside: Option<ImageDir>,
    /// The control version that the plugin speaks.
    wire: u32,
}

/// The state that a pause leads to.
pub(super) enum Paused {
    NotOurs(NotOurs),
    Quiesced(Box<Quiesced>),
}

impl Pausing {
    /// Begins with the image's directory and, if there is one, the directory of a second image.
    pub(super) fn new(fds: Vec<OwnedFd>, wire: u32) -> Result<Self, DumpError> {
        let open = |dir: OwnedFd| ImageDir::from_fd(dir.as_fd(), message::shown(&dir));
        let mut fds = fds.into_iter();
        match (fds.next(), fds.next(), fds.next()) {
            (Some(dir), beside, None) => Ok(Self { dir: open(dir)?, beside: beside.map(open).transpose()?, wire }),
            _ => Err(DumpError::NoDirectory),
        }
    }

    /// Quiesces the clients of the tree. On an error all of them run.
    pub(super) fn pause(self, tree: &Tree<'_>, under: &DumpGuard<'_>) -> Result<(Paused, Reply), DumpError> {
        let Self { dir, beside, wire } = self;
        let (daemon, progress) = (tree.daemon, &tree.progress);
        let (clients, pending) = tree.find(process::tree)?;
        tree.nobody_has_lost_its_worker(!clients.is_empty() || !pending.is_empty())?;
        let natives = tree.find_natives(&clients, wire)?;
        if clients.is_empty() && pending.is_empty() && tree.is_migrated() {
            return Err(MigrationError::NoClients.into());
        }
        if tree.is_to_stand_still() {
            may_stand_still(!natives.is_empty(), wire)?;
        }
        if clients.is_empty() && pending.is_empty() && natives.is_empty() {
            tree.reach(Stage::Prepared)?;
            return Ok((Paused::NotOurs(NotOurs { dir, beside }), Reply::Paused { pids: Vec::new() }));
        }
        tree.wait_until_loaded(&clients);
        let writer = tree.begin_image(dir)?;
        let memory = tree.memory_of(&clients)?;
        // A dump saves memory from the GPU.
        let clients = suspend::wake_held(daemon, clients)?;
        let needed = memory.iter().flatten().sum();
        check_space(&writer, needed)?;
        progress.clients(clients.iter().map(|it| &**it), needed);
        let planned = tree.plan(&clients, &memory, 0);
        progress.planned(protocol_of_all(&planned).protocol);
        let precopies = planned.iter().any(|it| it.chosen.protocol == Protocol::Recopy);
        if precopies {
            progress.phase(PhaseName::PreCopy);
        }
        let holders = planned.iter().filter(|it| it.chosen.reserves(0).is_some());
        let clones = daemon.copying.memory_pressure.hold(holders.map(|it| Arc::clone(&it.client.worker)));
        let planned = tree.prepare(&writer, planned)?;
        tree.reach(Stage::Prepared).inspect_err(|_| release(&planned))?;
        progress.phase(PhaseName::Quiesce);
        if precopies {
            // The moment of the image is this one.
            wait_for_moment(daemon, tree.stream, under).inspect_err(|_| release(&planned))?;
        }
        let quiesce_began = Instant::now();
        let native = &daemon.native;
        let held = Held::lock(native, natives, native.limits()).inspect_err(|_| release(&planned))?;
        let rings = quiesce::quiesce(&clients, daemon.config.timeouts.quiesce).inspect_err(|_| release(&planned))?;
        let idle_at = Instant::now();
        ipc::within(daemon, &clients)?;
        let ms = tree.began.elapsed().as_millis() as u64;
        info!(root = tree.root, clients = clients.len(), ms, "quiesced");
        let processes = clients.iter().map(|it| it.process);
        let processes = processes.chain(pending.iter().map(|it| it.process));
        let pids = processes.filter_map(|it| tree.view.to_theirs(it.pid)).collect();
        progress.phase(PhaseName::Freeze);
        let processes = clients.iter().map(|it| it.process).chain(held.all().into_iter().map(|it| it.process));
        let freeze = FreezeWatch::start(processes.collect());
        tree.hold_natives(held);
        let natives = tree.native_threads();
        let reply = match natives.is_empty() {
            true if tree.is_to_stand_still() => Reply::PausedStill { pids },
            true => Reply::Paused { pids },
            false => Reply::PausedNatives { pids, natives },
        };
        let begun = Begun { rings, planned, writer, clones, beside, quiesce_began, idle_at };
        Ok((Paused::Quiesced(Box::new(Quiesced { begun, freeze })), reply))
    }
}

/// Whether the tree of a container can stand still when this plugin's CRIU has left it.
fn may_stand_still(has_natives: bool, wire: u32) -> Result<(), MigrationError> {
    match (has_natives, wire) {
        (true, _) => Err(MigrationError::Natives),
        (_, ..version::STANDSTILL) => Err(MigrationError::OldPlugin),
        _ => Ok(()),
    }
}

/// How often a dump looks whether a restored client is loaded.
const LOADED_POLL: Duration = Duration::from_millis(10);

impl Tree<'_> {
    /// Waits while clients of a restore run whose memory is still being loaded; a restore that makes no progress ends them.
    /// CRIU's end ends the wait too, and the next step notices it.
    fn wait_until_loaded(&self, clients: &[Arc<Client>]) {
        let loads = |it: &Arc<Client>| it.state() == ClientState::Loading && it.process.is_alive();
        for client in clients.iter().filter(|it| loads(it)) {
            info!("{client}: the dump waits until its memory is loaded");
        }
        while clients.iter().any(loads) {
            if matches!(sys::wait_readable([self.stream.as_fd()], Some(LOADED_POLL)), Ok([true]) | Err(_)) {
                return;
            }
        }
    }

    /// Does the preparations that are possible while the clients run.
    fn prepare(&self, writer: &ImageWriter, mut planned: Vec<Planned>) -> Result<Vec<Planned>, DumpError> {
        let config = &self.daemon.config.checkpoint;
        let goes_on = || !matches!(sys::wait_readable([self.stream.as_fd()], Some(Duration::ZERO)), Ok([true]));
        let (quiesce, stall) = (self.daemon.config.timeouts.quiesce, self.daemon.config.timeouts.stall);
        let let_go = quiesce.begins();
        planned.iter().try_for_each(|it| quiesce::wait_until_let_go(&it.client, let_go))?;
        let (stage, clients) = (&self.daemon.copying.stage, planned.len());
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
}

/// Has workers give back, in the background, what they have prepared for a dump that does not begin.
fn release(planned: &[Planned]) {
    planned.iter().for_each(|it| quiesce::release(&it.client));
}

/// Checks that there is room for so many bytes of GPU memory, before anything is stopped. Memory that is all zero takes no
/// space, so this may refuse an image that would have fitted. An image that does not fit after all fails later, as does an
/// image that builds on another and has more of its own than there is room for: that is not known before memory is hashed.
fn check_space(writer: &ImageWriter, needed: u64) -> Result<(), DumpError> {
    let free = writer.dir().free_space()?;
    if needed > free && writer.base().is_none() {
        let directory = writer.dir().path().display().to_string();
        return Err(DumpError::Space { needed, free, directory, replaces: writer.replaces() });
    }
    Ok(())
}
