//! A cut.

use crate::explore::Model;

/// A rule that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Flaw {
    None,
    /// The coordinator lets each tree go on as soon as that one is dumped.
    GoesOnAlone,
    /// The coordinator calls the cut good when all are dumped, and none is durable.
    GoodTooEarly,
    /// The coordinator calls the cut good when the parts that it can reach are.
    GoodWithoutLost,
    /// A tree that is to be killed is killed as soon as its own part is durable.
    KilledTooEarly,
    /// A gate waits for its decision for ever.
    GateWaits,
    /// Nobody guards trees that stand still.
    NoGuard,
    /// Nobody unlocks the network that a CRIU has left locked that was killed.
    NobodyMends,
    /// A tree that stands still, and whose coordinator is lost, does so until it is told.
    StandsUntilTold,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Tree {
    Runs,
    /// CRIU holds it, and its network is locked.
    Frozen,
    /// By SIGSTOP, since it is to be killed.
    Stands,
    /// It runs, and CRIU, which was killed, has left its network locked.
    Mute,
    Killed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Work {
    Dumps,
    /// CRIU has dumped the tree, and waits in its script.
    AtGate,
    /// CRIU lets go of the tree, and makes the image durable.
    Released,
    /// The part is complete, durable, and has its note.
    Durable,
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Said {
    Dumped,
    Go,
    Durable,
    Failed,
    End,
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Part {
    tree: Tree,
    work: Work,
    /// Whether the process that takes part lives, and its guard.
    process: bool,
    guard: bool,
    connected: bool,
    /// What is on the connection: to the host, and from there.
    down: Option<Said>,
    up: Option<Said>,
    /// What the coordinator has heard last, and whether it has said what follows.
    heard: Option<Said>,
    told: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Coordinator {
    Gathers,
    /// All are dumped.
    Releases,
    /// The cut is good, and trees that are to be killed are.
    Ends,
    /// Something has failed: all connections close.
    Aborts,
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct World<const N: usize> {
    flaw: Flaw,
    /// Whether the trees are to be killed.
    stop: bool,
    parts: [Part; N],
    coordinator: Coordinator,
    /// Whether the manifest is written.
    pub(super) good: bool,
    /// Whether a tree has run on before all had been dumped.
    torn: bool,
    failures: u8,
}

impl<const N: usize> World<N> {
    pub(super) fn new(stop: bool, flaw: Flaw, failures: u8) -> Self {
        let part = Part {
            tree: Tree::Runs,
            work: Work::Dumps,
            process: true,
            guard: flaw != Flaw::NoGuard,
            connected: true,
            down: None,
            up: None,
            heard: None,
            told: false,
        };
        let parts = [part; N];
        Self { flaw, stop, parts, coordinator: Coordinator::Gathers, good: false, torn: false, failures }
    }

    pub(super) fn all_run(self) -> bool {
        self.parts.iter().all(|it| it.tree == Tree::Runs)
    }

    pub(super) fn all_killed(self) -> bool {
        self.parts.iter().all(|it| it.tree == Tree::Killed)
    }

    fn with(mut self, at: usize, change: impl FnOnce(&mut Part)) -> Self {
        change(&mut self.parts[at]);
        self
    }

    /// A tree leaves its gate, and goes on or stands still.
    fn released(mut self, at: usize) -> Self {
        let is_dumped = |it: &Part| !matches!(it.work, Work::Dumps);
        if !self.stop && !self.parts.iter().all(is_dumped) {
            self.torn = true;
        }
        let tree = if self.stop { Tree::Stands } else { Tree::Runs };
        self.with(at, |it| (it.work, it.tree, it.down) = (Work::Released, tree, None))
    }

    /// The part fails, and its tree goes on: CRIU unlocks its network.
    fn failed(self, at: usize) -> Self {
        self.with(at, |it| {
            it.work = Work::Failed;
            if it.tree == Tree::Frozen || it.tree == Tree::Stands && it.process {
                it.tree = Tree::Runs;
            }
            if it.process && it.connected {
                it.up = Some(Said::Failed);
            }
        })
    }

    fn part_steps(self, at: usize, step: &mut impl FnMut(Self)) {
        let part = self.parts[at];
        let lost = !part.connected || !part.process;
        match part.work {
            Work::Dumps if part.tree == Tree::Runs => step(self.with(at, |it| it.tree = Tree::Frozen)),
            Work::Dumps if part.process => step(self.with(at, |it| {
                (it.work, it.up) = (Work::AtGate, it.connected.then_some(Said::Dumped));
            })),
            Work::Dumps => step(self.failed(at)),
            Work::AtGate if part.down == Some(Said::Go) => step(self.released(at)),
            Work::AtGate if lost && self.flaw != Flaw::GateWaits => step(self.failed(at)),
            Work::Released => {
                step(self.with(at, |it| {
                    if it.process {
                        (it.work, it.up) = (Work::Durable, it.connected.then_some(Said::Durable));
                        if self.stop && self.flaw == Flaw::KilledTooEarly {
                            it.tree = Tree::Killed;
                        }
                    } else {
                        // Without its note it belongs to no cut.
                        it.work = Work::Failed;
                    }
                }));
                // The disk is full, or the daemon has ended.
                if self.failures > 0 {
                    step(Self { failures: self.failures - 1, ..self }.failed(at));
                }
            }
            Work::Durable if part.process && part.tree == Tree::Stands => {
                if part.down == Some(Said::End) {
                    step(self.with(at, |it| {
                        (it.tree, it.up, it.down) = (Tree::Killed, it.connected.then_some(Said::Ended), None)
                    }));
                } else if lost && self.flaw != Flaw::StandsUntilTold {
                    step(self.with(at, |it| it.tree = Tree::Runs));
                }
            }
            _ => {}
        }
        // What CRIU has left locked, the process unlocks, or its guard; what stands still goes on with the guard.
        let is_guarded = part.process || part.guard;
        if part.tree == Tree::Mute && is_guarded && self.flaw != Flaw::NobodyMends {
            step(self.with(at, |it| it.tree = Tree::Runs));
        }
        if part.tree == Tree::Stands && !part.process && part.guard {
            step(self.with(at, |it| it.tree = Tree::Runs));
        }
        if part.tree == Tree::Stands && part.work == Work::Failed && part.process {
            step(self.with(at, |it| it.tree = Tree::Runs));
        }
    }

    fn coordinator_steps(self, step: &mut impl FnMut(Self)) {
        let all = |said| self.parts.iter().all(|it| it.heard == Some(said));
        // It hears.
        for (at, part) in self.parts.iter().enumerate() {
            if let Some(said @ (Said::Dumped | Said::Durable | Said::Failed | Said::Ended)) = part.up
                && self.coordinator != Coordinator::Over
            {
                step(self.with(at, |it| (it.heard, it.up) = (Some(said), None)));
            }
        }
        let has_failed = |it: &Part| it.heard == Some(Said::Failed) || !it.connected && it.up.is_none();
        let mut lost = self.parts.iter().filter(|it| has_failed(it));
        match self.coordinator {
            Coordinator::Gathers | Coordinator::Releases if lost.clone().next().is_some() => {
                if self.flaw == Flaw::GoodWithoutLost && lost.all(|it| it.heard != Some(Said::Failed)) {
                    let others_are = self.parts.iter().all(|it| !it.connected || it.heard == Some(Said::Durable));
                    if others_are {
                        step(Self { good: true, coordinator: Coordinator::Over, ..self });
                    }
                }
                step(Self { coordinator: Coordinator::Aborts, ..self });
            }
            Coordinator::Gathers => {
                if all(Said::Dumped) {
                    step(Self { coordinator: Coordinator::Releases, ..self });
                }
                if self.flaw == Flaw::GoesOnAlone {
                    for (at, part) in self.parts.iter().enumerate() {
                        if part.heard == Some(Said::Dumped) && !part.told && part.connected {
                            step(self.with(at, |it| (it.told, it.down) = (true, it.connected.then_some(Said::Go))));
                        }
                    }
                    if self.parts.iter().all(|it| it.told) {
                        step(Self { coordinator: Coordinator::Releases, ..self });
                    }
                }
            }
            Coordinator::Releases => {
                for (at, part) in self.parts.iter().enumerate() {
                    if !part.told {
                        step(self.with(at, |it| (it.told, it.down) = (true, it.connected.then_some(Said::Go))));
                    }
                }
                let early = self.flaw == Flaw::GoodTooEarly && self.parts.iter().all(|it| it.told);
                if all(Said::Durable) || early {
                    let next = if self.stop { Coordinator::Ends } else { Coordinator::Over };
                    step(Self { good: true, coordinator: next, ..self });
                }
            }
            Coordinator::Ends => {
                for (at, part) in self.parts.iter().enumerate() {
                    match part.heard {
                        Some(Said::Durable) if part.connected && part.down.is_none() => {
                            step(self.with(at, |it| it.down = Some(Said::End)));
                        }
                        // Lost: the coordinator comes again, by another connection.
                        Some(Said::Ended) => {}
                        _ if !part.connected && !part.process => step(self.with(at, |it| {
                            (it.tree, it.heard) = (Tree::Killed, Some(Said::Ended));
                        })),
                        _ if !part.connected && part.tree != Tree::Stands => step(self.with(at, |it| {
                            (it.tree, it.heard) = (Tree::Killed, Some(Said::Ended));
                        })),
                        _ => {}
                    }
                }
                if all(Said::Ended) {
                    step(Self { coordinator: Coordinator::Over, ..self });
                }
            }
            Coordinator::Aborts => {
                let mut next = Self { coordinator: Coordinator::Over, ..self };
                next.parts.iter_mut().for_each(|it| (it.connected, it.down, it.up) = (false, None, None));
                step(next);
            }
            // Of a good cut somebody ends what was to end, at any later time.
            Coordinator::Over if self.good && self.stop => {
                for (at, part) in self.parts.iter().enumerate() {
                    if part.tree == Tree::Runs {
                        step(self.with(at, |it| it.tree = Tree::Killed));
                    }
                }
            }
            Coordinator::Over => {}
        }
    }
}

impl<const N: usize> Model for World<N> {
    fn steps(self) -> Vec<Self> {
        let mut next = Vec::new();
        let mut step = |world: Self| next.push(world);
        (0..N).for_each(|at| self.part_steps(at, &mut step));
        self.coordinator_steps(&mut step);
        next
    }

    fn failures(self) -> Vec<Self> {
        let Some(failures) = self.failures.checked_sub(1) else { return Vec::new() };
        let world = Self { failures, ..self };
        let mut next = Vec::new();
        for (at, part) in self.parts.iter().enumerate() {
            if part.connected {
                // What is on its way is lost with it.
                next.push(world.with(at, |it| (it.connected, it.down, it.up) = (false, None, None)));
            }
            if part.process {
                next.push(world.with(at, |it| (it.process, it.connected, it.down, it.up) = (false, false, None, None)));
            }
            if part.guard {
                next.push(world.with(at, |it| it.guard = false));
            }
            if matches!(part.work, Work::Dumps | Work::AtGate) && part.tree == Tree::Frozen {
                // CRIU is killed: the tree runs, and nobody hears it.
                next.push(world.failed(at).with(at, |it| it.tree = Tree::Mute));
            }
            if part.work == Work::Released {
                next.push(world.failed(at));
            }
        }
        if self.coordinator != Coordinator::Over {
            let mut dead = Self { coordinator: Coordinator::Over, ..world };
            dead.parts.iter_mut().for_each(|it| (it.connected, it.down, it.up) = (false, None, None));
            next.push(dead);
        }
        next
    }

    fn wrong(self) -> Option<&'static str> {
        if self.good && !self.parts.iter().all(|it| it.work == Work::Durable) {
            return Some("good, and a part is missing");
        }
        if self.good && self.torn {
            return Some("good, and a tree ran on before all had been dumped");
        }
        if !self.good && self.parts.iter().any(|it| it.tree == Tree::Killed) {
            return Some("killed, and the cut is not good");
        }
        None
    }

    fn is_good_end(self) -> bool {
        // Whoever has lost its process and its guard at once is left to the user.
        let all_over = |tree| {
            let is_left = |it: &Part| it.tree != Tree::Killed && !it.process && !it.guard;
            self.parts.iter().all(|it| it.tree == tree || self.flaw != Flaw::NoGuard && is_left(it))
        };
        if self.stop && self.good { all_over(Tree::Killed) } else { all_over(Tree::Runs) }
    }
}
