//! The surroundings of a case: a process in namespaces of its own, in which CRIU works, and in it a daemon and applications.

use std::collections::BTreeSet;
use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::application::{self, COUNT};
use crate::daemon::Daemon;
use rekindle_wire::control::DEFAULT_SOCKET;

/// The variable that is set in the process that `enter` starts.
const INSIDE: &str = "TEST_INSIDE";

/// Runs a case in a new process, entered by `scripts/lib/enter`.
pub(crate) fn run(criu: &str, name: &str, case: fn(&Stage)) {
    if env::var_os(INSIDE).is_some() {
        return case(&Stage::new());
    }
    // SAFETY: no precondition.
    if unsafe { libc::geteuid() } != 0 {
        return eprintln!("{name}: skipped, needs root");
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    if criu == "4.2" && !repository.join(".trixie/criu-4.2").exists() {
        return eprintln!("{name}: skipped, there is no CRIU {criu} here");
    }
    let this = env::current_exe().unwrap();
    let status = Command::new(repository.join("scripts/lib/enter"))
        .args(["--criu", criu, "--bind"])
        .arg(this.parent().unwrap())
        .arg(&this)
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .status()
        .unwrap();
    assert!(status.success(), "{name}: {status}");
}

/// The directories and the daemon of a case.
pub(crate) struct Stage {
    pub(crate) daemon: Daemon,
    plugins: PathBuf,
    dir: PathBuf,
}

/// The result of a run of CRIU.
pub(crate) struct Ended {
    pub(crate) success: bool,
    pub(crate) log: String,
    pub(crate) took: Duration,
}

impl Stage {
    fn new() -> Self {
        let dir = PathBuf::from("/tmp/test");
        let plugins = dir.join("plugins");
        fs::create_dir_all(&plugins).unwrap();
        fs::create_dir_all("/run/rekindle").unwrap();
        // The plugin's default place of the socket; a mount hides the machine's own.
        assert!(Command::new("mount").args(["-t", "tmpfs", "none", "/run/rekindle"]).status().unwrap().success());
        let built = env::current_exe().unwrap().with_file_name("librekindle_criu.so");
        fs::copy(built, plugins.join("rekindle.so")).unwrap();
        Self { daemon: Daemon::start(Path::new(DEFAULT_SOCKET)), plugins, dir }
    }

    /// Starts an application and waits until it counts.
    pub(crate) fn application(&self, kind: &str) -> Application {
        self.application_with(kind, &[])
    }

    pub(crate) fn application_with(&self, kind: &str, environment: &[(&str, &str)]) -> Application {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "application", "--ignored", "--nocapture", "--test-threads=1"])
            .env(application::KIND, kind)
            .env("REKINDLE_SOCKET", &self.daemon.path)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(self.dir.join("application.log")).unwrap())
            .spawn()
            .unwrap();
        let pid = child.id() as i32;
        let expected = match kind {
            "tree" => 3,
            "forked" => 2,
            _ => 1,
        };
        until("the application counts", || {
            let pids = tree(pid);
            pids.len() == expected && pids.iter().all(|&pid| count(pid) > Some(5))
        });
        Application { pid, all: tree(pid), child: Some(child) }
    }

    pub(crate) fn images(&self, name: &str) -> PathBuf {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    pub(crate) fn criu(&self, verb: &str, dir: &Path, arguments: &[&str]) -> Ended {
        self.criu_with(verb, dir, arguments, &self.daemon.path)
    }

    /// Runs CRIU with this socket in its environment.
    pub(crate) fn criu_with(&self, verb: &str, dir: &Path, arguments: &[&str], socket: &Path) -> Ended {
        let start = Instant::now();
        let success = self.criu_start(verb, dir, arguments, socket).wait().unwrap().success();
        let took = start.elapsed();
        let log = String::from_utf8_lossy(&fs::read(dir.join(log_name(verb))).unwrap()).into_owned();
        println!("criu {verb} {arguments:?}: success {success}, {took:?}");
        for line in log.lines().filter(|line| line.contains("Error") || line.contains("rekindle: ")) {
            println!("    {line}");
        }
        Ended { success, log, took }
    }

    pub(crate) fn criu_start(&self, verb: &str, dir: &Path, arguments: &[&str], socket: &Path) -> Child {
        Command::new("criu")
            .args([verb, "-v4", "-o", &log_name(verb), "-D"])
            .arg(dir)
            .arg("--libdir")
            .arg(&self.plugins)
            .args(arguments)
            .env("REKINDLE_SOCKET", socket)
            .stdin(Stdio::null())
            .spawn()
            .unwrap()
    }

    pub(crate) fn dump(&self, application: &Application, dir: &Path, arguments: &[&str]) -> Ended {
        let pid = application.pid.to_string();
        self.criu("dump", dir, &[&["-t", &pid], arguments].concat())
    }

    pub(crate) fn restore(&self, dir: &Path) -> Ended {
        self.criu("restore", dir, &["-d"])
    }
}

/// A container named `c`, which sees the daemon's socket.
pub(crate) struct Container;

impl Container {
    /// Runs an application as a client in it.
    pub(crate) fn start(stage: &Stage) -> Self {
        fs::create_dir_all("/etc/criu").unwrap();
        fs::write("/etc/criu/default.conf", format!("libdir {}\n", stage.plugins.display())).unwrap();
        let application = env::current_exe().unwrap();
        let application = application.display();
        let run = format!(
            "container_image small >/dev/null
            podman_ run -d \"${{podman_run[@]}}\" --name c -v {application}:/application:ro -v /run/rekindle:/run/rekindle:ro \
                -e {}=client -e REKINDLE_SOCKET={DEFAULT_SOCKET} small \
                /application --exact application --ignored --nocapture --test-threads=1",
            application::KIND
        );
        assert!(Self::podman(&run));
        let container = Self;
        until("the container counts", || count(container.pid()) > Some(5));
        container
    }

    /// Runs a script that has the function `podman_`.
    pub(crate) fn podman(script: &str) -> bool {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let script = format!("set -euo pipefail; . {}/scripts/lib/podman.sh\n{script}", repository.display());
        let start = Instant::now();
        let success = Command::new("bash").args(["-c", &script]).status().unwrap().success();
        println!("{}: success {success}, {:?}", script.lines().last().unwrap().trim(), start.elapsed());
        success
    }

    /// The pid of the container's first process.
    pub(crate) fn pid(&self) -> i32 {
        let script = "podman --storage-driver overlay inspect -f '{{.State.Pid}}' c";
        let output = Command::new("bash").args(["-c", script]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    pub(crate) fn application(&self) -> Application {
        Application::restored(self.pid())
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        Self::podman("podman_ rm -f -t 0 c");
    }
}

fn log_name(verb: &str) -> String {
    format!("{verb}.log")
}

/// An application, killed when it goes out of scope.
pub(crate) struct Application {
    pub(crate) pid: i32,
    all: BTreeSet<i32>,
    child: Option<Child>,
}

impl Application {
    /// An application that CRIU has restored.
    pub(crate) fn restored(pid: i32) -> Self {
        Self { pid, all: tree(pid), child: None }
    }

    /// Waits until all its processes have gone, so that their pids are free.
    pub(crate) fn gone(mut self) {
        if let Some(mut child) = self.child.take() {
            child.wait().unwrap();
        }
        gone(&self.all);
    }

    /// Waits until every process of it has counted, and none is traced.
    pub(crate) fn runs(&self) {
        let pids = tree(self.pid);
        assert!(!pids.is_empty());
        let before: Vec<_> = pids.iter().map(|&pid| count(pid)).collect();
        let free = |pid| status(pid).contains("TracerPid:\t0\n");
        until("every process counts", || {
            pids.iter().zip(&before).all(|(&pid, before)| count(pid) > *before && free(pid))
        });
    }

    pub(crate) fn count(&self) -> u64 {
        count(self.pid).unwrap()
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        for pid in tree(self.pid) {
            // SAFETY: a process of the case's own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        if let Some(child) = &mut self.child {
            let _ = child.wait();
        }
    }
}

fn status(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default()
}

/// Whether a process exists and is not a zombie.
pub(crate) fn alive(pid: i32) -> bool {
    let status = status(pid);
    !status.is_empty() && !status.contains("State:\tZ")
}

/// Waits until their pids are free. The pids of zombies are not.
pub(crate) fn gone<'a>(pids: impl IntoIterator<Item = &'a i32>) {
    for pid in pids {
        until("the process is gone", || !Path::new(&format!("/proc/{pid}")).exists());
    }
    // The kernel frees a number a moment after it takes it from /proc.
    thread::sleep(Duration::from_millis(20));
}

/// A process and its descendants.
pub(crate) fn tree(root: i32) -> BTreeSet<i32> {
    let mut found = BTreeSet::new();
    let mut todo = vec![root];
    while let Some(pid) = todo.pop() {
        if !alive(pid) || !found.insert(pid) {
            continue;
        }
        // Children of any thread of the process.
        for thread in fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            todo.extend(children.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
        }
    }
    found
}

/// A word of the memory that a process counts in.
pub(crate) fn word(pid: i32, index: usize) -> Option<u64> {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let link = |path: &Path| fs::read_link(path).unwrap_or_default().to_string_lossy().into_owned();
    let path = fds.flatten().map(|fd| fd.path()).find(|path| link(path).contains("memfd:ring"))?;
    let mut bytes = [0; 8];
    File::open(path).ok()?.read_exact_at(&mut bytes, index as u64 * 8).ok()?;
    Some(u64::from_ne_bytes(bytes))
}

pub(crate) fn count(pid: i32) -> Option<u64> {
    word(pid, COUNT)
}

/// The sockets that a process holds.
pub(crate) fn sockets(pid: i32) -> usize {
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    fds.flatten()
        .filter(|fd| fs::read_link(fd.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:")))
        .count()
}

pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: it never came");
        thread::sleep(Duration::from_millis(2));
    }
}
