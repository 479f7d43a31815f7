//! The worker's loop: commands of the client, requests of the daemon, and waiting work, in turn. The functions here that take a
//! state and return the next are the transitions of `state.rs`.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use rekindle_images::content::ContentKey;
use rekindle_images::{Client, DataFile, DataWriter, HashKey, Known};
use rekindle_wire::attach::{Answer, Attach};
use rekindle_wire::calls;
use rekindle_wire::control::{self, Failing, Failure, WorkerReply, WorkerRequest};
use rekindle_wire::frame::{self, Message};
use rekindle_wire::layout::{self, Shared};
use rekindle_wire::ring::Consumer;
use rekindle_wire::standstill;
use rekindle_wire::version::control_version;
use rekindle_wire::{Dialect, OLDEST_CONTROL};
use tracing::{error, info, warn};

use crate::checkpoint::access::observe;
use crate::checkpoint::check::obstacles;
use crate::checkpoint::copying::background::Progress;
use crate::checkpoint::engine::{StageError, small_thread};
use crate::checkpoint::save::Wanted;
use crate::resources::code_store::Image;
use crate::resources::pinned::{is_sealed, map_as_used};
use crate::schedule::gpu_time::GpuTime;
use crate::schedule::rest::{self, Rest};
use crate::serve::channel::{self, Asker, Channel, Event};
use crate::serve::executor::Executor;
use crate::serve::refusal::Refusal;
use crate::serve::silence;
use crate::serve::state::{Closed, How, Spare, State};
use crate::serve::title;
use crate::session::staging::Staging;
use crate::transition::{Machine, step};

/// The number of commands executed before other events are checked.
const BATCH: usize = 64;
/// How long a hot worker spins for the next command before it sleeps, and a caller for its reply. Zero on machines with few
/// cores, where spinning keeps the other side from running.
const WORKER_SPIN: Duration = Duration::from_micros(200);
const CALLER_SPIN_US: u32 = 2000;
const CORES_TO_SPIN: usize = 4;
/// How long a device is polled, and how long the pauses between checks are after that.
const HOT_WAIT: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(50);

/// How long the daemon may take to end a restored process whose worker has failed.
const END_GRACE: Duration = Duration::from_secs(10);

/// Where the worker maps ring and staging: above the windows, and outside of the range in which the kernel places mappings. The
/// driver takes addresses in that range for the code of later contexts, and must find the same addresses free in a restore,
/// when ring and staging are mapped last (see [`crate::serve::start`]).
const RING_AT: u64 = 0x7000_0000_0000;
const STAGING_AT: u64 = RING_AT + (1 << 30);

/// The answer to a request.
pub(super) type Answered = Result<(WorkerReply, Vec<u8>), Refusal>;

pub(super) fn done<T>(result: Result<T, Refusal>) -> Answered {
    result.map(|_| (WorkerReply::Done, Vec::new()))
}

/// The events that end a wait.
pub(super) enum News {
    Event(Event),
    /// The daemon of a worker whose ring is closed has been silent for too long.
    Silence,
    /// A suspended client has a command, or it is time to look for room for it again.
    Resume,
    /// No request will arrive any more.
    End,
}

pub(super) struct Server {
    pub(super) executor: Executor,
    pub(super) channel: Arc<Channel>,
    spin: Duration,
    caller_spin_us: u32,
    /// When the client had a command, or something ran for it, last.
    last_work: Instant,
    /// When the client's first command, of those that this worker executes, was executed.
    first_command: Option<Instant>,
    gpu_time: GpuTime,
    /// While threads of the client wait for pages of managed memory.
    faults: Option<Faults>,
}

/// The wait of threads for pages of managed memory.
struct Faults {
    since: Instant,
    /// Since when no command is taken.
    held_since: Instant,
    /// Whether the log has the reason.
    told: bool,
}

/// Serves until the client or the daemon of a spare worker is gone.
pub(crate) fn serve(mut executor: Executor, socket: UnixStream) -> ExitCode {
    let (attached, arrived) = (executor.call.session.attached.clone(), executor.memory.pinned.arrived.clone());
    let (channel, events) = match channel::start(socket, attached.clone(), arrived) {
        Ok(started) => started,
        Err(error) => {
            error!("cannot start: {error}");
            return ExitCode::from(1);
        }
    };
    // The daemon that started the worker gets this reply. Its socket is not kept here, so that the connection ends with the
    // daemon.
    let ready = WorkerReply::Ready { attached, wire: control_version(), oldest: OLDEST_CONTROL };
    if let Some(asker) = channel.asker() {
        channel.answer(&asker, ready, Vec::new());
    }
    let asking = Arc::clone(&channel);
    executor.checkpoint.copying.memory_pressure =
        Some(Box::new(move |first, needs| asking.is_room_coming(first, needs)));
    let mut server = Server::new(executor, channel);
    server.run(&events);
    ExitCode::SUCCESS
}

fn cannot_write(image: &Image, error: &io::Error) -> Failure {
    let reason = match error.kind() {
        io::ErrorKind::StorageFull => {
            format!("no space to write code image {}: free some or dump elsewhere", image.hash)
        }
        _ => format!("code image {}: {error}", image.hash),
    };
    Failure::new(Failing::kind(error), reason)
}

/// A writer of data files, which skips pieces known from other images. The files may have been sent twice.
fn writer(
    fds: impl Iterator<Item = OwnedFd>,
    numbers: &[u32],
    key: ContentKey,
    compression: &str,
    known: &[u8],
) -> Result<DataWriter, Refusal> {
    let mut files: Vec<_> = fds.map(channel::file).collect();
    if files.len() != numbers.len() && files.len() != 2 * numbers.len() {
        return Err(Refusal::Files { came: files.len(), files: numbers.len() });
    }
    let direct = files.split_off(numbers.len());
    let writer = DataWriter::of(numbers.iter().copied().zip(files), key)?;
    let compression = compression.parse()?;
    let known = Known::from_bytes(known)?;
    Ok(writer.with_direct(direct).with_known(known).with_compression(compression))
}

impl Server {
    fn new(executor: Executor, channel: Arc<Channel>) -> Self {
        let few_cores = crate::cores::cores() < CORES_TO_SPIN;
        Self {
            gpu_time: GpuTime::new(executor.memory.devices.len()),
            executor,
            channel,
            spin: if few_cores { Duration::ZERO } else { WORKER_SPIN },
            caller_spin_us: if few_cores { 0 } else { CALLER_SPIN_US },
            last_work: Instant::now(),
            first_command: None,
            faults: None,
        }
    }

    fn run(&mut self, events: &Receiver<Event>) {
        let machine = format!("worker {}", std::process::id());
        let mut state = State::Spare(Spare::default());
        loop {
            let news = self.wait(&mut state, events);
            if matches!(news, News::End) {
                return;
            }
            // A client that a quiesce has found idle is as idle afterwards.
            let was_served = matches!(state, State::Open(_) | State::Closing(_) | State::Quiesced(_));
            (state, ()) = step(&machine, state, |state| (self.handle(state, news), ()));
            if !was_served && matches!(state, State::Open(_)) {
                self.last_work = Instant::now();
            }
        }
    }

    /// Waits for an event. A worker whose ring is open executes commands meanwhile.
    fn wait(&mut self, state: &mut State, events: &Receiver<Event>) -> News {
        match state {
            State::Closing(_) | State::Quiesced(_) => loop {
                match events.recv_timeout(silence::POLL_INTERVAL) {
                    Ok(event) => return News::Event(event),
                    Err(RecvTimeoutError::Disconnected) => return News::End,
                    Err(RecvTimeoutError::Timeout) if self.channel.silence.is_too_long() => return News::Silence,
                    Err(RecvTimeoutError::Timeout) => {}
                }
            },
            State::Open(consumer) => loop {
                if let Ok(event) = events.try_recv() {
                    return News::Event(event);
                }
                // An event that arrives after the check above sets this.
                if !self.channel.news.swap(false, Ordering::AcqRel) {
                    self.work(consumer);
                }
            },
            State::Suspended(suspended) => self.wait_suspended(suspended, events),
            State::Keeper(keeper) => self.wait_kept(keeper, events),
            State::Failed(_) if self.channel.has_client() || self.executor.call.session.shared.is_some() => {
                match events.recv_timeout(END_GRACE) {
                    Ok(event) => News::Event(event),
                    Err(RecvTimeoutError::Disconnected) => News::End,
                    Err(RecvTimeoutError::Timeout) => News::Silence,
                }
            }
            State::Spare(_)
            | State::Rehearsed
            | State::Warm(_)
            | State::Loaded(_)
            | State::Connected(_)
            | State::Filling(_)
            | State::Failed(_) => events.recv().map_or(News::End, News::Event),
        }
    }

    /// Executes commands and completes waiting work until there is news; sleeps when there is nothing to do.
    fn work(&mut self, consumer: &mut Consumer) {
        let mut last_command = Instant::now();
        self.gpu_time.restart(last_command);
        loop {
            let mut worked = false;
            let batch = if self.holds_commands_back() { 0 } else { BATCH };
            for _ in 0..batch {
                match consumer.take() {
                    Ok(Some((header, parameters))) => {
                        worked = true;
                        if let Err(refused) = self.executor.execute(header, parameters) {
                            self.executor.give_up(&refused);
                        }
                    }
                    Ok(None) => break,
                    Err(broken) => self.executor.give_up(&broken),
                }
            }
            if self.executor.is_waiting() {
                self.executor.poll();
            }
            self.executor.serve_faults();
            let now = Instant::now();
            if self.gpu_time.is_due(now) {
                self.gpu_time.sample(now, &mut self.executor.call);
            }
            if worked || self.executor.is_waiting() {
                self.last_work = now;
            }
            if worked {
                self.first_command.get_or_insert(now);
            }
            if self.channel.news.load(Ordering::Acquire) {
                break;
            }
            self.executor.checkpoint.discarded.beside_commands();
            if worked {
                last_command = now;
            } else if self.executor.is_waiting() || self.executor.memory.managed.has_faults() {
                if now - last_command < HOT_WAIT && !self.spin.is_zero() {
                    std::hint::spin_loop();
                } else if !self.executor.checkpoint.discarded.step() {
                    self.sleep(consumer, PAUSE);
                }
            } else if now - last_command < self.spin {
                std::hint::spin_loop();
            } else if !self.executor.checkpoint.discarded.step() {
                self.rest(consumer, now);
            }
        }
    }

    /// Whether to take no command now, so that the devices become idle and threads get the pages of managed memory that they wait
    /// for. Now and then some commands are taken all the same: what runs may wait for them.
    fn holds_commands_back(&mut self) -> bool {
        const HOLD: Duration = Duration::from_millis(20);
        const LONG: Duration = Duration::from_secs(10);
        if !self.executor.memory.managed.has_faults() {
            self.faults = None;
            return false;
        }
        let now = Instant::now();
        let faults = self.faults.get_or_insert(Faults { since: now, held_since: now, told: false });
        if !faults.told && now - faults.since > LONG {
            faults.told = true;
            let runs = self.executor.call.session.waiting.busy(0).into_iter().next();
            let runs = runs.map(|key| rest::what_runs(&self.executor.call.session, key)).unwrap_or_default();
            warn!(
                "a thread of the client waits for managed memory until the GPU is idle, and {runs}: where this never ends, run \
                the program with REKINDLE_MANAGED=host"
            );
        }
        let holds = now - faults.held_since < HOLD;
        if !holds {
            faults.held_since = now;
        }
        holds
    }

    /// Sleeps until there is something to do, or a sample of the GPU's time is due.
    fn rest(&mut self, consumer: &Consumer, now: Instant) {
        const LONG: Duration = Duration::from_secs(5);
        if self.executor.call.session.waiting.has_work() {
            self.sleep(consumer, self.gpu_time.next().saturating_duration_since(now).min(LONG));
        } else {
            self.sleep(consumer, LONG);
            self.gpu_time.restart(Instant::now());
        }
    }

    pub(super) fn sleep(&self, consumer: &Consumer, timeout: Duration) {
        self.channel.sleeps_on(self.executor.call.session.shared);
        // News that arrived before the line above rang no doorbell; news that arrives from here on rings it.
        consumer.sleep(timeout, || self.channel.news.load(Ordering::Acquire));
        self.channel.sleeps_on(None);
    }

    fn handle(&mut self, state: State, news: News) -> State {
        let (state, message, asker) = match (news, state) {
            (News::Event(Event::Request(message, asker)), state) => (state, *message, asker),
            (News::Event(Event::Ahead(message)), state) => return self.goes_ahead(state, *message),
            (News::Event(Event::DaemonGone), state) => return self.daemon_gone(state),
            (News::Event(Event::LoadOver), state) => return self.load_over(state).0,
            (News::Event(Event::Fault(fault)), state) => {
                self.executor.memory.managed.note(fault);
                // The loop of an open ring serves it between commands.
                if !matches!(state, State::Open(_)) {
                    self.executor.serve_faults();
                }
                return state;
            }
            (News::Event(Event::RoomMade), State::Suspended(suspended)) if suspended.waits_since.is_some() => {
                return self.resume(suspended).0;
            }
            (News::Event(Event::RoomMade), state) => return state,
            (News::Silence, State::Closing(closed) | State::Quiesced(closed)) => {
                warn!("the daemon is silent: opening the ring without it");
                return self.open(closed.consumer);
            }
            // The process would wait for ever.
            (News::Silence, State::Failed(failure)) => self.executor.give_up(&failure.reason),
            (News::Resume, State::Suspended(suspended)) => return self.resume(suspended).0,
            (News::Silence | News::Resume | News::End, state) => return state,
        };
        let state = match state {
            State::Keeper(keeper) => return self.ask_keeper(keeper, message, &asker),
            state => state,
        };
        let message = match message {
            Message { body: WorkerRequest::Reserve { bytes }, .. } => {
                self.reserve(bytes, asker);
                return state;
            }
            Message { body: WorkerRequest::SaveCode { hash }, fds, .. } if matches!(state, State::Quiesced(_)) => {
                self.save_code(&hash, fds, asker);
                return state;
            }
            Message { body: WorkerRequest::GiveWay, .. } => {
                self.executor.checkpoint.give_way(self.executor.call.gpu.driver);
                return state;
            }
            Message { body: WorkerRequest::Stage { unit, units, new }, fds, .. } => {
                self.stage(unit, units, new.into_iter().zip(fds).collect(), asker);
                return state;
            }
            message => message,
        };
        if !is_question(&message.body) {
            self.executor.open_all_memory();
        }
        if let Some((reply, files)) = self.sharing(&state, &message) {
            self.channel.answer_with(&asker, reply, Vec::new(), files);
            return state;
        }
        let (state, answered) = self.request(state, message);
        let (reply, blob) = answered.unwrap_or_else(|refusal| (WorkerReply::Failed(refusal.into()), Vec::new()));
        self.channel.answer(&asker, reply, blob);
        state
    }

    /// The daemon is gone: a client continues without it. A worker without a client ends.
    fn daemon_gone(&mut self, state: State) -> State {
        // The daemon's host memory belongs to no daemon any more.
        self.executor.checkpoint.stage.end();
        match state {
            State::Closing(closed) | State::Quiesced(closed) => self.open(closed.consumer),
            State::Open(consumer) => {
                // No dump will use its preparations any more: clones' memory goes back to the client.
                self.executor.checkpoint.before_opening(self.executor.call.gpu.driver);
                State::Open(consumer)
            }
            // Neither a load nor a suspended client needs a daemon.
            state @ (State::Filling(_) | State::Suspended(_) | State::Keeper(_)) => state,
            State::Spare(_)
            | State::Rehearsed
            | State::Warm(_)
            | State::Loaded(_)
            | State::Connected(_)
            | State::Failed(_) => {
                // SAFETY: ends the process without the driver's exit handlers; the kernel frees everything.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Reserves memory for clones and answers afterwards. The client runs meanwhile.
    fn reserve(&mut self, bytes: Option<u64>, asker: Asker) {
        let (channel, of_thread) = (Arc::clone(&self.channel), Arc::clone(&asker));
        let done = move || channel.answer(&of_thread, WorkerReply::Done, Vec::new());
        let Executor { call, checkpoint, memory, .. } = &mut self.executor;
        let begun = checkpoint.reserve_clones(call.driver(), memory, bytes, done);
        if let Err(error) = begun {
            let failure = Failure::internal(format!("cannot start a thread: {error}"));
            self.channel.answer(&asker, WorkerReply::Failed(failure), Vec::new());
        }
    }

    /// Writes a code image and answers afterwards. A disk that hangs does not keep the ring from being opened.
    pub(super) fn save_code(&mut self, hash: &str, fds: Vec<OwnedFd>, asker: Asker) {
        let (channel, of_thread) = (Arc::clone(&self.channel), Arc::clone(&asker));
        let begun = self.code_and_file(hash, fds).and_then(|(image, mut file)| {
            let work = move || {
                let reply = match io::Write::write_all(&mut file, image.bytes()) {
                    Ok(()) => WorkerReply::Done,
                    Err(error) => WorkerReply::Failed(cannot_write(&image, &error)),
                };
                channel.answer(&of_thread, reply, Vec::new());
            };
            small_thread("code").spawn(work).map_err(Refusal::Io)
        });
        if let Err(refusal) = begun {
            self.channel.answer(&asker, WorkerReply::Failed(refusal.into()), Vec::new());
        }
    }

    fn code_and_file(&self, hash: &str, fds: Vec<OwnedFd>) -> Result<(Arc<Image>, File), Refusal> {
        let parsed = hash.parse().map_err(|_| Refusal::NoHash(hash.to_owned()))?;
        let image = self.executor.code.store.get(&parsed).ok_or_else(|| Refusal::NoCode(hash.to_owned()))?;
        let file = fds.into_iter().next().ok_or(Refusal::Lacks("no file came with the request"))?;
        Ok((image, channel::file(file)))
    }

    /// Maps host memory for pieces and answers afterwards. The client runs meanwhile.
    fn stage(&mut self, unit: u64, units: Vec<u64>, new: Vec<(u64, OwnedFd)>, asker: Asker) {
        let (channel, of_thread) = (Arc::clone(&self.channel), Arc::clone(&asker));
        let answer = |result: Result<(), StageError>| match result {
            Ok(()) => WorkerReply::Done,
            Err(error) => WorkerReply::Failed(error.into()),
        };
        let done = move |result| channel.answer(&of_thread, answer(result), Vec::new());
        let Executor { checkpoint, memory, .. } = &mut self.executor;
        if let Err(error) = checkpoint.set_stage(memory, unit, units, new, done) {
            self.channel.answer(&asker, WorkerReply::Failed(error.into()), Vec::new());
        }
    }

    /// Serves requests whose answers include descriptors.
    fn sharing(&mut self, state: &State, message: &Message<WorkerRequest>) -> Option<(WorkerReply, Vec<OwnedFd>)> {
        let answered = match (&message.body, state) {
            (
                WorkerRequest::Export { token, first },
                State::Open(_) | State::Closing(_) | State::Quiesced(_) | State::Filling(_),
            ) => {
                // An importer uses the memory at once.
                if matches!(state, State::Filling(_))
                    && let Err(error) = self.executor.end_load()
                {
                    return Some((WorkerReply::Failed(Refusal::from(error).into()), Vec::new()));
                }
                let Executor { call, memory, .. } = &mut self.executor;
                let exported = memory.export_named(call, token, *first).map_err(Refusal::from);
                exported.map(|(shared, files)| (WorkerReply::Exported { shared }, files))
            }
            (WorkerRequest::ExportTemplate { first }, State::Loaded(_)) => {
                let exported = self.export_template(*first);
                exported.map(|(count, exported)| {
                    let (pieces, files) = exported.into_iter().unzip();
                    (WorkerReply::Template { count, pieces }, files)
                })
            }
            (WorkerRequest::MakeShared { first }, State::Spare(_)) => {
                let driver = self.executor.driver();
                let made = self.executor.memory.make_shared(driver, &message.blob, *first).map_err(Refusal::from);
                made.map(|it| (WorkerReply::MadeShared { count: it.count, ids: it.ids, needed: it.needed }, it.files))
            }
            _ => return None,
        };
        Some(answered.unwrap_or_else(|refusal| (WorkerReply::Failed(refusal.into()), Vec::new())))
    }

    /// Serves requests that change the state, each in the states that permit it. `ask` serves the other requests.
    pub(super) fn request(&mut self, state: State, message: Message<WorkerRequest>) -> (State, Answered) {
        let Message { body, blob, fds } = message;
        match (body, state) {
            (WorkerRequest::Adopt { attach, limits }, State::Spare(_)) => {
                self.executor.memory.set_limits(limits);
                let adopted = self.adopt(attach, &mut fds.into_iter());
                or_failed(adopted.map(State::Open))
            }
            (WorkerRequest::Code { code }, State::Spare(mut spare)) => {
                spare.code.extend(code.into_iter().zip(fds));
                (State::Spare(spare), done(Ok(())))
            }
            (WorkerRequest::LoadCode, State::Spare(mut spare)) => {
                let code = std::mem::take(&mut spare.code);
                let code = code.into_iter().map(|(hash, file)| (hash, channel::file(file))).collect();
                let client = Client::from_bytes(&blob).map_err(Refusal::from);
                let loaded = client.and_then(|client| Ok(self.executor.load_code_ahead(&client, code)?));
                // The worker is as good as before.
                (State::Spare(spare), done(loaded))
            }
            (WorkerRequest::Data { data }, State::Spare(mut spare)) => {
                let taken = spare.take_data(data, &mut fds.into_iter());
                (State::Spare(spare), done(taken))
            }
            (WorkerRequest::Load { code, rehearsal: true, .. }, State::Spare(mut spare)) => {
                spare.code.extend(code.into_iter().zip(fds));
                let rehearsed = Client::from_bytes(&blob).map_err(Refusal::from).and_then(|client| {
                    let code = std::mem::take(&mut spare.code);
                    let code = code.into_iter().map(|(hash, file)| (hash, channel::file(file))).collect();
                    Ok(self.executor.rehearse(&client, code)?)
                });
                or_failed(rehearsed.map(|()| State::Rehearsed))
            }
            (
                WorkerRequest::Load {
                    data,
                    hash_algorithm,
                    hash_key,
                    code,
                    limits,
                    rehearsal: false,
                    early,
                    warm,
                    steps,
                },
                State::Spare(mut spare),
            ) => {
                let mut fds = fds.into_iter();
                let loaded = HashKey::from_parts(hash_algorithm, hash_key).map_err(Refusal::from).and_then(|key| {
                    spare.take_data(data, &mut fds)?;
                    spare.code.extend(code.into_iter().zip(fds));
                    let loaded = match warm {
                        true => State::Warm(Box::new(self.warm(spare, key, &blob, steps)?)),
                        false => State::Loaded(self.load(spare, key, &blob, early, steps)?),
                    };
                    self.executor.memory.set_limits(limits);
                    Ok(loaded)
                });
                or_failed(loaded)
            }
            (WorkerRequest::Borrow, State::Spare(spare)) => self.borrow(spare, &blob),
            (WorkerRequest::Borrow, State::Warm(warm)) => self.borrow_less(warm, &blob),
            (WorkerRequest::CopyTemplate, State::Spare(mut spare)) => {
                spare.template.get_or_insert_default();
                (State::Spare(spare), done(Ok(())))
            }
            (WorkerRequest::TakeTemplate { pieces }, State::Spare(mut spare)) => {
                let taken = match &mut spare.lent {
                    Some(lent) => lent.take(pieces, fds),
                    None => self.import(&mut spare, pieces, fds),
                };
                (State::Spare(spare), done(taken))
            }
            (WorkerRequest::TakeTemplate { pieces }, State::Warm(mut warm)) => {
                let taken = self.take_template(&mut warm.kept.template, pieces, fds);
                (State::Warm(warm), done(taken))
            }
            (WorkerRequest::BringBack, State::Warm(warm)) => self.restore_warm(warm),
            (WorkerRequest::Pinned { pinned }, State::Loaded(mut loaded)) => {
                loaded.pinned.extend(pinned.into_iter().zip(fds));
                (State::Loaded(loaded), done(Ok(())))
            }
            (WorkerRequest::Userfault, State::Loaded(loaded)) => {
                let taken = fds.into_iter().next().ok_or(Refusal::Lacks("no userfaultfd came with the request"));
                let taken = taken.map(|fd| self.executor.memory.pinned.arrived.put_userfault(fd));
                (State::Loaded(loaded), done(taken))
            }
            (WorkerRequest::Connect { pinned, takes_over }, State::Loaded(loaded)) => {
                or_failed(self.connect(loaded, pinned, takes_over, fds.into_iter()).map(State::Connected))
            }
            (WorkerRequest::LoadProgress, state @ (State::Loaded(_) | State::Connected(_) | State::Filling(_))) => {
                self.load_progress(state)
            }
            (WorkerRequest::Open, State::Connected(connected)) => self.open_connected(connected),
            (
                WorkerRequest::Quiesce { timeout_ms } | WorkerRequest::Advance { timeout_ms, .. },
                State::Filling(consumer),
            ) => self.quiesce_filling(consumer, Duration::from_millis(timeout_ms)),
            (WorkerRequest::Suspend { data, hash_algorithm, hash_key, hold, deep }, State::Quiesced(closed)) => {
                let key = HashKey::from_parts(hash_algorithm, hash_key).map_err(Refusal::from);
                self.suspend(closed, (data, key), How { hold, deep }, &blob, fds)
            }
            (WorkerRequest::Suspend { hold, .. }, State::Suspended(suspended)) => self.hold_suspended(suspended, hold),
            (WorkerRequest::BringBack, State::Suspended(suspended)) => self.resume(suspended),
            (
                WorkerRequest::Quiesce { timeout_ms } | WorkerRequest::Advance { timeout_ms, .. },
                State::Suspended(suspended),
            ) => self.quiesce_suspended(suspended, Duration::from_millis(timeout_ms)),
            (WorkerRequest::Open, State::Closing(closed) | State::Quiesced(closed)) => {
                (self.open(closed.consumer), done(Ok(())))
            }
            // The daemon asks for an `Advance` where the content of the memory was not there at the last request. It has come since,
            // so that the ring is open.
            (
                WorkerRequest::Quiesce { timeout_ms } | WorkerRequest::Advance { timeout_ms, .. },
                State::Open(consumer),
            ) => {
                let closed = self.close(consumer);
                self.quiesce(closed, Duration::from_millis(timeout_ms))
            }
            (WorkerRequest::Quiesce { timeout_ms }, State::Closing(closed)) => {
                self.quiesce(closed, Duration::from_millis(timeout_ms))
            }
            (WorkerRequest::Advance { timeout_ms, commands }, State::Closing(closed) | State::Quiesced(closed)) => {
                self.advance(closed, Duration::from_millis(timeout_ms), commands)
            }
            (body, state) => {
                let answered = self.ask(&state, Message { body, blob, fds });
                (state, answered)
            }
        }
    }

    /// Serves requests that do not change the state.
    pub(super) fn ask(&mut self, state: &State, message: Message<WorkerRequest>) -> Answered {
        let Message { body, blob, fds } = message;
        let mut fds = fds.into_iter();
        let reply = match (body, state) {
            (WorkerRequest::Quiesce { .. } | WorkerRequest::ConfirmQuiesced, State::Quiesced(_)) => WorkerReply::Done,
            (WorkerRequest::Open, State::Filling(_) | State::Suspended(_)) => WorkerReply::Done,
            (WorkerRequest::BringBack, State::Open(_) | State::Closing(_) | State::Quiesced(_) | State::Filling(_)) => {
                // Who asks for the client's memory is about to use it.
                self.last_work = Instant::now();
                WorkerReply::Done
            }
            (WorkerRequest::LoadProgress, State::Open(_) | State::Closing(_) | State::Quiesced(_)) => {
                WorkerReply::Loaded { times: self.executor.end_load()? }
            }
            (WorkerRequest::Open, State::Open(_)) => {
                self.executor.checkpoint.before_opening(self.executor.call.gpu.driver);
                WorkerReply::Done
            }
            (WorkerRequest::ConfirmQuiesced, _) => return Err(Refusal::WentOn),
            (WorkerRequest::Precopy { hash_key, files, compression }, State::Open(_)) => {
                let cancel = Arc::clone(&self.channel.cancel);
                let key = ContentKey::from_bytes(hash_key);
                let writer = writer(fds, &files, key, &compression, &blob)?;
                let (mut layers, checkpoint) = self.executor.layers();
                checkpoint.begin_precopy(&mut layers, writer, cancel)?;
                WorkerReply::Done
            }
            (
                WorkerRequest::Save {
                    hash_key,
                    files,
                    elsewhere,
                    compression,
                    copying,
                    precopied,
                    rehearses,
                    hash_on_device,
                },
                State::Quiesced(closed),
            ) => {
                let key = ContentKey::from_bytes(hash_key);
                let wanted = Wanted {
                    head: closed.consumer.head(),
                    writer: writer(fds, &files, key, &compression, &blob)?,
                    key,
                    precopied,
                    elsewhere: elsewhere.into_iter().collect(),
                    how: copying,
                    rehearses,
                    hash_on_device,
                    cancel: Arc::clone(&self.channel.cancel),
                };
                let (mut layers, checkpoint) = self.executor.layers();
                let (code, secured) = checkpoint.begin_saving(&mut layers, wanted)?;
                WorkerReply::Begun { code, secured }
            }
            (WorkerRequest::Calm { most, for_ms }, _) => {
                match rest::calm(&mut self.executor.call, u64::from(most), Duration::from_millis(for_ms)) {
                    Some(what) => WorkerReply::Busy { what },
                    None => WorkerReply::Done,
                }
            }
            (WorkerRequest::Pace { bandwidth, application_first }, _) => {
                self.executor.checkpoint.pace.limit(&bandwidth);
                self.executor.checkpoint.pace.application_first(application_first);
                WorkerReply::Done
            }
            (WorkerRequest::Progress, State::Open(_) | State::Closing(_) | State::Quiesced(_)) => {
                let Executor { checkpoint, memory, .. } = &mut self.executor;
                match checkpoint.progress(memory)? {
                    Progress::Saving { may_open, copied, bytes } => WorkerReply::Saving { may_open, copied, bytes },
                    Progress::Saved { client, bytes, waits } => {
                        let blob = client.map(|client| client.to_bytes()).transpose()?;
                        return Ok((WorkerReply::Saved { bytes, waits }, blob.unwrap_or_default()));
                    }
                }
            }
            (
                WorkerRequest::JoinContainer { row, gpus, limits },
                State::Spare(_) | State::Loaded(_) | State::Connected(_),
            ) => {
                let file = fds.next().ok_or(Refusal::Lacks("no table came with the request"))?;
                self.executor.memory.belong(&self.executor.call.session, file.into(), row, &gpus, limits)?;
                WorkerReply::Done
            }
            (
                WorkerRequest::Import { ticket, shared },
                State::Open(_) | State::Closing(_) | State::Quiesced(_) | State::Filling(_) | State::Suspended(_),
            ) => {
                self.executor.memory.arrived.put(ticket, shared, fds.collect())?;
                WorkerReply::Done
            }
            (
                WorkerRequest::Registers { pinned },
                State::Open(_) | State::Closing(_) | State::Quiesced(_) | State::Filling(_) | State::Suspended(_),
            ) => {
                let file = fds.next().ok_or(Refusal::Lacks("no file came with the mapping"))?;
                self.executor.memory.pinned.arrived.put(pinned, file);
                WorkerReply::Done
            }
            (WorkerRequest::TakeShared { ids }, State::Spare(_)) => {
                self.executor.memory.take_shared(ids, fds.collect());
                WorkerReply::Done
            }
            (WorkerRequest::Shares, _) => {
                let Executor { call, memory, .. } = &mut self.executor;
                let (own, others) = memory.shares(call);
                WorkerReply::Shares { own, others }
            }
            (WorkerRequest::Describe, _) => WorkerReply::Description {
                device_memory: self.executor.memory.device_bytes(&self.executor.call.session),
                pinned_memory: self.executor.memory.pinned.allocations().values().map(|p| p.size).sum(),
                commands: self.executor.scheduler.times.commands,
                suspended: match state {
                    State::Suspended(suspended) => Some(suspended.describe()),
                    State::Keeper(keeper) => Some(keeper.describe()),
                    _ => None,
                },
                idle_ms: self.idle_for(state).as_millis() as u64,
                physical: self.executor.memory.physical(),
                refused_calls: Some(self.executor.call.session.shared.as_ref().map_or(0, calls::refusals)),
                gpu_time_ns: self.gpu_time.nanoseconds(),
                first_command_ago_ns: self
                    .first_command
                    .map(|it| u64::try_from(it.elapsed().as_nanos()).unwrap_or(u64::MAX)),
            },
            (WorkerRequest::Remember { protocol }, _) => {
                self.channel.remember(protocol);
                WorkerReply::Done
            }
            (WorkerRequest::Moment { awaited }, _) => {
                if let Some(shared) = self.executor.call.session.shared {
                    shared.header().moment.store(u32::from(awaited), Ordering::Release);
                }
                WorkerReply::Done
            }
            (WorkerRequest::Calls, _) => {
                let counts = self.executor.call.session.shared.as_ref().map(calls::read).unwrap_or_default();
                WorkerReply::Calls { counts }
            }
            (WorkerRequest::Access, _) => {
                WorkerReply::Access { report: Box::new(observe::counted().ok_or(Refusal::Unreported)?) }
            }
            (WorkerRequest::Memory, _) => {
                let devices = self.executor.memory.memory_of_devices(&mut self.executor.call.gpu);
                WorkerReply::Memory { devices: devices.map_err(Refusal::Memory)? }
            }
            (WorkerRequest::Check, _) => WorkerReply::Checked {
                reasons: obstacles(&self.executor.call.session, &self.executor.memory, &self.executor.code),
            },
            (_, State::Failed(failure)) => return Err(Refusal::Failed(failure.clone())),
            (request, state) => {
                return Err(Refusal::Unfit { state: format!("{:?}", state.state()), request: Box::new(request) });
            }
        };
        Ok((reply, Vec::new()))
    }

    /// How long the client has had no command, and nothing has run for it.
    fn idle_for(&mut self, state: &State) -> Duration {
        let consumer = match state {
            State::Connected(connected) => Some(&connected.consumer),
            State::Filling(consumer) | State::Open(consumer) => Some(consumer),
            State::Closing(closed) | State::Quiesced(closed) => Some(&closed.consumer),
            State::Suspended(suspended) => Some(&suspended.consumer),
            State::Keeper(keeper) => Some(&keeper.consumer),
            State::Spare(_) | State::Rehearsed | State::Warm(_) | State::Loaded(_) | State::Failed(_) => None,
        };
        // A command that its thread has begun to write does not count: the process may have been stopped then, for as long as anybody likes.
        let has_commands = consumer.is_some_and(Consumer::ready) || self.executor.has_commands_held_back();
        // One whose content is being loaded was just brought back.
        let is_loading = matches!(state, State::Loaded(_) | State::Connected(_) | State::Filling(_));
        // Kernels may run although nobody waits for them.
        if has_commands || is_loading || !matches!(rest::busy_stream(&mut self.executor.call), Ok(None)) {
            self.last_work = Instant::now();
        }
        self.last_work.elapsed()
    }

    /// Takes a client, and answers it.
    fn adopt(&mut self, attach: Attach, fds: &mut impl Iterator<Item = OwnedFd>) -> Result<Consumer, Refusal> {
        let connection = UnixStream::from(fds.next().ok_or(Refusal::Lacks("no connection came with the client"))?);
        let served = attach.dialect.is_served().map_err(Refusal::from);
        let shared = served.and_then(|()| self.share(fds, &attach.dialect));
        let placed = shared.and_then(|()| {
            let mut all = 0..self.executor.memory.devices.len();
            all.try_for_each(|ordinal| self.executor.place_own_code(ordinal)).map_err(Refusal::Code)
        });
        let result = placed.and_then(|()| self.begin(0, false));
        let answer = match &result {
            Ok(_) => Answer::Attached(self.executor.call.session.attached.clone()),
            Err(refusal) => Answer::Refused { reason: refusal.to_string() },
        };
        // The ring is open before the client gets the answer; a client that is gone is noticed on the connection.
        let _ = frame::send(&connection, &answer, &[], &[]);
        let consumer = result?;
        info!(client = attach.pid, command = attach.command, "serving");
        self.serve_client(connection, attach)?;
        Ok(consumer)
    }

    pub(super) fn serve_client(&mut self, connection: UnixStream, attach: Attach) -> Result<(), Refusal> {
        self.know_client(&connection, attach)?;
        self.read_client(connection)
    }

    /// Remembers the client for the next daemon.
    pub(super) fn know_client(&mut self, connection: &UnixStream, attach: Attach) -> Result<(), Refusal> {
        title::show(&attach.command);
        let attached = self.executor.call.session.attached.clone();
        self.channel.know_client(connection, attach, attached).map_err(Refusal::Io)
    }

    /// Reads what the client sends, from now on.
    pub(super) fn read_client(&mut self, connection: UnixStream) -> Result<(), Refusal> {
        let arrived = self.executor.memory.pinned.arrived.clone();
        self.channel.read_client(connection, arrived).map_err(Refusal::NoThread)
    }

    /// Maps the client's ring and staging.
    pub(super) fn share(&mut self, fds: &mut impl Iterator<Item = OwnedFd>, dialect: &Dialect) -> Result<(), Refusal> {
        let mut map = |what: &'static str, address: u64, size: usize| {
            let file = fds.next().ok_or(Refusal::Without(what))?;
            if !is_sealed(&file, size as u64) {
                return Err(Refusal::NotSealed { what, size });
            }
            map_as_used(&file, address, size as u64).ok_or(Refusal::NotMapped(what))
        };
        let ring = map("ring", RING_AT, layout::SHARED_SIZE)?;
        let staging = map("staging", STAGING_AT, layout::STAGING_SIZE)?;
        // SAFETY: a shared mapping of that size, page-aligned, of a file that cannot shrink; it stays as long as the
        // process.
        let shared = unsafe { Shared::new(ring) };
        if shared.version() != Some(dialect.version) {
            return Err(Refusal::OtherRing(dialect.version));
        }
        self.executor.call.session.shared = Some(shared);
        self.executor.call.session.staging = Staging::new(staging);
        Ok(())
    }

    /// Begins to consume the ring. `runs`: the process has run all the time.
    pub(super) fn begin(&mut self, head: u64, runs: bool) -> Result<Consumer, Refusal> {
        let shared = self.executor.call.session.shared.ok_or(Refusal::Lacks("there is no ring"))?;
        shared.header().caller_spin_us.store(self.caller_spin_us, Ordering::Release);
        if !runs {
            // Nobody waits any more for the moment of a restored process.
            shared.header().moment.store(0, Ordering::Release);
        }
        Ok(Consumer::new(shared, head))
    }

    /// Takes no more commands from now on; streams take deferred commands only by steps. The process begins no standstill.
    pub(super) fn close(&mut self, consumer: Consumer) -> Closed {
        standstill::forbid(consumer.shared());
        self.executor.scheduler.deferred.close(0);
        self.channel.silence.listen(true);
        Closed { consumer, streams: rest::Closing::new() }
    }

    /// Waits until the device is idle, and until no thread of the process holds the others.
    pub(super) fn quiesce(&mut self, mut closed: Closed, timeout: Duration) -> (State, Answered) {
        let deadline = Instant::now() + timeout;
        let rest = match self.executor.drain(timeout) {
            Ok(rest) => rest,
            Err(broken) => return (self.open(closed.consumer), Err(broken.into())),
        };
        closed.streams.look(self.executor.call.session.waiting.busy(0));
        let rest = match rest {
            Rest::Idle => rest::no_standstill(closed.consumer.shared(), deadline),
            busy => busy,
        };
        match rest {
            Rest::Idle => match self.executor.give_all_to_client() {
                Ok(()) => (State::Quiesced(closed), done(Ok(()))),
                Err(why) => (self.open(closed.consumer), Err(why.into())),
            },
            Rest::Busy(what) => (State::Closing(closed), Ok((WorkerReply::Busy { what }, Vec::new()))),
        }
    }

    /// Executes commands up to the first for an idle stream, which other work may wait for, or up to several for any stream, and
    /// quiesces again. Commands that may not go to their streams are deferred.
    fn advance(&mut self, mut closed: Closed, timeout: Duration, commands: u32) -> (State, Answered) {
        let patience = closed.streams.patience();
        if !patience.is_zero() {
            return self.quiesce(closed, patience.min(timeout));
        }
        let began = Instant::now();
        self.executor.scheduler.deferred.close(commands.max(1));
        self.executor.poll();
        while !self.executor.scheduler.deferred.has_stepped() && began.elapsed() < timeout {
            match closed.consumer.take() {
                Ok(Some((header, parameters))) => {
                    if let Err(refused) = self.executor.execute(header, parameters) {
                        self.executor.give_up(&refused);
                    }
                }
                Ok(None) => {
                    self.executor.poll();
                    std::thread::sleep(PAUSE);
                }
                Err(broken) => self.executor.give_up(&broken),
            }
        }
        self.executor.scheduler.deferred.close(0);
        self.quiesce(closed, timeout.saturating_sub(began.elapsed()))
    }

    pub(super) fn open(&mut self, consumer: Consumer) -> State {
        self.executor.checkpoint.before_opening(self.executor.call.gpu.driver);
        self.channel.silence.listen(false);
        self.executor.scheduler.deferred.open();
        self.executor.call.session.waiting.uncalm();
        standstill::allow(consumer.shared());
        State::Open(consumer)
    }
}

/// Whether a request only asks for what is known, without use of the client's memory.
fn is_question(request: &WorkerRequest) -> bool {
    use WorkerRequest::{Access, Calls, Check, Describe, Memory, Moment, Progress, Shares};
    matches!(request, Access | Calls | Check | Describe | Memory | Moment { .. } | Progress | Shares)
}

/// The new state, or `Failed` with the reason.
pub(super) fn or_failed(reached: Result<State, Refusal>) -> (State, Answered) {
    match reached {
        Ok(state) => (state, done(Ok(()))),
        Err(refusal) => {
            let failure = Failure::new(refusal.kind(), refusal.to_string());
            (State::Failed(failure), Err(refusal))
        }
    }
}

impl Spare {
    /// Keeps data files until `Load`.
    fn take_data(
        &mut self,
        data: Vec<control::DataFile>,
        fds: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<(), Refusal> {
        for control::DataFile { depth, index } in data {
            let file = fds.next().ok_or(Refusal::Lacks("a data file did not come with the request"))?;
            self.data.push((DataFile { depth, index }, channel::file(file)));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::copying::Clones;
    use crate::serve::fixture;

    /// A ring that contains zeros.
    fn consumer() -> Consumer {
        let (access, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: maps new memory, at an address of the kernel's choice.
        let ring = unsafe { libc::mmap(std::ptr::null_mut(), layout::SHARED_SIZE, access, shared, -1, 0) };
        assert_ne!(ring, libc::MAP_FAILED);
        // SAFETY: a shared mapping of that size, page-aligned, without a file, that stays as long as the process.
        Consumer::new(unsafe { Shared::new(ring.cast()) }, 0)
    }

    fn closed() -> Closed {
        Closed { consumer: consumer(), streams: rest::Closing::new() }
    }

    /// A worker, and a socket that must live as long: the channel's thread ends a worker without a client when this end is
    /// closed.
    fn server() -> (Server, UnixStream) {
        let (socket, daemon) = UnixStream::pair().unwrap();
        let executor = fixture::executor();
        let (channel, _events) =
            channel::start(socket, executor.call.session.attached.clone(), Arc::default()).unwrap();
        (Server::new(executor, channel), daemon)
    }

    #[test]
    fn memory_reserved_for_clones_is_given_back_when_the_daemon_is_gone_at_any_time() {
        for state in [State::Open(consumer()), State::Closing(closed()), State::Quiesced(closed())] {
            let (mut server, daemon) = server();
            let before = state.state();
            *server.executor.checkpoint.copying.reserved.lock().unwrap() = Some(Clones::imagined(4096));
            let state = server.handle(state, News::Event(Event::DaemonGone));
            assert!(matches!(state, State::Open(_)));
            assert!(server.executor.checkpoint.copying.reserved.lock().unwrap().is_none(), "it was {before:?}");
            std::mem::forget(daemon);
        }
    }

    #[test]
    fn a_request_out_of_turn_changes_nothing_and_a_failed_worker_says_why_again() {
        let (mut server, daemon) = server();
        let message = |body| Message { body, blob: Vec::new(), fds: Vec::new() };
        for state in [State::Spare(Spare::default()), State::Open(consumer()), State::Closing(closed())] {
            let before = state.state();
            let (state, answered) =
                server.request(state, message(WorkerRequest::Connect { pinned: Vec::new(), takes_over: None }));
            assert!(matches!(answered, Err(Refusal::Unfit { state, .. }) if state == format!("{before:?}")));
            assert_eq!(state.state(), before);
        }
        let (state, answered) =
            server.request(State::Rehearsed, message(WorkerRequest::Connect { pinned: Vec::new(), takes_over: None }));
        assert!(
            matches!((state, answered), (State::Rehearsed, Err(Refusal::Unfit { state, .. })) if state == "Rehearsed")
        );
        let load = WorkerRequest::Connect { pinned: Vec::new(), takes_over: None };
        let failed = or_failed(Err(Refusal::Lacks("nothing came with the request"))).0;
        let (failed, answered) = server.request(failed, message(load));
        let again = answered.unwrap_err().to_string();
        assert!(matches!(failed, State::Failed(_)) && again.contains("nothing came with the request"), "{again}");
        std::mem::forget(daemon);
    }
    #[test]
    fn a_client_whose_content_comes_between_two_requests_of_a_quiesce_is_at_rest_after_the_second() {
        let (mut server, daemon) = server();
        let advance = WorkerRequest::Advance { timeout_ms: 1000, commands: 1 };
        // The first has found it loading. Its content came then, so that its ring is open.
        let state = State::Open(consumer());
        let (state, answered) = server.request(state, Message { body: advance, blob: Vec::new(), fds: Vec::new() });
        assert!(matches!((state, answered), (State::Quiesced(_), Ok((WorkerReply::Done, _)))));
        std::mem::forget(daemon);
    }
}
