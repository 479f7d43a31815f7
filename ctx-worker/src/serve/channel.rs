//! The worker's two sockets: the channel to the daemon, and the connection to the client. A thread reads each, and a further
//! thread writes to the channel, so that the executor never waits for either: a daemon may be stopped.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rekindle_wire::attach::{Attach, Attached, CHOSEN_PROTOCOL, Pinned};
use rekindle_wire::control::{Failure, FailureKind, Learned, WorkerReply, WorkerRequest};
use rekindle_wire::frame::{self, Message};
use rekindle_wire::layout::Shared;
use rekindle_wire::ring;
use rekindle_wire::userfault::{Fault, Userfault};
use tracing::{info, warn};

use crate::checkpoint::copying::Cancel;
use crate::resources::pinned::Arrived;
use crate::serve::silence::{self, Silence};
use crate::session::memory_pressure::{MemoryPressure, Room};
use crate::signal_stack::Thread;

/// How long the daemon may take to kill a client that cannot go on.
const KILLED: Duration = Duration::from_secs(5);

/// A message from the daemon, or news about it.
pub(crate) enum Event {
    /// A request that must be answered.
    Request(Box<Message<WorkerRequest>>, Asker),
    /// A part of connecting a process that does not wait for it.
    Ahead(Box<Message<WorkerRequest>>),
    /// The daemon is gone.
    DaemonGone,
    /// The content of a restored client is there, or could not be loaded.
    LoadOver,
    /// The daemon has made room for the client.
    RoomMade,
    /// A thread of the client waits for a page of managed memory.
    Fault(Fault),
}

/// The daemon that has sent a request: only this daemon gets the answer, also when another has taken over meanwhile.
pub(crate) type Asker = Arc<UnixStream>;

/// A reply, and the daemon that receives it.
struct Answer {
    socket: Asker,
    reply: WorkerReply,
    blob: Vec<u8>,
    files: Vec<OwnedFd>,
}

/// The data that the threads share with the executor.
pub(crate) struct Channel {
    /// The socket for replies; replaced when another daemon takes over.
    socket: Mutex<Asker>,
    /// Sends replies to the thread that writes them.
    answers: Sender<Answer>,
    /// Sends events to the executor.
    events: Sender<Event>,
    /// How long the daemon has been silent.
    pub(crate) silence: Silence,
    /// Cancels a save.
    pub(crate) cancel: Arc<Cancel>,
    /// Memory that other processes occupy.
    memory_pressure: MemoryPressure,
    /// Whether there is no daemon now.
    is_alone: AtomicBool,
    /// Whether there is news for the executor.
    pub(crate) news: AtomicBool,
    /// The ring whose doorbell wakes the executor, while it may sleep there.
    sleeping_on: Mutex<Option<Shared>>,
    /// The client's connection, which is shown to another daemon.
    client: Mutex<Option<(Attach, Attached, OwnedFd)>>,
    /// Whether another worker has got the connection, and this one may read it no more. Held while a message is read.
    handed_over: Arc<Mutex<bool>>,
    /// Sends the connection to the thread that reads it.
    connections: Sender<(UnixStream, Arc<Arrived>)>,
    /// Sends the client's userfaultfd to the thread that reads it.
    userfaults: Sender<Arc<Userfault>>,
}

/// Starts the threads that read the channel and, once there is one, the client's connection.
///
/// `attached` is what a client is told, and `arrived` takes what a client sends.
pub(crate) fn start(
    socket: UnixStream,
    attached: Attached,
    arrived: Arc<Arrived>,
) -> std::io::Result<(Arc<Channel>, Receiver<Event>)> {
    let (events, receiver) = channel();
    let (connections, coming) = channel();
    let (answers, replies) = channel();
    let (userfaults, watched) = channel();
    let reading = socket.try_clone()?;
    let channel = Arc::new(Channel {
        socket: Mutex::new(Arc::new(socket)),
        answers,
        events,
        silence: Silence::new(),
        cancel: Arc::default(),
        memory_pressure: MemoryPressure::default(),
        is_alone: AtomicBool::new(false),
        news: AtomicBool::new(false),
        sleeping_on: Mutex::new(None),
        client: Mutex::new(None),
        handed_over: Arc::default(),
        connections,
        userfaults: userfaults.clone(),
    });
    // Started now, so that its stack is mapped early, see `start`.
    let handed_over = Arc::clone(&channel.handed_over);
    Thread::named("connection").spawn(move || {
        if let Ok((connection, arrived)) = coming.recv() {
            read_connection(&connection, &arrived, &handed_over, &userfaults);
        }
    })?;
    let shared = channel.clone();
    Thread::named("faults").spawn(move || watched.into_iter().for_each(|it| shared.read_faults(&it)))?;
    Thread::named("answers").spawn(move || write_answers(&replies))?;
    let shared = channel.clone();
    Thread::named("channel").spawn(move || shared.read(reading, &attached, &arrived))?;
    Ok((channel, receiver))
}

impl Channel {
    fn read(&self, mut socket: UnixStream, attached: &Attached, arrived: &Arc<Arrived>) {
        let Some(mut asker) = self.asker() else { return };
        loop {
            if !self.silence.wait_readable(&socket) {
                // The executor notices it too, after the save has ended.
                self.cancel.fire();
                std::thread::sleep(silence::POLL_INTERVAL);
                continue;
            }
            let received = frame::receive_known::<WorkerRequest>(&socket, frame::MAX_BLOB);
            self.silence.heard();
            let received = match received {
                // The daemon is of a later release. The request is refused, and the client continues.
                Ok(Message { body: Err(error), .. }) => {
                    let reason = format!(
                        "a worker of Rekindle {} does not know this: {error}; start the program anew to have a newer one",
                        env!("CARGO_PKG_VERSION")
                    );
                    self.answer(&asker, WorkerReply::Failed(Failure::new(FailureKind::Version, reason)), Vec::new());
                    continue;
                }
                Ok(Message { body: Ok(body), blob, fds }) => Ok(Message { body, blob, fds }),
                Err(error) => Err(error),
            };
            match received {
                Ok(Message { body: WorkerRequest::Cancel, .. }) => self.cancel.fire(),
                Ok(Message { body: WorkerRequest::Alive, .. }) => {}
                Ok(Message { body: WorkerRequest::Comes { attach }, fds, .. }) => {
                    self.comes(*attach, attached, fds, arrived);
                }
                Ok(Message { body: WorkerRequest::Ahead { request }, blob, fds }) => {
                    if !self.tell(Event::Ahead(Box::new(Message { body: *request, blob, fds }))) {
                        return;
                    }
                }
                Ok(Message { body: WorkerRequest::Room { coming, how_much, again }, .. }) => {
                    if let Some((free, waited)) = self.memory_pressure.said(Room { coming, how_much, again }) {
                        let waited_ms = waited.as_millis() as u64;
                        self.answer(&asker, WorkerReply::Needs { free, waited_ms }, Vec::new());
                    }
                    // A suspended client takes the room before others do.
                    if again && !self.tell(Event::RoomMade) {
                        return;
                    }
                }
                Ok(message) => {
                    // Done here, before the executor takes the request: a `Cancel` may follow at once.
                    if matches!(message.body, WorkerRequest::Save { .. } | WorkerRequest::Precopy { .. }) {
                        self.cancel.expect_another();
                    }
                    if !self.tell(Event::Request(Box::new(message), Arc::clone(&asker))) {
                        return;
                    }
                }
                Err(error) => {
                    info!("the daemon is gone ({error})");
                    self.cancel.fire();
                    self.is_alone.store(true, Ordering::Release);
                    self.memory_pressure.said(Room::default());
                    if !self.tell(Event::DaemonGone) {
                        return;
                    }
                    let Some(next) = self.rejoin() else {
                        // A worker without a client, or whose client is ending too, has nothing left to do.
                        // SAFETY: ends the process without the driver's exit handlers; the kernel frees everything.
                        unsafe { libc::_exit(0) }
                    };
                    let Ok(reading) = next.try_clone() else { return };
                    asker = Arc::new(next);
                    if let Ok(mut current) = self.socket.lock() {
                        *current = Arc::clone(&asker);
                    }
                    self.is_alone.store(false, Ordering::Release);
                    socket = reading;
                }
            }
        }
    }

    /// The process of the client that is being loaded will run now, so that this worker needs no daemon any more.
    fn comes(&self, attach: Attach, attached: &Attached, fds: Vec<OwnedFd>, arrived: &Arc<Arrived>) {
        let connection = fds.into_iter().next().map(UnixStream::from);
        let taken = connection.ok_or(std::io::ErrorKind::NotConnected.into()).and_then(|connection| {
            self.know_client(&connection, attach, attached.clone())?;
            self.read_client(connection, Arc::clone(arrived))
        });
        if let Err(error) = taken {
            warn!("a restored process cannot be taken before its client is loaded: {error}");
        }
    }

    fn rejoin(&self) -> Option<UnixStream> {
        let (attach, attached, connection) = {
            let client = self.client.lock().ok()?;
            let (attach, attached, connection) = client.as_ref()?;
            (attach.clone(), attached.clone(), connection.try_clone().ok()?)
        };
        // The connection's own thread ends the process when the client goes.
        crate::serve::rejoin::rejoin(&attach, &attached, connection.as_fd(), || false)
    }

    /// Sends the executor an event. Returns whether there still is an executor.
    pub(crate) fn tell(&self, event: Event) -> bool {
        let told = self.events.send(event).is_ok();
        self.wake();
        told
    }

    /// Has a thread read the client's userfaultfd from here on.
    pub(crate) fn watch(&self, userfault: Arc<Userfault>) {
        // The thread lives as long as this.
        let _ = self.userfaults.send(userfault);
    }

    fn read_faults(&self, userfault: &Userfault) {
        loop {
            match userfault.read(-1) {
                Ok(faults) => {
                    if !faults.into_iter().all(|fault| self.tell(Event::Fault(fault))) {
                        return;
                    }
                }
                Err(error) => return warn!("the client's use of managed memory is not seen any more: {error}"),
            }
        }
    }

    /// Makes the executor check for news, wherever it waits.
    fn wake(&self) {
        self.news.store(true, Ordering::Release);
        if let Ok(ring) = self.sleeping_on.lock()
            && let Some(shared) = *ring
        {
            ring::ring_doorbell(&shared);
        }
    }

    /// Sets the ring on which the executor may sleep from now on (`None`: no longer). While there is none, nothing here writes
    /// to the client's memory.
    pub(crate) fn sleeps_on(&self, ring: Option<Shared>) {
        if let Ok(mut sleeping_on) = self.sleeping_on.lock() {
            *sleeping_on = ring;
        }
    }

    /// The current daemon.
    pub(crate) fn asker(&self) -> Option<Asker> {
        self.socket.lock().ok().map(|it| Arc::clone(&it))
    }

    /// Called when the client finds no device memory. Returns, after a moment, whether to try again. `first`: the command has
    /// not been retried yet.
    pub(crate) fn is_room_coming(&self, first: bool, needs: &mut dyn FnMut() -> Vec<u64>) -> bool {
        self.memory_pressure.wait(first, needs, || self.needs_room())
    }

    /// A suspended client that is to resume finds no room: asks the daemon for some, now and then. Does not wait.
    pub(crate) fn ask_for_room(&self, needs: Vec<u64>) {
        self.memory_pressure.ask_beside(needs, || self.needs_room());
    }

    /// Tells the daemon that a step of a load begins.
    pub(crate) fn say_step(&self, step: &str) {
        if let Some(daemon) = self.asker() {
            self.answer(&daemon, WorkerReply::LoadStep { step: step.to_owned() }, Vec::new());
        }
    }

    /// Tells the daemon what the client's commands have taught, if it is the one that has asked for that. After a fault the daemon
    /// kills the client, and this process ends with it: then this does not return, unless that takes too long.
    pub(crate) fn say_learned(&self, asker: Option<&Asker>, learned: &Learned, fault: Option<String>) {
        let daemon = self.asker().filter(|daemon| asker.is_some_and(|asker| Arc::ptr_eq(asker, daemon)));
        if let Some((daemon, blob)) = daemon.zip(learned.to_bytes().ok()) {
            let is_fault = fault.is_some();
            self.answer(&daemon, WorkerReply::Learned { fault }, blob);
            if is_fault {
                std::thread::sleep(KILLED);
            }
        }
    }

    /// Answers a request.
    pub(crate) fn answer(&self, asker: &Asker, reply: WorkerReply, blob: Vec<u8>) {
        self.answer_with(asker, reply, blob, Vec::new());
    }

    /// Answers a request with descriptors.
    pub(crate) fn answer_with(&self, asker: &Asker, reply: WorkerReply, blob: Vec<u8>, files: Vec<OwnedFd>) {
        if self.answers.send(Answer { socket: Arc::clone(asker), reply, blob, files }).is_err() {
            warn!("an answer to the daemon is lost");
        }
    }

    /// Stores what the next daemon must know of the client.
    pub(crate) fn remember(&self, protocol: Option<String>) {
        if let Ok(mut client) = self.client.lock()
            && let Some((attach, ..)) = client.as_mut()
        {
            attach.settings.retain(|(name, _)| name != CHOSEN_PROTOCOL);
            attach.settings.extend(protocol.map(|it| (CHOSEN_PROTOCOL.to_owned(), it)));
        }
    }

    /// Whether the client has come, and its connection is read.
    pub(crate) fn has_client(&self) -> bool {
        self.client.lock().is_ok_and(|it| it.is_some())
    }

    /// Remembers the client's connection.
    pub(crate) fn know_client(
        &self,
        connection: &UnixStream,
        attach: Attach,
        attached: Attached,
    ) -> std::io::Result<()> {
        let copy = connection.try_clone()?;
        if let Ok(mut client) = self.client.lock() {
            *client = Some((attach, attached, copy.into()));
        }
        Ok(())
    }

    /// Has the connection's thread read it.
    pub(crate) fn read_client(&self, connection: UnixStream, arrived: Arc<Arrived>) -> std::io::Result<()> {
        self.connections.send((connection, arrived)).map_err(std::io::Error::other)
    }

    /// Stops reading the client's connection, between two messages, and returns a copy of it. Its thread still notices the
    /// client's end.
    pub(crate) fn hand_over(&self) -> std::io::Result<OwnedFd> {
        *self.handed_over.lock().unwrap_or_else(PoisonError::into_inner) = true;
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, _, connection) = client.as_ref().ok_or(std::io::ErrorKind::NotConnected)?;
        connection.try_clone()
    }

    /// Tells the daemon, if there is one, that the client needs device memory that it does not have.
    pub(crate) fn needs_room(&self) {
        if !self.is_alone.load(Ordering::Acquire)
            && let Some(daemon) = self.asker()
        {
            self.answer(&daemon, WorkerReply::NeedsRoom, Vec::new());
        }
    }
}

/// Writes answers, each to the daemon that sent the request.
fn write_answers(answers: &Receiver<Answer>) {
    for Answer { socket, reply, blob, files } in answers {
        let fds: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        if let Err(error) = frame::send(&socket, &reply, &blob, &fds) {
            warn!("the daemon did not take an answer: {error}");
        }
    }
}

/// Receives the memfds that the client sends. When the connection closes, the client is gone, and the worker ends.
fn read_connection(
    connection: &UnixStream,
    arrived: &Arrived,
    handed_over: &Mutex<bool>,
    userfaults: &Sender<Arc<Userfault>>,
) {
    loop {
        wait_for(connection, libc::POLLIN);
        let handed_over = handed_over.lock().unwrap_or_else(PoisonError::into_inner);
        if *handed_over {
            drop(handed_over);
            // The messages are another worker's.
            wait_for(connection, 0);
            info!("the client is gone");
            // SAFETY: as below.
            unsafe { libc::_exit(0) }
        }
        match frame::receive::<Pinned>(connection) {
            Ok(Message { body, mut fds, .. }) => {
                // Only the daemon may bring other files than memfds.
                let body = Pinned { file_offset: None, ..body };
                // Managed memory comes with the userfaultfd behind its memfd.
                if fds.len() == 2
                    && let Some(first) = fds.pop().and_then(|fd| arrived.put_userfault(fd))
                {
                    let _ = userfaults.send(first);
                }
                let accepted = fds.pop().is_some_and(|file| arrived.put(body, file));
                if accepted {
                    continue;
                }
                warn!("the client announced pinned memory without a file, or too much of it");
            }
            Err(frame::FrameError::Closed) => {
                info!("the client is gone");
                crate::checkpoint::access::observe::log_at_end();
            }
            Err(error) => warn!("the client's connection failed: {error}"),
        }
        // SAFETY: ends the process without running the driver's exit handlers, which could wait for the device. The
        // kernel frees everything.
        unsafe { libc::_exit(0) }
    }
}

/// Waits until there is something to read, if these events say so, or the other end is closed.
fn wait_for(connection: &UnixStream, events: i16) {
    loop {
        let mut entry = libc::pollfd { fd: connection.as_raw_fd(), events, revents: 0 };
        // SAFETY: one entry, a local.
        if unsafe { libc::poll(&raw mut entry, 1, -1) } > 0 {
            return;
        }
    }
}

/// A file from a message's descriptor.
pub(crate) fn file(fd: OwnedFd) -> File {
    File::from(fd)
}
