//! One worker process, as the daemon sees it: its channel, its requests one at a time, its death.
//!
//! ```text
//!              call                    reply
//!     idle ───────────► waiting ─────────────────► idle
//!                          │ time is up      reply   ▲
//!                          └──────────► abandoned ───┘          the channel closes, in any state ─► dead
//! ```
//!
//! A thread of its own reads the channel, so that a death is noticed at once and threads that wait for a reply wake up. No
//! thread holds a lock while it waits.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rekindle_wire::access::AccessReport;
use rekindle_wire::attach::{Attached, Pinned};
use rekindle_wire::calls::Count;
use rekindle_wire::control::{
    Failing, Failure, FailureKind, LOADS_BESIDE, LOADS_CODE, Learned, LoadTimes, MAKES_ROOM, MOVES, REGISTERS_FILES,
    RUNS_AHEAD, SUSPENDS, Suspension, TemplatePiece, WorkerReply, WorkerRequest,
};
use rekindle_wire::frame::{self, FrameError, MAX_FDS, Message};
use rekindle_wire::ipc::{MAX_PIECES, PIECES_AT_A_TIME, PieceId, Shared, SharedPiece, Token};
use rekindle_wire::nvml::Memory;
use rustix::process::Signal;
use thiserror::Error;
use tracing::{debug, info, warn};

pub(crate) use self::describe::{describe_all, describe_at_a_glance, describe_now};
use super::process::Process;
use super::sandbox::UidClaim;
use super::{lock, sys};
use crate::limit::{Deadline, Limit};

mod describe;

/// The most pieces that one client shares: the worker sends as many descriptors in a restore.
const MOST_MADE: usize = 16 * MAX_PIECES;

/// The most pieces of a template. Each takes a descriptor of the daemon.
const MOST_PIECES: usize = 1 << 16;

/// A template: the physical pieces behind a client's content. Their descriptors keep the memory.
pub(crate) type Pieces = Vec<(TemplatePiece, OwnedFd)>;

/// The largest part of a manifest that a worker may send.
const MAX_BLOB: usize = rekindle_images::limits::MAX_MANIFEST as usize;
/// How long a worker may take to describe itself, or to report its devices' memory.
const DESCRIBE_TIMEOUT: Limit = Limit::fixed(Duration::from_secs(1));
/// How long a worker may take to answer an operator's question.
const ASK_TIMEOUT: Limit = Limit::fixed(Duration::from_secs(10));
/// How long a worker may leave its channel full.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the status of a worker whose channel closed, before threads that wait for it are told.
const STATUS_GRACE: Duration = Duration::from_millis(200);
/// How long such a worker may then take to end.
const END_GRACE: Duration = Duration::from_secs(5);
/// The interval at which the daemon checks whether a slow worker works.
const WORK_LOOK: Duration = Duration::from_millis(500);

/// How long the daemon waits for an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Timeout {
    /// No limit while the worker lives: only where no other work waits for the answer.
    Endless,
    /// Until this moment.
    Until(Deadline),
    /// As long as the worker works, however long that takes: it may not go longer than this limit without using a CPU.
    WhileItWorks(Limit),
}

impl From<Limit> for Timeout {
    fn from(limit: Limit) -> Self {
        Self::Until(limit.begins())
    }
}

impl From<Deadline> for Timeout {
    fn from(deadline: Deadline) -> Self {
        Self::Until(deadline)
    }
}

impl Timeout {
    /// The deadline for the turn of a request, which comes when the one before is answered.
    fn of_turn(self) -> Option<Deadline> {
        match self {
            Self::Endless => None,
            Self::Until(deadline) => Some(deadline),
            Self::WhileItWorks(limit) => Some(limit.begins()),
        }
    }
}

/// Why a worker did not do a request.
#[derive(Clone, Debug, Error)]
pub(crate) enum WorkerError {
    /// The request failed, and the worker is as it was before.
    #[error("{0}")]
    Failed(Failure),
    /// The worker may still carry out the request.
    #[error("its worker did not answer {request} within {limit}: {at}")]
    Timeout { request: &'static str, limit: Limit, at: At },
    /// The worker may still carry out the request.
    #[error("its worker has made no progress with {request} for {limit}: {at}")]
    Idle { request: &'static str, limit: Limit, at: At },
    #[error("its worker has died ({0})")]
    Dead(String),
    /// The worker's process has ended, and so has the worker.
    #[error("it has ended")]
    Ended,
    #[error("its worker gave an unexpected answer to {0}; install one version of Rekindle")]
    Protocol(&'static str),
}

impl Failing for WorkerError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Failed(failure) => failure.kind,
            Self::Timeout { .. } | Self::Idle { .. } => FailureKind::Timeout,
            Self::Dead(_) | Self::Ended => FailureKind::LostPeer,
            Self::Protocol(_) => FailureKind::Version,
        }
    }
}

/// The activity of a worker that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("it {}", self.what())]
pub(crate) enum At {
    Stopped,
    Busy,
}

impl At {
    /// The activity without its subject.
    pub(crate) fn what(self) -> &'static str {
        match self {
            Self::Stopped => "is stopped (SIGSTOP, or a debugger); let it go on",
            Self::Busy => {
                "is in a call of the driver that takes long, as compiling, linking and pinning much memory may, or hangs; \
                wait for that, or allow more time"
            }
        }
    }
}

/// An answer with its blob.
pub(crate) struct Answered {
    pub(crate) reply: WorkerReply,
    pub(crate) blob: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// The memory that a worker has made for sharing, and the memory that it needs from others.
pub(crate) type MadeShared = (Vec<(PieceId, OwnedFd)>, Vec<PieceId>);

/// The description of a worker for `ps`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Description {
    pub(crate) device_memory: Vec<u64>,
    pub(crate) pinned_memory: u64,
    pub(crate) commands: u64,
    pub(crate) suspended: Option<Suspension>,
    pub(crate) idle_ms: u64,
    /// Bytes on each device that its client gives back when it is suspended.
    pub(crate) physical: Vec<u64>,
    /// None where the worker is of an older release.
    pub(crate) refused_calls: Option<u64>,
    /// When the worker executed its client's first command; none before that, and where it is of an older release.
    pub(crate) first_command: Option<Instant>,
    /// Nanoseconds of work on each device. Empty where the worker is of an older release.
    pub(crate) gpu_time_ns: Vec<u64>,
}

/// How far a worker is with the content of a restored client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadProgress {
    UnderWay {
        /// Bytes.
        loaded: u64,
        /// Bytes in all.
        bytes: u64,
    },
    Over(LoadTimes),
}

/// A worker process.
pub(crate) struct Worker {
    process: Process,
    pidfd: OwnedFd,
    attached: Attached,
    /// The control version that the worker speaks; 0 where that is not known.
    wire: u32,
    channel: UnixStream,
    /// Held while one frame is written, so that a `Cancel` does not land inside another.
    sending: Mutex<()>,
    state: Mutex<State>,
    changed: Condvar,
    /// None before the worker was described for the first time.
    described: Mutex<Option<Description>>,
    /// When the restore of its client began, until the time to the first command is told.
    restored: Mutex<Option<Instant>>,
    on_death: Mutex<Option<Action>>,
    on_need: Mutex<Option<OnNeed>>,
    on_load_step: Mutex<Option<StepAction>>,
    on_learned: Mutex<Option<OnLearned>>,
    on_fault: Mutex<Option<OnFault>>,
}

type Action = Arc<dyn Fn() + Send + Sync>;
type OnNeed = Arc<dyn Fn(Need) + Send + Sync>;
type OnLearned = Arc<dyn Fn(&Learned, bool) + Send + Sync>;
type OnFault = Arc<dyn Fn(&str) + Send + Sync>;
type StepAction = Arc<dyn Fn(&str) + Send + Sync>;

/// A client finds no device memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Room,
    /// The bytes that must be free on each device, by the worker's numbers, and since when.
    Free {
        free: Vec<u64>,
        since: Instant,
    },
}

/// Whether the log says that an answer came late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    IsNews,
    /// Somebody only glanced, and does so again and again.
    IsUsual,
}

enum State {
    Idle,
    Waiting(SyncSender<Answered>),
    /// The answer to a request that nobody waits for any more is to come.
    Abandoned(Late),
    Dead(String),
}

impl Worker {
    /// Takes charge of a worker that is ready. `child` is the process to reap, with the claim on its user; none if another
    /// daemon started the worker. `wire` is the control version that the worker speaks, or 0.
    pub(crate) fn new(
        pid: i32,
        child: Option<(Child, Option<UidClaim>)>,
        attached: Attached,
        wire: u32,
        channel: UnixStream,
    ) -> io::Result<Arc<Self>> {
        // The worker's channel thread only reads. A worker whose thread does not read is under another program's control.
        channel.set_write_timeout(Some(SEND_TIMEOUT))?;
        let worker = Arc::new(Self {
            pidfd: sys::pidfd_open(pid)?,
            process: Process::with_pid(pid)?,
            attached,
            wire,
            channel,
            sending: Mutex::default(),
            state: Mutex::new(State::Idle),
            changed: Condvar::new(),
            described: Mutex::default(),
            restored: Mutex::default(),
            on_death: Mutex::default(),
            on_need: Mutex::default(),
            on_load_step: Mutex::default(),
            on_learned: Mutex::default(),
            on_fault: Mutex::default(),
        });
        let reader = Arc::clone(&worker);
        super::thread("worker-channel", move || {
            let reason = reader.read_replies();
            let _ = reader.channel.shutdown(std::net::Shutdown::Both);
            reader.reap(child, reason);
        })?;
        Ok(worker)
    }

    /// The worker's pid.
    pub(crate) fn pid(&self) -> i32 {
        self.process.pid
    }

    /// The worker's process.
    pub(crate) fn process(&self) -> Process {
        self.process
    }

    /// The worker's devices, and the other data that a client is told.
    pub(crate) fn attached(&self) -> &Attached {
        &self.attached
    }

    /// Whether the worker can load content while the restored process runs.
    pub(crate) fn loads_beside(&self) -> bool {
        self.wire >= LOADS_BESIDE
    }

    /// Whether the worker loads code before there is a client.
    pub(crate) fn loads_code(&self) -> bool {
        self.wire >= LOADS_CODE
    }

    /// Whether the worker takes a process that runs before its client is loaded.
    pub(crate) fn runs_ahead(&self) -> bool {
        self.wire >= RUNS_AHEAD
    }

    /// Whether the worker can suspend its client.
    pub(crate) fn suspends(&self) -> bool {
        self.wire >= SUSPENDS
    }

    /// Whether the worker says how much memory it needs, and what its client would give back.
    pub(crate) fn makes_room(&self) -> bool {
        self.wire >= MAKES_ROOM
    }

    /// Whether the worker can suspend its client deeply, and take over a client of another worker that has.
    pub(crate) fn moves(&self) -> bool {
        self.wire >= MOVES
    }

    /// How far the worker's load of content is.
    pub(crate) fn load_progress(&self, timeout: impl Into<Timeout>) -> Result<LoadProgress, WorkerError> {
        match self.call(&WorkerRequest::LoadProgress, &[], &[], timeout)?.reply {
            WorkerReply::Loading { loaded, bytes } => Ok(LoadProgress::UnderWay { loaded, bytes }),
            WorkerReply::Loaded { times } => Ok(LoadProgress::Over(times)),
            _ => Err(WorkerError::Protocol("LoadProgress")),
        }
    }

    /// The error of a worker that makes no progress with a request for as long as the limit.
    pub(crate) fn idle(&self, request: &WorkerRequest, limit: Limit) -> WorkerError {
        WorkerError::Idle { request: name(request), limit, at: self.is_at() }
    }

    /// Sets the action at the worker's death, in place of the former one. If the worker is dead, the action runs at once; the
    /// action may run twice.
    pub(crate) fn on_death(&self, action: impl Fn() + Send + Sync + 'static) {
        let action: Action = Arc::new(action);
        *lock(&self.on_death) = Some(Arc::clone(&action));
        if self.is_dead() {
            action();
        }
    }

    /// Sets the action when the client finds no device memory. The thread that reads the worker's answers runs it.
    pub(crate) fn on_need(&self, action: impl Fn(Need) + Send + Sync + 'static) {
        *lock(&self.on_need) = Some(Arc::new(action));
    }

    /// Sets the action when commands of the client, which borrows memory, have taught something, and whether it cannot go on. The
    /// thread that reads the worker's answers runs it.
    pub(crate) fn on_learned(&self, action: impl Fn(&Learned, bool) + Send + Sync + 'static) {
        *lock(&self.on_learned) = Some(Arc::new(action));
    }

    /// Sets the action when the client cannot go on, for the given reason. The same thread runs it.
    pub(crate) fn on_fault(&self, action: impl Fn(&str) + Send + Sync + 'static) {
        *lock(&self.on_fault) = Some(Arc::new(action));
    }

    /// Sets the action when the worker begins a step of a load. The thread that reads the worker's answers runs it.
    pub(crate) fn on_load_step(&self, action: impl Fn(&str) + Send + Sync + 'static) {
        *lock(&self.on_load_step) = Some(Arc::new(action));
    }

    /// Removes that action.
    pub(crate) fn forget_load_steps(&self) {
        lock(&self.on_load_step).take();
    }

    /// Whether the worker is gone.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(*lock(&self.state), State::Dead(_))
    }

    /// Sends SIGKILL. The worker's client, if it has one, sees its connection close.
    pub(crate) fn kill(&self) {
        if let Err(error) = sys::pidfd_signal(self.pidfd.as_fd(), Signal::KILL) {
            debug!(worker = self.pid(), %error, "cannot kill a worker; it has ended already");
        }
    }

    /// Sends a request, and waits for the answer until the timeout. `Failed` is an error.
    pub(crate) fn call(
        &self,
        request: &WorkerRequest,
        blob: &[u8],
        fds: &[RawFd],
        timeout: impl Into<Timeout>,
    ) -> Result<Answered, WorkerError> {
        let timeout = timeout.into();
        let reply = self.begin(timeout.of_turn()).unwrap_or_else(|| Err(self.timed_out(request, timeout)))?;
        if let Err(error) = self.send(request, blob, fds) {
            return Err(self.fail_channel(&error));
        }
        self.receive(&reply, timeout, Late::IsNews).unwrap_or_else(|| Err(self.timed_out(request, timeout)))
    }

    /// The error after the timeout.
    fn timed_out(&self, request: &WorkerRequest, timeout: Timeout) -> WorkerError {
        let (request, at) = (name(request), self.is_at());
        match timeout {
            Timeout::Until(Deadline { limit, .. }) => WorkerError::Timeout { request, limit, at },
            Timeout::WhileItWorks(limit) => WorkerError::Idle { request, limit, at },
            Timeout::Endless => self.death(),
        }
    }

    /// Waits for the answer to the request that was sent. None after the timeout: a later answer is dropped.
    fn receive(
        &self,
        reply: &Receiver<Answered>,
        timeout: Timeout,
        late: Late,
    ) -> Option<Result<Answered, WorkerError>> {
        let answered = match timeout {
            Timeout::Endless => reply.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Timeout::Until(deadline) => reply.recv_timeout(deadline.left()),
            Timeout::WhileItWorks(limit) => self.receive_while_it_works(reply, limit),
        };
        match answered {
            Ok(answered) => Some(match answered.reply {
                WorkerReply::Failed(failure) => Err(WorkerError::Failed(failure)),
                _ => Ok(answered),
            }),
            Err(RecvTimeoutError::Disconnected) => Some(Err(self.death())),
            Err(RecvTimeoutError::Timeout) => {
                let mut state = lock(&self.state);
                if matches!(*state, State::Waiting(_)) {
                    *state = State::Abandoned(late);
                }
                drop(state);
                None
            }
        }
    }

    /// Waits as long as the worker uses a CPU now and then. Reading files and waiting for the GPU use none, and cannot be seen
    /// from here.
    fn receive_while_it_works(&self, reply: &Receiver<Answered>, limit: Limit) -> Result<Answered, RecvTimeoutError> {
        let (mut used, mut idle) = (self.process.cpu_time(), limit.begins());
        loop {
            match reply.recv_timeout(WORK_LOOK.min(idle.left())) {
                Err(RecvTimeoutError::Timeout) => {}
                answered => return answered,
            }
            let now = self.process.cpu_time();
            if now != used {
                (used, idle) = (now, limit.begins());
            } else if idle.is_over() {
                return Err(RecvTimeoutError::Timeout);
            }
        }
    }

    /// The reason why the worker does not answer.
    pub(crate) fn is_at(&self) -> At {
        let stopped = Process::with_pid(self.pid()).is_ok_and(|it| it.is_stopped());
        if stopped { At::Stopped } else { At::Busy }
    }

    /// Sends a request that is answered by `Done`.
    pub(crate) fn ask(
        &self,
        request: &WorkerRequest,
        fds: &[RawFd],
        timeout: impl Into<Timeout>,
    ) -> Result<(), WorkerError> {
        self.ask_with(request, &[], fds, timeout)
    }

    /// Like [`Worker::ask`], with a blob.
    pub(crate) fn ask_with(
        &self,
        request: &WorkerRequest,
        blob: &[u8],
        fds: &[RawFd],
        timeout: impl Into<Timeout>,
    ) -> Result<(), WorkerError> {
        match self.call(request, blob, fds, timeout)?.reply {
            WorkerReply::Done => Ok(()),
            _ => Err(WorkerError::Protocol(name(request))),
        }
    }

    /// Brings files of code, with their hashes, for the `Load` or `LoadCode` that follows.
    pub(crate) fn send_code(
        &self,
        files: &[(String, OwnedFd)],
        timeout: impl Into<Timeout> + Copy,
    ) -> Result<(), WorkerError> {
        files.chunks(MAX_FDS).try_for_each(|files| {
            let code = files.iter().map(|it| it.0.clone()).collect();
            self.ask(&WorkerRequest::Code { code }, &sys::raw(files.iter().map(|it| &it.1)), timeout)
        })
    }

    /// Sends a request that is not answered.
    pub(crate) fn say(&self, what: &WorkerRequest) {
        if let Err(error) = self.say_with(what, &[]) {
            debug!(worker = self.pid(), %error, "cannot say {}", name(what));
        }
    }

    /// Sends a request with descriptors that is not answered. An error means that the worker is gone, or is about to end.
    pub(crate) fn say_with(&self, what: &WorkerRequest, fds: &[RawFd]) -> Result<(), WorkerError> {
        let sent = self.send(what, &[], fds);
        sent.map_err(|error| {
            let _ = self.channel.shutdown(std::net::Shutdown::Both);
            WorkerError::Dead(error.to_string())
        })
    }

    /// Has it do something when it has loaded its client.
    pub(crate) fn say_ahead(&self, request: WorkerRequest, fds: &[RawFd]) -> Result<(), WorkerError> {
        self.say_with(&WorkerRequest::Ahead { request: Box::new(request) }, fds)
    }

    /// Cuts a `Save` short.
    pub(crate) fn cancel(&self) {
        self.say(&WorkerRequest::Cancel);
    }

    /// Tells the worker that the daemon is there.
    pub(crate) fn say_alive(&self) {
        self.say(&WorkerRequest::Alive);
    }

    /// Has the commands of its client, which is suspended, wait for a request to resume.
    pub(crate) fn hold_suspended(&self, timeout: impl Into<Timeout>) -> Result<(), WorkerError> {
        let request =
            WorkerRequest::Suspend { data: Vec::new(), hash_algorithm: 0, hash_key: [0; 16], hold: true, deep: false };
        match self.call(&request, &[], &[], timeout)?.reply {
            WorkerReply::Suspended { .. } => Ok(()),
            _ => Err(WorkerError::Protocol("Suspend")),
        }
    }

    /// The calls of its client, with their counts.
    pub(crate) fn calls(&self) -> Result<Vec<Count>, WorkerError> {
        match self.call(&WorkerRequest::Calls, &[], &[], ASK_TIMEOUT)?.reply {
            WorkerReply::Calls { counts } => Ok(counts),
            _ => Err(WorkerError::Protocol("Calls")),
        }
    }

    /// The counters of its client's accesses.
    pub(crate) fn access(&self) -> Result<AccessReport, WorkerError> {
        match self.call(&WorkerRequest::Access, &[], &[], ASK_TIMEOUT)?.reply {
            WorkerReply::Access { report } => Ok(*report),
            _ => Err(WorkerError::Protocol("Access")),
        }
    }

    /// The reasons why its client could not be saved now; empty if it could.
    pub(crate) fn check(&self) -> Result<Vec<String>, WorkerError> {
        match self.call(&WorkerRequest::Check, &[], &[], ASK_TIMEOUT)?.reply {
            WorkerReply::Checked { reasons } => Ok(reasons),
            _ => Err(WorkerError::Protocol("Check")),
        }
    }

    /// The memory that its client shares, or may be sharing: its own, and others'.
    pub(crate) fn shares(&self, deadline: Deadline) -> Result<(Vec<PieceId>, Vec<PieceId>), WorkerError> {
        match self.call(&WorkerRequest::Shares, &[], &[], deadline)?.reply {
            WorkerReply::Shares { own, others } => Ok((own, others)),
            _ => Err(WorkerError::Protocol("Shares")),
        }
    }

    /// The memory that a name of its client stands for, with descriptors. `Failed` where the name stands for nothing.
    pub(crate) fn export(&self, token: &Token) -> Result<(Shared, Vec<OwnedFd>), WorkerError> {
        let mut all: Option<(Shared, Vec<OwnedFd>)> = None;
        loop {
            let first = all.as_ref().map_or(0, |(shared, _)| shared.pieces.len());
            let request = WorkerRequest::Export { token: *token, first };
            let answered = self.call(&request, &[], &[], ASK_TIMEOUT)?;
            let WorkerReply::Exported { shared } = answered.reply else {
                return Err(WorkerError::Protocol("Export"));
            };
            // The worker belongs to its client, which may influence the worker's answers.
            let sound = shared.pieces.len() == answered.fds.len() && shared.count <= MAX_PIECES;
            let same = all.as_ref().is_none_or(|(known, _)| known.count == shared.count);
            if !sound || !same || (shared.pieces.is_empty() && first < shared.count) {
                return Err(WorkerError::Protocol("Export"));
            }
            let (known, fds) = all.get_or_insert_with(|| (Shared { pieces: Vec::new(), ..shared.clone() }, Vec::new()));
            known.pieces.extend(shared.pieces);
            fds.extend(answered.fds);
            if known.pieces.len() >= known.count {
                return all.ok_or(WorkerError::Protocol("Export"));
            }
        }
    }

    /// Descriptors of the memory that has the content of the worker's client, which is loaded: a template.
    pub(crate) fn export_template(&self, timeout: Timeout) -> Result<Pieces, WorkerError> {
        let mut all = Pieces::new();
        loop {
            let request = WorkerRequest::ExportTemplate { first: all.len() };
            let answered = self.call(&request, &[], &[], timeout)?;
            let WorkerReply::Template { count, pieces } = answered.reply else {
                return Err(WorkerError::Protocol("ExportTemplate"));
            };
            let ends = pieces.is_empty() && all.len() < count;
            if pieces.len() != answered.fds.len() || count > MOST_PIECES || ends {
                return Err(WorkerError::Protocol("ExportTemplate"));
            }
            all.extend(pieces.into_iter().zip(answered.fds));
            if all.len() >= count {
                return Ok(all);
            }
        }
    }

    /// Has the worker, whose client is loaded but for its device memory, copy content from a template.
    pub(crate) fn take_template(
        &self,
        template: &[(TemplatePiece, OwnedFd)],
        timeout: Timeout,
    ) -> Result<(), WorkerError> {
        template.chunks(MAX_FDS).try_for_each(|some| {
            let request = WorkerRequest::TakeTemplate { pieces: some.iter().map(|it| it.0).collect() };
            self.ask(&request, &sys::raw(some.iter().map(|it| &it.1)), timeout)
        })
    }

    /// Has the worker borrow memory from the template that it gets, or got, as these lessons say.
    pub(crate) fn borrow(&self, learned: &Learned, timeout: Timeout) -> Result<(), WorkerError> {
        let unreadable = |error: serde_json::Error| WorkerError::Failed(Failure::internal(error.to_string()));
        self.ask_with(&WorkerRequest::Borrow, &learned.to_bytes().map_err(unreadable)?, &[], timeout)
    }

    /// Has the worker make its shared memory before it loads this client. Returns that memory, and the memory it needs from
    /// others.
    pub(crate) fn make_shared(&self, blob: &[u8], timeout: Timeout) -> Result<MadeShared, WorkerError> {
        let mut all = Vec::new();
        let mut said = None;
        loop {
            let answered = self.call(&WorkerRequest::MakeShared { first: all.len() }, blob, &[], timeout)?;
            let WorkerReply::MadeShared { count, ids, needed } = answered.reply else {
                return Err(WorkerError::Protocol("MakeShared"));
            };
            // The worker reads an image, which may come from anywhere.
            let same = *said.get_or_insert(count) == count && count <= MOST_MADE;
            if !same || ids.len() != answered.fds.len() || (ids.is_empty() && all.len() < count) {
                return Err(WorkerError::Protocol("MakeShared"));
            }
            all.extend(ids.into_iter().zip(answered.fds));
            if all.len() >= count {
                return Ok((all, needed));
            }
        }
    }

    /// Gives its client memory, which the client asks for by this ticket.
    pub(crate) fn import(&self, ticket: u64, shared: &Shared, fds: &[OwnedFd]) -> Result<(), WorkerError> {
        let send = |pieces: &[SharedPiece], fds: &[OwnedFd]| {
            let part = Shared { pieces: pieces.to_vec(), ..shared.clone() };
            self.ask(&WorkerRequest::Import { ticket, shared: part }, &sys::raw(fds), ASK_TIMEOUT)
        };
        // A pool comes without memory.
        if shared.pieces.is_empty() {
            return send(&[], &[]);
        }
        let mut parts = shared.pieces.chunks(PIECES_AT_A_TIME).zip(fds.chunks(PIECES_AT_A_TIME));
        parts.try_for_each(|(pieces, fds)| send(pieces, fds))
    }

    /// Gives it a file that its client has mapped, and is about to register.
    pub(crate) fn registers(&self, pinned: Pinned, file: &File) -> Result<(), WorkerError> {
        self.ask(&WorkerRequest::Registers { pinned }, &[file.as_raw_fd()], ASK_TIMEOUT)
    }

    /// Whether it maps files that its client has mapped.
    pub(crate) fn registers_files(&self) -> bool {
        self.wire >= REGISTERS_FILES
    }

    /// The memory of its devices.
    pub(crate) fn memory(&self) -> Result<Vec<Memory>, WorkerError> {
        match self.call(&WorkerRequest::Memory, &[], &[], DESCRIBE_TIMEOUT)?.reply {
            WorkerReply::Memory { devices } => Ok(devices),
            _ => Err(WorkerError::Protocol("Memory")),
        }
    }

    /// Waits for the turn of a request. None when time is up.
    fn begin(&self, deadline: Option<Deadline>) -> Option<Result<Receiver<Answered>, WorkerError>> {
        let mut state = lock(&self.state);
        loop {
            match &*state {
                State::Idle => {
                    let (sender, receiver) = sync_channel(1);
                    *state = State::Waiting(sender);
                    return Some(Ok(receiver));
                }
                State::Dead(reason) => return Some(Err(WorkerError::Dead(reason.clone()))),
                State::Waiting(_) | State::Abandoned(_) => {}
            }
            state = match deadline {
                None => super::wait(&self.changed, state),
                Some(deadline) => {
                    let left = Some(deadline.left()).filter(|left| !left.is_zero())?;
                    super::wait_timeout(&self.changed, state, left)
                }
            };
        }
    }

    fn send(&self, request: &WorkerRequest, blob: &[u8], fds: &[RawFd]) -> Result<(), FrameError> {
        let _one_frame = lock(&self.sending);
        frame::send(&self.channel, request, blob, fds)
    }

    /// A frame that was sent in part leaves the channel unusable.
    fn fail_channel(&self, error: &FrameError) -> WorkerError {
        if let FrameError::TooLarge(_) | FrameError::Json(_) = error {
            self.take_back();
            return WorkerError::Failed(error.failure());
        }
        let _ = self.channel.shutdown(std::net::Shutdown::Both);
        WorkerError::Dead(error.to_string())
    }

    /// Nothing of the request that [`Worker::begin`] began was sent: the worker is idle again.
    fn take_back(&self) {
        let mut state = lock(&self.state);
        if matches!(*state, State::Waiting(_)) {
            *state = State::Idle;
            self.changed.notify_all();
        }
    }

    /// How the worker ended.
    pub(crate) fn death(&self) -> WorkerError {
        match &*lock(&self.state) {
            State::Dead(reason) => WorkerError::Dead(reason.clone()),
            _ => WorkerError::Dead("its channel closed".to_owned()),
        }
    }

    /// Hands out replies until the channel ends; returns why it ended.
    fn read_replies(&self) -> String {
        loop {
            let message = match frame::receive_known::<WorkerReply>(&self.channel, MAX_BLOB) {
                Ok(message) => message,
                Err(error) => break error.to_string(),
            };
            // A worker of a later release may say more than this daemon asks for.
            let body = message.body.unwrap_or_else(|error| {
                let reason = format!("its worker is of another release, and its answer is not understood: {error}");
                WorkerReply::Failed(Failure::new(FailureKind::Version, reason))
            });
            let message = Message { body, blob: message.blob, fds: message.fds };
            let need = match &message.body {
                WorkerReply::NeedsRoom => Some(Need::Room),
                WorkerReply::Needs { free, waited_ms } => {
                    let now = Instant::now();
                    let since = now.checked_sub(Duration::from_millis(*waited_ms)).unwrap_or(now);
                    Some(Need::Free { free: free.clone(), since })
                }
                _ => None,
            };
            if let Some(need) = need {
                let action = lock(&self.on_need).clone();
                action.inspect(|action| action(need));
                continue;
            }
            if let WorkerReply::LoadStep { step } = &message.body {
                let action = lock(&self.on_load_step).clone();
                action.inspect(|action| action(step));
                continue;
            }
            if let WorkerReply::Learned { fault } = &message.body {
                self.learned(&message.blob, fault.as_deref());
                continue;
            }
            let mut state = lock(&self.state);
            match std::mem::replace(&mut *state, State::Idle) {
                State::Waiting(sender) => {
                    // The receiver may have given up at this moment.
                    let _ = sender.try_send(Answered { reply: message.body, blob: message.blob, fds: message.fds });
                }
                State::Abandoned(Late::IsUsual) => {}
                State::Abandoned(Late::IsNews) => {
                    info!(worker = self.pid(), "a worker answered after its timeout");
                }
                State::Idle | State::Dead(_) => {
                    break "it spoke without being asked; use one version of Rekindle".to_owned();
                }
            }
            drop(state);
            self.changed.notify_all();
        }
    }

    /// The client's commands have taught something.
    fn learned(&self, blob: &[u8], fault: Option<&str>) {
        match Learned::from_bytes(blob) {
            Ok(learned) => {
                let action = lock(&self.on_learned).clone();
                action.inspect(|action| action(&learned, fault.is_some()));
            }
            Err(error) => warn!(worker = self.pid(), %error, "what a worker has learned is not readable"),
        }
        if let Some(why) = fault {
            let action = lock(&self.on_fault).clone();
            action.inspect(|action| action(why));
        }
    }

    /// Waits for the process whose channel has closed, and ends it if it does not end by itself.
    fn reap(&self, child: Option<(Child, Option<UidClaim>)>, reason: String) {
        let (mut child, _user) = child.unzip();
        let ends_within = |time| {
            let ended = sys::wait_readable([self.pidfd.as_fd()], Some(time));
            matches!(ended, Ok([true]))
        };
        let status = |child: &mut Option<Child>| match child.as_mut().map(Child::wait) {
            Some(Ok(status)) => status.to_string(),
            _ => reason.clone(),
        };
        if ends_within(STATUS_GRACE) {
            self.died(status(&mut child));
            return;
        }
        // Releasing a GPU's memory takes seconds. No thread is to wait for that.
        self.died(reason.clone());
        if !ends_within(END_GRACE) {
            warn!(worker = self.pid(), "a worker did not end; killing it");
            self.kill();
        }
        let status = status(&mut child);
        debug!(worker = self.pid(), status, "a worker has ended");
    }

    fn died(&self, reason: String) {
        // Replacing the state drops the sender that a caller waits on.
        *lock(&self.state) = State::Dead(reason);
        self.changed.notify_all();
        let action = lock(&self.on_death).clone();
        if let Some(action) = action {
            action();
        }
    }
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("pid", &self.pid()).finish()
    }
}

fn name(request: &WorkerRequest) -> &'static str {
    match request {
        WorkerRequest::Adopt { .. } => "Adopt",
        WorkerRequest::Quiesce { .. } => "Quiesce",
        WorkerRequest::Advance { .. } => "Advance",
        WorkerRequest::Open => "Open",
        WorkerRequest::Save { .. } => "Save",
        WorkerRequest::Reserve { .. } => "Reserve",
        WorkerRequest::Stage { .. } => "Stage",
        WorkerRequest::Pace { .. } => "Pace",
        WorkerRequest::Calm { .. } => "Calm",
        WorkerRequest::Precopy { .. } => "Precopy",
        WorkerRequest::Progress => "Progress",
        WorkerRequest::SaveCode { .. } => "SaveCode",
        WorkerRequest::Cancel => "Cancel",
        WorkerRequest::Code { .. } => "Code",
        WorkerRequest::Data { .. } => "Data",
        WorkerRequest::JoinContainer { .. } => "JoinContainer",
        WorkerRequest::Load { .. } => "Load",
        WorkerRequest::LoadProgress => "LoadProgress",
        WorkerRequest::Pinned { .. } => "Pinned",
        WorkerRequest::Userfault => "Userfault",
        WorkerRequest::Connect { .. } => "Connect",
        WorkerRequest::Comes { .. } => "Comes",
        WorkerRequest::Ahead { .. } => "Ahead",
        WorkerRequest::Describe => "Describe",
        WorkerRequest::Suspend { .. } => "Suspend",
        WorkerRequest::Kept => "Kept",
        WorkerRequest::HandOver => "HandOver",
        WorkerRequest::BringBack => "BringBack",
        WorkerRequest::ConfirmQuiesced => "ConfirmQuiesced",
        WorkerRequest::Alive => "Alive",
        WorkerRequest::GiveWay => "GiveWay",
        WorkerRequest::Room { .. } => "Room",
        WorkerRequest::Calls => "Calls",
        WorkerRequest::Moment { .. } => "Moment",
        WorkerRequest::Remember { .. } => "Remember",
        WorkerRequest::Access => "Access",
        WorkerRequest::Check => "Check",
        WorkerRequest::Memory => "Memory",
        WorkerRequest::Export { .. } => "Export",
        WorkerRequest::Import { .. } => "Import",
        WorkerRequest::Registers { .. } => "Registers",
        WorkerRequest::Shares => "Shares",
        WorkerRequest::MakeShared { .. } => "MakeShared",
        WorkerRequest::TakeShared { .. } => "TakeShared",
        WorkerRequest::Borrow => "Borrow",
        WorkerRequest::ExportTemplate { .. } => "ExportTemplate",
        WorkerRequest::TakeTemplate { .. } => "TakeTemplate",
        WorkerRequest::CopyTemplate => "CopyTemplate",
        WorkerRequest::LoadCode => "LoadCode",
    }
}
