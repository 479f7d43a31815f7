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

use rekindle_wire::control::{Reply, Request};

use crate::alarm::AlarmHeld;
use crate::answer::{Answer, Exit};
use crate::daemon::{self, Daemon, DaemonError};
use crate::host::{self, Control, Fate};
use crate::{log, numbers};

/// Where a dump stands.
#[derive(Debug, Default)]
pub enum Dump {
    /// CRIU has not asked yet.
    #[default]
    Idle,
    /// There is nobody to ask, and why.
    Inactive(String),
    /// None of the tree's processes is a client. One may be frozen in the middle of a question to the daemon: then there is
    /// something of ours in it.
    Foreign(Option<Saving>),
    /// There are clients, but the dump cannot be.
    Failed,
    /// The clients are quiesced.
    Saving(Saving),
    /// The image is durable. The connection stays open until CRIU ends: only then is it certain what became of the
    /// tasks, which a script may have kept from being killed.
    Finished(Daemon),
}

/// A dump that has clients of ours in it.
#[derive(Debug)]
pub struct Saving {
    daemon: Daemon,
    control: Control,
    fate: Fate,
    pids: Vec<i32>,
    /// Whether the daemon has accepted what the tasks had connected when they were frozen.
    accepted: bool,
}

impl Dump {
    /// init(DUMP).
    pub fn begin() -> Self {
        if numbers::can_dump() {
            return Self::Idle;
        }
        let why = "this CRIU is older than 4.0 and has no PAUSE_DEVICES hook: it cannot dump GPU processes";
        log::info(why);
        Self::Inactive(why.into())
    }

    /// PAUSE_DEVICES: first for the root, while all tasks run, then for its children one by one as CRIU freezes them.
    /// The first call does it for all.
    pub fn pause(&mut self, pid: i32) -> Result<Answer, String> {
        if let Self::Idle = self {
            // Whatever fails below, there is nothing more to ask.
            *self = Self::Failed;
            *self = pause_tree(pid)?;
        }
        match self {
            Self::Saving(saving) if saving.pids.contains(&pid) => Ok(Answer::Done),
            _ => Ok(Answer::NotOurs),
        }
    }

    /// CHECKPOINT_DEVICES: the task is stopped.
    pub fn frozen(&mut self, pid: i32) -> Result<Answer, String> {
        let first = match self {
            Self::Saving(saving) | Self::Foreign(Some(saving)) => saving.accept_all(),
            _ => false,
        };
        if let (true, Self::Foreign(Some(saving))) = (first, &*self) {
            // CRIU is about to overwrite its files, which may belong with an older image.
            saving.tell(&Request::Frozen { pid });
        }
        let Self::Saving(saving) = self else {
            return Ok(Answer::NotOurs);
        };
        match saving.ask(&Request::Frozen { pid })? {
            Reply::Frozen { ours } => Ok(Answer::ours(ours)),
            other => Err(daemon::out_of_turn(other)),
        }
    }

    /// DUMP_UNIX_SK: a socket of a task leads outside the tree.
    pub fn socket(&mut self, fd: RawFd, id: u32) -> Result<Answer, String> {
        match self {
            Self::Saving(saving) => saving.socket(fd, id),
            Self::Foreign(foreign) => {
                // Of a tree that is not ours nothing fails.
                let asked = foreign.as_ref().map(|it| it.socket(fd, id));
                if !matches!(asked, Some(Ok(Answer::Done))) {
                    return Ok(Answer::NotOurs);
                }
                let Some(saving) = foreign.take() else { return Ok(Answer::NotOurs) };
                *self = Self::Saving(saving);
                log::info("a process asks the daemon something, and will ask again when it is restored");
                host::add_to_inventory()?;
                Ok(Answer::Done)
            }
            _ => {
                self.explain(fd);
                Ok(Answer::NotOurs)
            }
        }
    }

    /// exit(DUMP): CRIU has written all of its image, or given up.
    pub fn exit(&mut self, status: i32) -> Exit {
        let saving = match mem::take(self) {
            Self::Saving(saving) if status == 0 => saving,
            Self::Foreign(Some(saving)) if status == 0 => {
                // An image of a dump before this one has lost the rest of its files.
                saving.tell(&Request::Finish);
                return Exit::Return;
            }
            _ => return Exit::Return,
        };
        match saving.finish() {
            Ok(finished) => {
                *self = Self::Finished(finished);
                Exit::Return
            }
            Err(reason) => {
                log::error(&format!("the dump has failed: {reason}; the processes go on"));
                Exit::Process
            }
        }
    }

    /// The hook above panicked: the tasks run, whatever state they were to be in.
    pub fn abandon() -> Exit {
        if let Ok(control) = Control::find() {
            run_on(&control, control.fate().unwrap_or(Fate::Dead));
        }
        Exit::Process
    }

    /// CRIU is about to complain of a socket. If it leads to the daemon, say why we do not take it.
    fn explain(&self, fd: RawFd) {
        let Self::Inactive(why) = self else {
            return;
        };
        // SAFETY: CRIU's descriptor, open for the time of the hook and not closed by us.
        let socket = ManuallyDrop::new(unsafe { UnixStream::from_raw_fd(fd) });
        let peer = socket.peer_addr().ok();
        if peer.and_then(|peer| peer.as_pathname().map(|path| path == daemon::socket_path())) == Some(true) {
            log::error(&format!("a process of this tree uses a GPU, but {why}"));
        }
    }
}

fn pause_tree(root: i32) -> Result<Dump, String> {
    let _alarm = AlarmHeld::new();
    let path = daemon::socket_path();
    if let Err(error) = daemon::probe(&path) {
        return Ok(inactive(error));
    }
    let Some(image_dir) = host::image_dir() else {
        return Ok(Dump::Inactive("CRIU has no image directory".into()));
    };
    // An odd CRIU matters only if there is something of ours to dump.
    let control = Control::find().and_then(|control| Ok((control.fate()?, control)));
    let leave_running = matches!(&control, Ok((fate, _)) if *fate != Fate::Dead);
    let pause = Request::Pause { root, leave_running };
    let (daemon, reply) = match Daemon::session(&path, &pause, image_dir) {
        Ok(session) => session,
        Err(DaemonError::Refused(failure)) => return Err(failure.reason),
        // It died just now. Whether the tree was ours, CRIU will find out.
        Err(error) => return Ok(inactive(error)),
    };
    let pids = match reply {
        Reply::Paused { pids } if pids.is_empty() => {
            let saving = control.map(|(fate, control)| Saving { daemon, control, fate, pids, accepted: false });
            return Ok(Dump::Foreign(saving.ok()));
        }
        Reply::Paused { pids } => pids,
        other => return Err(daemon::out_of_turn(other)),
    };
    log::info(&format!("GPU processes {pids:?} are quiesced"));
    let (fate, control) = control?;
    host::add_to_inventory()?;
    Ok(Dump::Saving(Saving { daemon, control, fate, pids, accepted: false }))
}

fn inactive(error: DaemonError) -> Dump {
    match error {
        // As on every host whose daemon is not running.
        DaemonError::Unreachable { .. } => log::info(&error.to_string()),
        _ => log::warn(&error.to_string()),
    }
    Dump::Inactive(error.to_string())
}

impl Saving {
    fn ask(&self, request: &Request) -> Result<Reply, String> {
        self.daemon.ask(request).map_err(|error| error.to_string())
    }

    /// Says how far CRIU is with a tree that is not ours: nothing of it fails.
    fn tell(&self, request: &Request) {
        if let Err(reason) = self.ask(request) {
            log::info(&reason);
        }
    }

    /// CRIU fails at a connection that was begun and is not accepted yet when something has been sent on it. All tasks are
    /// stopped, and the daemon accepts in the order in which is connected. Whether this is the first time.
    fn accept_all(&mut self) -> bool {
        let first = !mem::replace(&mut self.accepted, true);
        if first && let Err(error) = daemon::probe(&daemon::socket_path()) {
            // What is asked of it next says more.
            log::info(&error.to_string());
        }
        first
    }

    /// Whether a socket is one of ours.
    fn socket(&self, fd: RawFd, id: u32) -> Result<Answer, String> {
        let cookie = daemon::cookie(fd)?;
        let mut unread = false;
        loop {
            match self.ask(&Request::Socket { id, cookie })? {
                // What is queued on a socket is not dumped, and this would be the answer to the process's handshake; or to
                // a question that was read only since the daemon said what it knows.
                Reply::Socket { ours: true, again: false } if daemon::has_unread(fd)? => {
                    if mem::replace(&mut unread, true) {
                        return Err("a process was just about to attach to its worker: dump it again".into());
                    }
                }
                Reply::Socket { ours, .. } => return Ok(Answer::ours(ours)),
                other => return Err(daemon::out_of_turn(other)),
            }
        }
    }

    /// Returns when the image is durable; if it will not be, with the tasks running.
    fn finish(self) -> Result<Daemon, String> {
        if self.fate == Fate::Alive {
            self.control.resume_tasks();
            log::info("the processes run again");
        }
        let reason = match self.ask(&Request::Finish) {
            Ok(Reply::Durable) => {
                log::info("the image of the GPU's state is complete");
                return Ok(self.daemon);
            }
            Ok(other) => daemon::out_of_turn(other),
            Err(reason) => reason,
        };
        run_on(&self.control, self.fate);
        Err(reason)
    }
}

/// Lets the tasks run after a failure that CRIU does not know of.
fn run_on(control: &Control, fate: Fate) {
    // With `--leave-running` CRIU has rolled back itself, before `exit`.
    if fate != Fate::Alive {
        host::roll_back();
    }
    control.resume_tasks();
}
