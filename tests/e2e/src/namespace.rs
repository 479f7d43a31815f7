//! Pid namespaces, in which tests have daemons and programs of another host.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};

use crate::wait::until;
use crate::{Result, process};

/// A pid namespace with a mount namespace, which end with this.
#[derive(Debug)]
pub struct Namespace {
    unshare: Child,
    /// The first process.
    first: i32,
    /// The root of its cgroup namespace, as others see it.
    cgroup: Option<PathBuf>,
    /// Whether it has a network and a name of its own.
    has_network: bool,
}

/// Makes a cgroup the root of a cgroup namespace. All its processes are then in one below, since a cgroup with processes gives its
/// children no controllers. `$1` is the cgroup, `$2` the folder that has the daemon's socket, `$3` what goes on in there.
const HOST: &str = r#"
    set -e
    mkdir -p "$1/init"
    echo 0 >"$1/cgroup.procs"
    exec unshare --cgroup sh -ec '
        echo 0 >"$1/init/cgroup.procs"
        for each in $(cat "$1/cgroup.controllers"); do echo "+$each" >"$1/cgroup.subtree_control"; done
        exec unshare --pid --mount --fork --mount-proc --kill-child=SIGKILL sh -ec "$3" sh "$@"' sh "$@"
"#;

impl Namespace {
    /// Makes one, with a first process that does nothing but wait for orphans.
    pub fn new() -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL", "catatonit", "-P"]);
        Self::start(command, None)
    }

    /// Makes one with a name of its own, in the network of this thread, which may be another than that of whoever enters.
    pub fn with_network(name: &str) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--uts", "--kill-child=SIGKILL", "sh", "-c"]);
        // Files in memory are each host's own.
        let first =
            "hostname \"$1\" && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && mkdir -p /run/rekindle-migrations &&
            mount -t tmpfs -o mode=700 tmpfs /run/rekindle-migrations && exec catatonit -P";
        command.args([first, "sh", name]);
        let mut namespace = Self::start(command, None)?;
        namespace.has_network = true;
        Ok(namespace)
    }

    /// Makes one in which podman has a storage and cgroups of its own, and in which a daemon's socket in this folder is at the default
    /// path.
    pub fn with_podman(socket_dir: &Path) -> Result<Self> {
        let name = format!("rekindle-host-{}", socket_dir.file_name().unwrap_or_default().display());
        let cgroup = Path::new("/sys/fs/cgroup").join(name);
        let mut command = Command::new("sh");
        command.args(["-c", HOST, "sh"]).arg(&cgroup).arg(socket_dir).arg(MOUNTS);
        Self::start(command, Some(cgroup))
    }

    fn start(mut command: Command, cgroup: Option<PathBuf>) -> Result<Self> {
        let unshare = command.stdin(Stdio::null()).spawn().context("cannot start unshare")?;
        let pid = unshare.id() as i32;
        let first = until("the namespace has its first process", || {
            let first = process::tree(pid).get(1).copied();
            // unshare's child becomes it once the namespace is made. Others have its name among their arguments.
            Ok(first.filter(|it| process::command_line(*it).starts_with(&format!("{it}: catatonit"))))
        })?;
        Ok(Self { unshare, first, cgroup, has_network: false })
    }

    /// The first process, by its number outside.
    pub fn first(&self) -> i32 {
        self.first
    }

    /// The way in.
    pub fn entry(&self) -> Entry {
        Entry { first: self.first, has_cgroups: self.cgroup.is_some(), has_network: self.has_network }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // Its end kills the first process, and that all others.
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
        let _ = process::wait_gone("the namespace's first process", self.first);
        if let Some(cgroup) = &self.cgroup {
            let _ =
                Command::new("find").arg(cgroup).args(["-depth", "-type", "d", "-exec", "rmdir", "{}", "+"]).status();
        }
    }
}

/// The mounts of a host with a podman of its own. What tests use may lie below /run, and stays there.
const MOUNTS: &str = r#"
    umount /sys/fs/cgroup
    mount -t cgroup2 none /sys/fs/cgroup
    kept=$(mktemp -d)
    mount --move /run "$kept"
    mount -t tmpfs -o mode=755 tmpfs /run
    for each in "$REKINDLE_SOURCE" "$REKINDLE_STAGE" "$REKINDLE_APPS" "$REKINDLE_IMAGES"; do
        case $each in
            /run/*) mkdir -p "$each" && mount --rbind "$kept/${each#/run/}" "$each" ;;
        esac
    done
    umount --lazy "$kept"
    rmdir "$kept"
    mkdir /run/rekindle
    mount --bind "$2" /run/rekindle
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    mount -t tmpfs -o size=75% tmpfs /var/lib/containers
    exec catatonit -P
"#;

/// The way into a pid namespace, its mount namespace, and its cgroup namespace and network where it has one.
#[derive(Clone, Debug)]
pub struct Entry {
    first: i32,
    /// Whether there is a cgroup namespace, too.
    has_cgroups: bool,
    /// Whether there are a network and a name, too.
    has_network: bool,
}

impl Entry {
    /// A command that runs a program in there.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.first)).args(["--pid", "--mount"]);
        command
            .args(self.has_cgroups.then_some("--cgroup"))
            .args(self.has_network.then_some(["--net", "--uts"]).into_iter().flatten())
            .arg(program);
        command
    }

    /// Starts a command in there, as a child of this process.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        let open = |name: &str| File::open(format!("/proc/{}/ns/{name}", self.first));
        let (pids, mounts) = (open("pid")?, open("mnt")?);
        let cgroups = self.has_cgroups.then(|| open("cgroup")).transpose()?;
        let network = self.has_network.then(|| open("net")).transpose()?;
        let name = self.has_network.then(|| open("uts")).transpose()?;
        let others = [
            Some((mounts.as_raw_fd(), libc::CLONE_NEWNS)),
            cgroups.as_ref().map(|it| (it.as_raw_fd(), libc::CLONE_NEWCGROUP)),
            network.as_ref().map(|it| (it.as_raw_fd(), libc::CLONE_NEWNET)),
            name.as_ref().map(|it| (it.as_raw_fd(), libc::CLONE_NEWUTS)),
        ];
        // SAFETY: the closure makes system calls alone, with descriptors that are open until after the spawn.
        unsafe {
            command.pre_exec(move || {
                let entered = others.iter().flatten().all(|(fd, kind)| libc::setns(*fd, *kind) == 0);
                if entered { Ok(()) } else { Err(std::io::Error::last_os_error()) }
            });
        }
        // The children of a thread are in the pid namespace that the thread has chosen: a thread of its own, which then ends.
        std::thread::scope(|scope| {
            let spawning = scope.spawn(|| {
                // SAFETY: changes this thread's namespace for children; no pointers.
                let entered = unsafe { libc::setns(pids.as_raw_fd(), libc::CLONE_NEWPID) };
                ensure!(entered == 0, "setns: {}", std::io::Error::last_os_error());
                Ok(command.spawn()?)
            });
            spawning.join().unwrap_or_else(|_| bail!("a thread that starts a command panicked"))
        })
    }
}
