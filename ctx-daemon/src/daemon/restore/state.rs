//! The state of a restore, put together from the session and from the connections that the restored processes make. Each client
//! has two machines, one for its worker and one for its process. When all clients are `Connected`, their rings open.
//!
//! | from | to | what a client's worker has loaded |
//! |---|---|---|
//! | `Loading` | `Assured` | the code is read, and nothing is left that can fail but the driver: the process may be connected and run ahead |
//! | `Loading` | `Prepared` | all but the content of device memory is in place: the process may be connected and run |
//! | `Loading` | `Loaded` | all of the image's part is in place, and every hash is right |
//! | `Loading` | `Failed` | the worker has refused or died; the next `Resume` tells why |
//! | `Assured` | `Prepared` | as from `Loading` |
//! | `Assured` | `Loaded` | the same |
//! | `Assured` | `Failed` | the same, and as from `Prepared` |
//! | `Prepared` | `Loaded` | the content is in place too |
//! | `Prepared` | `Failed` | content is missing or wrong; the next `Resume` tells why, and if there is none, the processes are killed |
//!
//! | from | to | how far a client's process is |
//! |---|---|---|
//! | `Absent` | `Reattached` | `Reattach`: the process has made its connection |
//! | `Reattached` | `Connected` | `Resume`: the worker gets the connection and the process's memory, which it takes when it has loaded |

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};

use rekindle_ctx_worker::transition::{self, machine};
use rekindle_images::{Client as Record, Image};
use rekindle_wire::control::{Failing, Failure, LoadTimes, RestoredSocket, WorkerRequest};
use tracing::{debug, error, info, warn};

use super::super::clients::{Client, ClientState, Reservation};
use super::super::lock;
use super::super::process::Process;
use super::super::worker::{Worker, WorkerError};
use super::check;
use super::error::RestoreError;
use super::made::{Made, Maker};
use super::phases::Phases;
use crate::limit::Limit;

/// The number of given-up restores that the daemon remembers.
const GIVEN_UP: usize = 16;

/// The restores that go on, and the last ones that were given up.
#[derive(Default)]
pub(in crate::daemon) struct Restores(Mutex<Known>);

#[derive(Default)]
struct Known {
    going_on: HashMap<u64, Arc<Restore>>,
    given_up: VecDeque<(u64, Arc<Made>)>,
}

impl Restores {
    pub(super) fn add(&self, restore: &Arc<Restore>) {
        lock(&self.0).going_on.insert(restore.id, Arc::clone(restore));
    }

    /// The number of restores whose processes do not run yet.
    pub(in crate::daemon) fn count(&self) -> usize {
        lock(&self.0).going_on.len()
    }

    pub(super) fn remove(&self, restore: &Restore) {
        let mut known = lock(&self.0);
        known.going_on.remove(&restore.id);
        if !restore.is_open() {
            known.given_up.push_back((restore.id, Arc::clone(restore.maker.made())));
            let too_many = known.given_up.len().saturating_sub(GIVEN_UP);
            known.given_up.drain(..too_many);
        }
    }

    /// A restored process has connected. If no restore waits for it, its connection closes; if that is because its restore was
    /// given up, the process is killed.
    pub(in crate::daemon) fn reattach(
        &self,
        restore: u64,
        socket: u32,
        cookie: u64,
        process: Process,
        stream: UnixStream,
    ) {
        let (going_on, given_up) = {
            let known = lock(&self.0);
            let given_up = known.given_up.iter().find(|it| it.0 == restore).map(|it| Arc::clone(&it.1));
            (known.going_on.get(&restore).cloned(), given_up)
        };
        if let Some(restore) = going_on {
            return restore.reattach(socket, cookie, process, stream);
        }
        warn!(pid = process.pid, "a restored process has connected after its restore was over: closing the connection");
        if let Some(made) = given_up {
            made.note(process);
            made.kill();
        }
    }
}

/// A restore.
pub(super) struct Restore {
    /// An identifier that cannot be guessed, so that no other process takes a client's place.
    id: u64,
    pub(super) clients: Vec<Restored>,
    /// Sockets of processes that were in the middle of their handshake.
    unattached: Vec<RestoredSocket>,
    maker: Arc<Maker>,
    pub(super) reservation: Reservation,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    phases: Arc<Phases>,
}

/// A client that comes back.
pub(super) struct Restored {
    pub(super) record: Record,
    pub(super) name: String,
    pub(super) worker: Arc<Worker>,
}

/// The states of the clients.
pub(super) struct State {
    /// The clients by their places. Empty once the restore is given up.
    clients: Vec<Progress>,
    open: bool,
}

/// The progress of a client.
struct Progress {
    content: Content,
    presence: Presence,
    /// Whether the worker was `Assured`.
    assured: bool,
    /// Whether the process runs ahead: what its worker is sent is done when the client is loaded, and is not answered.
    ahead: bool,
}

/// The worker's machine: whether its client's state is in place.
enum Content {
    Loading,
    Assured,
    Prepared,
    Loaded,
    Failed(WorkerError),
}

/// The machine of a client's process.
enum Presence {
    Absent,
    Reattached(Reattached),
    Connected(Arc<Client>),
}

machine! {
    enum ContentName names Content { Loading, Assured, Prepared, Loaded, Failed }
    Loading -> Assured,
    Loading -> Prepared,
    Loading -> Loaded,
    Loading -> Failed,
    Assured -> Prepared,
    Assured -> Loaded,
    Assured -> Failed,
    Prepared -> Loaded,
    Prepared -> Failed,
}

machine! {
    enum PresenceName names Presence { Absent, Reattached, Connected }
    Absent -> Reattached,
    Reattached -> Connected,
}

/// A restored process's connection.
pub(super) struct Reattached {
    pub(super) process: Process,
    pub(super) cookie: u64,
    pub(super) stream: UnixStream,
}

impl State {
    /// The connection that waits for its process to be complete.
    pub(super) fn reattached(&self, place: usize) -> Option<&Reattached> {
        match &self.clients.get(place)?.presence {
            Presence::Reattached(reattached) => Some(reattached),
            Presence::Absent | Presence::Connected(_) => None,
        }
    }

    /// Whether the client at a place has its worker.
    pub(super) fn is_connected(&self, place: usize) -> bool {
        self.clients.get(place).is_some_and(|it| matches!(it.presence, Presence::Connected(_)))
    }

    /// Whether the process at a place may be connected and run.
    pub(super) fn may_run(&self, place: usize) -> bool {
        self.is_prepared(place) || self.clients.get(place).is_some_and(|it| matches!(it.content, Content::Assured))
    }

    /// Whether the worker at a place has loaded all but content.
    pub(super) fn is_prepared(&self, place: usize) -> bool {
        self.clients.get(place).is_some_and(|it| matches!(it.content, Content::Prepared | Content::Loaded))
    }

    /// The client at a place, if it runs.
    fn running(&self, place: usize) -> Option<Arc<Client>> {
        match &self.clients.get(place)?.presence {
            Presence::Connected(client) if self.open => Some(Arc::clone(client)),
            _ => None,
        }
    }

    /// The first worker that has failed to load its client, by its place.
    pub(super) fn failed_load(&self) -> Option<(usize, WorkerError)> {
        let mut clients = self.clients.iter().enumerate();
        clients.find_map(|(place, client)| match &client.content {
            Content::Failed(error) => Some((place, error.clone())),
            Content::Loading | Content::Assured | Content::Prepared | Content::Loaded => None,
        })
    }
}

impl Restore {
    /// A restore with a worker for each client that needs one.
    pub(super) fn new(
        id: u64,
        image: &Image,
        workers: Vec<Arc<Worker>>,
        maker: Maker,
        reservation: Reservation,
        phases: Arc<Phases>,
    ) -> Self {
        let progress =
            |_| Progress { content: Content::Loading, presence: Presence::Absent, assured: false, ahead: false };
        let progress = workers.iter().map(progress);
        let state = State { clients: progress.collect(), open: false };
        let clients = check::attached(image.manifest()).zip(workers);
        let attached: HashSet<u32> = check::attached(image.manifest()).map(|it| it.index).collect();
        let all = image.manifest().clients.iter();
        let unattached = all.filter(|it| !attached.contains(&it.index));
        Self {
            id,
            unattached: unattached.flat_map(sockets_of).collect(),
            clients: clients
                .map(|(record, worker)| Restored { name: check::name(record), record: record.clone(), worker })
                .collect(),
            maker: Arc::new(maker),
            reservation,
            state: Mutex::new(state),
            changed: Condvar::new(),
            phases,
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// The workers, in the order of the clients.
    pub(super) fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.clients.iter().map(|it| &it.worker)
    }

    /// The image's record of the client at a place.
    pub(super) fn record(&self, place: usize) -> &Record {
        &self.clients[place].record
    }

    /// The sockets that CRIU's plugin connects anew.
    pub(super) fn sockets(&self) -> Vec<RestoredSocket> {
        let of_clients = self.clients.iter().flat_map(|it| sockets_of(&it.record));
        of_clients.chain(self.unattached.iter().cloned()).collect()
    }

    /// How far the restore is, and how long its parts took.
    pub(super) fn phases(&self) -> &Arc<Phases> {
        &self.phases
    }

    /// The CRIU that makes the processes.
    pub(super) fn maker(&self) -> &Arc<Maker> {
        &self.maker
    }

    /// Describes a client that has connected and died before it was complete.
    pub(super) fn has_lost(&self) -> Option<String> {
        let state = lock(&self.state);
        let mut places = 0..self.clients.len();
        let lost = places.find(|place| state.reattached(*place).is_some_and(|it| !it.process.is_alive()));
        lost.map(|place| self.clients[place].name.clone())
    }

    /// Whether clients are to come back, and none has connected.
    pub(super) fn is_nobody_there(&self) -> bool {
        let state = lock(&self.state);
        !state.clients.is_empty() && state.clients.iter().all(|it| matches!(it.presence, Presence::Absent))
    }

    /// A worker is about to load the rest, and knows of nothing that can fail.
    pub(super) fn assured(&self, place: usize) {
        if let Some(client) = lock(&self.state).clients.get_mut(place) {
            // Only a worker that loads can say it.
            if matches!(client.content, Content::Loading) {
                client.assured = true;
                self.content_is(place, client, Content::Assured);
            }
        }
        self.changed.notify_all();
    }

    /// A worker has loaded everything but content.
    pub(super) fn prepared(&self, place: usize) {
        if let Some(client) = lock(&self.state).clients.get_mut(place) {
            self.content_is(place, client, Content::Prepared);
        }
        self.changed.notify_all();
    }

    /// A worker has finished loading. Where the processes run by now, a failure ends them: their memory is not what it was. A
    /// worker that has ended does so with its process, or every CUDA call of its process fails, as always: that ends no other.
    pub(super) fn loaded(&self, place: usize, result: Result<Option<LoadTimes>, WorkerError>) {
        let mut state = lock(&self.state);
        let (open, running, over) = (state.open, state.running(place), result.clone());
        if let Some(client) = state.clients.get_mut(place) {
            let lost = match &result {
                Err(WorkerError::Dead(_) | WorkerError::Ended) | Ok(_) => None,
                Err(error) => Some(error.to_string()).filter(|_| open),
            };
            self.content_is(place, client, result.map_or_else(Content::Failed, |_| Content::Loaded));
            if let Some(why) = lost {
                error!(
                    "{}: its memory cannot be restored: {why}; killing the restored processes",
                    self.clients[place].name
                );
                self.kill(&state);
            } else if let Presence::Connected(client) = &client.presence
                && client.state() == ClientState::Loading
            {
                client.set_state(ClientState::Running);
            }
        }
        drop(state);
        self.changed.notify_all();
        self.tell(place, over, running.as_deref());
    }

    /// Tells those who watch the restore how a load has ended. As long as the process does not run, the restore itself tells a
    /// failure.
    fn tell(&self, place: usize, result: Result<Option<LoadTimes>, WorkerError>, running: Option<&Client>) {
        match (result, running) {
            (Ok(times), _) => self.phases.loaded(place, times),
            (Err(_), None) => {}
            (Err(error), Some(client)) => match client.explain(error) {
                WorkerError::Ended => self.phases.ended(place),
                error => self.phases.failed(&self.failure(place, error).failure()),
            },
        }
    }

    fn content_is(&self, place: usize, client: &mut Progress, next: Content) {
        transition::replace(&format_args!("worker of {}", self.clients[place].name), &mut client.content, next);
    }

    /// Kills the workers, and the processes made so far.
    fn kill(&self, state: &State) {
        self.maker.made().kill();
        for client in &state.clients {
            if let Presence::Connected(client) = &client.presence {
                client.process.kill();
            }
        }
        self.workers().for_each(|it| it.kill());
    }

    fn reattach(&self, socket: u32, cookie: u64, process: Process, stream: UnixStream) {
        if self.unattached.iter().any(|it| it.id == socket) {
            self.maker.made().note(process);
            debug!(pid = process.pid, "it will begin its handshake again");
            return;
        }
        let mut clients = self.clients.iter();
        let Some(place) = clients.position(|it| it.record.socket_ids.contains(&socket)) else {
            return warn!(
                pid = process.pid,
                socket, "a restored process has named a socket that its restore does not know"
            );
        };
        self.maker.made().note(process);
        let mut state = lock(&self.state);
        // The first connection counts. A later connection with the same number is closed.
        if let Some(Progress { presence: presence @ Presence::Absent, .. }) = state.clients.get_mut(place) {
            let next = Presence::Reattached(Reattached { process, cookie, stream });
            transition::replace(&self.clients[place].name, presence, next);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// A process is complete, so its client takes the place of its connection. Returns the connection, if it has arrived, and whether the
    /// process runs ahead of its worker: one that was assured, and maps memory still, is slow to answer.
    pub(super) fn connected(&self, place: usize, client: &Arc<Client>) -> Option<(UnixStream, bool)> {
        let mut state = lock(&self.state);
        let progress = state.clients.get_mut(place)?;
        progress.ahead = progress.assured && matches!(progress.content, Content::Assured | Content::Prepared);
        let ahead = progress.ahead;
        let presence = &mut progress.presence;
        let Presence::Reattached(_) = presence else { return None };
        let next = Presence::Connected(Arc::clone(client));
        match transition::replace(&self.clients[place].name, presence, next) {
            Presence::Reattached(reattached) => Some((reattached.stream, ahead)),
            Presence::Absent | Presence::Connected(_) => None,
        }
    }

    /// Whether every client is connected, so that the rings can open.
    pub(super) fn is_whole(&self) -> bool {
        lock(&self.state).clients.iter().all(|it| matches!(it.presence, Presence::Connected(_)))
    }

    /// Opens all rings if every client is connected. Each worker answers within the limit.
    pub(super) fn open_if_whole(&self, limit: Limit) -> Result<bool, RestoreError> {
        let clients: Vec<_> = {
            let state = lock(&self.state);
            let connected = state.clients.iter().map(|it| match &it.presence {
                // One that has loaded all is asked for nothing more, and would not tell that it cannot take the process.
                Presence::Connected(client) => {
                    Some((Arc::clone(client), it.ahead && !matches!(it.content, Content::Loaded)))
                }
                _ => None,
            });
            let Some(connected) = connected.collect::<Option<Vec<_>>>() else { return Ok(false) };
            connected.into_iter().enumerate().collect()
        };
        let opened: Vec<_> = std::thread::scope(|scope| {
            let open = |client: &Client, ahead| match ahead {
                true => client.worker.say_ahead(WorkerRequest::Open, &[]),
                false => client.worker.ask(&WorkerRequest::Open, &[], limit),
            };
            let clients = clients.iter();
            let asked: Vec<_> =
                clients.map(|(place, (client, ahead))| (*place, scope.spawn(move || open(client, *ahead)))).collect();
            let joined = asked.into_iter();
            joined.map(|(place, it)| (place, it.join())).collect()
        });
        for (place, result) in opened {
            let gone = || WorkerError::Failed(Failure::internal("a thread of the daemon's is gone"));
            let result = result.unwrap_or_else(|_| Err(gone()));
            result.map_err(|error| self.failure(place, error))?;
        }
        let mut state = lock(&self.state);
        if let Some((failed, error)) = state.failed_load() {
            return Err(self.failure(failed, error));
        }
        for progress in &state.clients {
            if let Presence::Connected(client) = &progress.presence {
                let loading = matches!(progress.content, Content::Assured | Content::Prepared);
                client.set_state(if loading { ClientState::Loading } else { ClientState::Running });
            }
        }
        state.open = true;
        drop(state);
        self.phases.runs();
        info!(clients = clients.len(), "restored");
        Ok(true)
    }

    pub(super) fn is_open(&self) -> bool {
        lock(&self.state).open
    }

    /// Kills the workers and the processes made so far, unless they run by now.
    pub(super) fn give_up_unless_open(&self) {
        let mut state = lock(&self.state);
        if !state.open {
            state.clients.clear();
            self.workers().for_each(|it| it.kill());
            self.maker.made().kill();
        }
    }

    pub(super) fn failure(&self, place: usize, error: WorkerError) -> RestoreError {
        RestoreError::Worker(self.clients[place].name.clone(), error)
    }
}

fn sockets_of(record: &Record) -> impl Iterator<Item = RestoredSocket> {
    let path = record.socket_path.to_string_lossy();
    record.socket_ids.iter().map(move |id| RestoredSocket { id: *id, path: path.clone().into_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_above_are_the_lists_of_transitions() {
        let table = |machine| transition::table(include_str!("state.rs"), machine);
        assert_eq!(table("what a client's worker has loaded"), transition::list::<ContentName>());
        assert_eq!(table("how far a client's process is"), transition::list::<PresenceName>());
    }
}
