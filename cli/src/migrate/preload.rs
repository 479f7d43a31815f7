//! Loading GPU memory at the host that the processes go to, while they run at the other.
//!
//! The daemon has the memory of one round on the GPU. When it restores the last image, workers copy there what it has already. A round
//! that comes while the one before is still being loaded waits, and gives way to the next. What goes wrong is no failure of the migration:
//! the restore loads all then.

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rekindle_wire::control::Request;

use crate::daemon::Session;

/// How long the restore waits for a load that is under way. The processes stand still by then.
const PATIENCE: Duration = Duration::from_secs(2);

/// Loads rounds in a thread of its own.
pub(super) struct Preloads {
    /// The directories of rounds, and then nothing: no more come.
    rounds: Sender<Option<PathBuf>>,
    ended: Receiver<Option<Session>>,
    connection: Connection,
}

/// The connection to the daemon, which is closed if nobody waits any more.
type Connection = Arc<Mutex<Option<UnixStream>>>;

/// What is loaded for a restore, until this is dropped.
pub(super) struct Preloaded {
    _session: Option<Session>,
}

impl Preloads {
    /// None if there can be no thread.
    pub(super) fn start(socket: &Path) -> Option<Self> {
        let ((rounds, wanted), (over, ended)) = (mpsc::channel(), mpsc::channel());
        let (socket, connection) = (socket.to_owned(), Connection::default());
        let of_thread = Arc::clone(&connection);
        let work = move || {
            // Nobody may wait any more.
            let _ = over.send(load(&socket, &wanted, &of_thread));
        };
        std::thread::Builder::new().name("preload".to_owned()).spawn(work).ok()?;
        Some(Self { rounds, ended, connection })
    }

    /// A round has come, whose image is in this directory.
    pub(super) fn round(&self, dir: PathBuf) {
        // A thread that has ended takes no more.
        let _ = self.rounds.send(Some(dir));
    }

    /// No more rounds come. Waits for what is being loaded, but not for long: then it is given up.
    pub(super) fn end(self) -> Preloaded {
        // The thread finds the end of the rounds before those that wait.
        let _ = self.rounds.send(None);
        let session = self.ended.recv_timeout(PATIENCE).unwrap_or_default();
        if session.is_none()
            && let Some(stream) = &*self.connection.lock().unwrap_or_else(PoisonError::into_inner)
        {
            let _ = stream.shutdown(Shutdown::Both);
        }
        Preloaded { _session: session }
    }
}

/// Loads the newest round, again and again, until no more come.
fn load(socket: &Path, rounds: &Receiver<Option<PathBuf>>, connection: &Connection) -> Option<Session> {
    let mut session: Option<Session> = None;
    while let Ok(first) = rounds.recv() {
        let Some(newest) = rounds.try_iter().last().unwrap_or(first) else { break };
        let Ok(opened) = File::open(&newest) else { continue };
        let fd = opened.as_raw_fd();
        // The daemon's log has the reason of a refusal. An earlier round stays loaded then, as long as the connection is open.
        session = match session {
            Some(session) => session.ask_with(&Request::Preload, fd).is_ok().then_some(session),
            None => Session::begin(socket, &Request::Preload, fd).ok().and_then(|session| {
                *connection.lock().unwrap_or_else(PoisonError::into_inner) = session.stream().try_clone().ok();
                session.hear().is_ok().then_some(session)
            }),
        };
    }
    session
}
