//! More GPU memory for programs than there is (`gpu.oversubscribe`): a program that finds none gets that of programs that are
//! idle, which are suspended.
//!
//! ```text
//!   its worker ──NeedsRoom──► daemon: clones have the memory? (`memory_pressure`)
//!              ◄─Room{how much?}── no
//!              ──Needs{bytes}──► programs that are idle for long enough, the least recently used first
//!              ◄─Room{coming}──       again and again: quiesced, saved, is one of them busy? ──yes──► it goes on, others are tried
//!              ◄─Room{again}──        they have given their memory back
//!              ◄─Room{not coming}─    nobody can go: out of memory, or a suspended client tries again later
//! ```
//!
//! A program that waits for memory has work, so it is never suspended: two programs that each need what the other has fail as
//! without this. Whoever was just used, or brought back, is not idle for `gpu.idle_ms`, and a program is not suspended again
//! before it has been idle for as long as its last suspension took.

mod programs;
mod records;
mod victims;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rekindle_wire::control::{Failing, WorkerRequest};
use thiserror::Error;
use tracing::{debug, info, warn};

use self::programs::{Program, free_on, programs};
pub(crate) use self::records::{Oversubscription, SuspendedFor, Wish};
use self::victims::{Candidate, Choice, Gpu, choose};
use super::clients::{Client, Holder};
use super::metrics::Suspended;
use super::process;
use super::suspend::{self, SuspendError};
use super::worker::{Worker, WorkerError};
use super::{Daemon, thread};
use crate::limit::{Deadline, Limit};

/// How often the worker that waits hears that the daemon is at it: several times in the time after which it gives up.
const RENEWAL: Duration = Duration::from_secs(1);
/// How often a wait looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);
/// How long to wait until the worker of a client that is being saved says whether the client has work.
const DESCRIBE: Limit = Limit::fixed(Duration::from_secs(1));
/// How long to wait at a time for a worker that releases the memory of a program that has ended.
const RELEASE: Duration = Duration::from_secs(1);

/// Why no room was made.
#[derive(Debug, Error)]
enum NotMade {
    #[error("memory of other programs would not help it")]
    NoHelp,
    #[error("no other program has been idle for long enough and has so much memory there")]
    Nobody,
    #[error("{0}")]
    Failed(SuspendError),
    #[error("there was none after {0}")]
    Late(Limit),
    #[error("it has ended")]
    Ended,
    #[error("the daemon stops")]
    Stopping,
}

/// Makes room for workers whose clients find no memory, as long as the daemon lives.
pub(super) fn serve_wishes(daemon: &Arc<Daemon>) -> std::io::Result<()> {
    let daemon = Arc::clone(daemon);
    thread("rooms", move || {
        loop {
            let (worker, wish) = daemon.oversubscription.next_wish();
            begin(&daemon, &worker, wish);
        }
    })
    .map(drop)
}

/// Begins to make room for a worker, unless that goes on already.
fn begin(daemon: &Arc<Daemon>, worker: &Arc<Worker>, wish: Wish) {
    let Some(asking) = daemon.oversubscription.begin(worker.pid(), &wish) else { return };
    debug!(worker = worker.pid(), free = ?wish.free, "its client needs GPU memory: looking for programs that are idle");
    let (making, asker) = (Arc::clone(daemon), Arc::clone(worker));
    let begun = thread("room", move || {
        let (mut wish, mut made) = (wish, false);
        loop {
            made |= make_and_renew(&making, &asker, &wish);
            match asking.next(&wish) {
                Some(other) => wish = other,
                None => break,
            }
        }
        asker.say(&WorkerRequest::Room { coming: false, how_much: false, again: made });
    });
    if let Err(error) = begun {
        warn!("cannot make room: {error}");
        worker.say(&WorkerRequest::Room { coming: false, how_much: false, again: false });
    }
}

/// Makes room, and tells the worker meanwhile that it is being made. Returns whether there is room now.
fn make_and_renew(daemon: &Arc<Daemon>, worker: &Arc<Worker>, wish: &Wish) -> bool {
    let (over, end) = channel::<()>();
    let deadline = daemon.config.gpu.room_timeout.began(wish.since);
    let renew = move || {
        let coming = WorkerRequest::Room { coming: true, how_much: false, again: false };
        // The worker of an idle program may hang. This one gives up then, since it hears nothing more.
        while end.recv_timeout(RENEWAL) == Err(RecvTimeoutError::Timeout) && !deadline.is_over() {
            worker.say(&coming);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(renew);
        let made = make(daemon, worker, &wish.free, deadline);
        drop(over);
        made
    })
}

fn make(daemon: &Arc<Daemon>, worker: &Arc<Worker>, free: &[u64], deadline: Deadline) -> bool {
    let clients = daemon.clients.registry.clients();
    let Some(client) = clients.into_iter().find(|it| Arc::ptr_eq(&it.worker, worker)) else { return false };
    let asker = Asker { client, wanted: wanted(worker, free), deadline };
    match asker.try_make(daemon) {
        Ok(()) => {
            daemon.oversubscription.made(worker.pid());
            true
        }
        Err(error) => {
            let bytes: u64 = asker.wanted.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes));
            // A suspended client that is to resume asks again and again.
            if daemon.oversubscription.is_news(worker.pid()) {
                info!(bytes, "{} finds no GPU memory, and no room is made for it: {error}", asker.client);
            } else {
                debug!(bytes, "still no room for {}: {error}", asker.client);
            }
            false
        }
    }
}

/// The bytes that must be free on each GPU.
fn wanted(worker: &Worker, free: &[u64]) -> Vec<(Gpu, u64)> {
    let gpus = worker.attached().devices.iter().map(|it| it.uuid);
    gpus.zip(free.iter().copied()).filter(|(_, bytes)| *bytes > 0).collect()
}

/// A client that room is made for.
struct Asker {
    client: Arc<Client>,
    wanted: Vec<(Gpu, u64)>,
    deadline: Deadline,
}

impl Asker {
    fn try_make(&self, daemon: &Arc<Daemon>) -> Result<(), NotMade> {
        if self.wanted.is_empty() {
            return Err(NotMade::NoHelp);
        }
        let gpus: Vec<Gpu> = self.wanted.iter().map(|(gpu, _)| *gpu).collect();
        let turn = daemon.oversubscription.turn(&gpus, || self.is_wanted(daemon).is_ok());
        let Some(_turn) = turn else { return self.is_wanted(daemon).and(Err(NotMade::Late(self.deadline.limit))) };
        let mut without = HashSet::new();
        let mut failed = None;
        let mut has_waited = false;
        loop {
            self.is_wanted(daemon)?;
            let programs = programs(daemon, &without);
            let missing = self.wanted.iter().map(|&(gpu, bytes)| {
                // Without an idle program nobody tells, and nobody can go.
                (gpu, bytes.saturating_sub(free_on(&programs, gpu).unwrap_or(0)))
            });
            let missing: Vec<_> = missing.filter(|(_, bytes)| *bytes > 0).collect();
            if missing.is_empty() {
                return Ok(());
            }
            let candidates: Vec<Candidate> = programs.iter().map(|it| it.candidate.clone()).collect();
            match choose(&candidates, &missing) {
                Choice::Now(chosen) => {
                    let chosen: Vec<&Program> = chosen.into_iter().filter_map(|place| programs.get(place)).collect();
                    match self.suspend(daemon, &chosen) {
                        Ok(()) => return Ok(()),
                        Err(error) => {
                            debug!("no program is suspended for {}: {error}", self.client);
                            // A program that has work again is left out by that.
                            if !matches!(error, SuspendError::HasWork { .. }) {
                                without.extend(chosen.iter().map(|it| it.root));
                            }
                            failed = Some(error);
                        }
                    }
                }
                // Once: a program that pauses for a moment all the time is busy.
                Choice::Later(time) if !has_waited => {
                    has_waited = true;
                    let until = Instant::now() + time;
                    while let left = until.saturating_duration_since(Instant::now())
                        && !left.is_zero()
                    {
                        self.is_wanted(daemon)?;
                        std::thread::sleep(left.min(LOOK));
                    }
                }
                // Then the worker tries again, and asks again if that is not enough.
                Choice::Later(_) | Choice::Nobody if self.is_memory_released(daemon, &gpus)? => return Ok(()),
                Choice::Later(_) | Choice::Nobody => return Err(failed.map_or(NotMade::Nobody, NotMade::Failed)),
            }
        }
    }

    /// Waits a while for workers that release the memory of programs which have ended. Returns whether there are any.
    fn is_memory_released(&self, daemon: &Daemon, gpus: &[Gpu]) -> Result<bool, NotMade> {
        let clients = daemon.clients.registry.clients();
        let ended = clients.iter().filter(|it| !it.process.is_alive() && has_one_of(&it.worker, gpus));
        let mut ending: Vec<_> = ended.map(|it| it.worker.process()).collect();
        ending.extend(daemon.oversubscription.ending_on(gpus));
        if ending.is_empty() {
            return Ok(false);
        }
        let until = Instant::now() + RELEASE;
        loop {
            self.is_wanted(daemon)?;
            // Also if all have ended already: the worker asks again at once, and only so many times.
            std::thread::sleep(LOOK);
            if Instant::now() >= until || !ending.iter().any(|worker| worker.is_alive()) {
                return Ok(true);
            }
        }
    }

    /// Whether the client still waits for room.
    fn is_wanted(&self, daemon: &Daemon) -> Result<(), NotMade> {
        if daemon.is_stopping() {
            return Err(NotMade::Stopping);
        }
        if self.client.worker.is_dead() || !self.client.process.is_alive() {
            return Err(NotMade::Ended);
        }
        if self.deadline.is_over() { Err(NotMade::Late(self.deadline.limit)) } else { Ok(()) }
    }

    /// Suspends all of these programs, or none.
    fn suspend(&self, daemon: &Arc<Daemon>, programs: &[&Program]) -> Result<(), SuspendError> {
        let began = Instant::now();
        let registry = &daemon.clients.registry;
        let holds = programs.iter().map(|it| {
            let overlaps = |other| SuspendError::Overlaps { root: it.root, other };
            // Trees that somebody else holds are not waited for.
            registry.hold(it.root, Holder::Suspension, |_, _| false).map_err(overlaps)
        });
        let _holds = holds.collect::<Result<Vec<_>, _>>()?;
        let mut clients = Vec::new();
        for program in programs {
            // The tree as it is while nobody joins it.
            let tree = process::tree(program.root).map_err(SuspendError::Tree)?;
            let all = registry.clients_among(&tree);
            if let Some(new) = all.iter().find(|it| !program.clients.iter().any(|known| Arc::ptr_eq(known, it))) {
                return Err(SuspendError::HasWork { client: new.to_string() });
            }
            clients.extend(all);
        }
        let is_wanted = |suspending: &[Arc<Client>]| {
            self.is_wanted(daemon).map_err(|error| SuspendError::NotWanted(error.to_string()))?;
            if let Some(it) = programs.iter().find(|it| registry.is_awaited(it.root)) {
                return Err(SuspendError::NotWanted(format!("a dump or an operator wants process {}", it.root)));
            }
            suspending.iter().try_for_each(|client| is_idle(daemon, client))
        };
        let suspended = suspend::make_way(daemon, &clients, &is_wanted);
        let took = began.elapsed();
        let given_back = suspended.as_ref().map(|all| all.iter().map(|(_, bytes)| (took, *bytes)));
        let how = Suspended { deep: false, for_another: true };
        daemon.metrics.suspended(how, given_back.map_err(Failing::kind));
        let suspended = suspended?;
        let alive: Vec<i32> = registry.clients().iter().map(|it| it.worker.pid()).collect();
        for (client, bytes) in suspended {
            let (process, command) = (self.client.process, self.client.attach.command.clone());
            daemon.oversubscription.note(client.worker.pid(), SuspendedFor { process, command, took }, &alive);
            let ms = took.as_millis() as u64;
            info!(pid = client.process.pid, bytes, ms, "suspended {client}, which is idle, for {}", self.client);
        }
        Ok(())
    }
}

fn has_one_of(worker: &Worker, gpus: &[Gpu]) -> bool {
    worker.attached().devices.iter().any(|it| gpus.contains(&it.uuid))
}

/// Whether a client that is quiesced has still no work. Its worker answers nothing while it hashes the memory, and is asked again.
fn is_idle(daemon: &Daemon, client: &Client) -> Result<(), SuspendError> {
    match client.worker.idle_for(DESCRIBE.begins()) {
        Ok(idle) if idle < daemon.config.gpu.idle => Err(SuspendError::HasWork { client: client.to_string() }),
        Ok(_) | Err(WorkerError::Timeout { .. }) => Ok(()),
        Err(source) => Err(SuspendError::of(client, source)),
    }
}
