//! A process tree that goes on elsewhere: the daemon of its host decides once whether it goes on here or there.
//!
//! ```text
//!   rekindle migrate ── Migrate ──► a migration ◄── the dump of the tree: its image is durable, and CRIU waits
//!                    ── HandOver ─► decided: stopped, recorded, killed ──► the dump ends
//! ```
//!
//! | from | to | a migration |
//! |---|---|---|
//! | `Running` | `Complete` | the image is durable, and the tree is frozen |
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

mod records;
mod serve;

use std::io;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rekindle_ctx_worker::transition::{self, machine};
use rekindle_wire::control::{Failing, FailureKind, MigrationState};
use thiserror::Error;
use tracing::{info, warn};

use self::records::{Decision, Records};
pub(super) use self::serve::serve;
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
    #[error("cannot record that it was handed over, so it goes on here: {0}")]
    Record(io::Error),
    #[error("no process of the tree uses a GPU through Rekindle: dump and restore it with CRIU alone")]
    NoClients,
}

impl Failing for MigrationError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Kept | Self::Closed => FailureKind::GivenUp,
            Self::LeftRunning | Self::NotComplete | Self::NoClients => FailureKind::Refused,
            Self::Record(error) => Failing::kind(error),
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
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
enum State {
    Running,
    Complete(Vec<Process>),
    Kept,
    HandedOver,
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
        records.kill_handed_over();
        Self { going_on: Mutex::default(), records, arrivals: Mutex::new(Records::open(state_dir, ARRIVALS)) }
    }

    /// The tree of a migration to this host is about to run: records that before it does. A tree runs once.
    pub(super) fn arrives(&self, name: &str, processes: &[Process]) -> Result<(), ArrivalError> {
        let arrivals = lock(&self.arrivals);
        match (records::is_name(name), arrivals.read(name)) {
            (false, _) => Err(ArrivalError::Name),
            (_, Some(_)) => Err(ArrivalError::Again(name.to_owned())),
            (true, None) => arrivals.write(name, Decision::Arrived, processes).map_err(ArrivalError::Record),
        }
    }

    /// Whether a tree has come to this host and was let run: none if not, otherwise whether one of its processes lives.
    pub(super) fn arrival(&self, name: &str) -> Option<bool> {
        lock(&self.arrivals).read(name).map(|it| it.processes.iter().any(Process::is_alive))
    }

    /// Begins a migration, which lasts until the result is dropped.
    pub(super) fn begin(&self, name: &str, root: Process) -> Result<MigrationGuard<'_>, NoMigration> {
        if !records::is_name(name) {
            return Err(NoMigration::Name);
        }
        let mut going_on = lock(&self.going_on);
        if going_on.iter().any(|it| it.root == root) {
            return Err(NoMigration::Taken(root.pid));
        }
        if self.records.read(name).is_some() {
            return Err(NoMigration::Known);
        }
        self.records.write(name, Decision::Undecided, &[root]).map_err(NoMigration::Record)?;
        let migration =
            Migration { name: name.to_owned(), root, state: Mutex::new(State::Running), changed: Condvar::new() };
        let migration = Arc::new(migration);
        going_on.push(Arc::clone(&migration));
        Ok(MigrationGuard { migrations: self, migration })
    }

    /// The migration of a tree, for its dump, if it is migrated.
    pub(super) fn of(&self, root: i32) -> Option<Arc<Migration>> {
        lock(&self.going_on).iter().find(|it| it.root.pid == root).map(Arc::clone)
    }

    /// What has become of a migration.
    pub(super) fn state(&self, name: &str) -> MigrationState {
        // While it goes on, its own state is the newest.
        if let Some(migration) = lock(&self.going_on).iter().find(|it| it.name == name) {
            return match &*lock(&migration.state) {
                State::Running | State::Complete(_) => MigrationState::Undecided,
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
    /// Hands the tree over: from now on it never goes on here, whatever happens to this daemon or to CRIU.
    pub(super) fn hand_over(&self) -> Result<(), MigrationError> {
        let Migration { name, state, .. } = &*self.migration;
        // The dump cannot end meanwhile, since it would have to take the lock.
        let mut state = lock(state);
        let tree = match &*state {
            State::Complete(tree) => tree,
            State::HandedOver => return Ok(()),
            State::Kept => return Err(MigrationError::Closed),
            State::Running => return Err(MigrationError::NotComplete),
        };
        tree.iter().for_each(Process::stop);
        if !tree.iter().all(Process::is_traced) {
            tree.iter().for_each(Process::go_on);
            self.migration.replace(&mut state, State::Kept);
            return Err(MigrationError::Closed);
        }
        if let Err(error) = self.migrations.records.write(name, Decision::HandedOver, tree) {
            // What was written may be there all the same, and would be believed.
            self.migrations.records.withdraw(name);
            tree.iter().for_each(Process::go_on);
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
            self.replace(&mut state, State::Complete(tree.clone()));
        }
        loop {
            match &*state {
                State::HandedOver => return Ok(HandedOver(tree)),
                State::Kept => return Err(MigrationError::Kept),
                State::Running | State::Complete(_) => {}
            }
            // Seen under the lock: CRIU's end and the decision cannot both come first.
            if sys::is_hung_up(criu) {
                self.replace(&mut state, State::Kept);
                return Err(MigrationError::Closed);
            }
            state = wait_timeout(&self.changed, state, POLL_INTERVAL);
        }
    }

    /// The tree goes on here, unless it was handed over.
    pub(super) fn keep(&self) {
        let mut state = lock(&self.state);
        if matches!(*state, State::Running | State::Complete(_)) {
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
        while !matches!(*lock(&migration.state), State::Complete(_)) {
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
        let guard = migrations.begin("a", process).unwrap();
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
        let guard = migrations.begin("command", sleeper.process()).unwrap();
        let migration = migrations.of(sleeper.process().pid).unwrap();
        drop(guard);
        assert!(matches!(migration.wait(vec![sleeper.process()], &ours), Err(MigrationError::Kept)));
        assert_eq!(migrations.state("command"), MigrationState::Kept);
        let guard = migrations.begin("criu", sleeper.process()).unwrap();
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
        let guard = migrations.begin("a", sleeper.process()).unwrap();
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
        let guard = migrations.begin("a", sleeper.process()).unwrap();
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
            assert!(migrations.begin(name, here.process()).is_err(), "{name}");
        }
    }

    #[test]
    fn a_tree_that_has_come_here_runs_once() {
        let dir = TempDir::new().unwrap();
        let migrations = Migrations::open(dir.path());
        let mut sleeper = Sleeper::new();
        assert_eq!(migrations.arrival("a"), None);
        migrations.arrives("a", &[sleeper.process()]).unwrap();
        assert_eq!(migrations.arrival("a"), Some(true));
        for migrations in [migrations, Migrations::open(dir.path())] {
            assert!(matches!(migrations.arrives("a", &[sleeper.process()]), Err(ArrivalError::Again(_))));
            assert_eq!(migrations.state("a"), MigrationState::Unknown);
        }
        sleeper.process().kill();
        assert!(sleeper.is_killed());
        assert_eq!(Migrations::open(dir.path()).arrival("a"), Some(false));
    }
}
