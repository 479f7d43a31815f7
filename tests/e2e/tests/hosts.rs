//! `rekindle cut`: one checkpoint of programs on two hosts that talk over TCP. CRIU 4.1 cannot dump their connections on Linux 6.16 and
//! later.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use rekindle_e2e::app::Identity;
use rekindle_e2e::hosts::{HERE, Hosts, THERE};
use rekindle_e2e::tls::Listener;
use rekindle_e2e::{App, Result, network, pairs, process, stage, until};
use serde_json::Value;

const PORT: &str = "7400";
/// More turns than any test waits for.
const MANY: &str = "1000000";

/// What the two programs print undisturbed, without Rekindle, after so many turns.
fn directly(turns: &str, how: &[&str]) -> Result<[String; 2]> {
    let start = |words: &[&str]| -> Result<Child> {
        let mut command = Command::new(stage::app("talk")?);
        stage::clean_environment(&mut command);
        command.args(words).args(["--turns", turns]).args(how).env("LD_LIBRARY_PATH", stage::software_gpu()?);
        Ok(command.stdout(Stdio::piped()).spawn()?)
    };
    let mut listens = start(&["--listen", PORT])?;
    // If it ended, the other one would look for it for ever.
    let table = format!("/proc/{}/net/tcp", listens.id());
    let row = format!(":{:04X} 00000000:0000 0A", PORT.parse::<u16>()?);
    until("the program listens", || {
        ensure!(listens.try_wait()?.is_none(), "the program that listens has ended: is its port still in use?");
        Ok(fs::read_to_string(&table)?.contains(&row).then_some(()))
    })?;
    let connects = start(&["--connect", "127.0.0.1", "--port", PORT])?;
    let printed = |mut child: Child| -> Result<String> {
        let ended = until("a program ends that runs alone", || Ok(child.try_wait()?));
        if ended.is_err() {
            child.kill()?;
        }
        let output = child.wait_with_output()?;
        ensure!(ended?.success(), "alone it ended with {}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    };
    let connects = printed(connects);
    if connects.is_err() {
        listens.kill()?;
    }
    Ok([printed(listens)?, connects?])
}

/// The two programs, each of which is on a host.
struct Pair {
    here: App,
    there: App,
    /// The options that both have, besides those of every pair.
    how: Vec<&'static str>,
}

/// They go on for as long as the test needs them, and leave others time.
const SLOWLY: [&str; 2] = ["--sleep-us", "1000"];
/// Each turn has a connection of its own, without pauses.
const CONSTANTLY: [&str; 2] = ["--burst", MANY];
/// The same, with pauses that are longer than it takes to dump both.
const IN_BURSTS: [&str; 4] = ["--burst", "8", "--sleep-us", "1000000"];

impl Pair {
    /// Starts them. They go on until the test ends them.
    fn start(hosts: &Hosts) -> Result<Self> {
        Self::start_with(hosts, &SLOWLY)
    }

    /// The same, with these options.
    fn start_with(hosts: &Hosts, how: &[&'static str]) -> Result<Self> {
        let (end, address) = (end(hosts), network::HERE.to_string());
        let common = [&["--turns", MANY], how].concat();
        let listen = ["--listen", PORT, "--until", &end];
        let here = hosts.here.run("talk", &[&listen[..], &common].concat())?;
        let connect = ["--connect", &address, "--port", PORT];
        let there = hosts.there.run_held("talk", &[&connect[..], &common].concat(), None)?;
        let pair = Self { here, there, how: how.to_vec() };
        pair.here.reaches(10)?;
        pair.there.reaches(10)?;
        Ok(pair)
    }

    /// The words that name them.
    fn words(&self, hosts: &Hosts) -> Result<[String; 2]> {
        Ok([format!("{HERE}={}", self.here.pid()), format!("{THERE}={}", hosts.there.number(self.there.pid())?)])
    }

    /// Both go on. They do so together, since neither is far ahead of the other.
    fn advances(&self) -> Result {
        let now = self.here.progress()?.max(self.there.progress()?);
        for app in [&self.here, &self.there] {
            until("a program goes on", || Ok((app.progress()? > now).then_some(())))?;
        }
        Ok(())
    }

    /// As each host knows them.
    fn identities(&self, hosts: &Hosts) -> Result<[Identity; 2]> {
        let pid = hosts.there.number(self.there.pid())?;
        Ok([self.here.identity().clone(), Identity { pid, ..self.there.identity().clone() }])
    }

    /// Both have been restored.
    fn adopt(hosts: &Hosts, [here, there]: &[Identity; 2]) -> Result<Self> {
        Ok(Self { here: App::adopt(here.clone()), there: hosts.there.app(there)?, how: SLOWLY.to_vec() })
    }

    /// The same, with these options.
    fn with(self, how: &[&'static str]) -> Self {
        Self { how: how.to_vec(), ..self }
    }

    /// Both are killed, without a word to each other.
    fn kill(self) -> Result {
        self.here.kill()?;
        self.there.kill()
    }

    /// Both end, and print what they print undisturbed after as many turns.
    fn finish(self, hosts: &Hosts) -> Result {
        fs::write(end(hosts), "")?;
        let pid = self.there.pid();
        until("the program on the other host ends", || Ok(process::is_gone(pid).then_some(())))?;
        let there = self.there.output()?;
        std::mem::forget(self.there);
        let printed = [self.here.finish()?, there];
        let turns = printed[0].lines().next().and_then(|it| it.strip_prefix("turns ")).context("no turns")?;
        // Alone they need no pauses.
        let how = if self.how.contains(&"--burst") { &self.how[..2] } else { &[] };
        ensure!(printed == directly(turns, how)?, "other results: {printed:?}");
        Ok(())
    }
}

/// The file that ends the programs.
fn end(hosts: &Hosts) -> String {
    hosts.here.path("end").to_string_lossy().into_owned()
}

/// Two hosts with a pair of programs.
struct Case {
    hosts: Hosts,
    count: u32,
}

impl Case {
    fn start() -> Result<Self> {
        Ok(Self { hosts: Hosts::start()?, count: 0 })
    }

    /// A directory for a cut.
    fn fresh(&mut self) -> PathBuf {
        self.count += 1;
        self.hosts.here.path(&format!("cut-{}", self.count))
    }

    /// Makes a cut.
    fn make(&self, dir: &Path, pair: &Pair, more: &[&str]) -> Result<Value> {
        let [here, there] = pair.words(&self.hosts)?;
        let words = ["make", &dir.to_string_lossy(), &here, &there, "--json"];
        let (status, out, err) = self.hosts.cut(&[&words[..], more].concat())?;
        ensure!(status.success(), "{status}: {err}");
        Ok(serde_json::from_str(&out)?)
    }

    /// Restores a cut.
    fn restore(&self, dir: &Path) -> Result {
        let (status, out, err) = self.hosts.restores(dir)?;
        ensure!(status.success(), "{status}: {out} {err}");
        Ok(())
    }

    /// The daemons have let go of both programs after a cut.
    fn can_be_dumped(&self, pair: &Pair) -> Result {
        let numbers = [pair.here.pid(), self.hosts.there.number(pair.there.pid())?].map(|it| it.to_string());
        until("both programs can be dumped", || {
            let here = self.hosts.rekindle(&["check", &numbers[0]])?;
            let there = self.hosts.there.rekindle(&["check".as_ref(), numbers[1].as_ref()])?;
            Ok((here.status.success() && there.status.success()).then_some(()))
        })
    }

    /// A restore of a cut fails, with this code and a message that has this text. Nothing runs.
    fn is_refused(&self, dir: &Path, code: i32, text: &str) -> Result {
        let (status, _, err) = self.hosts.cut(&["restore", &dir.to_string_lossy()])?;
        ensure!(status.code() == Some(code) && err.contains(text), "{status}, without {text:?}: {err}");
        ensure!(self.hosts.there.processes().iter().all(|it| !process::command_line(*it).contains("/talk")));
        Ok(())
    }
}

#[test]
fn a_pair_on_two_hosts_goes_on_from_one_cut_and_ends_as_it_would_have() -> Result {
    let mut case = Case::start()?;
    let dir = case.fresh();
    let mut pair = Pair::start(&case.hosts)?;
    let made = case.make(&dir, &pair, &[])?;
    ensure!(made["outside"].as_array().is_some_and(Vec::is_empty), "{made:#}");
    ensure!(made["parts"][0]["connections"] == 1 && made["parts"][1]["connections"] == 1, "{made:#}");
    pair.advances()?;
    let identities = pair.identities(&case.hosts)?;
    for _ in 0..2 {
        pair.kill()?;
        case.restore(&dir)?;
        pair = Pair::adopt(&case.hosts, &identities)?;
        pair.advances()?;
    }
    pair.finish(&case.hosts)?;
    let (status, out, err) = case.hosts.cut(&["settle", &dir.to_string_lossy()])?;
    ensure!(status.success() && out.contains("no restore of the cut waits"), "{out} {err}");
    case.hosts.finish()
}

#[test]
fn a_cut_and_its_restore_reach_the_other_host_by_tls() -> Result {
    let case = Case::start()?;
    let (hosts, address) = (&case.hosts, network::ELSEWHERE.to_string());
    let listener = Listener::at(&address, &hosts.here, &hosts.there, &hosts.here.path("moves"))?;
    let pair = Pair::start(hosts)?;
    case.can_be_dumped(&pair)?;
    let by_tls = |verb: &str, words: &[&str]| {
        let [dir, keys] = [hosts.here.path("by-tls"), listener.dir()].map(|it| it.to_string_lossy().into_owned());
        let words = [&["cut", verb, &dir][..], words, &["--tls", "--tls-dir", &keys]].concat();
        let output = hosts.rekindle(&words)?;
        Ok::<_, anyhow::Error>((output.status, String::from_utf8_lossy(&output.stderr).into_owned()))
    };
    let here = format!("localhost={}", pair.here.pid());
    let there = format!("{address}={}", hosts.there.number(pair.there.pid())?);
    let (status, said) = by_tls("make", &[&here, &there])?;
    ensure!(status.success(), "{status}: {said}");
    pair.advances()?;
    let identities = pair.identities(hosts)?;
    pair.kill()?;
    until("the numbers of processes are free that were killed", || {
        let (status, said) = by_tls("restore", &[])?;
        let is_early = said.contains("File exists") || said.contains("thread: -17");
        ensure!(status.success() || is_early, "{status}: {said}");
        Ok(status.success().then_some(()))
    })?;
    let pair = Pair::adopt(hosts, &identities)?;
    pair.advances()?;
    pair.finish(hosts)?;
    drop(listener);
    case.hosts.finish()
}

#[test]
fn a_pair_that_is_stopped_with_its_cut_ends_and_comes_back() -> Result {
    let mut case = Case::start()?;
    let mut pair = Pair::start(&case.hosts)?;
    let identities = pair.identities(&case.hosts)?;
    // A host that does not hear that its tree is to end lets it go on, and is told by another connection.
    for plan in ["", "before \"End\" cut"] {
        let dir = case.fresh();
        let trees = [pair.here.pid(), pair.there.pid()];
        case.hosts.happens(plan)?;
        case.make(&dir, &pair, &["--stop"])?;
        ensure!(plan.is_empty() || case.hosts.has_happened()?, "that has not happened");
        case.hosts.happens("")?;
        until("both are killed", || Ok(trees.iter().all(|it| !runs(*it)).then_some(())))?;
        std::mem::forget(pair);
        case.restore(&dir)?;
        pair = Pair::adopt(&case.hosts, &identities)?;
        pair.advances()?;
    }
    pair.finish(&case.hosts)?;
    case.hosts.finish()
}

#[test]
fn a_daemon_that_is_killed_while_a_cut_is_made_costs_the_cut_and_no_program() -> Result {
    let mut case = Case::start()?;
    let pair = Pair::start(&case.hosts)?;
    for host in [HERE, THERE] {
        let daemon = if host == HERE { &case.hosts.here } else { case.hosts.there.node() };
        case.hosts.happens(&format!("before \"Go\" kill -KILL {}", daemon.daemon_pid()?))?;
        case.can_be_dumped(&pair)?;
        let dir = case.fresh();
        let [here, there] = pair.words(&case.hosts)?;
        let (status, _, err) = case.hosts.cut(&["make", &dir.to_string_lossy(), &here, &there])?;
        ensure!(case.hosts.has_succeeded()? && !status.success(), "{host}: {status} {err}");
        ensure!(!dir.join("cut.json").exists(), "{host}: there is a cut");
        pair.advances().with_context(|| err)?;
        let node = if host == HERE { &mut case.hosts.here } else { case.hosts.there.node_mut() };
        node.kill_daemon()?;
        node.start_daemon(&[])?;
        case.hosts.there.finds_daemon()?;
        until("a daemon that has just started knows the program", || {
            let dir = case.fresh();
            Ok(case.make(&dir, &pair, &[]).is_ok().then_some(()))
        })?;
    }
    pair.finish(&case.hosts)?;
    case.hosts.finish()
}

#[test]
fn a_cut_with_a_part_that_is_missing_or_damaged_or_of_another_cut_is_refused_before_anything_starts() -> Result {
    let mut case = Case::start()?;
    let (one, other) = (case.fresh(), case.fresh());
    let pair = Pair::start(&case.hosts)?;
    let identities = pair.identities(&case.hosts)?;
    case.make(&one, &pair, &[])?;
    pair.advances()?;
    case.make(&other, &pair, &[])?;
    // It still runs.
    case.is_refused(&one, 3, "there is a process")?;
    pair.kill()?;
    let (part, kept) = (one.join(THERE), one.join("kept"));
    fs::rename(&part, &kept)?;
    case.is_refused(&one, 4, "no whole part")?;
    fs::rename(other.join(THERE), &part)?;
    case.is_refused(&one, 4, "another cut")?;
    fs::rename(&part, other.join(THERE))?;
    fs::rename(&kept, &part)?;
    let pages = fs::read_dir(&part)?.flatten().map(|it| it.path());
    let pages = pages
        .filter(|it| it.to_string_lossy().contains("pages-"))
        .max_by_key(|it| it.metadata().map_or(0, |it| it.len()));
    let pages = pages.context("no pages")?;
    let whole = fs::read(&pages)?;
    fs::write(&pages, &whole[..whole.len() - 4096])?;
    case.is_refused(&one, 4, "not whole")?;
    fs::write(&pages, whole)?;
    case.restore(&one)?;
    let pair = Pair::adopt(&case.hosts, &identities)?;
    pair.finish(&case.hosts)?;
    case.hosts.finish()
}

/// What ends, at a moment of the conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    Connection,
    Command,
    Part(&'static str),
    Criu(&'static str),
}

const VICTIMS: [Victim; 6] = [
    Victim::Criu(HERE),
    Victim::Criu(THERE),
    Victim::Connection,
    Victim::Command,
    Victim::Part(HERE),
    Victim::Part(THERE),
];

/// The shell command that ends it.
fn kill(hosts: &Hosts, victim: Victim, dir: &Path) -> Result<String> {
    let (rekindle, dir) = (stage::program("rekindle")?.display().to_string(), dir.display().to_string());
    let (rekindle, dir) = (escaped(&rekindle), escaped(&dir));
    Ok(match victim {
        Victim::Connection => "cut".to_owned(),
        Victim::Command => format!("pkill -KILL -f '^{rekindle} cut [a-z]* {dir}'"),
        Victim::Part(host) => format!("pkill -KILL -P {} -f '^{rekindle} cut-part'", hosts.server(host)),
        Victim::Criu(host) => format!("pkill -KILL -f 'criu [a-z]* .*{dir}/{host} '"),
    })
}

/// A path as a pattern of pkill's.
fn escaped(path: &str) -> String {
    path.chars()
        .map(|it| if it.is_ascii_alphanumeric() || "/-_".contains(it) { it.to_string() } else { format!("[{it}]") })
        .collect()
}

/// Whether the victim is there for sure at this moment of a cut, or of a restore: others may have ended, or not begun.
fn lives(victim: Victim, when: &str, message: &str) -> bool {
    let is_early = ["\"Ready\"", "\"Checked\"", "\"Start\"", "\"Placed\"", "{\"Durable\"", "\"Running\"", "\"Good\""];
    match victim {
        _ if when != "before" => false,
        Victim::Connection => true,
        Victim::Command => message != "\"Good\"",
        Victim::Part(_) => true,
        Victim::Criu(_) => !is_early.contains(&message),
    }
}

#[test]
fn whatever_ends_while_a_cut_is_made_both_programs_go_on_and_no_half_cut_is_left() -> Result {
    const MESSAGES: [&str; 6] = ["\"Ready\"", "\"Dump\"", "{\"Dumped\"", "\"Go\"", "{\"Durable\"", "\"Good\""];
    let mut case = Case::start()?;
    let pair = Pair::start(&case.hosts)?;
    let all: Vec<_> = VICTIMS
        .into_iter()
        .flat_map(|victim| ["before", "after"].map(|when| (victim, when)))
        .flat_map(|(victim, when)| MESSAGES.map(|message| (victim, when, message)))
        .collect();
    // A CRIU that is killed between its dump of a socket and its gate may leave the program without a connection.
    let is_covered = |victim, message| {
        !matches!(victim, Victim::Criu(_)) || ["\"Go\"", "{\"Durable\"", "\"Good\""].contains(&message)
    };
    let all: Vec<_> = all.into_iter().filter(|(victim, _, message)| is_covered(*victim, *message)).collect();
    let (mut good, mut last) = (0, None);
    for (victim, when, message) in pairs::cases(&all, |(victim, when, message)| [victim, when, message]) {
        let dir = case.fresh();
        case.can_be_dumped(&pair)?;
        case.hosts.happens(&format!("{when} {message} {}", kill(&case.hosts, victim, &dir)?))?;
        let [here, there] = pair.words(&case.hosts)?;
        let (status, _, err) = case.hosts.cut(&["make", &dir.to_string_lossy(), &here, &there])?;
        let what = format!("{victim:?} {when} {message}: {status} {err}");
        eprintln!("{what}");
        until("that happens", || Ok(case.hosts.has_happened()?.then_some(()))).with_context(|| what.clone())?;
        let is_certain = lives(victim, when, message);
        ensure!(!is_certain || case.hosts.has_succeeded()?, "{what}: nothing was killed: {}", case.hosts.plan()?);
        until("nobody takes part any more", || Ok(case.hosts.take_part().is_empty().then_some(())))?;
        pair.advances().with_context(|| what.clone())?;
        let locks = case.hosts.locks()?;
        ensure!(locks.is_empty(), "{what}: {locks:?}");
        for host in [HERE, THERE] {
            let part = dir.join(host);
            // One that is whole belongs to no cut without the manifest. One that is not is left by who was killed.
            let is_whole = part.join("rekindle-cut.json").exists();
            ensure!(!part.exists() || is_whole || victim == Victim::Part(host), "{what}: {} is left", part.display());
        }
        let is_good = dir.join("cut.json").exists();
        ensure!(is_good || !status.success(), "{what}: and there is no cut");
        if is_good {
            good += 1;
            last = Some(dir);
        }
    }
    ensure!(good > 0, "no cut was good");
    let (identities, dir) = (pair.identities(&case.hosts)?, last.context("a cut is good")?);
    pair.kill()?;
    case.hosts.happens("")?;
    case.restore(&dir)?;
    Pair::adopt(&case.hosts, &identities)?.finish(&case.hosts)?;
    case.hosts.finish()
}

#[test]
fn whatever_ends_while_a_cut_is_restored_both_programs_run_or_none_does() -> Result {
    const MESSAGES: [&str; 7] =
        ["\"Checked\"", "\"Start\"", "\"Placed\"", "\"Connect\"", "\"Held\"", "\"Run\"", "\"Running\""];
    let mut case = Case::start()?;
    let dir = case.fresh();
    let pair = Pair::start(&case.hosts)?;
    case.make(&dir, &pair, &[])?;
    let identities = pair.identities(&case.hosts)?;
    pair.kill()?;
    let all: Vec<_> = VICTIMS
        .into_iter()
        .flat_map(|victim| ["before", "after"].map(|when| (victim, when)))
        .flat_map(|(victim, when)| MESSAGES.map(|message| (victim, when, message)))
        .collect();
    let (mut run, mut ended) = (0, 0);
    for (victim, when, message) in pairs::cases(&all, |(victim, when, message)| [victim, when, message]) {
        case.hosts.happens(&format!("{when} {message} {}", kill(&case.hosts, victim, &dir)?))?;
        let (status, _, err) = case.hosts.restores(&dir)?;
        let what = format!("{victim:?} {when} {message}: {status} {err}");
        until("that happens", || Ok(case.hosts.has_happened()?.then_some(()))).with_context(|| what.clone())?;
        let is_certain = lives(victim, when, message);
        ensure!(!is_certain || case.hosts.has_succeeded()?, "{what}: nothing was killed: {}", case.hosts.plan()?);
        case.hosts.happens("")?;
        let settled = until("the restore is settled", || {
            let (status, out, err) = case.hosts.cut(&["settle", &dir.to_string_lossy()])?;
            let is_settled = status.success() && case.hosts.take_part().is_empty();
            Ok(is_settled.then(|| format!("{out} {err}")))
        })
        .with_context(|| what.clone())?;
        let what = format!("{what}; {settled}");
        eprintln!("{what}");
        let locks = case.hosts.locks()?;
        ensure!(locks.is_empty(), "{what}: {locks:?}");
        let all_run = until("both run, or none does", || {
            let there = case.hosts.there.process(identities[1].pid).is_some_and(runs);
            let here = runs(identities[0].pid);
            Ok((here == there).then_some(here))
        })
        .with_context(|| what.clone())?;
        ensure!(all_run || !status.success(), "{what}: and none runs");
        if all_run {
            run += 1;
            let pair = Pair::adopt(&case.hosts, &identities)?;
            pair.advances().with_context(|| what)?;
            pair.kill()?;
        } else {
            ended += 1;
            // A process that was restored and killed is a zombie until this process looks.
            process::reap(identities[0].pid);
        }
    }
    ensure!(run > 0 && ended > 0, "{run} ran, {ended} did not");
    case.restore(&dir)?;
    Pair::adopt(&case.hosts, &identities)?.finish(&case.hosts)?;
    case.hosts.finish()
}

/// Whether a process lives. One that has ended, and was not waited for, does not.
fn runs(pid: i32) -> bool {
    process::reap(pid);
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, it)| !it.starts_with(['Z', 'X']))
}

#[test]
fn a_host_that_is_silent_costs_the_cut_and_both_programs_go_on() -> Result {
    let mut case = Case::start()?;
    let pair = Pair::start(&case.hosts)?;
    let dir = case.fresh();
    let rekindle = escaped(&stage::program("rekindle")?.display().to_string());
    let stop = format!("pkill -STOP -P {} -f '^{rekindle} cut-part'", case.hosts.server(THERE));
    case.hosts.happens(&format!("before \"Go\" {stop}"))?;
    let [here, there] = pair.words(&case.hosts)?;
    let (status, _, err) = case.hosts.cut(&["make", &dir.to_string_lossy(), &here, &there])?;
    ensure!(case.hosts.has_succeeded()? && !status.success(), "{status} {err}");
    ensure!(err.contains("there: it has been silent") && !dir.join("cut.json").exists(), "{err}");
    let stopped: Vec<_> = case.hosts.take_part();
    ensure!(!stopped.is_empty(), "nobody was stopped");
    stopped.iter().try_for_each(|it| process::signal(*it, libc::SIGCONT))?;
    until("nobody takes part any more", || Ok(case.hosts.take_part().is_empty().then_some(())))?;
    pair.advances()?;
    pair.finish(&case.hosts)?;
    case.hosts.finish()
}

#[test]
fn a_cut_of_hosts_that_connect_all_the_time_is_good_only_if_it_has_all_they_have_said() -> Result {
    const TORN: &str = "was opened or closed while the cut was made";
    let mut case = Case::start()?;
    // The program here closes thousands first.
    case.hosts.network().forgets_connections()?;
    let is_enough = |how: &[&str], good, torn| if how == CONSTANTLY { torn > 0 } else { good > 2 };
    for how in [&CONSTANTLY[..], &IN_BURSTS] {
        let _ = fs::remove_file(end(&case.hosts));
        let pair = Pair::start_with(&case.hosts, how)?;
        let identities = pair.identities(&case.hosts)?;
        let (mut pair, mut good, mut torn) = (Some(pair), 0, 0);
        until("some cuts are good, and some are torn", || {
            let dir = case.fresh();
            let mut now = pair.take().context("no pair")?;
            case.can_be_dumped(&now)?;
            let [here, there] = now.words(&case.hosts)?;
            let (status, out, err) = case.hosts.cut(&["make", &dir.to_string_lossy(), &here, &there])?;
            eprintln!("{status}: {out} {err}");
            if status.success() {
                good += 1;
                now.kill()?;
                case.restore(&dir)?;
                now = Pair::adopt(&case.hosts, &identities)?.with(how);
            }
            torn += i32::from(err.contains(TORN));
            // What was lost would end them both.
            now.advances().with_context(|| format!("{good} good, {torn} torn"))?;
            pair = Some(now);
            Ok(is_enough(how, good, torn).then_some(()))
        })?;
        pair.context("no pair")?.finish(&case.hosts)?;
    }
    case.hosts.finish()
}
