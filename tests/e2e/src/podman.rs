//! Containers of podman and runc, called as in `scripts/lib/podman.sh`.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::rc::Rc;
use std::sync::OnceLock;

use anyhow::{Context, bail, ensure};

use crate::criu::tail;
use crate::elsewhere::Elsewhere;
use crate::namespace::Entry;
use crate::schedule::HostLock;
use crate::wait::until;
use crate::{Node, Result, stage};

/// The image of most containers: a shell and a C library.
const IMAGE: &str = "rekindle-e2e";
/// The CDI file of this run: `enter` makes the folder anew.
const CDI_FILE: &str = "/etc/cdi/rekindle.json";
/// The folder in a container that has the programs of `tests/apps`.
const APPS: &str = "/apps";

/// Podman with Rekindle's hook. Dropping this value removes its containers.
#[derive(Debug)]
pub struct Podman {
    hooks: PathBuf,
    runtime: &'static str,
    /// Where it is, if that is another host.
    namespace: Option<Entry>,
    containers: RefCell<Vec<String>>,
    /// podman's storage, its default network and `/etc/cdi` exist once per host.
    _host: Rc<HostLock>,
}

impl Podman {
    /// Prepares podman for containers that use this host's daemon, which must listen where CRIU under podman looks for
    /// it.
    pub fn new(node: &Node) -> Result<Self> {
        Self::with_runtime(node, "runc")
    }

    /// Like [`Podman::new`], with this OCI runtime.
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
        let podman = Self { hooks, runtime, namespace: None, containers: RefCell::default(), _host: host };
        podman.make_image()?;
        Ok(podman)
    }

    /// The podman of another host ([`Elsewhere::with_podman`]), which has the image of most containers.
    pub fn elsewhere(&self, there: &Elsewhere) -> Result<Self> {
        let saved = there.node().path("image.tar").to_string_lossy().into_owned();
        self.call(&["save", "--quiet", "--output", &saved, IMAGE])?;
        let podman = Self {
            hooks: self.hooks.clone(),
            runtime: self.runtime,
            namespace: Some(there.entry()),
            containers: RefCell::default(),
            _host: Rc::clone(&self._host),
        };
        podman.call(&["load", "--quiet", "--input", &saved])?;
        Ok(podman)
    }

    /// Writes a program that calls podman as this does.
    pub fn program(&self, path: &Path) -> Result {
        // As `podman_` there, but the program becomes podman.
        let (runtime, hooks) = (self.runtime, self.hooks.display());
        let options = "--cgroup-manager cgroupfs --storage-driver overlay --log-level error";
        let script = format!("#!/bin/sh\nexec podman {options} --runtime {runtime} --hooks-dir '{hooks}' \"$@\"\n");
        stage::write_script(path, &script)
    }

    /// Writes the CDI specification of the daemon's GPUs to the folder that podman reads.
    pub fn generate_cdi(&self) -> Result<String> {
        fs::create_dir_all("/etc/cdi")?;
        let mut command = Command::new(stage::program("rekindle-oci-hook")?);
        stage::clean_environment(&mut command);
        command.arg("--lib-dir").arg(stage::interposer()?).args(["cdi", "generate", "--output", CDI_FILE]);
        let output = command.output()?;
        ensure!(output.status.success(), "cdi generate: {}", String::from_utf8_lossy(&output.stderr));
        Ok(fs::read_to_string(CDI_FILE)?)
    }

    /// Runs a program of `tests/apps` in a container with these options of `podman run`, in addition to the ones that
    /// every test needs.
    pub fn run(&self, name: &str, options: &[&str], program: &[&str]) -> Result {
        self.run_in(IMAGE, name, options, program)
    }

    /// Like [`Podman::run`], in a container of another image.
    pub fn run_in(&self, image: &str, name: &str, options: &[&str], program: &[&str]) -> Result {
        let output = self.try_run_in(image, name, options, program)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "podman run of {name} ended with {}: {errors}", output.status);
        Ok(())
    }

    /// Checks that podman refuses to run a container and that none runs afterwards. Returns podman's message.
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
        // `podman_limits` and `podman_run` are options that depend on the machine.
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

    /// Checkpoints a container into an archive, and unpacks that, as podman does for each restore. Returns the archive, and the
    /// directory of the image that was in it.
    pub fn export_and_unpack(&self, node: &Node, name: &str) -> Result<(String, PathBuf)> {
        let (archive, unpacked) = (node.path("export.tar"), node.path("unpacked"));
        let export = archive.to_string_lossy().into_owned();
        self.call(&["container", "checkpoint", "--compress", "none", "--export", &export, name])?;
        fs::create_dir(&unpacked)?;
        let tar = Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&unpacked).status()?;
        ensure!(tar.success(), "tar: {tar}");
        Ok((export, unpacked.join("checkpoint")))
    }

    /// Restores containers of these names from one exported checkpoint, all at once.
    pub fn import_at_once(&self, export: &str, names: &[&str]) -> Result {
        let script = r#"jobs=()
            for name in "${@:3}"; do
                podman_ --hooks-dir "$HOOKS" container restore --import "$2" --name "$name" &
                jobs+=($!)
            done
            for job in "${jobs[@]}"; do wait "$job"; done"#;
        names.iter().for_each(|name| self.will_restore(name));
        self.succeeds(script, &[&[export], names].concat()).map(drop)
    }

    /// Registers a container that a restore will make, so that it is removed too.
    pub fn will_restore(&self, name: &str) {
        self.containers.borrow_mut().push(name.to_owned());
    }

    /// Sets up the loopback of a restored container: without a network runc restores into a new namespace, and leaves
    /// its interfaces to the caller.
    pub fn set_loopback_up(&self, name: &str) -> Result {
        let pid = self.pid(name)?.to_string();
        let mut command = Command::new("nsenter");
        let status = command.args(["--target", &pid, "--net", "ip", "link", "set", "lo", "up"]).status()?;
        ensure!(status.success(), "nsenter ended with {status}");
        Ok(())
    }

    /// The id on this host of a container's first process.
    pub fn pid(&self, name: &str) -> Result<i32> {
        let pid = self.call(&["inspect", "--format", "{{.State.Pid}}", name])?.trim().parse()?;
        ensure!(pid != 0, "container {name} is not running");
        Ok(pid)
    }

    /// Waits for a line of a container's output that starts with `beginning`, and returns the rest of the line.
    pub fn says(&self, name: &str, beginning: &str) -> Result<String> {
        until(&format!("container {name} says {beginning:?}"), || {
            let log = self.call(&["logs", name])?;
            ensure!(!self.has_ended(name)?, "container {name} has ended: {log}");
            Ok(log.lines().find_map(|line| line.strip_prefix(beginning)).map(|rest| rest.trim().to_owned()))
        })
    }

    /// Waits until a container ends successfully, and returns its output.
    pub fn output(&self, name: &str) -> Result<String> {
        let code = self.exit_code(name)?;
        let said = self.call(&["logs", name])?;
        ensure!(code == 0, "container {name} ended with {code}: {said}");
        Ok(said)
    }

    /// The stderr of a container's programs.
    pub fn errors(&self, name: &str) -> Result<String> {
        let output = self.shell(CALL, &["logs", name])?;
        ensure!(output.status.success(), "podman logs {name} ended with {}", output.status);
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Waits until a container ends, and returns its exit code.
    pub fn exit_code(&self, name: &str) -> Result<i32> {
        until(&format!("container {name} ends"), || Ok(self.has_ended(name)?.then_some(())))?;
        Ok(self.call(&["inspect", "--format", "{{.State.ExitCode}}", name])?.trim().parse()?)
    }

    fn has_ended(&self, name: &str) -> Result<bool> {
        Ok(self.call(&["inspect", "--format", "{{.State.Status}}", name])?.trim() == "exited")
    }

    /// Makes the image once per test program, since all tests share podman's storage.
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
            // runc names the file of CRIU's log.
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
        let mut command = self.namespace.as_ref().map_or_else(|| Command::new("bash"), |it| it.command("bash"));
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
