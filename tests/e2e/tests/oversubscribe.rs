//! Programs that need more GPU memory together than there is (`gpu.oversubscribe`): the daemon suspends those that are idle.

use std::fs;
use std::time::Duration;

use anyhow::ensure;
use rekindle_e2e::random::Random;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Node, Result, until};

use crate::suspend::{BALLAST, Steady, becomes, has_ended, resume, suspend};

/// A program that a test has stopped has been idle for long enough soon.
const SOON: &str = "[gpu]\noversubscribe = true\nidle_ms = 100\n";
/// A program that works is never idle for so long, on however busy a machine.
const LATE: &str = "[gpu]\noversubscribe = true\nidle_ms = 5000\n";

/// The memory of the only GPU that holds the ballast of one program, and that of two.
const OF_ONE: &str = "192M";
const OF_TWO: &str = "288M";

/// A host with one GPU, whose memory counts for all processes together.
struct Host {
    node: Node,
    machine: String,
    memory: &'static str,
}

impl Host {
    fn start(configuration: &str, memory: &'static str) -> Result<Self> {
        let mut node = Node::without_daemon()?;
        let machine = node.path("machine");
        fs::write(&machine, "")?;
        node.configure(configuration);
        let mut host = Self { node, machine: machine.to_string_lossy().into_owned(), memory };
        host.start_daemon()?;
        Ok(host)
    }

    fn start_daemon(&mut self) -> Result {
        let gpu = [("SIMGPU_MACHINE", &*self.machine), ("SIMGPU_MEMORY", self.memory), ("SIMGPU_DEVICES", "1")];
        self.node.start_daemon(&gpu)
    }

    /// A program that has its ballast on the GPU and is idle.
    fn idle(&self) -> Result<Steady> {
        let program = Steady::run(&self.node, &BALLAST)?;
        program.stop()?;
        Ok(program)
    }

    /// Starts a program that needs its ballast.
    fn begin(&self) -> Result<Steady> {
        let until = self.node.fresh("until");
        let arguments = ["--until", &*until.to_string_lossy(), "--sleep-us", "1000"];
        let app = self.node.run("steady", &[&arguments, &BALLAST[..]].concat())?;
        Ok(Steady { app, until })
    }

    fn state(&self, app: &App) -> Result<String> {
        Ok(self.node.client(app.pid())?.state)
    }

    fn log(&self) -> Result<String> {
        Ok(fs::read_to_string(self.node.path("daemon.log"))?)
    }
}

/// The program executes GPU commands: more than the step that it was stopped in.
fn works(app: &App) -> Result {
    app.reaches(app.progress()? + 2)
}

/// The program finds no memory.
fn has_no_memory(app: App) -> Result {
    let status = app.end()?;
    let errors = app.errors()?;
    ensure!(status.code() == Some(3) && errors.contains("cudaErrorMemoryAllocation"), "{status}: {errors}");
    Ok(())
}

#[test]
fn two_programs_that_need_one_and_a_half_gpus_take_turns() -> Result {
    let host = Host::start(SOON, OF_ONE)?;
    let first = host.idle()?;
    let second = Steady::run(&host.node, &BALLAST)?;
    let info = becomes(&host.node, &first.app, "suspended")?;
    assert_eq!(info.suspended_for, Some(format!("process {} (steady)", second.app.pid())));
    let listed = host.node.rekindle(&["ps".as_ref()])?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    ensure!(listed.contains(&format!("suspended: for process {} (steady)", second.app.pid())), "{listed}");
    for _ in 0..3 {
        second.stop()?;
        first.go_on()?;
        works(&first.app)?;
        becomes(&host.node, &second.app, "suspended")?;
        first.stop()?;
        second.go_on()?;
        works(&second.app)?;
        becomes(&host.node, &first.app, "suspended")?;
    }
    // Both have work now: the one that was suspended waits until the other has ended.
    first.go_on()?;
    works(&second.app)?;
    second.ends_well()?;
    works(&first.app)?;
    first.ends_well()?;
    host.node.finish()
}

#[test]
fn without_the_setting_a_program_that_finds_no_memory_is_out_of_memory() -> Result {
    let host = Host::start("", OF_ONE)?;
    let first = host.idle()?;
    has_no_memory(host.begin()?.app)?;
    assert_eq!(host.state(&first.app)?, "running");
    first.go_on()?;
    first.ends_well()?;
    host.node.finish()
}

#[test]
fn a_program_that_works_is_never_suspended() -> Result {
    let host = Host::start(LATE, OF_ONE)?;
    let first = Steady::run(&host.node, &BALLAST)?;
    has_no_memory(host.begin()?.app)?;
    first.app.advances()?;
    assert_eq!(host.state(&first.app)?, "running");
    let log = host.log()?;
    ensure!(log.contains("no other program has been idle for long enough"), "{log}");
    ensure!(!log.contains("suspended process"), "{log}");
    first.ends_well()?;
    host.node.finish()
}

#[test]
fn a_program_at_its_limit_gets_nothing_from_others() -> Result {
    let host = Host::start(&format!("{SOON}[limits]\ngpu_memory_mib = 64\n"), OF_ONE)?;
    let first = Steady::run(&host.node, &["--ballast-kib", "32768"])?;
    first.stop()?;
    has_no_memory(host.begin()?.app)?;
    assert_eq!(host.state(&first.app)?, "running");
    let log = host.log()?;
    ensure!(log.contains("memory of other programs would not help it"), "{log}");
    first.go_on()?;
    first.ends_well()?;
    host.node.finish()
}

#[test]
fn the_program_that_was_used_least_recently_goes_and_an_operator_has_one_back() -> Result {
    let host = Host::start(SOON, OF_TWO)?;
    let first = host.idle()?;
    let second = host.idle()?;
    let third = Steady::run(&host.node, &BALLAST)?;
    becomes(&host.node, &first.app, "suspended")?;
    assert_eq!(host.state(&second.app)?, "running");
    // The third one works.
    let resumed = resume(&host.node, first.app.pid())?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    ensure!(resumed.len() == 1 && resumed[0].bytes > 0, "{resumed:?}");
    becomes(&host.node, &second.app, "suspended")?;
    assert_eq!((host.state(&first.app)?.as_str(), host.state(&third.app)?.as_str()), ("running", "running"));
    third.ends_well()?;
    for program in [first, second] {
        program.go_on()?;
        program.ends_well()?;
    }
    host.node.finish()
}

#[test]
fn a_program_that_an_operator_holds_stays_suspended() -> Result {
    let host = Host::start(SOON, OF_ONE)?;
    let first = host.idle()?;
    let second = Steady::run(&host.node, &BALLAST)?;
    becomes(&host.node, &first.app, "suspended")?;
    // The daemon has suspended it for the second one; from now on an operator holds it.
    let held = suspend(&host.node, first.app.pid(), true)?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    ensure!(held.is_empty(), "{held:?}");
    let before = first.app.progress()?;
    first.go_on()?;
    second.ends_well()?;
    let third = host.idle()?;
    let info = host.node.client(first.app.pid())?;
    ensure!(info.suspended.is_some_and(|it| it.hold && !it.waits_for_room), "{info:?}");
    ensure!(first.app.progress()? <= before + 1);
    let resumed = resume(&host.node, first.app.pid())?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    ensure!(resumed.len() == 1, "{resumed:?}");
    first.app.advances()?;
    first.ends_well()?;
    third.go_on()?;
    third.ends_well()?;
    host.node.finish()
}

#[test]
fn a_daemon_makes_room_with_workers_that_it_has_taken_over() -> Result {
    let mut host = Host::start(SOON, OF_ONE)?;
    let first = host.idle()?;
    host.node.kill_daemon()?;
    host.start_daemon()?;
    // Its worker joins within a second.
    host.node.client(first.app.pid())?;
    let second = Steady::run(&host.node, &BALLAST)?;
    becomes(&host.node, &first.app, "suspended")?;
    second.ends_well()?;
    first.go_on()?;
    first.ends_well()?;
    host.node.finish()
}

/// The number of kills of each kind.
const KILLS: usize = 5;

/// Something dies a moment after a program began to need memory.
fn with_a_kill(configuration: &str, mut kill: impl FnMut(&mut Host, Steady, Steady) -> Result) -> Result {
    let mut host = Host::start(configuration, OF_ONE)?;
    let mut random = Random::new();
    for _ in 0..KILLS {
        let first = host.idle()?;
        let second = host.begin()?;
        host.node.client(second.app.pid())?;
        std::thread::sleep(Duration::from_millis(random.below(250)));
        kill(&mut host, first, second)?;
        until_true("all processes are gone", || Ok(host.node.clients()?.is_empty()))?;
    }
    host.node.finish()
}

#[test]
fn the_idle_program_is_killed_while_room_is_made() -> Result {
    with_a_kill(SOON, |_, first, second| {
        first.app.kill()?;
        second.app.reaches(5)?;
        second.ends_well()
    })
}

#[test]
fn the_program_that_needs_memory_is_killed_while_room_is_made() -> Result {
    with_a_kill(SOON, |_, first, second| {
        second.app.kill()?;
        first.go_on()?;
        first.app.advances()?;
        first.ends_well()
    })
}

#[test]
fn the_daemon_is_killed_while_room_is_made() -> Result {
    with_a_kill(SOON, |host, first, second| {
        host.node.kill_daemon()?;
        host.start_daemon()?;
        let goes_on = until("the program goes on, or is out of memory", || {
            Ok(if second.app.progress()? >= 5 { Some(true) } else { has_ended(&second.app).then_some(false) })
        })?;
        let Steady { app, until } = second;
        if goes_on {
            let second = Steady { app, until };
            second.stop()?;
            first.go_on()?;
            first.app.advances()?;
            first.ends_well()?;
            second.go_on()?;
            return second.ends_well();
        }
        has_no_memory(app)?;
        first.go_on()?;
        first.app.advances()?;
        first.ends_well()
    })
}
