//! A process tree that goes on elsewhere: the daemon of its host decides once whether it goes on here or there.
//!
//! ```text
//!   rekindle migrate ── Migrate ──► a migration ◄── the dump of the tree: its image is durable, and CRIU waits
//!                    ── HandOver ─► decided: stopped, recorded, killed ──► the dump ends
//! ```
//!
//! | from | to | a migration |
//! |---|---|---|
//! | `Running` | `Complete` | the image is durable, and the tree is frozen, or stands still where it is a container |
//! | `Running` | `Kept` | the command has ended, or the dump has: the tree goes on here |
//! | `Complete` | `HandedOver` | `HandOver`: the decision is on disk, and the tree never goes on here |
//! | `Complete` | `Kept` | the command has ended, or CRIU has: the tree goes on here |
//!
//! Nothing leads out of `Kept` and `HandedOver`. Whoever wants to know later asks `Migration`; `records.rs` keeps the decisions
//! over restarts of the daemon. A daemon that ends takes undecided migrations with it, since their connections end: the next
//! daemon finds them undecided, and keeps them.
//!
//! Between the decision and the end of the tree nothing may let the tree run: CRIU, which has stopped it, may die. So the tree
//! gets SIGSTOP before the decision is recorded, which takes effect where CRIU lets go of it, and SIGKILL when CRIU is through
//! or gone. If a process has no tracer any more after that signal, CRIU has let go of it before, and it has run: then it is not
//! handed over.
//!
//! A container's engine works on when CRIU has ended, and may start a container anew that is killed. So CRIU leaves a container, which
//! stands still by a SIGSTOP from the end of its dump on. It goes on by SIGCONT where it is kept; where it is handed over, it stands
//! still until its engine has removed it. The record names the processes as soon as they stand still: the next daemon lets them go on
//! if nothing was decided.
//!
//! Anybody may send SIGCONT to a container that stands still, and one that has run since its dump is not the one in the image. So the
//! kernel's count of how often its threads have left a processor is noted once CRIU has let go of it (`Standstill`). It is handed over
//! only if that count is the same. Processes that somebody had stopped before the dump get no SIGCONT: they stay as they were.
//!
//! If the other host is lost for good, somebody may say that a container which was handed over has not gone on there (`take_back`). It
//! stands still here, so it goes on.

mod records;
mod serve;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use rekindle_ctx_worker::transition::{self, machine};
use rekindle_wire::control::{Failing, Failure, FailureKind, MigrationState};
use thiserror::Error;
use tracing::{info, warn};

use self::records::{Decision, Records};
pub(super) use self::serve::{Asked, serve};
use super::process::Process;
use super::{lock, sys, wait_timeout};

/// The folders of records in the state directory: of trees from here, and of trees from elsewhere.
const DEPARTURES: &str = "migrations";
const ARRIVALS: &str = "arrivals";
/// The pause between two looks whether CRIU, which waits for the decision, still lives.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Why a dump or a request of a migration fails.
#[derive(Debug, Error)]
pub(super) enum MigrationError {
    #[error("the command that migrates it has ended, or has given it up: it goes on here")]
    Kept,
    #[error("CRIU has ended before the tree was handed over: it goes on here")]
    Closed,
    #[error("a tree that is migrated ends here, and this dump was to leave it running: use `rekindle migrate`")]
    LeftRunning,
    #[error("its image is not complete yet")]
    NotComplete,
    #[error(
        "a container that is migrated stands still when its dump has ended, and this dump was to kill it: use `rekindle migrate`"
    )]
    NotLeft,
    #[error(
        "the plugin of this CRIU is older than the daemon, and cannot keep a container still: install one version of Rekindle"
    )]
    OldPlugin,
    #[error(
        "processes of the container use the driver without Rekindle's library: such a container cannot be migrated"
    )]
    Natives,
    #[error("a process of the container has run or ended since its dump, as by a SIGCONT: it goes on here")]
    HasRun,
    #[error("cannot record that the container stands still, so it goes on here: {0}")]
    Still(io::Error),
    #[error("cannot record that it was handed over, so it goes on here: {0}")]
    Record(io::Error),
    #[error("no process of the tree uses a GPU through Rekindle: dump and restore it with CRIU alone")]
    NoClients,
}

impl Failing for MigrationError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Kept | Self::Closed | Self::HasRun => FailureKind::GivenUp,
            Self::LeftRunning | Self::NotLeft | Self::NotComplete | Self::NoClients | Self::Natives => {
                FailureKind::Refused
            }
            Self::OldPlugin => FailureKind::Version,
            Self::Record(error) | Self::Still(error) => Failing::kind(error),
        }
    }
}

/// Why a migration cannot begin.
#[derive(Debug, Error)]
pub(super) enum NoMigration {
    #[error("only root and the user that rekindled runs as, on the host itself, may migrate, since only they may dump")]
    NotAllowed,
    #[error("the name of a migration is 1 to 64 letters, digits and hyphens")]
    Name,
    #[error("there was a migration of this name before: use another")]
    Known,
    #[error("process {0} is being migrated: wait until that is over")]
    Taken(i32),
    #[error(transparent)]
    Pid(#[from] super::pidns::PidError),
    #[error("there is no process {0}")]
    NoProcess(i32),
    #[error("cannot record the migration: {0}")]
    Record(io::Error),
    #[error(transparent)]
    TooMany(#[from] super::checkpoints::TooManyOrders),
}

impl Failing for NoMigration {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Pid(error) => error.kind(),
            Self::Record(error) => Failing::kind(error),
            _ => FailureKind::Refused,
        }
    }
}

/// Why a tree that was handed over does not go on here.
#[derive(Debug, Error)]
pub(super) enum NotTakenBack {
    #[error("migration {0} goes on: end its command first")]
    GoesOn(String),
    #[error("there was no migration {0} from this host since it has started")]
    Unknown(String),
    #[error(
        "the processes of migration {0} have been killed here when they were handed over: only a container is left"
    )]
    Killed(String),
    #[error("cannot record that it goes on here: {0}")]
    Record(io::Error),
}

impl Failing for NotTakenBack {
    fn kind(&self) -> FailureKind {
        match self {
            Self::GoesOn(_) | Self::Unknown(_) | Self::Killed(_) => FailureKind::Refused,
            Self::Record(error) => Failing::kind(error),
        }
    }
}

/// Why a tree of another host does not run here.
#[derive(Debug, Error)]
pub(super) enum ArrivalError {
    #[error("the processes of migration {0} have been let run here before")]
    Again(String),
    #[error("the name of a migration is 1 to 64 letters, digits and hyphens")]
    Name,
    #[error("cannot record that the processes run here, so they do not: {0}")]
    Record(io::Error),
}

impl Failing for ArrivalError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Again(_) | Self::Name => FailureKind::Refused,
            Self::Record(error) => Failing::kind(error),
        }
    }
}

/// All migrations of trees from this host, and to it.
pub(crate) struct Migrations {
    going_on: Mutex<Vec<Arc<Migration>>>,
    records: Records,
    /// The trees that have come from other hosts and were let run.
    arrivals: Mutex<Records>,
}

/// A migration that goes on.
#[derive(Debug)]
pub(super) struct Migration {
    name: String,
    root: Process,
    /// Whether the tree is a container: CRIU leaves it.
    is_container: bool,
    /// The processes that somebody had stopped before the dump.
    stopped: OnceLock<Vec<Process>>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    Running,
    Complete(Vec<Process>, Option<Standstill>),
    Kept,
    HandedOver,
}

/// A container's processes when CRIU had let go of them: how often each of them had left a processor.
#[derive(Debug, PartialEq, Eq)]
struct Standstill(Vec<u64>);

impl Standstill {
    /// None if a process runs, has ended, or is traced still.
    fn of(tree: &[Process]) -> Option<Self> {
        tree.iter().map(Process::standstill).collect::<Option<_>>().map(Self)
    }
}

machine! {
    enum StateName names State { Running, Complete, Kept, HandedOver }
    Running -> Complete,
    Running -> Kept,
    Complete -> Kept,
    Complete -> HandedOver,
}

impl Migrations {
    /// Opens the records in the daemon's state directory. Trees that the daemon before this one has handed over are killed, if they
    /// still live.
    pub(crate) fn open(state_dir: &std::path::Path) -> Self {
        let records = Records::open(state_dir, DEPARTURES);
        records.act_on_what_was_left();
        Self { going_on: Mutex::default(), records, arrivals: Mutex::new(Records::open(state_dir, ARRIVALS)) }
    }

    /// The tree of a migration to this host is about to run: records that before it does. A tree runs once; or `again`, if all its
    /// processes have ended.
    pub(super) fn arrives(&self, name: &str, processes: &[Process], again: bool) -> Result<(), ArrivalError> {
        if !records::is_name(name) {
            return Err(ArrivalError::Name);
        }
        let arrivals = lock(&self.arrivals);
        let may_run = match arrivals.read(name) {
            Some(before) => again && !before.processes.iter().any(Process::is_alive),
            None => !arrivals.has(name),
        };
        if !may_run {
            return Err(ArrivalError::Again(name.to_owned()));
        }
        arrivals.write(name, Decision::Arrived, processes).map_err(ArrivalError::Record)
    }

    /// Whether a tree has come to this host and was let run: none if not, otherwise whether one of its processes lives.
    pub(super) fn arrival(&self, name: &str) -> Option<bool> {
        lock(&self.arrivals).read(name).map(|it| it.processes.iter().any(Process::is_alive))
    }

    /// Begins a migration, which lasts until the result is dropped.
    pub(super) fn begin(
        &self,
        name: &str,
        root: Process,
        is_container: bool,
    ) -> Result<MigrationGuard<'_>, NoMigration> {
        if !records::is_name(name) {
            return Err(NoMigration::Name);
        }
        let mut going_on = lock(&self.going_on);
        if going_on.iter().any(|it| it.root == root) {
            return Err(NoMigration::Taken(root.pid));
        }
        if self.records.has(name) {
            return Err(NoMigration::Known);
        }
        self.records.write(name, Decision::Undecided, &[root]).map_err(NoMigration::Record)?;
        let (name, stopped, state) = (name.to_owned(), OnceLock::new(), Mutex::new(State::Running));
        let migration = Arc::new(Migration { name, root, is_container, stopped, state, changed: Condvar::new() });
        going_on.push(Arc::clone(&migration));
        Ok(MigrationGuard { migrations: self, migration })
    }

    /// The migration of a tree, for its dump, if it is migrated.
    pub(super) fn of(&self, root: i32) -> Option<Arc<Migration>> {
        lock(&self.going_on).iter().find(|it| it.root.pid == root).map(Arc::clone)
    }

    /// The dump of a container has ended, and CRIU is about to let go of it: it stands still from then on. An error means that it goes
    /// on here.
    pub(super) fn stand_still(&self, migration: &Migration, tree: Vec<Process>) -> Result<(), MigrationError> {
        let mut state = lock(&migration.state);
        match &*state {
            State::Running => {}
            State::Complete(..) => return Ok(()),
            State::Kept | State::HandedOver => return Err(MigrationError::Kept),
        }
        let written = self.records.write_still(&migration.name, Decision::Undecided, &tree, migration.stopped());
        written.map_err(MigrationError::Still)?;
        tree.iter().for_each(Process::stop);
        // Of what CRIU has let go of before, the image is no longer true.
        if !tree.iter().all(Process::is_traced) {
            migration.let_go_on(&tree);
            migration.replace(&mut state, State::Kept);
            return Err(MigrationError::HasRun);
        }
        migration.replace(&mut state, State::Complete(tree, None));
        Ok(())
    }

    /// A container that was handed over goes on here all the same: somebody knows that it has not gone on elsewhere, and never will.
    pub(crate) fn take_back(&self, name: &str) -> Result<MigrationState, Failure> {
        self.taken_back(name).map(|()| MigrationState::Kept).map_err(|error| error.failure())
    }

    fn taken_back(&self, name: &str) -> Result<(), NotTakenBack> {
        // Nobody begins another migration meanwhile.
        let going_on = lock(&self.going_on);
        if going_on.iter().any(|it| it.name == name) {
            return Err(NotTakenBack::GoesOn(name.to_owned()));
        }
        let record = self.records.read(name).ok_or_else(|| NotTakenBack::Unknown(name.to_owned()))?;
        match (record.decision, record.still) {
            (Decision::HandedOver, true) => {
                info!(migration = name, "goes on here all the same");
                self.records.take_back(name, &record).map_err(NotTakenBack::Record)
            }
            (Decision::HandedOver, false) => Err(NotTakenBack::Killed(name.to_owned())),
            (Decision::Undecided | Decision::Kept | Decision::Arrived, _) => Ok(()),
        }
    }

    /// What has become of a migration.
    pub(super) fn state(&self, name: &str) -> MigrationState {
        // While it goes on, its own state is the newest.
        if let Some(migration) = lock(&self.going_on).iter().find(|it| it.name == name) {
            return match &*lock(&migration.state) {
                State::Running | State::Complete(..) => MigrationState::Undecided,
                State::Kept => MigrationState::Kept,
                State::HandedOver => MigrationState::HandedOver,
            };
        }
        match self.records.read(name).map(|it| it.decision) {
            None | Some(Decision::Arrived) => MigrationState::Unknown,
            // Its connection has ended, and with it the only one who could have it handed over.
            Some(Decision::Undecided | Decision::Kept) => MigrationState::Kept,
            Some(Decision::HandedOver) => MigrationState::HandedOver,
        }
    }
}

/// Keeps a migration until it is dropped: if it was not handed over by then, the tree goes on here.
pub(super) struct MigrationGuard<'a> {
    migrations: &'a Migrations,
    migration: Arc<Migration>,
}

impl MigrationGuard<'_> {
    /// The command asks for the dump's progress: looks whether a container stands still by now.
    fn looks(&self) {
        self.migration.note_standstill(&mut lock(&self.migration.state));
    }

    /// Hands the tree over: from now on it never goes on here, whatever happens to this daemon or to CRIU.
    pub(super) fn hand_over(&self) -> Result<(), MigrationError> {
        let Migration { name, is_container, state, .. } = &*self.migration;
        // The dump cannot end meanwhile, since it would have to take the lock.
        let mut state = lock(state);
        self.migration.note_standstill(&mut state);
        let (tree, standstill) = match &*state {
            State::Complete(tree, standstill) => (tree, standstill),
            State::HandedOver => return Ok(()),
            State::Kept => return Err(MigrationError::Closed),
            State::Running => return Err(MigrationError::NotComplete),
        };
        // SIGSTOP would hide that it runs, so the count comes first; a second one tells whether it has run in between.
        let has_run = || *is_container && (standstill.is_none() || Standstill::of(tree) != *standstill);
        let refused = if has_run() {
            Some(MigrationError::HasRun)
        } else {
            tree.iter().for_each(Process::stop);
            match is_container {
                true => has_run().then_some(MigrationError::HasRun),
                false => (!tree.iter().all(Process::is_traced)).then_some(MigrationError::Closed),
            }
        };
        if let Some(error) = refused {
            self.migration.let_go_on(tree);
            self.migration.replace(&mut state, State::Kept);
            return Err(error);
        }
        let records = &self.migrations.records;
        let written = match is_container {
            true => records.write_still(name, Decision::HandedOver, tree, self.migration.stopped()),
            false => records.write(name, Decision::HandedOver, tree),
        };
        if let Err(error) = written {
            // What was written may be there all the same, and would be believed.
            records.withdraw(name);
            self.migration.let_go_on(tree);
            if *is_container {
                // The next daemon would not know any more that it is to go on.
                self.migration.replace(&mut state, State::Kept);
            }
            return Err(MigrationError::Record(error));
        }
        info!(migration = name, processes = tree.len(), "handed over");
        self.migration.replace(&mut state, State::HandedOver);
        Ok(())
    }
}

impl Drop for MigrationGuard<'_> {
    fn drop(&mut self) {
        self.migration.keep();
        let handed_over = matches!(*lock(&self.migration.state), State::HandedOver);
        if !handed_over && let Err(error) = self.migrations.records.write(&self.migration.name, Decision::Kept, &[]) {
            // It reads as kept in any case.
            warn!(migration = self.migration.name, "cannot record that it was kept: {error}");
        }
        lock(&self.migrations.going_on).retain(|it| !Arc::ptr_eq(it, &self.migration));
    }
}

impl Migration {
    /// The image of the tree is durable, and CRIU is to kill the tree: waits until it was handed over. An error means that the tree
    /// goes on here.
    pub(super) fn wait(&self, tree: Vec<Process>, criu: &UnixStream) -> Result<HandedOver, MigrationError> {
        let mut state = lock(&self.state);
        if matches!(*state, State::Running) {
            self.replace(&mut state, State::Complete(tree.clone(), None));
        }
        loop {
            match &*state {
                State::HandedOver => return Ok(HandedOver(tree)),
                State::Kept => return Err(MigrationError::Kept),
                State::Running | State::Complete(..) => {}
            }
            // Seen under the lock: CRIU's end and the decision cannot both come first.
            if sys::is_hung_up(criu) {
                self.replace(&mut state, State::Kept);
                return Err(MigrationError::Closed);
            }
            state = wait_timeout(&self.changed, state, POLL_INTERVAL);
        }
    }

    /// Whether the tree is a container.
    pub(super) fn is_container(&self) -> bool {
        self.is_container
    }

    /// The dump of the tree begins, and the tree runs still: notes which of its processes somebody has stopped.
    pub(super) fn note_stopped(&self, tree: &[Process]) {
        let stopped = tree.iter().copied().filter(Process::is_stopped_by_signal).collect();
        // The first dump counts, and there is no other.
        let _ = self.stopped.set(stopped);
    }

    fn stopped(&self) -> &[Process] {
        self.stopped.get().map_or(&[], Vec::as_slice)
    }

    /// Undoes SIGSTOP, but not for what had been stopped before.
    fn let_go_on(&self, tree: &[Process]) {
        tree.iter().filter(|it| !self.stopped().contains(it)).for_each(Process::go_on);
    }

    /// Notes, once, that CRIU has let go of a container, which stands still.
    fn note_standstill(&self, state: &mut State) {
        if let State::Complete(tree, standstill @ None) = state
            && self.is_container
        {
            *standstill = Standstill::of(tree);
        }
    }

    /// The dump of the tree has ended: the tree goes on here, unless it was handed over, or is a container that stands still.
    pub(super) fn dump_ends(&self) {
        let mut state = lock(&self.state);
        if matches!(*state, State::Running) || !self.is_container && matches!(*state, State::Complete(..)) {
            self.replace(&mut state, State::Kept);
        }
    }

    /// The tree goes on here, unless it was handed over.
    fn keep(&self) {
        let mut state = lock(&self.state);
        if let (State::Complete(tree, _), true) = (&*state, self.is_container) {
            self.let_go_on(tree);
        }
        if matches!(*state, State::Running | State::Complete(..)) {
            self.replace(&mut state, State::Kept);
        }
    }

    fn replace(&self, state: &mut State, next: State) {
        transition::replace(&format_args!("migration {}", self.name), state, next);
        self.changed.notify_all();
    }
}

/// A tree that goes on elsewhere. What is left of it when this is dropped is killed.
#[derive(Debug)]
pub(super) struct HandedOver(Vec<Process>);

impl Drop for HandedOver {
    fn drop(&mut self) {
        // The root last: it may be the first process of a pid namespace, or wait for its children.
        self.0.iter().rev().for_each(Process::kill);
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use tempfile::TempDir;

    use super::*;

    const PTRACE_SEIZE: libc::c_uint = 0x4206;

    /// A process that ends with the test.
    struct Sleeper(Child);

    impl Sleeper {
        fn new() -> Self {
            Self(Command::new("sleep").arg("1000").spawn().unwrap())
        }

        /// Traced by this thread, as by CRIU.
        fn traced() -> Self {
            let sleeper = Self::new();
            sleeper.ptrace(PTRACE_SEIZE);
            sleeper.ptrace(libc::PTRACE_INTERRUPT);
            sleeper
        }

        /// CRIU lets go of it.
        fn let_go(&self) {
            while !std::fs::read_to_string(format!("/proc/{}/status", self.0.id()))
                .unwrap()
                .contains("t (tracing stop)")
            {
                std::thread::yield_now();
            }
            self.ptrace(libc::PTRACE_DETACH);
        }

        fn ptrace(&self, request: libc::c_uint) {
            // SAFETY: these requests read and write no memory; the process is a child of the test.
            let done = unsafe { libc::ptrace(request, self.0.id() as i32, 0_usize, 0_usize) };
            assert_eq!(done, 0, "{}", io::Error::last_os_error());
        }

        fn process(&self) -> Process {
            Process::with_pid(self.0.id() as i32).unwrap()
        }

        fn is_killed(&mut self) -> bool {
            use std::os::unix::process::ExitStatusExt;
            self.0.wait().unwrap().signal() == Some(libc::SIGKILL)
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    fn is_stopped(process: Process) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap_or_default();
        status.contains("T (stopped)")
    }

    fn until_complete(migration: &Migration) {
        while !matches!(*lock(&migration.state), State::Complete(..)) {
            std::thread::yield_now();
        }
    }

    fn until_it_runs(process: Process) {
        while is_stopped(process) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn the_table_above_is_the_list_of_transitions() {
        assert_eq!(transition::table(include_str!("mod.rs"), "a migration"), transition::list::<StateName>());
    }

    #[test]
    fn a_tree_that_is_handed_over_stops_before_that_is_known_and_is_killed_after_it() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let mut sleeper = Sleeper::traced();
        let process = sleeper.process();
        let (ours, _criu) = UnixStream::pair().unwrap();
        let guard = migrations.begin("a", process, false).unwrap();
        assert_eq!(migrations.state("a"), MigrationState::Undecided);
        assert!(matches!(guard.hand_over(), Err(MigrationError::NotComplete)));
        let migration = migrations.of(process.pid).unwrap();
        std::thread::scope(|scope| {
            let dump = scope.spawn(|| migration.wait(vec![process], &ours));
            while guard.hand_over().is_err() {
                std::thread::yield_now();
            }
            assert_eq!(migrations.state("a"), MigrationState::HandedOver);
            let handed_over = dump.join().unwrap().unwrap();
            // CRIU dies.
            sleeper.let_go();
            while !is_stopped(process) {
                std::thread::yield_now();
            }
            drop(handed_over);
        });
        assert!(sleeper.is_killed());
        drop(guard);
        assert_eq!(migrations.state("a"), MigrationState::HandedOver);
        assert_eq!(Migrations::open(dir.path()).state("a"), MigrationState::HandedOver);
    }

    #[test]
    fn a_tree_goes_on_here_when_its_command_or_its_criu_ends_first() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let sleeper = Sleeper::new();
        let (ours, criu) = UnixStream::pair().unwrap();
        let guard = migrations.begin("command", sleeper.process(), false).unwrap();
        let migration = migrations.of(sleeper.process().pid).unwrap();
        drop(guard);
        assert!(matches!(migration.wait(vec![sleeper.process()], &ours), Err(MigrationError::Kept)));
        assert_eq!(migrations.state("command"), MigrationState::Kept);
        let guard = migrations.begin("criu", sleeper.process(), false).unwrap();
        let migration = migrations.of(sleeper.process().pid).unwrap();
        drop(criu);
        assert!(matches!(migration.wait(vec![sleeper.process()], &ours), Err(MigrationError::Closed)));
        assert!(matches!(guard.hand_over(), Err(MigrationError::Closed)));
        drop(guard);
        assert_eq!(migrations.state("criu"), MigrationState::Kept);
        assert!(sleeper.process().is_alive() && !is_stopped(sleeper.process()));
    }

    #[test]
    fn a_tree_that_criu_has_let_go_of_is_not_handed_over() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let sleeper = Sleeper::traced();
        let (ours, _criu) = UnixStream::pair().unwrap();
        let guard = migrations.begin("a", sleeper.process(), false).unwrap();
        let migration = migrations.of(sleeper.process().pid).unwrap();
        std::thread::scope(|scope| {
            let dump = scope.spawn(|| migration.wait(vec![sleeper.process()], &ours));
            until_complete(&migration);
            sleeper.let_go();
            assert!(matches!(guard.hand_over(), Err(MigrationError::Closed)));
            assert!(matches!(dump.join().unwrap(), Err(MigrationError::Kept)));
        });
        until_it_runs(sleeper.process());
        assert_eq!(migrations.state("a"), MigrationState::Kept);
    }

    #[test]
    fn a_decision_that_cannot_be_recorded_is_none() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let sleeper = Sleeper::traced();
        let (ours, _criu) = UnixStream::pair().unwrap();
        let guard = migrations.begin("a", sleeper.process(), false).unwrap();
        let migration = migrations.of(sleeper.process().pid).unwrap();
        std::thread::scope(|scope| {
            let dump = scope.spawn(|| migration.wait(vec![sleeper.process()], &ours));
            until_complete(&migration);
            // A folder in the place of the file that is written.
            std::fs::create_dir(dir.path().join("migrations/a.new")).unwrap();
            assert!(matches!(guard.hand_over(), Err(MigrationError::Record(_))));
            std::fs::remove_dir(dir.path().join("migrations/a.new")).unwrap();
            assert_eq!(migrations.state("a"), MigrationState::Undecided);
            drop(guard);
            assert!(matches!(dump.join().unwrap(), Err(MigrationError::Kept)));
            sleeper.let_go();
        });
        until_it_runs(sleeper.process());
    }

    #[test]
    fn the_next_daemon_keeps_what_was_undecided_and_kills_what_was_handed_over() {
        let dir = TempDir::new().unwrap();
        let before = Records::open(dir.path(), DEPARTURES);
        let (mut gone, here) = (Sleeper::new(), Sleeper::new());
        before.write("gone", Decision::HandedOver, &[gone.process()]).unwrap();
        before.write("here", Decision::Undecided, &[here.process()]).unwrap();
        let migrations = Migrations::open(dir.path());
        assert!(gone.is_killed());
        assert!(here.process().is_alive());
        let states = ["gone", "here", "never"].map(|name| migrations.state(name));
        assert_eq!(states, [MigrationState::HandedOver, MigrationState::Kept, MigrationState::Unknown]);
        for name in ["here", "", "../a", &"a".repeat(65)] {
            assert!(migrations.begin(name, here.process(), false).is_err(), "{name}");
        }
    }

    /// A container that its dump has left, and that stands still.
    fn container(migrations: &Migrations) -> (Sleeper, MigrationGuard<'_>) {
        let sleeper = Sleeper::traced();
        let guard = migrations.begin("a", sleeper.process(), true).unwrap();
        let migration = migrations.of(sleeper.process().pid).unwrap();
        assert!(matches!(guard.hand_over(), Err(MigrationError::NotComplete)));
        migrations.stand_still(&migration, vec![sleeper.process()]).unwrap();
        sleeper.let_go();
        migration.dump_ends();
        while !is_stopped(sleeper.process()) {
            std::thread::yield_now();
        }
        guard.looks();
        assert_eq!(migrations.state("a"), MigrationState::Undecided);
        (sleeper, guard)
    }

    #[test]
    fn a_container_stands_still_after_its_dump_until_it_is_kept() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let (sleeper, guard) = container(&migrations);
        drop(guard);
        until_it_runs(sleeper.process());
        assert_eq!(migrations.state("a"), MigrationState::Kept);
    }

    #[test]
    fn a_container_that_is_handed_over_stands_still_whatever_daemon_starts() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let (sleeper, guard) = container(&migrations);
        guard.hand_over().unwrap();
        drop(guard);
        assert_eq!(Migrations::open(dir.path()).state("a"), MigrationState::HandedOver);
        assert!(is_stopped(sleeper.process()));
    }

    #[test]
    fn a_container_that_was_handed_over_goes_on_here_if_somebody_says_so() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let (sleeper, guard) = container(&migrations);
        guard.hand_over().unwrap();
        assert!(matches!(migrations.taken_back("a"), Err(NotTakenBack::GoesOn(_))));
        drop(guard);
        let gone = Sleeper::new();
        migrations.records.write("gone", Decision::HandedOver, &[gone.process()]).unwrap();
        assert!(matches!(migrations.taken_back("gone"), Err(NotTakenBack::Killed(_))));
        assert!(matches!(migrations.taken_back("never"), Err(NotTakenBack::Unknown(_))));
        assert!(is_stopped(sleeper.process()));
        for _ in 0..2 {
            migrations.taken_back("a").unwrap();
            until_it_runs(sleeper.process());
            assert_eq!(migrations.state("a"), MigrationState::Kept);
        }
        assert_eq!(Migrations::open(dir.path()).state("a"), MigrationState::Kept);
    }

    #[test]
    fn the_next_daemon_lets_a_container_go_on_about_which_nothing_was_decided() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let (sleeper, guard) = container(&migrations);
        // The daemon dies.
        std::mem::forget(guard);
        assert_eq!(Migrations::open(dir.path()).state("a"), MigrationState::Kept);
        until_it_runs(sleeper.process());
    }

    #[test]
    fn a_container_that_somebody_lets_run_is_not_handed_over() {
        for stops_again in [false, true] {
            let dir = TempDir::new().unwrap();
            let migrations = Migrations::open(dir.path());
            let (sleeper, guard) = container(&migrations);
            let process = sleeper.process();
            process.go_on();
            until_it_runs(process);
            if stops_again {
                process.stop();
                while !is_stopped(process) {
                    std::thread::yield_now();
                }
            }
            assert!(matches!(guard.hand_over(), Err(MigrationError::HasRun)), "{stops_again}");
            until_it_runs(process);
            drop(guard);
            assert_eq!(migrations.state("a"), MigrationState::Kept);
        }
    }

    #[test]
    fn what_somebody_had_stopped_before_stays_so() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        for next_daemon in [false, true] {
            let (runs, stopped) = (Sleeper::traced(), Sleeper::new());
            let (running, stops) = (runs.process(), stopped.process());
            stops.stop();
            while !is_stopped(stops) {
                std::thread::yield_now();
            }
            let name = if next_daemon { "a" } else { "b" };
            let guard = migrations.begin(name, running, true).unwrap();
            let migration = migrations.of(running.pid).unwrap();
            migration.note_stopped(&[running, stops]);
            stopped.ptrace(PTRACE_SEIZE);
            stopped.ptrace(libc::PTRACE_INTERRUPT);
            migrations.stand_still(&migration, vec![running, stops]).unwrap();
            stopped.let_go();
            runs.let_go();
            while !(is_stopped(stops) && is_stopped(running)) {
                std::thread::yield_now();
            }
            if next_daemon {
                std::mem::forget(guard);
                Migrations::open(dir.path());
            } else {
                drop(guard);
            }
            until_it_runs(running);
            assert!(is_stopped(stops), "{next_daemon}");
        }
    }

    #[test]
    fn a_container_whose_decision_cannot_be_recorded_goes_on_at_once() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let (sleeper, guard) = container(&migrations);
        std::fs::create_dir(dir.path().join("migrations/a.new")).unwrap();
        assert!(matches!(guard.hand_over(), Err(MigrationError::Record(_))));
        until_it_runs(sleeper.process());
        assert_eq!(migrations.state("a"), MigrationState::Kept);
        std::fs::remove_dir(dir.path().join("migrations/a.new")).unwrap();
        drop(guard);
        assert_eq!(Migrations::open(dir.path()).state("a"), MigrationState::Kept);
    }

    #[test]
    fn a_container_that_has_run_since_its_dump_is_not_handed_over() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let (sleeper, guard) = container(&migrations);
        sleeper.process().kill();
        while sleeper.process().is_alive() {
            std::thread::yield_now();
        }
        assert!(matches!(guard.hand_over(), Err(MigrationError::HasRun)));
        assert_eq!(migrations.state("a"), MigrationState::Kept);
        drop(guard);
        let running = Sleeper::new();
        let guard = migrations.begin("b", running.process(), true).unwrap();
        let migration = migrations.of(running.process().pid).unwrap();
        let stands_still = migrations.stand_still(&migration, vec![running.process()]);
        assert!(matches!(stands_still, Err(MigrationError::HasRun)));
        until_it_runs(running.process());
        drop(guard);
    }

    #[test]
    fn a_tree_that_has_come_here_runs_once() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let mut sleeper = Sleeper::new();
        assert_eq!(migrations.arrival("a"), None);
        migrations.arrives("a", &[sleeper.process()], false).unwrap();
        assert_eq!(migrations.arrival("a"), Some(true));
        for migrations in [migrations, Migrations::open(dir.path())] {
            for again in [false, true] {
                let arrives = migrations.arrives("a", &[sleeper.process()], again);
                assert!(matches!(arrives, Err(ArrivalError::Again(_))), "{again}");
            }
            assert_eq!(migrations.state("a"), MigrationState::Unknown);
        }
        sleeper.process().kill();
        assert!(sleeper.is_killed());
        let migrations = Migrations::open(dir.path());
        assert_eq!(migrations.arrival("a"), Some(false));
        let second = Sleeper::new();
        assert!(migrations.arrives("a", &[second.process()], false).is_err());
        migrations.arrives("a", &[second.process()], true).unwrap();
        assert_eq!(migrations.arrival("a"), Some(true));
    }
}
