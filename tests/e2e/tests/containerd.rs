//! Containers of containerd, by the commands of its `ctr`, with `rekindle-runc` as their runtime. Where there is no containerd the
//! tests say so.

use std::cell::RefCell;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output};

use anyhow::{Context, ensure};
use rekindle_e2e::contained::{APPS, Contained, SHARED, is_installed, root_archive};
use rekindle_e2e::process::signal;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result, stage};

/// The name that `podman import` gives the image of the tests.
const IMAGE: &str = "localhost/rekindle-e2e-containerd:latest";
const CHECKPOINT: &str = "checkpoints/one:latest";

/// A containerd with its own containers and images. Dropping this value removes the containers and ends it.
struct Containerd<'a> {
    node: &'a Node,
    name: &'a str,
    daemon: Child,
    containers: RefCell<Vec<String>>,
}

impl<'a> Containerd<'a> {
    fn start(node: &'a Node, name: &'a str) -> Result<Self> {
        let dir = node.path(name);
        fs::create_dir(&dir)?;
        let text = format!(
            "version = 2\nroot = '{0}/root'\nstate = '{0}/state'\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n\
             [grpc]\naddress = '{0}/socket'\n",
            dir.display()
        );
        fs::write(dir.join("config.toml"), text)?;
        let log = File::create(dir.join("log"))?;
        let mut command = Command::new("containerd");
        stage::clean_environment(&mut command);
        command.arg("--config").arg(dir.join("config.toml")).stdout(log.try_clone()?).stderr(log);
        let daemon = command.spawn().context("cannot start containerd")?;
        let containerd = Self { node, name, daemon, containers: RefCell::default() };
        until_true("containerd answers", || Ok(containerd.run(&["version"])?.status.success()))?;
        Ok(containerd)
    }

    fn run(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new("ctr");
        stage::clean_environment(&mut command);
        command.arg("--address").arg(self.node.path(self.name).join("socket"));
        Ok(command.args(arguments).output()?)
    }

    fn call(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ctr {arguments:?} ended with {}: {errors}", output.status);
        Ok(String::from_utf8(output.stdout)?)
    }

    /// `ctr run` with these options, of the tests' image.
    fn try_run_container(&self, name: &str, options: &[&str], command: &str) -> Result<Output> {
        self.containers.borrow_mut().push(name.to_owned());
        let runtime = stage::program("rekindle-runc")?;
        let runtime = runtime.to_string_lossy();
        // Without shares of the processors: the machine may have no such controller in version 2.
        let mut all = vec!["run", "--detach", "--null-io", "--cpu-shares", "0", "--runc-binary", &runtime];
        all.extend(options);
        all.extend([IMAGE, name, "/bin/sh", "-c", command]);
        self.run(&all)
    }

    fn run_program(&self, name: &str, program: &Contained) -> Result {
        let bind = |from: &Path, to: &str, mode: &str| {
            format!("type=bind,src={},dst={to},options=rbind:{mode}", from.display())
        };
        let (apps, shared) = (bind(&stage::apps()?, APPS, "ro"), bind(program.shared(), SHARED, "rw"));
        let (enable, hold) = ("dev.rekindle/enable=true", program.variable());
        let options = ["--annotation", enable, "--mount", &apps, "--mount", &shared, "--env", &hold];
        let output = self.try_run_container(name, &options, &Contained::command())?;
        ensure!(output.status.success(), "ctr run: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    fn restore(&self, name: &str, checkpoint: &str) -> Result {
        self.containers.borrow_mut().push(name.to_owned());
        self.call(&["containers", "restore", "--rw", "--live", name, checkpoint]).map(drop)
    }

    fn end(&self, name: &str) -> Result {
        self.call(&["tasks", "kill", "--signal", "KILL", name])?;
        until_true("the container ends", || Ok(self.call(&["tasks", "list"])?.contains("STOPPED")))?;
        // It tells the program's exit status by its own.
        self.run(&["tasks", "delete", name])?;
        self.call(&["containers", "delete", name]).map(drop)
    }
}

impl Drop for Containerd<'_> {
    fn drop(&mut self) {
        for name in self.containers.borrow().iter() {
            let _ = self.run(&["tasks", "delete", "--force", name]);
            let _ = self.run(&["containers", "delete", name]);
        }
        let _ = signal(self.daemon.id() as i32, libc::SIGTERM);
        let _ = self.daemon.wait();
    }
}

/// A registry of images. Dropping this value ends it.
struct Registry {
    daemon: Child,
    address: String,
}

impl Registry {
    fn start(node: &Node) -> Result<Self> {
        let dir = node.path("registry");
        fs::create_dir(&dir)?;
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.to_string();
        let configuration = dir.join("configuration.yml");
        let storage = format!("storage: {{ filesystem: {{ rootdirectory: '{}' }} }}", dir.display());
        fs::write(&configuration, format!("version: 0.1\n{storage}\nhttp: {{ addr: '{address}' }}\n"))?;
        let log = File::create(dir.join("log"))?;
        let mut command = Command::new("docker-registry");
        stage::clean_environment(&mut command);
        command.arg("serve").arg(&configuration).stdout(log.try_clone()?).stderr(log);
        let registry = Self { daemon: command.spawn().context("cannot start docker-registry")?, address };
        until_true("the registry answers", || Ok(TcpStream::connect(&registry.address).is_ok()))?;
        Ok(registry)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// The archive of the tests' image, as `ctr images import` takes it.
fn image_archive(node: &Node) -> Result<String> {
    let (root, archive) = (node.path("root.tar"), node.path("image.tar"));
    root_archive(&root)?;
    let lib = stage::repository()?.join("scripts/lib/podman.sh");
    let script = r#". "$1"; podman_ import --quiet "$2" "$4"; podman_ save --quiet --format oci-archive --output "$3" "$4"; podman_ rmi "$4""#;
    let mut bash = Command::new("bash");
    bash.args(["-euc", script, "-"]).arg(&lib).arg(&root).arg(&archive).arg(IMAGE);
    let output = bash.output()?;
    ensure!(output.status.success(), "podman: {}", String::from_utf8_lossy(&output.stderr));
    Ok(archive.to_string_lossy().into_owned())
}

#[test]
fn a_container_of_ctr_is_checkpointed_while_it_runs_restored_and_moved_by_a_registry() -> Result {
    let node = Node::at_default_socket()?;
    if !is_installed("ctr", "containerd") || !is_installed("docker-registry", "docker-registry") {
        return node.finish();
    }
    let image = image_archive(&node)?;
    let one = Containerd::start(&node, "one")?;
    one.call(&["images", "import", &image])?;
    let program = Contained::new(&node, "shared")?;
    one.run_program("job", &program)?;
    program.goes_on()?;

    one.call(&["containers", "checkpoint", "--rw", "--image", "--task", "job", CHECKPOINT])?;
    program.goes_on()?;
    one.end("job")?;
    program.forget_progress()?;
    one.restore("restored", CHECKPOINT)?;
    program.goes_on()?;
    assert_eq!(node.clients()?.len(), 1);
    one.end("restored")?;

    // ctr exports no checkpoint into a file, and pulls none, but fetches the content of one.
    let registry = Registry::start(&node)?;
    let pushed = format!("{}/checkpoints:one", registry.address);
    one.call(&["images", "tag", CHECKPOINT, &pushed])?;
    one.call(&["images", "push", "--plain-http", &pushed])?;
    let other = Containerd::start(&node, "other")?;
    other.call(&["images", "import", &image])?;
    other.call(&["content", "fetch", "--plain-http", &pushed])?;
    program.forget_progress()?;
    other.restore("moved", &pushed)?;
    program.goes_on()?;
    program.finish()?;
    drop((one, other));
    node.finish()
}

#[test]
fn ctr_says_why_a_container_gets_no_gpu() -> Result {
    let node = Node::at_default_socket()?;
    if !is_installed("ctr", "containerd") {
        return node.finish();
    }
    let containerd = Containerd::start(&node, "one")?;
    containerd.call(&["images", "import", &image_archive(&node)?])?;
    for (name, annotation, message) in [
        ("unknown", "dev.rekindle/gpus=17", "there is no GPU \"17\" here"),
        ("unclear", "dev.rekindle/enable=perhaps", "annotation dev.rekindle/enable is \"perhaps\""),
    ] {
        let output = containerd.try_run_container(name, &["--annotation", annotation], "true")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && errors.contains(message), "{errors}");
    }
    // One that asks for nothing runs without the daemon's knowledge.
    let output = containerd.try_run_container("plain", &[], "[ ! -e /usr/lib/rekindle ]")?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    until_true("the container ends", || Ok(containerd.call(&["tasks", "list"])?.contains("STOPPED")))?;
    assert!(containerd.run(&["tasks", "delete", "plain"])?.status.success());
    drop(containerd);
    node.finish()
}
