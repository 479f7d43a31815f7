//! Another worker takes a deeply suspended client over from its keeper.
//!
//! ```text
//!   keeper ──Kept, SaveCode──► files ──► a worker of the pool: Load, on GPUs that have room
//!          ──HandOver──► connection ─┐
//!   the process's mappings: ring,    ├─► Connect ─► all content is there ─► (the registry has the new worker) ─► Open
//!   staging, pinned memory ──────────┘                                       it asks the keeper for the client; the keeper ends
//! ```
//!
//! Whatever fails before the keeper has given the client away changes nothing: the new worker is killed, and the client stays
//! suspended. The two workers settle that between them (`ctx-worker/src/serve/keeper.rs`), so the daemon may die at any moment.
//!
//! Whoever moves a client holds its tree: no dump and no other move has the client meanwhile.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::{Client as Record, CodeHash, HashKey, Host, ImageError};
use rekindle_wire::attach::{Attach, CHOSEN_PROTOCOL, Device};
use rekindle_wire::control::{DataFile, Failing, FailureKind, WorkerReply, WorkerRequest};
use rekindle_wire::gpus;
use rekindle_wire::window::MAX_DEVICES;
use thiserror::Error;
use tracing::{info, warn};

use super::super::clients::{Client, ClientState, Held, HoldGuard, Holder};
use super::super::content::wait_for_content;
use super::super::dump::{describe_client, describe_host, gpu};
use super::super::grants::{ShareError, Uuid};
use super::super::moves::{Again, Failed};
use super::super::pool::PoolError;
use super::super::process::Process;
use super::super::restore::{self, CheckError, CodeFile, Load, LoadHow, LoadMode, SharedError};
use super::super::worker::{Timeout, Worker, WorkerError};
use super::super::worker_records::RecordError;
use super::super::{Daemon, attach, thread};
use super::spot::{self, Spot};
use crate::limit::Limit;

/// The name of code on its way, as /proc shows it.
const CODE_NAME: &std::ffi::CStr = c"rekindle-code";
/// How long to wait for a spare worker that says how much memory is free.
const SPARE_WAIT: Duration = Duration::from_secs(1);
const SPARE_POLL: Duration = Duration::from_millis(10);
/// How often a process's mappings are read again where they have changed meanwhile.
const TAKES: usize = 5;

/// Why no other worker has taken a client over. The client stays suspended.
#[derive(Debug, Error)]
pub(crate) enum MoveError {
    #[error("it has ended")]
    Gone,
    #[error("process {pid} {other}")]
    Held { pid: i32, other: Held },
    #[error("no GPU of its kind has room for its {bytes} bytes now")]
    NoRoom { bytes: u64 },
    #[error("the GPUs of a worker that was started for it have no room for its {bytes} bytes now")]
    NoRoomThere { bytes: u64 },
    #[error("its keeper: {0}")]
    Keeper(WorkerError),
    #[error("what its keeper has saved is unusable: {0}")]
    Saved(#[from] ImageError),
    #[error(transparent)]
    Check(#[from] CheckError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error("the pool's workers are of an older Rekindle and cannot take it over: restart the daemon")]
    OldWorker,
    #[error("another worker cannot take it over: {0}")]
    Worker(WorkerError),
    #[error("its memory cannot be shared with another worker: {0}")]
    Shared(#[from] SharedError),
    #[error("the pool has no worker that sees only GPUs which it may use")]
    OtherGpus,
    #[error("its keeper has handed over another connection than its own: {0}")]
    Connection(RecordError),
    #[error(transparent)]
    Container(#[from] ShareError),
    #[error(transparent)]
    Code(#[from] CodeError),
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl MoveError {
    /// When the move is to be tried again.
    fn again(&self) -> Again {
        match self {
            Self::NoRoom { .. } | Self::Held { .. } => Again::AtOnce,
            Self::NoRoomThere { .. } => Again::Soon,
            _ => Again::Later,
        }
    }
}

impl Failing for MoveError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Gone => FailureKind::LostPeer,
            Self::Held { .. } | Self::NoRoom { .. } | Self::NoRoomThere { .. } | Self::OtherGpus => {
                FailureKind::Refused
            }
            Self::Keeper(error) | Self::Worker(error) => error.kind(),
            Self::Saved(_) | Self::Connection(_) => FailureKind::Internal,
            Self::Check(error) => error.kind(),
            Self::Pool(error) => error.kind(),
            Self::OldWorker => FailureKind::Version,
            Self::Shared(error) => error.kind(),
            Self::Container(error) => error.kind(),
            Self::Code(CodeError::Worker(error)) => error.kind(),
            Self::Code(CodeError::Io(error)) | Self::Io(error) => Failing::kind(error),
        }
    }
}

/// Moves clients whose keepers ask for it, each in a thread of its own, as long as the daemon lives.
pub(in crate::daemon) fn serve_wishes(daemon: &Arc<Daemon>) -> io::Result<()> {
    let daemon = Arc::clone(daemon);
    thread("moves", move || {
        loop {
            let process = daemon.moves.next();
            let of_move = Arc::clone(&daemon);
            let begun = thread("move", move || {
                let result = wished(&of_move, process);
                let failed = result.err().filter(|_| process.is_alive()).map(|error| {
                    let why = error.to_string();
                    if of_move.moves.why(process).as_ref() != Some(&why) {
                        warn!(pid = process.pid, "it needs a worker, and stays suspended: {why}");
                    }
                    Failed { why, again: error.again() }
                });
                of_move.moves.over(process, failed);
            });
            if let Err(error) = begun {
                daemon.moves.over(process, Some(Failed { why: error.to_string(), again: Again::Later }));
            }
        }
    })
    .map(drop)
}

/// Moves a client whose keeper asks for that, unless an operator has its commands wait by now.
fn wished(daemon: &Arc<Daemon>, process: Process) -> Result<(), MoveError> {
    let _hold = hold(daemon, process)?;
    let client = find(daemon, process)?;
    let now = client.worker.suspension(daemon.config.timeouts.quiesce.begins()).map_err(MoveError::Keeper)?;
    if now.is_some_and(|it| it.hold) { Ok(()) } else { bring(daemon, process) }
}

/// Holds a client and moves it.
pub(super) fn held(daemon: &Arc<Daemon>, process: Process) -> Result<(), MoveError> {
    let _hold = hold(daemon, process)?;
    bring(daemon, process)
}

fn hold(daemon: &Daemon, process: Process) -> Result<HoldGuard, MoveError> {
    let waits = |_, waited| waited < daemon.config.timeouts.quiesce.time;
    let hold = daemon.clients.registry.hold(process.pid, Holder::Move, waits);
    hold.map_err(|other| MoveError::Held { pid: process.pid, other })
}

fn find(daemon: &Daemon, process: Process) -> Result<Arc<Client>, MoveError> {
    daemon.clients.registry.clients().into_iter().find(|it| it.process == process).ok_or(MoveError::Gone)
}

/// Has a worker take a client over, whose tree the caller holds. Returns when the client has its memory and runs.
pub(super) fn bring(daemon: &Arc<Daemon>, process: Process) -> Result<(), MoveError> {
    let client = find(daemon, process)?;
    if !client.worker.keeps() {
        // Somebody else has moved it meanwhile.
        return Ok(());
    }
    let began = Instant::now();
    let limit = daemon.config.timeouts.stall;
    // Where there is no room, this is tried again and again: what the keeper has is asked for later.
    find_room(daemon, &client, &client.worker.device_memory_then())?;
    let kept = Kept::of(&client, limit)?;
    let mut new = take_worker(daemon, &client, &kept)?;
    let code = code_files(&client.worker, &kept.record, limit)?;
    let load = Load {
        hash: kept.key,
        blob: kept.record.to_bytes()?,
        data: kept.data,
        code,
        how: LoadHow { limits: daemon.config.clients.limits, mode: LoadMode::Early, limit },
        to_copy: None,
    };
    let worker = Arc::clone(&new.worker);
    let hold_off = daemon.pool.hold_off();
    let promise = Arc::new(daemon.promises.make(&kept.record, &worker));
    promise.listen(&worker);
    load.run(&worker).map_err(MoveError::Worker)?;

    let (connection, socket) = hand_over(&client.worker, limit)?;
    match daemon.clients.records.check(client.worker.process(), process, connection.as_fd()) {
        Ok(()) | Err(RecordError::None(_)) => {}
        Err(error) => return Err(MoveError::Connection(error)),
    }
    let dumped = kept.record.pinned.iter().filter(|it| it.pieces.is_empty());
    let dumped: Vec<_> = dumped.map(|it| (it.address, it.size)).collect();
    let memory = take_memory(process.pid, &dumped)?;
    let (attach, allowed) = (client.attach.clone(), client.allowed.clone());
    let moved = Client::new(process, attach, allowed, Arc::clone(&worker), ClientState::Restoring);
    release_when_dead(daemon, &moved);
    daemon.share(&moved)?;
    let copy = connection.try_clone()?;
    let keeper = Some((attach_of(&client), socket));
    // Pinning takes as long as there is memory, so the limit is how long the worker may do nothing.
    let timeout = Timeout::WhileItWorks(limit);
    restore::connect(connection, keeper, memory, |request, fds| worker.ask(&request, fds, timeout))
        .map_err(MoveError::Worker)?;
    // Until here the client can stay where it is, also if its content cannot be loaded.
    wait_for_content(&worker, &client.to_string(), limit, |_, _| ()).map_err(MoveError::Worker)?;
    worker.forget_load_steps();
    drop((promise, hold_off));
    let records = &daemon.clients.records;
    records.keep(worker.process(), process, copy.as_fd());
    drop(copy);
    give(daemon, &client, &moved).inspect_err(|_| records.forget(worker.process()))?;
    new.has_client = true;
    let (from, to, ms) = (client.worker.pid(), worker.pid(), began.elapsed().as_millis() as u64);
    info!(%client, from, to, ms, "another worker has taken it over");
    Ok(())
}

/// Ends a worker's share of its container's limits when it dies before it has its client.
fn release_when_dead(daemon: &Daemon, client: &Client) {
    let (grants, allowed, worker) = (Arc::downgrade(&daemon.grants), client.allowed.clone(), client.worker.process());
    let charges = Arc::clone(&daemon.charges);
    client.worker.on_death(move || {
        if let Some(grants) = grants.upgrade() {
            grants.release(&allowed, worker.pid);
        }
        charges.left(worker);
    });
}

/// Has the keeper give the client away. Before, the registry learns of the new worker: the keeper's end must not count as the loss
/// of its client.
fn give(daemon: &Arc<Daemon>, client: &Arc<Client>, new: &Arc<Client>) -> Result<(), MoveError> {
    new.choose_protocol(client.chosen_protocol());
    if !daemon.clients.registry.replace(client, new) {
        return Err(MoveError::Gone);
    }
    attach::serve_needs(daemon, new);
    // No limit: a keeper that is stopped may give the client away when it goes on, and a worker that was killed at that moment would
    // take the client with it. Nobody waits for this who has no limit.
    if let Err(error) = new.worker.ask(&WorkerRequest::Open, &[], Timeout::Endless) {
        new.worker.kill();
        daemon.clients.registry.replace(new, client);
        if client.worker.is_dead() {
            // Its action at the keeper's death has not found the client.
            attach::forget_when_dead(daemon, client);
        }
        return Err(MoveError::Worker(error));
    }
    new.set_state(ClientState::Running);
    attach::forget_when_dead(daemon, new);
    Ok(())
}

/// A worker that is killed when this is dropped, unless it has its client by then.
struct New {
    worker: Arc<Worker>,
    has_client: bool,
}

impl Drop for New {
    fn drop(&mut self) {
        if !self.has_client {
            self.worker.kill();
        }
    }
}

/// What a keeper has of its client.
struct Kept {
    record: Record,
    data: Vec<(DataFile, OwnedFd)>,
    key: HashKey,
    host: Host,
}

impl Kept {
    fn of(client: &Client, limit: Limit) -> Result<Self, MoveError> {
        let keeper = &client.worker;
        let answered = keeper.call(&WorkerRequest::Kept, &[], &[], limit).map_err(MoveError::Keeper)?;
        let WorkerReply::Kept { data, hash_algorithm, hash_key } = answered.reply else {
            return Err(MoveError::Keeper(WorkerError::Protocol("Kept")));
        };
        let mut record = Record::from_bytes(&answered.blob)?;
        // A keeper may be under its client's control: it has no say in what the daemon knows for certain.
        describe_client(&mut record, client);
        let key = HashKey::from_parts(hash_algorithm, hash_key)?;
        let host = describe_host([keeper.attached()].into_iter(), std::slice::from_ref(&record));
        // The client may have power over its keeper.
        if record.allocations.iter().any(|it| it.device as usize >= MAX_DEVICES) {
            return Err(MoveError::Keeper(WorkerError::Protocol("Kept")));
        }
        if data.len() != answered.fds.len() {
            return Err(MoveError::Keeper(WorkerError::Protocol("Kept")));
        }
        Ok(Self { record, data: data.into_iter().zip(answered.fds).collect(), key, host })
    }

    /// The bytes that the client needs on each of its devices.
    fn needs(&self) -> Vec<u64> {
        let mut needs = Vec::new();
        for it in &self.record.allocations {
            let place = it.device as usize;
            if place >= needs.len() {
                needs.resize(place + 1, 0_u64);
            }
            needs[place] = needs[place].saturating_add(it.size);
        }
        needs
    }
}

/// Has a worker that executes nothing write the code of its client into files.
pub(super) fn code_files(worker: &Worker, record: &Record, limit: Limit) -> Result<Vec<CodeFile>, CodeError> {
    let hashes: BTreeSet<CodeHash> = record.objects.iter().flat_map(|it| it.code.iter().copied()).collect();
    let save = |hash: CodeHash| {
        let made = rustix::fs::memfd_create(CODE_NAME, rustix::fs::MemfdFlags::CLOEXEC);
        let mut file = File::from(made.map_err(io::Error::from)?);
        let request = WorkerRequest::SaveCode { hash: hash.to_string() };
        worker.ask(&request, &[file.as_raw_fd()], limit)?;
        file.rewind()?;
        Ok((hash.to_string(), file.into()))
    };
    hashes.into_iter().map(save).collect()
}

/// Why there are no files with the code of a client.
#[derive(Debug, Error)]
pub(crate) enum CodeError {
    #[error("its code cannot be handed on: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Worker(#[from] WorkerError),
}

/// Takes a worker for the client, on GPUs that have room.
fn take_worker(daemon: &Daemon, client: &Client, kept: &Kept) -> Result<New, MoveError> {
    restore::check_record(&kept.record)?;
    let (may, needs) = (client.allowed.gpus(), kept.needs());
    let mut wanted = kept.record.clone();
    wanted.gpus.sort_by_key(|it| it.ordinal);
    if let Some(chosen) = find_room(daemon, client, &needs)? {
        wanted.gpus.iter_mut().zip(chosen).for_each(|(gpu, uuid)| gpu.uuid = uuid);
    }
    let gpus = restore::choose(&wanted, &kept.host, &daemon.pool.devices()?, may);
    let settings = client.attach.settings.clone();
    let new = New { worker: daemon.pool.take(&settings, gpus.as_deref())?, has_client: false };
    if !new.worker.moves() {
        return Err(MoveError::OldWorker);
    }
    let sees = || new.worker.attached().devices.iter().map(|it| it.uuid);
    if may.is_some_and(|may| !sees().all(|it| may.contains(&it))) {
        return Err(MoveError::OtherGpus);
    }
    let pair = [(&kept.record, new.worker.attached())];
    restore::check_devices(&kept.host, pair.into_iter(), daemon.config.restore.allowances)?;
    if let Ok(memory) = new.worker.memory()
        && needs.iter().zip(&memory).any(|(needs, memory)| memory.free < *needs)
    {
        return Err(MoveError::NoRoomThere { bytes: needs.iter().sum() });
    }
    Ok(new)
}

/// The GPUs, in the order of those that the client had, that have room for so many bytes each; none where that is not known.
fn find_room(daemon: &Daemon, client: &Client, needs: &[u64]) -> Result<Option<Vec<Uuid>>, MoveError> {
    let Some(spots) = spots(daemon, client.allowed.gpus()) else { return Ok(None) };
    let (had, here) = (&client.worker.attached().devices, daemon.pool.devices()?);
    let model = |all: &[Device], uuid: Uuid| all.iter().find(|it| it.uuid == uuid).map(gpu);
    let is_like = |one: Uuid, other: Uuid| match (model(had, one), model(&here, other)) {
        (Some(one), Some(other)) => {
            one.name == other.name
                && (one.compute_major, one.compute_minor) == (other.compute_major, other.compute_minor)
                && (one.multiprocessors, one.total_memory) == (other.multiprocessors, other.total_memory)
        }
        _ => false,
    };
    let had: Vec<Uuid> = had.iter().map(|it| it.uuid).collect();
    let chosen = spot::choose(&had, needs, &spots, is_like);
    let are_cut_alike = |chosen: &Vec<Uuid>| {
        let pairs: Vec<_> = had.iter().copied().zip(chosen.iter().copied()).collect();
        gpus::are_cut_alike(&pairs)
    };
    let chosen = chosen.filter(are_cut_alike);
    chosen.map(Some).ok_or_else(|| MoveError::NoRoom { bytes: needs.iter().sum() })
}

/// The GPUs that the client may use, with what is free on them; `None` where no spare worker says so.
fn spots(daemon: &Daemon, may: Option<&[Uuid]>) -> Option<Vec<Spot>> {
    let began = Instant::now();
    let spare = loop {
        match daemon.pool.any() {
            Some(worker) => break worker,
            None if daemon.config.workers.spares.usual == 0 || began.elapsed() > SPARE_WAIT => return None,
            None => std::thread::sleep(SPARE_POLL),
        }
    };
    let memory = spare.memory().ok()?;
    let here = spare.attached().devices.iter().zip(memory);
    let here = here.filter(|(device, _)| may.is_none_or(|may| may.contains(&device.uuid)));
    Some(here.map(|(device, it)| Spot { uuid: device.uuid, free: it.free }).collect())
}

/// The message by which the client attached, with the protocol that was chosen for it since.
fn attach_of(client: &Client) -> Attach {
    let mut attach = client.attach.clone();
    let chosen = client.chosen_protocol().map(|it| (CHOSEN_PROTOCOL.to_owned(), it.as_str().to_owned()));
    attach.settings.extend(chosen);
    attach
}

/// Has the keeper read the client's connection no more. Returns the connection, and a socket that leads to the keeper.
fn hand_over(keeper: &Worker, limit: Limit) -> Result<(UnixStream, OwnedFd), MoveError> {
    let (ours, theirs) = UnixStream::pair()?;
    let fds = [theirs.as_raw_fd()];
    let answered = keeper.call(&WorkerRequest::HandOver, &[], &fds, limit).map_err(MoveError::Keeper)?;
    match (answered.reply, answered.fds.into_iter().next()) {
        (WorkerReply::HandedOver, Some(connection)) => Ok((connection.into(), ours.into())),
        _ => Err(MoveError::Keeper(WorkerError::Protocol("HandOver"))),
    }
}

/// Takes the process's shared memory. The process runs, and may map and unmap memory meanwhile.
fn take_memory(pid: i32, dumped: &[(u64, u64)]) -> Result<restore::SharedMemory, SharedError> {
    let mut last = restore::take_memory(pid, dumped);
    for _ in 1..TAKES {
        if last.is_ok() {
            break;
        }
        std::thread::sleep(SPARE_POLL);
        last = restore::take_memory(pid, dumped);
    }
    last
}
