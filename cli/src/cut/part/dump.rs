//! The dump of a tree for a cut.
//!
//! ```text
//!   Dump ─► criu dump ─► at its gate: Dumped, Seen ┬─ Go ─► the tree goes on ─► CRIU ends: Durable ─┬─ Good ─► done
//!              │                               │         (or stands still)        │               └─ End ──► killed
//!              └─ fails ───────────────────────┴── anything else ─────────────────┴─► the tree goes on, and leaves nothing
//! ```
//!
//! A tree that waits at the gate is stopped twice: by CRIU, and by a SIGSTOP that is pending, which is taken back at `Go` unless the tree is to
//! be killed. If CRIU is killed there, it leaves sockets on which no system call works: they are mended before the tree goes on. If this
//! process ends, the tree's guard does all that (`guard.rs`).

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Instant;

use anyhow::{Context, anyhow};
use rekindle_wire::control::{CheckInfo, Reply, Request};

use super::super::manifest::{Note, VERSION, files};
use super::super::options::criu;
use super::super::talk::{FromPart, Make, ToPart, Which};
use super::events::{Event, Events};
use super::gate::{self, Waiting};
use super::guard::{Guarded, mend};
use super::place::Place;
use super::spoken::answer;
use super::tree::{Held, Tree};
use crate::failure::Failure;
use crate::network::connection::Connection;
use crate::network::{firewall, sockets};
use crate::process::boot;
use crate::{criu as program, daemon, protect};

/// CRIU's log, in the part's directory.
const LOG: &str = "dump.log";
/// The file of a part that is not complete.
const UNFINISHED: &str = "rekindle-cut-unfinished";

/// A dump that goes on.
struct Dump<'a> {
    make: &'a Make,
    events: Events,
    place: &'a Place,
    guard: Guarded,
    /// The tree as it was before the dump.
    before: Tree,
    criu_runs: bool,
    /// Whether the coordinator can still say something.
    is_lost: bool,
}

/// What is known of a tree that is dumped.
struct Dumped {
    tree: Tree,
    connections: Vec<Connection>,
    ports: Vec<u16>,
    waited_ms: u64,
}

/// Serves a coordinator that makes a cut.
pub(super) fn dump(socket: &Path, make: &Make, events: Events) -> Result<(), Failure> {
    check(socket, make)?;
    // Before anything is noted of the tree: another one may have stopped it.
    let held = Held::take(make.pid)?;
    let place = Place::make(&make.cut, make.index, make.pid)?;
    events.hear(&place)?;
    let before = Tree::of(make.pid)?.noting_stopped();
    answer(&FromPart::Ready(before.seen()?))?;
    loop {
        match events.next() {
            Event::Said(ToPart::Look) => answer(&FromPart::Seen(before.now(make.pid)?.seen()?))?,
            Event::Said(ToPart::Dump) => break,
            Event::Asked(..) | Event::Gate(_) => {}
            _ => return Ok(()),
        }
    }
    let _directory = make_directory(&make.dir)?;
    let guard = Guarded::start(make.pid, &held)?;
    let before = before.now(make.pid)?.noting_connections();
    let mut dump = Dump { make, events, place: &place, guard, before, criu_runs: false, is_lost: false };
    let made = dump.until_durable(socket);
    let ended = match &made {
        Ok((tree, note)) => dump.finish(tree, *note),
        Err(_) => dump.undo(),
    };
    dump.guard.over();
    made.map(drop).and(ended)
}

impl Dump<'_> {
    /// Has the tree dumped, and the part made complete. Returns the tree and the hash of the note.
    fn until_durable(&mut self, socket: &Path) -> Result<(Tree, Durable), Failure> {
        let log = self.make.dir.join(LOG);
        let mut command = Command::new(criu()?);
        command.args(program::dump(self.make.pid, &self.make.dir, &log)?).arg("--leave-running");
        command.args(&self.make.options).args(firewall::option());
        command.arg("--action-script").arg(self.place.script()).env("REKINDLE_SOCKET", socket);
        let criu = self.events.start(command)?;
        self.criu_runs = true;
        self.guard.knows_criu(criu, &self.before)?;
        let gate = self.until_gate(&log)?;
        let dumped = self.until_go(gate, &log)?;
        self.until_criu_ends(&dumped.tree, &log)?;
        let note = self.write(&dumped)?;
        let durable = Durable { note, processes: dumped.tree.processes().len(), waited_ms: dumped.waited_ms };
        Ok((dumped.tree, durable))
    }

    /// Waits until CRIU has dumped the tree.
    fn until_gate(&mut self, log: &Path) -> Result<Waiting, Failure> {
        let mut is_lost = false;
        loop {
            match self.events.next() {
                // The gate was closed too late.
                Event::Gate(gate) if gate.moment == gate::DUMPED && is_lost => drop(gate),
                Event::Gate(gate) if gate.moment == gate::DUMPED => return Ok(gate),
                Event::Gate(gate) => gate.pass(),
                Event::Ended(_) if is_lost => {
                    self.criu_runs = false;
                    return Err(lost());
                }
                Event::Ended(status) => return Err(self.failed(status, log)),
                Event::Lost | Event::Said(_) => {
                    // CRIU is not killed: it fails at the gate, and leaves nothing behind.
                    is_lost = true;
                    self.place.closes_gate();
                }
                Event::Asked(..) => {}
            }
        }
    }

    /// The tree stands still: waits until all do, and lets it go on.
    fn until_go(&mut self, gate: Waiting, log: &Path) -> Result<Dumped, Failure> {
        let began = Instant::now();
        let tree = self.before.now(self.make.pid)?;
        let seen = tree.seen()?;
        let connections = seen.connections.clone();
        let ports = sockets::listening(&tree.pids());
        // If CRIU is killed from now on, the tree does not run before its sockets are what they were.
        self.guard.stands(&tree)?;
        tree.stop();
        // If nobody hears it, the next event says so.
        let _ = answer(&FromPart::Dumped(seen));
        loop {
            match self.events.next() {
                Event::Said(ToPart::Look) => match tree.seen() {
                    Ok(seen) => drop(answer(&FromPart::Seen(seen))),
                    Err(failure) => return Err(leave(gate, &tree, failure)),
                },
                Event::Said(ToPart::Go) => {
                    let waited_ms = began.elapsed().as_millis() as u64;
                    gate.pass();
                    if !self.make.stop {
                        tree.goes_on_when_left();
                    }
                    return Ok(Dumped { tree, connections, ports, waited_ms });
                }
                Event::Ended(status) => return Err(self.failed(status, log)),
                Event::Lost | Event::Said(_) => return Err(leave(gate, &tree, lost())),
                Event::Gate(_) | Event::Asked(..) => {}
            }
        }
    }

    /// CRIU and the daemon make the image durable, whether somebody waits for that or not.
    fn until_criu_ends(&mut self, tree: &Tree, log: &Path) -> Result<(), Failure> {
        loop {
            match self.events.next() {
                Event::Ended(status) if status.success() => {
                    self.criu_runs = false;
                    return Ok(());
                }
                Event::Ended(status) => return Err(self.failed(status, log)),
                Event::Gate(gate) => gate.pass(),
                Event::Lost => {
                    self.is_lost = true;
                    // There is no cut with which it would be killed.
                    tree.goes_on_when_left();
                }
                Event::Said(_) | Event::Asked(..) => {}
            }
        }
    }

    /// Writes the note: the part is complete. Returns the note's hash.
    fn write(&self, dumped: &Dumped) -> Result<u64, Failure> {
        let Make { cut, index, host, pid, dir, options, .. } = self.make;
        let unfinished = dir.join(UNFINISHED);
        fs::remove_file(&unfinished).with_context(|| format!("cannot remove {}", unfinished.display()))?;
        let note = Note {
            version: VERSION,
            cut: cut.clone(),
            index: *index,
            host: host.clone(),
            root: *pid,
            boot: boot(),
            processes: dumped.tree.processes().to_vec(),
            stopped: dumped.tree.stopped().to_vec(),
            connections: dumped.connections.clone(),
            ports: dumped.ports.clone(),
            options: options.clone(),
            files: files(dir)?,
        };
        note.write(dir)
    }

    /// The part is complete: waits for what is to become of the tree.
    fn finish(&mut self, tree: &Tree, durable: Durable) -> Result<(), Failure> {
        let Durable { note, processes, waited_ms } = durable;
        // If nobody hears it, the next event says so.
        let _ = answer(&FromPart::Durable { note, processes, waited_ms });
        loop {
            match if self.is_lost { Event::Lost } else { self.events.next() } {
                Event::Said(ToPart::End) if self.make.stop => {
                    tree.end()?;
                    return answer(&FromPart::Ended);
                }
                Event::Lost | Event::Said(_) => break,
                Event::Gate(_) | Event::Ended(_) | Event::Asked(..) => {}
            }
        }
        // Whether the cut is good is not known here. Whoever knows it ends the tree by another connection.
        tree.go_on();
        Ok(())
    }

    /// CRIU has ended.
    fn failed(&mut self, status: ExitStatus, log: &Path) -> Failure {
        self.criu_runs = false;
        why(status, log)
    }

    /// There is no cut: the tree goes on.
    fn undo(&mut self) -> Result<(), Failure> {
        // Its script fails, and then CRIU lets the tree go on.
        self.place.closes_gate();
        while self.criu_runs {
            self.criu_runs = !matches!(self.events.next(), Event::Ended(_));
        }
        // Before it runs. A CRIU that was not killed has left nothing to mend.
        let mended = mend(self.make.pid, &self.before);
        self.before.now(self.make.pid)?.go_on();
        let _ = fs::remove_dir_all(&self.make.dir);
        mended
    }
}

/// What is told of a part that is complete.
#[derive(Clone, Copy)]
struct Durable {
    note: u64,
    processes: usize,
    waited_ms: u64,
}

/// There is no cut: CRIU fails at its gate, and lets go of the tree, which goes on. Then CRIU waits for GPU memory, which may take minutes.
fn leave(gate: Waiting, tree: &Tree, failure: Failure) -> Failure {
    drop(gate);
    tree.goes_on_when_left();
    failure
}

fn lost() -> Failure {
    anyhow!("the command that makes the cut has ended or given up: there is no cut, and the processes go on").into()
}

fn why(status: ExitStatus, log: &Path) -> Failure {
    let said = fs::read(log).unwrap_or_default();
    let errors = program::errors(&String::from_utf8_lossy(&said));
    let why = errors.into_iter().next().unwrap_or_else(|| format!("criu ended with {status}"));
    anyhow!("the processes cannot be dumped: {why}").into()
}

/// Whether the tree can be dumped.
fn check(socket: &Path, make: &Make) -> Result<(), Failure> {
    criu()?;
    program::are_kept(&make.options)?;
    let Reply::Checked(processes) = daemon::ask(socket, &Request::Check { pid: make.pid })? else {
        return Err(daemon::unexpected_answer().into());
    };
    if let Some(CheckInfo { pid, command, reasons, .. }) = processes.iter().find(|it| !it.reasons.is_empty()) {
        return Err(Failure::refused(anyhow!(
            "process {pid} ({command}) cannot be dumped now: {}",
            reasons.join("; ")
        )));
    }
    if make.stop {
        protect::must_not_be_protected(socket, make.pid)?;
    }
    let tree = Tree::of(make.pid)?;
    if !tree.is_alive() {
        return Err(Failure::refused(anyhow!("there is no process {}", make.pid)));
    }
    if !sockets::is_own_network(&tree.pids()) {
        return Err(Failure::refused(anyhow!(
            "the tree of {} has a network of its own, as containers have: its connections cannot be kept across hosts",
            make.pid
        )));
    }
    Ok(())
}

/// Makes the directory of a part, in the place of one that was not finished. It is in use until what this returns is dropped.
fn make_directory(dir: &Path) -> Result<File, Failure> {
    let unfinished = dir.join(UNFINISHED);
    let made = || -> io::Result<Option<File>> {
        match File::options().write(true).open(&unfinished) {
            Ok(left) if is_in_use(&left) => return Ok(None),
            Ok(_) => fs::remove_dir_all(dir)?,
            Err(_) => {}
        }
        fs::create_dir_all(dir.parent().map_or_else(PathBuf::new, Path::to_owned))?;
        match fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
            made => made?,
        }
        let file = File::create_new(&unfinished)?;
        Ok((!is_in_use(&file)).then_some(file))
    };
    made().with_context(|| format!("cannot make {}", dir.display()))?.ok_or_else(|| {
        Failure::refused(anyhow!(
            "there is a {} already: if it is part of no cut that is needed or being made, remove it, or name another directory",
            dir.display()
        ))
    })
}

/// Whether another process has locked a file. Otherwise this one has, where the file system can.
fn is_in_use(file: &File) -> bool {
    matches!(file.try_lock(), Err(TryLockError::WouldBlock))
}

/// Kills what runs on of a tree that a good cut was to end.
pub(super) fn end(which: &Which) -> Result<(), Failure> {
    let note = Note::read(&which.cut, &which.part)?;
    if note.boot == boot() {
        Tree::of_dumped(&note.processes).end_all()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn the_directory_of_a_part_that_is_being_made_is_not_removed() {
        let base = TempDir::new().unwrap();
        let dir = base.path().join("cut").join("a");
        let made = make_directory(&dir).unwrap();
        fs::write(dir.join("pages-1.img"), "pages").unwrap();
        assert!(make_directory(&dir).unwrap_err().to_string().contains("already"));
        assert!(dir.join("pages-1.img").exists());
        // Who made it has ended.
        drop(made);
        let made = make_directory(&dir).unwrap();
        assert!(!dir.join("pages-1.img").exists());
        fs::remove_file(dir.join(UNFINISHED)).unwrap();
        drop(made);
        assert!(make_directory(&dir).is_err(), "it is complete");
    }
}
