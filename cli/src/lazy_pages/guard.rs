//! The guard: keeps processes from running without their pages.
//!
//! ```text
//!   Awaited ──┬── CRIU's plugin tells of the processes ──────────────► Guarded ──┬── all pages are there ──► done
//!             ├── all pages are there already, of a small program ──► Whole       └── the server fails ────► killed
//!             └── the server fails, or `rekindle restore` ends ──────► Over: no plugin gets a good answer any more
//! ```

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::{mem, ptr, thread};

use anyhow::{Context, bail};
use clap::Args;
use rekindle_wire::lazy_pages;
use rustix::fs::{FlockOperation, flock};
use rustix::process::setsid;

use super::moved;
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
    /// The directory of the image that the server reads, if it is another
    #[arg(long)]
    served: Option<PathBuf>,
    /// The directory of the migration that has brought the image
    #[arg(long)]
    migration: Option<PathBuf>,
}

/// Which processes the guard guards.
#[derive(Default)]
struct Guarded {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
enum State {
    /// CRIU makes the processes. They do not run before the guard knows them.
    #[default]
    Awaited,
    Guarded(Processes),
    /// The processes have all their pages before they run.
    Whole,
    /// The same, and the plugin is being answered.
    Answering,
    /// The processes must not run.
    Over,
}

/// Starts a server and guards it. The output has a line when CRIU can begin, one when the guard knows the processes, and one that
/// says how it has ended; or one with an error. The end of the input, before there are processes, ends the guard and its server.
pub(crate) fn serve(options: &Options) -> Result<(), Failure> {
    stand_alone();
    if let Err(error) = guard(options) {
        // `rekindle restore` shows it, if it listens.
        let _ = say(&format!("{error:#}"));
        return Err(error.into());
    }
    Ok(())
}

/// Nothing that is meant for others ends the guard: not a signal for the shell's job or for a service, and not a lack of memory.
/// Nothing of others is kept open by it.
fn stand_alone() {
    // SAFETY: this program has opened nothing above its three descriptors yet. Older C libraries have no function for the call.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    let _ = setsid();
    // Both take little memory, and their end is that of the processes. Not everybody may ask for it.
    let _ = fs::write("/proc/self/oom_score_adj", "-1000");
    // SAFETY: the set is ours. The server begins with no signal blocked: `Command` sees to that.
    unsafe {
        let mut signals = mem::zeroed();
        libc::sigemptyset(&raw mut signals);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
            libc::sigaddset(&raw mut signals, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, ptr::null_mut());
    }
}

fn guard(options: &Options) -> anyhow::Result<()> {
    let Options { dir, criu, served, migration } = options;
    let folder = Folder::make()?;
    let socket = UnixListener::bind(folder.path.join(lazy_pages::SOCKET)).context("cannot make the guard's socket")?;
    let (server, ready) = Server::start(criu, (served.as_ref().unwrap_or(dir), dir), &folder.path, &folder.lock)?;
    let guarded = Arc::new(Guarded::default());
    let kill = server.killer();
    let (path, shared) = (folder.path.clone(), Arc::clone(&guarded));
    thread::spawn(move || {
        let watched = Arc::clone(&shared);
        let also_kill = kill.clone();
        thread::spawn(move || {
            wait_for_end_of_input();
            if watched.gives_up() {
                also_kill.kill();
            }
        });
        match server::wait_until_ready(ready).and_then(|()| say(&format!("{READY}{}", path.display()))) {
            Ok(()) => socket.incoming().flatten().for_each(|stream| answer(&stream, &shared)),
            Err(_) => kill.kill(),
        }
    });
    let ending = server.wait();
    let said = match (ending, guarded.ends(ending)) {
        (Ending::Done, _) => {
            server.let_go();
            migration.iter().for_each(|it| moved::are_whole(it, &folder.name()));
            DONE.to_owned()
        }
        (failed, Some(processes)) => {
            // From here on no process reads a page that is missing: it waits, and so can be killed.
            let held = server.hold_pages();
            let killed = processes.kill();
            let why = format!(
                "criu lazy-pages has not brought all pages ({failed}), and the restored processes lack some: they are killed \
                 ({killed}); see {}, and restore again",
                dir.join(LOG).display()
            );
            note(dir, &why);
            migration.iter().for_each(|it| moved::are_killed(it, &folder.name(), dir));
            let dir = dir.to_owned();
            held.wait_until_unused(|| note(&dir, "a process that has left the tree waits for a page: kill it"));
            server.let_go();
            format!("{KILLED}{why}")
        }
        (failed, None) => {
            server.let_go();
            format!("criu lazy-pages, before the processes ran: {failed}; see {}", dir.join(LOG).display())
        }
    };
    guarded.wait_until_answered();
    drop(folder);
    // Nobody may listen any more.
    let _ = say(&said);
    Ok(())
}

/// Adds a line to the server's log. A disk that is full must not keep the guard from its end.
fn note(dir: &Path, line: &str) {
    if let Ok(mut log) = OpenOptions::new().append(true).open(dir.join(LOG)) {
        let _ = writeln!(log, "rekindle: {line}");
    }
}

impl Guarded {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// CRIU's plugin tells of the processes, which are whole and do not run yet.
    fn take_over(&self, root: i32) -> anyhow::Result<()> {
        let processes = Processes::of_tree(root)?;
        let mut state = self.lock();
        match *state {
            State::Awaited => *state = State::Guarded(processes),
            State::Whole => *state = State::Answering,
            State::Answering | State::Guarded(_) => bail!("it guards others already"),
            State::Over => bail!("criu lazy-pages or rekindle restore has ended"),
        }
        Ok(())
    }

    /// The plugin has its answer.
    fn is_answered(&self) {
        let mut state = self.lock();
        if let State::Answering = *state {
            *state = State::Over;
            self.changed.notify_all();
        }
    }

    /// `rekindle restore` has ended. Returns whether the server is to end, since no processes need it.
    fn gives_up(&self) -> bool {
        let mut state = self.lock();
        let is_awaited = matches!(*state, State::Awaited | State::Whole);
        if is_awaited {
            *state = State::Over;
            self.changed.notify_all();
        }
        is_awaited
    }

    /// The server ends. Returns the processes that have needed it until now.
    fn ends(&self, ending: Ending) -> Option<Processes> {
        let mut state = self.lock();
        let next = match (ending, &*state) {
            (Ending::Done, State::Awaited) => State::Whole,
            _ => State::Over,
        };
        match mem::replace(&mut *state, next) {
            State::Guarded(processes) => Some(processes),
            _ => None,
        }
    }

    /// Waits until the plugin has an answer about processes that have all their pages already, or will not ask.
    fn wait_until_answered(&self) {
        let mut state = self.lock();
        while matches!(*state, State::Whole | State::Answering) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Answers CRIU's plugin, and tells `rekindle restore`.
fn answer(mut stream: &UnixStream, guarded: &Guarded) {
    let root = first_line(stream).and_then(|it| it.parse().context("no process id"));
    let answer = match root.and_then(|root| guarded.take_over(root)) {
        Ok(()) => lazy_pages::GUARDED.to_owned(),
        Err(error) => format!("{error:#}"),
    };
    if answer == lazy_pages::GUARDED {
        let _ = say(&answer);
    }
    // A plugin that does not hear it fails the restore.
    let _ = writeln!(stream, "{answer}");
    guarded.is_answered();
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
        // One guard at a time makes its folder, so that no other takes it for one that nobody uses.
        let together = File::open(all).with_context(|| cannot_make(all))?;
        flock(&together, FlockOperation::LockExclusive).with_context(|| cannot_make(all))?;
        remove_stale(all);
        // Guards in other pid namespaces may have the same number.
        let own = std::process::id();
        let names = (0_u32..).map(|turn| if turn == 0 { own.to_string() } else { format!("{own}.{turn}") });
        let mut made = names.map(|name| all.join(name)).map(|path| (fs::create_dir(&path), path));
        let is_taken = |made: &io::Result<()>| made.as_ref().is_err_and(|it| it.kind() == io::ErrorKind::AlreadyExists);
        let (result, path) = made.find(|(made, _)| !is_taken(made)).context("no folder has a free name")?;
        result.with_context(|| cannot_make(&path))?;
        let lock = File::open(&path).with_context(|| cannot_make(&path))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive).with_context(|| cannot_make(&path))?;
        Ok(Self { path, lock })
    }
}

impl Folder {
    /// By which the guard is known.
    fn name(&self) -> String {
        name(&self.path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The name of a guard's folder.
pub(super) fn name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
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

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> i32 {
        std::process::id().cast_signed()
    }

    #[test]
    fn no_plugin_gets_a_good_answer_when_the_server_is_lost() {
        let guarded = Guarded::default();
        assert!(guarded.ends(Ending::Failed(9)).is_none());
        assert!(guarded.take_over(own()).is_err());
        let guarded = Guarded::default();
        assert!(guarded.gives_up());
        assert!(guarded.take_over(own()).is_err());
    }

    #[test]
    fn processes_need_the_server_from_the_plugins_word_on() {
        let guarded = Guarded::default();
        guarded.take_over(own()).unwrap();
        assert!(guarded.take_over(own()).is_err(), "it guards one tree");
        assert!(!guarded.gives_up(), "the processes run on without the command");
        assert!(guarded.ends(Ending::Failed(9)).is_some());
    }

    #[test]
    fn a_plugin_may_come_when_all_pages_are_there_already() {
        let guarded = Arc::new(Guarded::default());
        assert!(guarded.ends(Ending::Done).is_none());
        let waits = Arc::clone(&guarded);
        let waiting = thread::spawn(move || waits.wait_until_answered());
        guarded.take_over(own()).unwrap();
        assert!(!guarded.gives_up(), "the plugin is being answered");
        guarded.is_answered();
        waiting.join().unwrap();
        let guarded = Guarded::default();
        assert!(guarded.ends(Ending::Done).is_none());
        guarded.gives_up();
        guarded.wait_until_answered();
    }
}
