//! Many dumps without CRIU, of randomly generated programs that go on meanwhile, by each protocol and at random
//! moments. Some dumps are given up. Every image equals, byte by byte, the image that `stop` writes at the same
//! quiesce, and the programs end undisturbed.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::twin::{Manner, Source, Taken, same};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result};
use rekindle_wire::control::{FailureKind, ProtocolChange, Request};

/// The programs are small, since the software GPU hashes slowly.
const STEPS: &str = "600";
const KIB: &str = "4";
/// The number of images to make if there is time for them, the least number in any case, and the time.
const MOST: u64 = 1000;
const LEAST: u64 = 60;
const TIME: Duration = Duration::from_secs(25);

/// The counts of a test.
#[derive(Debug, Default)]
struct Counts {
    images: u64,
    bytes: u64,
    wrong: u64,
    given_up: u64,
}

/// The number of files that a dump has left, without the link to the image that it builds on.
fn files_in(dir: &Path) -> Result<usize> {
    let names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name()));
    let names = names.collect::<Result<Vec<_>>>()?;
    Ok(names.iter().filter(|name| *name != "rekindle-parent").count())
}

/// Makes images of as many programs as it takes. The images are in memory, since disks would take most of the time.
fn snapshots(configuration: &str, gpu: &[(&str, &str)], builds: bool) -> Result {
    let node = Node::configured(configuration, gpu)?;
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let mut random = Random::new();
    let mut counts = Counts::default();
    let began = Instant::now();
    let enough = |images: u64| {
        let late = began.elapsed() > TIME * repetitions() as u32;
        images >= if late { LEAST } else { MOST } * repetitions()
    };
    while !enough(counts.images) {
        let seed = random.below(1 << 32).to_string();
        let arguments = ["--seed", &seed, "--steps", STEPS, "--kib", KIB];
        let expected = undisturbed("random", &arguments)?;
        let app = node.run_held("random", &[&arguments[..], &["--sleep-us", "1000"]].concat(), None)?;
        app.reaches(2)?;
        of_one(&node, &Source::new(&node, &app)?, app.pid(), memory.path(), builds, &mut random, &mut counts)
            .with_context(|| format!("a program with seed {seed}"))?;
        assert_eq!(app.finish()?, expected, "seed {seed}");
    }
    eprintln!("{counts:?}");
    ensure!(counts.bytes > 0 && counts.wrong <= counts.images / 4, "{counts:?}");
    node.finish()
}

/// Makes snapshots of one program until it ends.
fn of_one(
    node: &Node,
    source: &Source,
    pid: i32,
    memory: &Path,
    builds: bool,
    random: &mut Random,
    counts: &mut Counts,
) -> Result {
    let mut before: Vec<PathBuf> = Vec::new();
    loop {
        let protocol = ["clone", "cow", "recopy"][random.below(3) as usize];
        node.ask(&Request::Protocol { pid, change: ProtocolChange::Choose(protocol.to_owned()) })?;
        let name = node.fresh("snapshot");
        let dir = memory.join(name.file_name().context("a name")?);
        fs::create_dir(&dir)?;
        if builds && let Some(base) = before.last().filter(|_| random.below(4) != 0) {
            let name = base.file_name().context("an image's directory has a name")?;
            symlink(Path::new("..").join(name), dir.join("rekindle-parent"))?;
        } else {
            before.drain(..).try_for_each(fs::remove_dir_all)?;
        }
        let leave_running = protocol != "recopy" || random.below(2) == 0;
        let pause = Duration::from_micros(random.below(3) * random.below(2000));
        let give_up = (random.below(10) == 0).then(|| random.below(4) as usize);
        match source.take(&dir, Manner { leave_running, pause, give_up })? {
            Taken::Both(image, stop) => {
                counts.bytes += same(&image, &stop).with_context(|| format!("{protocol}: {}", image.display()))?;
                counts.images += 1;
                fs::remove_dir_all(stop)?;
                before.push(image);
            }
            Taken::Failed(failure) => {
                ensure!(failure.kind == FailureKind::Mispredicted, "{protocol}: {failure}");
                counts.wrong += 1;
                fs::remove_dir_all(&dir)?;
                fs::remove_dir_all(dir.with_extension("stop"))?;
            }
            Taken::GivenUp => {
                counts.given_up += 1;
                // The image may have become whole while the last question was being answered.
                if give_up != Some(3) {
                    until_true("the daemon has removed what it wrote", || Ok(files_in(&dir)? == 0))?;
                }
            }
            Taken::Gone => return Ok(()),
        }
        std::thread::sleep(Duration::from_micros(random.below(5000)));
    }
}

#[test]
fn images_are_what_stop_writes_at_the_same_quiesce() -> Result {
    snapshots("", &[("SIMGPU_COPY_GBPS", "0.05")], false)
}

/// Programs of `tests/apps` that use memory in ways that the generated programs do not, in steps that take a while.
const OTHERS: [(&str, &[&str]); 20] = [
    ("reset", &["--rounds", "6", "--launches", "60", "--sleep-us", "20000"]),
    ("corners", &["--iterations", "15", "--sleep-us", "10000"]),
    ("memory", &["--iterations", "80", "--largest-kib", "32", "--sleep-us", "5000"]),
    ("segments", &["--iterations", "20", "--sleep-us", "20000"]),
    ("pools", &["--iterations", "30", "--words", "512", "--sleep-us", "10000"]),
    ("graphnodes", &["--iterations", "20", "--words", "512", "--sleep-us", "10000"]),
    ("graphs", &["--iterations", "20", "--words", "512", "--sleep-us", "10000"]),
    ("globals", &["--iterations", "30", "--sleep-us", "10000"]),
    ("textures", &["--iterations", "20", "--sleep-us", "10000"]),
    ("surfaces", &["--iterations", "10", "--sleep-us", "10000"]),
    ("blocks", &["--iterations", "20", "--sleep-us", "10000"]),
    ("registered", &["--iterations", "20", "--words", "500", "--sleep-us", "10000"]),
    ("mapped", &["--iterations", "20", "--words", "256", "--sleep-us", "10000"]),
    ("callbacks", &["--iterations", "20", "--words", "512", "--sleep-us", "10000"]),
    ("peers", &["--iterations", "20", "--words", "512", "--sleep-us", "10000"]),
    ("twodev", &["--iterations", "20", "--words", "512", "--sleep-us", "10000"]),
    ("copies3d", &["--iterations", "20", "--sleep-us", "10000"]),
    ("modules", &["--iterations", "20", "--sleep-us", "10000"]),
    ("jit", &["--iterations", "30", "--sleep-us", "10000"]),
    ("funcptr", &["--iterations", "30", "--sleep-us", "10000"]),
];

#[test]
fn images_of_programs_of_many_kinds_are_what_stop_writes_at_the_same_quiesce() -> Result {
    let node = Node::configured("[checkpoint]\ncow_pool = 4194304\n", &[("SIMGPU_COPY_GBPS", "0.05")])?;
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let mut random = Random::new();
    let mut counts = Counts::default();
    for _ in 0..repetitions() {
        for (name, arguments) in OTHERS {
            let expected = undisturbed(name, arguments)?;
            let app = node.run_held(name, arguments, Some(1))?;
            app.reaches(1)?;
            let source = Source::new(&node, &app)?;
            app.lift();
            of_one(&node, &source, app.pid(), memory.path(), false, &mut random, &mut counts).context(name)?;
            assert_eq!(app.finish()?, expected, "{name}");
            eprintln!("{name}: {counts:?}");
        }
    }
    // On a busy machine many of them end before they are dumped.
    ensure!(counts.images > OTHERS.len() as u64 / 4, "{counts:?}");
    node.finish()
}

#[test]
fn images_of_a_full_gpu_that_build_on_others_and_are_compressed_are_so_too() -> Result {
    let configuration = "[checkpoint]\ncow_pool = 65536\n[image]\ncompression = \"lz4\"\n";
    // Clones take all GPU memory that the programs and a worker leave, and the programs request that memory meanwhile.
    let full = [("SIMGPU_COPY_GBPS", "0.05"), ("SIMGPU_MEMORY", "14M")];
    snapshots(configuration, &full, true)
}

/// A dump that is given up is over for the requester while its copy still ends, its clones are freed and its host
/// memory is reclaimed. The next dump starts in the middle of that, and gets clones nevertheless.
#[test]
fn dumps_that_follow_given_up_ones_at_once_have_whole_images() -> Result {
    const IMAGES: u64 = 12;
    let node =
        Node::configured("[checkpoint]\nprotocol = \"clone\"\nstaging = 67108864\n", &[("SIMGPU_COPY_GBPS", "0.05")])?;
    let memory = tempfile::tempdir_in("/dev/shm")?;
    let mut random = Random::new();
    let app = node.run_held("corners", &["--iterations", "1000000"], None)?;
    app.reaches(1)?;
    let source = Source::new(&node, &app)?;
    let (mut images, mut given_up) = (0, 0);
    while images < IMAGES * repetitions() {
        let dir = node.fresh("image");
        let dir = memory.path().join(dir.file_name().context("a name")?);
        fs::create_dir(&dir)?;
        let pause = Duration::from_micros(random.below(3) * random.below(2000));
        let give_up = (random.below(4) != 0).then(|| 1 + random.below(3) as usize);
        match source.take(&dir, Manner { leave_running: true, pause, give_up })? {
            Taken::Both(image, stop) => {
                same(&image, &stop).with_context(|| image.display().to_string())?;
                images += 1;
            }
            Taken::GivenUp => given_up += 1,
            other => anyhow::bail!("after {images} images, and {given_up} that were given up: {other:?}"),
        }
    }
    let log = fs::read_to_string(node.path("daemon.log"))?;
    let lacking = log.lines().find(|line| line.contains("room for clones"));
    ensure!(lacking.is_none(), "there was memory for clones: {lacking:?}");
    eprintln!("{given_up} were given up");
    // The worker returns its part of that memory, even if nobody asks for the result of the copy.
    let worker = node.client(app.pid())?.worker;
    let dir = node.fresh("image");
    fs::create_dir(&dir)?;
    let last = source.take(&dir, Manner { give_up: Some(2), ..Manner::PLAIN })?;
    ensure!(matches!(last, Taken::GivenUp), "{last:?}");
    until_true("the worker has none of the daemon's host memory", || {
        Ok(!fs::read_to_string(format!("/proc/{worker}/maps"))?.contains("rekindle-stage"))
    })?;
    app.kill()?;
    node.finish()
}
