//! Workers of containers that are charged to what their containers lie in (`containers.charge`): beside the container's cgroup, where
//! neither podman nor CRIU freezes, dumps or kills them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use rekindle_e2e::podman::Podman;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result, until};
use rekindle_wire::control::{Reply, Request};

const CONFIGURATION: &str = "[containers]\ncharge = \"parent\"\n";

/// The cgroup of version 2 of a process.
fn cgroup(pid: i32) -> Result<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"));
    path.map(str::to_owned).with_context(|| format!("process {pid} is in no cgroup of version 2: {text}"))
}

fn folder(cgroup: &str) -> PathBuf {
    Path::new("/sys/fs/cgroup").join(cgroup.trim_start_matches('/'))
}

fn is_frozen(cgroup: &str) -> Result<bool> {
    Ok(fs::read_to_string(folder(cgroup).join("cgroup.events"))?.lines().any(|line| line == "frozen 1"))
}

fn parent(cgroup: &str) -> Result<&str> {
    cgroup.rsplit_once('/').map(|it| it.0).with_context(|| format!("{cgroup} has no parent"))
}

/// Whether the test's daemon can make cgroups beside those of containers here.
fn has_cgroups() -> bool {
    let probe = folder(&format!("/rekindle-probe-{}", std::process::id()));
    let made = fs::create_dir(&probe).and_then(|()| {
        let is_cgroup = probe.join("cgroup.freeze").exists();
        fs::remove_dir(&probe)?;
        Ok(is_cgroup)
    });
    if !matches!(made, Ok(true)) {
        eprintln!("skipped: no cgroups of version 2 can be made in /sys/fs/cgroup here: {made:?}");
    }
    matches!(made, Ok(true))
}

fn progress(file: &Path) -> Result<u64> {
    Ok(fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0))
}

/// Waits until the program has written its progress once more.
fn goes_on(file: &Path) -> Result {
    let before = progress(file)?;
    until_true(&format!("progress beyond {before}"), || Ok(progress(file)? > before))
}

/// Checks that a container's worker is beside the container's cgroup. Returns the worker, and its cgroup.
fn worker_beside(node: &Node, podman: &Podman, name: &str) -> Result<(i32, String)> {
    let pid = podman.pid(name)?;
    let id = podman.call(&["inspect", "--format", "{{.Id}}", name])?.trim().to_owned();
    let worker = until(&format!("{name} has a worker"), || Ok(node.client(pid).ok().map(|it| it.worker)))?;
    let (container, its) = (cgroup(pid)?, cgroup(worker)?);
    ensure!(its.contains("/rekindle-") && its.ends_with(&id), "the worker of {name} ({id}) is in {its}");
    ensure!(parent(&its)? == parent(&container)?, "the worker is in {its}, and {name} in {container}");
    Ok((worker, its))
}

fn are_not_disturbed(runtime: &'static str) -> Result {
    let mut node = Node::at_default_socket_with(CONFIGURATION)?;
    let podman = Podman::with_runtime(&node, runtime)?;
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let file = shared.join("progress");
    let volume = format!("{}:/shared", shared.display());
    let options = ["--annotation", "dev.rekindle/enable=true", "--volume", &volume];
    let program = ["globals", "--progress", "/shared/progress", "--iterations", "1000000", "--sleep-us", "4000"];
    podman.run("job", &options, &program)?;
    goes_on(&file)?;
    let container = cgroup(podman.pid("job")?)?;
    let (worker, beside) = worker_beside(&node, &podman, "job")?;

    // A paused container stands still, and its worker answers.
    podman.call(&["pause", "job"])?;
    ensure!(is_frozen(&container)? && !is_frozen(&beside)?, "paused: the container is frozen, and its worker is not");
    let answered = node.ask(&Request::Calls { pid: podman.pid("job")? })?;
    ensure!(matches!(answered, Reply::Calls(_)), "the worker of a paused container answers {answered:?}");
    podman.call(&["unpause", "job"])?;
    goes_on(&file)?;

    // A dump freezes the container's cgroup, asks the worker for the GPU's memory, and knows nothing of the worker's cgroup.
    let export = node.path("export.tar");
    let export = export.to_string_lossy();
    let options = ["--leave-running", "--compress", "none", "--export", &export, "job"];
    podman.call(&[&["container", "checkpoint"], &options[..]].concat())?;
    goes_on(&file)?;
    let output = Command::new("tar").args(["-xOf", &export, "checkpoint/cgroup.img"]).output()?;
    ensure!(output.status.success(), "tar: {}", String::from_utf8_lossy(&output.stderr));
    ensure!(!output.stdout.windows(9).any(|it| it == b"rekindle-"), "the image has a cgroup of a worker");

    // The next daemon finds the worker where it is.
    node.stop_daemon()?;
    node.start_daemon(&[])?;
    let again = worker_beside(&node, &podman, "job")?;
    ensure!(again == (worker, beside.clone()), "it was worker {worker} in {beside}, and is {again:?}");

    // With its container a worker ends, and the last one takes the cgroup with it. A restored container's worker is charged, too.
    let gone = |cgroup: &str| until_true(&format!("{cgroup} is removed"), || Ok(!folder(cgroup).exists()));
    podman.call(&["container", "checkpoint", "job"])?;
    gone(&beside)?;
    podman.call(&["container", "restore", "job"])?;
    goes_on(&file)?;
    let (_, beside) = worker_beside(&node, &podman, "job")?;
    podman.call(&["kill", "job"])?;
    gone(&beside)?;
    // CRIU puts the processes of a container with another name into their former cgroup, which has the same parent.
    podman.will_restore("other");
    podman.call(&["container", "restore", "--import", &export, "--name", "other"])?;
    goes_on(&file)?;
    let (worker, beside) = worker_beside(&node, &podman, "other")?;
    // A daemon that is not there when a worker ends leaves the cgroup to the next.
    node.stop_daemon()?;
    podman.call(&["kill", "other"])?;
    rekindle_e2e::process::wait_gone("the worker", worker)?;
    ensure!(folder(&beside).exists(), "{beside} is gone without a daemon");
    node.start_daemon(&[])?;
    gone(&beside)?;
    drop(podman);
    node.finish()
}

#[test]
fn workers_beside_their_container_are_not_paused_dumped_or_left() -> Result {
    if has_cgroups() { are_not_disturbed("runc") } else { Ok(()) }
}

#[test]
fn workers_beside_a_container_of_crun_are_not_either() -> Result {
    if has_cgroups() { are_not_disturbed("crun") } else { Ok(()) }
}

#[test]
fn workers_stay_with_the_daemon_unless_it_is_said_otherwise() -> Result {
    let node = Node::at_default_socket()?;
    let podman = Podman::new(&node)?;
    podman.run(
        "job",
        &["--annotation", "dev.rekindle/enable=true"],
        &["globals", "--iterations", "1000000", "--sleep-us", "4000"],
    )?;
    let pid = podman.pid("job")?;
    let worker = until("the container has a worker", || Ok(node.client(pid).ok().map(|it| it.worker)))?;
    assert_eq!(cgroup(worker)?, cgroup(node.daemon_pid()?)?);
    podman.call(&["kill", "job"])?;
    drop(podman);
    node.finish()
}
