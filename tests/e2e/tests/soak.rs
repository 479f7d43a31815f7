//! A long run: `soak` creates and destroys every kind of object, round after round. It is dumped while it goes on, some
//! dumps are given up, and it is killed and restored. Between rounds nothing of a round is left, so any growth after
//! many rounds is a leak.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::twin::{Manner, Source};
use rekindle_e2e::{App, Image, Node, Result, process};
use rekindle_wire::control::{FailureKind, ProtocolChange, Request};

/// The number of rounds until caches, pools and heaps reach their lasting size. A heap stays within 12 KiB from round
/// 350 to round 2,800.
const WARM: u64 = 350;
/// The number of rounds in which nothing may grow.
const MANY: u64 = 700;
/// The time for which the program runs where tests may take long.
const LONG: Duration = Duration::from_secs(3600);
/// The amount by which a process's memory may grow in [`MANY`] rounds, in KiB: less than 64 bytes per round, which take
/// 80.
const GROWTH_KIB: u64 = 40;
/// The number by which a process's mappings may grow: the number of a heap's mappings varies.
const GROWTH_MAPPINGS: u64 = 16;

/// Counts by name, each of a resource that may not grow.
type Held = BTreeMap<String, u64>;

/// A program whose rounds are counted.
struct Soak<'a> {
    node: &'a Node,
    app: Option<App>,
    rounds: u64,
}

impl<'a> Soak<'a> {
    fn start(node: &'a Node, arguments: &[&str]) -> Result<Self> {
        let told = node.path("told");
        fs::write(&told, "00000001")?;
        let told = told.display().to_string();
        let app = node.run_held("soak", &[&["--told", &told], arguments].concat(), None)?;
        Ok(Self { node, app: Some(app), rounds: 1 })
    }

    fn app(&self) -> Result<&App> {
        self.app.as_ref().context("there is a program")
    }

    /// Tells the program to do this many more rounds, and returns at once.
    fn go_on(&mut self, rounds: u64) -> Result {
        self.rounds += rounds;
        self.tell(self.rounds)
    }

    fn tell(&self, rounds: u64) -> Result {
        // The new file replaces the old one, so that it is never half written.
        let (new, told) = (self.node.path("told.new"), self.node.path("told"));
        fs::write(&new, format!("{rounds:08}"))?;
        Ok(fs::rename(new, told)?)
    }

    /// Waits until the program has done its rounds.
    fn rests(&self) -> Result {
        self.app()?.reaches(self.rounds)
    }

    /// Runs this many rounds, in which the program is dumped by each protocol and some dumps are given up.
    fn disturbed(&mut self, rounds: u64, random: &mut Random) -> Result {
        let begin = self.rounds;
        self.go_on(rounds)?;
        let protocols = ["stop", "clone", "cow", "recopy"];
        for (part, protocol) in protocols.into_iter().enumerate() {
            let part = part as u64 * rounds / protocols.len() as u64;
            self.app()?.reaches(begin + 1 + part + random.below(rounds / 10))?;
            let change = ProtocolChange::Choose(protocol.to_owned());
            self.node.ask(&Request::Protocol { pid: self.app()?.pid(), change })?;
            self.dump_running().with_context(|| format!("a dump by {protocol}"))?;
            self.give_up(random.below(4) as usize)?;
        }
        self.rests()
    }

    /// Dumps the program by CRIU and leaves it running. The dump may fail if a write was mispredicted.
    fn dump_running(&self) -> Result {
        let (criu, image) = self.node.start_dump(self.app()?, rekindle_e2e::Fate::Running)?;
        let outcome = criu.wait()?;
        let mispredicted = outcome.failure_kind() == Some(FailureKind::Mispredicted);
        ensure!(outcome.status.success() || mispredicted, "{outcome:?}");
        Ok(fs::remove_dir_all(image.dir)?)
    }

    /// Starts a dump and gives it up after this many questions.
    fn give_up(&self, at: usize) -> Result {
        let dir = self.node.fresh("given-up");
        fs::create_dir(&dir)?;
        Source::new(self.node, self.app()?)?.take(&dir, Manner { give_up: Some(at), ..Manner::PLAIN })?;
        Ok(())
    }

    /// The resources of all processes, and an image of that state.
    fn held(&self) -> Result<(Held, Image)> {
        let app = self.app()?;
        self.rests()?;
        self.node.ask(&Request::Protocol { pid: app.pid(), change: ProtocolChange::Choose("stop".to_owned()) })?;
        let image = self.node.dump(app)?;
        let mut held = Held::new();
        state(&image.dir, &mut held)?;
        self.node.wait_for_spare()?;
        let worker = self.node.client(app.pid())?.worker;
        for (name, pid) in [("program", app.pid()), ("worker", worker), ("daemon", self.node.daemon_pid()?)] {
            held.insert(format!("{name}: descriptors"), process::settled_descriptors(pid)?.len() as u64);
            held.insert(format!("{name}: threads"), fs::read_dir(format!("/proc/{pid}/task"))?.count() as u64);
            held.insert(
                format!("{name}: mappings"),
                fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().count() as u64,
            );
            held.insert(format!("{name}: KiB"), anonymous(pid)?);
        }
        Ok((held, image))
    }

    /// Kills the program, and restores it from an image made between rounds.
    fn restore(&mut self, image: Image) -> Result {
        let app = self.app.take().context("there is a program")?;
        app.kill()?;
        self.app = Some(self.node.restore(&image)?);
        Ok(fs::remove_dir_all(image.dir)?)
    }

    fn end(self) -> Result {
        self.tell(0)?;
        let app = self.app.context("there is a program")?;
        ensure!(app.errors()?.is_empty(), "{}", app.errors()?);
        assert_eq!(app.finish()?, "every round was right\n");
        Ok(())
    }
}

/// The anonymous memory of a process, in KiB.
fn anonymous(pid: i32) -> Result<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = rollup.lines().find_map(|it| it.strip_prefix("Anonymous:")).context("no anonymous memory")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

/// Adds the sizes and counts of the worker's records of the program, as an image contains them.
fn state(dir: &Path, held: &mut Held) -> Result {
    let image = rekindle_images::Image::open(dir)?;
    let [client] = &image.manifest().clients[..] else { anyhow::bail!("not one client") };
    let numbers = [
        ("records", client.objects.len()),
        ("bytes of records", client.objects.iter().map(|it| it.args.len()).sum()),
        ("bytes of the worker's state", client.worker_state.len()),
        ("bytes of the shared state", client.shared_state.len()),
        ("code images", image.manifest().code.len()),
        ("allocations", client.allocations.len()),
        ("variables", client.globals.len()),
        ("pinned allocations", client.pinned.len()),
        ("blobs", client.blobs.len()),
    ];
    held.extend(numbers.map(|(name, value)| (format!("saved: {name}"), value as u64)));
    Ok(())
}

/// The counts that have grown from the first measurement to the second, and as much again to the third. Memory kept for
/// later use grows once; a leak continues.
fn grown(held: &[Held; 3], whose: &[&str]) -> String {
    let mut grown = String::new();
    let [before, after, later] = held;
    for (name, now) in after.iter().filter(|(name, _)| whose.iter().any(|it| name.starts_with(it))) {
        let room = match name {
            _ if name.ends_with("KiB") => GROWTH_KIB,
            _ if name.ends_with("mappings") => GROWTH_MAPPINGS,
            _ => 0,
        };
        let (was, then) = (before.get(name).copied().unwrap_or(0), later.get(name).copied().unwrap_or(0));
        if *now > was + room && then > *now + room {
            let _ = write!(grown, "{name}: {was}, {now}, {then}; ");
        }
    }
    grown
}

/// Runs twice [`MANY`] rounds of one run, and makes an image at the end. While one of these counts has grown in both
/// halves, the same number of rounds follows, until there are `most` measurements: a heap grows in steps, some of them
/// late, and a leak grows in each.
fn live(soak: &mut Soak, random: &mut Random, whose: &[&str], most: usize) -> Result<([Held; 3], Image)> {
    soak.disturbed(WARM, random)?;
    let mut all = Vec::new();
    loop {
        let (held, image) = soak.held()?;
        eprintln!("{} rounds: {held:?}", soak.rounds);
        all.push(held);
        if let Some(last) = all.last_chunk::<3>()
            && (all.len() >= most || grown(last, whose).is_empty())
        {
            return Ok((last.clone(), image));
        }
        fs::remove_dir_all(image.dir)?;
        soak.disturbed(MANY, random)?;
    }
}

#[test]
fn nothing_grows_while_a_program_makes_and_destroys_everything_and_is_dumped_and_restored() -> Result {
    let node = Node::start()?;
    let mut random = Random::new();
    let mut soak = Soak::start(&node, &[])?;
    let (begin, long) = (Instant::now(), repetitions() > 1);
    soak.disturbed(WARM, &mut random)?;
    let (_, image) = soak.held()?;
    soak.restore(image)?;
    // The counts at the end of each run: nothing may grow from run to run either.
    let mut ends: Vec<Held> = Vec::new();
    while ends.is_empty() || long && begin.elapsed() < LONG {
        const WHOSE: [&str; 4] = ["program", "worker", "daemon", "saved"];
        let (held, image) = live(&mut soak, &mut random, &WHOSE, 7)?;
        let said = grown(&held, &WHOSE);
        ensure!(said.is_empty(), "in {MANY} rounds, again and again, of {} in all, grew: {said}", soak.rounds);
        let [.., last] = held;
        ends.push(last);
        if let [.., a, b, c] = ends.as_slice() {
            let said = grown(&[a.clone(), b.clone(), c.clone()], &["program", "daemon", "saved"]);
            ensure!(said.is_empty(), "from life to life, of {}, grew: {said}", ends.len());
        }
        soak.restore(image)?;
    }
    soak.go_on(1)?;
    soak.rests()?;
    soak.end()?;
    node.finish()
}

#[test]
fn an_event_or_sixty_four_bytes_that_each_round_leaves_are_found() -> Result {
    let node = Node::start()?;
    let mut random = Random::new();
    for (leak, whose) in [("1", "saved: records"), ("2", "program: KiB")] {
        let mut soak = Soak::start(&node, &["--only", "events", "--leak", leak])?;
        let (held, image) = live(&mut soak, &mut random, &[whose], 3)?;
        fs::remove_dir_all(image.dir)?;
        ensure!(!grown(&held, &[whose]).is_empty(), "nobody sees that {whose} grow: {held:?}");
        soak.end()?;
    }
    node.finish()
}
