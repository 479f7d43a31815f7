//! Another host: a daemon with GPUs of its own, and a pid namespace in which programs reach that daemon at the path at which
//! they reached the first host's.
//!
//! ```text
//!   host (Node)                      other host (Elsewhere)
//!   /tmp/.../rekindled.sock          the same path, on which the other daemon's socket is mounted
//!   rekindle migrate ── nsenter ───► rekindle migrate --receive
//! ```

use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, ensure};

use crate::app::Identity;
use crate::wait::until;
use crate::{App, Node, Result, process, stage};

/// Another host. A test ends with [`Elsewhere::finish`]; its programs are killed when this is dropped.
#[derive(Debug)]
pub struct Elsewhere {
    namespace: Namespace,
    node: Node,
    /// The path of both daemons' sockets, each as its host sees it.
    socket: PathBuf,
}

impl Elsewhere {
    /// Starts another host beside this one.
    pub fn beside(here: &Node) -> Result<Self> {
        Self::with(here, Node::start()?)
    }

    /// The same, with a daemon that runs already.
    pub fn with(here: &Node, node: Node) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL", "catatonit", "-P"]);
        let unshare = command.stdin(Stdio::null()).spawn().context("cannot start unshare")?;
        let pid = unshare.id() as i32;
        let first = until("the namespace has its first process", || {
            let first = process::tree(pid).get(1).copied();
            // unshare's child becomes it once the namespace is made.
            Ok(first.filter(|it| process::command_line(*it).contains("catatonit")))
        })?;
        let namespace = Namespace { unshare, first };
        let elsewhere = Self { namespace, node, socket: here.socket().to_owned() };
        elsewhere.finds_daemon()?;
        Ok(elsewhere)
    }

    /// Mounts the socket of this host's daemon, which has just started, at the path where programs look for it.
    pub fn finds_daemon(&self) -> Result {
        let mut mount = self.inside("mount");
        let mounted = mount.arg("--bind").arg(self.node.socket()).arg(&self.socket).output()?;
        ensure!(mounted.status.success(), "mount: {}", String::from_utf8_lossy(&mounted.stderr));
        Ok(())
    }

    /// Its daemon.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Its daemon.
    pub fn node_mut(&mut self) -> &mut Node {
        &mut self.node
    }

    /// The option `--via` by which `rekindle migrate` reaches this host.
    pub fn via(&self) -> String {
        format!("nsenter --target={} --pid --mount env REKINDLE_SOCKET={}", self.namespace.first, self.socket.display())
    }

    /// A command that runs a program on this host.
    pub fn inside(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        stage::clean_environment(&mut command);
        command.arg(format!("--target={}", self.namespace.first)).args(["--pid", "--mount"]).arg(program);
        command.env("REKINDLE_SOCKET", &self.socket);
        command
    }

    /// Runs `rekindle` on this host.
    pub fn rekindle(&self, arguments: &[&OsStr]) -> Result<Output> {
        Ok(self.inside(stage::program("rekindle")?).args(arguments).output()?)
    }

    /// The number outside of the process that has this number on this host, if there is one.
    pub fn process(&self, inside: i32) -> Option<i32> {
        process::tree(self.namespace.first).into_iter().find(|pid| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
            numbers.and_then(|it| it.split_whitespace().last()?.parse().ok()) == Some(inside)
        })
    }

    /// The program that runs here with this number.
    pub fn app(&self, identity: &Identity) -> Result<App> {
        let pid = until("the program is on the other host", || Ok(self.process(identity.pid)))?;
        Ok(App::adopt(Identity { pid, ..identity.clone() }))
    }

    /// Whether none but the first process is here.
    pub fn is_empty(&self) -> bool {
        process::tree(self.namespace.first) == [self.namespace.first]
    }

    /// Ends the test on this host, and checks that nothing is left.
    pub fn finish(self) -> Result {
        until("the other host's processes end", || Ok(self.is_empty().then_some(())))?;
        drop(self.namespace);
        self.node.finish()
    }
}

/// A pid namespace, which ends with this.
#[derive(Debug)]
struct Namespace {
    unshare: Child,
    first: i32,
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Its end kills the first process, and that all others.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
        let _ = process::wait_gone("the namespace's first process", self.first);
    }
}
