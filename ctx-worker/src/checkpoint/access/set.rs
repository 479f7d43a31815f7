//! The accesses that a command may make.

use crate::resources::units::Unit;

/// Units that a command may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Set {
    /// These units, sorted.
    Units(Vec<Unit>),
    /// All units.
    Everything,
}

impl Set {
    /// No unit.
    pub(crate) const fn none() -> Self {
        Self::Units(Vec::new())
    }

    /// Whether a unit is in the set.
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

/// A parameter of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot {
    /// The client's handle of the kernel.
    pub(crate) function: u64,
    /// The offset among the parameters, in bytes.
    pub(crate) offset: u32,
}

/// The accesses that a command may make. There is no default: unknown accesses are [`Access::unknown`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    /// Units that the command may read. Units that it writes are here too, since it may read them.
    pub(crate) reads: Set,
    /// Units that the command may write.
    pub(crate) writes: Set,
    /// The functions that the command launches, once for each launch.
    pub(crate) functions: Vec<u64>,
    /// For a launch, how many units its parameters name.
    pub(crate) named: usize,
    /// Where it is asked for: the units that kernels may write, each with the parameter that names it. `writes` lacks them then.
    pub(crate) slots: Option<Vec<(Slot, Unit)>>,
}

impl Access {
    /// No access: the command is known not to use memory.
    pub(crate) const fn nothing() -> Self {
        Self { reads: Set::none(), writes: Set::none(), functions: Vec::new(), named: 0, slots: None }
    }

    /// No access, of a command whose kernels' writes are to be told by parameters.
    pub(super) fn nothing_by_slots() -> Self {
        Self { slots: Some(Vec::new()), ..Self::nothing() }
    }

    /// Every access: nothing is known of the command.
    pub(crate) const fn unknown() -> Self {
        Self { reads: Set::Everything, writes: Set::Everything, functions: Vec::new(), named: 0, slots: None }
    }

    pub(super) fn add(&mut self, unit: Unit, written: bool) {
        self.reads.add(unit);
        if written {
            self.writes.add(unit);
        }
    }

    /// Adds a unit that a parameter names whose memory the kernel may write.
    pub(super) fn add_slot(&mut self, slot: Slot, unit: Unit) {
        let slots = self.slots.as_mut();
        let by_slots = slots.map(|slots| slots.push((slot, unit))).is_some();
        self.add(unit, !by_slots);
    }

    pub(super) fn everything(&mut self) {
        (self.reads, self.writes) = (Set::Everything, Set::Everything);
    }

    /// Whether the command accesses no tracked memory.
    pub(crate) fn is_nothing(&self) -> bool {
        self.functions.is_empty() && self.reads == Set::none()
    }
}
