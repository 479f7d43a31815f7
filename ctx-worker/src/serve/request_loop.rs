//! The worker's loop: commands of the client, requests of the daemon, and what waits, in turn.

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
use rekindle_images::{Client, DataFile, DataReader, DataWriter, HashKey, Known};
use rekindle_wire::attach::{Answer, Attach, Pinned};
use rekindle_wire::calls;
use rekindle_wire::control::{self, Failing, Failure, WorkerReply, WorkerRequest};
use rekindle_wire::frame::{self, Message};
use rekindle_wire::layout::{self, Shared};
use rekindle_wire::ring::Consumer;
use rekindle_wire::version::control_version;
use rekindle_wire::{Dialect, OLDEST_CONTROL};
use tracing::{error, info, warn};

use crate::checkpoint::access::observe;
use crate::checkpoint::check::obstacles;
use crate::checkpoint::copying::background::Progress;
use crate::checkpoint::engine::{StageError, small_thread};
use crate::checkpoint::save::Wanted;
use crate::resources::code_store::Image;
use crate::resources::pinned::{is_sealed, map_at};
use crate::schedule::rest::{Closing, Rest};
use crate::serve::channel::{self, Asker, Channel, Event};
use crate::serve::executor::Executor;
use crate::serve::life::State;
use crate::serve::refusal::Refusal;
use crate::serve::silence;

/// Commands taken before anything else is looked at.
const BATCH: usize = 64;
/// How long a hot worker spins for the next command before it sleeps, and a caller for its reply. Not at all on
/// machines with few cores, where spinning keeps the other side from running.
const WORKER_SPIN: Duration = Duration::from_micros(200);
const CALLER_SPIN_US: u32 = 2000;
const CORES_TO_SPIN: usize = 4;
/// How long a device may be waited for by looking again and again, and how long the pauses are after that.
const HOT_WAIT: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_micros(50);

/// Where the worker maps ring and staging: above the windows, and outside of where the kernel places mappings. The driver
/// takes addresses for the code of later contexts there, and must find the same ones free in a restore, when ring and
/// staging come last (see [`crate::serve::start`]).
const RING_AT: u64 = 0x7000_0000_0000;
const STAGING_AT: u64 = RING_AT + (1 << 30);

struct Server {
    executor: Executor,
    channel: Arc<Channel>,
    state: State,
    consumer: Option<Consumer>,
    /// What a restore knows of its client.
    restoring: Option<Client>,
    /// What is known of the streams in a quiesce that goes on.
    closing: Closing,
    spin: Duration,
    caller_spin_us: u32,
    /// What came ahead of `Load` and `Connect`.
    data_ahead: Vec<(DataFile, File)>,
    code_ahead: Vec<(String, OwnedFd)>,
    pinned_ahead: Vec<(Pinned, OwnedFd)>,
}

/// Serves until the client or the daemon of a spare worker is gone.
pub(crate) fn serve(mut executor: Executor, socket: UnixStream) -> ExitCode {
    let (channel, events) = match channel::start(socket) {
        Ok(started) => started,
        Err(error) => {
            error!("cannot start: {error}");
            return ExitCode::from(1);
        }
    };
    // Whoever started it; not kept, so that its connection ends with it.
    let ready = WorkerReply::Ready {
        attached: executor.session.attached.clone(),
        wire: control_version(),
        oldest: OLDEST_CONTROL,
    };
    if let Some(asker) = channel.asker() {
        channel.answer(&asker, ready, Vec::new());
    }
    let asking = Arc::clone(&channel);
    executor.checkpoint.copying.memory_pressure = Some(Box::new(move |first| asking.is_room_coming(first)));
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

/// Writes data files, but for what is known from other images. They may have come twice.
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
            executor,
            channel,
            state: State::Spare,
            consumer: None,
            restoring: None,
            closing: Closing::new(),
            spin: if few_cores { Duration::ZERO } else { WORKER_SPIN },
            caller_spin_us: if few_cores { 0 } else { CALLER_SPIN_US },
            data_ahead: Vec::new(),
            code_ahead: Vec::new(),
            pinned_ahead: Vec::new(),
        }
    }

    fn run(&mut self, events: &Receiver<Event>) {
        loop {
            if matches!(self.state, State::Closing | State::Quiesced) {
                match events.recv_timeout(silence::LOOK) {
                    Ok(event) => self.handle(event),
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) if self.channel.silence.is_too_long() => {
                        warn!("the daemon is silent: opening the ring without it");
                        self.open();
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                continue;
            }
            if self.state != State::Open {
                let Ok(event) = events.recv() else { return };
                self.handle(event);
                continue;
            }
            while self.channel.news.swap(false, Ordering::AcqRel) {
                while let Ok(event) = events.try_recv() {
                    self.handle(event);
                }
            }
            if self.state == State::Open {
                self.work();
            }
        }
    }

    /// Executes commands and finishes what waits, until there is news; sleeps when there is nothing to do.
    fn work(&mut self) {
        let Some(mut consumer) = self.consumer.take() else { return };
        let mut last_command = Instant::now();
        loop {
            let mut worked = false;
            for _ in 0..BATCH {
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
            if self.channel.news.load(Ordering::Acquire) {
                break;
            }
            if worked {
                last_command = Instant::now();
            } else if self.executor.is_waiting() {
                if last_command.elapsed() < HOT_WAIT && !self.spin.is_zero() {
                    std::hint::spin_loop();
                } else {
                    self.sleep(&consumer, PAUSE);
                }
            } else if last_command.elapsed() < self.spin {
                std::hint::spin_loop();
            } else {
                self.sleep(&consumer, Duration::from_secs(5));
            }
        }
        self.consumer = Some(consumer);
    }

    fn sleep(&self, consumer: &Consumer, timeout: Duration) {
        self.channel.sleeps_on(self.executor.session.shared);
        // News that came before the line above rang no bell, and those that come from here on ring it.
        consumer.sleep(timeout, || self.channel.news.load(Ordering::Acquire));
        self.channel.sleeps_on(None);
    }

    fn handle(&mut self, event: Event) {
        let (message, asker) = match event {
            Event::Request(message, asker) => (*message, asker),
            Event::DaemonGone => {
                // Its host memory is nobody's any more.
                self.executor.checkpoint.stage.end();
                match self.state {
                    State::Closing | State::Quiesced => self.open(),
                    // Nobody will ask for what was prepared for a dump: clones' memory goes back to the client.
                    State::Open => self.executor.checkpoint.before_opening(self.executor.gpu.driver),
                    // SAFETY: ends the process without the driver's exit handlers; the kernel frees everything.
                    State::Spare | State::Restoring => unsafe { libc::_exit(0) },
                }
                return;
            }
        };
        let message = match message {
            Message { body: WorkerRequest::Reserve { bytes }, .. } => return self.reserve(bytes, asker),
            Message { body: WorkerRequest::SaveCode { hash }, fds, .. } if self.state == State::Quiesced => {
                return self.save_code(&hash, fds, asker);
            }
            Message { body: WorkerRequest::GiveWay, .. } => {
                return self.executor.checkpoint.give_way(self.executor.gpu.driver);
            }
            Message { body: WorkerRequest::Stage { unit, units, new }, fds, .. } => {
                return self.stage(unit, units, new.into_iter().zip(fds).collect(), asker);
            }
            message => message,
        };
        if let Some((reply, files)) = self.sharing(&message) {
            return self.channel.answer_with(&asker, reply, Vec::new(), files);
        }
        let (reply, blob) = match self.request(message) {
            Ok(done) => done,
            Err(refusal) => (WorkerReply::Failed(refusal.into()), Vec::new()),
        };
        self.channel.answer(&asker, reply, blob);
    }

    /// Sets memory aside for clones; answers when that has been done, and the client runs on meanwhile.
    fn reserve(&mut self, bytes: Option<u64>, asker: Asker) {
        let (channel, of_thread) = (Arc::clone(&self.channel), Arc::clone(&asker));
        let done = move || channel.answer(&of_thread, WorkerReply::Done, Vec::new());
        let Executor { checkpoint, memory, gpu, .. } = &mut self.executor;
        let begun = checkpoint.reserve_clones(gpu.driver, memory, bytes, done);
        if let Err(error) = begun {
            let failure = Failure::internal(format!("cannot start a thread: {error}"));
            self.channel.answer(&asker, WorkerReply::Failed(failure), Vec::new());
        }
    }

    /// Writes a code image; answers when that has been done. A disk that hangs does not keep the ring from being opened.
    fn save_code(&mut self, hash: &str, fds: Vec<OwnedFd>, asker: Asker) {
        let (channel, of_thread) = (Arc::clone(&self.channel), Arc::clone(&asker));
        let begun = self.code_and_file(hash, fds).and_then(|(image, mut file)| {
            let work = move || {
                let reply = match io::Write::write_all(&mut file, &image.bytes) {
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

    /// Maps host memory for what is copied; answers when that has been done, and the client runs on meanwhile.
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

    /// Answers what is answered with descriptors.
    fn sharing(&mut self, message: &Message<WorkerRequest>) -> Option<(WorkerReply, Vec<OwnedFd>)> {
        let answered = match (&message.body, self.state) {
            (WorkerRequest::Export { token, first }, State::Open | State::Closing | State::Quiesced) => {
                let (call, memory, _) = self.executor.parts();
                let exported = memory.export_named(&call, token, *first).map_err(Refusal::from);
                exported.map(|(shared, files)| (WorkerReply::Exported { shared }, files))
            }
            (WorkerRequest::MakeShared { first }, State::Spare) => {
                let driver = self.executor.driver();
                let made = self.executor.memory.make_shared(driver, &message.blob, *first).map_err(Refusal::from);
                made.map(|it| (WorkerReply::MadeShared { count: it.count, ids: it.ids, needed: it.needed }, it.files))
            }
            _ => return None,
        };
        Some(answered.unwrap_or_else(|refusal| (WorkerReply::Failed(refusal.into()), Vec::new())))
    }

    fn request(&mut self, message: Message<WorkerRequest>) -> Result<(WorkerReply, Vec<u8>), Refusal> {
        let Message { body, blob, fds } = message;
        let mut fds = fds.into_iter();
        match (body, self.state) {
            (WorkerRequest::Adopt { attach, limits }, State::Spare) => {
                self.executor.memory.set_limits(limits);
                self.adopt(attach, &mut fds)?;
            }
            (WorkerRequest::Quiesce { timeout_ms }, State::Open | State::Closing) => {
                return Ok((self.quiesce(Duration::from_millis(timeout_ms))?, Vec::new()));
            }
            (WorkerRequest::Quiesce { .. }, State::Quiesced) => {}
            (WorkerRequest::Advance { timeout_ms }, State::Closing | State::Quiesced) => {
                return Ok((self.advance(Duration::from_millis(timeout_ms))?, Vec::new()));
            }
            (WorkerRequest::Open, State::Closing | State::Quiesced | State::Restoring) if self.consumer.is_some() => {
                self.open();
            }
            (WorkerRequest::Open, State::Open) => self.executor.checkpoint.before_opening(self.executor.gpu.driver),
            (WorkerRequest::ConfirmQuiesced, State::Quiesced) => {}
            (WorkerRequest::ConfirmQuiesced, _) => {
                return Err(Refusal::WentOn);
            }
            (WorkerRequest::Precopy { hash_key, files, compression }, State::Open) => {
                let cancel = Arc::clone(&self.channel.cancel);
                let key = ContentKey::from_bytes(hash_key);
                let writer = writer(fds, &files, key, &compression, &blob)?;
                let (mut layers, checkpoint) = self.executor.layers();
                checkpoint.begin_precopy(&mut layers, writer, cancel)?;
            }
            (WorkerRequest::Save { hash_key, files, elsewhere, compression, copying, precopied }, State::Quiesced) => {
                let key = ContentKey::from_bytes(hash_key);
                let wanted = Wanted {
                    head: self.consumer.as_ref().map_or(0, Consumer::head),
                    writer: writer(fds, &files, key, &compression, &blob)?,
                    key,
                    precopied,
                    elsewhere: elsewhere.into_iter().collect(),
                    how: copying,
                    cancel: Arc::clone(&self.channel.cancel),
                };
                let (mut layers, checkpoint) = self.executor.layers();
                let (code, secured) = checkpoint.begin_saving(&mut layers, wanted)?;
                return Ok((WorkerReply::Begun { code, secured }, Vec::new()));
            }
            (WorkerRequest::Pace { bandwidth, application_first }, _) => {
                self.executor.checkpoint.pace.limit(&bandwidth);
                self.executor.checkpoint.pace.application_first(application_first);
            }
            (WorkerRequest::Progress, State::Open | State::Closing | State::Quiesced) => {
                let Executor { checkpoint, memory, .. } = &mut self.executor;
                return Ok(match checkpoint.progress(memory)? {
                    Progress::Saving { may_open, copied, bytes } => {
                        (WorkerReply::Saving { may_open, copied, bytes }, Vec::new())
                    }
                    Progress::Saved { client, bytes, waits } => {
                        let blob = client.map(|client| client.to_bytes()).transpose()?;
                        (WorkerReply::Saved { bytes, waits }, blob.unwrap_or_default())
                    }
                });
            }
            (WorkerRequest::JoinContainer { row, gpus, limits }, State::Spare | State::Restoring) => {
                let file = fds.next().ok_or(Refusal::Lacks("no table came with the request"))?;
                self.executor.memory.belong(&self.executor.session, file.into(), row, &gpus, limits)?;
            }
            (WorkerRequest::Code { code }, State::Spare) => self.code_ahead.extend(code.into_iter().zip(fds)),
            (WorkerRequest::Data { data }, State::Spare) => self.take_data(data, &mut fds)?,
            (WorkerRequest::Load { data, hash_algorithm, hash_key, code, limits }, State::Spare) => {
                let key = HashKey::from_parts(hash_algorithm, hash_key)?;
                self.take_data(data, &mut fds)?;
                self.code_ahead.extend(code.into_iter().zip(fds));
                let reader = DataReader::new(key, std::mem::take(&mut self.data_ahead));
                self.load(reader, &blob)?;
                self.executor.memory.set_limits(limits);
            }
            (WorkerRequest::Pinned { pinned }, State::Restoring) => {
                self.pinned_ahead.extend(pinned.into_iter().zip(fds))
            }
            (WorkerRequest::Connect { pinned }, State::Restoring) => self.connect(pinned, fds)?,
            (WorkerRequest::Import { ticket, shared }, State::Open | State::Closing | State::Quiesced) => {
                self.executor.memory.arrived.put(ticket, shared, fds.collect())?;
            }
            (WorkerRequest::TakeShared { ids }, State::Spare) => self.executor.memory.take_shared(ids, fds.collect()),
            (WorkerRequest::Shares, _) => {
                let (mut call, memory, _) = self.executor.parts();
                let (own, others) = memory.shares(&mut call);
                return Ok((WorkerReply::Shares { own, others }, Vec::new()));
            }
            (WorkerRequest::Describe, _) => {
                let description = WorkerReply::Description {
                    device_memory: self.executor.memory.device_bytes(&self.executor.session),
                    pinned_memory: self.executor.memory.pinned.allocations().values().map(|p| p.size).sum(),
                    commands: self.executor.scheduler.times.commands,
                };
                return Ok((description, Vec::new()));
            }
            (WorkerRequest::Remember { protocol }, _) => self.channel.remember(protocol),
            (WorkerRequest::Moment { awaited }, _) => {
                if let Some(shared) = self.executor.session.shared {
                    shared.header().moment.store(u32::from(awaited), Ordering::Release);
                }
            }
            (WorkerRequest::Calls, _) => {
                let counts = self.executor.session.shared.as_ref().map(calls::read).unwrap_or_default();
                return Ok((WorkerReply::Calls { counts }, Vec::new()));
            }
            (WorkerRequest::Access, _) => {
                let report = observe::counted().ok_or(Refusal::Unreported)?;
                return Ok((WorkerReply::Access { report: Box::new(report) }, Vec::new()));
            }
            (WorkerRequest::Memory, _) => {
                let devices =
                    self.executor.memory.memory_of_devices(&mut self.executor.gpu).map_err(Refusal::Memory)?;
                return Ok((WorkerReply::Memory { devices }, Vec::new()));
            }
            (WorkerRequest::Check, _) => {
                let reasons = obstacles(&self.executor.session, &self.executor.memory);
                return Ok((WorkerReply::Checked { reasons }, Vec::new()));
            }
            (request, state) => return Err(Refusal::Unfit { state, request: Box::new(request) }),
        }
        Ok((WorkerReply::Done, Vec::new()))
    }

    /// Takes a client, and tells it so.
    fn adopt(&mut self, attach: Attach, fds: &mut impl Iterator<Item = OwnedFd>) -> Result<(), Refusal> {
        let connection = UnixStream::from(fds.next().ok_or(Refusal::Lacks("no connection came with the client"))?);
        let served = attach.dialect.is_served().map_err(Refusal::from);
        let result = served.and_then(|()| self.share(fds, &attach.dialect)).and_then(|()| self.begin(0));
        let answer = match &result {
            Ok(()) => Answer::Attached(self.executor.session.attached.clone()),
            Err(refusal) => Answer::Refused { reason: refusal.to_string() },
        };
        // The ring is open before the client hears of it; a client that is gone shows on the connection.
        let _ = frame::send(&connection, &answer, &[], &[]);
        result?;
        info!(client = attach.pid, command = attach.command, "serving");
        self.serve_client(connection, attach)?;
        self.state = State::Open;
        Ok(())
    }

    fn serve_client(&mut self, connection: UnixStream, attach: Attach) -> Result<(), Refusal> {
        let arrived = self.executor.memory.pinned.arrived.clone();
        self.channel
            .serve_client(connection, attach, self.executor.session.attached.clone(), arrived)
            .map_err(Refusal::NoThread)
    }

    /// Maps the client's ring and staging.
    fn share(&mut self, fds: &mut impl Iterator<Item = OwnedFd>, dialect: &Dialect) -> Result<(), Refusal> {
        let mut map = |what: &'static str, address: u64, size: usize| {
            let file = fds.next().ok_or(Refusal::Without(what))?;
            if !is_sealed(&file, size as u64) {
                return Err(Refusal::NotSealed { what, size });
            }
            map_at(&file, address, size as u64).ok_or(Refusal::NotMapped(what))
        };
        let ring = map("ring", RING_AT, layout::SHARED_SIZE)?;
        let staging = map("staging", STAGING_AT, layout::STAGING_SIZE)?;
        // SAFETY: a shared mapping of that size, page-aligned, of a file that cannot shrink; it stays as long as the
        // process.
        let shared = unsafe { Shared::new(ring) };
        if shared.version() != Some(dialect.version) {
            return Err(Refusal::OtherRing(dialect.version));
        }
        self.executor.session.shared = Some(shared);
        self.executor.session.staging = staging;
        self.executor.register_staging(0).map_err(Refusal::Staging)
    }

    fn begin(&mut self, head: u64) -> Result<(), Refusal> {
        let shared = self.executor.session.shared.ok_or(Refusal::Lacks("there is no ring"))?;
        shared.header().caller_spin_us.store(self.caller_spin_us, Ordering::Release);
        // Whoever waited for a restored process waits no more.
        shared.header().moment.store(0, Ordering::Release);
        self.consumer = Some(Consumer::new(shared, head));
        Ok(())
    }

    /// Waits for the device. From now on no command is taken, and streams take what is held only by steps.
    fn quiesce(&mut self, timeout: Duration) -> Result<WorkerReply, Refusal> {
        if self.state == State::Open {
            self.closing = Closing::new();
            self.executor.scheduler.deferred.close(0);
            self.state = State::Closing;
            self.channel.silence.listen(true);
        }
        let rest = self.executor.drain(timeout).inspect_err(|_| self.open())?;
        self.closing.look(self.executor.session.waiting.busy(0));
        Ok(match rest {
            Rest::Idle => {
                self.state = State::Quiesced;
                WorkerReply::Done
            }
            Rest::Busy(what) => {
                self.state = State::Closing;
                WorkerReply::Busy { what }
            }
        })
    }

    /// Executes commands up to one for an idle stream, which something may wait for, and quiesces again. What comes
    /// for busy streams is held.
    fn advance(&mut self, timeout: Duration) -> Result<WorkerReply, Refusal> {
        let patience = self.closing.patience();
        if !patience.is_zero() {
            return self.quiesce(patience.min(timeout));
        }
        self.state = State::Closing;
        let began = Instant::now();
        let mut consumer = self.consumer.take().ok_or(Refusal::Lacks("there is no ring"))?;
        self.executor.scheduler.deferred.close(1);
        self.executor.poll();
        while !self.executor.scheduler.deferred.has_stepped() && began.elapsed() < timeout {
            match consumer.take() {
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
        self.consumer = Some(consumer);
        self.executor.scheduler.deferred.close(0);
        self.quiesce(timeout.saturating_sub(began.elapsed()))
    }

    fn open(&mut self) {
        self.executor.checkpoint.before_opening(self.executor.gpu.driver);
        self.channel.silence.listen(false);
        self.executor.scheduler.deferred.open();
        self.state = State::Open;
    }

    /// Keeps data files until `Load`.
    fn take_data(
        &mut self,
        data: Vec<control::DataFile>,
        fds: &mut impl Iterator<Item = OwnedFd>,
    ) -> Result<(), Refusal> {
        for control::DataFile { depth, index } in data {
            let file = fds.next().ok_or(Refusal::Lacks("a data file did not come with the request"))?;
            self.data_ahead.push((DataFile { depth, index }, channel::file(file)));
        }
        Ok(())
    }

    fn load(&mut self, reader: DataReader, blob: &[u8]) -> Result<(), Refusal> {
        let client = Client::from_bytes(blob)?;
        let code = std::mem::take(&mut self.code_ahead).into_iter().map(|(h, f)| (h, channel::file(f))).collect();
        self.executor.load_client(&client, &reader, code)?;
        self.restoring = Some(client);
        self.state = State::Restoring;
        Ok(())
    }

    /// The restored process is there: its shared memory takes the place of what was saved with it.
    fn connect(&mut self, pinned: Vec<Pinned>, mut fds: std::vec::IntoIter<OwnedFd>) -> Result<(), Refusal> {
        let connection = UnixStream::from(fds.next().ok_or(Refusal::Lacks("no connection came with the process"))?);
        let client = self.restoring.take().ok_or(Refusal::Lacks("nothing was loaded"))?;
        let dialect = Dialect::from_parts(client.wire_version, &client.shared_state);
        self.share(&mut fds, &dialect)?;
        let mut files = std::mem::take(&mut self.pinned_ahead);
        files.extend(pinned.into_iter().zip(fds));
        for (what, file) in files {
            self.executor.memory.pinned.arrived.put(what, file);
        }
        let driver = self.executor.driver();
        for (address, allocation) in std::mem::take(&mut self.executor.memory.expected_pins) {
            self.executor.enter_context(allocation.context).map_err(|error| Refusal::Pinned { address, error })?;
            let result = self.executor.memory.pinned.map(driver, address, None, allocation);
            crate::gpu::driver::expect("mapping pinned memory", result)
                .map_err(|source| Refusal::PinnedMap { address, source })?;
        }
        let (mut call, mut loading, code) = self.executor.code_parts();
        code.make_graphs(&mut call, &mut loading);
        self.begin(client.ring.head)?;
        let attach = Attach {
            dialect,
            pid: client.namespace_pid as i32,
            command: client.command.clone(),
            socket: client.socket_path.display().to_string(),
            cookie: 0,
            settings: client.settings.into_iter().map(|s| (s.name, s.value)).collect(),
        };
        self.serve_client(connection, attach)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::copying::Clones;
    use crate::serve::fixture;

    #[test]
    fn memory_reserved_for_clones_is_given_back_when_the_daemon_is_gone_at_any_time() {
        for state in [State::Open, State::Closing, State::Quiesced] {
            let (socket, daemon) = UnixStream::pair().unwrap();
            let (channel, _events) = channel::start(socket).unwrap();
            let mut server = Server::new(fixture::executor(), channel);
            server.state = state;
            *server.executor.checkpoint.copying.reserved.lock().unwrap() = Some(Clones::imagined(4096));
            server.handle(Event::DaemonGone);
            assert_eq!(server.state, State::Open);
            assert!(server.executor.checkpoint.copying.reserved.lock().unwrap().is_none(), "it was {state:?}");
            // The channel's thread ends a worker without a client when this end is closed.
            std::mem::forget(daemon);
        }
    }
}
