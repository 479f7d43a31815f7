//! Programs that are suspended in place: their GPU memory goes to others, and comes back when they go on.

use std::ffi::OsStr;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rekindle_e2e::app::undisturbed;
use rekindle_e2e::disk::SmallDisk;
use rekindle_e2e::podman::Podman;
use rekindle_e2e::random::{Random, repetitions};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Node, Result, process, stage, until};
use rekindle_wire::control::{ClientInfo, Failure, FailureKind, Reply, Request, SuspendedInfo};

pub(crate) const BALLAST: [&str; 2] = ["--ballast-kib", "98304"];
pub(crate) const BALLAST_BYTES: u64 = 98304 << 10;

/// A program that works until a file exists.
pub(crate) struct Steady {
    pub(crate) app: App,
    pub(crate) until: std::path::PathBuf,
}

impl Steady {
    pub(crate) fn run(node: &Node, more: &[&str]) -> Result<Self> {
        let until = node.fresh("until");
        let of_file = ["--until", &*until.to_string_lossy(), "--sleep-us", "1000"];
        let app = node.run("steady", &[&of_file, more].concat())?;
        app.reaches(5)?;
        Ok(Self { app, until })
    }

    /// Stops the process, so that it sends no command.
    pub(crate) fn stop(&self) -> Result {
        self.signal(libc::SIGSTOP)
    }

    pub(crate) fn go_on(&self) -> Result {
        self.signal(libc::SIGCONT)
    }

    fn signal(&self, signal: i32) -> Result {
        // SAFETY: a plain system call.
        ensure!(unsafe { libc::kill(self.app.pid(), signal) } == 0, "{}", std::io::Error::last_os_error());
        Ok(())
    }

    pub(crate) fn ends_well(self) -> Result {
        fs::write(&self.until, "")?;
        assert_eq!(self.app.finish()?, "steady ok\n");
        Ok(())
    }
}

/// The daemon's answer.
pub(crate) type Answer = std::result::Result<Vec<SuspendedInfo>, Failure>;

pub(crate) fn suspend(node: &Node, pid: i32, hold: bool) -> Result<Answer> {
    match node.ask(&Request::Suspend { pid, hold, deep: false })? {
        Reply::Suspended(all) => Ok(Ok(all)),
        Reply::Failed(failure) => Ok(Err(failure)),
        other => bail!("Suspend was answered by {other:?}"),
    }
}

pub(crate) fn resume(node: &Node, pid: i32) -> Result<Answer> {
    match node.ask(&Request::ResumeSuspended { pid })? {
        Reply::WereResumed(all) => Ok(Ok(all)),
        Reply::Failed(failure) => Ok(Err(failure)),
        other => bail!("ResumeSuspended was answered by {other:?}"),
    }
}

fn now_suspended(node: &Node, app: &App, hold: bool) -> Result<u64> {
    let all = suspend(node, app.pid(), hold)?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    let [one] = &all[..] else { bail!("{all:?}") };
    ensure!(one.pid == app.pid(), "{one:?}");
    Ok(one.bytes)
}

pub(crate) fn becomes(node: &Node, app: &App, state: &str) -> Result<ClientInfo> {
    until(&format!("process {} is {state}", app.pid()), || {
        Ok(Some(node.client(app.pid())?).filter(|it| it.state == state))
    })
}

/// Whether the program is a zombie by now.
pub(crate) fn has_ended(app: &App) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", app.pid())).context("it has ended");
    stat.is_ok_and(|it| it.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')))
}

/// Processes of such a node have one GPU, whose memory holds one ballast and not two.
fn one_small_gpu() -> Result<Node> {
    let mut node = Node::without_daemon()?;
    let machine = node.path("machine");
    fs::write(&machine, "")?;
    let machine = machine.to_string_lossy().into_owned();
    node.start_daemon(&[("SIMGPU_MACHINE", &machine), ("SIMGPU_MEMORY", "192M"), ("SIMGPU_DEVICES", "1")])?;
    Ok(node)
}

#[test]
fn memory_of_a_suspended_program_serves_another_and_comes_back_when_there_is_room() -> Result {
    let node = one_small_gpu()?;
    let first = Steady::run(&node, &BALLAST)?;
    first.stop()?;
    ensure!(now_suspended(&node, &first.app, false)? >= BALLAST_BYTES);
    let info = node.client(first.app.pid())?;
    ensure!(info.state == "suspended" && info.suspended.is_some_and(|it| !it.waits_for_room), "{info:?}");
    let second = Steady::run(&node, &BALLAST)?;
    let before = first.app.progress()?;
    first.go_on()?;
    until_true("the first program waits for room", || {
        Ok(node.client(first.app.pid())?.suspended.is_some_and(|it| it.waits_for_room))
    })?;
    second.app.advances()?;
    // A step may have been under way when the process was stopped.
    ensure!(first.app.progress()? <= before + 1);
    second.ends_well()?;
    first.app.reaches(before + 5)?;
    becomes(&node, &first.app, "running")?;
    first.ends_well()?;
    node.finish()
}

/// While the first part of the content is being loaded, the memory for another part cannot be had.
#[test]
fn memory_that_runs_out_beside_the_load_is_made_again_later() -> Result {
    // Of 17 ranges the worker has made all once, and makes them again: the first one before the load begins. It has made a few for
    // itself.
    for failing in [26, 28, 30] {
        let mut node = Node::without_daemon()?;
        node.start_daemon(&[("SIMGPU_FAULT", &format!("cuMemCreate:{failing}:2"))])?;
        let it = Steady::run(&node, &["--ballast-kib", "65536", "--pieces", "16"])?;
        ensure!(now_suspended(&node, &it.app, true)? >= 65536 << 10);
        let resumed = resume(&node, it.app.pid())?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
        ensure!(resumed.len() == 1 && resumed[0].bytes >= 65536 << 10, "{resumed:?}");
        let log = fs::read_to_string(node.path("daemon.log"))?;
        ensure!(log.contains("the GPU has no room for the client's memory now (cuMemCreate"), "{failing}: {log}");
        it.app.advances()?;
        ensure!(now_suspended(&node, &it.app, false)? >= 65536 << 10);
        it.app.advances()?;
        it.ends_well()?;
        node.finish()?;
    }
    Ok(())
}

#[test]
fn a_program_that_is_held_waits_until_somebody_resumes_it() -> Result {
    let node = Node::start()?;
    let it = Steady::run(&node, &BALLAST)?;
    ensure!(now_suspended(&node, &it.app, true)? >= BALLAST_BYTES);
    let before = it.app.progress()?;
    // The program runs up to its next answer from the GPU.
    until_true("the program waits", || {
        let now = it.app.progress()?;
        std::thread::sleep(Duration::from_millis(100));
        Ok(it.app.progress()? == now)
    })?;
    ensure!(it.app.progress()? <= before + 1 && node.client(it.app.pid())?.state == "suspended");
    // It is suspended already.
    ensure!(suspend(&node, it.app.pid(), true)?.is_ok_and(|all| all.is_empty()));
    let resumed = resume(&node, it.app.pid())?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    ensure!(resumed.len() == 1 && resumed[0].bytes >= BALLAST_BYTES, "{resumed:?}");
    it.app.advances()?;
    let again = resume(&node, it.app.pid())?.map_err(|failure| anyhow::anyhow!("{failure}"))?;
    ensure!(again.len() == 1 && again[0].bytes == 0, "{again:?}");
    it.ends_well()?;
    node.finish()
}

#[test]
fn a_suspended_program_is_dumped_and_restored() -> Result {
    let node = one_small_gpu()?;
    let it = Steady::run(&node, &BALLAST)?;
    now_suspended(&node, &it.app, true)?;
    let image = node.dump(&it.app)?;
    it.app.advances()?;
    let until = it.until.clone();
    it.ends_well()?;
    fs::remove_file(&until)?;
    let it = Steady { app: node.restore(&image)?, until };
    it.app.advances()?;
    it.ends_well()?;
    node.finish()
}

#[test]
fn a_suspended_program_outlives_its_daemon() -> Result {
    let mut node = Node::start()?;
    let it = Steady::run(&node, &BALLAST)?;
    it.stop()?;
    now_suspended(&node, &it.app, false)?;
    node.kill_daemon()?;
    node.start_daemon(&[])?;
    becomes(&node, &it.app, "suspended")?;
    node.kill_daemon()?;
    it.go_on()?;
    it.app.advances()?;
    node.start_daemon(&[])?;
    becomes(&node, &it.app, "running")?;
    it.ends_well()?;
    node.finish()
}

#[test]
fn a_disk_that_is_full_leaves_the_program_as_it_was() -> Result {
    let node = Node::start()?;
    let it = Steady::run(&node, &BALLAST)?;
    let disk = SmallDisk::mount(node.path("disk"), 120 << 10)?;
    let pid = it.app.pid().to_string();
    let to = disk.dir.to_string_lossy().into_owned();
    let arguments = ["suspend", &*pid, "--to", &*to].map(OsStr::new);
    fs::write(disk.dir.join("other"), vec![1; 40 << 20])?;
    let refused = node.rekindle(&arguments)?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && said.contains("do not fit into the directory"), "{said}");
    it.app.advances()?;
    fs::remove_file(disk.dir.join("other"))?;
    it.stop()?;
    let done = node.rekindle(&arguments)?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    ensure!(said.starts_with(&format!("suspended process {pid} (steady): ")), "{said}");
    // Nothing has a name there, and nothing is left when the program has its memory again.
    ensure!(fs::read_dir(&disk.dir)?.count() == 0);
    it.go_on()?;
    it.app.advances()?;
    until_true("the disk is empty", || {
        let found = fs::File::create(disk.dir.join("probe"))
            .and_then(|mut file| std::io::Write::write_all(&mut file, &vec![1; 100 << 20]));
        Ok(found.is_ok())
    })?;
    it.ends_well()?;
    node.finish()
}

#[test]
fn programs_that_share_memory_are_refused_and_go_on() -> Result {
    for name in ["ipc", "poolmates"] {
        let expected = undisturbed(name, &[])?;
        let node = Node::start()?;
        let app = node.run(name, &[])?;
        app.reaches(2)?;
        let refused = suspend(&node, app.pid(), false)?;
        let failure = refused.err().context("it was suspended")?;
        ensure!(failure.kind == FailureKind::Refused && failure.reason.contains("shares GPU memory"), "{failure}");
        assert_eq!(app.finish()?, expected);
        node.finish()?;
    }
    Ok(())
}

#[test]
fn a_process_that_uses_no_gpu_is_refused() -> Result {
    let node = Node::start()?;
    let failure = suspend(&node, std::process::id() as i32, false)?.err().context("it was suspended")?;
    ensure!(failure.kind == FailureKind::Refused && failure.reason.contains("rekindle ps"), "{failure}");
    let failure = suspend(&node, 1 << 29, false)?.err().context("it was suspended")?;
    ensure!(failure.kind == FailureKind::Refused, "{failure}");
    node.finish()
}

/// The number of suspends of a test if there is time for them, the least number, and the time.
const MOST: u64 = 1000;
const LEAST: u64 = 60;
const TIME: Duration = Duration::from_secs(15);

#[test]
fn programs_of_random_numbers_are_suspended_again_and_again_under_load_and_end_as_they_would_alone() -> Result {
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
        while let Ok(all) = suspend(&node, app.pid(), random.below(4) == 0)? {
            done += all.len() as u64;
            std::thread::sleep(Duration::from_micros(random.below(20_000)));
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

#[test]
fn commands_that_no_thread_waits_for_bring_a_suspended_program_back() -> Result {
    let arguments = ["--iterations", "300", "--sleep-us", "1000"];
    let expected = undisturbed("crew", &arguments)?;
    let node = Node::start()?;
    let app = node.run_held("crew", &arguments, None)?;
    app.reaches(2)?;
    // Nobody resumes it. The threads may all wait for commands that a quiesce has left in the worker, and send no other.
    let mut times = 0;
    while times < 40 && suspend(&node, app.pid(), false)?.is_ok() {
        times += 1;
        let before = app.progress()?;
        until("the program goes on", || Ok((app.progress()? > before || has_ended(&app)).then_some(())))?;
    }
    ensure!(times >= 3, "the program ended after {times} suspensions");
    assert_eq!(app.finish()?, expected);
    node.finish()
}

#[test]
fn a_container_is_suspended_and_resumed_by_its_name() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let files = ["--until", "/shared/end", "--progress", "/shared/progress"];
    let program = [&["steady", "--sleep-us", "1000"], &files[..], &BALLAST].concat();
    podman.run("lender", &["--annotation", "dev.rekindle/enable=true", "--volume", &volume], &program)?;
    // The wrapper calls podman with the options that this machine needs.
    let wrapper = node.path("podman");
    let lib = stage::repository()?.join("scripts/lib/podman.sh");
    stage::write_script(&wrapper, &format!("#!/bin/bash\n. '{}'\npodman_ \"$@\"\n", lib.display()))?;
    let rekindle = |verb: &str, more: &[&str]| -> Result<Vec<SuspendedInfo>> {
        let options = [verb, "--container", "lender", "--json", "--podman"].map(OsStr::new);
        let arguments: Vec<_> =
            options.into_iter().chain([wrapper.as_os_str()]).chain(more.iter().map(OsStr::new)).collect();
        let output = node.rekindle(&arguments)?;
        let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{said} {errors}");
        Ok(serde_json::from_str(&said)?)
    };
    // The file is rewritten all the time.
    let progress = || fs::read_to_string(shared.join("progress")).ok().and_then(|it| it.trim().parse::<u64>().ok());
    until_true("the container's program works", || Ok(progress().is_some_and(|steps| steps >= 5)))?;
    let worker = node.clients()?.first().map(|it| it.worker).context("there is a client")?;
    let descriptors = process::settled_descriptors(worker)?;
    let suspended = rekindle("suspend", &["--hold"])?;
    ensure!(suspended.len() == 1 && suspended[0].bytes >= BALLAST_BYTES, "{suspended:?}");
    let states: Vec<_> = node.clients()?.into_iter().map(|it| it.state).collect();
    assert_eq!(states, ["suspended"]);
    let resumed = rekindle("resume", &[])?;
    assert_eq!((resumed.len(), resumed[0].bytes), (1, suspended[0].bytes));
    until_true("the saved content is freed", || Ok(process::descriptors(worker)? == descriptors))?;
    let before = progress().unwrap_or(0);
    until_true("the program goes on", || Ok(progress().is_some_and(|steps| steps > before)))?;
    fs::write(shared.join("end"), "")?;
    assert_eq!(podman.output("lender")?, "steady ok\n");
    drop(podman);
    node.finish()
}
