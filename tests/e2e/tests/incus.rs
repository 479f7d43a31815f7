//! Containers of Incus, by its own commands. Where there is no Incus the test says so.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output};

use anyhow::{Context, ensure};
use rekindle_e2e::contained::{APPS, Contained, SHARED, is_installed, root_directory};
use rekindle_e2e::process::signal;
use rekindle_e2e::wait::until_true;
use rekindle_e2e::{Node, Result, stage};

/// Where packages of Incus put its daemon.
const DAEMON: &str = "/usr/libexec/incus/incusd";

/// Incus of a host, with its own files at the usual places. Dropping this value removes the container and ends the daemon.
struct Incus<'a> {
    node: &'a Node,
    name: &'static str,
    daemon: Child,
}

impl<'a> Incus<'a> {
    fn start(node: &'a Node, name: &'static str) -> Result<Self> {
        let log = File::create(node.path(&format!("{name}.log")))?;
        let places = "for dir in /var/lib/incus /var/log/incus /var/cache/incus /run/incus; do
                mkdir -p $dir
                mount -t tmpfs tmpfs $dir
            done
            exec \"$0\" --group root";
        let mut command = Command::new("unshare");
        stage::clean_environment(&mut command);
        command.args(["--mount", "--propagation", "private", "sh", "-euc", places, DAEMON]);
        let daemon = command.stdout(log.try_clone()?).stderr(log).spawn().context("cannot start incusd")?;
        let incus = Self { node, name, daemon };
        until_true("incusd answers", || Ok(incus.run(&["admin", "waitready", "--timeout", "60"])?.status.success()))?;
        incus.call(&["storage", "create", "default", "dir"])?;
        incus.call(&["profile", "device", "add", "default", "root", "disk", "path=/", "pool=default"])?;
        Ok(incus)
    }

    fn run(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new("nsenter");
        stage::clean_environment(&mut command);
        command.args(["--target", &self.daemon.id().to_string(), "--mount", "incus"]).args(arguments);
        Ok(command.env("INCUS_CONF", self.node.path(self.name)).output()?)
    }

    fn call(&self, arguments: &[&str]) -> Result<String> {
        let output = self.run(arguments)?;
        let errors = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() {
            let log = self.run(&["info", "--show-log", "job"])?;
            let lines = String::from_utf8_lossy(&log.stdout).into_owned();
            let wrong: Vec<_> = lines.lines().filter(|line| line.contains(" ERROR ")).collect();
            anyhow::bail!("incus {arguments:?} ended with {}: {errors}\n{}", output.status, wrong.join("\n"));
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Imports an image whose containers run the tests' program as their first process.
    fn import_image(&self) -> Result {
        let dir = self.node.path("image");
        let init = dir.join("rootfs/sbin/init");
        root_directory(self.node, &dir.join("rootfs"))?;
        fs::create_dir(dir.join("rootfs/sbin"))?;
        fs::write(&init, format!("#!/bin/sh\n{}\n", Contained::command()))?;
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
        fs::write(dir.join("metadata.yaml"), "architecture: x86_64\ncreation_date: 1\n")?;
        let archive = self.node.path("image.tar");
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(&dir).arg("-cf").arg(&archive).args(["metadata.yaml", "rootfs"]);
        let status = tar.status()?;
        ensure!(status.success(), "tar ended with {status}");
        self.call(&["image", "import", &archive.to_string_lossy(), "--alias", "base"]).map(drop)
    }

    /// Makes the container, with the GPUs.
    fn create(&self, program: &Contained) -> Result {
        let mut command = Command::new(stage::program("rekindle-oci-hook")?);
        stage::clean_environment(&mut command);
        let output = command.args(["lxc", "config"]).output()?;
        ensure!(output.status.success(), "lxc config: {}", String::from_utf8_lossy(&output.stderr));
        // Without the profile by which Incus says that there is none: CRIU cannot restore it where the kernel has no AppArmor.
        let raw = format!("raw.lxc={}lxc.apparmor.profile =\n", String::from_utf8(output.stdout)?);
        let variable = format!("environment.{}", program.variable());
        let options = ["security.privileged=true", "migration.stateful=true", &variable, &raw];
        let mut all = vec!["init", "base", "job"];
        options.iter().for_each(|option| all.extend(["--config", option]));
        self.call(&all)?;
        let share = |name: &str, from: &Path, to: &str, more: &[&str]| {
            let (source, path) = (format!("source={}", from.display()), format!("path={to}"));
            let all = [&["config", "device", "add", "job", name, "disk", &source, &path], more].concat();
            self.call(&all).map(drop)
        };
        share("apps", &stage::apps()?, APPS, &["readonly=true"])?;
        share("shared", program.shared(), SHARED, &[])
    }

    /// Lets another Incus move containers here by the name of this one.
    fn welcome(&self, other: &Incus) -> Result {
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.to_string();
        self.call(&["config", "set", "core.https_address", &address])?;
        let said = self.call(&["config", "trust", "add", other.name])?;
        let token = said.lines().last().context("incus says no token")?;
        let url = format!("https://{address}");
        other.call(&["remote", "add", self.name, &url, "--token", token, "--accept-certificate"]).map(drop)
    }
}

impl Drop for Incus<'_> {
    fn drop(&mut self) {
        let _ = self.run(&["delete", "--force", "job"]);
        let _ = signal(self.daemon.id() as i32, libc::SIGTERM);
        let _ = self.daemon.wait();
    }
}

#[test]
fn a_container_of_incus_is_stopped_with_its_state_started_snapshot_and_moved() -> Result {
    let node = Node::at_default_socket()?;
    if !is_installed("incus", "incus") || !is_installed(DAEMON, "incus-base") {
        return node.finish();
    }
    let here = Incus::start(&node, "here")?;
    let there = Incus::start(&node, "there")?;
    here.import_image()?;
    let program = Contained::new(&node, "shared")?;
    here.create(&program)?;
    here.call(&["start", "job"])?;
    program.goes_on()?;

    // A snapshot while it runs, and back to it.
    here.call(&["snapshot", "create", "--stateful", "job", "one"])?;
    program.goes_on()?;
    here.call(&["stop", "--force", "job"])?;
    program.forget_progress()?;
    here.call(&["snapshot", "restore", "--stateful", "job", "one"])?;
    program.goes_on()?;
    here.call(&["stop", "--force", "job"])?;

    // LXC checkpoints no container that it has restored, so it begins anew.
    program.forget_progress()?;
    here.call(&["start", "--stateless", "job"])?;
    program.goes_on()?;
    here.call(&["stop", "--stateful", "job"])?;
    there.welcome(&here)?;
    here.call(&["move", "--mode", "push", "job", "there:job"])?;
    program.forget_progress()?;
    there.call(&["start", "job"])?;
    program.goes_on()?;
    program.finish()?;
    drop((here, there));
    node.finish()
}
