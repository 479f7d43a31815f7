//! The restore of a tree of a cut.
//!
//! ```text
//!   Restore ─► the part is looked at: Checked
//!   Start ───► its connections are locked; criu restore ─► post-restore: Placed
//!   Connect ─► they are unlocked, and GPU memory is loaded ─► pre-resume: Held
//!   Run ─────► the tree runs: Running
//! ```
//!
//! The tree ends if anything fails, or the connection is lost, before it is held. While it is held, only somebody who knows of all others
//! can say what becomes of it: the coordinator, or whoever settles. It ends if nobody has said so ten minutes after the coordinator was
//! lost. One that runs by then runs on.
//!
//! A tree that is held is stopped twice: by CRIU, and by a SIGSTOP that is pending. If that CRIU dies, no process runs.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rekindle_images::Image;

use super::super::manifest::{Dumped, Note};
use super::super::options::criu;
use super::super::talk::{FromPart, State, ToPart, Which};
use super::events::{Event, Events};
use super::firewall;
use super::gate::{self, Waiting};
use super::place::{self, Place};
use super::spoken::answer;
use super::tree::Tree;
use crate::failure::Failure;
use crate::migrate::talk;
use crate::network::sockets;
use crate::process::{Process, boot};
use crate::{cpu_image, criu as program, output};

/// CRIU's log, in the part's directory.
const LOG: &str = "restore.log";
/// The manifest of Rekindle's part of an image; a tree without a GPU has none.
const GPU: &str = "rekindle.img";
/// The file that says which process was restored last.
const RESTORED: &str = "rekindle-cut-restored";
/// How long a tree is held whose coordinator is lost.
const PATIENCE: Duration = Duration::from_secs(600);

/// A restore that goes on.
struct Restore<'a> {
    note: &'a Note,
    dir: &'a Path,
    events: Events,
    /// CRIU waits for this.
    gate: Option<Waiting>,
    locked: Option<firewall::Locked>,
    /// CRIU's process. Only what descends from it is killed.
    criu: Option<i32>,
    criu_runs: bool,
    /// Whether the coordinator can still say something.
    is_lost: bool,
}

/// Serves a coordinator that restores a cut.
pub(super) fn restore(socket: &Path, which: &Which, events: Events) -> Result<(), Failure> {
    let note = Note::read(&which.cut, &which.part)?;
    check(&note, &which.part.dir)?;
    let place = Place::make(&which.cut, which.part.index, note.root)?;
    // Of an earlier restore. No host begins before all have looked.
    let _ = fs::remove_file(which.part.dir.join(RESTORED));
    events.hear(&place)?;
    answer(&FromPart::Checked)?;
    if !matches!(events.next(), Event::Said(ToPart::Start)) {
        return Ok(());
    }
    let mut restore = Restore {
        note: &note,
        dir: &which.part.dir,
        events,
        gate: None,
        locked: None,
        criu: None,
        criu_runs: false,
        is_lost: false,
    };
    let held = restore.until_held(socket, &place);
    match held.and_then(|()| restore.until_it_is_over()) {
        Ok(()) => Ok(()),
        Err(failure) => {
            restore.end();
            Err(failure)
        }
    }
}

impl Restore<'_> {
    /// Has the tree restored, until it is complete.
    fn until_held(&mut self, socket: &Path, place: &Place) -> Result<(), Failure> {
        program::are_kept(&self.note.options)?;
        self.locked = Some(firewall::Locked::new(&self.note.cut, self.note.index, &self.note.connections)?);
        sockets::end_what_is_left_of(&self.note.connections, &self.note.ports)?;
        let log = self.dir.join(LOG);
        let _ = fs::remove_file(&log);
        let mut command = Command::new(criu()?);
        command.args(program::restore(self.dir, &log)?).arg("--restore-detached").args(&self.note.options);
        command.arg("--action-script").arg(place.script()).env("REKINDLE_SOCKET", socket);
        // The tree's parent when CRIU has ended.
        let _ = rustix::process::set_child_subreaper(rustix::process::Pid::from_raw(std::process::id() as i32));
        self.criu = Some(self.events.start(command)?);
        self.criu_runs = true;
        self.until(gate::PLACED, &log)?;
        answer(&FromPart::Placed)?;
        self.until_connected(&log)?;
        // Otherwise nobody would hear anybody.
        self.locked.take().map_or(Ok(()), firewall::Locked::unlock)?;
        self.passes();
        self.until(gate::COMPLETE, &log)?;
        Tree::of(self.note.root)?.stop();
        // If nobody hears it, the next event says so.
        let _ = answer(&FromPart::Held);
        Ok(())
    }

    /// Waits until CRIU is at a gate.
    fn until(&mut self, moment: &str, log: &Path) -> Result<(), Failure> {
        loop {
            match self.events.next() {
                Event::Gate(gate) if gate.moment == moment => {
                    self.gate = Some(gate);
                    return Ok(());
                }
                Event::Gate(gate) => gate.pass(),
                Event::Ended(status) => return Err(self.failed(status, log)),
                Event::Lost | Event::Said(_) => return Err(given_up()),
                Event::Asked(ToPart::Settle { run: false, .. }, asker) => return self.ends_for(asker),
                Event::Asked(_, asker) => say(asker, &FromPart::State(State::Restoring)),
            }
        }
    }

    /// CRIU is at its first gate: waits until it may go on.
    fn until_connected(&mut self, log: &Path) -> Result<(), Failure> {
        loop {
            match self.events.next() {
                Event::Said(ToPart::Connect) => return Ok(()),
                Event::Ended(status) => return Err(self.failed(status, log)),
                Event::Lost | Event::Said(_) => return Err(given_up()),
                Event::Asked(ToPart::Settle { run: false, .. }, asker) => return self.ends_for(asker),
                Event::Asked(_, asker) => say(asker, &FromPart::State(State::Restoring)),
                Event::Gate(_) => {}
            }
        }
    }

    /// The tree is complete: waits until it may run, or is to end.
    fn until_it_is_over(&mut self) -> Result<(), Failure> {
        let log = self.dir.join(LOG);
        // When the coordinator was lost: nobody has to settle a tree before.
        let (mut began, mut runs) = (Instant::now(), false);
        let mut was_lost = false;
        loop {
            if self.is_lost && !was_lost {
                (began, was_lost) = (Instant::now(), true);
            }
            let left = PATIENCE.saturating_sub(began.elapsed());
            let event = match self.is_lost {
                true => self.events.within(left),
                false => Some(self.events.next()),
            };
            match event {
                Some(Event::Said(ToPart::Run)) if !runs => {
                    self.run(&log)?;
                    runs = true;
                    let _ = answer(&FromPart::Running);
                }
                Some(Event::Said(ToPart::Done)) if runs => {
                    if let Err(failure) = write_over(self.dir) {
                        // Somebody who settles would end this tree if another one has ended by then.
                        output::warn(failure);
                    }
                    return Ok(());
                }
                Some(Event::Said(_)) => {
                    self.end();
                    return answer(&FromPart::Ended);
                }
                Some(Event::Lost) => self.is_lost = true,
                Some(Event::Ended(status)) if !runs => return Err(self.failed(status, &log)),
                Some(Event::Asked(ToPart::Settle { run: true, .. }, asker)) => {
                    if !runs && let Err(failure) = self.run(&log) {
                        say(asker, &FromPart::failed(&failure));
                        return Err(failure);
                    }
                    say(asker, &FromPart::Running);
                    return Ok(());
                }
                Some(Event::Asked(ToPart::Settle { run: false, .. }, asker)) => return self.ends_for(asker),
                Some(Event::Asked(_, asker)) => {
                    let state = if runs { State::Running } else { State::Held };
                    say(asker, &FromPart::State(state));
                }
                Some(Event::Ended(_) | Event::Gate(_)) => {}
                // Nobody has settled it.
                None if runs => return Ok(()),
                None => return Err(given_up()),
            }
        }
    }

    /// The tree runs.
    fn run(&mut self, log: &Path) -> Result<(), Failure> {
        let tree = Tree::of(self.note.root)?.with_stopped(&self.note.stopped);
        write_restored(self.dir, &tree, self.note.root)?;
        tree.go_on();
        self.passes();
        let mut is_to_end = false;
        loop {
            match self.events.next() {
                Event::Ended(status) if status.success() => {
                    self.criu_runs = false;
                    return if is_to_end { Err(given_up()) } else { Ok(()) };
                }
                Event::Ended(status) => return Err(self.failed(status, log)),
                Event::Gate(gate) => gate.pass(),
                Event::Lost => self.is_lost = true,
                Event::Said(_) => is_to_end = true,
                Event::Asked(_, asker) => say(asker, &FromPart::State(State::Held)),
            }
        }
    }

    fn passes(&mut self) {
        self.gate.take().into_iter().for_each(Waiting::pass);
    }

    /// Ends the tree, and tells who has asked for that.
    fn ends_for(&mut self, asker: UnixStream) -> Result<(), Failure> {
        self.end();
        say(asker, &FromPart::Ended);
        Err(given_up())
    }

    /// Nothing of the tree is left.
    fn end(&mut self) {
        let kill = |restore: &Self| {
            // CRIU may not have made it yet, or its number may be another's.
            let parents = restore.criu.into_iter().chain([std::process::id() as i32]);
            let is_restored = |it: Process| parents.clone().any(|parent| it.is_child_of(parent));
            if restore.criu.is_some()
                && Process::find(restore.note.root).is_some_and(is_restored)
                && let Ok(tree) = Tree::of(restore.note.root)
                && let Err(failure) = tree.end()
            {
                output::warn(failure);
            }
        };
        if self.gate.as_ref().is_some_and(|it| it.moment == gate::COMPLETE) {
            // Before CRIU lets it run.
            kill(self);
        }
        self.gate = None;
        // CRIU fails at the next gate, if not before, and ends what it has made.
        while self.criu_runs {
            match self.events.next() {
                Event::Gate(gate) if gate.moment == gate::COMPLETE => {
                    kill(self);
                    drop(gate);
                }
                Event::Gate(gate) => drop(gate),
                Event::Ended(_) => self.criu_runs = false,
                Event::Lost | Event::Said(_) | Event::Asked(..) => {}
            }
        }
        kill(self);
        // This is the parent of what was restored: until it has looked, their numbers are not free for another restore.
        for it in &self.note.processes {
            if let Some(pid) = rustix::process::Pid::from_raw(it.pid) {
                let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::NOHANG);
            }
        }
        self.locked = None;
    }

    fn failed(&mut self, status: ExitStatus, log: &Path) -> Failure {
        self.criu_runs = false;
        let said = fs::read(log).unwrap_or_default();
        let errors = program::errors(&String::from_utf8_lossy(&said));
        let why = errors.into_iter().next().unwrap_or_else(|| format!("criu ended with {status}"));
        anyhow!("the processes cannot be restored: {why}").into()
    }
}

fn given_up() -> Failure {
    anyhow!("the restore was given up: the processes do not run").into()
}

fn say(mut asker: UnixStream, message: &FromPart) {
    // Whoever has asked may have gone.
    let _ = talk::send(&mut asker, message);
}

/// Whether the part can be restored here and now, as far as that shows before.
fn check(note: &Note, dir: &Path) -> Result<(), Failure> {
    criu()?;
    if note.files.iter().any(|(name, _)| name == GPU) {
        Image::open(dir)?.check_companion()?;
    }
    cpu_image::check_pages(dir)?;
    let numbers: Vec<_> = note.processes.iter().map(|it| it.pid).collect();
    if let Some(pid) = numbers.iter().find(|it| Process::find(**it).is_some()) {
        return Err(Failure::refused(anyhow!(
            "there is a process {pid}, whose number a process of the tree needs: end it, if it is the one that was dumped"
        )));
    }
    Ok(())
}

/// How far a restore of this part is.
pub(super) fn state(which: &Which) -> Result<State, Failure> {
    match ask(which, &ToPart::Ask(which.clone()))? {
        Some(FromPart::State(state)) => Ok(state),
        Some(other) => Err(anyhow!("the process that restores answers {other:?}").into()),
        None => {
            // What a restore has left that was killed.
            if let Ok(note) = Note::read(&which.cut, &which.part) {
                firewall::remove_those_left(&note.connections)?;
            }
            Ok(match restored(&which.part.dir) {
                Some((_, true)) => State::Over,
                Some((tree, false)) if tree.is_alive() => State::Running,
                _ => State::Gone,
            })
        }
    }
}

/// Notes which process is the root of a tree that is about to run.
fn write_restored(dir: &Path, tree: &Tree, root: i32) -> Result<(), Failure> {
    let path = dir.join(RESTORED);
    let roots: Vec<_> = tree.processes().iter().copied().filter(|it| it.pid == root).collect();
    write_roots(&path, &roots, false)
}

/// Notes that all trees run: from now on each may end by itself.
fn write_over(dir: &Path) -> Result<(), Failure> {
    match restored(dir) {
        Some((tree, false)) => write_roots(&dir.join(RESTORED), tree.processes(), true),
        _ => Ok(()),
    }
}

fn write_roots(path: &Path, roots: &[Dumped], is_over: bool) -> Result<(), Failure> {
    // Whole or not at all.
    let new = path.with_extension("new");
    let written = || -> anyhow::Result<()> {
        fs::write(&new, serde_json::to_vec(&(boot(), roots, is_over))?)?;
        Ok(fs::rename(&new, path)?)
    };
    Ok(written().with_context(|| format!("cannot write {}", path.display()))?)
}

/// The root of the tree that was restored last, if the machine has not started anew since, and whether all others have run.
fn restored(dir: &Path) -> Option<(Tree, bool)> {
    let text = fs::read(dir.join(RESTORED)).ok()?;
    let (when, roots, is_over): (String, Vec<Dumped>, bool) = serde_json::from_slice(&text).ok()?;
    (when == boot()).then(|| (Tree::of_dumped(&roots), is_over))
}

/// All trees run.
pub(super) fn is_over(which: &Which) -> Result<(), Failure> {
    write_over(&which.part.dir)
}

/// Has the tree of a restore run or end.
pub(super) fn settle(which: &Which, run: bool) -> Result<FromPart, Failure> {
    let message = ToPart::Settle { which: which.clone(), run };
    match ask(which, &message)? {
        Some(answer) => Ok(answer),
        None => match state(which)? {
            State::Running | State::Over if run => Ok(FromPart::Running),
            State::Running => {
                Tree::of(which.part.root)?.end_all()?;
                Ok(FromPart::Ended)
            }
            State::Over => Err(Failure::refused(anyhow!("all trees of the restore have run"))),
            _ if run => Err(anyhow!("the tree has ended").into()),
            _ => Ok(FromPart::Ended),
        },
    }
}

/// Asks the process that restores a part, if there is one.
fn ask(which: &Which, message: &ToPart) -> Result<Option<FromPart>, Failure> {
    let Some(mut stream) = place::settle(&which.cut, which.part.index)? else { return Ok(None) };
    let answered = talk::send(&mut stream, message).and_then(|()| talk::receive(&mut stream));
    match answered {
        Ok(answer) => Ok(Some(answer)),
        // It has ended meanwhile.
        Err(talk::TalkError::Closed) => Ok(None),
        Err(error) => Err(anyhow!(error).into()),
    }
}
