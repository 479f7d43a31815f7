//! Instances of one image share on the GPU what they only read (`rekindle warm --resident=shared`).

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Image, Node, Result, until};
use rekindle_wire::control::{Resident, WarmInfo};

/// The allocations of `weights`: four layers and the state.
const ALLOCATIONS: usize = 5;
/// Those that it writes: two layers and the state.
const WRITTEN: usize = 3;

fn warm(node: &Node, dir: &Path, copies: usize) -> Result<WarmInfo> {
    let copies = copies.to_string();
    let arguments = ["warm", "--json", "--resident=shared", "--copies", &copies].map(OsStr::new);
    let output = node.rekindle(&[&arguments[..], &[dir.as_os_str()]].concat())?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut images: Vec<WarmInfo> = serde_json::from_slice(&output.stdout)?;
    let info = images.pop().context("no image is listed")?;
    ensure!(info.ready as usize >= copies.parse()? && info.resident == Some(Resident::Shared), "{info:?}");
    Ok(info)
}

fn ready(node: &Node, dir: &Path) -> Result {
    until_true("a worker waits", || Ok(warm(node, dir, 1).is_ok()))
}

fn forget(node: &Node, dir: &Path) -> Result {
    let output = node.rekindle(&["warm".as_ref(), "--forget".as_ref(), dir.as_ref()])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Dumps and kills `weights`. Returns the file that ends it.
fn dumped(node: &Node, options: &[&str]) -> Result<(Image, PathBuf)> {
    let until_file = node.fresh("until");
    let until = until_file.to_string_lossy();
    let app = node.run("weights", &[&["--until", &*until, "--sleep-us", "1000"], options].concat())?;
    app.reaches(20)?;
    Ok((node.dump_and_kill(app)?, until_file))
}

/// Lets a program make so many steps that each of its commands was among them several times.
fn goes_on(app: &App) -> Result {
    let now = app.progress()?;
    app.reaches(now + 50)
}

fn ends_well(app: App, until_file: &Path) -> Result {
    fs::write(until_file, "")?;
    assert_eq!(app.finish()?, "weights ok\n");
    fs::remove_file(until_file)?;
    Ok(())
}

/// Lines of the daemon's log, with those of its workers.
fn logged(node: &Node, what: &str) -> Result<Vec<String>> {
    let log = fs::read_to_string(node.path("daemon.log"))?;
    Ok(log.lines().filter(|line| line.contains(what)).map(str::to_owned).collect())
}

/// The bytes that the restores so far have borrowed.
fn borrowed(node: &Node) -> Result<Vec<u64>> {
    let lines = logged(node, "the client borrows memory")?;
    lines.iter().map(|line| Ok(number(line, "bytes=")?.parse()?)).collect()
}

fn number<'a>(line: &'a str, name: &str) -> Result<&'a str> {
    let (_, rest) = line.split_once(name).with_context(|| line.to_owned())?;
    Ok(rest.split(|it: char| !it.is_ascii_digit()).next().unwrap_or_default())
}

fn learns(options: &[&str]) -> Result {
    let node = Node::start()?;
    let (image, until_file) = dumped(&node, options)?;
    warm(&node, &image.dir, 1)?;
    let app = node.restore(&image)?;
    goes_on(&app)?;
    ends_well(app, &until_file)?;
    // What it has written the next one does not borrow, and nothing has to be watched again.
    ready(&node, &image.dir)?;
    let watched = logged(&node, "watched=")?.len();
    let app = node.restore(&image)?;
    goes_on(&app)?;
    let [first, second] = borrowed(&node)?[..] else { anyhow::bail!("{:?}", borrowed(&node)?) };
    let share = first / ALLOCATIONS as u64;
    assert_eq!((first, second), (share * ALLOCATIONS as u64, share * (ALLOCATIONS - WRITTEN) as u64));
    assert_eq!(logged(&node, "watched=")?.len(), watched);
    // Whoever borrows memory is saved like everybody, and a restore of that image is like every other.
    let second = node.dump_and_kill(app)?;
    ends_well(node.restore(&second)?, &until_file)?;
    forget(&node, &image.dir)?;
    node.finish()
}

#[test]
fn what_kernels_write_is_learned_and_the_rest_is_shared() -> Result {
    learns(&[])
}

#[test]
fn what_graphs_write_is_learned_and_the_rest_is_shared() -> Result {
    learns(&["--graph", "1"])
}

#[test]
fn a_kernel_that_writes_what_is_there_already_is_not_taken_to_read_only() -> Result {
    let node = Node::start()?;
    let (image, until_file) = dumped(&node, &["--idle", "1"])?;
    warm(&node, &image.dir, 1)?;
    for _ in 0..2 {
        ready(&node, &image.dir)?;
        let app = node.restore(&image)?;
        let now = app.progress()?;
        app.reaches(now + 100)?;
        ends_well(app, &until_file)?;
    }
    forget(&node, &image.dir)?;
    node.finish()
}

#[test]
fn a_write_that_nobody_has_foreseen_ends_the_process_loudly_and_is_foreseen_from_then_on() -> Result {
    let node = Node::start()?;
    let rebel = node.path("rebel");
    let (image, until_file) = dumped(&node, &["--rebel", &rebel.to_string_lossy()])?;
    warm(&node, &image.dir, 1)?;
    let app = node.restore(&image)?;
    goes_on(&app)?;
    fs::write(&rebel, "")?;
    app.was_killed(&image.tree)?;
    let why = logged(&node, "killing the process")?;
    ensure!(why.len() == 1 && why[0].contains("layer") && why[0].contains("error 700"), "{why:?}");
    ready(&node, &image.dir)?;
    let app = node.restore(&image)?;
    goes_on(&app)?;
    ends_well(app, &until_file)?;
    forget(&node, &image.dir)?;
    node.finish()
}

#[test]
fn programs_that_borrow_memory_are_suspended_and_resumed() -> Result {
    let node = Node::start()?;
    let (image, until_file) = dumped(&node, &[])?;
    warm(&node, &image.dir, 2)?;
    let app = node.restore(&image)?;
    for deep in [false, true] {
        goes_on(&app)?;
        let pid = app.pid().to_string();
        let mut arguments = vec!["suspend", &pid];
        arguments.extend(deep.then_some("--deep"));
        let arguments: Vec<&OsStr> = arguments.into_iter().map(OsStr::new).collect();
        let output = node.rekindle(&arguments)?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    goes_on(&app)?;
    ends_well(app, &until_file)?;
    forget(&node, &image.dir)?;
    node.finish()
}

#[test]
fn programs_that_borrow_memory_are_dumped_by_every_protocol_while_they_learn() -> Result {
    let node = Node::start()?;
    for protocol in ["stop", "clone", "cow", "recopy"] {
        let (image, until_file) = dumped(&node, &[])?;
        warm(&node, &image.dir, 1)?;
        let app = node.restore(&image)?;
        let pid = app.pid().to_string();
        let output = node.rekindle(&["protocol", &pid, protocol].map(OsStr::new))?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // The first dump finds launches that are watched, the second one none.
        let first = node.dump(&app)?;
        goes_on(&app)?;
        let second = node.dump_and_kill(app)?;
        for image in [first, second] {
            let app = node.restore(&image)?;
            goes_on(&app)?;
            ends_well(app, &until_file).with_context(|| format!("dumped by {protocol}"))?;
        }
        forget(&node, &image.dir)?;
    }
    node.finish()
}

#[test]
fn a_program_that_borrows_memory_outlives_the_daemon_that_has_lent_it() -> Result {
    let mut node = Node::start()?;
    let rebel = node.path("rebel");
    let (image, until_file) = dumped(&node, &["--rebel", &rebel.to_string_lossy()])?;
    warm(&node, &image.dir, 1)?;
    let app = node.restore(&image)?;
    goes_on(&app)?;
    node.kill_daemon()?;
    node.start_daemon(&[])?;
    goes_on(&app)?;
    ends_well(app, &until_file)?;

    // Nobody is left who kills the process after a write that was not foreseen: it learns that its context is lost.
    warm(&node, &image.dir, 1)?;
    let app = node.restore(&image)?;
    goes_on(&app)?;
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    fs::write(&rebel, "")?;
    let status = app.end()?;
    ensure!(status.code().is_some_and(|it| it != 0), "{status}");
    ensure!(app.errors()?.contains("illegal memory access"), "{}", app.errors()?);
    node.finish()
}

#[test]
fn ten_containers_of_one_image_have_room_where_nine_would_not() -> Result {
    const INSTANCES: usize = 10;
    let mut node = Node::at_default_socket()?;
    node.stop_daemon()?;
    let machine = node.path("machine");
    fs::write(&machine, "")?;
    // Five allocations of 16 MiB: the template takes 80 MiB, an instance 48 MiB of its own, when it is known what it writes. Ten
    // instances with memory of their own for everything would take 800 MiB.
    let environment =
        [("SIMGPU_MACHINE", &*machine.to_string_lossy()), ("SIMGPU_MEMORY", "720M"), ("SIMGPU_DEVICES", "1")];
    node.start_daemon(&environment)?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let options = ["--device", "rekindle.dev/gpu=0", "--volume", &volume, "--annotation", "dev.rekindle/share=true"];
    let program = ["/apps/weights", "--until", "/shared/go", "--kib", "16384", "--sleep-us", "2000"];
    podman.run("first", &options, &program)?;
    let first = podman.pid("first")?;
    until("the program works", || Ok(node.clients()?.into_iter().find(|it| it.pid == first && it.commands > 200)))?;
    let (export, dir) = podman.export_and_unpack(&node, "first")?;
    // The first one teaches what is written.
    warm(&node, &dir, 1)?;
    podman.import_at_once(&export, &["teacher"])?;
    until("it has written everything", || {
        Ok((logged(&node, "the client has memory of its own")?.len() > 4).then_some(()))
    })?;
    warm(&node, &dir, INSTANCES - 1)?;
    let names: Vec<String> = (1..INSTANCES).map(|it| format!("instance{it}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    podman.import_at_once(&export, &names)?;
    assert_eq!(node.clients()?.len(), INSTANCES);
    fs::write(shared.join("go"), "")?;
    for name in names.into_iter().chain(["teacher"]) {
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
        ensure!(podman.call(&["logs", name])?.ends_with("weights ok\n"), "{name}");
    }
    forget(&node, &dir)?;
    drop(podman);
    node.finish()
}
