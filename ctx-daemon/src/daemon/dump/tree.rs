//! The tree that is dumped: the data that all states of a dump use.

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use rekindle_images::{CreateOptions, ImageDir, ImageError, ImageWriter, Native, NativeGpu};
use rekindle_wire::control::{Failing as _, Failure, NativeThread, Reply};
use rekindle_wire::version::NATIVES;
use tracing::{info, warn};

use super::super::clients::{Client, Held, HoldGuard, Holder, Pending};
use super::super::groups::{Member, Stage, TogetherError};
use super::super::migrate::{HandedOver, Migration, MigrationError};
use super::super::native::{Found, Held as HeldNatives, NativeError};
use super::super::pidns::PidView;
use super::super::process::{self, Process};
use super::super::sys::{self, Credentials};
use super::super::{Daemon, at_once};
use super::error::{DumpError, SaveError};
use super::manifest::{Unattached, Whose};
use super::precopy::Planned;
use super::progress::Progress;
use super::protocol::Chosen;
use super::{base, files, socket};

/// A tree of processes during its dump. While this value lives, no process of the tree gets a worker.
pub(super) struct Tree<'a> {
    pub(super) daemon: &'a Arc<Daemon>,
    pub(super) stream: &'a UnixStream,
    pub(super) view: PidView,
    /// The process that all others descend from, as the daemon sees it.
    pub(super) root: i32,
    pub(super) leave_running: bool,
    pub(super) began: Instant,
    pub(super) progress: Arc<Progress>,
    /// Its part in the dumps that are made at one moment with this one.
    member: Member,
    /// The migration that the dump is made for.
    migration: Option<Arc<Migration>>,
    /// The native processes, once they are locked.
    natives: OnceLock<HeldNatives>,
    _hold: HoldGuard,
}

impl Drop for Tree<'_> {
    /// A dump that has ended before the tree was handed over leaves it here.
    fn drop(&mut self) {
        if let Some(migration) = &self.migration {
            migration.dump_ends();
        }
    }
}

impl<'a> Tree<'a> {
    /// Holds the tree of a process that the peer calls `root`.
    pub(super) fn hold(
        daemon: &'a Arc<Daemon>,
        stream: &'a UnixStream,
        peer: Credentials,
        root: i32,
        leave_running: bool,
        progress: &Arc<Progress>,
        member: Member,
    ) -> Result<Self, DumpError> {
        let began = Instant::now();
        let view = PidView::of(peer.pid)?;
        let root = view.to_ours(root)?;
        let waits = |other: Held, waited| waited < other.patience(&daemon.config.timeouts) && !sys::is_hung_up(stream);
        let hold = daemon.clients.registry.hold(root, Holder::Dump, waits);
        let hold = hold.map_err(|other| DumpError::Overlaps { root, other })?;
        let progress = Arc::clone(progress);
        let migration = daemon.migrations.of(root);
        match migration.as_ref().map(|it| (it.is_container(), leave_running)) {
            Some((false, true)) => return Err(MigrationError::LeftRunning.into()),
            Some((true, false)) => return Err(MigrationError::NotLeft.into()),
            _ => {}
        }
        if let Some(migration) = &migration {
            let tree = process::tree(root).map_err(DumpError::Tree)?;
            migration.note_stopped(&tree.into_iter().filter_map(|it| Process::with_pid(it).ok()).collect::<Vec<_>>());
        }
        Ok(Self {
            daemon,
            stream,
            view,
            root,
            leave_running,
            began,
            progress,
            member,
            migration,
            natives: OnceLock::new(),
            _hold: hold,
        })
    }

    /// Waits until all dumps that are made at one moment with this one have come to this stage.
    pub(super) fn reach(&self, stage: Stage) -> Result<(), TogetherError> {
        self.member.reach(stage, self.stream)
    }

    /// Waits until the images of all these dumps are on disk, if CRIU is to kill the tree.
    pub(super) fn all_are_durable(&self) -> Result<(), TogetherError> {
        if self.leave_running { Ok(()) } else { self.reach(Stage::Durable) }
    }

    /// Waits until the tree, which is frozen, goes on on another host, if it is migrated. A container stands still instead: its engine
    /// has work to do first.
    pub(super) fn wait_until_handed_over(&self) -> Result<Option<HandedOver>, DumpError> {
        let Some(migration) = &self.migration else { return Ok(None) };
        let tree = process::frozen_tree(self.root).map_err(DumpError::Tree)?;
        // What has ended, and waits for its parent, cannot run.
        let tree = tree.into_iter().filter_map(|pid| Process::with_pid(pid).ok()).filter(Process::is_alive).collect();
        if migration.is_container() {
            self.daemon.migrations.stand_still(migration, tree)?;
            return Ok(None);
        }
        self.progress.waits_for_hand_over(true);
        let handed_over = migration.wait(tree, self.stream);
        self.progress.waits_for_hand_over(false);
        Ok(Some(handed_over?))
    }

    /// Whether the tree is migrated.
    pub(super) fn is_migrated(&self) -> bool {
        self.migration.is_some()
    }

    /// Whether the tree is a container that is migrated: it is to stand still when CRIU has left it.
    pub(super) fn is_to_stand_still(&self) -> bool {
        self.migration.as_ref().is_some_and(|it| it.is_container())
    }

    /// The clients of the tree as it is now, and the processes whose handshake has begun. `tree` lists a tree that runs, or one
    /// that is frozen.
    pub(super) fn find(
        &self,
        tree: fn(i32) -> io::Result<Vec<i32>>,
    ) -> Result<(Vec<Arc<Client>>, Vec<Pending>), DumpError> {
        let tree = tree(self.root).map_err(DumpError::Tree)?;
        let registry = &self.daemon.clients.registry;
        Ok((registry.clients_among(&tree), registry.pending_among(&tree)))
    }

    /// Fails if a process of the tree has lost its worker: it has no GPU state to save, and would find that out only after a
    /// restore.
    pub(super) fn nobody_has_lost_its_worker(&self, ours: bool) -> Result<(), DumpError> {
        let tree = process::tree(self.root).map_err(DumpError::Tree)?;
        match self.daemon.clients.lost.in_tree(&tree, ours) {
            Some(why) => Err(DumpError::WithoutWorker(why)),
            None => Ok(()),
        }
    }

    /// The memory of each client on each device. This is the first request of a dump to the workers: they may be stopped, or in
    /// a long call, just as when they are to come to rest.
    pub(super) fn memory_of(&self, clients: &[Arc<Client>]) -> Result<Vec<Vec<u64>>, SaveError> {
        let deadline = self.daemon.config.timeouts.quiesce.begins();
        let memory = at_once(clients, |client| {
            client.worker.device_memory(deadline).map_err(|error| SaveError::of(client, &error))
        });
        memory.into_iter().collect()
    }

    /// Decides the protocol of each client, which has so much memory on each device.
    pub(super) fn plan(&self, clients: &[Arc<Client>], memory: &[Vec<u64>], first: u32) -> Vec<Planned> {
        let planned = (first..).zip(clients.iter().zip(memory)).map(|(index, (client, memory))| {
            let bytes = memory.iter().sum();
            let (asked, who) = self.daemon.protocol_of(client);
            let chosen = Chosen::new(asked, &who, bytes, self.leave_running);
            info!(%client, "{}: {}", chosen.protocol.as_str(), chosen.reason);
            let files = files::worth(bytes, self.daemon.config.image.file_bytes);
            Planned::new(Arc::clone(client), (index, files), chosen, self.daemon.copying.links.join(client, memory))
        });
        planned.collect()
    }

    /// The reply to `Frozen`: whether this process is a client or becomes one.
    pub(super) fn frozen(&self, pid: i32) -> Reply {
        let registry = &self.daemon.clients.registry;
        let ours = !registry.clients_among(&[pid]).is_empty() || !registry.pending_among(&[pid]).is_empty();
        Reply::Frozen { ours }
    }

    /// The owner of a socket, and whether its unread content may be lost, since the owner asks again.
    pub(super) fn whose(&self, clients: &[Arc<Client>], cookie: u64) -> Option<(Whose, bool)> {
        let path = &self.daemon.config.socket.path;
        // A process that is gone, or that we may not examine, has no socket of ours.
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
        // The process may be asking a question, and may have its answer already.
        let tree = process::frozen_tree(self.root).ok()?;
        let mut tree = tree.into_iter().filter_map(|pid| Process::with_pid(pid).ok());
        let asks = tree.find(|process| leads_here(*process))?;
        Some((Whose::Unattached(Unattached::new(asks, None, path)), true))
    }

    /// The native processes of the tree, for a plugin of this control version. Fails if a client uses the driver itself, too.
    pub(super) fn find_natives(&self, clients: &[Arc<Client>], wire: u32) -> Result<Vec<Found>, DumpError> {
        if wire < NATIVES {
            return Ok(Vec::new());
        }
        for client in clients {
            if let Some(device) = self.daemon.native.device_mapped_by(client.process.pid) {
                return Err(DumpError::UsesDriver { name: client.to_string(), device });
            }
        }
        let mut tree = process::tree(self.root).map_err(DumpError::Tree)?;
        tree.retain(|pid| !clients.iter().any(|it| it.process.pid == *pid));
        Ok(self.daemon.native.among(&tree)?)
    }

    /// Keeps the native processes, which are locked, for as long as the dump goes on.
    pub(super) fn hold_natives(&self, held: HeldNatives) {
        // A dump has one pause.
        let _ = self.natives.set(held);
    }

    /// The native processes with the threads that must run for the driver, as the peer numbers them.
    pub(super) fn native_threads(&self) -> Vec<NativeThread> {
        let held = self.natives.get().map(HeldNatives::all).unwrap_or_default();
        let theirs = |it: Found| {
            let (pid, tid) = (self.view.to_theirs(it.process.pid)?, self.view.to_theirs(it.tid)?);
            Some(NativeThread { pid, tid })
        };
        held.into_iter().filter_map(theirs).collect()
    }

    /// Has the driver move the GPU memory of a native process, which is stopped but for one thread, into its host memory.
    pub(super) fn checkpoint_native(&self, pid: i32) -> Result<(), DumpError> {
        let pid = self.view.to_ours(pid)?;
        Ok(self.natives.get().ok_or(NativeError::NotHeld(pid))?.checkpoint(pid)?)
    }

    /// Gives a native process back, at any time.
    pub(super) fn give_back_native(&self, pid: i32) -> Result<Reply, Failure> {
        let given = match (self.view.to_ours(pid)?, self.natives.get()) {
            (pid, Some(held)) => held.give_back(pid),
            (pid, None) => Err(NativeError::NotHeld(pid)),
        };
        given.map(|()| Reply::NativeDone { open: false }).map_err(|error| {
            warn!(root = self.root, "{error}");
            error.failure()
        })
    }

    /// The image is on disk: CRIU kills the tree next, unless it was to be left running.
    pub(super) fn is_durable(&self) {
        if let (Some(held), false) = (self.natives.get(), self.leave_running) {
            held.expect_end();
        }
    }

    /// The image's records of the native processes.
    pub(super) fn native_records(&self) -> Result<Vec<Native>, DumpError> {
        let held = self.natives.get().map(HeldNatives::all).unwrap_or_default();
        if held.is_empty() {
            return Ok(Vec::new());
        }
        let about = self.daemon.native.about().map_err(NativeError::from)?;
        let gpus: Vec<_> = about.gpus.iter().map(|it| NativeGpu { uuid: it.uuid, name: it.name.clone() }).collect();
        let own = |number: i32| {
            let pids = process::namespace_pids(number).unwrap_or_default();
            pids.last().copied().unwrap_or(number).unsigned_abs()
        };
        let record = |it: Found| Native {
            pid: it.process.pid.unsigned_abs(),
            namespace_pid: own(it.process.pid),
            command: process::command(it.process.pid),
            restore_thread: own(it.tid),
            driver_version: about.version.unsigned_abs(),
            gpus: gpus.clone(),
        };
        Ok(held.into_iter().map(record).collect())
    }

    /// Begins an image in a directory where CRIU is replacing its own.
    pub(super) fn begin_image(&self, dir: ImageDir) -> Result<ImageWriter, ImageError> {
        let base = base::find(&dir)?;
        let compression = self.daemon.config.image.compression;
        let options = CreateOptions { replace: true, compression, companion: Some(INVENTORY), ..CreateOptions::new()? };
        ImageWriter::create_on(dir, options, base)
    }
}

/// The file that CRIU writes last. Since 4.1 it contains an identifier of CRIU's run (`dump_criu_run_id` of
/// `images/inventory.proto`), which distinguishes the dumps that are made into a directory.
const INVENTORY: &str = "inventory.img";
