//! A restore: CRIU's plugin says how far CRIU is, on one connection.
//!
//! ```text
//!            Restore                          Resume(pid) …             Resume(last pid)
//!  opened ───────────► prepared ──────────────────────────► connected ──────────────────► open
//!            │  │        workers load; each Reattach,          process by process          the session's
//!            │  │        on a connection of its own,           (its memory, its socket)    end is of no
//!            │  │        leaves a socket                                                   consequence
//!            │  └─► not ours                │                         │
//!            ▼                              ▼                         ▼
//!          failed ◄────── whatever goes wrong, or the connection closes: workers are killed,
//!                         and what CRIU has made of the processes, in case it is not there to do so
//! ```
//!
//! Everything that can be checked is checked before `Prepared`, since nothing of the processes exists yet: a failure is
//! a line and an exit status. Loading goes on while CRIU rebuilds the processes; what fails in it is told at the next
//! `Resume`, and the plugin kills what there is by then.

mod check;
mod connect;
mod error;
mod load;
mod made;
mod place;
mod shared;
mod state;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rekindle_images::{ErrorKind, Image, ImageDir};
use rekindle_wire::control::{Allowances, Failing, Failure, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use tracing::{debug, info, warn};

use self::error::RestoreError;
use self::made::Maker;
use self::state::Restore;
pub(super) use self::state::Restores;
use super::clients::Reservation;
use super::message::{self, MAX_REQUEST};
use super::pidns::PidView;
use super::process::Process;
use super::sys::Credentials;
use super::{Daemon, sys};
enum Stage {
    NotOurs,
    Restoring(Prepared),
    Open,
    Failed(Failure),
}

/// A restore whose rings are not open. Its workers and processes are killed when it is dropped.
struct Prepared {
    daemon: Arc<Daemon>,
    restore: Arc<Restore>,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.daemon.restores.remove(&self.restore);
        self.restore.give_up_unless_open();
    }
}

/// How often it is looked whether the processes that CRIU makes live, and how often in a row none must be found.
const LOOK: Duration = Duration::from_millis(200);
const LOOKS: u32 = 5;

impl Stage {
    /// Waits until something is said, or CRIU is gone. CRIU does not notice when a process dies while one of its scripts runs, and waits for
    /// it for ever, so that nothing would be said of it any more.
    fn wait(&self, stream: &UnixStream) -> Result<(), RestoreError> {
        let Self::Restoring(prepared) = self else { return Ok(()) };
        let restore = &prepared.restore;
        let mut in_vain = 0;
        while !sys::wait_readable([stream.as_fd()], Some(LOOK))?[0] {
            if restore.maker().is_orphaned() {
                return Err(RestoreError::Orphaned);
            }
            if let Some(name) = restore.has_lost() {
                return Err(RestoreError::Died(name));
            }
            in_vain = if restore.is_nobody_there() && restore.maker().is_awaited_in_vain() { in_vain + 1 } else { 0 };
            if in_vain == LOOKS {
                return Err(RestoreError::Died("its process".into()));
            }
        }
        Ok(())
    }
}

/// Serves a restore from its first message on, until the connection closes.
pub(super) fn serve(
    daemon: &Arc<Daemon>,
    stream: &UnixStream,
    peer: Credentials,
    allowed: Allowances,
    fds: Vec<OwnedFd>,
) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let view = match PidView::of(peer.pid) {
        Ok(view) => view,
        Err(error) => return message::fail(stream, error),
    };
    let mut stage = match prepare(daemon, peer.pid, allowed.or(daemon.config.allowances), fds) {
        Ok(Some(prepared)) => {
            let reply = Reply::Prepared { restore: prepared.restore.id(), sockets: prepared.restore.sockets() };
            message::reply(stream, &reply);
            Stage::Restoring(prepared)
        }
        Ok(None) => {
            message::reply(stream, &Reply::NotOurs);
            Stage::NotOurs
        }
        Err(error) => {
            warn!("restore failed: {error}");
            return message::fail(stream, error);
        }
    };
    loop {
        match stage.wait(stream) {
            Ok(()) => {}
            Err(RestoreError::Orphaned) => break,
            Err(error) => {
                warn!("restore failed: {error}");
                stage = Stage::Failed(error.into());
            }
        }
        let request = match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) => message.body,
            Err(FrameError::Closed) => break,
            Err(error) => {
                warn!("restore: closing the connection: {error}");
                message::fail(stream, error);
                break;
            }
        };
        match answer(&mut stage, view, &request) {
            Ok(reply) => message::reply(stream, &reply),
            Err(error) => {
                let failure = error.failure();
                if !matches!(error, RestoreError::Failed(_) | RestoreError::Order(_)) {
                    warn!("restore failed: {failure}");
                    // Kills the workers: what was connected already sees its worker's death.
                    stage = Stage::Failed(failure.clone());
                }
                message::fail(stream, failure);
            }
        }
    }
    match stage {
        Stage::Restoring(prepared) => {
            warn!("restore given up: CRIU has ended or closed its connection before the rings were open");
            let maker = Arc::clone(prepared.restore.maker());
            // Workers first: nobody waits for what follows.
            drop(prepared);
            maker.kill_what_was_begun();
        }
        Stage::NotOurs | Stage::Open | Stage::Failed(_) => debug!("restore over"),
    }
}

fn answer(stage: &mut Stage, view: PidView, request: &Request) -> Result<Reply, RestoreError> {
    let Request::Resume { pid } = request else {
        return Err(RestoreError::Order("something else"));
    };
    let prepared = match &*stage {
        Stage::Failed(failure) => return Err(RestoreError::Failed(failure.clone())),
        Stage::NotOurs => {
            let (ours, open) = (false, false);
            return Ok(Reply::Resumed { ours, open });
        }
        Stage::Open => {
            let (ours, open) = (false, true);
            return Ok(Reply::Resumed { ours, open });
        }
        Stage::Restoring(prepared) => prepared,
    };
    let ours = prepared.restore.resume(&prepared.daemon, view.to_ours(*pid)?)?;
    let open = prepared.restore.open_if_whole(prepared.daemon.config.quiesce_timeout)?;
    if open {
        *stage = Stage::Open;
    }
    Ok(Reply::Resumed { ours, open })
}

/// Reserves a place for each client among those that there may be.
fn reserve(daemon: &Daemon, needed: usize) -> Result<Reservation, RestoreError> {
    let max = daemon.config.max.unwrap_or(usize::MAX);
    daemon.registry.reserve(needed, max).map_err(|taken| RestoreError::Full { needed, taken, max })
}

/// Checks everything, takes the workers, and has them begin to load. None if the directory has no image of ours.
fn prepare(
    daemon: &Arc<Daemon>,
    criu: i32,
    allowed: Allowances,
    fds: Vec<OwnedFd>,
) -> Result<Option<Prepared>, RestoreError> {
    let [dir] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| RestoreError::NoDirectory)?;
    let opened = ImageDir::from_fd(dir.as_fd(), message::shown(&dir))?;
    let image = match Image::open_at(opened) {
        Ok(image) => image,
        Err(error) if error.kind() == ErrorKind::NotAnImage => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    image.check_companion()?;
    check::image(&image)?;
    let reservation = reserve(daemon, check::attached(&image).count())?;
    let restorer = daemon.grants.of(Process::with_pid(criu)?)?;
    let workers = load::take_workers(daemon, &image, &restorer)?;
    let restore = Restore::new(sys::random()?, &image, workers, Maker::new(criu, &image, &dir), reservation);
    let prepared = Prepared { daemon: Arc::clone(daemon), restore: Arc::new(restore) };
    let attached = prepared.restore.workers().map(|it| it.attached());
    check::devices(&image, &attached.collect::<Vec<_>>(), allowed)?;
    load::share(&image, &prepared.restore, daemon.config.stall_timeout)?;
    load::start(&image, &prepared.restore, daemon.config.limits, daemon.config.stall_timeout)?;
    daemon.restores.add(&prepared.restore);
    info!(
        id = %image.manifest().id,
        clients = image.manifest().clients.len(),
        "restoring an image of {} ({})",
        image.manifest().host.name,
        image.manifest().host.driver_version,
    );
    Ok(Some(prepared))
}
