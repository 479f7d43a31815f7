//! Loading GPU memory at the host that the processes go to, while they run at the other.
//!
//! The daemon has the memory of one round on the GPU. When it restores the last image, workers copy there what has not changed since. A
//! round that comes while the one before is still being loaded waits, and gives way to the next. What goes wrong is no failure of the
//! migration: the restore loads all then.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use rekindle_wire::control::Request;

use crate::daemon::Session;

/// Loads rounds in a thread of its own.
pub(super) struct Preloads {
    rounds: Sender<PathBuf>,
    thread: JoinHandle<Option<Session>>,
}

/// What is loaded for a restore, until this is dropped.
pub(super) struct Preloaded(
    #[expect(dead_code, reason = "the daemon keeps the memory as long as this is open")] Option<Session>,
);

impl Preloads {
    /// None if there can be no thread.
    pub(super) fn start(socket: &Path) -> Option<Self> {
        let (rounds, wanted) = mpsc::channel();
        let socket = socket.to_owned();
        let thread =
            std::thread::Builder::new().name("preload".to_owned()).spawn(move || load(&socket, &wanted)).ok()?;
        Some(Self { rounds, thread })
    }

    /// A round has come, whose image is in this directory.
    pub(super) fn round(&self, dir: PathBuf) {
        // A thread that has ended takes no more.
        let _ = self.rounds.send(dir);
    }

    /// No more rounds come. Waits until what is being loaded is there.
    pub(super) fn end(self) -> Preloaded {
        // The thread finds the end of the rounds before those that wait.
        let _ = self.rounds.send(PathBuf::new());
        Preloaded(self.thread.join().ok().flatten())
    }
}

/// Loads the newest round, again and again, until no more come.
fn load(socket: &Path, rounds: &Receiver<PathBuf>) -> Option<Session> {
    let mut session: Option<Session> = None;
    while let Ok(first) = rounds.recv() {
        let newest = rounds.try_iter().last().unwrap_or(first);
        if newest.as_os_str().is_empty() {
            break;
        }
        let Ok(opened) = File::open(&newest) else { continue };
        let fd = opened.as_raw_fd();
        // The daemon's log has the reason of a failure. An earlier round stays loaded then, as long as the connection is open.
        match &session {
            Some(session) => drop(session.ask_with(&Request::Preload, fd)),
            None => session = Session::open_long(socket, &Request::Preload, fd).ok().map(|(session, _)| session),
        }
    }
    session
}
