//! A connection between two trees while a cut is made of them: the first one connects to a listener of the second one. Nothing dies here:
//! what dies ends the cut (`make.rs`).

use crate::explore::Model;

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
                let has =
                    if at == self.writer { self.written } else { self.delivered && host.end == End::Open || self.read };
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
