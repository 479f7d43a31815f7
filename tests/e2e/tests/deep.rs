//! Programs that are suspended deeply: their workers give back all that they have on GPUs, and other workers take the programs
//! over.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::podman::Podman;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Node, Result, process};
use rekindle_wire::control::{Reply, Request};

use crate::replay::failing_loads;
use crate::suspend::{Answer, BALLAST, BALLAST_BYTES, Steady, becomes, resume};

/// Bytes of a GPU's memory that each context takes.
const CONTEXT: &str = "16M";

fn suspend(node: &Node, pid: i32, hold: bool, deep: bool) -> Result<Answer> {
    match node.ask(&Request::Suspend { pid, hold, deep })? {
        Reply::Suspended(all) => Ok(Ok(all)),
        Reply::Failed(failure) => Ok(Err(failure)),
        other => bail!("Suspend was answered by {other:?}"),
    }
}

/// Suspends a program deeply. Returns its keeper.
fn now_deep(node: &Node, app: &App, hold: bool) -> Result<i32> {
    let all = suspend(node, app.pid(), hold, true)?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    let [one] = &all[..] else { bail!("{all:?}") };
    ensure!(one.pid == app.pid() && one.deep, "{one:?}");
    let info = node.client(app.pid())?;
    ensure!(info.state == "suspended" && info.suspended.is_some_and(|it| it.deep && it.hold == hold), "{info:?}");
    Ok(info.worker)
}

/// Waits until a program runs with another worker than this keeper, which is gone.
fn moves(node: &Node, app: &App, keeper: i32) -> Result {
    // A daemon that has just started lists a client as running until its worker has told more.
    until_true("it runs with another worker", || {
        Ok(node.client(app.pid()).is_ok_and(|it| it.state == "running" && it.worker != keeper))
    })?;
    process::wait_gone("a keeper whose client has another worker", keeper)?;
    app.advances()
}

/// A machine with GPUs of 192 MiB, whose memory holds one ballast and not two.
fn small_gpus(count: &str, more: &[(&str, &str)]) -> Result<Node> {
    let mut node = Node::without_daemon()?;
    start_with_small_gpus(&mut node, count, more)?;
    Ok(node)
}

fn start_with_small_gpus(node: &mut Node, count: &str, more: &[(&str, &str)]) -> Result {
    let machine = node.path("machine");
    File::options().append(true).create(true).open(&machine)?;
    let machine = machine.to_string_lossy().into_owned();
    let gpus = [
        ("SIMGPU_MACHINE", &*machine),
        ("SIMGPU_MEMORY", "192M"),
        ("SIMGPU_CONTEXT_MEMORY", CONTEXT),
        ("SIMGPU_DEVICES", count),
    ];
    node.start_daemon(&[&gpus, more].concat())
}

/// The bytes that are free on a GPU.
fn free(node: &Node, gpu: u32) -> Result<u64> {
    node.wait_for_spare()?;
    match node.ask(&Request::GpuMemory { gpu })? {
        Reply::GpuMemory(memory) => Ok(memory.free),
        other => bail!("GpuMemory was answered by {other:?}"),
    }
}

#[test]
fn a_deeply_suspended_program_has_nothing_on_gpus_and_goes_on_with_another_worker() -> Result {
    let node = small_gpus("1", &[])?;
    let before = free(&node, 0)?;
    let it = Steady::run(&node, &BALLAST)?;
    it.stop()?;
    ensure!(free(&node, 0)? + BALLAST_BYTES < before);
    let mut keeper = now_deep(&node, &it.app, false)?;
    assert_eq!(free(&node, 0)?, before, "its context is gone too");
    // Suspended again and again, in both ways.
    for round in 0..3 {
        let progress = it.app.progress()?;
        it.go_on()?;
        moves(&node, &it.app, keeper)?;
        ensure!(it.app.progress()? > progress);
        it.stop()?;
        if round == 1 {
            ensure!(suspend(&node, it.app.pid(), true, false)?.is_ok_and(|all| all.len() == 1 && !all[0].deep));
        }
        keeper = now_deep(&node, &it.app, false)?;
        assert_eq!(free(&node, 0)?, before);
        // It is suspended already.
        ensure!(suspend(&node, it.app.pid(), round == 2, round == 2)?.is_ok_and(|all| all.is_empty()));
    }
    // It is held now, too: its commands do not bring it back.
    it.go_on()?;
    until_true("the program waits", || {
        let now = it.app.progress()?;
        std::thread::sleep(Duration::from_millis(100));
        Ok(it.app.progress()? == now)
    })?;
    let info = node.client(it.app.pid())?;
    ensure!(info.worker == keeper && info.suspended.is_some_and(|it| it.hold), "{info:?}");
    let resumed = resume(&node, it.app.pid())?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    ensure!(resumed.len() == 1 && resumed[0].bytes >= BALLAST_BYTES, "{resumed:?}");
    moves(&node, &it.app, keeper)?;
    it.ends_well()?;
    node.finish()
}

#[test]
fn it_waits_for_room_and_says_so() -> Result {
    let node = small_gpus("1", &[])?;
    let first = Steady::run(&node, &BALLAST)?;
    first.stop()?;
    let keeper = now_deep(&node, &first.app, false)?;
    let second = Steady::run(&node, &BALLAST)?;
    let before = first.app.progress()?;
    first.go_on()?;
    let info = until_waits(&node, &first.app)?;
    ensure!(info.contains("has room"), "{info}");
    let listed = node.rekindle(&["ps"].map(OsStr::new))?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    ensure!(listed.contains("suspended deeply, waits for a worker: no GPU of its kind has room"), "{listed}");
    second.app.advances()?;
    // A step may have been under way when the process was stopped.
    ensure!(first.app.progress()? <= before + 1 && node.client(first.app.pid())?.worker == keeper);
    second.ends_well()?;
    moves(&node, &first.app, keeper)?;
    first.ends_well()?;
    node.finish()
}

/// Waits until a program waits for another worker in vain, and returns why.
fn until_waits(node: &Node, app: &App) -> Result<String> {
    rekindle_e2e::until("the program waits for a worker", || {
        let info = node.client(app.pid())?;
        Ok(info.not_moved.filter(|_| info.suspended.is_some_and(|it| it.waits_for_room)))
    })
}

#[test]
fn where_its_gpu_has_no_room_it_goes_on_on_another_and_is_dumped_and_restored_there() -> Result {
    let node = small_gpus("2", &[])?;
    let first = Steady::run(&node, &BALLAST)?;
    first.stop()?;
    let keeper = now_deep(&node, &first.app, false)?;
    let second = Steady::run(&node, &BALLAST)?;
    let (one, other) = (free(&node, 0)?, free(&node, 1)?);
    ensure!(one + BALLAST_BYTES < other, "{one} {other}");
    first.go_on()?;
    moves(&node, &first.app, keeper)?;
    let taken = (one.saturating_sub(free(&node, 0)?), other.saturating_sub(free(&node, 1)?));
    ensure!(taken.0 < BALLAST_BYTES && taken.1 > BALLAST_BYTES, "{taken:?}");
    second.app.advances()?;
    let (until, first) = (first.until, first.app);
    let image = node.dump_and_kill(first)?;
    let first = Steady { app: node.restore(&image)?, until };
    first.app.advances()?;
    second.ends_well()?;
    first.ends_well()?;
    node.finish()
}

#[test]
fn a_deeply_suspended_program_is_dumped_and_restored() -> Result {
    let node = small_gpus("1", &[])?;
    let it = Steady::run(&node, &BALLAST)?;
    now_deep(&node, &it.app, true)?;
    let image = node.dump(&it.app)?;
    it.app.advances()?;
    let until = it.until.clone();
    it.ends_well()?;
    fs::remove_file(&until)?;
    let it = Steady { app: node.restore(&image)?, until };
    it.app.advances()?;
    now_deep(&node, &it.app, false)?;
    it.app.advances()?;
    it.ends_well()?;
    node.finish()
}

#[test]
fn without_a_daemon_it_waits_and_with_the_next_it_goes_on() -> Result {
    let mut node = Node::start()?;
    let it = Steady::run(&node, &BALLAST)?;
    it.stop()?;
    let keeper = now_deep(&node, &it.app, false)?;
    let protocol = ["protocol", &*it.app.pid().to_string(), "stop"].map(str::to_owned);
    ensure!(node.rekindle(&protocol.each_ref().map(OsStr::new))?.status.success());
    node.kill_daemon()?;
    node.start_daemon(&[])?;
    until_true("the keeper has joined", || {
        let info = node.client(it.app.pid());
        Ok(info.is_ok_and(|it| it.worker == keeper && it.suspended.is_some_and(|it| it.deep)))
    })?;
    node.kill_daemon()?;
    let before = it.app.progress()?;
    it.go_on()?;
    std::thread::sleep(Duration::from_millis(200));
    ensure!(it.app.progress()? <= before + 1, "it has gone on without a worker");
    node.start_daemon(&[])?;
    moves(&node, &it.app, keeper)?;
    assert_eq!(node.client(it.app.pid())?.protocol, "stop");
    // The new worker outlives a daemon too, and its client is suspended again.
    node.kill_daemon()?;
    it.app.advances()?;
    node.start_daemon(&[])?;
    becomes(&node, &it.app, "running")?;
    assert_eq!(node.client(it.app.pid())?.protocol, "stop");
    let keeper = now_deep(&node, &it.app, false)?;
    moves(&node, &it.app, keeper)?;
    it.ends_well()?;
    node.finish()
}

#[test]
fn a_program_that_is_killed_leaves_no_keeper_and_one_whose_keeper_is_killed_is_lost() -> Result {
    let node = Node::start()?;
    let it = Steady::run(&node, &BALLAST)?;
    let keeper = now_deep(&node, &it.app, true)?;
    it.app.kill()?;
    process::wait_gone("the keeper of a program that is gone", keeper)?;
    node.is_idle()?;
    let it = Steady::run(&node, &BALLAST)?;
    it.stop()?;
    let keeper = now_deep(&node, &it.app, false)?;
    process::signal(keeper, libc::SIGKILL)?;
    becomes(&node, &it.app, "lost")?;
    it.go_on()?;
    ensure!(!it.app.end()?.success(), "it has gone on without its GPU state");
    node.finish()
}

/// How long the content of the ballast takes to load.
const SLOW: (&str, &str) = ("SIMGPU_COPY_GBPS", "0.05");

/// Suspends a program deeply and lets it go on; its next worker loads, slowly. Returns its keeper and that worker.
fn begins_to_move(node: &Node, it: &Steady) -> Result<(i32, i32)> {
    it.stop()?;
    let keeper = now_deep(node, &it.app, false)?;
    node.wait_for_spare()?;
    let before = node.processes();
    it.go_on()?;
    let taken = rekindle_e2e::until("a worker of the pool is taken", || {
        let now = node.processes();
        // Another has begun to take the place of the one that was ready.
        let another = now.iter().any(|it| !before.contains(it));
        let others = [keeper, node.daemon_pid()?, it.app.pid()];
        Ok(before.iter().copied().find(|pid| another && !others.contains(pid)))
    })?;
    ensure!(node.client(it.app.pid())?.worker == keeper, "the move is over already");
    Ok((keeper, taken))
}

#[test]
fn a_worker_that_is_killed_while_it_takes_a_program_over_is_followed_by_another() -> Result {
    let node = small_gpus("1", &[SLOW])?;
    let it = Steady::run(&node, &BALLAST)?;
    let (keeper, taken) = begins_to_move(&node, &it)?;
    process::signal(taken, libc::SIGKILL)?;
    moves(&node, &it.app, keeper)?;
    it.ends_well()?;
    node.finish()
}

#[test]
fn a_keeper_that_is_killed_while_its_program_is_taken_over_takes_the_program_with_it() -> Result {
    let node = small_gpus("1", &[SLOW])?;
    let it = Steady::run(&node, &BALLAST)?;
    let (keeper, taken) = begins_to_move(&node, &it)?;
    process::signal(keeper, libc::SIGKILL)?;
    ensure!(!it.app.end()?.success(), "it has gone on without its GPU state");
    process::wait_gone("the worker of a program that is gone", taken)?;
    node.finish()
}

#[test]
fn a_daemon_that_is_killed_while_a_worker_loads_changes_nothing() -> Result {
    let mut node = small_gpus("1", &[SLOW])?;
    let it = Steady::run(&node, &BALLAST)?;
    for _ in 0..2 {
        let (keeper, taken) = begins_to_move(&node, &it)?;
        node.kill_daemon()?;
        process::wait_gone("a worker that had no client yet", taken)?;
        start_with_small_gpus(&mut node, "1", &[SLOW])?;
        moves(&node, &it.app, keeper)?;
    }
    it.ends_well()?;
    node.finish()
}

/// The number of kills at random moments, and the moments, in microseconds after the program was let go on.
const KILLS: u64 = 6;
const MOMENTS: u64 = 120_000;

#[test]
fn a_daemon_that_is_killed_at_any_moment_of_a_move_changes_nothing() -> Result {
    let mut node = Node::start()?;
    let mut random = Random::new();
    let it = Steady::run(&node, &[])?;
    for _ in 0..KILLS * repetitions() {
        node.wait_for_spare()?;
        it.stop()?;
        let keeper = now_deep(&node, &it.app, false)?;
        it.go_on()?;
        std::thread::sleep(Duration::from_micros(random.below(MOMENTS)));
        node.kill_daemon()?;
        node.start_daemon(&[])?;
        moves(&node, &it.app, keeper)?;
    }
    it.ends_well()?;
    node.finish()
}

/// The number of suspends of a test if there is time for them, the least number, and the time.
const MOST: u64 = 300;
const LEAST: u64 = 20;
const TIME: Duration = Duration::from_secs(15);

#[test]
fn programs_of_random_numbers_are_moved_again_and_again_under_load_and_end_as_they_would_alone() -> Result {
    let node = Node::start()?;
    let mut random = Random::new();
    let (began, mut done) = (Instant::now(), 0);
    while done < if began.elapsed() > TIME { LEAST } else { MOST } * repetitions() {
        let seed = random.below(1 << 32).to_string();
        let arguments = ["--seed", &seed, "--steps", "400", "--kib", "16"];
        let expected = undisturbed("random", &arguments)?;
        let app = node.run_held("random", &[&arguments[..], &["--sleep-us", "1000"]].concat(), None)?;
        app.reaches(2)?;
        // The program may end at any time.
        while let Ok(all) = suspend(&node, app.pid(), random.below(4) == 0, random.below(4) != 0)? {
            done += all.len() as u64;
            std::thread::sleep(Duration::from_micros(random.below(30_000)));
            if resume(&node, app.pid())?.is_err() {
                break;
            }
            std::thread::sleep(Duration::from_micros(random.below(5000)));
        }
        assert_eq!(app.finish()?, expected, "seed {seed}");
    }
    eprintln!("{done} suspends");
    node.finish()
}

/// Limits the object log to few entries of unloaded code and destroyed contexts, in builds with debug assertions.
const FEW: (&str, &str) = ("REKINDLE_MOST_LIVES", "24");

#[test]
fn a_program_whose_log_was_cut_is_moved_after_a_rehearsal() -> Result {
    let arguments = ["--iterations", "160", "--sleep-us", "2000"];
    let expected = undisturbed("unloads", &arguments)?;
    let mut node = Node::with_gpu(&[FEW])?;
    let app = node.run("unloads", &arguments)?;
    for step in [70, 110] {
        app.reaches(step)?;
        let keeper = now_deep(&node, &app, true)?;
        resume(&node, app.pid())?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
        moves(&node, &app, keeper)?;
    }
    let rehearsals = fs::read_to_string(node.path("daemon.log"))?.matches("a rehearsal has shown").count();
    assert!(rehearsals == 2 || !cfg!(debug_assertions), "{rehearsals}");
    assert_eq!(app.finish()?, expected);

    // A worker of the next daemon can load as much code as it needs for itself.
    let app = node.run("unloads", &["--iterations", "800", "--sleep-us", "5000"])?;
    app.reaches(60)?;
    assert!(node.stop_daemon()?.success());
    node.start_daemon(&[FEW, ("SIMGPU_FAULT", &failing_loads(9))])?;
    becomes(&node, &app, "running")?;
    let answer = suspend(&node, app.pid(), false, true)?;
    if cfg!(debug_assertions) {
        let failure = answer.err().context("it was suspended")?;
        ensure!(failure.reason.contains("can be suspended without --deep"), "{failure}");
    }
    app.advances()?;
    app.kill()?;
    node.finish()
}

#[test]
fn a_container_with_limits_is_moved_and_keeps_them() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let files = ["--until", "/shared/end", "--progress", "/shared/progress"];
    let program = [&["steady", "--sleep-us", "1000"], &files[..], &BALLAST].concat();
    let options = ["dev.rekindle/enable=true", "dev.rekindle/gpu-memory-mib=160", "dev.rekindle/workers=1"];
    let options: Vec<_> = options.iter().flat_map(|it| ["--annotation", it]).chain(["--volume", &volume]).collect();
    podman.run("lender", &options, &program)?;
    // The file is rewritten all the time.
    let progress = || fs::read_to_string(shared.join("progress")).ok().and_then(|it| it.trim().parse::<u64>().ok());
    until_true("the container's program works", || Ok(progress().is_some_and(|steps| steps >= 5)))?;
    for _ in 0..3 {
        let client = node.clients()?.pop().context("there is a client")?;
        let pid = client.pid.to_string();
        let done = node.rekindle(&["suspend", "--deep", "--hold", &*pid].map(OsStr::new))?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let done = node.rekindle(&["resume", &*pid].map(OsStr::new))?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        let moved = node.clients()?.pop().context("there is a client")?;
        ensure!(moved.pid == client.pid && moved.worker != client.worker && moved.state == "running", "{moved:?}");
        // The program allocates in every step, and has most of what its container may have.
        let before = progress().unwrap_or(0);
        until_true("the program goes on", || Ok(progress().is_some_and(|steps| steps > before + 5)))?;
    }
    fs::write(shared.join("end"), "")?;
    assert_eq!(podman.output("lender")?, "steady ok\n");
    drop(podman);
    node.finish()
}
