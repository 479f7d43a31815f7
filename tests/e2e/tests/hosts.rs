//! `rekindle cut`: one checkpoint of programs on two hosts that talk over TCP. CRIU 4.1 cannot dump their connections on Linux 6.16 and
//! later.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use rekindle_e2e::app::{Identity, undisturbed};
use rekindle_e2e::hosts::{HERE, Hosts, THERE};
use rekindle_e2e::{App, Result, network, pairs, process, stage, until};
use serde_json::Value;

const PORT: &str = "7400";
/// More turns than any test waits for.
const MANY: &str = "1000000";

/// What the two programs print undisturbed, without Rekindle, after so many turns.
fn directly(turns: &str) -> Result<[String; 2]> {
    let mut listens = Command::new(stage::app("talk")?);
    stage::clean_environment(&mut listens);
    listens.args(["--listen", PORT, "--turns", turns]).env("LD_LIBRARY_PATH", stage::software_gpu()?);
    let mut listens = listens.stdout(std::process::Stdio::piped()).spawn()?;
    // If it ended, the other one would look for it for ever.
    let table = format!("/proc/{}/net/tcp", listens.id());
    let row = format!(":{:04X} 00000000:0000 0A", PORT.parse::<u16>()?);
    until("the program listens", || {
        ensure!(listens.try_wait()?.is_none(), "the program that listens has ended: is its port still in use?");
        Ok(fs::read_to_string(&table)?.contains(&row).then_some(()))
    })?;
    let connects = undisturbed("talk", &["--connect", "127.0.0.1", "--port", PORT, "--turns", turns])?;
    let listens = listens.wait_with_output()?;
    ensure!(listens.status.success());
    Ok([String::from_utf8(listens.stdout)?, connects])
}

/// The two programs, each of which is on a host.
struct Pair {
    here: App,
    there: App,
}

impl Pair {
    /// Starts them. They go on until the test ends them.
    fn start(hosts: &Hosts) -> Result<Self> {
        let (end, address) = (end(hosts), network::HERE.to_string());
        let common = ["--turns", MANY, "--sleep-us", "1000"];
        let listen = ["--listen", PORT, "--until", &end];
        let here = hosts.here.run("talk", &[&listen[..], &common].concat())?;
        let connect = ["--connect", &address, "--port", PORT];
        let there = hosts.there.run_held("talk", &[&connect[..], &common].concat(), None)?;
        let pair = Self { here, there };
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
        Ok(Self { here: App::adopt(here.clone()), there: hosts.there.app(there)? })
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
        ensure!(printed == directly(turns)?, "other results: {printed:?}");
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
        let (status, out, err) = self.hosts.cut(&["restore", &dir.to_string_lossy()])?;
        ensure!(status.success(), "{status}: {out} {err}");
        Ok(())
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
        let dir = case.fresh();
        let [here, there] = pair.words(&case.hosts)?;
        let (status, _, err) = case.hosts.cut(&["make", &dir.to_string_lossy(), &here, &there])?;
        ensure!(case.hosts.has_happened()? && !status.success(), "{host}: {status} {err}");
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
    let (rekindle, dir) = (stage::program("rekindle")?, dir.display());
    let rekindle = rekindle.display();
    Ok(match victim {
        Victim::Connection => "cut".to_owned(),
        Victim::Command => format!("pkill -KILL -f '^{rekindle} cut [a-z]* {dir}'"),
        Victim::Part(host) => format!("pkill -KILL -P {} -f '^{rekindle} cut-part'", hosts.server(host)),
        Victim::Criu(host) => format!("pkill -KILL -f 'criu [a-z]* .*{dir}/{host} '"),
    })
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
        case.hosts.happens(&format!("{when} {message} {}", kill(&case.hosts, victim, &dir)?))?;
        let [here, there] = pair.words(&case.hosts)?;
        let (status, _, err) = case.hosts.cut(&["make", &dir.to_string_lossy(), &here, &there])?;
        let what = format!("{victim:?} {when} {message}: {status} {err}");
        eprintln!("{what}");
        ensure!(case.hosts.has_happened()?, "{what}: that has not happened: {}", case.hosts.plan()?);
        until("nobody takes part any more", || Ok(takes_part(&case.hosts)?.is_empty().then_some(())))?;
        pair.advances().with_context(|| what.clone())?;
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

/// The processes on both hosts that take part in a cut.
fn takes_part(hosts: &Hosts) -> Result<Vec<i32>> {
    let own = process::tree(std::process::id() as i32);
    let all = own.into_iter().chain(hosts.there.processes());
    let names = ["cut-part", "cut-guard", "cut-gate"];
    let dir = hosts.here.socket().to_string_lossy().into_owned();
    Ok(all
        .filter(|it| names.iter().any(|name| process::command_line(*it).contains(name)))
        .filter(|it| {
            fs::read(format!("/proc/{it}/environ")).is_ok_and(|it| String::from_utf8_lossy(&it).contains(&dir))
        })
        .collect())
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
        let (status, _, err) = case.hosts.cut(&["restore", &dir.to_string_lossy()])?;
        let what = format!("{victim:?} {when} {message}: {status} {err}");
        ensure!(case.hosts.has_happened()?, "{what}: that has not happened: {}", case.hosts.plan()?);
        case.hosts.happens("")?;
        let settled = until("the restore is settled", || {
            let (status, out, err) = case.hosts.cut(&["settle", &dir.to_string_lossy()])?;
            let is_settled = status.success() && takes_part(&case.hosts)?.is_empty();
            Ok(is_settled.then(|| format!("{out} {err}")))
        })
        .with_context(|| what.clone())?;
        let what = format!("{what}; {settled}");
        eprintln!("{what}");
        let runs = [runs(identities[0].pid), case.hosts.there.process(identities[1].pid).is_some()];
        ensure!(runs[0] == runs[1], "{what}: here {}, there {}", runs[0], runs[1]);
        ensure!(runs[0] || !status.success(), "{what}: and none runs");
        if runs[0] {
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

/// Whether a process lives.
fn runs(pid: i32) -> bool {
    process::reap(pid);
    !process::is_gone(pid)
}
