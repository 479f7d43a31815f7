//! A model of a cut and of its restore: every order of steps, deaths and lost messages is tried, for two and for three hosts.
//!
//! Parts of a cut (`make`): the coordinator, and on each host the tree, CRIU, the process that takes part, and its guard. Parts of a
//! restore (`restore`): the coordinator, the process that takes part with CRIU on each host, and somebody who settles. Each step of the
//! model is one step of one part; any may die, and any connection break, between any two.
//!
//! Checked are, of a cut:
//!
//! - one that is reported good has all parts, and no tree has run on before all had been dumped
//! - no tree is killed unless the cut is good
//! - from every state, if nothing else fails, all trees run and are heard; or, if they are to be killed, the cut is good and all are
//!
//! of a connection between two trees that open it, write to it, read and close it while a cut is made (`connection`):
//!
//! - what one tree has written by a cut that is good, the other one has read by then, or has it in its image, or will be sent it again
//!
//! and of a restore:
//!
//! - no tree runs before all have been complete, and none runs whose connections were reset
//! - from every state, if nothing else fails, all trees run or none does
//!
//! Each rule of the protocol has a flaw here that breaks it, and a test that the model finds what follows from it.
//!
//! Not modelled are starts of a machine, which end the tree there as anything else does that kills it, and two commands that restore one cut
//! at a time, which `lock` of the part's directory forbids.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt::Debug;
use std::hash::Hash;

/// What is modelled.
trait Model: Copy + Debug + Eq + Hash {
    /// The states after one step of a part that works.
    fn steps(self) -> Vec<Self>;
    /// The states after one failure.
    fn failures(self) -> Vec<Self>;
    /// What is wrong with this state, whatever comes.
    fn wrong(self) -> Option<&'static str>;
    /// Whether it may end like this.
    fn is_good_end(self) -> bool;
}

/// Tries everything. Returns the states, or what is wrong.
fn explore<M: Model>(start: M) -> Result<HashSet<M>, String> {
    let mut seen = HashSet::from([start]);
    let mut queue = VecDeque::from([start]);
    // For each state those from which one step without a failure leads to it.
    let mut before = HashMap::<M, Vec<M>>::new();
    while let Some(world) = queue.pop_front() {
        if let Some(wrong) = world.wrong() {
            return Err(format!("{wrong}: {world:?}"));
        }
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
    match seen.difference(&good).next() {
        Some(stuck) => Err(format!("leads nowhere: {stuck:?}")),
        None => Ok(seen),
    }
}

/// A cut.
mod make {
    use super::Model;

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
                    next.push(
                        world.with(at, |it| (it.process, it.connected, it.down, it.up) = (false, false, None, None)),
                    );
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
}

/// A restore.
mod restore {
    use super::Model;

    /// A rule that is broken on purpose.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(super) enum Flaw {
        None,
        /// The network of a tree is unlocked as soon as its own sockets are there.
        ConnectsAlone,
        /// A tree runs as soon as that one is complete.
        RunsAlone,
        /// A tree that is held, and whose coordinator is lost, waits for ever, and nobody settles.
        WaitsForEver,
        /// The tree runs on when the one who holds it has died.
        RunsUnheld,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Tree {
        /// Not there yet.
        Absent,
        /// All processes and sockets are there, and no packet reaches them.
        Placed,
        /// Packets reach them, and GPU memory is loaded.
        Connected,
        /// Complete.
        Held,
        Runs,
        Ended,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Said {
        Placed,
        Connect,
        Held,
        Run,
        Running,
        End,
        Ended,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    struct Part {
        tree: Tree,
        /// Whether the process that takes part lives.
        process: bool,
        connected: bool,
        /// What is on the connection: to the host, and from there.
        down: Option<Said>,
        up: Option<Said>,
        heard: Option<Said>,
        told: Option<Said>,
        /// Whether it has been complete.
        was_held: bool,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Coordinator {
        /// Waits until all have said this, and tells them what follows.
        Waits(Said),
        /// Something has failed: none is to run.
        Ends,
        Over,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(super) struct World<const N: usize> {
        flaw: Flaw,
        parts: [Part; N],
        coordinator: Coordinator,
        /// Whether a packet may have reached a host without the socket.
        reset: bool,
        failures: u8,
    }

    impl<const N: usize> World<N> {
        pub(super) fn new(flaw: Flaw, failures: u8) -> Self {
            let part = Part {
                tree: Tree::Absent,
                process: true,
                connected: true,
                down: None,
                up: None,
                heard: None,
                told: None,
                was_held: false,
            };
            let coordinator = Coordinator::Waits(Said::Placed);
            Self { flaw, parts: [part; N], coordinator, reset: false, failures }
        }

        pub(super) fn all(self, runs: bool) -> bool {
            let tree = if runs { Tree::Runs } else { Tree::Ended };
            self.parts.iter().all(|it| it.tree == tree)
        }

        fn with(mut self, at: usize, change: impl FnOnce(&mut Part)) -> Self {
            change(&mut self.parts[at]);
            self.parts.iter_mut().for_each(|it| it.was_held |= it.tree == Tree::Held);
            let is_open = |it: &Part| matches!(it.tree, Tree::Connected | Tree::Held | Tree::Runs);
            let is_absent = |it: &Part| it.tree == Tree::Absent;
            self.reset |= self.parts.iter().any(is_open) && self.parts.iter().any(is_absent);
            self
        }

        fn says(self, at: usize, tree: Tree, said: Said) -> Self {
            self.with(at, |it| (it.tree, it.up) = (tree, it.connected.then_some(said)))
        }

        fn part_steps(self, at: usize, step: &mut impl FnMut(Self)) {
            let part = self.parts[at];
            let lost = !part.connected;
            let ends = |world: Self| world.with(at, |it| it.tree = Tree::Ended);
            if !part.process {
                // The gate notices, and so does CRIU.
                if matches!(part.tree, Tree::Absent | Tree::Placed | Tree::Connected | Tree::Held) {
                    step(match self.flaw {
                        Flaw::RunsUnheld if part.tree == Tree::Held => self.with(at, |it| it.tree = Tree::Runs),
                        _ => ends(self),
                    });
                }
                return;
            }
            if part.down == Some(Said::End) {
                step(self.says(at, Tree::Ended, Said::Ended).with(at, |it| it.down = None));
                return;
            }
            match part.tree {
                Tree::Absent if lost => step(ends(self)),
                Tree::Absent => step(self.says(at, Tree::Placed, Said::Placed)),
                Tree::Placed if lost => step(ends(self)),
                Tree::Placed if part.down == Some(Said::Connect) => {
                    step(self.with(at, |it| (it.tree, it.down) = (Tree::Connected, None)));
                }
                Tree::Connected if lost => step(ends(self)),
                Tree::Connected => step(self.says(at, Tree::Held, Said::Held)),
                Tree::Held if part.down == Some(Said::Run) => {
                    step(self.says(at, Tree::Runs, Said::Running).with(at, |it| it.down = None));
                }
                // It waits, and not for ever.
                Tree::Held if lost && self.coordinator == Coordinator::Over && self.flaw != Flaw::WaitsForEver => {
                    step(ends(self));
                }
                _ => {}
            }
        }

        fn coordinator_steps(self, step: &mut impl FnMut(Self)) {
            for (at, part) in self.parts.iter().enumerate() {
                if let Some(said @ (Said::Placed | Said::Held | Said::Running | Said::Ended)) = part.up
                    && self.coordinator != Coordinator::Over
                {
                    step(self.with(at, |it| (it.heard, it.up) = (Some(said), None)));
                }
            }
            match self.coordinator {
                Coordinator::Waits(said) => {
                    let is_lost = |it: &Part| it.heard == Some(Said::Ended) || !it.connected && it.up.is_none();
                    if self.parts.iter().any(is_lost) {
                        step(Self { coordinator: Coordinator::Ends, ..self });
                    }
                    let (tell, flawed) = match said {
                        Said::Placed => (Said::Connect, self.flaw == Flaw::ConnectsAlone),
                        Said::Held => (Said::Run, self.flaw == Flaw::RunsAlone),
                        _ => {
                            if self.parts.iter().all(|it| it.heard == Some(Said::Running)) {
                                step(Self { coordinator: Coordinator::Over, ..self });
                            }
                            return;
                        }
                    };
                    let is_there = |it: &Part| it.heard == Some(said) || it.told == Some(tell);
                    let may_tell = self.parts.iter().all(is_there);
                    for (at, part) in self.parts.iter().enumerate() {
                        if (may_tell || flawed) && part.heard == Some(said) && part.told != Some(tell) && part.connected
                        {
                            step(self.with(at, |it| (it.told, it.down) = (Some(tell), Some(tell))));
                        }
                    }
                    if self.parts.iter().all(|it| it.told == Some(tell)) {
                        let next = if said == Said::Placed { Said::Held } else { Said::Running };
                        step(Self { coordinator: Coordinator::Waits(next), ..self });
                    }
                }
                Coordinator::Ends => {
                    for (at, part) in self.parts.iter().enumerate() {
                        if part.connected && part.told != Some(Said::End) {
                            step(self.with(at, |it| (it.told, it.down) = (Some(Said::End), Some(Said::End))));
                        }
                        // By another connection.
                        if !part.connected && part.tree != Tree::Ended {
                            step(self.with(at, |it| it.tree = Tree::Ended));
                        }
                    }
                    if self.all(false) {
                        step(Self { coordinator: Coordinator::Over, ..self });
                    }
                }
                // Somebody settles: if a part has ended, all end; otherwise all run.
                Coordinator::Over if self.flaw != Flaw::WaitsForEver => {
                    let any_ended = self.parts.iter().any(|it| it.tree == Tree::Ended);
                    let is_held = |it: &Part| matches!(it.tree, Tree::Held | Tree::Runs);
                    let can_run = self.parts.iter().all(|it| is_held(it) && (it.process || it.tree == Tree::Runs));
                    for (at, part) in self.parts.iter().enumerate() {
                        if any_ended && part.tree != Tree::Ended {
                            step(self.with(at, |it| it.tree = Tree::Ended));
                        }
                        if can_run && part.tree == Tree::Held {
                            step(self.with(at, |it| it.tree = Tree::Runs));
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
                    next.push(world.with(at, |it| (it.connected, it.down, it.up) = (false, None, None)));
                }
                if part.process {
                    next.push(
                        world.with(at, |it| (it.process, it.connected, it.down, it.up) = (false, false, None, None)),
                    );
                }
                if !matches!(part.tree, Tree::Ended | Tree::Runs) {
                    // CRIU, its script or its daemon fails or dies.
                    next.push(world.says(at, Tree::Ended, Said::Ended));
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
            let runs = self.parts.iter().any(|it| it.tree == Tree::Runs);
            if runs && !self.parts.iter().all(|it| it.was_held) {
                return Some("runs before all have been complete");
            }
            if runs && self.reset {
                return Some("runs with connections that were reset");
            }
            None
        }

        fn is_good_end(self) -> bool {
            self.all(true) || self.all(false)
        }
    }
}

/// A connection between two trees while a cut is made of them: the first one connects to a listener of the second one. Nothing dies here:
/// what dies ends the cut (`make`).
mod connection {
    use super::Model;

    /// A rule that is broken on purpose.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(super) enum Flaw {
        None,
        /// A connection of which one image has one end is good.
        NoComparison,
        /// It is good if the other tree did not have its end, of which it was asked only once.
        OneLook,
        /// A look does not take what was closed with something to say for an end.
        OrphansAreNothing,
        /// Nobody looks for connections that were closed with something to say.
        NoOrphans,
        /// Nobody looks for connections that wait to be accepted.
        NoQueues,
        /// Each host looks for them when its own tree is dumped.
        QueuesTooEarly,
    }

    /// One end.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum End {
        Absent,
        /// The kernel has answered who connects, and has not heard more (SYN_RECV).
        Answered,
        /// The kernel has it for a listener.
        Queued,
        Open,
        /// Closed, and the kernel has something to say still.
        Orphan,
        Closed,
    }

    /// How far a host is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
    enum Phase {
        Begins,
        Looked,
        LookedAgain,
        /// The tree stands still, and packets of what it has open are dropped.
        Dumped,
        Over,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    struct Host {
        phase: Phase,
        end: End,
        /// Whether its end was there at the first look, and at the second one.
        first: bool,
        second: bool,
        /// In its image: its end, and whether what it writes or reads is.
        image: Option<(End, bool)>,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub(super) struct World {
        flaw: Flaw,
        hosts: [Host; 2],
        /// Which host writes.
        writer: usize,
        written: bool,
        /// The reader's kernel has it.
        delivered: bool,
        read: bool,
        /// A look has found that the images do not have all.
        torn: bool,
    }

    impl World {
        pub(super) fn new(writer: usize, flaw: Flaw) -> Self {
            let host = Host { phase: Phase::Begins, end: End::Absent, first: false, second: false, image: None };
            Self { flaw, hosts: [host; 2], writer, written: false, delivered: false, read: false, torn: false }
        }

        /// The cut is good.
        pub(super) fn is_good(self) -> bool {
            self.is_over() && !self.torn
        }

        fn is_over(self) -> bool {
            self.hosts.iter().all(|it| it.phase == Phase::Over)
        }

        /// The cut is good, with a connection of which one tree has no end any more.
        pub(super) fn is_good_with_half(self) -> bool {
            let is_open = |it: &Host| matches!(it.image, Some((End::Open, _)));
            self.is_good() && self.hosts.iter().filter(|it| is_open(it)).count() == 1
        }

        fn with(mut self, at: usize, change: impl FnOnce(&mut Host)) -> Self {
            change(&mut self.hosts[at]);
            self
        }

        /// What the coordinator knows when all are dumped, or a host when it is.
        fn judged(mut self) -> Self {
            let is_open = |it: &Host| matches!(it.image, Some((End::Open, _)));
            for (at, host) in self.hosts.iter().enumerate() {
                let other = &self.hosts[1 - at];
                let led_nowhere = match self.flaw {
                    Flaw::NoComparison => true,
                    Flaw::OneLook => host.first && !other.first,
                    _ => host.first && !other.second,
                };
                self.torn |= is_open(host) && !is_open(other) && !led_nowhere;
            }
            self
        }

        fn queued(mut self, at: usize) -> Self {
            self.torn |= self.flaw != Flaw::NoQueues && matches!(self.hosts[at].end, End::Answered | End::Queued);
            self
        }

        /// The next phase of a host, which begins when all have ended the one before.
        fn phases(self, at: usize, step: &mut impl FnMut(Self)) {
            let host = self.hosts[at];
            if self.hosts.iter().any(|it| it.phase < host.phase) {
                return;
            }
            let there = match self.flaw {
                Flaw::OrphansAreNothing if host.end == End::Orphan => false,
                _ => !matches!(host.end, End::Absent | End::Closed),
            };
            match host.phase {
                Phase::Begins => step(self.with(at, |it| (it.phase, it.first) = (Phase::Looked, there))),
                Phase::Looked => step(self.with(at, |it| (it.phase, it.second) = (Phase::LookedAgain, there))),
                Phase::LookedAgain => {
                    let has = if at == self.writer {
                        self.written
                    } else {
                        self.delivered && host.end == End::Open || self.read
                    };
                    let mut next = self.with(at, |it| (it.phase, it.image) = (Phase::Dumped, Some((it.end, has))));
                    next.torn |= self.flaw != Flaw::NoOrphans && host.end == End::Orphan;
                    step(if self.flaw == Flaw::QueuesTooEarly { next.queued(at) } else { next });
                }
                Phase::Dumped => {
                    let next = self.with(at, |it| it.phase = Phase::Over);
                    let next = if self.flaw == Flaw::QueuesTooEarly { next } else { next.queued(at) };
                    step(if next.is_over() { next.judged() } else { next });
                }
                Phase::Over => {}
            }
        }

        /// What a tree does that runs.
        fn tree(self, at: usize, step: &mut impl FnMut(Self)) {
            let (host, writes) = (self.hosts[at], at == self.writer);
            match host.end {
                End::Absent if at == 0 => {
                    step(self.with(0, |it| it.end = End::Open).with(1, |it| it.end = End::Answered));
                }
                End::Queued => step(self.with(at, |it| it.end = End::Open)),
                End::Open if writes && !self.written => step(Self { written: true, ..self }),
                End::Open if !writes && self.delivered && !self.read => step(Self { read: true, ..self }),
                End::Open if writes || self.read => {
                    let end = if writes && !self.delivered { End::Orphan } else { End::Closed };
                    step(self.with(at, |it| it.end = end));
                }
                _ => {}
            }
        }

        /// What the kernels do, also of trees that stand still.
        fn kernel(self, step: &mut impl FnMut(Self)) {
            let (writer, reader) = (self.hosts[self.writer], self.hosts[1 - self.writer]);
            let is_locked = |it: &Host| matches!(it.image, Some((End::Open, _)));
            if self.hosts[1].end == End::Answered && !self.hosts.iter().any(is_locked) {
                step(self.with(1, |it| it.end = End::Queued));
                // Nothing comes for too long.
                if writer.end == End::Orphan {
                    step(self.with(1, |it| it.end = End::Absent));
                }
            }
            let takes = matches!(reader.end, End::Queued | End::Open);
            if self.written && !self.delivered && takes && !self.hosts.iter().any(is_locked) {
                let end = if writer.end == End::Orphan { End::Closed } else { writer.end };
                step(Self { delivered: true, ..self }.with(self.writer, |it| it.end = end));
            }
            // It is not heard for too long.
            if writer.end == End::Orphan && is_locked(&reader) {
                step(self.with(self.writer, |it| it.end = End::Closed));
            }
        }
    }

    impl Model for World {
        fn steps(self) -> Vec<Self> {
            let mut next = Vec::new();
            let mut step = |world: Self| next.push(world);
            for at in 0..2 {
                self.phases(at, &mut step);
                if self.hosts[at].phase < Phase::Dumped {
                    self.tree(at, &mut step);
                }
            }
            self.kernel(&mut step);
            next
        }

        fn failures(self) -> Vec<Self> {
            Vec::new()
        }

        fn wrong(self) -> Option<&'static str> {
            let (Some((from, written)), Some((to, has))) =
                (self.hosts[self.writer].image, self.hosts[1 - self.writer].image)
            else {
                return None;
            };
            // The kernel sends again what both have open.
            let comes = has || from == End::Open && to == End::Open;
            if self.is_good() && written && !comes {
                return Some("good, and what was written is lost");
            }
            (self.is_good() && has && !written).then_some("good, and what was read was not written")
        }

        fn is_good_end(self) -> bool {
            self.is_over()
        }
    }
}

#[test]
fn what_a_tree_has_written_by_a_cut_is_never_lost() {
    for writer in 0..2 {
        let seen = explore(connection::World::new(writer, connection::Flaw::None)).unwrap();
        assert!(seen.iter().any(|it| it.is_good_with_half()), "none among {}", seen.len());
        assert!(seen.iter().any(|it| it.is_good() && !it.is_good_with_half()));
    }
}

#[test]
fn what_breaks_a_rule_of_connections_is_found() {
    use connection::{Flaw, World};
    let flaws = [
        Flaw::NoComparison,
        Flaw::OneLook,
        Flaw::OrphansAreNothing,
        Flaw::NoOrphans,
        Flaw::NoQueues,
        Flaw::QueuesTooEarly,
    ];
    for flaw in flaws {
        let found = [0, 1].map(|writer| explore(World::new(writer, flaw)).err());
        let is_lost = |it: &String| it.starts_with("good, and what was written is lost");
        assert!(found.iter().flatten().any(is_lost), "{flaw:?}: {found:?}");
    }
}

#[test]
fn a_cut_that_is_good_is_whole_and_all_trees_run_on_whatever_ends_in_between() {
    let seen = explore(make::World::<2>::new(false, make::Flaw::None, 3)).unwrap();
    assert!(seen.iter().any(|it| it.good && it.all_run()), "no good one among {}", seen.len());
    assert!(seen.len() > 1000, "{} states", seen.len());
    explore(make::World::<3>::new(false, make::Flaw::None, 2)).unwrap();
}

#[test]
fn trees_that_are_to_end_with_their_cut_do_so_only_when_it_is_good() {
    let seen = explore(make::World::<2>::new(true, make::Flaw::None, 3)).unwrap();
    assert!(seen.iter().any(|it| it.good && it.all_killed()), "no good one among {}", seen.len());
    explore(make::World::<3>::new(true, make::Flaw::None, 2)).unwrap();
}

#[test]
fn all_trees_of_a_cut_are_restored_or_none() {
    let seen = explore(restore::World::<2>::new(restore::Flaw::None, 3)).unwrap();
    for runs in [true, false] {
        assert!(seen.iter().any(|it| it.all(runs)), "{runs}: none among {}", seen.len());
    }
    explore(restore::World::<3>::new(restore::Flaw::None, 2)).unwrap();
}

#[test]
fn what_breaks_a_rule_of_cuts_is_found() {
    use make::{Flaw, World};
    let torn = "good, and a tree ran on before all had been dumped";
    let missing = "good, and a part is missing";
    let killed = "killed, and the cut is not good";
    let stuck = "leads nowhere";
    let cases = [
        (Flaw::GoesOnAlone, false, torn),
        (Flaw::GoodTooEarly, false, missing),
        (Flaw::GoodWithoutLost, false, missing),
        (Flaw::GateWaits, false, stuck),
        (Flaw::NobodyMends, false, stuck),
        (Flaw::KilledTooEarly, true, killed),
        (Flaw::NoGuard, true, stuck),
        (Flaw::StandsUntilTold, true, stuck),
    ];
    for (flaw, stop, expected) in cases {
        let found = explore(World::<2>::new(stop, flaw, 2)).unwrap_err();
        assert!(found.starts_with(expected), "{flaw:?}: {found}");
    }
}

#[test]
fn what_breaks_a_rule_of_restores_is_found() {
    use restore::{Flaw, World};
    let cases = [
        (Flaw::ConnectsAlone, "runs with connections that were reset"),
        (Flaw::RunsAlone, "runs before all have been complete"),
        (Flaw::WaitsForEver, "leads nowhere"),
        (Flaw::RunsUnheld, "runs before all have been complete"),
    ];
    for (flaw, expected) in cases {
        let found = explore(World::<2>::new(flaw, 2)).unwrap_err();
        assert!(found.starts_with(expected), "{flaw:?}: {found}");
    }
}
