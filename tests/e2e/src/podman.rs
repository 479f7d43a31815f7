//! Containers, by podman and runc, as `scripts/lib/podman.sh` calls them.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::rc::Rc;
use std::sync::OnceLock;

use anyhow::{Context, bail, ensure};

use crate::criu::tail;
use crate::schedule::HostLock;
use crate::wait::until;
use crate::{Node, Result, stage};

/// The image of all containers here: a shell and a C library.
const IMAGE: &str = "rekindle-e2e";
/// Of this test's: `enter` makes the folder anew.
const CDI_FILE: &str = "/etc/cdi/rekindle.json";
/// Where containers see the programs of `tests/apps`.
const APPS: &str = "/apps";

/// Podman with Rekindle's hook. Containers are removed when this is dropped.
#[derive(Debug)]
pub struct Podman {
    hooks: PathBuf,
    runtime: &'static str,
    containers: RefCell<Vec<String>>,
    /// podman's storage, its default network and `/etc/cdi` are the host's.
    _host: Rc<HostLock>,
}

impl Podman {
    /// For containers whose daemon is this host's, which must listen where podman's CRIU looks for one.
    pub fn new(node: &Node) -> Result<Self> {
        Self::with_runtime(node, "runc")
    }

    /// As [`Podman::new`], with this OCI runtime.
    pub fn with_runtime(node: &Node, runtime: &'static str) -> Result<Self> {
        let host = node.host_lock()?;
        let hooks = node.path("hooks.d");
        fs::create_dir(&hooks)?;
        let program = stage::program("rekindle-oci-hook")?;
        let mut command = Command::new(&program);
        stage::clean_environment(&mut command);
        let output = command.arg("--lib-dir").arg(stage::interposer()?).arg("hooks-json").output()?;
        ensure!(output.status.success(), "hooks-json: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(hooks.join("rekindle.json"), output.stdout)?;
        let podman = Self { hooks, runtime, containers: RefCell::default(), _host: host };
        podman.make_image()?;
        Ok(podman)
    }

    /// Writes the CDI specification for the daemon's GPUs to where podman looks for it.
    pub fn generate_cdi(&self) -> Result<String> {
        fs::create_dir_all("/etc/cdi")?;
        let mut command = Command::new(stage::program("rekindle-oci-hook")?);
        stage::clean_environment(&mut command);
        command.arg("--lib-dir").arg(stage::interposer()?).args(["cdi", "generate", "--output", CDI_FILE]);
        let output = command.output()?;
        ensure!(output.status.success(), "cdi generate: {}", String::from_utf8_lossy(&output.stderr));
        Ok(fs::read_to_string(CDI_FILE)?)
    }

    /// Runs a program of `tests/apps` in a container with these options of `podman run` beside those that are needed here.
    pub fn run(&self, name: &str, options: &[&str], program: &[&str]) -> Result {
        self.run_in(IMAGE, name, options, program)
    }

    /// As [`Podman::run`], in a container of another image.
    pub fn run_in(&self, image: &str, name: &str, options: &[&str], program: &[&str]) -> Result {
        let output = self.try_run_in(image, name, options, program)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "podman run of {name} ended with {}: {errors}", output.status);
        Ok(())
    }

    /// What podman says where it must not run a container, and that there is none then.
    pub fn refuses_to_run_in(&self, image: &str, name: &str, options: &[&str], program: &[&str]) -> Result<String> {
        let output = self.try_run_in(image, name, options, program)?;
        ensure!(!output.status.success(), "podman runs {name}");
        let filter = format!("name=^{name}$");
        let left = self.call(&["ps", "--all", "--filter", &filter, "--format", "{{.State}} {{.Pid}}"])?;
        ensure!(["", "created 0"].contains(&left.trim()), "podman says no, and {name} is {left}");
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn try_run_in(&self, image: &str, name: &str, options: &[&str], program: &[&str]) -> Result<Output> {
        self.containers.borrow_mut().push(name.to_owned());
        let apps = format!("{}:{APPS}:ro", stage::apps()?.display());
        let [program, arguments @ ..] = program else { bail!("no program") };
        let program = if program.starts_with('/') { (*program).to_owned() } else { format!("{APPS}/{program}") };
        let mut all = vec!["--detach", "--name", name, "--volume", &apps];
        all.extend(options);
        all.extend([image, &program]);
        all.extend(arguments);
        // These are options that depend on the machine.
        let given = if options.contains(&"--network") { "podman_limits" } else { "podman_run" };
        self.shell(&format!(r#"podman_ --hooks-dir "$HOOKS" run "${{{given}[@]}}" "${{@:2}}""#), &all)
    }

    /// Makes an image of a root directory.
    pub fn image(&self, name: &str, root: &Path) -> Result {
        self.succeeds(r#"tar -C "$2" -c . | podman_ import --quiet - "$3""#, &[&root.to_string_lossy(), name])?;
        Ok(())
    }

    /// Calls podman, which must succeed, and returns what it prints.
    pub fn call(&self, arguments: &[&str]) -> Result<String> {
        self.succeeds(CALL, arguments)
    }

    /// A container that will be made by a restore, to be removed too.
    pub fn will_restore(&self, name: &str) {
        self.containers.borrow_mut().push(name.to_owned());
    }

    /// Sets the loopback of a restored container up: runc restores without a network into a new namespace, and leaves what
    /// is in it to others.
    pub fn set_loopback_up(&self, name: &str) -> Result {
        let pid = self.pid(name)?.to_string();
        let mut command = Command::new("nsenter");
        let status = command.args(["--target", &pid, "--net", "ip", "link", "set", "lo", "up"]).status()?;
        ensure!(status.success(), "nsenter ended with {status}");
        Ok(())
    }

    /// The process that a container began with, as this host numbers it.
    pub fn pid(&self, name: &str) -> Result<i32> {
        let pid = self.call(&["inspect", "--format", "{{.State.Pid}}", name])?.trim().parse()?;
        ensure!(pid != 0, "container {name} is not running");
        Ok(pid)
    }

    /// Waits for a line in a container's output that begins so, and returns the rest of it.
    pub fn says(&self, name: &str, beginning: &str) -> Result<String> {
        until(&format!("container {name} says {beginning:?}"), || {
            let log = self.call(&["logs", name])?;
            ensure!(!self.has_ended(name)?, "container {name} has ended: {log}");
            Ok(log.lines().find_map(|line| line.strip_prefix(beginning)).map(|rest| rest.trim().to_owned()))
        })
    }

    /// Waits for a container's successful end, and returns what it said.
    pub fn output(&self, name: &str) -> Result<String> {
        let code = self.exit_code(name)?;
        let said = self.call(&["logs", name])?;
        ensure!(code == 0, "container {name} ended with {code}: {said}");
        Ok(said)
    }

    /// What a container's programs have said on stderr.
    pub fn errors(&self, name: &str) -> Result<String> {
        let output = self.shell(CALL, &["logs", name])?;
        ensure!(output.status.success(), "podman logs {name} ended with {}", output.status);
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Waits for a container's end, and returns its exit code.
    pub fn exit_code(&self, name: &str) -> Result<i32> {
        until(&format!("container {name} ends"), || Ok(self.has_ended(name)?.then_some(())))?;
        Ok(self.call(&["inspect", "--format", "{{.State.ExitCode}}", name])?.trim().parse()?)
    }

    fn has_ended(&self, name: &str) -> Result<bool> {
        Ok(self.call(&["inspect", "--format", "{{.State.Status}}", name])?.trim() == "exited")
    }

    /// Once for all tests of a program, whose containers share podman's storage.
    fn make_image(&self) -> Result {
        static MADE: OnceLock<std::result::Result<(), String>> = OnceLock::new();
        let make = || match self.succeeds("container_image \"$2\"", &[IMAGE]) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.to_string()),
        };
        MADE.get_or_init(make).clone().map_err(anyhow::Error::msg)
    }

    fn succeeds(&self, script: &str, arguments: &[&str]) -> Result<String> {
        let output = self.shell(script, arguments)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            // runc says where CRIU's is.
            let log = errors.lines().find_map(|line| line.split_once("log file: "));
            let log = log
                .and_then(|(_, path)| fs::read_to_string(path.trim().trim_end_matches('"')).ok())
                .unwrap_or_default();
            bail!("podman {} ended with {}: {errors}{}", arguments.join(" "), output.status, tail(&log));
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    fn shell(&self, script: &str, arguments: &[&str]) -> Result<Output> {
        let scripts = stage::repository()?.join("scripts/lib");
        let mut command = Command::new("bash");
        stage::clean_environment(&mut command);
        command
            .arg("-euc")
            .arg(format!(". \"$1/podman.sh\"; {script}"))
            .arg("podman")
            .arg(scripts)
            .args(arguments)
            .env("HOOKS", &self.hooks)
            .env("REKINDLE_RUNTIME", self.runtime)
            .current_dir("/")
            .stdin(Stdio::null());
        command.output().context("cannot start bash")
    }
}

const CALL: &str = r#"podman_ --hooks-dir "$HOOKS" "${@:2}""#;

impl Drop for Podman {
    fn drop(&mut self) {
        for name in self.containers.borrow().iter() {
            let _ = self.call(&["rm", "--force", "--ignore", "--time", "0", name]);
        }
    }
}
