//! Starting daemons and clients, and talking to them.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rekindle_wire::control::{ClientInfo, Opening, Reply, Request, StatusInfo};
use rekindle_wire::frame;
use tempfile::TempDir;

/// Waits for a condition that takes a moment.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A daemon with fake workers, killed when dropped.
pub(crate) struct Daemon {
    pub(crate) dir: TempDir,
    process: Child,
}

impl Daemon {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts a daemon, with files in the directory where fake workers look for their instructions.
    pub(crate) fn start_with(files: &[(&str, &str)]) -> Self {
        Self::start_in(TempDir::new().unwrap(), files)
    }

    /// Starts a daemon in a directory that has content already.
    pub(crate) fn start_in(dir: TempDir, files: &[(&str, &str)]) -> Self {
        for (name, content) in files {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        let script = format!(
            "#!/bin/sh\nexport FAKE_WORKER_CHANNEL=$3\nexec '{}' --exact fake_worker --nocapture --test-threads=1\n",
            std::env::current_exe().unwrap().display()
        );
        let program = dir.path().join("worker");
        // By another process: one that another test starts meanwhile would inherit the file while it is open for writing.
        let writes = "printf %s \"$1\" >\"$0\" && chmod 755 \"$0\"";
        let written = Command::new("sh").args(["-c", writes]).arg(&program).arg(script).status().unwrap();
        assert!(written.success());
        let process = spawn(dir.path());
        let daemon = Self { dir, process };
        daemon.wait_until_up();
        daemon
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    /// The socket of the metrics, where the configuration does not name another.
    pub(crate) fn metrics(&self) -> PathBuf {
        self.dir.path().join("metrics")
    }

    /// The endpoint for workers whose daemon is gone.
    pub(crate) fn workers_endpoint(&self) -> PathBuf {
        self.dir.path().join("s.workers")
    }

    pub(crate) fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    /// Waits until the daemon has answered. A connection is not enough, since a process that the daemon before was just
    /// starting may still have its socket.
    fn wait_until_up(&self) {
        eventually("the daemon answers", || {
            let socket = UnixStream::connect(self.socket()).ok()?;
            socket.set_read_timeout(Some(Duration::from_secs(1))).ok()?;
            frame::send(&socket, &Opening::new(&Request::Status).ok()?, &[], &[]).ok()?;
            frame::receive::<Reply>(&socket).ok().map(drop)
        });
    }

    /// Starts another daemon in its place.
    pub(crate) fn start_again(&mut self) {
        self.process.wait().unwrap();
        self.process = spawn(self.dir.path());
        self.wait_until_up();
    }

    pub(crate) fn kill(&mut self, signal: i32) {
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    pub(crate) fn wait_for_exit(&mut self) -> std::process::ExitStatus {
        eventually("the daemon ends", || self.process.try_wait().unwrap())
    }

    /// The requests that fake workers have received, as `COMMAND REQUEST`.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.dir.path().join("events"));
        text.unwrap_or_default().lines().map(str::to_owned).collect()
    }

    pub(crate) fn wait_for_event(&self, event: &str) {
        eventually(event, || self.events().iter().any(|it| it == event).then_some(()));
    }

    pub(crate) fn clients(&self) -> Vec<ClientInfo> {
        match ask(&self.socket(), &Request::List, &[]) {
            Reply::Clients(clients) => clients,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn status(&self) -> StatusInfo {
        match ask(&self.socket(), &Request::Status, &[]) {
            Reply::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn state_of(&self, pid: i32) -> Option<String> {
        let clients = self.clients();
        clients.into_iter().find(|it| it.pid == pid).map(|it| it.state)
    }

    pub(crate) fn wait_for_state(&self, client: &Client, state: Option<&str>) {
        eventually(&format!("{} is {state:?}", client.pid), || {
            (self.state_of(client.pid).as_deref() == state).then_some(())
        });
    }

    /// The number of the daemon's descriptors when it is idle.
    pub(crate) fn descriptors(&self) -> usize {
        let count = || {
            let fds = std::fs::read_dir(format!("/proc/{}/fd", self.pid()));
            fds.unwrap().count()
        };
        // A connection that has just been served may be about to close.
        let counts = (0..10).map(|_| {
            std::thread::sleep(Duration::from_millis(10));
            count()
        });
        counts.min().unwrap()
    }
}

fn spawn(dir: &Path) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(dir.join("log")).unwrap();
    // Keeps the daemon from reading the machine's own configuration.
    let config = dir.join("config.toml");
    let written = std::fs::read_to_string(&config);
    let written = written.unwrap_or_else(|_| "quiesce_timeout_ms = 1000\n[checkpoint]\nstaging = 0\n".to_owned());
    if !written.contains("state_dir") {
        let state = dir.join("state");
        std::fs::write(&config, format!("state_dir = {state:?}\n{written}")).unwrap();
    }
    // Beside the folder of the control socket is outside of the test's directory.
    let written = std::fs::read_to_string(&config).unwrap();
    if !written.contains("[metrics]") {
        let metrics = dir.join("metrics");
        std::fs::write(&config, format!("{written}\n[metrics]\nsocket = {metrics:?}\n")).unwrap();
    }
    // The machine's NVML is the one beside the driver.
    let has_nvml = dir.join("libnvidia-ml.so.1").exists();
    let driver = if has_nvml { dir.join("libcuda.so.1") } else { "/fake/libcuda.so.1".into() };
    Command::new(env!("CARGO_BIN_EXE_rekindled"))
        .arg("--socket")
        .arg(dir.join("s"))
        .arg("--config")
        .arg(config)
        .arg("--worker-program")
        .arg(dir.join("worker"))
        .arg("--cuda-driver")
        .arg(driver)
        .env("FAKE_DIR", dir)
        .env("REKINDLE_LOG", "debug")
        .stderr(log)
        .spawn()
        .unwrap()
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.dir.path().join("log"));
            eprintln!("{}", log.unwrap_or_default());
            eprintln!("{:#?}", self.events());
        }
        // Otherwise workers in use would look for another daemon until their clients are gone.
        let _ = std::fs::write(self.dir.path().join("stop"), "");
    }
}

/// An application process.
pub(crate) struct Client {
    pub(crate) pid: i32,
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Client {
    pub(crate) fn start(daemon: &Daemon) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "fake_client", "--nocapture", "--test-threads=1"])
            .env("FAKE_CLIENT", "1")
            .env("REKINDLE_SOCKET", daemon.socket())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            pid: process.id() as i32,
            input: process.stdin.take().unwrap(),
            output: BufReader::new(process.stdout.take().unwrap()),
            process,
        }
    }

    /// A client that has a worker.
    pub(crate) fn attached(daemon: &Daemon, command: &str) -> Self {
        let mut client = Self::start(daemon);
        assert_eq!(client.ask(&format!("attach {command}")), "attached");
        client
    }

    /// Sends the client a command.
    pub(crate) fn tell(&mut self, what: &str) {
        writeln!(self.input, "{what}").unwrap();
    }

    /// Reads the client's next line.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "it ended");
            // libtest writes text of its own in front.
            if let Some((_, said)) = line.split_once("client: ") {
                return said.trim_end().to_owned();
            }
        }
    }

    pub(crate) fn ask(&mut self, what: &str) -> String {
        self.tell(what);
        self.hear()
    }

    pub(crate) fn cookie(&mut self) -> u64 {
        self.ask("cookie").parse().unwrap()
    }

    /// Waits until the client has been killed.
    pub(crate) fn was_killed(&mut self) {
        use std::os::unix::process::ExitStatusExt;
        let status = eventually("it is killed", || self.process.try_wait().unwrap());
        assert_eq!(status.signal(), Some(9), "{status}");
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The session of a dump or restore, as the plugin opens it.
pub(crate) struct Session(pub(crate) UnixStream);

impl Session {
    pub(crate) fn open(daemon: &Daemon, request: &Request, dir: &Path) -> (Self, Reply) {
        Self::open_at(&daemon.socket(), request, dir)
    }

    pub(crate) fn open_at(socket: &Path, request: &Request, dir: &Path) -> (Self, Reply) {
        let stream = UnixStream::connect(socket).unwrap();
        let dir = std::fs::File::open(dir).unwrap();
        let opening = Opening::new(request).unwrap();
        frame::send(&stream, &opening, &[], &[dir.as_raw_fd()]).unwrap();
        let reply = frame::receive(&stream).unwrap().body;
        (Self(stream), reply)
    }

    pub(crate) fn tell(&self, request: &Request) {
        frame::send(&self.0, request, &[], &[]).unwrap();
    }

    pub(crate) fn hear(&self) -> Reply {
        frame::receive(&self.0).unwrap().body
    }

    pub(crate) fn ask(&self, request: &Request) -> Reply {
        self.tell(request);
        self.hear()
    }
}

/// Makes one request on a connection of its own.
pub(crate) fn ask(socket: &Path, request: &Request, fds: &[RawFd]) -> Reply {
    let stream = UnixStream::connect(socket).unwrap();
    frame::send(&stream, &Opening::new(request).unwrap(), &[], fds).unwrap();
    frame::receive(&stream).unwrap().body
}

/// Runs an action as another user; None where this process may not. Only this thread changes its user: its connections are that
/// user's.
pub(crate) fn as_user<T: Send>(uid: u32, action: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let as_it = scope.spawn(move || {
            // SAFETY: no pointers. Unlike the C library's, the system call is for one thread.
            let result = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
            (result == 0).then(action)
        });
        as_it.join().unwrap()
    })
}

/// The reason of a reply, which must be a failure.
pub(crate) fn reason(reply: Reply) -> String {
    match reply {
        Reply::Failed(failure) => failure.reason,
        other => panic!("{other:?}"),
    }
}

/// Makes a memfd as the interposer does.
pub(crate) fn memfd(name: &std::ffi::CStr, size: usize) -> OwnedFd {
    // SAFETY: the name is a C string; the descriptor is new and owned here.
    unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0);
        assert_eq!(libc::ftruncate(fd, size as libc::off_t), 0);
        let seals = rekindle_wire::layout::SEALS;
        assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, seals), 0);
        OwnedFd::from_raw_fd(fd)
    }
}

pub(crate) fn cookie_of(stream: &UnixStream) -> u64 {
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into the local.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    assert_eq!(result, 0);
    cookie
}
