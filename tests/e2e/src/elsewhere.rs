//! Another host: a pid namespace with a daemon and GPUs of its own, in which programs find that daemon where they found the first
//! host's.
//!
//! ```text
//!   host (Node)                            other host (Elsewhere)
//!   /tmp/.../rekindled.sock                the same path, on which the other daemon's socket is mounted
//!   rekindle migrate ── remote ── socket ── remote serve ──► rekindle migrate --receive
//! ```

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use anyhow::{Context, ensure};

use crate::app::{self, Hold, Identity};
use crate::namespace::{Entry, Namespace};
use crate::network::Network;
use crate::wait::until;
use crate::{App, Node, Result, process, stage};

/// Another host. A test ends with [`Elsewhere::finish`]; its programs are killed when this is dropped.
#[derive(Debug)]
pub struct Elsewhere {
    server: Server,
    node: Node,
    namespace: Namespace,
    /// The path of both daemons' sockets, each as its host sees it.
    socket: PathBuf,
}

impl Elsewhere {
    /// Starts another host beside this one.
    pub fn beside(here: &Node) -> Result<Self> {
        Self::beside_with(here, &[])
    }

    /// The same; what others have run there has these variables.
    pub fn beside_with(here: &Node, variables: &[(&str, &Path)]) -> Result<Self> {
        let elsewhere = Self::start(here, Node::without_daemon()?, Namespace::new()?, variables)?;
        elsewhere.finds_daemon()?;
        Ok(elsewhere)
    }

    /// Starts another host on the other machine of this network.
    pub fn across(here: &Node, network: &Network) -> Result<Self> {
        let namespace = network.elsewhere(|| Namespace::with_network("there"))?;
        let elsewhere = Self::start(here, Node::without_daemon()?, namespace, &[])?;
        elsewhere.finds_daemon()?;
        Ok(elsewhere)
    }

    /// Starts another host beside this one, whose daemon is at the default socket, with a podman of its own
    /// ([`Podman::elsewhere`](crate::podman::Podman::elsewhere)).
    pub fn with_podman(here: &Node) -> Result<Self> {
        let node = Node::without_daemon()?;
        let namespace = Namespace::with_podman(&node.path(""))?;
        Self::start(here, node, namespace, &[])
    }

    fn start(here: &Node, mut node: Node, namespace: Namespace, variables: &[(&str, &Path)]) -> Result<Self> {
        leave_small_numbers()?;
        node.lives_in(namespace.entry());
        node.start_daemon(&[])?;
        let mut serve = command(&stage::helper("remote")?);
        serve.env("REKINDLE_SOCKET", here.socket()).envs(variables.iter().copied());
        let server = Server::start(&node.path("remote.sock"), serve, Some(&namespace.entry()))?;
        Ok(Self { server, node, namespace, socket: here.socket().to_owned() })
    }

    /// Mounts the socket of this host's daemon, which has just started, at the path where programs look for it.
    pub fn finds_daemon(&self) -> Result {
        // One mount on another would keep the daemon from replacing its socket.
        let script = "while umount \"$2\" 2>/dev/null; do :; done; exec mount --bind \"$1\" \"$2\"";
        let mut mount = self.inside("sh");
        let mounted = mount.args(["-c", script, "sh"]).arg(self.node.socket()).arg(&self.socket).output()?;
        ensure!(mounted.status.success(), "mount: {}", String::from_utf8_lossy(&mounted.stderr));
        Ok(())
    }

    /// Its daemon.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The way in.
    pub(crate) fn entry(&self) -> Entry {
        self.namespace.entry()
    }

    /// Its daemon.
    pub fn node_mut(&mut self) -> &mut Node {
        &mut self.node
    }

    /// The option `--via` by which `rekindle migrate` reaches this host.
    pub fn via(&self) -> Result<String> {
        self.server.via()
    }

    /// The process that runs commands on this host for those who connect.
    pub fn server(&self) -> i32 {
        self.server.pid()
    }

    /// A command that runs a program on this host.
    pub fn inside(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = self.namespace.entry().command(program);
        stage::clean_environment(&mut command);
        command.env("REKINDLE_SOCKET", &self.socket);
        command
    }

    /// Starts a command on this host, as a child of this process.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        self.namespace.entry().spawn(command.env("REKINDLE_SOCKET", &self.socket))
    }

    /// Runs `rekindle` on this host.
    pub fn rekindle(&self, arguments: &[&OsStr]) -> Result<Output> {
        Ok(self.inside(stage::program("rekindle")?).args(arguments).output()?)
    }

    /// Starts a program of `tests/apps` on this host, under the interposer, which waits at this progress.
    pub fn run_held(&self, name: &str, arguments: &[&str], at: Option<u64>) -> Result<App> {
        let hold = at.map(|at| Hold::new(self.node.fresh("hold"), at)).transpose()?;
        let mut command = self.node.command(&stage::app(name)?)?;
        // Its daemon is where the other host's is.
        command.env("REKINDLE_SOCKET", &self.socket).envs(hold.iter().map(Hold::variable)).args(arguments);
        let base = self.node.fresh(name);
        let progress = base.with_extension("progress");
        app::no_progress(&progress)?;
        command.arg("--progress").arg(&progress);
        Ok(App::start_in(&mut command, &base, Some(progress), Some(&self.entry()))?.held(hold))
    }

    /// The number that a process of this host has there.
    pub fn number(&self, pid: i32) -> Result<i32> {
        number_inside(pid).context("the process has no number on the other host")
    }

    /// The number outside of the process that has this number on this host, if there is one.
    pub fn process(&self, inside: i32) -> Option<i32> {
        process::tree(self.namespace.first()).into_iter().find(|pid| number_inside(*pid) == Some(inside))
    }

    /// All processes of this host, the first one first.
    pub fn processes(&self) -> Vec<i32> {
        process::tree(self.namespace.first())
    }

    /// The numbers that the processes of a tree have here. `root` is its first process, by its number outside.
    pub fn numbers(&self, root: i32) -> Vec<i32> {
        process::tree(root).into_iter().filter_map(number_inside).collect()
    }

    /// The program that runs here with this number.
    pub fn app(&self, identity: &Identity) -> Result<App> {
        let pid = until("the program is on the other host", || Ok(self.process(identity.pid)))?;
        Ok(App::adopt(Identity { pid, ..identity.clone() }))
    }

    /// Ends the test on this host, and checks that nothing is left.
    pub fn finish(self) -> Result {
        let is_alone = || process::tree(self.namespace.first()) == [self.namespace.first()];
        until("the other host's programs end", || Ok(is_alone().then_some(())))?;
        drop(self.server);
        self.node.finish()
    }
}

fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    stage::clean_environment(&mut command);
    command
}

/// From now on processes of this host get larger numbers than those of the other host and their threads have, of which each needs one: a
/// program that moves there keeps its number.
fn leave_small_numbers() -> Result {
    const LAST: &str = "/proc/sys/kernel/ns_last_pid";
    const SMALL: u32 = 20_000;
    if fs::read_to_string(LAST)?.trim().parse::<u32>()? < SMALL {
        fs::write(LAST, SMALL.to_string())?;
    }
    Ok(())
}

/// The number that a process has in its own pid namespace.
fn number_inside(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_whitespace().last()?.parse().ok()
}

/// Runs commands on a host for those who connect. It ends with this.
#[derive(Debug)]
pub struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// For the host of the tests themselves.
    pub fn of(here: &Node) -> Result<Self> {
        Self::start(&here.path("remote.sock"), here.command(&stage::helper("remote")?)?, None)
    }

    fn start(socket: &Path, mut command: Command, entry: Option<&Entry>) -> Result<Self> {
        command.arg("serve").arg(socket).stdin(Stdio::null());
        let child = match entry {
            Some(entry) => entry.spawn(&mut command)?,
            None => command.spawn()?,
        };
        let server = Self { child, socket: socket.to_owned() };
        until("commands are run for who connects", || Ok(server.socket.exists().then_some(())))?;
        Ok(server)
    }

    /// The process.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// The option `--via` by which `rekindle migrate` reaches this host.
    pub fn via(&self) -> Result<String> {
        Ok(format!("{} {}", stage::helper("remote")?.display(), self.socket.display()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
