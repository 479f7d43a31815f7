//! A separate host for each test: a directory, a daemon with its socket, and software GPUs with their own settings.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use rekindle_builds::{INTERPOSER, Library, Store};
use rekindle_wire::control::{ClientInfo, Opening, Reply, Request, StatusInfo};
use rekindle_wire::frame;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use crate::app::{self, Hold};
use crate::criu::{Outcome, Running, Setting, tail};
use crate::image::length;
use crate::namespace::Entry;
use crate::schedule::{self, HostLock};
use crate::wait::{until, until_true};
use crate::{App, Fate, Image, Result, process, stage};

/// The number of workers in the daemon's pool.
const SPARE: u32 = 1;
/// The least host memory for copies that the daemon still cuts into the usual number of units, followed by that number,
/// the least size of a unit, and the name of a unit.
const STAGING: &str = "[checkpoint]\nstaging = 67108864\n";
const UNITS: usize = 16;
const UNIT_LEAST: usize = 4 << 20;
const UNIT: &str = "rekindle-stage";
/// The number of logs, newest first, that a failing test shows.
const LOGS: usize = 5;
/// Programs of two processes, neither of which may be held while a kernel of the other waits for it.
const NEVER_HELD: [&str; 1] = ["meet2"];

/// Whether these sorted lists are so that one is a part of the other.
fn is_among(some: &[String], all: &[String]) -> bool {
    let mut all = all.iter();
    some.iter().all(|it| all.any(|other| other == it))
}

/// A host. A test ends with [`Node::finish`]; a test that fails earlier shows the logs.
#[derive(Debug)]
pub struct Node {
    dir: TempDir,
    socket: PathBuf,
    gpu: Vec<(String, String)>,
    /// The driver library for the workers of the next daemons, if other than the installed software GPU.
    driver: Option<PathBuf>,
    /// The folder of Rekindle's libraries, if the host has its own.
    libraries: Option<PathBuf>,
    /// The daemon's configuration, without the settings that command-line options carry.
    configuration: String,
    daemon: Option<Daemon>,
    /// The descriptors of the first daemon when it was idle.
    idle: Option<Vec<String>>,
    count: Cell<u32>,
    finished: bool,
    /// Whether the daemon may keep a helper for native programs.
    has_helper: Cell<bool>,
    connections: Cell<bool>,
    /// The namespaces that daemons are started in, if not this process's.
    entry: Option<Entry>,
    /// The host lock, held by a node at the default socket.
    host: Option<Rc<HostLock>>,
}

#[derive(Debug)]
struct Daemon {
    process: Child,
    /// The targets of the daemon's descriptors when it was idle.
    idle: Vec<String>,
}

impl Node {
    /// Starts a host with the software GPU's defaults: two devices of 4 GiB, compute capability 9.0.
    pub fn start() -> Result<Self> {
        Self::with_gpu(&[])
    }

    /// Starts a host with variables of the software GPU: `("SIMGPU_MEMORY", "64M")`.
    pub fn with_gpu(gpu: &[(&str, &str)]) -> Result<Self> {
        let mut node = Self::without_daemon()?;
        node.start_daemon(gpu)?;
        Ok(node)
    }

    /// Starts a host with a configuration, which later daemons of the host use too, and variables of the software GPU.
    pub fn configured(configuration: &str, gpu: &[(&str, &str)]) -> Result<Self> {
        let mut node = Self::without_daemon()?;
        node.configuration = configuration.to_owned();
        node.start_daemon(gpu)?;
        Ok(node)
    }

    /// Has the next daemons start in these namespaces.
    pub(crate) fn lives_in(&mut self, entry: Entry) {
        self.entry = Some(entry);
    }

    /// Sets the configuration of the next daemons.
    pub fn configure(&mut self, configuration: &str) {
        self.configuration = configuration.to_owned();
    }

    /// Gives the next daemons the software GPU as this driver version, in a file that is named like NVIDIA's.
    pub fn use_driver(&mut self, version: &str) -> Result {
        let dir = self.path(&format!("driver-{version}"));
        fs::create_dir_all(&dir)?;
        let file = format!("libcuda.so.{version}");
        fs::copy(stage::software_gpu()?.join("libcuda.so.1"), dir.join(&file))?;
        let link = dir.join("libcuda.so.1");
        std::os::unix::fs::symlink(&file, &link)?;
        self.driver = Some(link);
        Ok(())
    }

    /// Gives the host Rekindle's libraries of its own, for programs and for the next daemons: the test may add and remove builds.
    /// Returns their folder.
    pub fn own_libraries(&mut self) -> Result<PathBuf> {
        let own = self.path("lib/rekindle");
        fs::create_dir_all(&own)?;
        let release = stage::interposer()?.join(INTERPOSER).canonicalize()?;
        let release = release.parent().context("a library without a folder")?;
        // A build that no other test has: bytes behind the end of an ELF file mean nothing to the loader.
        let copy = self.path("libraries");
        fs::create_dir(&copy)?;
        for Library { name, .. } in Library::in_dir(release)? {
            fs::copy(release.join(name), copy.join(name))?;
            let mut file = File::options().append(true).open(copy.join(name))?;
            write!(file, "{}", self.dir.path().display())?;
        }
        let (store, libraries) = (Store::new(&own), Library::in_dir(&copy)?);
        let store = store.lock()?;
        store.choose(store.add(libraries, None)?.id)?;
        self.libraries = Some(own.clone());
        Ok(own)
    }

    /// Makes a host whose daemon is not started yet. Waits until this test may run.
    pub fn without_daemon() -> Result<Self> {
        schedule::enter();
        let dir = tempfile::Builder::new().prefix("rekindle-e2e-").tempdir()?;
        // The mode is that of the folder of an installed daemon's socket: workers run as users of their own, and must
        // find the socket again.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o711))?;
        let socket = dir.path().join("rekindled.sock");
        Ok(Self {
            dir,
            socket,
            gpu: Vec::new(),
            driver: None,
            libraries: None,
            configuration: String::new(),
            daemon: None,
            idle: None,
            count: Cell::new(0),
            finished: false,
            has_helper: Cell::new(false),
            connections: Cell::new(false),
            entry: None,
            host: None,
        })
    }

    /// Starts a host whose daemon listens at the default socket, since podman passes no environment on to CRIU. Waits
    /// for the host lock, and holds it until the node and every [`Podman`](crate::podman::Podman) of it are dropped.
    pub fn at_default_socket() -> Result<Self> {
        Self::at_default_socket_with("")
    }

    /// Like [`Node::at_default_socket`], with a configuration of the daemon.
    pub fn at_default_socket_with(configuration: &str) -> Result<Self> {
        let host = Rc::new(HostLock::take());
        let mut node = Self::without_daemon()?;
        node.host = Some(host);
        node.socket = "/run/rekindle/rekindled.sock".into();
        node.configuration = configuration.to_owned();
        node.start_daemon(&[])?;
        Ok(node)
    }

    /// The host lock, which a node at the default socket holds.
    pub(crate) fn host_lock(&self) -> Result<Rc<HostLock>> {
        self.host.clone().context("podman belongs to a node at the default socket: Node::at_default_socket")
    }

    /// The path of the daemon's socket, whether a daemon runs or not.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The path of a file or folder in the test's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Starts the daemon, and waits until its pool is full.
    pub fn start_daemon(&mut self, gpu: &[(&str, &str)]) -> Result {
        ensure!(self.daemon.is_none(), "the daemon runs already");
        process::adopt_orphans();
        self.gpu = gpu.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let log = File::options().append(true).create(true).open(self.path("daemon.log"))?;
        // The machine's own configuration file must not be read.
        let configuration = self.path("rekindled.toml");
        fs::write(&configuration, self.with_state(&with_pool(&with_staging(&self.configuration))))?;
        let mut command = Command::new(stage::program("rekindled")?);
        stage::clean_environment(&mut command);
        command
            .arg("--socket")
            .arg(&self.socket)
            .arg("--config")
            .arg(configuration)
            .arg("--cuda-driver")
            .arg(self.driver.clone().map_or_else(|| stage::software_gpu().map(|it| it.join("libcuda.so.1")), Ok)?)
            .arg("--spare")
            .arg(SPARE.to_string())
            .args(self.libraries.iter().flat_map(|folder| [OsStr::new("--lib-dir"), folder.as_os_str()]))
            .envs(self.gpu.iter().map(|(name, value)| (name, value)))
            .env("REKINDLE_LOG", "debug")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let started = match &self.entry {
            Some(entry) => entry.spawn(&mut command),
            None => command.spawn().map_err(Into::into),
        };
        let process = started.context("cannot start rekindled")?;
        self.daemon = Some(Daemon { process, idle: Vec::new() });
        self.wait_for_spare()?;
        let said = self.configuration.split("staging = ").nth(1);
        let said = said.and_then(|it| it.lines().next()?.parse::<usize>().ok());
        let units = said.map_or(UNITS, |bytes| (bytes / UNIT_LEAST).min(UNITS));
        until_true("the daemon has its host memory", || {
            Ok(process::descriptors(self.daemon_pid()?)?.iter().filter(|it| it.contains(UNIT)).count() == units)
        })?;
        // A restarted daemon may find containers that were given GPUs, and watches them: the descriptors of the first
        // daemon are the reference.
        let idle = match &self.idle {
            Some(idle) => idle.clone(),
            None => process::settled_descriptors(self.daemon_pid()?)?,
        };
        self.idle = Some(idle.clone());
        if let Some(daemon) = &mut self.daemon {
            daemon.idle = idle;
        }
        Ok(())
    }

    /// Notes that this daemon may keep a helper for native programs, and with it a descriptor.
    pub fn keeps_helper(&self) {
        self.has_helper.set(true);
    }

    /// Places the state that a daemon keeps for the next one in the test's directory, which is removed with the test.
    /// At the default socket the state stays where an installed daemon has it. The same goes for the metrics, whose default is outside
    /// of the test's directory too.
    fn with_state(&self, configuration: &str) -> String {
        if self.host.is_some() {
            return configuration.to_owned();
        }
        let state = if configuration.contains("state_dir = ") {
            String::new()
        } else {
            format!("state_dir = {:?}\n", self.path("state"))
        };
        let metrics = if configuration.contains("[metrics]") { "" } else { "\n[metrics]\nsocket = \"\"\n" };
        format!("{state}{configuration}{metrics}")
    }

    /// The daemon's process.
    pub fn daemon_pid(&self) -> Result<i32> {
        let daemon = self.daemon.as_ref().context("there is no daemon")?;
        Ok(daemon.process.id() as i32)
    }

    /// Kills the daemon.
    pub fn kill_daemon(&mut self) -> Result {
        let mut daemon = self.daemon.take().context("there is no daemon")?;
        daemon.process.kill()?;
        daemon.process.wait()?;
        Ok(())
    }

    /// Stops the daemon as an administrator does.
    pub fn stop_daemon(&mut self) -> Result<ExitStatus> {
        let mut daemon = self.daemon.take().context("there is no daemon")?;
        process::signal(daemon.process.id() as i32, libc::SIGTERM)?;
        until("rekindled stops", || Ok(daemon.process.try_wait()?))
    }

    /// Waits until the pool is full.
    pub fn wait_for_spare(&self) -> Result {
        until_true("a worker is ready", || {
            // The daemon may not listen yet.
            Ok(self.status().is_ok_and(|status| status.spare == SPARE))
        })
    }

    /// The daemon's answer to `Status`.
    pub fn status(&self) -> Result<StatusInfo> {
        match self.ask(&Request::Status)? {
            Reply::Status(status) => Ok(status),
            other => bail!("Status was answered by {other:?}"),
        }
    }

    /// The processes that run under Rekindle, as `rekindle ps` shows them.
    pub fn clients(&self) -> Result<Vec<ClientInfo>> {
        match self.ask(&Request::List)? {
            Reply::Clients(clients) => Ok(clients),
            other => bail!("List was answered by {other:?}"),
        }
    }

    /// Waits until a process is a client, and returns the daemon's description of it.
    pub fn client(&self, pid: i32) -> Result<ClientInfo> {
        until(&format!("process {pid} is a client"), || Ok(self.clients()?.into_iter().find(|it| it.pid == pid)))
    }

    /// Sends a connection's first message and returns the answer.
    pub fn ask(&self, request: &Request) -> Result<Reply> {
        self.exchange(&Opening::new(request)?)
    }

    /// Like [`Node::ask`], with a directory that the request is about.
    pub fn ask_about(&self, request: &Request, dir: &Path) -> Result<Reply> {
        self.exchange_with(&Opening::new(request)?, &[File::open(dir)?.as_raw_fd()])
    }

    /// Like [`Node::ask`], with the caller's own versions in the message.
    pub fn exchange<T: DeserializeOwned>(&self, opening: &Opening) -> Result<T> {
        self.exchange_with(opening, &[])
    }

    fn exchange_with<T: DeserializeOwned>(&self, opening: &Opening, fds: &[RawFd]) -> Result<T> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        frame::send(&stream, opening, &[], fds)?;
        Ok(frame::receive(&stream)?.body)
    }

    /// Runs `rekindle`.
    pub fn rekindle(&self, arguments: &[&OsStr]) -> Result<Output> {
        let mut command = Command::new(stage::program("rekindle")?);
        stage::clean_environment(&mut command);
        let output = command.args(arguments).env("REKINDLE_SOCKET", &self.socket).output()?;
        Ok(output)
    }

    /// A command that finds the interposer and this host's daemon.
    pub fn command(&self, program: &Path) -> Result<Command> {
        let mut command = Command::new(program);
        stage::clean_environment(&mut command);
        let libraries = self.libraries.clone().map_or_else(stage::interposer, Ok)?;
        command.env("LD_LIBRARY_PATH", libraries).env("REKINDLE_SOCKET", &self.socket);
        Ok(command)
    }

    /// Runs a program of `tests/apps` under the interposer. If this test has run it undisturbed with these arguments,
    /// the program waits well past its middle until the test lifts the hold.
    pub fn run(&self, name: &str, arguments: &[&str]) -> Result<App> {
        self.run_with(name, arguments, &[])
    }

    /// Like [`Node::run`], with these variables in the program's environment.
    pub fn run_with(&self, name: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Result<App> {
        let late = app::late_in(name, arguments).filter(|_| !NEVER_HELD.contains(&name));
        self.run_app(name, arguments, late, variables)
    }

    /// Like [`Node::run`], with a program that waits at this progress.
    pub fn run_held(&self, name: &str, arguments: &[&str], at: Option<u64>) -> Result<App> {
        self.run_app(name, arguments, at, &[])
    }

    fn run_app(&self, name: &str, arguments: &[&str], held: Option<u64>, variables: &[(&str, &str)]) -> Result<App> {
        let hold = held.map(|at| Hold::new(self.fresh("hold"), at)).transpose()?;
        let mut command = self.command(&stage::app(name)?)?;
        command.envs(hold.iter().map(Hold::variable)).envs(variables.iter().copied());
        Ok(self.run_command(name, command, arguments)?.held(hold))
    }

    /// Runs a command that executes a program of `tests/apps` last, and appends the program's arguments.
    pub fn run_command(&self, name: &str, mut command: Command, arguments: &[&str]) -> Result<App> {
        let base = self.fresh(name);
        command.args(arguments);
        let progress = app::says_progress(name).then(|| base.with_extension("progress"));
        if let Some(file) = &progress {
            app::no_progress(file)?;
            command.arg("--progress").arg(file);
        }
        App::start(&mut command, &base, progress)
    }

    /// The setting of CRIU for this host.
    pub fn criu(&self) -> Setting {
        Setting { socket: self.socket.clone(), plugins: None, script: None, connections: self.connections.get() }
    }

    /// Tells CRIU from now on that processes have TCP connections among each other.
    pub fn dumps_connections(&self) {
        self.connections.set(true);
    }

    /// Starts a dump into a new directory.
    pub fn start_dump(&self, app: &App, fate: Fate) -> Result<(Running, Image)> {
        let dir = self.fresh("image");
        fs::create_dir(&dir)?;
        self.start_dump_into(dir, app, fate)
    }

    /// Starts a dump into an existing directory.
    pub fn start_dump_into(&self, dir: PathBuf, app: &App, fate: Fate) -> Result<(Running, Image)> {
        self.start_dump_by(&self.criu(), dir, app, fate)
    }

    /// Starts a dump into an existing directory, by a CRIU with another setting.
    pub fn start_dump_by(&self, criu: &Setting, dir: PathBuf, app: &App, fate: Fate) -> Result<(Running, Image)> {
        let image = Image {
            dir,
            app: app.identity().clone(),
            tree: process::tree(app.pid()),
            written: length(&app.identity().out)?,
        };
        let criu = criu.dump(app.pid(), &image.dir, fate, self.fresh("dump").with_extension("log"))?;
        Ok((criu, image))
    }

    /// Dumps a program, which goes on.
    pub fn dump(&self, app: &App) -> Result<Image> {
        let (criu, image) = self.start_dump(app, Fate::Running)?;
        criu.wait()?.succeeds()?;
        Ok(image)
    }

    /// Dumps a program as [`dump`](Self::dump) does, into an image that builds on `base`.
    pub fn dump_on(&self, app: &App, base: &Image) -> Result<Image> {
        let name = base.dir.file_name().context("an image's directory has a name")?;
        let dir = self.fresh("image");
        fs::create_dir(&dir)?;
        symlink(Path::new("..").join(name), dir.join("rekindle-parent"))?;
        let (criu, image) = self.start_dump_into(dir, app, Fate::Running)?;
        criu.wait()?.succeeds()?;
        Ok(image)
    }

    /// Dumps a program, which CRIU then kills, and returns when the program is gone.
    pub fn dump_and_kill(&self, app: App) -> Result<Image> {
        let (criu, mut image) = self.start_dump(&app, Fate::Killed)?;
        criu.wait()?.succeeds()?;
        app.was_killed(&image.tree)?;
        image.written = length(&image.app.out)?;
        Ok(image)
    }

    /// Restores a program. Output that it wrote after the dump is discarded, since the restored program writes it
    /// again.
    pub fn restore(&self, image: &Image) -> Result<App> {
        App::forget_output(&image.app, image.written)?;
        until("the numbers of the killed threads are free", || {
            let outcome = self.try_restore(image)?;
            // Since Linux 6.15 a thread id is free again only after its process can be waited for.
            let too_early = !outcome.status.success() && outcome.log.contains("Unable to create a thread: -17");
            Ok((!too_early).then_some(outcome))
        })?
        .succeeds()?;
        Ok(App::adopt(image.app.clone()))
    }

    /// Tries to restore a program.
    pub fn try_restore(&self, image: &Image) -> Result<Outcome> {
        for pid in &image.tree {
            ensure!(process::is_gone(*pid), "there is a process {pid}, so that it cannot be restored");
        }
        self.start_restore(&self.criu(), image)?.wait()
    }

    /// Starts a restore by a CRIU with this setting.
    pub fn start_restore(&self, criu: &Setting, image: &Image) -> Result<Running> {
        criu.restore(&image.dir, self.fresh("restore").with_extension("log"))
    }

    /// All processes of this host, however they were started, including the workers.
    pub fn processes(&self) -> Vec<i32> {
        process::with_environment(&format!("REKINDLE_SOCKET={}", self.socket.display()))
    }

    /// Waits until nothing is left of clients, dumps and restores, so that the daemon is in the state that it started
    /// in.
    pub fn is_idle(&self) -> Result {
        let pid = self.daemon_pid()?;
        let idle = self.daemon.as_ref().map(|daemon| daemon.idle.clone()).unwrap_or_default();
        let mut last = String::new();
        let waited = until_true("nothing is left of clients, dumps and restores", || {
            let status = self.status()?;
            let running = self.processes();
            let mut descriptors = process::descriptors(pid)?;
            if self.has_helper.get()
                && process::driver_helper(pid).is_some()
                && let Some(at) = descriptors.iter().position(|it| it == "socket")
            {
                descriptors.remove(at);
            }
            last = format!(
                "{} workers in use, {} ready, processes {:?}, descriptors {descriptors:?} (idle: {idle:?})",
                status.used,
                status.spare,
                running.iter().map(|pid| process::command_line(*pid)).collect::<Vec<_>>(),
            );
            let workers = (status.used, status.spare) == (0, SPARE) && running.len() == SPARE as usize;
            // A connection that was about to be closed may have counted among those at the beginning.
            Ok(workers && is_among(&descriptors, &idle))
        });
        waited.with_context(|| last)
    }

    /// Ends the test, and checks that nothing is left of its processes, neither before the daemon stops nor after.
    pub fn finish(mut self) -> Result {
        let helper = self.daemon_pid().ok().and_then(process::driver_helper);
        if self.daemon.is_some() {
            self.is_idle()?;
            let status = self.stop_daemon()?;
            ensure!(status.success(), "rekindled ended with {status}");
            ensure!(!self.socket.exists(), "rekindled has left its socket");
        }
        until_true("all workers are gone", || Ok(self.processes().is_empty()))?;
        helper.map_or(Ok(()), |pid| process::wait_gone("the helper for native programs", pid))?;
        self.finished = true;
        Ok(())
    }

    /// A path in this host's directory that was not used yet.
    pub fn fresh(&self, name: &str) -> PathBuf {
        self.count.set(self.count.get() + 1);
        self.path(&format!("{name}-{}", self.count.get()))
    }

    fn show_logs(&self) {
        let Ok(entries) = fs::read_dir(self.dir.path()) else { return };
        let told = |path: &PathBuf| path.extension().is_some_and(|it| it == "log" || it == "err");
        let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(told).collect();
        files.sort_by_key(|file| file.metadata().and_then(|it| it.modified()).ok());
        for file in files.iter().rev().take(LOGS).rev() {
            let text = fs::read(file).unwrap_or_default();
            eprintln!("==> {} <==\n{}", file.display(), tail(&String::from_utf8_lossy(&text)));
        }
    }
}

/// Adds a small amount of host memory for copies to a configuration that does not set the amount.
fn with_staging(configuration: &str) -> String {
    const SECTION: &str = "[checkpoint]\n";
    if configuration.contains("staging = ") {
        configuration.to_owned()
    } else if configuration.contains(SECTION) {
        configuration.replacen(SECTION, STAGING, 1)
    } else {
        format!("{configuration}\n{STAGING}")
    }
}

/// Has the pool keep a fixed number of workers, unless the configuration says how many: tests compare what is left when a program
/// has ended with what there was before.
fn with_pool(configuration: &str) -> String {
    const SECTION: &str = "[pool]\n";
    const FIXED: &str = "[pool]\nlearned = 0\n";
    if configuration.contains("learned = ") {
        configuration.to_owned()
    } else if configuration.contains(SECTION) {
        configuration.replacen(SECTION, FIXED, 1)
    } else {
        format!("{configuration}\n{FIXED}")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        self.show_logs();
        if self.daemon.is_some() {
            let _ = self.kill_daemon();
        }
        let _ = process::kill_all(&self.processes());
    }
}
