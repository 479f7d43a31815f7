//! Images that are kept ready for restores: their content in host memory, workers that have loaded them, and content on the GPU.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{App, Image, Node, Result, process, until};
use rekindle_wire::control::{Reply, Request, Resident, WarmInfo};

/// Copies so slow that loading the memory of a program takes several seconds.
const SLOW: [(&str, &str); 1] = [("SIMGPU_COPY_GBPS", "0.01")];
const BALLAST_KIB: u64 = 49152;

/// Dumps and kills `steady`.
fn dumped(node: &Node) -> Result<(Image, PathBuf)> {
    let until_file = node.fresh("until");
    let ballast = BALLAST_KIB.to_string();
    let app = node
        .run("steady", &["--until", &*until_file.to_string_lossy(), "--ballast-kib", &ballast, "--sleep-us", "2000"])?;
    app.reaches(20)?;
    Ok((node.dump_and_kill(app)?, until_file))
}

fn warm(node: &Node, dir: &Path, options: &[&str]) -> Result<WarmInfo> {
    let mut arguments: Vec<&OsStr> = vec!["warm".as_ref(), "--json".as_ref(), dir.as_ref()];
    arguments.extend(options.iter().map(OsStr::new));
    let output = node.rekindle(&arguments)?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut images: Vec<WarmInfo> = serde_json::from_slice(&output.stdout)?;
    images.pop().context("no image is listed")
}

fn listed(node: &Node) -> Result<WarmInfo> {
    match node.ask(&Request::WarmImages)? {
        Reply::Warm(images) => images.into_iter().next().context("no image is warm"),
        other => anyhow::bail!("WarmImages was answered by {other:?}"),
    }
}

fn ready(node: &Node, count: u32) -> Result {
    until_true("workers wait for restores", || Ok(listed(node)?.ready == count))
}

/// The workers that have been prepared so far.
fn waiting(node: &Node) -> Result<Vec<i32>> {
    let log = fs::read_to_string(node.path("daemon.log"))?;
    let prepared = log.lines().filter(|line| line.contains("is loaded in advance"));
    let pid = |line: &str| line.split_once("worker=")?.1.split_whitespace().next()?.parse().ok();
    Ok(prepared.filter_map(pid).collect())
}

/// Ends what keeps images warm, so that nothing is left.
fn forget(node: &Node, dir: &Path) -> Result {
    let output = node.rekindle(&["warm".as_ref(), "--forget".as_ref(), dir.as_ref()])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn ends_well(app: App, until_file: &Path) -> Result {
    fs::write(until_file, "")?;
    assert_eq!(app.finish()?, "steady ok\n");
    fs::remove_file(until_file)?;
    Ok(())
}

/// Damages the image's content on the disk, so that a load from there would fail.
fn damage(image: &Image) -> Result {
    let file = image.file("rekindle-data")?;
    image.flip(&file, fs::metadata(image.path(&file))?.len() - (1 << 20))
}

#[test]
fn a_warm_image_is_restored_again_and_again_without_its_disk() -> Result {
    let node = Node::start()?;
    let (image, until_file) = dumped(&node)?;
    let info = warm(&node, &image.dir, &[])?;
    ensure!(info.ready == 1 && info.bytes > BALLAST_KIB << 10 && info.problem.is_none(), "{info:?}");
    damage(&image)?;
    for _ in 0..3 {
        ready(&node, 1)?;
        let app = node.restore(&image)?;
        app.advances()?;
        ends_well(app, &until_file)?;
    }
    assert_eq!(listed(&node)?.restores, 3);
    // What a restored program becomes can be saved and restored as always.
    ready(&node, 1)?;
    let app = node.restore(&image)?;
    app.advances()?;
    let second = node.dump_and_kill(app)?;
    ends_well(node.restore(&second)?, &until_file)?;
    forget(&node, &image.dir)?;
    node.finish()
}

#[test]
fn a_resident_image_has_all_its_memory_when_the_program_runs() -> Result {
    let mut node = Node::start()?;
    let (image, until_file) = dumped(&node)?;
    node.stop_daemon()?;
    node.start_daemon(&SLOW)?;
    let info = warm(&node, &image.dir, &["--resident"])?;
    ensure!(info.ready == 1 && info.resident == Some(Resident::Each), "{info:?}");
    damage(&image)?;
    let app = node.restore(&image)?;
    // With such copies a load takes seconds.
    assert_eq!(node.client(app.pid())?.state, "running");
    app.advances()?;
    ends_well(app, &until_file)?;
    forget(&node, &image.dir)?;
    node.finish()
}

#[test]
fn content_that_is_on_the_gpu_once_is_copied_there_for_each_restore() -> Result {
    let mut node = Node::start()?;
    let (image, until_file) = dumped(&node)?;
    let info = warm(&node, &image.dir, &["--resident=once", "--copies", "2"])?;
    ensure!(info.ready == 2 && info.resident == Some(Resident::Once), "{info:?}");
    damage(&image)?;
    for _ in 0..3 {
        ready(&node, 2)?;
        let app = node.restore(&image)?;
        app.advances()?;
        ends_well(app, &until_file)?;
    }
    let log = fs::read_to_string(node.path("daemon.log"))?;
    // The load of the first worker, and those of the restored programs: from the device, less what was loaded from files.
    let loads = log.lines().filter(|line| line.contains("phases of load")).count();
    assert_eq!(loads, 1 + 3, "each is loaded once");
    forget(&node, &image.dir)?;
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    node.finish()
}

#[test]
fn memory_of_a_warm_image_is_on_the_gpu_only_when_it_is_resident_or_restored() -> Result {
    let mut node = Node::without_daemon()?;
    let machine = node.path("machine");
    fs::write(&machine, "")?;
    let machine = machine.to_string_lossy().into_owned();
    // Room for one program and not for two.
    node.start_daemon(&[("SIMGPU_MACHINE", &machine), ("SIMGPU_MEMORY", "96M"), ("SIMGPU_DEVICES", "1")])?;
    let (image, until_file) = dumped(&node)?;
    assert_eq!(warm(&node, &image.dir, &["--copies", "2"])?.ready, 2);
    // Two restores wait, and take no memory from another program.
    let (other, other_until) = dumped(&node)?;
    let app = node.restore(&other)?;
    app.advances()?;
    let refused = node.try_restore(&image)?;
    ensure!(!refused.status.success() && refused.log.contains("no room"), "{refused:?}");
    ends_well(app, &other_until)?;
    let app = node.restore(&image)?;
    ends_well(app, &until_file)?;
    until_true("workers wait again", || Ok(warm(&node, &image.dir, &["--copies", "1"])?.ready == 1))?;
    // A resident one takes the memory, and a second one cannot be had. If the memory is there once, no program has room beside it.
    let info = warm(&node, &image.dir, &["--resident", "--copies", "2"])?;
    ensure!(info.ready == 1 && info.problem.is_some(), "{info:?}");
    ends_well(node.restore(&image)?, &until_file)?;
    forget(&node, &image.dir)?;
    node.finish()
}

#[test]
fn workers_that_are_killed_while_they_wait_are_replaced_and_a_killed_daemon_leaves_none() -> Result {
    let mut node = Node::start()?;
    let (image, until_file) = dumped(&node)?;
    warm(&node, &image.dir, &["--copies", "2"])?;
    let waiting = waiting(&node)?;
    process::kill_all(&waiting)?;
    until_true("both are replaced", || Ok(self::waiting(&node)?.len() == 4))?;
    ready(&node, 2)?;
    ends_well(node.restore(&image)?, &until_file)?;
    node.kill_daemon()?;
    until_true("no worker is left", || Ok(node.processes().is_empty()))?;
    node.start_daemon(&[])?;
    // Nothing of the warm image is needed.
    ends_well(node.restore(&image)?, &until_file)?;
    node.finish()
}

#[test]
fn one_image_is_restored_several_times_at_once_in_containers() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.generate_cdi()?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let volume = format!("{}:/shared", shared.display());
    let options = ["--device", "rekindle.dev/gpu=0", "--volume", &volume];
    podman.run("first", &options, &["/apps/steady", "--until", "/shared/go", "--ballast-kib", "8192"])?;
    let first = podman.pid("first")?;
    until("the program works", || Ok(node.clients()?.into_iter().find(|it| it.pid == first && it.commands > 50)))?;
    // Who wants to keep the image warm unpacks the archive too.
    let (export, dir) = podman.export_and_unpack(&node, "first")?;
    assert_eq!(warm(&node, &dir, &["--copies", "3"])?.ready, 3);
    let names = ["a", "b", "c", "d"];
    podman.import_at_once(&export, &names)?;
    assert_eq!(node.clients()?.len(), names.len());
    assert_eq!(listed(&node)?.restores, names.len() as u64);
    fs::write(shared.join("go"), "")?;
    for name in names {
        assert_eq!(podman.exit_code(name)?, 0, "{name}");
        ensure!(podman.call(&["logs", name])?.ends_with("steady ok\n"), "{name}");
    }
    forget(&node, &dir)?;
    drop(podman);
    node.finish()
}
