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
    #[error("a process of the container has run or ended since its dump: it goes on here")]
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
        records.act_on_what_was_left();
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
        if self.records.read(name).is_some() {
            return Err(NoMigration::Known);
        }
        self.records.write(name, Decision::Undecided, &[root]).map_err(NoMigration::Record)?;
        let (name, state) = (name.to_owned(), Mutex::new(State::Running));
        let migration = Arc::new(Migration { name, root, is_container, state, changed: Condvar::new() });
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
            State::Complete(_) => return Ok(()),
            State::Kept | State::HandedOver => return Err(MigrationError::Kept),
        }
        let written = self.records.write_still(&migration.name, Decision::Undecided, &tree, true);
        written.map_err(MigrationError::Still)?;
        tree.iter().for_each(Process::stop);
        // Of what CRIU has let go of before, the image is no longer true.
        if !tree.iter().all(Process::is_traced) {
            tree.iter().for_each(Process::go_on);
            migration.replace(&mut state, State::Kept);
            return Err(MigrationError::HasRun);
        }
        migration.replace(&mut state, State::Complete(tree));
        Ok(())
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
        let Migration { name, is_container, state, .. } = &*self.migration;
        // The dump cannot end meanwhile, since it would have to take the lock.
        let mut state = lock(state);
        let tree = match &*state {
            State::Complete(tree) => tree,
            State::HandedOver => return Ok(()),
            State::Kept => return Err(MigrationError::Closed),
            State::Running => return Err(MigrationError::NotComplete),
        };
        tree.iter().for_each(Process::stop);
        let (stands_still, otherwise): (fn(&Process) -> bool, _) = match is_container {
            true => (|it| it.is_alive() && it.is_stopped(), MigrationError::HasRun),
            false => (Process::is_traced, MigrationError::Closed),
        };
        if !tree.iter().all(stands_still) {
            tree.iter().for_each(Process::go_on);
            self.migration.replace(&mut state, State::Kept);
            return Err(otherwise);
        }
        if let Err(error) = self.migrations.records.write_still(name, Decision::HandedOver, tree, *is_container) {
            // What was written may be there all the same, and would be believed.
            self.migrations.records.withdraw(name);
            if !is_container {
                tree.iter().for_each(Process::go_on);
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

    /// Whether the tree is a container.
    pub(super) fn is_container(&self) -> bool {
        self.is_container
    }

    /// The dump of the tree has ended: the tree goes on here, unless it was handed over, or is a container that stands still.
    pub(super) fn dump_ends(&self) {
        let mut state = lock(&self.state);
        if matches!(*state, State::Running) || !self.is_container && matches!(*state, State::Complete(_)) {
            self.replace(&mut state, State::Kept);
        }
    }

    /// The tree goes on here, unless it was handed over.
    fn keep(&self) {
        let mut state = lock(&self.state);
        if let (State::Complete(tree), true) = (&*state, self.is_container) {
            tree.iter().for_each(Process::go_on);
        }
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
