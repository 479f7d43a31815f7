//! Which memory a command may read and write, known before it is executed.
//!
//! ```text
//!   copy, memset, memory operation   exact: the units that their ranges lie in                   command
//!   kernel launch                    speculation from its parameters, at every launch            function, params
//!     (a) no signature                 every unit that an aligned 8-byte value lies in, written
//!     (b) mangled name                 so too, but what pointers to constants name is only read  signature
//!     (c) no layout, or was wrong      everything
//!   graph launch                     the union over its steps, found when made or changed        graph
//! ```
//!
//! This is PhoenixOS's speculation (SOSP'25, section 4.1), with the signature taken from the mangled name. A **unit**
//! is an allocation; of the client's own mappings, a run of them without a gap ([`units`]). A prediction can be wrong: a
//! kernel may find a pointer in memory. So nothing relies on it alone; who does compares the content ([`observe`]), and
//! a kernel that was wrong once names everything from then on.
//!
//! Besides what its parameters name, a kernel may write the variables of its own code, which it reaches by their names.
//! What it writes through surfaces, and through tensor maps that were that a restored client encoded before, it is not
//! known to.
//!
//! A [`Tracker`] is asked only while memory that is not copied yet must stay as it is, or where the daemon's configuration
//! asks for a report. Otherwise nothing here costs anything but the note of a tensor map.

pub(crate) mod bench;
mod command;
mod function;
mod graph;
pub(crate) mod hash;
mod known;
pub(crate) mod observe;
mod params;
mod signature;
mod units;

use std::collections::{BTreeSet, HashSet};

pub(crate) use params::Class;

use rekindle_cuda_abi::table::Function as Line;

use self::command::Fills;
use self::function::Function;
use self::graph::GraphNames;
use self::known::Known;
use self::params::TensorMaps;
use self::units::Gathered;
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

    fn add(&mut self, unit: Unit, written: bool) {
        self.reads.add(unit);
        if written {
            self.writes.add(unit);
        }
    }

    fn everything(&mut self) {
        (self.reads, self.writes) = (Set::Everything, Set::Everything);
    }

    /// Whether it does nothing to any memory that is tracked.
    pub(crate) fn is_nothing(&self) -> bool {
        self.functions.is_empty() && self.reads == Set::none()
    }
}

/// What is known of the client's functions, graphs and tensor maps.
pub(crate) struct Tracker {
    gathered: Gathered,
    fills: Fills,
    functions: Known<Function>,
    /// Names of kernels that wrote what they did not name.
    wrong: HashSet<String>,
    /// Names of kernels of which one did, nobody knows which.
    suspects: BTreeSet<String>,
    maps: TensorMaps,
    graphs: Known<GraphNames>,
}

impl Tracker {
    /// For a client that has done nothing yet.
    pub(crate) fn new(table: &[Line]) -> Self {
        Self {
            gathered: Gathered::default(),
            fills: Fills::new(table),
            functions: Known::default(),
            wrong: HashSet::new(),
            suspects: BTreeSet::new(),
            maps: TensorMaps::default(),
            graphs: Known::default(),
        }
    }

    /// A tensor map was encoded, of a tensor at this address.
    pub(crate) fn encoded(&mut self, map: [u8; rekindle_wire::tensor_map::BYTES], address: u64) {
        self.maps.add(map, address);
    }

    /// A graph was changed, or is gone.
    pub(crate) fn graph_changed(&mut self, handle: u64) {
        self.graphs.remove(&handle);
    }

    /// A kernel wrote what it did not name: it names everything from now on.
    pub(crate) fn was_wrong(&mut self, name: &str) {
        self.wrong.insert(name.to_owned());
        for function in self.functions.values_mut().filter(|f| f.name == name) {
            function.class = Class::Everything;
        }
    }

    /// One of these wrote what it did not name. One alone, and those that were among them before, name everything from now
    /// on; else it is left at the suspicion, since to protect everything from all of them would be to stop.
    pub(crate) fn one_was_wrong(&mut self, ran: &BTreeSet<String>) {
        let again: Vec<String> = match ran.len() {
            1 => ran.iter().cloned().collect(),
            _ => ran.intersection(&self.suspects).cloned().collect(),
        };
        for name in &again {
            tracing::info!("{name} is taken to write everything from now on: it made a mispredicted write");
            self.was_wrong(name);
        }
        if again.is_empty() {
            self.suspects.extend(ran.iter().cloned());
        } else {
            self.suspects.clear();
        }
    }

    /// The class and name of a function that was launched.
    pub(crate) fn function(&self, handle: u64) -> Option<(Class, &str)> {
        self.functions.get(&handle).map(|f| (f.class, f.name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_alone_was_wrong_or_was_among_them_twice_is_not_trusted_any_more() {
        let mut tracker = Tracker::new(&[]);
        let mut wrong = |ran: &[&str]| {
            tracker.one_was_wrong(&ran.iter().map(|name| (*name).to_owned()).collect());
            let mut all: Vec<_> = tracker.wrong.iter().cloned().collect();
            all.sort();
            all.join(" ")
        };
        assert_eq!(wrong(&["a", "b", "c"]), "");
        assert_eq!(wrong(&["d", "e"]), "");
        assert_eq!(wrong(&["b", "f"]), "b");
        assert_eq!(wrong(&["g"]), "b g");
        assert_eq!(wrong(&["a", "f"]), "b g");
    }
}
