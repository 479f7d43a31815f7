//! A model of a migration's end, from the dump on: every order of steps, losses and deaths is tried.
//!
//! Parts: the command, CRIU and the daemon of the source, the process that holds the tree at the target, with its daemon, and
//! whoever settles. Each step of the model is one step of one part, and any part may die, and the connection break, between any
//! two. Checked are that the tree never runs on both hosts, that it runs nowhere again once it was handed over from there, and
//! that from every state, if nothing else fails, it runs on exactly one.

use std::collections::{HashMap, HashSet, VecDeque};

/// The tree on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tree {
    Absent,
    Runs,
    /// Stopped by CRIU, which waits for a decision.
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
    /// Has heard that it was handed over.
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
    here: Tree,
    /// Whether CRIU of the source waits for the daemon's decision.
    criu: bool,
    /// Whether the tree here has SIGSTOP pending, and is killed when CRIU lets go.
    doomed: bool,
    record: Record,
    command: Command,
    connected: bool,
    said: Said,
    holder: Holder,
    there: Tree,
    /// Whether the target has all images and the note how to restore them.
    images: bool,
    /// Whether the daemon of the target has recorded that the tree was let run.
    arrived: bool,
    /// Whether the target has noted that nobody need do anything more.
    running: bool,
    /// The failures that may still happen.
    failures: u8,
}

const START: World = World {
    here: Tree::Still,
    criu: true,
    doomed: false,
    record: Record::Undecided,
    command: Command::Sends,
    connected: true,
    said: Said::Nothing,
    holder: Holder::Receives,
    there: Tree::Absent,
    images: false,
    arrived: false,
    running: false,
    failures: 3,
};

impl World {
    /// The order's connection has closed, or CRIU has ended: the tree goes on here unless it was handed over.
    fn keep(mut self) -> Self {
        if self.record == Record::Undecided {
            self.record = Record::Kept;
        }
        self
    }

    /// CRIU lets go of the tree: it acts on the decision, or has died.
    fn criu_ends(mut self) -> Self {
        self.criu = false;
        self = self.keep();
        if self.here == Tree::Still {
            self.here = if self.doomed || self.record == Record::HandedOver { Tree::Dead } else { Tree::Runs };
        }
        self
    }

    /// The target lets run what it holds, or restores it again from the images and lets that run; which its daemon allows once.
    fn own(mut self) -> Self {
        if !self.arrived {
            assert!(self.there != Tree::Runs, "twice: {self:?}");
            (self.there, self.arrived) = (Tree::Runs, true);
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
        (self.images, self.holder) = (false, Holder::Ended);
        self
    }

    /// The steps of parts that work.
    fn steps(self) -> Vec<Self> {
        let mut next = Vec::new();
        let mut step = |world: Self| next.push(world);
        let says = |said| Self { said, ..self };
        // The command.
        let lost = !self.connected;
        match self.command {
            Command::Sends if lost => step(Self { command: Command::AsksDecision, ..self }),
            Command::Sends if self.said == Said::Nothing => {
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
            Command::HandsOver if self.record == Record::Undecided && self.criu => {
                step(Self { record: Record::HandedOver, doomed: true, command: Command::TellsOwn, ..self });
                // The daemon dies before it answers, after the record.
                step(Self { record: Record::HandedOver, doomed: true, command: Command::AsksDecision, ..self });
            }
            Command::HandsOver => step(Self { command: Command::AsksDecision, ..self }),
            Command::TellsOwn if self.said == Said::Running => {
                step(Self { command: Command::Ended, ..says(Said::Nothing) });
            }
            Command::TellsOwn if !lost && self.said == Said::Nothing => step(says(Said::Own)),
            // It settles, or gives up and says how to.
            Command::TellsOwn if lost => step(Self { command: Command::Ended, ..self }),
            Command::AsksDecision => {
                let decided = self.keep();
                let command = match decided.record {
                    Record::HandedOver => Command::TellsOwn,
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
        // CRIU at the source hears the decision.
        if self.criu && self.record != Record::Undecided {
            step(self.criu_ends());
        }
        // The holder at the target.
        match (self.holder, self.said) {
            (Holder::Receives, Said::Restore) => {
                step(Self { images: true, holder: Holder::Holds, there: Tree::Still, ..says(Said::Held) });
                // CRIU fails there.
                step(Self { images: true, ..says(Said::Failed) });
            }
            (Holder::Holds, Said::Own) => step(Self { holder: Holder::Owns, ..self.own() }),
            (Holder::Owns, Said::Own) => step(Self { said: Said::Running, ..self.note() }),
            (Holder::Owns, _) => step(self.note()),
            (Holder::Receives | Holder::Holds, Said::Abandon) => step(Self { said: Said::Nothing, ..self.abandon() }),
            (Holder::Receives, _) if lost => step(self.abandon()),
            _ => {}
        }
        // Somebody settles.
        match self.record {
            Record::HandedOver if !self.running && self.images => {
                step(self.own().note());
                // It ends before it has noted that.
                step(Self { holder: Holder::Ended, ..self.own() });
            }
            Record::Kept if !self.arrived && self.holder != Holder::Receives => step(self.abandon()),
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
            next.push(dead.keep());
        }
        if world.criu {
            next.push(world.criu_ends());
            // So does CRIU's dump end with its daemon: the next one keeps what is undecided, and kills what was handed over.
            next.push(world.keep().criu_ends());
        }
        if world.holder == Holder::Holds {
            // It, CRIU there or the daemon there dies: the daemon, or its end, kills what is held. The images stay.
            next.push(Self {
                holder: Holder::Ended,
                there: Tree::Dead,
                connected: false,
                said: Said::Nothing,
                ..world
            });
        }
        if world.holder == Holder::Owns {
            // The tree is not its own.
            next.push(Self { holder: Holder::Ended, connected: false, said: Said::Nothing, ..world });
        }
        if world.holder == Holder::Receives {
            next.push(Self { holder: Holder::Ended, connected: false, said: Said::Nothing, ..world });
        }
        next
    }

    /// Nothing that was ever seen may be like this.
    fn check(self) {
        assert!(!(self.here == Tree::Runs && self.there == Tree::Runs), "it runs on both: {self:?}");
        assert!(
            !(self.here == Tree::Runs && self.record == Record::HandedOver),
            "handed over, and runs here: {self:?}"
        );
        assert!(
            !(self.there == Tree::Runs && self.record != Record::HandedOver),
            "runs there, and may run here: {self:?}"
        );
        assert!(self.here != Tree::Dead || self.record == Record::HandedOver, "killed, and not handed over: {self:?}");
        let can_go_on = self.running || self.images || self.holder == Holder::Holds;
        assert!(self.record != Record::HandedOver || can_go_on, "handed over to one that cannot go on: {self:?}");
    }

    fn is_good_end(self) -> bool {
        (self.here == Tree::Runs) != (self.there == Tree::Runs)
    }
}

#[test]
fn a_tree_goes_on_on_exactly_one_host_whatever_ends_in_between() {
    let mut seen = HashSet::from([START]);
    let mut queue = VecDeque::from([START]);
    // For each state those from which one step without a failure leads to it.
    let mut before = HashMap::<World, Vec<World>>::new();
    while let Some(world) = queue.pop_front() {
        world.check();
        for next in world.steps() {
            before.entry(next).or_default().push(world);
            if seen.insert(next) {
                queue.push_back(next);
            }
        }
        for next in world.failures() {
            if seen.insert(next) {
                queue.push_back(next);
            }
        }
    }
    let mut good: HashSet<_> = seen.iter().copied().filter(|it| it.is_good_end()).collect();
    let mut queue: VecDeque<_> = good.iter().copied().collect();
    while let Some(world) = queue.pop_front() {
        for earlier in before.get(&world).into_iter().flatten() {
            if good.insert(*earlier) {
                queue.push_back(*earlier);
            }
        }
    }
    let stuck: Vec<_> = seen.difference(&good).collect();
    assert!(stuck.is_empty(), "{} of {} states lead nowhere: {:?}", stuck.len(), seen.len(), stuck[0]);
    assert!(seen.len() > 200, "{} states", seen.len());
    for end in [Tree::Runs, Tree::Dead] {
        assert!(seen.iter().any(|it| it.here == end), "{end:?}");
    }
}
