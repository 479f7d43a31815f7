//! `rekindle migrate`: programs that move to another host while they run.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, ensure};
use rekindle_e2e::app::{Identity, undisturbed};
use rekindle_e2e::elsewhere::Server;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::tls::Listener;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Elsewhere, Node, Result, pairs, process, stage, until};
use serde_json::Value;

pub(super) const ARGUMENTS: [&str; 4] = ["--iterations", "1500", "--sleep-us", "2000"];

/// Moves a program from a host to another by `rekindle migrate`.
fn migrate(here: &Node, pid: i32, there: &Elsewhere, more: &[&str]) -> Result<Output> {
    let words = arguments(here, pid, &there.via()?, more)?;
    here.rekindle(&words.iter().map(OsStr::new).collect::<Vec<_>>())
}

/// Moves it back.
fn migrate_back(there: &Elsewhere, pid: i32, here: &Node, server: &Server) -> Result<Output> {
    let words = arguments(here, pid, &server.via()?, &[])?;
    there.rekindle(&words.iter().map(OsStr::new).collect::<Vec<_>>())
}

fn arguments(here: &Node, pid: i32, via: &str, more: &[&str]) -> Result<Vec<String>> {
    let words = ["migrate", &pid.to_string(), "there", "--json"].map(str::to_owned);
    let more = more.iter().map(|it| (*it).to_owned());
    Ok(words.into_iter().chain(options(here, via)?).chain(more).collect())
}

/// The options by which the other host is reached.
pub(super) fn options(here: &Node, via: &str) -> Result<Vec<String>> {
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    let (out, into, rekindle) = (here.path("moves/out"), here.path("moves/in"), stage::program("rekindle")?);
    let words =
        [("--via", via.to_owned()), ("--rekindle", text(rekindle)), ("--dir", text(out)), ("--dir-there", text(into))];
    Ok(words.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect())
}

/// The report of a migration that has succeeded.
pub(super) fn report(output: &Output) -> Result<Value> {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.code() == Some(0), "{} {out} {err}", output.status);
    Ok(serde_json::from_str(&out)?)
}

/// Waits until a program that has moved here ends, and returns its output.
pub(super) fn finish_elsewhere(app: App) -> Result<String> {
    app.lift();
    until("the program ends on the other host", || Ok(process::is_gone(app.pid()).then_some(())))?;
    app.output()
}

/// The program, which was handed over: all of it is gone here.
pub(super) fn handed_over(app: App) -> Result<Identity> {
    let tree = process::tree(app.pid());
    app.was_killed(&tree)
}

/// A report tells for how long the program stood still and for what, and what was sent meanwhile.
pub(super) fn tells_the_pause(said: &Value) -> Result {
    let parts =
        ["dump_ms", "memory_ms", "send_ms", "restore_ms", "hand_over_ms"].map(|part| said["pause"][part].as_u64());
    let sum = parts.iter().copied().sum::<Option<u64>>();
    ensure!(sum.is_some() && sum <= said["pause_ms"].as_u64() && parts[3] > Some(0), "{said}");
    ensure!(said["last_sent"].as_u64() > Some(0), "{said}");
    Ok(())
}

#[test]
fn a_program_moves_to_another_host_and_ends_there_as_it_would_have_here() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let here = Node::start()?;
    let there = Elsewhere::beside(&here)?;
    let app = here.run("globals", &ARGUMENTS)?;
    app.reaches(300)?;
    let said = report(&migrate(&here, app.pid(), &there, &[])?)?;
    assert_eq!((&said["moved"], &said["host"]), (&true.into(), &"there".into()), "{said}");
    tells_the_pause(&said)?;
    // Its own memory was sent while it ran, and most of that not again.
    let own = said["memory"][0]["sent"].as_u64();
    ensure!(own > said["last_sent"].as_u64() && said["unchanged"].as_u64() > Some(0), "{said}");
    let identity = handed_over(app)?;
    let app = there.app(&identity)?;
    assert!(app.progress()? >= 300);
    assert_eq!(finish_elsewhere(app)?, expected);
    there.finish()?;
    here.finish()
}

/// A file of CRIU's configuration that has the server fail which waits for somebody to ask for pages.
fn failing(here: &Node) -> Result<PathBuf> {
    let (script, config) = (here.fresh("script"), here.fresh("config"));
    stage::write_script(&script, "#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" != status-ready ]\n")?;
    fs::write(&config, format!("action-script {}\n", script.display()))?;
    Ok(config)
}

#[test]
fn a_program_goes_on_here_where_criu_fails_after_it_has_written_all_but_pages() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let here = Node::start()?;
    let there = Elsewhere::beside(&here)?;
    let app = here.run("globals", &ARGUMENTS)?;
    app.reaches(300)?;
    let words = arguments(&here, app.pid(), &there.via()?, &[])?;
    let mut command = Command::new(stage::program("rekindle")?);
    stage::clean_environment(&mut command);
    command.args(words).env("REKINDLE_SOCKET", here.socket()).env("CRIU_CONFIG_FILE", failing(&here)?);
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1) && said.contains("cannot be dumped"), "{} {said}", output.status);
    app.advances()?;
    report(&migrate(&here, app.pid(), &there, &[])?)?;
    let app = there.app(&handed_over(app)?)?;
    assert_eq!(finish_elsewhere(app)?, expected);
    there.finish()?;
    here.finish()
}

/// Migrates until the numbers of the tree are free at the other host: a process that lives for a moment there, as a new worker's, may have
/// one of them. The program goes on where it is until then.
fn moves(migrate: impl Fn() -> Result<Output>) -> Result {
    until("the numbers are free", || {
        let output = migrate()?;
        let in_use = !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("File exists");
        if in_use { Ok(None) } else { report(&output).map(Some) }
    })?;
    Ok(())
}

/// Moves a program there and back. It goes on at each host; `look` is called while it is there.
fn to_and_fro(here: &Node, app: App, there: &Elsewhere, server: &Server, look: impl FnOnce() -> Result) -> Result<App> {
    moves(|| migrate(here, app.pid(), there, &[]))?;
    let identity = handed_over(app)?;
    let moved = there.app(&identity)?;
    moved.advances()?;
    look()?;
    let tree = process::tree(moved.pid());
    moves(|| {
        let numbers = there.numbers(moved.pid());
        let output = migrate_back(there, identity.pid, here, server)?;
        // This process has inherited what was made of the tree before one of its numbers was found to be in use.
        if !output.status.success() {
            numbers.into_iter().filter_map(process::reap).for_each(drop);
        }
        Ok(output)
    })?;
    tree.iter().try_for_each(|pid| process::wait_gone("a process of a tree that has moved", *pid))?;
    std::mem::forget(moved);
    let app = App::adopt(identity);
    app.advances()?;
    Ok(app)
}

#[test]
fn a_program_moves_to_and_fro() -> Result {
    // Without pauses here. It waits well before its end if the moves take long.
    let expected = undisturbed("globals", &["--iterations", "6000"])?;
    let here = Node::start()?;
    let (there, server) = (Elsewhere::beside(&here)?, Server::of(&here)?);
    let mut app = here.run_held("globals", &["--iterations", "6000", "--sleep-us", "2000"], Some(4500))?;
    for round in 1..=2 {
        app.reaches(round * 150)?;
        app = to_and_fro(&here, app, &there, &server, || Ok(()))?;
    }
    assert_eq!(app.finish()?, expected);
    drop(server);
    there.finish()?;
    here.finish()
}

/// A number in each line of a daemon's log with these words.
fn numbers(node: &Node, words: &str, name: &str) -> Result<Vec<u64>> {
    let log = fs::read_to_string(node.path("daemon.log"))?;
    let lines = log.lines().filter(|it| it.contains(words));
    let numbers = lines.filter_map(|it| it.split_once(name)?.1.split(' ').next()?.parse().ok());
    Ok(numbers.collect())
}

/// The bytes that each load of a daemon's workers has copied on the GPU.
fn copied(node: &Node) -> Result<Vec<u64>> {
    numbers(node, "phases of load", "copied=")
}

/// How many libraries each load of a daemon's workers has found loaded.
fn libraries_ahead(node: &Node) -> Result<Vec<u64>> {
    numbers(node, "libraries that are loaded, and those that are not", "ahead=")
}

/// Moves a program to and fro, which ends when a file exists, until a restore has copied at least so many bytes on the GPU, and one has found
/// so many of the program's libraries loaded. On a busy machine a dump may come sooner than a thread of the other host gets to its work.
fn moves_until_copied(program: &str, arguments: &[&str], bytes: u64, libraries: u64) -> Result {
    let here = Node::start()?;
    let (there, server) = (Elsewhere::beside(&here)?, Server::of(&here)?);
    let end = here.path("end");
    let until = end.display().to_string();
    let mut app = here.run(program, &[arguments, &["--sleep-us", "2000", "--until", &until]].concat())?;
    app.advances()?;
    let (mut moves, mut is_copied, mut is_loaded) = (0, false, false);
    while moves < 3 || (!(is_copied && is_loaded) && moves < 12) {
        moves += 1;
        app = to_and_fro(&here, app, &there, &server, || {
            // The last load is the restore's.
            is_copied |= copied(there.node())?.last().is_some_and(|it| *it >= bytes);
            is_loaded |= libraries_ahead(there.node())?.last().is_some_and(|it| *it >= libraries);
            Ok(())
        })?;
    }
    ensure!(is_copied, "{:?}", copied(there.node())?);
    ensure!(is_loaded, "{:?}", libraries_ahead(there.node())?);
    fs::write(&end, "")?;
    assert_eq!(app.finish()?, format!("{program} ok\n"));
    drop(server);
    there.finish()?;
    here.finish()
}

#[test]
fn memory_that_does_not_change_is_on_the_other_gpu_before_the_program_stands_still() -> Result {
    moves_until_copied("steady", &["--ballast-kib", "16384"], 16 << 20, 1)
}

/// Its pieces are found by their hashes in an earlier round, where they were at other addresses.
#[test]
fn a_program_whose_content_wanders_through_its_memory_moves_as_well() -> Result {
    // It has no kernels.
    moves_until_copied("shuffled", &["--buffers", "12"], 1, 0)
}

/// A program that starts others, moved again and again. It runs until the test ends it.
#[test]
fn a_program_and_its_children_move_to_and_fro_at_random_moments() -> Result {
    let mut hosts = Hosts::start_with(&["--fork-steps", "3"])?;
    let mut random = Random::new();
    for _ in 0..2 * repetitions() {
        std::thread::sleep(Duration::from_millis(random.below(50)));
        let app = hosts.app.take().context("the program is here")?;
        hosts.app = Some(to_and_fro(&hosts.here, app, &hosts.there, &hosts.server, || Ok(()))?);
    }
    hosts.finish()
}

/// What ends, at a moment of the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Connection,
    Command,
    CriuHere,
    DaemonHere,
    Receiver,
    CriuThere,
    DaemonThere,
}

const VICTIMS: [Victim; 7] = [
    Victim::Connection,
    Victim::Command,
    Victim::CriuHere,
    Victim::DaemonHere,
    Victim::Receiver,
    Victim::CriuThere,
    Victim::DaemonThere,
];

/// The messages (`cli/src/migrate/talk.rs`) before and after which that happens: the first and the last image, and the others.
const MESSAGES: [&str; 7] = ["\"Ready\"", "\"0\"", "\"last\"", "{\"Restore\"", "\"Held\"", "\"Own\"", "\"Running\""];

/// Where a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Here,
    There,
}

/// Two hosts, and a program that moves between them.
pub(super) struct Hosts {
    server: Server,
    pub(super) here: Node,
    pub(super) there: Elsewhere,
    /// The option `--via` by which a relay reaches the other host.
    via: String,
    /// The other host's name, and the options by which migrations are settled there.
    settles: (String, Vec<String>),
    /// What listens there for TLS, if that is how it is reached.
    listener: Option<Listener>,
    identity: Identity,
    /// The program, while it is here.
    app: Option<App>,
}

impl Hosts {
    pub(super) fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// With more arguments for the program.
    fn start_with(more: &[&str]) -> Result<Self> {
        let here = Node::start()?;
        let (there, server) = (Elsewhere::beside(&here)?, Server::of(&here)?);
        let end = here.path("end").display().to_string();
        let usual = ["--until", &end, "--ballast-kib", "3000", "--sleep-us", "2000"];
        let app = here.run("steady", &[&usual, more].concat())?;
        app.reaches(2)?;
        let via = there.via()?;
        let settles = ("there".to_owned(), options(&here, &via)?);
        let identity = app.identity().clone();
        Ok(Self { identity, server, here, there, via, settles, listener: None, app: Some(app) })
    }

    /// From now on the other host is reached by TLS: by this script, and by these options of the command.
    pub(super) fn by_tls(&mut self, way: &Path, listener: Listener, options: impl Fn(&Node, &Listener) -> Vec<String>) {
        self.via = way.display().to_string();
        self.settles = (listener.host().to_owned(), options(&self.here, &listener));
        self.listener = Some(listener);
    }

    /// Has the program end, which is here, and whose results must be right.
    pub(super) fn finish(mut self) -> Result {
        fs::write(self.here.path("end"), "")?;
        let app = self.app.take().context("the program is here")?;
        ensure!(app.finish()?.ends_with("steady ok\n"));
        drop((self.server, self.listener));
        self.there.finish()?;
        self.here.finish()
    }

    /// Runs `rekindle` here. What it says goes to a file: a connection may outlive it, and a pipe's end with it.
    fn run(&self, words: &[String]) -> Result<(ExitStatus, String)> {
        let said = self.here.path("said");
        let mut command = self.here.command(&stage::program("rekindle")?)?;
        let status = command.args(words).stdout(Stdio::null()).stderr(fs::File::create(&said)?).status()?;
        Ok((status, fs::read_to_string(said)?))
    }

    /// The shell command that ends a part.
    fn kill(&self, victim: Victim) -> Result<String> {
        let (pid, rekindle) = (self.identity.pid, stage::program("rekindle")?);
        let (rekindle, into) = (rekindle.display(), self.here.path("moves/in"));
        Ok(match victim {
            Victim::Connection => "cut".to_owned(),
            Victim::Command => format!("pkill -KILL -f '^{rekindle} migrate {pid} there'"),
            Victim::CriuHere => format!("pkill -KILL -f 'criu dump --tree {pid} '"),
            Victim::DaemonHere => format!("kill -KILL {}", self.here.daemon_pid()?),
            Victim::Receiver => format!("pkill -KILL -f '^{rekindle} migrate --receive --dir {}'", into.display()),
            Victim::CriuThere => format!("pkill -KILL -f 'criu restore .*{}'", into.display()),
            Victim::DaemonThere => format!("kill -KILL {}", self.there.node().daemon_pid()?),
        })
    }

    /// Starts a daemon again that was killed.
    fn heal(&mut self) -> Result {
        let (here, there) = (serves(&self.here)?, serves(self.there.node())?);
        if !here {
            self.here.kill_daemon()?;
            self.here.start_daemon(&[])?;
        }
        if !there {
            self.there.node_mut().kill_daemon()?;
            self.there.node_mut().start_daemon(&[])?;
        }
        // Either socket may be another file now.
        if here && there { Ok(()) } else { self.there.finds_daemon() }
    }

    /// Settles what migrations have left there, until nobody there waits for anything.
    fn settle(&self) -> Result {
        let into = self.here.path("moves/in");
        until("nobody waits for a migration to be settled", || {
            // What runs has a file of that name, and what has not all images is of no use to anybody.
            let left = fs::read_dir(&into)?.flatten().map(|it| it.path());
            let left: Vec<_> = left.filter(|it| it.join("restore").exists()).collect();
            for dir in &left {
                let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let (host, options) = &self.settles;
                let words = ["migrate".to_owned(), "--settle".to_owned(), name, host.clone()];
                let words: Vec<_> = words.into_iter().chain(options.clone()).collect();
                let (status, said) = self.run(&words)?;
                eprintln!("settled: {status} {said}");
            }
            let receivers =
                self.there.processes().into_iter().filter(|it| process::command_line(*it).contains("--receive"));
            Ok((left.is_empty() && receivers.count() == 0).then_some(()))
        })
    }

    /// Moves the program, over connections to which this happens (`tests/e2e/src/bin/relay.rs`), finds it on exactly one host, and
    /// brings it back. Returns the bytes that have passed.
    pub(super) fn migrate_while(&mut self, happens: &str) -> Result<u64> {
        let plan = self.here.path("plan");
        let passed = plan.with_extension("passed");
        fs::write(&plan, happens)?;
        fs::write(&passed, "0")?;
        let via = format!("{} {} {}", stage::helper("relay")?.display(), plan.display(), self.via);
        // One round: the conversation is always the same.
        let words = arguments(&self.here, self.identity.pid, &via, &["--pause-ms", "600000"])?;
        let (status, said) = self.run(&words)?;
        let case = format!("{happens}: {status}");
        until_true("it has happened", || Ok(fs::read_to_string(&plan)?.starts_with("over")))
            .with_context(|| format!("{case} {said}"))?;
        self.heal()?;
        self.settle()?;
        let place = self.is_on_one().with_context(|| format!("{case} {said}"))?;
        eprintln!("{case}, and it is {place:?}: {said}");
        ensure!(!status.success() || place == Place::There, "{case}: it has moved, and is here");
        self.here.wait_for_spare()?;
        Ok(fs::read_to_string(passed)?.trim().parse()?)
    }

    /// Finds out where the program is: on exactly one host, where it goes on. Brings it back if it is there.
    fn is_on_one(&mut self) -> Result<Place> {
        let app = self.app.take().context("the program was here")?;
        let there = self.there.process(app.pid());
        let runs_here = process_runs(app.pid());
        ensure!(runs_here != there.is_some(), "here: {runs_here}, there: {there:?}");
        if runs_here {
            app.advances()?;
            // A daemon that has just started may not know it yet.
            self.here.client(app.pid())?;
            self.app = Some(app);
            return Ok(Place::Here);
        }
        let identity = handed_over(app)?;
        let moved = self.there.app(&identity)?;
        moved.advances()?;
        let tree = process::tree(moved.pid());
        until("a daemon that has just started knows the program", || {
            let output = migrate_back(&self.there, identity.pid, &self.here, &self.server)?;
            // Refused: 3.
            if output.status.code() == Some(3) { Ok(None) } else { report(&output).map(Some) }
        })?;
        tree.iter().try_for_each(|pid| process::wait_gone("a process of a tree that has moved", *pid))?;
        std::mem::forget(moved);
        self.app = Some(App::adopt(identity));
        Ok(Place::There)
    }
}

/// Whether a daemon serves. One that was killed may take a while to end.
fn serves(node: &Node) -> Result<bool> {
    Ok(process_runs(node.daemon_pid()?) && node.status().is_ok())
}

/// Whether a process exists and has not ended.
fn process_runs(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|it| it.starts_with("State:") && !it.contains("zombie") && !it.contains("dead"))
}

#[test]
fn whatever_ends_at_whatever_moment_the_program_goes_on_on_exactly_one_host() -> Result {
    let all: Vec<_> = VICTIMS
        .into_iter()
        .flat_map(|victim| ["before", "after"].map(|when| (victim, when)))
        .flat_map(|(victim, when)| MESSAGES.map(|message| (victim, when, message)))
        .collect();
    let mut hosts = Hosts::start()?;
    for (victim, when, message) in pairs::cases(&all, |(victim, when, message)| [victim, when, message]) {
        let action = hosts.kill(victim)?;
        hosts.migrate_while(&format!("{when} {message} {action}"))?;
    }
    hosts.finish()
}

#[test]
fn a_connection_that_is_cut_at_any_moment_leaves_one_program() -> Result {
    let mut random = Random::new();
    let mut hosts = Hosts::start()?;
    let all = hosts.migrate_while("at 0 true")?;
    for _ in 0..4 * repetitions() {
        // Few bytes pass before the last ones, since content differs from time to time.
        hosts.migrate_while(&format!("at {} cut", random.below(all * 9 / 10)))?;
    }
    hosts.finish()
}
