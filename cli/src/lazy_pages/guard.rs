//! The guard: keeps processes from running without their pages.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, bail};
use clap::Args;
use rekindle_wire::lazy_pages;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Signal, pidfd_send_signal, setsid};

use super::processes::Processes;
use super::server::{self, Ending, Server};
use super::{DONE, KILLED, LOG, READY};
use crate::failure::Failure;

/// What `rekindle restore --lazy` gives its guard.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The image directory
    dir: PathBuf,
    /// The criu program
    #[arg(long)]
    criu: PathBuf,
}

/// Which processes the guard guards.
enum State {
    /// CRIU makes them. They do not run before the guard knows them.
    Awaited,
    Guarded(Processes),
    /// `rekindle restore` has ended before: the processes never run.
    GivenUp,
}

/// Starts a server and guards it. The first line of output says that CRIU can begin, the second how the server has ended. The end
/// of the input, before there are processes, ends the guard and its server.
pub(crate) fn serve(options: &Options) -> Result<(), Failure> {
    let dir = &options.dir;
    // A signal for the shell's job is not for the guard.
    let _ = setsid();
    // Both take little memory, and their end is that of the processes. Not everybody may ask for it.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    let folder = Folder::make()?;
    let socket = UnixListener::bind(folder.path.join(lazy_pages::SOCKET)).context("cannot make the guard's socket")?;
    let (server, ready) = Server::start(&options.criu, dir, &folder.path, &folder.lock)?;
    let state = Arc::new(Mutex::new(State::Awaited));
    let (path, awaits) = (folder.path.clone(), Arc::clone(&state));
    let server_fd = server.pidfd().context("cannot watch criu lazy-pages")?;
    thread::spawn(move || {
        let begun = server::wait_until_ready(ready).and_then(|()| say(&format!("{READY}{}", path.display())));
        if begun.is_ok() {
            thread::scope(|threads| {
                threads.spawn(|| {
                    wait_for_end_of_input();
                    let mut state = lock(&awaits);
                    if let State::Awaited = *state {
                        *state = State::GivenUp;
                        let _ = pidfd_send_signal(&server_fd, Signal::KILL);
                    }
                });
                socket.incoming().flatten().for_each(|stream| answer(&stream, &awaits));
            });
        }
    });
    let ending = server.wait().context("cannot wait for criu lazy-pages")?;
    let outcome = outcome(ending, &lock(&state), dir);
    server.let_go();
    drop(folder);
    // Nobody may listen any more.
    let said = match outcome {
        Outcome::Done => DONE.to_owned(),
        Outcome::Killed(why) => format!("{KILLED}{why}"),
        Outcome::Failed(why) => why,
    };
    let _ = say(&said);
    Ok(())
}

/// What the end of a server has led to.
enum Outcome {
    Done,
    /// The processes lacked pages.
    Killed(String),
    /// The processes never ran.
    Failed(String),
}

/// What the end of the server means. Where pages are missing, the processes are dead when this returns.
fn outcome(ending: Ending, state: &State, dir: &Path) -> Outcome {
    let log = dir.join(LOG);
    match (ending, state) {
        (Ending::Done, _) => Outcome::Done,
        (failed, State::Guarded(processes)) => {
            let killed = processes.kill();
            let why = format!(
                "criu lazy-pages has not brought all pages ({failed}), and the restored processes lack some: they are killed \
                 ({killed}); see {}, and restore again",
                log.display()
            );
            note(dir, &why);
            Outcome::Killed(why)
        }
        (failed, _) => {
            Outcome::Failed(format!("criu lazy-pages, before the processes ran: {failed}; see {}", log.display()))
        }
    }
}

/// Adds a line to the server's log. A disk that is full must not keep the guard from its end.
fn note(dir: &Path, line: &str) {
    if let Ok(mut log) = OpenOptions::new().append(true).open(dir.join(LOG)) {
        let _ = writeln!(log, "rekindle: {line}");
    }
}

/// Answers CRIU's plugin.
fn answer(stream: &UnixStream, state: &Mutex<State>) {
    let answer =
        take_over(stream, state).map_or_else(|error| format!("{error:#}"), |()| lazy_pages::GUARDED.to_owned());
    let mut stream = stream;
    // A plugin that does not hear it fails the restore.
    let _ = writeln!(stream, "{answer}");
}

fn take_over(stream: &UnixStream, state: &Mutex<State>) -> anyhow::Result<()> {
    let root = first_line(stream)?.parse().context("no process id")?;
    let processes = Processes::of_tree(root)?;
    match &mut *lock(state) {
        State::GivenUp => bail!("rekindle restore has ended"),
        state => *state = State::Guarded(processes),
    }
    Ok(())
}

fn first_line(stream: &UnixStream) -> anyhow::Result<String> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).context("cannot read")?;
    if line.pop() != Some('\n') {
        bail!("the connection closed");
    }
    Ok(line)
}

fn say(line: &str) -> anyhow::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{line}").and_then(|()| output.flush()).context("nobody listens")
}

fn wait_for_end_of_input() {
    while matches!(io::stdin().lock().read(&mut [0; 64]), Ok(1..)) {}
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The guard's folder below [`lazy_pages::FOLDER`], with the two sockets. It says that processes may lack pages, and is removed when
/// this is dropped.
struct Folder {
    path: PathBuf,
    /// Locked while the guard or its server lives.
    lock: File,
}

impl Folder {
    fn make() -> anyhow::Result<Self> {
        let all = Path::new(lazy_pages::FOLDER);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(all).with_context(|| cannot_make(all))?;
        remove_stale(all);
        let path = all.join(std::process::id().to_string());
        fs::create_dir(&path).with_context(|| cannot_make(&path))?;
        let lock = File::open(&path).with_context(|| cannot_make(&path))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).with_context(|| cannot_make(&path))?;
        Ok(Self { path, lock })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn cannot_make(path: &Path) -> String {
    format!("cannot make {}, which a restore with --lazy needs", path.display())
}

/// Removes the folders of guards that were killed, unless their servers live: processes may lack pages until those have ended.
fn remove_stale(all: &Path) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let path = entry.path();
        let is_stale = File::open(&path).is_ok_and(|it| flock(&it, FlockOperation::NonBlockingLockExclusive).is_ok());
        if is_stale {
            let _ = fs::remove_dir_all(path);
        }
    }
}
