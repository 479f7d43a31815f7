//! A model of a migration's end, from the dump on: every order of steps, losses and deaths is tried, for a process tree and for a
//! container.
//!
//! Parts: the command, CRIU and the daemon of the source, the process that holds the tree at the target, with its daemon, and
//! whoever settles. A container has podman besides: at the source it works on when CRIU has let go of the container, which stands
//! still then, and removes it in the end; at the target it keeps what is left of a restore that has failed, which must be gone
//! before the next. Each step of the model is one step of one part, and any part may die, and the connection break, between any
//! two. Anybody may send SIGCONT to a container that stands still, and a container may come back before its migration is settled. The
//! target may start anew before it has let the tree run; then a container that was handed over goes on where it stands still, as
//! somebody says. A freeze that fails is the end of the command or of the settling, which come before anybody is told.
//!
//! Not modelled are a start of the source's machine, which ends the tree there, records of several migrations of one tree, and what a
//! restart policy does.
//!
//! Checked are that the tree never runs on both hosts, that it runs nowhere again once it was handed over from there, and
//! that from every state, if nothing else fails, it runs on exactly one.

use crate::explore::{Model, explore};

/// The tree on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tree {
    Absent,
    Runs,
    /// Stopped by CRIU, which waits for a decision; or, of a container, by SIGSTOP.
    Still,
    Dead,
}

/// What the daemon of the source has on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Record {
    Undecided,
    Kept,
    HandedOver,
}

/// How far the command at the source is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Command {
    /// Until the image is complete and sent.
    Sends,
    /// Has asked the target to restore.
    AsksRestore,
    /// Has heard that the tree is held there.
    HandsOver,
    /// Has heard that it was handed over: freezes a container, before anybody is told.
    Freezes,
    /// Tells the target.
    TellsOwn,
    /// Has heard a failure, or lost the connection: ends the order, and asks the daemon what it has decided.
    AsksDecision,
    /// Knows that the tree is kept, and tells the target.
    TellsAbandon,
    Ended,
}

/// The process that receives at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Receives,
    /// Has started CRIU or podman, and the image has its mark. The daemon holds the tree as soon as CRIU asks for anything.
    Starts,
    Holds,
    /// Has let the tree run.
    Owns,
    Ended,
}

/// What is on the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Said {
    Nothing,
    Restore,
    Held,
    Failed,
    Own,
    Running,
    Abandon,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    /// Whether the tree is a container.
    container: bool,
    here: Tree,
    /// Whether CRIU of the source waits for the daemon's decision; of a container: whether podman works there.
    criu: bool,
    /// Whether the daemon of the source lives.
    daemon: bool,
    /// Whether the tree here has SIGSTOP pending, and is killed when CRIU lets go.
    doomed: bool,
    /// Whether somebody has sent SIGCONT to a container that stood still here.
    woken: bool,
    /// Whether that was before it was decided where the container goes on: then it is not the one in the image any more.
    stale: bool,
    /// Whether the kernel keeps the container here from running.
    frozen: bool,
    /// Whether the tree here is one that has come back by another migration.
    other: bool,
    record: Record,
    command: Command,
    connected: bool,
    said: Said,
    holder: Holder,
    there: Tree,
    /// Whether podman knows a container there that does not run.
    remains: bool,
    /// Whether the target has all images and the note how to restore them.
    images: bool,
    /// Whether the daemon of the target has recorded that the tree was let run.
    arrived: bool,
    /// Whether the target has noted that nobody need do anything more.
    running: bool,
    /// Whether a CRIU is left there whose holder was killed before it asked for anything.
    orphan: bool,
    /// Whether the target has started anew before the tree has run there: all that it had in memory is gone.
    lost: bool,
    /// The failures that may still happen.
    failures: u8,
}

const START: World = World {
    container: false,
    here: Tree::Still,
    criu: true,
    daemon: true,
    doomed: false,
    woken: false,
    stale: false,
    frozen: false,
    other: false,
    record: Record::Undecided,
    command: Command::Sends,
    connected: true,
    said: Said::Nothing,
    holder: Holder::Receives,
    there: Tree::Absent,
    remains: false,
    images: false,
    arrived: false,
    running: false,
    orphan: false,
    lost: false,
    failures: 3,
};

/// A container as its dump ends: it stands still, and podman has its archive to write.
const CONTAINER: World = World { container: true, ..START };

impl World {
    /// The order's connection has closed, or CRIU has ended: the tree goes on here unless it was handed over. A container goes on by the
    /// daemon's SIGCONT.
    fn keep(mut self) -> Self {
        if self.record == Record::Undecided {
            self.record = Record::Kept;
            if self.container {
                self.here = Tree::Runs;
            }
        }
        self
    }

    /// CRIU lets go of the tree: it acts on the decision, or has died. podman ends: only its command acts on that.
    fn criu_ends(mut self) -> Self {
        self.criu = false;
        if self.container {
            return self;
        }
        self = self.keep();
        if self.here == Tree::Still {
            self.here = if self.doomed || self.record == Record::HandedOver { Tree::Dead } else { Tree::Runs };
        }
        self
    }

    /// The target lets run what it holds, or restores it again from the images and lets that run; which its daemon allows once, or `again`
    /// if it has ended. podman restores a container only where nothing is left of it.
    fn own(mut self, again: bool) -> Option<Self> {
        match (self.arrived, self.there) {
            (true, Tree::Runs) => return Some(self),
            (true, _) if !again => return None,
            _ => {}
        }
        assert!(self.there != Tree::Runs && (again || !self.arrived), "twice: {self:?}");
        (self.there, self.arrived, self.remains) = (Tree::Runs, true, false);
        Some(self)
    }

    /// The kernel keeps the container here from running, which was handed over; not one that has come back.
    fn freeze(mut self) -> Self {
        if self.container && !self.other {
            self.frozen = true;
            if self.here == Tree::Runs {
                self.here = Tree::Still;
            }
        }
        self
    }

    /// What the target holds is killed; podman still knows the container.
    fn dies_there(mut self) -> Self {
        self.there = Tree::Dead;
        self.remains = self.container;
        self
    }

    /// podman removes the container here, which runs elsewhere.
    fn remove(mut self) -> Self {
        // By its process, podman's name of it may be that of a later one.
        if self.container && !self.other {
            (self.here, self.criu) = (Tree::Dead, false);
        }
        self
    }

    /// The target needs the images no more.
    fn note(mut self) -> Self {
        (self.running, self.images, self.holder) = (true, false, Holder::Ended);
        self
    }

    /// The target removes everything.
    fn abandon(mut self) -> Self {
        if self.there == Tree::Still {
            self.there = Tree::Dead;
        }
        assert!(self.there != Tree::Runs, "what runs is removed: {self:?}");
        (self.images, self.remains, self.holder) = (false, false, Holder::Ended);
        self
    }
}

impl Model for World {
    fn steps(self) -> Vec<Self> {
        let mut next = Vec::new();
        let mut step = |world: Self| next.push(world);
        let says = |said| Self { said, ..self };
        // The command.
        let lost = !self.connected;
        match self.command {
            Command::Sends if lost => step(Self { command: Command::AsksDecision, ..self }),
            // It sends podman's archive when podman has ended.
            Command::Sends if self.said == Said::Nothing && !(self.container && self.criu) => {
                step(Self { command: Command::AsksRestore, ..says(Said::Restore) });
            }
            Command::AsksRestore if self.said == Said::Held => {
                step(Self { command: Command::HandsOver, ..says(Said::Nothing) });
            }
            Command::AsksRestore if self.said == Said::Failed => {
                step(Self { command: Command::AsksDecision, ..says(Said::Nothing) });
            }
            Command::AsksRestore if lost => step(Self { command: Command::AsksDecision, ..self }),
            // The daemon stops the tree, records the decision, and answers; or it refuses, because CRIU has ended.
            // A container that was woken has run since its dump, whether it stands still again or not.
            Command::HandsOver if self.record == Record::Undecided && self.daemon && self.woken => step(self.keep()),
            Command::HandsOver if self.record == Record::Undecided && self.daemon && (self.criu || self.container) => {
                let doomed = !self.container;
                step(Self { record: Record::HandedOver, doomed, command: Command::Freezes, ..self });
                // The daemon dies before it answers, after the record.
                step(Self { record: Record::HandedOver, doomed, command: Command::AsksDecision, ..self });
            }
            Command::HandsOver => step(Self { command: Command::AsksDecision, ..self }),
            Command::Freezes => step(Self { command: Command::TellsOwn, ..self.freeze() }),
            Command::TellsOwn if self.said == Said::Failed => {
                step(Self { command: Command::Ended, ..says(Said::Nothing) });
            }
            Command::TellsOwn if self.said == Said::Running => {
                step(Self { command: Command::Ended, ..says(Said::Nothing).remove() });
            }
            Command::TellsOwn if !lost && self.said == Said::Nothing => step(says(Said::Own)),
            // It settles, or gives up and says how to.
            Command::TellsOwn if lost => step(Self { command: Command::Ended, ..self }),
            Command::AsksDecision if self.daemon => {
                let decided = self.keep();
                let command = match decided.record {
                    Record::HandedOver => Command::Freezes,
                    Record::Kept | Record::Undecided => Command::TellsAbandon,
                };
                step(Self { command, ..decided });
            }
            Command::TellsAbandon if !lost && self.said == Said::Nothing => {
                step(Self { command: Command::Ended, ..says(Said::Abandon) });
            }
            Command::TellsAbandon if lost => step(Self { command: Command::Ended, ..self }),
            _ => {}
        }
        // CRIU at the source hears the decision. podman ends by itself.
        if self.criu && (self.record != Record::Undecided || self.container) {
            step(self.criu_ends());
        }
        // The next daemon lets a container go on about which nothing was decided.
        if !self.daemon {
            step(Self { daemon: true, ..self.keep() });
        }
        // The holder at the target.
        match (self.holder, self.said) {
            (Holder::Receives, Said::Restore) => {
                step(Self { images: true, holder: Holder::Starts, ..says(Said::Nothing) });
            }
            (Holder::Starts, _) => {
                step(Self { holder: Holder::Holds, there: Tree::Still, ..says(Said::Held) });
                // CRIU fails there.
                step(Self { holder: Holder::Receives, remains: self.container, ..says(Said::Failed) });
            }
            (Holder::Holds, Said::Own) => {
                if let Some(owned) = self.own(false) {
                    step(Self { holder: Holder::Owns, ..owned });
                }
            }
            (Holder::Owns, Said::Own) if self.there == Tree::Runs => step(Self { said: Said::Running, ..self.note() }),
            (Holder::Owns, _) if self.there == Tree::Runs => step(self.note()),
            (Holder::Owns, Said::Own) => step(Self { holder: Holder::Ended, ..says(Said::Failed) }),
            (Holder::Owns, _) => step(Self { holder: Holder::Ended, ..self }),
            (Holder::Receives | Holder::Holds, Said::Abandon) => step(Self { said: Said::Nothing, ..self.abandon() }),
            (Holder::Receives, _) if lost => step(self.abandon()),
            _ => {}
        }
        // It asks for the restore of an image that nobody holds, and the daemon refuses that.
        if self.orphan {
            step(Self { orphan: false, remains: self.container, ..self });
        }
        // Somebody settles, or several do, one after the other. The lock of the migration's directory is the holder's as long as it lives.
        match self.record {
            Record::HandedOver if self.running && self.container && self.here != Tree::Dead => step(self.remove()),
            Record::HandedOver if !self.running && self.images && self.holder != Holder::Starts => {
                // Before it tells the target, it freezes what stands still here.
                for owned in [self.freeze().own(false), self.freeze().own(true)].into_iter().flatten() {
                    step(owned.note());
                    step(owned.note().remove());
                    // It ends before it has noted that.
                    step(Self { holder: Holder::Ended, ..owned });
                }
            }
            // Somebody says that the target has lost it, and has not let it run: the daemon records that, and it is thawed.
            Record::HandedOver if self.lost && self.container && self.daemon && self.command == Command::Ended => {
                step(Self { record: Record::Kept, here: Tree::Runs, frozen: false, ..self });
            }
            Record::Kept if !self.arrived && ![Holder::Receives, Holder::Starts].contains(&self.holder) => {
                step(self.abandon());
            }
            _ => {}
        }
        next
    }

    /// What may fail next.
    fn failures(self) -> Vec<Self> {
        let Some(failures) = self.failures.checked_sub(1) else { return Vec::new() };
        let world = Self { failures, ..self };
        let mut next = Vec::new();
        if world.connected {
            // What is on its way is lost with it.
            next.push(Self { connected: false, said: Said::Nothing, ..world });
        }
        if world.command != Command::Ended {
            let dead = Self { command: Command::Ended, connected: false, said: Said::Nothing, ..world };
            next.push(if dead.daemon { dead.keep() } else { dead });
        }
        if world.criu && !world.container {
            next.push(world.criu_ends());
            // So does CRIU's dump end with its daemon: the next one keeps what is undecided, and kills what was handed over.
            next.push(world.keep().criu_ends());
        }
        if world.criu && world.container && world.command == Command::Sends {
            // podman fails, and the command gives up.
            next.push(Self { command: Command::AsksDecision, ..world.criu_ends() });
        }
        if world.container && world.daemon {
            // The container stands still on, and with the daemon the order's connection ends.
            next.push(Self { daemon: false, ..world });
        }
        if world.holder == Holder::Holds {
            // It, CRIU there or the daemon there dies: the daemon, or its end, kills what is held. The images stay.
            next.push(Self { holder: Holder::Ended, connected: false, said: Said::Nothing, ..world.dies_there() });
        }
        if world.holder == Holder::Owns {
            // The tree is not its own.
            next.push(Self { holder: Holder::Ended, connected: false, said: Said::Nothing, ..world });
            // The tree ends as it is let run, and podman with it. Whether it has run, nobody knows.
            next.push(world.dies_there());
        }
        if world.holder == Holder::Starts {
            // CRIU or podman goes on without it.
            let orphaned = Self { orphan: true, ..world };
            next.push(Self { holder: Holder::Ended, connected: false, said: Said::Nothing, ..orphaned });
        }
        if world.container && world.here == Tree::Still && !world.frozen {
            // SIGCONT, by systemd or anybody.
            next.push(Self { here: Tree::Runs, woken: true, stale: world.record == Record::Undecided, ..world });
            if world.record == Record::Undecided {
                // And stopped again, as if nothing had been.
                next.push(Self { woken: true, stale: true, ..world });
            }
        }
        if world.container && world.here == Tree::Dead && world.running && world.command == Command::Ended {
            // It comes back by another migration, before this one is settled here.
            next.push(Self { here: Tree::Runs, there: Tree::Dead, frozen: false, other: true, ..world });
        }
        // What is no container is killed here when it is handed over, and lost with a target that is lost from then on.
        let is_asked = matches!(world.command, Command::Sends | Command::AsksRestore);
        if !world.arrived && !world.lost && (world.container || is_asked) {
            let had_copy = world.there == Tree::Still || world.remains;
            let there = if world.there == Tree::Still { Tree::Dead } else { world.there };
            let lost =
                Self { lost: true, images: false, orphan: false, there, remains: world.container && had_copy, ..world };
            next.push(Self { holder: Holder::Ended, connected: false, said: Said::Nothing, ..lost });
        }
        if world.holder == Holder::Receives {
            next.push(Self { holder: Holder::Ended, connected: false, said: Said::Nothing, ..world });
        }
        next
    }

    fn wrong(self) -> Option<&'static str> {
        // Or it is in time to say that it goes on here.
        let may_be_kept = self.lost && self.container && !self.arrived && self.here != Tree::Dead;
        let can_go_on = self.running || self.images || self.holder == Holder::Holds || may_be_kept;
        let is_handed_over = self.record == Record::HandedOver;
        let (runs_here, runs_there) = (self.here == Tree::Runs, self.there == Tree::Runs);
        let wrongs = [
            (runs_here && runs_there, "it runs on both"),
            (runs_here && is_handed_over && !(self.other || self.woken && !self.frozen), "handed over, and runs here"),
            (runs_there && !is_handed_over, "runs there, and may run here"),
            (self.here == Tree::Dead && !is_handed_over, "killed, and not handed over"),
            (is_handed_over && !can_go_on, "handed over to one that cannot go on"),
            (runs_there && self.remains, "podman would run two there"),
            (self.stale && is_handed_over, "another than the image's"),
        ];
        wrongs.into_iter().find(|(is_so, _)| *is_so).map(|(_, what)| what)
    }

    fn is_good_end(self) -> bool {
        let one = (self.here == Tree::Runs) != (self.there == Tree::Runs);
        one && (self.here == Tree::Runs || self.here == Tree::Dead)
    }
}

#[test]
fn a_tree_goes_on_on_exactly_one_host_whatever_ends_in_between() {
    never_fails(START);
}

#[test]
fn so_does_a_container_and_podman_is_left_with_one() {
    never_fails(CONTAINER);
}

fn never_fails(start: World) {
    let seen = explore(start).unwrap();
    assert!(seen.len() > 200, "{} states", seen.len());
    for end in [Tree::Runs, Tree::Dead] {
        assert!(seen.iter().any(|it| it.here == end), "{end:?}");
    }
}
