//! Containers of Docker, by `rekindle checkpoint` and `rekindle restore` with `--engine docker`. Where there is no Docker the tests say
//! so.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use anyhow::{Context, ensure};
use rekindle_e2e::app::{Hold, no_progress, undisturbed};
use rekindle_e2e::contained::{is_installed, root_archive};
use rekindle_e2e::process::signal;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result, stage};
use serde_json::Value;

const IMAGE: &str = "rekindle-e2e-docker";
const ARGUMENTS: [&str; 4] = ["--iterations", "600", "--sleep-us", "4000"];

/// Docker's daemon, and the containers of a test, whose node is at the default socket and so has the host. Dropping this value removes the containers and ends the daemon.
struct Docker<'a> {
    node: &'a Node,
    daemon: Option<Child>,
    containers: RefCell<Vec<String>>,
}

impl<'a> Docker<'a> {
    /// Prepares Docker; its daemon does not run yet. None where there is no Docker.
    fn new(node: &'a Node) -> Result<Option<Self>> {
        if !is_installed("dockerd", "docker.io") {
            return Ok(None);
        }
        fs::create_dir_all("/etc/cdi")?;
        let mut command = Command::new(stage::program("rekindle-oci-hook")?);
        stage::clean_environment(&mut command);
        command.arg("--lib-dir").arg(stage::interposer()?).args([
            "cdi",
            "generate",
            "--output",
            "/etc/cdi/rekindle.json",
        ]);
        let output = command.output()?;
        ensure!(output.status.success(), "cdi generate: {}", String::from_utf8_lossy(&output.stderr));
        Ok(Some(Self { node, daemon: None, containers: RefCell::default() }))
    }

    /// Starts Docker's daemon, which keeps the containers of one before it.
    fn start(&mut self, experimental: bool) -> Result {
        let configuration = self.node.path("docker.json");
        let settings = serde_json::json!({
            "features": { "cdi": true }, "cdi-spec-dirs": ["/etc/cdi"], "experimental": experimental,
            "bridge": "none", "iptables": false, "ip6tables": false,
        });
        fs::write(&configuration, settings.to_string())?;
        let log = File::options().create(true).append(true).open(self.node.path("dockerd.log"))?;
        let mut command = Command::new("dockerd");
        stage::clean_environment(&mut command);
        command.arg("--config-file").arg(&configuration).stdout(log.try_clone()?).stderr(log);
        self.daemon = Some(command.spawn().context("cannot start dockerd")?);
        until_true("dockerd answers", || Ok(self.run(&["info"])?.status.success()))
    }

    fn stop(&mut self) -> Result {
        if let Some(mut daemon) = self.daemon.take() {
            signal(daemon.id() as i32, libc::SIGTERM)?;
            daemon.wait()?;
        }
        Ok(())
    }

    fn run(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new("docker");
        stage::clean_environment(&mut command);
        Ok(command.args(arguments).output()?)
    }

    fn call(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "docker {arguments:?} ended with {}: {errors}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Makes the image of the tests of podman known to Docker.
    fn make_image(&self) -> Result {
        let archive = self.node.path("image.tar");
        root_archive(&archive)?;
        self.call(&["import", &archive.to_string_lossy(), IMAGE]).map(drop)
    }

    fn run_container(&self, name: &str, options: &[&str], program: &[&str]) -> Result {
        self.containers.borrow_mut().push(name.to_owned());
        let apps = format!("{}:/apps:ro", stage::apps()?.display());
        let mut all = vec!["run", "--detach", "--name", name, "--network", "none", "--volume", &apps];
        all.extend(options);
        all.push(IMAGE);
        all.extend(program);
        self.call(&all).map(drop)
    }

    fn status(&self, name: &str) -> Result<String> {
        Ok(self.call(&["inspect", "--format", "{{.State.Status}}", name])?.trim().to_owned())
    }
}

impl Drop for Docker<'_> {
    fn drop(&mut self) {
        for name in self.containers.borrow().iter() {
            let _ = self.run(&["rm", "--force", name]);
        }
        let _ = self.stop();
    }
}

/// `rekindle VERB --engine docker`: the exit code, stdout and stderr.
fn rekindle(node: &Node, verb: &str, arguments: &[&str]) -> Result<(i32, String, String)> {
    let mut all = vec![OsStr::new(verb), "--engine".as_ref(), "docker".as_ref()];
    all.extend(arguments.iter().map(OsStr::new));
    let output = node.rekindle(&all)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok((output.status.code().context("a signal")?, text(&output.stdout), text(&output.stderr)))
}

fn progress(file: &Path) -> Result<u64> {
    Ok(fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0))
}

/// A program in a container that writes its progress, and that is held near its end.
fn program(node: &Node, docker: &Docker) -> Result<(PathBuf, Hold)> {
    let shared = node.path("shared");
    fs::create_dir(&shared)?;
    let hold = Hold::new(shared.join("hold"), 500)?;
    let volume = format!("{}:/shared", shared.display());
    let options = ["--device", "rekindle.dev/gpu=all", "--volume", &volume, "--env", "APP_HOLD=/shared/hold"];
    let mut program = vec!["/apps/globals", "--progress", "/shared/progress"];
    program.extend(ARGUMENTS);
    docker.run_container("job", &options, &program)?;
    Ok((shared.join("progress"), hold))
}

#[test]
fn a_container_of_docker_is_checkpointed_while_it_runs_stopped_and_restored() -> Result {
    let expected = undisturbed("globals", &ARGUMENTS)?;
    let node = Node::at_default_socket_with("[containers]\ncharge = \"parent\"\n")?;
    let Some(mut docker) = Docker::new(&node)? else { return node.finish() };
    docker.start(true)?;
    docker.make_image()?;
    let (file, hold) = program(&node, &docker)?;
    let goes_on = || {
        let before = progress(&file)?;
        until_true(&format!("progress beyond {before}"), || Ok(progress(&file)? > before))
    };
    goes_on()?;

    let job = ["--container", "job"];
    let (code, out, err) = rekindle(&node, "checkpoint", &[&job[..], &["--checkpoint", "one", "--json"]].concat())?;
    assert_eq!(code, 0, "{out} {err}");
    let said: Value = serde_json::from_str(&out)?;
    assert_eq!((&said["outcome"], &said["checkpoint"]), (&"done".into(), &"one".into()));
    assert!(said["dump"]["gpu_bytes"].as_u64().is_some_and(|it| it > 0), "{out}");
    goes_on()?;

    // Its worker is beside the cgroup that Docker has made.
    let id = docker.call(&["inspect", "--format", "{{.Id}}", "job"])?.trim().to_owned();
    let pid: i32 = docker.call(&["inspect", "--format", "{{.State.Pid}}", "job"])?.trim().parse()?;
    let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", node.client(pid)?.worker))?;
    assert!(
        cgroup.lines().any(|line| line.starts_with("0::") && line.ends_with(&format!("/rekindle-{id}"))),
        "{cgroup}"
    );

    // A name is used once, and a container that runs is not restored.
    let (code, _, err) = rekindle(&node, "checkpoint", &[&job[..], &["--checkpoint", "one"]].concat())?;
    assert!(code == 1 && err.contains("already exists") && err.contains("choose another name"), "{code} {err}");
    let (code, _, err) = rekindle(&node, "restore", &[&job[..], &["--checkpoint", "one"]].concat())?;
    assert!(code == 3 && err.contains("container job runs") && err.contains("docker stop job"), "{code} {err}");
    docker.call(&["pause", "job"])?;
    let (code, _, err) = rekindle(&node, "checkpoint", &[&job[..], &["--checkpoint", "two"]].concat())?;
    assert!(code == 3 && err.contains("`docker unpause job`"), "{code} {err}");
    docker.call(&["unpause", "job"])?;

    let (code, out, err) = rekindle(&node, "checkpoint", &["--all", "--checkpoint", "two", "--kill"])?;
    assert!(code == 0 && out.contains("container job") && out.contains("as two"), "{code} {out} {err}");
    assert_eq!(docker.status("job")?, "exited");
    let stopped = progress(&file)?;
    let (code, _, err) = rekindle(&node, "restore", &[&job[..], &["--checkpoint", "three"]].concat())?;
    assert!(code == 1 && err.contains("three"), "{code} {err}");
    hold.lift();
    no_progress(&file)?;
    let (code, out, err) = rekindle(&node, "restore", &[&job[..], &["--checkpoint", "two"]].concat())?;
    assert_eq!((code, out.as_str()), (0, "restored container job from two\n"), "{err}");
    until_true("progress after the restore", || Ok(progress(&file)? >= stopped))?;
    assert_eq!(docker.call(&["wait", "job"])?.trim(), "0");
    assert_eq!(docker.call(&["logs", "job"])?, expected);
    drop(docker);
    node.finish()
}

#[test]
fn docker_without_a_daemon_or_without_checkpoints_says_what_to_do() -> Result {
    let node = Node::at_default_socket()?;
    let Some(mut docker) = Docker::new(&node)? else { return node.finish() };
    let one = ["--container", "job", "--checkpoint", "one"];
    let (code, _, err) = rekindle(&node, "checkpoint", &one)?;
    assert!(code == 3 && err.contains("systemctl start docker"), "{code} {err}");
    docker.start(false)?;
    docker.make_image()?;
    let (code, _, err) = rekindle(&node, "checkpoint", &one)?;
    assert!(code == 3 && err.contains("docker knows no container job"), "{code} {err}");
    let (file, _hold) = program(&node, &docker)?;
    until_true("the program begins", || Ok(progress(&file)? > 0))?;
    let (code, _, err) = rekindle(&node, "checkpoint", &one)?;
    assert!(code == 1 && err.contains("\"experimental\": true"), "{code} {err}");
    assert_eq!(docker.status("job")?, "running");
    docker.call(&["kill", "job"])?;
    until_true("the container ends", || Ok(docker.status("job")? == "exited"))?;
    let (code, _, err) = rekindle(&node, "restore", &one)?;
    assert!(code == 1 && err.contains("\"experimental\": true"), "{code} {err}");
    drop(docker);
    node.finish()
}
