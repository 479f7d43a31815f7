//! Suspending clients in place: their GPU memory goes back to the GPUs while their processes live on.
//!
//! ```text
//!   Suspend          quiesce ─► Save (the client is stopped) ─► Suspend: the worker gives memory back ─► the client runs
//!                         an error: all rings open                      until it needs its GPU
//!   ResumeSuspended  BringBack ─► the worker makes memory, loads content ─► LoadProgress ─► done
//!   deeply suspended: another worker takes the client over, see `moved.rs`
//! ```
//!
//! A suspended client counts as running: its process runs, and its worker brings the memory back by itself when the next
//! command comes. The content is in files that only the worker has open, so a daemon that is replaced changes nothing.
//!
//! Memory that other processes use too is not given back: these are refused.

mod error;
mod job;
mod moved;
mod space;
mod spot;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rekindle_wire::control::{Failing, Reply, SuspendedInfo, WorkerReply, WorkerRequest};
use tracing::{info, warn};

pub(super) use self::error::SuspendError;
pub(super) use self::job::How;
use self::job::{Job, Saved};
use self::moved::MoveError;
pub(super) use self::moved::serve_wishes;
use self::space::Space;
use super::clients::{Client, Held, Holder};
use super::content::wait_for_content;
use super::dump::files;
use super::metrics::Suspended;
use super::peer::{is_operator, may_checkpoint};
use super::pidns::PidView;
use super::process::Process;
use super::quiesce;
use super::sys::{Credentials, is_hung_up};
use super::worker::WorkerError;
use super::{Daemon, at_once, process, thread};
use crate::limit::Limit;

/// How often the daemon asks a worker again whether its GPU has room.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How often a client that makes way for another is asked whether it is still idle.
const WATCH_INTERVAL: Duration = Duration::from_millis(50);

/// A request to suspend or resume the tree of a process.
pub(super) struct Asked {
    pub(super) peer: Credentials,
    pub(super) pid: i32,
}

/// Suspends the clients of a tree.
pub(super) fn suspend(daemon: &Arc<Daemon>, stream: &UnixStream, asked: &Asked, how: How, fds: Vec<OwnedFd>) -> Reply {
    let result = try_suspend(daemon, stream, asked, how, fds);
    let given_back = result.as_ref().map(|all| all.iter().map(|it| (Duration::from_millis(it.ms), it.bytes)));
    let how = Suspended { deep: how.deep, for_another: false };
    daemon.metrics.suspended(how, given_back.map_err(Failing::kind));
    match result {
        Ok(suspended) => Reply::Suspended(suspended),
        Err(error) => {
            warn!(pid = asked.pid, "not suspended: {error}");
            Reply::Failed(error.into())
        }
    }
}

/// Resumes the clients of a tree.
pub(super) fn resume(daemon: &Arc<Daemon>, asked: &Asked) -> Reply {
    let resumed = asked.clients(daemon).and_then(|(view, _, clients)| {
        let results = at_once(&clients, |client| {
            let began = Instant::now();
            let client = described(daemon, client)?;
            let bytes =
                if client.worker.keeps() { move_client(daemon, &client, moved::held) } else { wake(daemon, &client) };
            bytes.map(|bytes| info_of(&view, &client, bytes, began))
        });
        results.into_iter().collect()
    });
    let resumed: Result<Vec<_>, SuspendError> = resumed;
    daemon.metrics.resumed(resumed.as_ref().err().map(Failing::kind));
    match resumed {
        Ok(resumed) => Reply::WereResumed(resumed),
        Err(error) => {
            warn!(pid = asked.pid, "not resumed: {error}");
            Reply::Failed(error.into())
        }
    }
}

/// Has the client's worker be described anew. Another worker may be taking the client over: the result has the one of now.
fn described(daemon: &Daemon, client: &Arc<Client>) -> Result<Arc<Client>, SuspendError> {
    let limit = daemon.config.timeouts.quiesce;
    let mut client = Arc::clone(client);
    loop {
        let error = match client.worker.suspension(limit.begins()) {
            Ok(_) => return Ok(client),
            Err(error) => error,
        };
        let now = daemon.clients.registry.clients().into_iter().find(|it| it.process == client.process);
        match now.filter(|it| !Arc::ptr_eq(it, &client)) {
            Some(now) => client = now,
            None => return Err(SuspendError::not_resumed(&client, error)),
        }
    }
}

/// Brings the memory of a client back that was suspended when its worker was last described, and waits until its content is
/// loaded. Returns the number of bytes, 0 for a client that was not suspended.
pub(super) fn wake(daemon: &Daemon, client: &Client) -> Result<u64, SuspendError> {
    let limit = daemon.config.timeouts.stall;
    let failed = |source| SuspendError::not_resumed(client, source);
    let Some(suspended) = client.worker.was_suspended() else { return Ok(0) };
    let no_room = limit.begins();
    loop {
        match client.worker.call(&WorkerRequest::BringBack, &[], &[], limit).map_err(failed)?.reply {
            WorkerReply::Done => break,
            WorkerReply::Busy { .. } if !no_room.is_over() => std::thread::sleep(POLL_INTERVAL),
            WorkerReply::Busy { .. } => {
                return Err(SuspendError::NoRoom { client: client.to_string(), bytes: suspended.bytes, limit });
            }
            _ => return Err(failed(WorkerError::Protocol("BringBack"))),
        }
    }
    wait_for_content(&client.worker, &client.to_string(), limit, |_, _| ()).map_err(failed)?;
    Ok(suspended.bytes)
}

/// Has another worker take a client over that is suspended deeply; waits for room until the limit. Returns the number of bytes.
fn move_client(
    daemon: &Arc<Daemon>,
    client: &Client,
    attempt: impl Fn(&Arc<Daemon>, Process) -> Result<(), MoveError>,
) -> Result<u64, SuspendError> {
    let limit = daemon.config.timeouts.stall;
    let bytes = client.worker.was_suspended().map_or(0, |it| it.bytes);
    let no_room = limit.begins();
    loop {
        match attempt(daemon, client.process) {
            Ok(()) => return Ok(bytes),
            // Whoever holds it may be moving it right now.
            Err(MoveError::NoRoom { .. } | MoveError::Held { .. }) if !no_room.is_over() => {
                std::thread::sleep(POLL_INTERVAL);
            }
            Err(MoveError::NoRoom { .. }) => {
                return Err(SuspendError::NoRoom { client: client.to_string(), bytes, limit });
            }
            Err(source) => return Err(SuspendError::NotMoved { client: client.to_string(), source }),
        }
    }
}

/// Brings the memory of clients back whose tree the caller holds. Returns them with the workers that they have then.
pub(super) fn wake_held(daemon: &Arc<Daemon>, clients: Vec<Arc<Client>>) -> Result<Vec<Arc<Client>>, SuspendError> {
    let woken = at_once(&clients, |client| {
        if !client.worker.keeps() {
            return wake(daemon, client).map(|_| Arc::clone(client));
        }
        move_client(daemon, client, moved::bring)?;
        let moved = daemon.clients.registry.clients_among(&[client.process.pid]);
        moved
            .into_iter()
            .find(|it| it.process == client.process)
            .ok_or_else(|| SuspendError::NotMoved { client: client.to_string(), source: MoveError::Gone })
    });
    woken.into_iter().collect()
}

impl Asked {
    /// The clients of the tree, which the peer must own.
    fn clients(&self, daemon: &Daemon) -> Result<(PidView, i32, Vec<Arc<Client>>), SuspendError> {
        let view = PidView::of(self.peer.pid)?;
        let root = view.to_ours(self.pid)?;
        let owner = process::user(root);
        if owner.is_none() || !is_operator(self.peer) && owner != Some(self.peer.uid) {
            return Err(SuspendError::NoProcess(self.pid));
        }
        let tree = process::tree(root).map_err(SuspendError::Tree)?;
        let clients = daemon.clients.registry.clients_among(&tree);
        if clients.is_empty() { Err(SuspendError::NoClient(self.pid)) } else { Ok((view, root, clients)) }
    }
}

fn try_suspend(
    daemon: &Arc<Daemon>,
    stream: &UnixStream,
    asked: &Asked,
    how: How,
    fds: Vec<OwnedFd>,
) -> Result<Vec<SuspendedInfo>, SuspendError> {
    let How { hold, deep } = how;
    let directory = fds.into_iter().next();
    if directory.is_some() && !may_checkpoint(asked.peer) {
        return Err(SuspendError::DirectoryNotAllowed);
    }
    let space = Space::new(directory);
    let (view, root, _) = asked.clients(daemon)?;
    let overlaps = |other| SuspendError::Overlaps { root, other };
    let waits = |other: Held, waited| waited < other.patience(&daemon.config.timeouts) && !is_hung_up(stream);
    let _hold = daemon.clients.registry.hold(root, Holder::Suspension, waits).map_err(overlaps)?;
    // The tree as it is while nobody joins it.
    let (_, _, all) = asked.clients(daemon)?;
    let clients = to_suspend(daemon, &all, how)?;
    let began = Instant::now();
    let given_back = give_back(daemon, &clients, &Giving { space, how, is_wanted: None })?;
    let suspended = given_back.into_iter().map(|(client, bytes)| {
        daemon.oversubscription.forget(client.worker.pid());
        SuspendedInfo { deep, ..info_of(&view, &client, bytes, began) }
    });
    let suspended: Vec<_> = suspended.collect();
    for it in &suspended {
        info!(pid = it.pid, command = it.command, bytes = it.bytes, ms = it.ms, hold, deep, "suspended");
    }
    Ok(suspended)
}

/// Suspends idle clients, whose trees are held, for another program. `is_wanted` is asked again and again until their memory is
/// given back: an error lets them go on.
pub(super) fn make_way(
    daemon: &Arc<Daemon>,
    clients: &[Arc<Client>],
    is_wanted: &IsWanted<'_>,
) -> Result<Vec<(Arc<Client>, u64)>, SuspendError> {
    let how = How { hold: false, deep: false };
    let clients = to_suspend(daemon, clients, how)?;
    give_back(daemon, &clients, &Giving { space: Space::new(None), how, is_wanted: Some(is_wanted) })
}

/// Whether clients that are quiesced are still to be suspended.
type IsWanted<'a> = dyn Fn(&[Arc<Client>]) -> Result<(), SuspendError> + Sync + 'a;

/// How and why clients give their memory back.
struct Giving<'a> {
    space: Space,
    how: How,
    /// Asked again and again if the clients are idle and go for another program.
    is_wanted: Option<&'a IsWanted<'a>>,
}

/// Suspends these clients, whose trees are held. Returns those that are suspended, with their bytes.
fn give_back(
    daemon: &Arc<Daemon>,
    clients: &[Arc<Client>],
    giving: &Giving<'_>,
) -> Result<Vec<(Arc<Client>, u64)>, SuspendError> {
    let How { deep, .. } = giving.how;
    let quiesce_limit = daemon.config.timeouts.quiesce;
    let memory = at_once(clients, |client| client.worker.device_memory(quiesce_limit.begins()));
    let memory = memory.into_iter().zip(clients).map(|(bytes, client)| {
        bytes.map(|bytes| bytes.iter().sum::<u64>()).map_err(|error| SuspendError::of(client, error))
    });
    let memory: Vec<u64> = memory.collect::<Result<_, _>>()?;
    let room = giving.space.room(memory.iter().sum())?;
    let files = memory.iter().map(|bytes| {
        let count = files::worth(*bytes, daemon.config.image.file_bytes);
        (0..count).map(|_| room.file()).collect::<Result<Vec<_>, _>>().map_err(SuspendError::File)
    });
    let files: Vec<_> = files.collect::<Result<_, _>>()?;
    let began = Instant::now();
    let rings = match giving.is_wanted {
        None => quiesce::quiesce(clients, quiesce_limit)?,
        Some(_) => quiesce::quiesce_idle(clients, quiesce_limit)?,
    };
    let quiesce = began.elapsed();
    let stall = daemon.config.timeouts.stall;
    let jobs = rings.iter().zip(files).map(|(ring, files)| Job::new(ring, files, stall));
    let jobs = jobs.collect::<Result<Vec<_>, _>>()?;
    // All are saved before the first gives anything back: an error opens all rings.
    let saved = match giving.is_wanted {
        None => at_once(&jobs, Job::save),
        Some(is_wanted) => save_while(&jobs, &|| is_wanted(clients))?,
    };
    let movable = |job: &Job<'_>, blob: Vec<u8>| {
        if deep { job.must_be_movable(&daemon.pool, &blob).map(|()| blob) } else { Ok(blob) }
    };
    let saved = jobs.iter().zip(saved).map(|(job, saved)| {
        let Saved { blob, copy } = saved?;
        Ok((job, Saved { blob: movable(job, blob)?, copy }))
    });
    let saved = saved.collect::<Result<Vec<_>, SuspendError>>();
    let saved = saved.inspect_err(|_| jobs.iter().for_each(Job::cancel))?;
    drop(room);
    let given_back = at_once(&saved, |(job, saved)| {
        let began = Instant::now();
        let bytes = job.give_back(&saved.blob, giving.how)?;
        let [quiesce_ms, copy_ms, give_back_ms] =
            [quiesce, saved.copy, began.elapsed()].map(|it| it.as_millis() as u64);
        info!(bytes, quiesce_ms, copy_ms, give_back_ms, "phases of suspension: {}", job.name());
        Ok(bytes)
    });
    let failed = given_back.iter().any(Result::is_err);
    let mut suspended = Vec::new();
    let mut first_error = None;
    drop(saved);
    drop(jobs);
    for (ring, result) in rings.into_iter().zip(given_back) {
        match result {
            Ok(bytes) => {
                let client = Arc::clone(ring.client());
                ring.suspended();
                // A keeper is known by its description.
                let described = client.worker.suspension(quiesce_limit.begins());
                let described = described.map_err(|source| SuspendError::not_resumed(&client, source));
                if failed {
                    let woken = described.and_then(|_| wake_held(daemon, vec![Arc::clone(&client)]));
                    woken.map_or_else(|error| warn!("{error}"), drop);
                }
                suspended.push((client, bytes));
            }
            Err(error) => {
                if deep {
                    find_out_later(ring.client(), stall);
                }
                first_error.get_or_insert(error);
            }
        }
    }
    first_error.map_or(Ok(suspended), Err)
}

/// Has all workers save, as long as that is wanted.
fn save_while(
    jobs: &[Job<'_>],
    is_wanted: &(dyn Fn() -> Result<(), SuspendError> + Sync),
) -> Result<Vec<Result<Saved, SuspendError>>, SuspendError> {
    is_wanted()?;
    let (over, end) = channel::<()>();
    let watch = move || {
        let mut unwanted = Ok(());
        while end.recv_timeout(WATCH_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            unwanted = unwanted.and_then(|()| is_wanted());
            if unwanted.is_err() {
                // Again and again: a worker forgets this when its save begins.
                jobs.iter().for_each(Job::cancel);
            }
        }
        unwanted.and_then(|()| is_wanted())
    };
    std::thread::scope(|scope| {
        let watching = scope.spawn(watch);
        let saved = at_once(jobs, Job::save);
        drop(over);
        watching.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(saved)
    })
}

/// Notes in the background whether a worker that has not answered has become its client's keeper after all: the daemon must know
/// what its `NeedsRoom` means.
fn find_out_later(client: &Arc<Client>, limit: Limit) {
    let worker = Arc::clone(&client.worker);
    let ask = move || {
        while !worker.is_dead() && worker.suspension(limit.begins()).is_err() {
            std::thread::sleep(POLL_INTERVAL);
        }
    };
    if let Err(error) = thread("describe", ask) {
        warn!("{client}: cannot find out whether it is suspended: {error}");
    }
}

/// The clients that are not suspended yet, all of which can be. Those that are take on `hold`. Those that are to be suspended deeply,
/// and are suspended, come back first.
fn to_suspend(daemon: &Daemon, all: &[Arc<Client>], how: How) -> Result<Vec<Arc<Client>>, SuspendError> {
    let How { hold, deep } = how;
    let limit = daemon.config.timeouts.quiesce;
    let checked = at_once(all, |client| {
        let named = || client.to_string();
        if !client.worker.suspends() || deep && !client.worker.moves() {
            return Err(SuspendError::OldWorker { client: named() });
        }
        let failed = |error| SuspendError::of(client, error);
        match client.worker.suspension(limit.begins()).map_err(failed)? {
            Some(suspended) if deep && !suspended.deep => drop(wake(daemon, client)?),
            Some(suspended) => {
                if hold && !suspended.hold && client.worker.makes_room() {
                    client.worker.hold_suspended(limit).map_err(failed)?;
                }
                return Ok(None);
            }
            None => {}
        }
        let (own, others) = client.worker.shares(limit.begins()).map_err(failed)?;
        if !own.is_empty() || !others.is_empty() {
            return Err(SuspendError::Shared { client: named() });
        }
        Ok(Some(Arc::clone(client)))
    });
    Ok(checked.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
}

fn info_of(view: &PidView, client: &Client, bytes: u64, began: Instant) -> SuspendedInfo {
    SuspendedInfo {
        pid: view.to_theirs(client.process.pid).unwrap_or_default(),
        command: client.attach.command.clone(),
        bytes,
        ms: began.elapsed().as_millis() as u64,
        deep: false,
    }
}
