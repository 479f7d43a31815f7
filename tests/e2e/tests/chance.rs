//! Randomly generated programs, dumped by CRIU at random moments and by random protocols while they go on, killed, and
//! restored. In the end each program prints the same as it does undisturbed.

use anyhow::{Context, bail, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Fate, Image, Node, Result};
use rekindle_wire::control::{FailureKind, ProtocolChange, Request};

const STEPS: u64 = 2500;
const THREADS: u64 = 2;
/// The number of dumps of one program, which is killed and restored as often.
const DUMPS: u64 = 10;
/// The same of programs that borrow memory.
const BORROWED_STEPS: u64 = 400;
const BORROWED_DUMPS: u64 = 4;
/// The number of programs, by default and where tests may take long.
const PROGRAMS: u64 = 2;
const MANY: u64 = 10;

/// What came of a dump.
enum Dumped {
    Saved(Box<Image>),
    /// A write of the program during the dump was mispredicted.
    Mispredicted,
    /// The program ended before the dump stopped it.
    Ended,
}

/// Dumps a program that runs, and so may reach its end before CRIU stops it.
fn dump(node: &Node, app: &App, fate: Fate) -> Result<Dumped> {
    let (criu, image) = node.start_dump(app, fate)?;
    let outcome = criu.wait()?;
    if outcome.status.success() {
        return Ok(Dumped::Saved(Box::new(image)));
    }
    ensure!(image.files()?.is_empty(), "something is left of an image that is none");
    match outcome.failure_kind() {
        Some(FailureKind::Mispredicted) => Ok(Dumped::Mispredicted),
        Some(FailureKind::LostPeer) => Ok(Dumped::Ended),
        _ => bail!("{outcome:?}"),
    }
}

/// Dumps, kills and restores one program repeatedly.
fn lives(node: &Node, random: &mut Random) -> Result {
    let (seed, steps) = (random.below(1 << 32).to_string(), STEPS.to_string());
    let arguments = ["--seed", &seed, "--steps", &steps];
    let expected = undisturbed("random", &arguments)?;
    let mut app = node.run_held("random", &[&arguments[..], &["--sleep-us", "300"]].concat(), None)?;
    for life in 0..DUMPS {
        let protocol = ["stop", "clone", "cow", "recopy", "auto"][random.below(5) as usize];
        let fate = if random.below(3) == 0 { Fate::Killed } else { Fate::Running };
        let now = app.progress()?;
        let left = (STEPS * THREADS * 3 / 4).saturating_sub(now) / (DUMPS - life);
        app.reaches(now + 1 + random.below(left + 1))?;
        node.ask(&Request::Protocol { pid: app.pid(), change: ProtocolChange::Choose(protocol.to_owned()) })?;
        let what = format!("seed {seed}, life {life}: {fate:?} by {protocol} from {now} on");
        let image = match dump(node, &app, fate).with_context(|| what.clone())? {
            Dumped::Saved(image) => image,
            Dumped::Mispredicted => {
                app.advances()?;
                continue;
            }
            // The output shows whether it ended as it would alone.
            Dumped::Ended => break,
        };
        if fate == Fate::Killed {
            app.was_killed(&image.tree)?;
        } else {
            std::thread::sleep(std::time::Duration::from_micros(random.below(30_000)));
            app.kill()?;
        }
        image.must_be_of_the_middle(&expected)?;
        app = node.restore(&image).with_context(|| what)?;
        std::fs::remove_dir_all(&image.dir)?;
    }
    assert_eq!(app.finish()?, expected, "seed {seed}");
    Ok(())
}

#[test]
fn programs_of_random_numbers_live_many_lives_and_end_as_they_would_alone() -> Result {
    let configuration = "[image]\ncompression = \"auto\"\n";
    let node = Node::configured(configuration, &[("SIMGPU_COPY_GBPS", "0.01")])?;
    let mut random = Random::new();
    let programs = if repetitions() > 1 { MANY * repetitions() } else { PROGRAMS };
    (0..programs).try_for_each(|_| lives(&node, &mut random))?;
    node.finish()
}

/// Has an image's GPU memory on the GPU once, shared by all programs that are restored from it.
fn lend(node: &Node, image: &Image) -> Result {
    let arguments = ["warm".as_ref(), "--resident=shared".as_ref(), image.dir.as_os_str()];
    until_true("a worker waits that borrows", || Ok(node.rekindle(&arguments)?.status.success()))
}

/// Dumps and kills one program repeatedly, and restores it as two instances one after the other, which borrow the image's memory.
/// The first is killed in its middle: the second must not see what it has written.
fn lives_on_borrowed_memory(node: &Node, random: &mut Random) -> Result {
    let (seed, steps) = (random.below(1 << 32).to_string(), BORROWED_STEPS.to_string());
    // Allocations above 1 MiB are lent. A write that no parameter names ends a program that borrows.
    let arguments = ["--seed", &seed, "--steps", &steps, "--kib", "6144", "--hidden", "0"];
    let expected = undisturbed("random", &arguments)?;
    let mut app = node.run_held("random", &[&arguments[..], &["--sleep-us", "2000"]].concat(), None)?;
    for life in 0..BORROWED_DUMPS {
        let now = app.progress()?;
        let left = (BORROWED_STEPS * THREADS * 3 / 4).saturating_sub(now) / (BORROWED_DUMPS - life);
        if let Err(error) = app.reaches(now + 1 + random.below(left + 1)) {
            // It may have ended since the last restore.
            ensure!(app.end()?.success() && app.output()? == expected, "seed {seed}: {error:#}");
            return Ok(());
        }
        let what = format!("seed {seed}, life {life} from {now} on");
        let image = match dump(node, &app, Fate::Killed).with_context(|| what.clone())? {
            Dumped::Saved(image) => image,
            Dumped::Mispredicted => bail!("a write was mispredicted: {what}"),
            Dumped::Ended => break,
        };
        app.was_killed(&image.tree)?;
        image.must_be_of_the_middle(&expected)?;
        lend(node, &image)?;
        let first = node.restore(&image).with_context(|| what.clone())?;
        let target = first.progress()? + 1 + random.below(100);
        if let Err(error) = first.reaches(target.min(BORROWED_STEPS * THREADS * 3 / 4)) {
            ensure!(first.end()?.success() && first.output()? == expected, "{error:#}");
        }
        first.kill()?;
        lend(node, &image)?;
        app = node.restore(&image).with_context(|| what)?;
        let forget = ["warm".as_ref(), "--forget".as_ref(), image.dir.as_os_str()];
        ensure!(node.rekindle(&forget)?.status.success());
        std::fs::remove_dir_all(&image.dir)?;
    }
    assert_eq!(app.finish()?, expected, "seed {seed}");
    Ok(())
}

#[test]
fn programs_of_random_numbers_borrow_memory_and_end_as_they_would_alone() -> Result {
    let node = Node::start()?;
    let mut random = Random::new();
    let programs = if repetitions() > 1 { MANY * repetitions() } else { 1 };
    (0..programs).try_for_each(|_| lives_on_borrowed_memory(&node, &mut random))?;
    let log = std::fs::read_to_string(node.path("daemon.log"))?;
    ensure!(log.contains("the client borrows memory"), "nothing was borrowed");
    node.finish()
}
