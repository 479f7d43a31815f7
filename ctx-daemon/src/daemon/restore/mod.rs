//! A restore: CRIU's plugin says how far CRIU is, on one connection.
//!
//! | from | to | a restore |
//! |---|---|---|
//! | `Checking` | `NotOurs` | `Restore`: the directory has no image of Rekindle |
//! | `Checking` | `Restoring` | `Restore`: every check has passed, and workers load |
//! | `Checking` | `Failed` | a check has failed |
//! | `Restoring` | `Open` | `Resume` or `NativeResume` of the last process: all clients have their workers, native processes their GPU memory, and the rings are open |
//! | `Restoring` | `Failed` | a step has failed: the workers are killed, and the processes that CRIU has made |
//! | `NotOurs` | `Over` | the connection is closed |
//! | `Open` | `Over` | the connection is closed, and the processes go on |
//! | `Failed` | `Over` | the connection is closed |
//! | `Restoring` | `Over` | the connection is closed, or CRIU has died: as with `Failed`, and processes that CRIU has begun are killed too |
//!
//! The reply to the failed request, and to every later one, tells the failure. A request out of turn changes nothing.
//! `state.rs` has the machines of a single client.
//!
//! A command may hold the restore (`hold.rs`): then the answer to the last `Resume` waits until the command says that the processes
//! may run.
//!
//! All checks that are possible come before `Prepared`, when no process exists yet: a failed check costs a line and an exit
//! status. Loading goes on while CRIU rebuilds the processes; the reply to the next `Resume` tells a failure of it, and the
//! plugin kills the processes that exist by then. The content of device memory may still be loading when the rings open, and
//! commands wait for it; a failure from then on kills the restored processes.

mod advance;
mod check;
mod code_ahead;
mod connect;
mod error;
mod hold;
mod libraries;
mod load;
mod made;
mod natives;
mod phases;
mod place;
mod preload;
mod preloads;
mod promises;
mod room;
mod shared;
mod spans;
mod state;
mod warm;
pub(super) mod watch;
mod watches;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rekindle_ctx_worker::transition::{machine, step};
use rekindle_images::{ErrorKind, Image, ImageDir};
use rekindle_wire::control::{Allowances, Failing, Failure, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use tracing::{info, warn};

pub(super) use self::check::{CheckError, devices_of as check_devices, record as check_record};
pub(super) use self::connect::send_memory as connect;
use self::error::RestoreError;
pub(super) use self::load::{CodeFile, How as LoadHow, Load, Mode as LoadMode};
use self::load::{Mode, Work};
use self::made::Maker;
use self::natives::Natives;
use self::phases::{Part, Phases};
pub(super) use self::place::choose;
pub(super) use self::preload::serve as preload;
pub(super) use self::preloads::Preloads;
pub(super) use self::promises::Promises;
pub(super) use self::shared::{SharedError, SharedMemory, registered, take as take_memory};
use self::state::Restore;
pub(super) use self::state::Restores;
pub(super) use self::warm::{Wanted, WarmImages, forget, forget_named, list, warm};
pub(super) use self::watches::{Watches, Wish};
use super::clients::Reservation;
use super::message::{self, MAX_REQUEST};
use super::metrics::Start;
use super::pidns::PidView;
use super::process::Process;
use super::sys::Credentials;
use super::{Daemon, sys};

/// A restore. See the table above.
enum State {
    Checking(Checking),
    NotOurs,
    Restoring(Restoring),
    Open,
    Failed(Failure),
    Over,
}

machine! {
    enum StateName names State { Checking, NotOurs, Restoring, Open, Failed, Over }
    Checking -> NotOurs,
    Checking -> Restoring,
    Checking -> Failed,
    Restoring -> Open,
    Restoring -> Failed,
    NotOurs -> Over,
    Open -> Over,
    Failed -> Over,
    Restoring -> Over,
}

/// The result of a transition: the next state and the reply to the request, or an error, which leads to `Failed`.
type Next = Result<(State, Reply), RestoreError>;

/// Serves a restore from its first message on, until the connection closes.
pub(super) fn serve(
    daemon: &Arc<Daemon>,
    stream: &UnixStream,
    peer: Credentials,
    (allowed, wire): (Allowances, u32),
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
    let tracked = daemon.watches.begin(peer.pid);
    let machine = format!("restore by CRIU {}", peer.pid);
    let phases = Arc::clone(&tracked.0);
    let allowed = allowed.or(daemon.config.restore.allowances);
    let checking = Checking { criu: peer.pid, allowed, wire, fds, phases };
    let (mut state, mut answer) = step(&machine, State::Checking(checking), |state| state.check(daemon));
    let failed = answer.is_err();
    state.tell(&tracked.0);
    message::respond(stream, answer);
    if failed {
        // There is no further request.
        step(&machine, state, |state| (state.end(), ()));
        return;
    }
    loop {
        (state, ()) = step(&machine, state, |state| (state.wait(stream), ()));
        state.tell(&tracked.0);
        if matches!(state, State::Over) {
            return;
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
        (state, answer) = step(&machine, state, |state| state.answer(view, &request));
        state.tell(&tracked.0);
        message::respond(stream, answer);
    }
    step(&machine, state, |state| (state.end(), ()));
}

impl State {
    /// The state after a transition. A state whose transition has failed is released by now.
    fn after(done: Next) -> (Self, Result<Reply, Failure>) {
        match done {
            Ok((state, reply)) => (state, Ok(reply)),
            Err(error) => {
                warn!("restore failed: {error}");
                let failure = error.failure();
                (Self::Failed(failure.clone()), Err(failure))
            }
        }
    }

    /// Tells those who watch the restore that it has failed, if it has.
    fn tell(&self, phases: &Phases) {
        if let Self::Failed(failure) = self {
            phases.failed(failure);
        }
    }

    /// Serves the first request.
    fn check(self, daemon: &Arc<Daemon>) -> (Self, Result<Reply, Failure>) {
        match self {
            Self::Checking(checking) => Self::after(checking.check(daemon)),
            state => (state, Err(RestoreError::Order("the request Restore").failure())),
        }
    }

    /// Waits for the next request. There is none after CRIU has died.
    fn wait(self, stream: &UnixStream) -> Self {
        let Self::Restoring(restoring) = self else { return self };
        match restoring.wait(stream) {
            Ok(()) => Self::Restoring(restoring),
            Err(RestoreError::Orphaned) => Self::Restoring(restoring).end(),
            Err(error) => {
                drop(restoring);
                Self::after(Err(error)).0
            }
        }
    }

    fn answer(self, view: PidView, request: &Request) -> (Self, Result<Reply, Failure>) {
        match (request, self) {
            (_, Self::Failed(failure)) => {
                let again = RestoreError::Failed(failure.clone()).failure();
                (Self::Failed(failure), Err(again))
            }
            (Request::Resume { pid }, Self::Restoring(restoring)) => Self::after(restoring.resume(view, *pid)),
            (Request::NativeResume { pid }, Self::Restoring(restoring)) => Self::after(restoring.give_back(view, *pid)),
            (Request::Resume { .. }, Self::NotOurs) => (Self::NotOurs, Ok(Reply::Resumed { ours: false, open: false })),
            (Request::Resume { .. }, Self::Open) => (Self::Open, Ok(Reply::Resumed { ours: false, open: true })),
            (_, state) => (state, Err(RestoreError::Order("this request").failure())),
        }
    }

    fn end(self) -> Self {
        if let Self::Restoring(restoring) = self {
            restoring.give_up();
        }
        Self::Over
    }
}

/// A restore of which only the first message has arrived.
struct Checking {
    criu: i32,
    allowed: Allowances,
    /// The control version that the plugin speaks.
    wire: u32,
    /// The image directory.
    fds: Vec<OwnedFd>,
    phases: Arc<Phases>,
}

impl Checking {
    /// Checks everything, takes the workers, and has them begin to load.
    fn check(self, daemon: &Arc<Daemon>) -> Next {
        let Self { criu, allowed, wire, fds, phases } = self;
        let [dir] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| RestoreError::NoDirectory)?;
        let opened = ImageDir::from_fd(dir.as_fd(), message::shown(&dir))?;
        let image = match Image::open_at(opened) {
            Ok(image) => image,
            Err(error) if error.kind() == ErrorKind::NotAnImage => {
                phases.is_not_ours();
                return Ok((State::NotOurs, Reply::NotOurs));
            }
            Err(error) => return Err(error.into()),
        };
        hold::check(&dir, phases.hold())?;
        image.check_companion()?;
        let manifest = image.manifest();
        // The workers compare code with its hashes, beside CRIU: no process runs before that.
        check::image(&image)?;
        let warm = daemon.warm.find(&image).map(|it| it.begin());
        let natives = Natives::check(&daemon.native, manifest, allowed, wire)?;
        phases.ends(Part::Check);
        let reservation = reserve(daemon, check::attached(manifest).count())?;
        let restorer = daemon.grants.of(Process::with_pid(criu)?)?;
        let hold_off = Arc::new(daemon.pool.hold_off());
        let gpus = load::choose_gpus(daemon, manifest, restorer.gpus())?;
        let taken = warm.as_ref().and_then(|it| it.take(&gpus));
        let loaded = taken.as_ref().map(|it| it.loaded);
        phases.finds(match loaded {
            Some(true) => Start::Resident,
            Some(false) => Start::Prepared,
            None if warm.is_some() => Start::Warm,
            None => Start::Cold,
        });
        if loaded != Some(true) {
            daemon.clients.registry.wait_for_memory_of_ended();
        }
        let mut learned = Vec::new();
        let workers = match taken {
            Some(taken) => {
                learned = taken.learned.unwrap_or_default();
                taken.workers
            }
            None => load::take_workers(manifest, &gpus, |record, settings, gpus| {
                let ready = daemon.preloads.take_worker(&image, record, settings, gpus);
                ready.map_or_else(|| daemon.pool.take(settings, gpus), Ok)
            })?,
        };
        phases.ends(Part::Workers);
        phases.restores(&image, check::attached(manifest));
        let maker = Maker::new(criu, &image, &dir);
        let restore = Restore::new(sys::random()?, &image, workers.clone(), maker, reservation, phases);
        let restoring =
            Restoring { daemon: Arc::clone(daemon), restore: Arc::new(restore), natives: Arc::new(natives) };
        let attached = restoring.restore.workers().map(|it| it.attached());
        let are_same = check::devices(manifest, &attached.collect::<Vec<_>>(), allowed)?;
        libraries::add_missing(&image, &daemon.builds)?;
        let limit = daemon.config.timeouts.stall;
        // Processes that are held are complete.
        let early = daemon.config.restore.run_before_loaded && restoring.restore.phases().hold().migration().is_none();
        let works = match loaded {
            Some(true) => workers.iter().map(|_| Work::Nothing).collect(),
            Some(false) => {
                let mut learned = learned.into_iter();
                workers.iter().map(|_| Work::BringBack { early, limit, learned: learned.next() }).collect()
            }
            None => {
                let shared = load::share(manifest, &workers, limit)?;
                // An importer's commands would not wait for content that another worker loads.
                let mode = match early && !shared {
                    // Elsewhere the log may not be replayed as it was recorded.
                    true if are_same => Mode::Ahead,
                    true => Mode::Early,
                    false => Mode::Whole,
                };
                let how = load::How { limits: daemon.config.clients.limits, mode, limit };
                let mut to_copy = preload::take(daemon, &image, &workers, &gpus).into_iter();
                let clients = check::attached(manifest).zip(&workers);
                let load = |(record, worker): (_, &Arc<_>)| match (&warm, to_copy.next().flatten()) {
                    (Some(warm), to_copy) => Work::load(&image, record, worker, warm.content(), how, to_copy),
                    (None, to_copy) => Work::load(&image, record, worker, &image, how, to_copy),
                };
                clients.map(load).collect::<Result<Vec<_>, _>>()?
            }
        };
        load::start(&restoring.restore, works, limit, (&daemon.promises, &hold_off), warm)?;
        restoring.restore.phases().ends(Part::Prepare);
        daemon.restores.add(&restoring.restore);
        info!(
            id = %image.manifest().id,
            clients = image.manifest().clients.len(),
            "restoring an image of {} ({})",
            image.manifest().host.name,
            image.manifest().host.driver_version,
        );
        let reply = Reply::Prepared { restore: restoring.restore.id(), sockets: restoring.restore.sockets() };
        Ok((State::Restoring(restoring), reply))
    }
}

/// A restore whose rings are not open. Its workers and processes are killed when it is dropped, unless the rings have opened.
struct Restoring {
    daemon: Arc<Daemon>,
    restore: Arc<Restore>,
    natives: Arc<Natives>,
}

impl Drop for Restoring {
    fn drop(&mut self) {
        self.daemon.restores.remove(&self.restore);
        if !self.restore.is_open() {
            self.natives.kill();
        }
        self.restore.give_up_unless_open();
    }
}

/// How often the daemon looks whether the processes that CRIU makes live, and how often in a row it must find none.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
const POLLS: u32 = 5;

impl Restoring {
    /// Waits until a request comes, or CRIU is gone. CRIU does not notice when a process dies while one of its scripts
    /// runs, and waits for that process for ever, so that no request would come any more.
    fn wait(&self, stream: &UnixStream) -> Result<(), RestoreError> {
        let restore = &self.restore;
        let mut in_vain = 0;
        while !sys::wait_readable([stream.as_fd()], Some(POLL_INTERVAL))?[0] {
            if restore.maker().is_orphaned() {
                return Err(RestoreError::Orphaned);
            }
            if let Some(name) = restore.has_lost() {
                return Err(RestoreError::Died(name));
            }
            in_vain = if restore.is_nobody_there() && restore.maker().is_awaited_in_vain() { in_vain + 1 } else { 0 };
            if in_vain == POLLS {
                return Err(RestoreError::Died("a process".into()));
            }
        }
        Ok(())
    }

    /// A process is complete. Opens the rings after the last one.
    fn resume(self, view: PidView, pid: i32) -> Next {
        let pid = view.to_ours(pid)?;
        let ours = self.restore.resume(&self.daemon, pid)?;
        if !ours && let Some(native) = self.natives.begin(view, Process::with_pid(pid)?, self.restore.maker().made())? {
            return Ok((State::Restoring(self), Reply::Native(native)));
        }
        let (state, open) = self.open_if_whole()?;
        Ok((state, Reply::Resumed { ours, open }))
    }

    /// The thread of a native process that works for the driver runs: the process gets its GPU memory back.
    fn give_back(self, view: PidView, pid: i32) -> Next {
        self.natives.give_back(view.to_ours(pid)?)?;
        let (state, open) = self.open_if_whole()?;
        Ok((state, Reply::NativeDone { open }))
    }

    /// Opens the rings if all processes are complete, with their GPU memory.
    fn open_if_whole(self) -> Result<(State, bool), RestoreError> {
        if self.natives.are_awaited() || !self.restore.is_whole() {
            return Ok((State::Restoring(self), false));
        }
        self.hold()?;
        if !self.restore.open_if_whole(self.daemon.config.timeouts.quiesce)? {
            return Ok((State::Restoring(self), false));
        }
        self.restore.phases().wait_until_heard();
        Ok((State::Open, true))
    }

    /// Waits until the command that holds the processes says that they may run, if one does. Until then SIGSTOP is pending for
    /// them, which takes effect if CRIU, which has stopped them, dies.
    fn hold(&self) -> Result<(), RestoreError> {
        let hold = self.restore.phases().hold();
        let Some((migration, again)) = hold.migration() else { return Ok(()) };
        let processes = self.restore.maker().processes();
        // CRIU has sent such a signal already to those that were stopped when they were dumped: they stay so.
        let go_on: Vec<_> = processes.iter().filter(|it| !it.will_stop()).collect();
        processes.iter().for_each(Process::stop);
        let goes_on = || match (self.restore.maker().is_orphaned(), self.restore.has_lost()) {
            (true, _) => Err(RestoreError::Orphaned),
            (_, Some(name)) => Err(RestoreError::Died(name)),
            _ => Ok(()),
        };
        hold.wait(goes_on)?;
        // Since the last look, too: processes that nobody traces would be stopped for good.
        goes_on()?;
        self.daemon.migrations.arrives(migration, &processes, again)?;
        go_on.into_iter().for_each(Process::go_on);
        Ok(())
    }

    /// Ends a restore that no peer waits for any more.
    fn give_up(self) {
        warn!("restore given up: CRIU has ended or closed its connection before the rings were open");
        let (maker, natives) = (Arc::clone(self.restore.maker()), Arc::clone(&self.natives));
        // Workers come first: the search for processes takes longer.
        drop(self);
        maker.kill_what_was_begun();
        natives.kill_orphans(&maker);
    }
}

/// Reserves a place among the clients for each client of the image.
fn reserve(daemon: &Daemon, needed: usize) -> Result<Reservation, RestoreError> {
    let max = daemon.config.clients.max.unwrap_or(usize::MAX);
    daemon.clients.registry.reserve(needed, max).map_err(|taken| RestoreError::Full { needed, taken, max })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_ctx_worker::transition;

    #[test]
    fn the_table_above_is_the_list_of_transitions() {
        assert_eq!(transition::table(include_str!("mod.rs"), "a restore"), transition::list::<StateName>());
    }

    #[test]
    fn a_request_out_of_turn_changes_nothing_and_a_failure_is_told_again() {
        let (view, resume) = (PidView::Same, Request::Resume { pid: 1 });
        let (state, refused) = State::NotOurs.answer(view, &Request::Finish);
        assert!(matches!(state, State::NotOurs) && refused.is_err());
        let (state, refused) = State::Open.answer(view, &Request::Finish);
        assert!(matches!(state, State::Open) && refused.is_err());
        let (state, answer) = state.answer(view, &resume);
        assert_eq!(answer.unwrap(), Reply::Resumed { ours: false, open: true });
        assert!(matches!(state, State::Open));
        let mut failed = State::after(Err(RestoreError::NoDirectory));
        for request in [&resume, &Request::Finish, &resume] {
            let kind = failed.1.unwrap_err().kind;
            failed = failed.0.answer(view, request);
            let again = failed.1.as_ref().unwrap_err();
            assert!(again.kind == kind && again.reason.contains("image directory"), "{again:?}");
        }
    }
}
