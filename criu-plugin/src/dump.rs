//! A dump.
//!
//! ```text
//!                  PAUSE_DEVICES(root)
//!   Idle ──┬── no daemon ──────────────> Inactive     foreign dumps go on; ours fail at CRIU's "External socket"
//!          ├── no clients in the tree ─> Foreign ──── one of its sockets leads to the daemon ───> Saving
//!          ├── cannot quiesce ─────────> Failed       CRIU gives up, the processes go on
//!          └── quiesced ───────────────> Saving ──┬── exit(0): [resume the tasks] Finish ──┬── durable ──> Finished
//!                                                 │                                        └── failed ───> CRIU ends here,
//!                                                 └── exit(error): the connection closes                    the tasks run
//! ```
//!
//! With `--leave-running` the tasks run again before the image is durable, and CRIU returns only afterwards. When the
//! image fails, the tasks run on in every case, and CRIU says so: by the end of its process, since a plugin's `exit` has
//! no say in CRIU's result any more.

use std::mem::{self, ManuallyDrop};
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::net::UnixStream;

use rekindle_wire::control::{LEAVES_PAGES, Reply, Request, TRACEPARENT};
use rekindle_wire::userfault;
use thiserror::Error;

use crate::alarm::SuspendedAlarm;
use crate::answer::{Answer, Exit};
use crate::daemon::{self, Daemon, DaemonError};
use crate::host::{self, Control, Fate, HostError};
use crate::managed::{self, UserfaultError};
use crate::natives::{NativeError, Natives};
use crate::socket::{self, SocketError};
use crate::{competition, log, numbers};

/// An error of a hook, which fails the dump.
#[derive(Debug, Error)]
pub enum DumpError {
    /// The request to the daemon failed.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// CRIU lacks something.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A process that the driver checkpoints is not checkpointed.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// A process has a userfaultfd that cannot be dumped.
    #[error(transparent)]
    Userfault(#[from] UserfaultError),
    /// A socket of the application cannot be examined.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The answer to a process's handshake is in a socket's queue, which CRIU does not dump.
    #[error("a process was just about to attach to its worker: dump it again")]
    Attaching,
}

/// The plugin leaves a dump alone.
#[derive(Debug, Error)]
pub enum Inactive {
    /// CRIU lacks a hook.
    #[error("this CRIU is older than 4.0 and has no PAUSE_DEVICES hook: it cannot dump GPU processes")]
    OldCriu,
    /// CRIU does not tell where the image is to be.
    #[error("CRIU has no image directory")]
    NoImageDirectory,
    /// The daemon does not answer.
    #[error(transparent)]
    Daemon(DaemonError),
}

/// The state of a dump.
#[derive(Debug, Default)]
pub enum Dump {
    /// CRIU has not asked yet.
    #[default]
    Idle,
    /// The plugin cannot ask a daemon.
    Inactive(Inactive),
    /// No process of the tree is a client. But a process may be frozen during a question to the daemon; its connection then
    /// belongs to the dump.
    Foreign(Option<Saving>),
    /// There are clients, but they cannot be dumped.
    Failed,
    /// The clients are quiesced.
    Saving(Saving),
    /// The image is durable. The connection stays open until CRIU ends: only then is the tasks' fate certain, since a script
    /// may have kept them from being killed.
    Finished(Daemon),
}

/// A dump that includes clients.
#[derive(Debug)]
pub struct Saving {
    daemon: Daemon,
    control: Control,
    fate: Fate,
    pids: Vec<i32>,
    /// The processes that the driver checkpoints, until they are given back.
    natives: Natives,
    /// Whether tasks that go on stay stopped until the image is durable, and then are the daemon's to let go on.
    still: bool,
    /// Whether the daemon has accepted the connections that the tasks had begun when they were frozen.
    accepted: bool,
    /// The number of userfaultfds that CRIU has asked about.
    userfaults: usize,
}

impl Dump {
    /// init(DUMP).
    pub fn begin() -> Self {
        if numbers::can_dump() {
            if daemon::are_natives(&daemon::socket_path()) {
                host::stop_one_by_one();
            }
            return Self::Idle;
        }
        log::info(&Inactive::OldCriu.to_string());
        Self::Inactive(Inactive::OldCriu)
    }

    /// PAUSE_DEVICES: CRIU calls first for the root, while all tasks run, then for its children one by one as it freezes them.
    /// The first call pauses all.
    pub fn pause(&mut self, pid: i32) -> Result<Answer, DumpError> {
        if let Self::Idle = self {
            // After a failure below, the plugin asks the daemon nothing more.
            *self = Self::Failed;
            *self = pause_tree(pid)?;
        }
        match self {
            Self::Saving(saving) if saving.pids.contains(&pid) || saving.natives.has(pid) => Ok(Answer::Done),
            _ => Ok(Answer::NotOurs),
        }
    }

    /// CHECKPOINT_DEVICES: the task is stopped.
    pub fn frozen(&mut self, pid: i32) -> Result<Answer, DumpError> {
        let first = match self {
            Self::Saving(saving) | Self::Foreign(Some(saving)) => saving.accept_all(),
            _ => false,
        };
        if let (true, Self::Foreign(Some(saving))) = (first, &*self) {
            // CRIU is about to overwrite its files, which may belong to an older image.
            saving.tell(&Request::Frozen { pid })?;
        }
        let Self::Saving(saving) = self else {
            return Ok(Answer::NotOurs);
        };
        let ours = match saving.ask(&Request::Frozen { pid })? {
            Reply::Frozen { ours } => ours,
            other => return Err(daemon::unexpected(other).into()),
        };
        if ours {
            managed::count(&[pid])?;
        }
        saving.natives.checkpoint(&saving.daemon, pid)?;
        Ok(Answer::ours(ours || saving.natives.has(pid)))
    }

    /// DUMP_UNIX_SK: a socket of a task leads outside the tree.
    pub fn socket(&mut self, fd: RawFd, id: u32) -> Result<Answer, DumpError> {
        match self {
            Self::Saving(saving) => saving.socket(fd, id),
            Self::Foreign(foreign) => {
                // An error must not fail the dump of a tree without clients.
                let asked = foreign.as_ref().map(|it| it.socket(fd, id));
                if !matches!(asked, Some(Ok(Answer::Done))) {
                    return Ok(Answer::NotOurs);
                }
                let Some(saving) = foreign.take() else { return Ok(Answer::NotOurs) };
                *self = Self::Saving(saving);
                log::info("a process asks the daemon something, and will ask again when it is restored");
                host::add_to_inventory(crate::NAME)?;
                Ok(Answer::Done)
            }
            _ => {
                self.explain(fd);
                Ok(Answer::NotOurs)
            }
        }
    }

    /// DUMP_EXT_FILE: a descriptor that CRIU does not know. Descriptors of one file come once.
    pub fn external_file(&mut self, fd: RawFd) -> Result<Answer, DumpError> {
        let Self::Saving(saving) = self else { return Ok(Answer::NotOurs) };
        if !userfault::is_one(fd) {
            return Ok(Answer::NotOurs);
        }
        saving.userfaults += 1;
        if saving.userfaults > managed::count(&saving.pids)? {
            return Err(UserfaultError::Foreign.into());
        }
        Ok(Answer::Done)
    }

    /// exit(DUMP): CRIU has written all of its image, or given up.
    pub fn exit(&mut self, status: i32) -> Exit {
        let saving = match mem::take(self) {
            Self::Saving(saving) if status == 0 => saving,
            Self::Foreign(Some(saving)) if status == 0 => {
                // The image of a dump before this one has lost CRIU's files.
                let Err(error) = saving.tell(&Request::Finish) else { return Exit::Return };
                run_on(&saving.control, saving.fate);
                log::error(&format!("the dump has failed: {error}; the processes go on"));
                return Exit::Process;
            }
            Self::Saving(mut saving) => {
                // CRIU lets the tasks run on. An error was logged.
                let _ = saving.natives.give_back(&saving.daemon);
                // It has rolled back, unless its server of pages has failed afterwards. To do it twice does no harm.
                if saving.fate != Fate::Alive && std::env::var_os(LEAVES_PAGES).is_some() {
                    host::roll_back();
                }
                return Exit::Return;
            }
            _ => return Exit::Return,
        };
        match saving.finish() {
            Ok(finished) => {
                *self = Self::Finished(finished);
                Exit::Return
            }
            Err(error) => {
                log::error(&format!("the dump has failed: {error}; the processes go on"));
                Exit::Process
            }
        }
    }

    /// Lets the tasks run after a panic in the hook above, even if CRIU was to leave them stopped or to kill them.
    pub fn abandon() -> Exit {
        if let Ok(control) = Control::find() {
            run_on(&control, control.fate().unwrap_or(Fate::Dead));
        }
        Exit::Process
    }

    /// Says why the plugin does not take a socket that leads to the daemon; CRIU is about to report an error for it.
    fn explain(&self, fd: RawFd) {
        let why = match self {
            Self::Inactive(why) => why.to_string(),
            // CRIU has not asked this plugin at PAUSE_DEVICES.
            Self::Idle => match competition::explanation() {
                Some(why) => why,
                None => return,
            },
            _ => return,
        };
        // SAFETY: CRIU's descriptor, open for the time of the hook and not closed by us.
        let socket = ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(fd) });
        let peer = socket.peer_addr().ok();
        if peer.and_then(|peer| peer.as_pathname().map(|path| path == daemon::socket_path())) == Some(true) {
            log::error(&format!("a process of this tree uses a GPU, but {why}"));
        }
    }
}

fn pause_tree(root: i32) -> Result<Dump, DumpError> {
    let _alarm = SuspendedAlarm::new();
    let path = daemon::socket_path();
    if let Err(error) = daemon::probe(&path) {
        return Ok(inactive(error));
    }
    let Some(image_dir) = host::image_dir() else {
        return Ok(Dump::Inactive(Inactive::NoImageDirectory));
    };
    // A CRIU without these symbols matters only if there are GPU processes to dump.
    let control = Control::find().and_then(|control| Ok((control.fate()?, control)));
    let leave_running = matches!(&control, Ok((fate, _)) if *fate != Fate::Dead);
    let traceparent = std::env::var(TRACEPARENT).ok().and_then(|it| it.parse().ok());
    let pause = Request::Pause { root, leave_running, traceparent };
    let (daemon, reply) = match Daemon::session(&path, &pause, image_dir) {
        Ok(session) => session,
        Err(error @ DaemonError::Refused(_)) => return Err(error.into()),
        // The daemon died after the probe. CRIU fails the dump by itself if the tree has clients.
        Err(error) => return Ok(inactive(error)),
    };
    let (pids, natives, still) = match reply {
        Reply::Paused { pids } if pids.is_empty() => {
            let (natives, still, accepted, userfaults) = (Natives::default(), false, false, 0);
            let saving = control.map(|(fate, control)| Saving {
                daemon,
                control,
                fate,
                pids,
                natives,
                still,
                accepted,
                userfaults,
            });
            return Ok(Dump::Foreign(saving.ok()));
        }
        Reply::Paused { pids } => (pids, Natives::default(), false),
        Reply::PausedNatives { pids, natives } => (pids, Natives::new(natives), false),
        Reply::PausedStill { pids } => (pids, Natives::default(), true),
        other => return Err(daemon::unexpected(other).into()),
    };
    log::info(&format!("GPU processes {pids:?} are quiesced"));
    if !natives.is_empty() {
        log::info(&format!(
            "processes {:?} use the driver by themselves, and are locked: the driver checkpoints them",
            natives.pids()
        ));
    }
    let (fate, control) = control?;
    host::add_to_inventory(crate::NAME)?;
    if !natives.is_empty() {
        host::add_to_inventory(crate::NAME_OF_NATIVES)?;
    }
    Ok(Dump::Saving(Saving { daemon, control, fate, pids, natives, still, accepted: false, userfaults: 0 }))
}

fn inactive(error: DaemonError) -> Dump {
    match error {
        // The message is for information only, as on every host whose daemon is not running.
        DaemonError::Unreachable { .. } => log::info(&error.to_string()),
        _ => log::warn(&error.to_string()),
    }
    Dump::Inactive(Inactive::Daemon(error))
}

impl Saving {
    fn ask(&self, request: &Request) -> Result<Reply, DaemonError> {
        self.daemon.ask(request)
    }

    /// Tells the daemon how far CRIU is with a tree without clients, and waits if the dump is made at one moment with others. Only
    /// if one of these has failed may this dump fail: no other error of the daemon's matters to a tree without clients.
    fn tell(&self, request: &Request) -> Result<(), DaemonError> {
        match self.ask(request) {
            Err(error @ DaemonError::Refused(_)) => Err(error),
            Err(error) => {
                log::info(&error.to_string());
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Makes sure that the daemon has accepted all connections of the stopped tasks: CRIU fails at a connection that carries
    /// data and is not accepted yet. The daemon accepts in order, so a probe suffices. Returns whether this is the first time.
    fn accept_all(&mut self) -> bool {
        let first = !mem::replace(&mut self.accepted, true);
        if first && let Err(error) = daemon::probe(&daemon::socket_path()) {
            // The next request reports the error.
            log::info(&error.to_string());
        }
        first
    }

    /// Whether a socket leads to the daemon or to a worker.
    fn socket(&self, fd: RawFd, id: u32) -> Result<Answer, DumpError> {
        let cookie = socket::cookie(fd)?;
        let mut unread = false;
        loop {
            match self.ask(&Request::Socket { id, cookie })? {
                // CRIU does not dump the queue of a socket, and the queue has the reply to the process's handshake; or the
                // process has read the answer to a question since the daemon replied.
                Reply::Socket { ours: true, again: false } if socket::has_unread(fd)? => {
                    if mem::replace(&mut unread, true) {
                        return Err(DumpError::Attaching);
                    }
                }
                Reply::Socket { ours, .. } => return Ok(Answer::ours(ours)),
                other => return Err(daemon::unexpected(other).into()),
            }
        }
    }

    /// Returns when the image is durable. After a failure, the tasks run.
    fn finish(mut self) -> Result<Daemon, NativeError> {
        // CRIU's part of the image has the GPU memory of native processes by now.
        let mut given_back = Ok(());
        if self.fate != Fate::Dead {
            given_back = self.natives.give_back(&self.daemon);
        }
        if self.fate == Fate::Alive && !self.still {
            self.control.resume_tasks();
            log::info("the processes run again");
        }
        let error = match self.ask(&Request::Finish) {
            Ok(Reply::Durable) => {
                log::info("the image of the GPU's state is complete");
                return given_back.map(|()| self.daemon);
            }
            Ok(other) => daemon::unexpected(other),
            Err(error) => error,
        };
        // An error was logged.
        let _ = self.natives.give_back(&self.daemon);
        run_on(&self.control, self.fate);
        Err(error.into())
    }
}

/// Lets the tasks run after a failure that CRIU does not know about.
fn run_on(control: &Control, fate: Fate) {
    // With `--leave-running` CRIU has rolled back itself, before `exit`.
    if fate != Fate::Alive {
        host::roll_back();
    }
    control.resume_tasks();
}
