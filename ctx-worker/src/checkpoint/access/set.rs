//! What a command may do to memory.

use crate::resources::units::Unit;

/// Units that a command may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// These, sorted.
    Units(Vec<Unit>),
    /// Any.
    Everything,
}

impl Set {
    /// No unit.
    pub(crate) const fn none() -> Self {
        Self::Units(Vec::new())
    }

    /// Whether a unit is one of them.
    pub(crate) fn contains(&self, unit: &Unit) -> bool {
        match self {
            Self::Units(units) => units.binary_search(unit).is_ok(),
            Self::Everything => true,
        }
    }

    fn add(&mut self, unit: Unit) {
        if let Self::Units(units) = self
            && let Err(place) = units.binary_search(&unit)
        {
            units.insert(place, unit);
        }
    }
}

/// What a command may do. It has no default: whoever does not know says [`Access::unknown`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    /// Units that it may read. What it writes it may read too, and is here.
    pub(crate) reads: Set,
    /// Units that it may write.
    pub(crate) writes: Set,
    /// The functions that it launches, each as often as it does.
    pub(crate) functions: Vec<u64>,
    /// How many units parameters name, of a launch.
    pub(crate) named: usize,
}

impl Access {
    /// Nothing: of a command that is known to leave memory alone.
    pub(crate) const fn nothing() -> Self {
        Self { reads: Set::none(), writes: Set::none(), functions: Vec::new(), named: 0 }
    }

    /// Anything: of a command about which nothing is known.
    pub(crate) const fn unknown() -> Self {
        Self { reads: Set::Everything, writes: Set::Everything, functions: Vec::new(), named: 0 }
    }

    pub(super) fn add(&mut self, unit: Unit, written: bool) {
        self.reads.add(unit);
        if written {
            self.writes.add(unit);
        }
    }

    pub(super) fn everything(&mut self) {
        (self.reads, self.writes) = (Set::Everything, Set::Everything);
    }

    /// Whether it does nothing to any memory that is tracked.
    pub(crate) fn is_nothing(&self) -> bool {
        self.functions.is_empty() && self.reads == Set::none()
    }
}
