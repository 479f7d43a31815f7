//! Writing the image while CRIU writes its own.
//!
//! ```text
//!   per client:  Save ─► SaveCode… ─► may open ─┬─► Progress… ─► saved ──(all)──► data durable ─┐
//!                                               │                                               ├─► manifest, commit ─► durable
//!   session:     Finish ────────────────────────┴─► (tasks go on: rings open) ──────────────────┘
//!
//!   a client that fails, or a session that ends: the other Saves are cancelled, the image is removed, rings open
//! ```
//!
//! If a disk, a worker or a thread of ours hangs, none of these happens. So the session that waits watches whether the image
//! grows or comes a step further. After a time without progress it gives the image up and opens the rings itself, since all
//! threads share them. A part that hung and wakes up finds that out and removes what it has made.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rekindle_builds::Store;
use rekindle_images::{Client as Record, Committed, ImageWriter, Native, PhaseName, Protocol};
use rekindle_wire::control::{SavedCode, WorkerReply, WorkerRequest};
use tracing::{debug, info, warn};

use super::super::clients::{Client, ClientState};
use super::super::ipc::Sharing;
use super::super::pool::Pool;
use super::super::quiesce::ClosedRing;
use super::super::worker::WorkerError;
use super::super::{lock, sys, thread, wait};
use super::error::{DumpError, SaveError};
use super::files::Files;
use super::libraries;
use super::manifest::{self, Costs, Timeline, Whose};
use super::precopy::{POLL_INTERVAL, Planned};
use super::progress::Progress;
use super::protocol::Chosen;
use super::rehearsal;
use super::spans::Work;
use crate::limit::Limit;

/// The times, limits and parties of a save.
pub(super) struct How {
    /// `Pause` arrived.
    pub(super) began: Instant,
    /// The clients were asked to come to rest.
    pub(super) quiesce_began: Instant,
    /// All clients were at rest.
    pub(super) idle_at: Instant,
    /// The clients' processes were stopped.
    pub(super) frozen_at: Instant,
    /// The root of the tree.
    pub(super) root: i32,
    /// Whether the tasks go on.
    pub(super) leave_running: bool,
    /// The builds of Rekindle's libraries.
    pub(super) builds: Store,
    /// How long a worker may take whose client is at rest.
    pub(super) quiesce: Limit,
    /// How long the image may make no progress.
    pub(super) stall: Limit,
    /// The memory that the clients share.
    pub(super) sharing: Sharing,
    /// The pool of spare workers for rehearsals.
    pub(super) pool: Arc<Pool>,
    /// The processes that the driver checkpoints.
    pub(super) natives: Vec<Native>,
    /// Whether each client is rehearsed.
    pub(super) rehearse: bool,
    /// The progress for listings.
    pub(super) progress: Arc<Progress>,
}

/// An image being written in the background. Dropping the job gives the image up, unless it is durable by then, and lets the
/// clients go on.
pub(super) struct SaveJob {
    shared: Arc<Shared>,
    /// How long the image may make no progress.
    stall: Limit,
    clients: Vec<Arc<Client>>,
    /// Becomes readable when the job is over.
    over: UnixStream,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    how: How,
    began: Instant,
}

/// The pause between two checks whether the image comes further.
const WATCH: Duration = Duration::from_millis(500);

#[derive(Default)]
struct State {
    /// The number of steps done.
    steps: u64,
    /// The files that clients' memory is written to.
    files: Vec<Arc<Files>>,
    /// The numbers of clients whose rings may open, and of those whose memory is in the image's files.
    may_open: usize,
    saved: usize,
    /// The bytes of device memory, and the bytes copied by now.
    bytes: u64,
    copied: u64,
    costs: Costs,
    /// When all rings were allowed to open.
    may_open_at: Option<Instant>,
    copied_at: Option<Instant>,
    /// CRIU is through with the processes' memory: when, and the owners of the sockets that it dumped.
    finish: Option<(Instant, Vec<(Whose, u32)>)>,
    opened_at: Option<Instant>,
    failed: Option<SaveError>,
    /// The save was given up because it made no progress.
    stalled: bool,
    outcome: Option<Result<Committed, SaveError>>,
    /// The step that each writing thread waits for, by the client's place; none for the thread that writes the parts common to
    /// all clients.
    awaited: BTreeMap<Option<usize>, String>,
    /// The rings that are closed.
    rings: Vec<ClosedRing>,
}

impl State {
    /// One more of `all` clients may open its ring.
    fn now_may_open(&mut self, all: usize) {
        self.may_open += 1;
        if self.may_open == all {
            self.may_open_at = Some(Instant::now());
        }
    }

    /// A pair that changes whenever the image comes further.
    fn progress(&self) -> (u64, u64) {
        (self.steps + self.copied, self.files.iter().map(|it| it.blocks()).sum())
    }
}

impl SaveJob {
    /// Starts the job.
    pub(super) fn start(
        writer: ImageWriter,
        rings: Vec<ClosedRing>,
        planned: Vec<Planned>,
        how: How,
    ) -> io::Result<Self> {
        let stall = how.stall;
        let (over, theirs) = UnixStream::pair()?;
        let clients = planned.iter().map(|it| Arc::clone(&it.client)).collect();
        for ring in &rings {
            ring.client().set_state(ClientState::Saving);
        }
        how.progress.phase(PhaseName::Copy);
        let state = State { rings, ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), how, began: Instant::now() });
        let of_thread = Arc::clone(&shared);
        let thread = thread("save", move || {
            let outcome = of_thread.run(writer, &planned);
            lock(&of_thread.state).outcome = Some(outcome);
            drop(theirs);
        })?;
        Ok(Self { shared, stall, clients, over, thread: Some(thread) })
    }

    /// The clients whose memory is saved.
    pub(super) fn clients(&self) -> &[Arc<Client>] {
        &self.clients
    }

    /// An error if it has failed by now.
    pub(super) fn check(&self) -> Result<(), SaveError> {
        self.shared.check()
    }

    /// CRIU has written the processes' memory; notes the sockets' owners.
    pub(super) fn finish(&self, sockets: Vec<(Whose, u32)>) {
        lock(&self.shared.state).finish = Some((Instant::now(), sockets));
        self.shared.changed.notify_all();
    }

    /// Waits until the image is durable, the session's connection closes, or the image makes no progress.
    pub(super) fn wait(&self, session: &UnixStream) -> Result<Committed, DumpError> {
        let (mut progress, mut stalled) = (None, self.stall.begins());
        loop {
            let fds = [self.over.as_fd(), session.as_fd()];
            let [over, spoke] = sys::wait_readable(fds, Some(WATCH)).map_err(DumpError::Thread)?;
            if over {
                let outcome = lock(&self.shared.state).outcome.clone();
                // There is no outcome only if the saving thread panicked.
                let lost = || Err(SaveError::internal("the daemon's saving thread is gone"));
                return Ok(outcome.unwrap_or_else(lost)?);
            }
            // A peer must not send another request before the reply, so this ends the dump.
            if spoke {
                return Err(DumpError::Closed);
            }
            let now = Some(lock(&self.shared.state).progress());
            if now != progress {
                (progress, stalled) = (now, self.stall.begins());
            } else if stalled.is_over() {
                return Err(self.shared.fail_stalled(self.stall).into());
            }
        }
    }
}

impl Drop for SaveJob {
    fn drop(&mut self) {
        if !matches!(lock(&self.shared.state).outcome, Some(Ok(_))) {
            self.shared.fail(SaveError::given_up());
        }
        if let Some(thread) = self.thread.take() {
            let timeout = if lock(&self.shared.state).stalled { Duration::ZERO } else { self.stall.time };
            match sys::wait_readable([self.over.as_fd()], Some(timeout)) {
                // A panic of the thread has been reported, and its unwinding released everything.
                Ok([true]) => drop(thread.join()),
                _ => warn!("the thread that writes the image hangs; when it goes on, it removes the incomplete image"),
            }
        }
        let rings = std::mem::take(&mut lock(&self.shared.state).rings);
        drop(rings);
    }
}

/// A client's part of the manifest.
struct Saved {
    record: Record,
    client: Arc<Client>,
    namespace_pid: i32,
}

impl Shared {
    fn run(&self, writer: ImageWriter, planned: &[Planned]) -> Result<Committed, SaveError> {
        match self.write(&writer, planned).and_then(|it| self.check().map(|()| it)) {
            Ok(manifest) => {
                self.awaits(None, "the disk to take the image's manifest");
                // The image may have been given up meanwhile, and `criu` has said so.
                let committed = writer.commit_if(manifest, || self.check().is_ok());
                committed.map_err(|error| {
                    let error = self.check().err().unwrap_or_else(|| error.into());
                    self.fail(error.clone());
                    error
                })
            }
            Err(error) => {
                if let Err(error) = writer.abort() {
                    warn!("cannot remove the incomplete image: {error}");
                }
                Err(error)
            }
        }
    }

    /// Writes everything but the commit.
    fn write(&self, writer: &ImageWriter, planned: &[Planned]) -> Result<rekindle_images::Manifest, SaveError> {
        let (saved, synced, builds) = std::thread::scope(|scope| {
            let builds = scope.spawn(|| libraries::save(writer, &self.how.builds, self.how.root));
            let threads: Vec<_> = planned
                .iter()
                .enumerate()
                .map(|(place, it)| scope.spawn(move || self.save_client(writer, place, it, planned.len())))
                .collect();
            let copied = self.wait_for_copies(planned);
            let builds = builds.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            let synced = copied.and_then(|()| {
                self.awaits(None, "the disk to take the clients' memory");
                let synced = writer.sync().map(|()| Instant::now());
                self.step();
                synced.map_err(|error| self.fail(error.into()))
            });
            // If no client has a worker, no other thread waits for CRIU.
            self.wait_for_finish();
            let saved = threads.into_iter().filter_map(|it| it.join().ok()?);
            (saved.collect::<Vec<_>>(), synced, builds)
        });
        self.check()?;
        let builds = builds?;
        if saved.len() < planned.len() {
            return Err(SaveError::internal("a thread of the daemon's that saves a process is gone"));
        }
        self.awaits(None, "the disk to take CRIU's files");
        // CRIU's files are written by now, and are half of the image.
        writer.dir().sync_files(|| self.step())?;
        let mut state = lock(&self.state);
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        let (Ok(synced_at), Some((finished_at, sockets)), Some(copied_at)) =
            (synced, state.finish.take(), state.copied_at)
        else {
            return Err(SaveError::not_whole());
        };
        let precopied = planned.iter().map(|it| it.precopied);
        let timeline = Timeline {
            began: self.how.began,
            quiesce_began: self.how.quiesce_began,
            precopied: precopied.max_by_key(|it| it.1).unwrap_or_default(),
            costs: state.costs,
            may_open_at: state.may_open_at.unwrap_or(copied_at),
            idle_at: self.how.idle_at,
            frozen_at: self.how.frozen_at,
            saving_at: self.began,
            copied_at,
            synced_at,
            finished_at,
            opened_at: state.opened_at,
            bytes: state.bytes,
        };
        drop(state);
        for phase in timeline.phases() {
            let ms = phase.duration / 1_000_000;
            info!(ms, bytes = phase.bytes, "phase {}", phase.name.as_str());
        }
        let mut records = Vec::new();
        for mut one in saved {
            manifest::identify(&mut one.record, &one.client, one.namespace_pid, &sockets);
            records.push(one.record);
        }
        let workers = planned.iter().map(|it| it.client.worker.attached());
        let mut chosen = protocol_of_all(planned);
        if planned.is_empty() && !self.how.natives.is_empty() {
            chosen.reason = "the driver has moved all GPU memory into host memory, which is in CRIU's files".to_owned();
        }
        let manifest = manifest::build(&timeline, &chosen, workers, records, &sockets);
        let manifest = rekindle_images::Manifest { builds, natives: self.how.natives.clone(), ..manifest };
        self.how.progress.describe(&manifest, self.how.began);
        Ok(manifest)
    }

    /// Waits until every client is saved. When one fails, the others are cut short.
    fn wait_for_copies(&self, planned: &[Planned]) -> Result<(), ()> {
        let mut state = lock(&self.state);
        while state.failed.is_none() && state.saved < planned.len() {
            state = wait(&self.changed, state);
        }
        if state.failed.is_none() {
            state.copied_at = Some(Instant::now());
            self.how.progress.phase(PhaseName::Write);
            self.changed.notify_all();
            return Ok(());
        }
        drop(state);
        for it in planned {
            it.client.worker.cancel();
        }
        Err(())
    }

    /// Saves one client, and lets the client go on when CRIU is through with it.
    fn save_client(&self, writer: &ImageWriter, place: usize, planned: &Planned, all: usize) -> Option<Saved> {
        let client = &planned.client;
        // Read while the process is there: a task that does not go on is killed when this dump is over.
        let namespace_pid = client.namespace_pid() as i32;
        let mut open = None;
        let copied = || self.awaits(Some(place), &format!("{client} to be copied by its worker"));
        self.awaits(Some(place), &format!("the worker of {client} to begin"));
        let saved = self.begin(writer, place, planned).and_then(|files| {
            copied();
            let early = self.copy(planned, &files, Until::MayOpen, all)?;
            self.awaits(Some(place), &format!("CRIU, and those that {client} shares memory with"));
            if self.wait_for_finish().is_none() {
                return Err(SaveError::given_up());
            }
            self.wait_for_those_it_shares_with();
            // CRIU is through, and so are the workers that copy memory which this client has too: their copies are good if the
            // ring was closed all the time.
            self.awaits(Some(place), &format!("the worker of {client} to open its ring"));
            self.hold(client)?;
            self.step();
            if self.how.leave_running {
                // The ring is not there any more if the image has been given up.
                let ring = self.take_ring(client).ok_or_else(SaveError::given_up)?;
                open = Some(ring.open(self.how.quiesce).map_err(|error| SaveError::of(client, &error))?);
                lock(&self.state).opened_at = Some(Instant::now());
            }
            let record = match early {
                Some(record) => Some(record),
                None => {
                    copied();
                    self.copy(planned, &files, Until::Saved, all)?
                }
            };
            if let Some(record) = record.as_ref().filter(|record| self.how.rehearse || rehearsal::is_needed(record)) {
                self.awaits(Some(place), &format!("a spare worker to rehearse the restore of {client}"));
                self.rehearse(writer, client, record)?;
            }
            Ok(record)
        });
        lock(&self.state).awaited.remove(&Some(place));
        match saved {
            Ok(record) => Some(Saved { record: record?, client: Arc::clone(client), namespace_pid }),
            Err(error) => {
                self.fail(error);
                client.worker.cancel();
                None
            }
        }
    }

    /// Proves that the client can be restored. While the spare worker works, the image counts as coming further.
    fn rehearse(&self, writer: &ImageWriter, client: &Client, record: &Record) -> Result<(), SaveError> {
        std::thread::scope(|scope| {
            let rehearsal = scope.spawn(|| rehearsal::rehearse(&self.how.pool, writer, client, record, self.how.stall));
            while !rehearsal.is_finished() {
                self.step();
                std::thread::sleep(POLL_INTERVAL[1]);
            }
            rehearsal.join().unwrap_or_else(|_| Err(SaveError::internal("the daemon's rehearsing thread is gone")))
        })
    }

    fn hold(&self, client: &Client) -> Result<(), SaveError> {
        let held = client.worker.ask(&WorkerRequest::ConfirmQuiesced, &[], self.how.quiesce);
        held.map_err(|error| SaveError::of(client, &error))
    }

    /// Has the worker begin, and write the client's code. Returns the files that the worker writes the client's memory to.
    fn begin(&self, writer: &ImageWriter, place: usize, planned: &Planned) -> Result<Arc<Files>, SaveError> {
        let client = &planned.client;
        planned.pace(self.how.stall)?;
        let elsewhere = self.how.sharing.elsewhere.get(place).cloned().unwrap_or_default();
        let files = planned.files(writer)?;
        self.check()?;
        lock(&self.state).files.push(Arc::clone(&files));
        files.files().iter().for_each(|file| self.how.progress.writes(file));
        let failed = |error: WorkerError| SaveError::of(client, &error);
        let request = WorkerRequest::Save {
            hash_key: writer.key().to_bytes(),
            files: files.numbers(),
            elsewhere,
            compression: writer.compression().to_string(),
            copying: planned.chosen.copying(),
            precopied: planned.files.is_some(),
            rehearses: true,
            hash_on_device: false,
        };
        let known = writer.base().map(|base| base.known(client.namespace_pid())).unwrap_or_default();
        let blob = known.to_bytes();
        let began = Instant::now();
        let answered = client.worker.call(&request, &blob, &files.descriptors(), self.how.stall).map_err(failed)?;
        let WorkerReply::Begun { code, secured } = answered.reply else {
            return Err(failed(WorkerError::Protocol("Save")));
        };
        planned.rounds.iter().for_each(|round| self.how.progress.worked(|| round.clone()));
        self.how.progress.worked(|| Work::secure(client, began, &secured));
        debug!(%client, ?secured, code = code.len(), "secured");
        let mut state = lock(&self.state);
        state.bytes = state.bytes.saturating_add(secured.bytes);
        state.costs.add(&secured);
        state.steps += 1;
        drop(state);
        for image in &code {
            save_code(writer, client, image, self.how.stall)?;
        }
        Ok(files)
    }

    /// Waits until the worker's copy has come to `until`. Returns the client's part of the manifest once the copy is over.
    fn copy(&self, planned: &Planned, files: &Files, until: Until, all: usize) -> Result<Option<Record>, SaveError> {
        let (client, index) = (&planned.client, planned.index);
        let failed = |error: WorkerError| SaveError::of(client, &error);
        let (mut pause, mut copied_before) = (POLL_INTERVAL[0], 0);
        loop {
            self.check()?;
            planned.pace(self.how.stall)?;
            let answered = client.worker.call(&WorkerRequest::Progress, &[], &[], self.how.stall).map_err(failed)?;
            match answered.reply {
                WorkerReply::Saved { bytes, waits } => {
                    debug!(%client, bytes, ?waits, "saved");
                    self.how.progress.worked(|| Work::save(client, self.began, bytes));
                    let mut record = Record::from_bytes(&answered.blob)?;
                    if !files.have_all_of(&record) {
                        return Err(SaveError::internal(format!(
                            "{client} cannot be saved: its worker names files of other clients"
                        )));
                    }
                    record.index = index;
                    let mut state = lock(&self.state);
                    state.saved += 1;
                    state.steps += 1;
                    state.costs.wait(&waits);
                    if until == Until::MayOpen {
                        state.now_may_open(all);
                    }
                    drop(state);
                    self.changed.notify_all();
                    return Ok(Some(record));
                }
                WorkerReply::Saving { may_open, copied, .. } => {
                    let mut state = lock(&self.state);
                    let more = copied.saturating_sub(copied_before);
                    state.copied = state.copied.saturating_add(more);
                    copied_before = copied;
                    self.how.progress.saved(more);
                    if may_open && until == Until::MayOpen {
                        state.now_may_open(all);
                        drop(state);
                        self.changed.notify_all();
                        return Ok(None);
                    }
                }
                _ => return Err(failed(WorkerError::Protocol("Progress"))),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(POLL_INTERVAL[1]);
        }
    }

    /// Waits for clients with shared memory: memory that must be copied before rings open may be this client's too.
    fn wait_for_those_it_shares_with(&self) {
        let shared = self.how.sharing.elsewhere.iter().any(|it| !it.is_empty());
        let mut state = lock(&self.state);
        while shared && state.failed.is_none() && state.may_open_at.is_none() {
            state = wait(&self.changed, state);
        }
    }

    fn wait_for_finish(&self) -> Option<()> {
        let mut state = lock(&self.state);
        loop {
            if state.failed.is_some() {
                return None;
            }
            if state.finish.is_some() {
                return Some(());
            }
            state = wait(&self.changed, state);
        }
    }

    fn take_ring(&self, client: &Arc<Client>) -> Option<ClosedRing> {
        let rings = &mut lock(&self.state).rings;
        let at = rings.iter().position(|it| Arc::ptr_eq(it.client(), client))?;
        Some(rings.swap_remove(at))
    }

    /// Notes what a client's thread waits for now, or, without a place, the thread that writes the common parts.
    fn awaits(&self, place: Option<usize>, what: &str) {
        lock(&self.state).awaited.insert(place, what.to_owned());
    }

    /// Counts a step.
    fn step(&self) {
        lock(&self.state).steps += 1;
    }

    fn check(&self) -> Result<(), SaveError> {
        match &lock(&self.state).failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Lets all clients go on. The first failure is the reason; later failures follow from it.
    fn fail(&self, error: SaveError) {
        let rings = {
            let mut state = lock(&self.state);
            state.failed.get_or_insert(error);
            std::mem::take(&mut state.rings)
        };
        self.changed.notify_all();
        drop(rings);
    }

    /// Gives up an image without progress. A part that hangs is not waited for.
    fn fail_stalled(&self, limit: Limit) -> SaveError {
        let error = {
            let mut state = lock(&self.state);
            state.stalled = true;
            let awaited: Vec<_> = state.awaited.values().map(String::as_str).collect();
            SaveError::stalled(limit, &awaited.join(", and for "))
        };
        self.fail(error.clone());
        error
    }
}

/// The point that a worker's copy is waited for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    MayOpen,
    Saved,
}

/// The protocol of the whole image, and the reason for it.
pub(super) fn protocol_of_all(planned: &[Planned]) -> Chosen {
    let mut all: Vec<&Chosen> = planned.iter().map(|it| &it.chosen).collect();
    all.dedup();
    match all.as_slice() {
        [] => Chosen { protocol: Protocol::Stop, reason: "there is no GPU memory".to_owned() },
        [one] => (*one).clone(),
        several => {
            let reasons = planned
                .iter()
                .map(|it| format!("{}: {}, {}", it.client, it.chosen.protocol.as_str(), it.chosen.reason));
            let same = several.iter().all(|it| it.protocol == several[0].protocol);
            let protocol = if same { several[0].protocol } else { Protocol::Auto };
            Chosen { protocol, reason: reasons.collect::<Vec<_>>().join("; ") }
        }
    }
}

fn save_code(writer: &ImageWriter, client: &Client, image: &SavedCode, limit: Limit) -> Result<(), SaveError> {
    let malformed = |_| SaveError::of(client, &WorkerError::Protocol("Save"));
    let hash = image.hash.parse().map_err(malformed)?;
    let Some(file) = writer.code_file(hash, image.size)? else {
        // The image has the same code of another client already.
        return Ok(());
    };
    let request = WorkerRequest::SaveCode { hash: image.hash.clone() };
    let fds = [OwnedFd::from(file)];
    client.worker.ask(&request, &sys::raw(&fds), limit).map_err(|error| SaveError::of(client, &error))
}
