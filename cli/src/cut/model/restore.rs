//! A restore.

use crate::explore::Model;

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
                    if (may_tell || flawed) && part.heard == Some(said) && part.told != Some(tell) && part.connected {
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
                next.push(world.with(at, |it| (it.process, it.connected, it.down, it.up) = (false, false, None, None)));
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
