//! Containers of LXC, by its own commands. Where there is no LXC the tests say so.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::ensure;
use rekindle_e2e::contained::{APPS, Contained, SHARED, is_installed, root_directory};
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result, stage};

/// Containers of LXC in one directory. Dropping this value ends them.
struct Lxc {
    path: PathBuf,
    containers: RefCell<Vec<String>>,
}

impl Lxc {
    fn new(path: PathBuf) -> Self {
        Self { path, containers: RefCell::default() }
    }

    /// `lxc-VERB` of a container: its exit status, and what it says.
    fn run(&self, verb: &str, name: &str, arguments: &[&str]) -> Result<(ExitStatus, String)> {
        let mut command = Command::new(format!("lxc-{verb}"));
        stage::clean_environment(&mut command);
        let log = self.path.join(format!("{name}.log"));
        command.arg("--lxcpath").arg(&self.path).arg("--logfile").arg(&log);
        command.args(["--logpriority", "DEBUG", "--name", name]).args(arguments);
        // A file, because the monitor of a container that is restored keeps what the command writes to.
        let said = self.path.join("said");
        let file = File::create(&said)?;
        let status = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).status()?;
        Ok((status, fs::read_to_string(said)?))
    }

    fn call(&self, verb: &str, name: &str, arguments: &[&str]) -> Result<String> {
        let (status, said) = self.run(verb, name, arguments)?;
        ensure!(status.success(), "lxc-{verb} {arguments:?} ended with {status}: {said}");
        Ok(said)
    }

    fn restore(&self, name: &str, image: &str) -> Result {
        let (status, said) = self.run("checkpoint", name, &["--restore", "--checkpoint-dir", image])?;
        let log = fs::read_to_string(Path::new(image).join("restore.log")).unwrap_or_default();
        let wrong: Vec<_> = log.lines().filter(|line| line.contains("Error")).collect();
        ensure!(status.success(), "lxc-checkpoint ended with {status}: {said}\n{}", wrong.join("\n"));
        Ok(())
    }

    fn root(&self, name: &str) -> PathBuf {
        self.path.join(name).join("rootfs")
    }

    /// Writes the configuration of a container that has the GPUs and runs a program.
    fn define(&self, name: &str, program: &Contained, gpu: &str) -> Result {
        self.containers.borrow_mut().push(name.to_owned());
        let mut command = Command::new(stage::program("rekindle-oci-hook")?);
        stage::clean_environment(&mut command);
        let output = command.args(["lxc", "config", "--gpu", gpu]).output()?;
        ensure!(output.status.success(), "lxc config: {}", String::from_utf8_lossy(&output.stderr));
        let bind = |from: &Path, to: &str, mode: &str| {
            format!(
                "lxc.mount.entry = {} {} none bind,{mode},create=dir 0 0",
                from.display(),
                to.trim_start_matches('/')
            )
        };
        let lines = [
            format!("lxc.uts.name = {name}"),
            format!("lxc.rootfs.path = dir:{}", self.root(name).display()),
            "lxc.net.0.type = empty".to_owned(),
            "lxc.pty.max = 0".to_owned(),
            "lxc.tty.max = 0".to_owned(),
            "lxc.mount.auto = proc:mixed sys:ro".to_owned(),
            bind(&stage::apps()?, APPS, "ro"),
            bind(program.shared(), SHARED, "rw"),
            format!("lxc.environment = {}", program.variable()),
            format!("lxc.init.cmd = /bin/sh -c \"{}\"", Contained::command()),
            String::from_utf8(output.stdout)?,
        ];
        fs::create_dir_all(self.root(name))?;
        Ok(fs::write(self.path.join(name).join("config"), lines.join("\n"))?)
    }

    fn state(&self, name: &str) -> Result<String> {
        let text = self.call("info", name, &["--state", "--no-humanize"])?;
        // Other lines are warnings.
        Ok(text.lines().last().unwrap_or_default().trim().to_owned())
    }

    fn ends(&self, name: &str) -> Result {
        until_true("the container ends", || Ok(self.state(name)? == "STOPPED"))
    }
}

impl Drop for Lxc {
    fn drop(&mut self) {
        for name in self.containers.borrow().iter() {
            let _ = self.run("stop", name, &["--kill"]);
        }
    }
}

#[test]
fn a_container_of_lxc_is_checkpointed_while_it_runs_stopped_restored_and_moved() -> Result {
    let node = Node::at_default_socket()?;
    if !is_installed("lxc-checkpoint", "lxc") {
        return node.finish();
    }
    let here = Lxc::new(node.path("here"));
    let program = Contained::new(&node, "shared")?;
    here.define("job", &program, "all")?;
    root_directory(&node, &here.root("job"))?;
    here.call("start", "job", &[])?;
    program.goes_on()?;

    let images = ["running", "stopped"].map(|name| node.path(name).to_string_lossy().into_owned());
    here.call("checkpoint", "job", &["--checkpoint-dir", &images[0]])?;
    program.goes_on()?;
    here.call("checkpoint", "job", &["--stop", "--checkpoint-dir", &images[1]])?;
    here.ends("job")?;
    program.forget_progress()?;
    here.restore("job", &images[1])?;
    program.goes_on()?;
    let clients = node.clients()?;
    assert_eq!(clients.iter().map(|it| it.owner.container.as_deref()).collect::<Vec<_>>(), [Some("job")]);
    here.call("stop", "job", &["--kill"])?;
    here.ends("job")?;

    // As on another host: in another directory, with a copy of the root, in which LXC has made the places of the mounts.
    let there = Lxc::new(node.path("there"));
    there.define("job", &program, "all")?;
    let mut copy = Command::new("cp");
    copy.args(["--archive", "--no-target-directory"]).arg(here.root("job")).arg(there.root("job"));
    let status = copy.status()?;
    ensure!(status.success(), "cp ended with {status}");
    program.forget_progress()?;
    there.restore("job", &images[0])?;
    program.goes_on()?;
    program.finish()?;
    there.ends("job")?;
    drop((here, there));
    node.finish()
}

#[test]
fn lxc_starts_no_container_that_asks_for_a_gpu_that_is_not_there() -> Result {
    let node = Node::at_default_socket()?;
    if !is_installed("lxc-start", "lxc") {
        return node.finish();
    }
    let here = Lxc::new(node.path("here"));
    let program = Contained::new(&node, "shared")?;
    here.define("job", &program, "17")?;
    root_directory(&node, &here.root("job"))?;
    assert!(!here.run("start", "job", &[])?.0.success());
    let log = fs::read_to_string(here.path.join("job.log"))?;
    assert!(log.contains("there is no GPU \"17\" here"), "{log}");
    here.ends("job")?;
    drop(here);
    node.finish()
}
