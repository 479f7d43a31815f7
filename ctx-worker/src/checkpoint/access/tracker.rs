//! The client's functions, graphs and tensor maps, and the accesses that their launches may make.

use std::collections::{BTreeSet, HashSet};

use rekindle_cuda_abi::table::Function as Line;
use rekindle_wire::command::Launch;

use super::client::ClientView;
use super::function::{Function, ask, globals};
use super::known::Known;
use super::params::{Class, TensorMaps, scan};
use super::ranges::Fills;
use super::set::{Access, Set, Slot};
use super::units::Gathered;
use crate::resources::units::Unit;

/// The addresses and functions that the steps of a graph name.
#[derive(Default)]
pub(super) struct GraphNames {
    /// Addresses or handles that lie in some unit or may later, each with the number of bytes from there and whether they may
    /// be written: sorted, without duplicates.
    pub(super) ranges: Vec<(u64, u64, bool)>,
    /// The addresses among them in windows of devices that kernels may write, each with the parameter that names it: sorted,
    /// without duplicates. In `ranges` they are as well.
    pub(super) slots: Vec<(Slot, u64)>,
    /// What of `ranges` copies and memsets write.
    pub(super) exact: Vec<(u64, u64)>,
    pub(super) functions: Vec<u64>,
    /// Whether the graph has an unknown step, which may access everything.
    pub(super) unknown: bool,
}

/// A value that names memory which a kernel may use.
pub(super) struct Value {
    pub(super) value: u64,
    /// The parameter that has the value; none for a variable of the code.
    pub(super) slot: Option<Slot>,
    pub(super) written: bool,
}

/// The tracker's knowledge of the client's functions, graphs and tensor maps.
pub(crate) struct Tracker {
    pub(super) gathered: Gathered,
    pub(super) fills: Fills,
    functions: Known<Function>,
    /// The number of functions that were asked for.
    asked: u64,
    /// Names of kernels that made a mispredicted write.
    wrong: HashSet<String>,
    /// Names of kernels among which an unknown one made a mispredicted write.
    suspects: BTreeSet<String>,
    maps: TensorMaps,
    pub(super) graphs: Known<GraphNames>,
}

impl Tracker {
    /// Whether a call of the driver table fills memory.
    pub(crate) fn is_fill(&self, call: u16) -> bool {
        self.fills.get(call).is_some()
    }

    /// A tracker for a client that has done nothing yet.
    pub(crate) fn new(table: &[Line]) -> Self {
        Self {
            gathered: Gathered::default(),
            fills: Fills::new(table),
            functions: Known::default(),
            asked: 0,
            wrong: HashSet::new(),
            suspects: BTreeSet::new(),
            maps: TensorMaps::default(),
            graphs: Known::default(),
        }
    }

    /// Records a tensor map that was encoded for a tensor at this address.
    pub(crate) fn encoded(&mut self, map: [u8; rekindle_wire::tensor_map::BYTES], address: u64) {
        self.maps.add(map, address);
    }

    /// Called when a graph was changed or destroyed.
    pub(crate) fn graph_changed(&mut self, handle: u64) {
        self.graphs.remove(&handle);
    }

    /// Called when a kernel made a mispredicted write: from now on it is predicted to access everything.
    pub(crate) fn was_wrong(&mut self, name: &str) {
        self.wrong.insert(name.to_owned());
        for function in self.functions.values_mut().filter(|f| f.name == name) {
            function.class = Class::Everything;
        }
    }

    /// Called when one of these kernels made a mispredicted write. A single kernel, and kernels that were suspects before, are
    /// from now on predicted to access everything. Where there are none, all become suspects: protecting everything from all of
    /// them would stop the client.
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

    /// All units of device memory that have addresses.
    pub(super) fn all_units(&mut self, client: &ClientView<'_>) -> Vec<Unit> {
        self.gathered.update(client);
        self.gathered.all(client)
    }

    /// The class and name of a function that was launched.
    pub(crate) fn function(&self, handle: u64) -> Option<(Class, &str)> {
        self.functions.get(&handle).map(|f| (f.class, f.name.as_str()))
    }

    /// Looks up a function, and the variables that it may use besides the memory that its parameters name.
    pub(super) fn know(&mut self, client: &ClientView<'_>, handle: u64) -> Option<&Function> {
        let object = client.session.objects.get(handle)?;
        if self.functions.get(&handle).is_none_or(|known| known.real != object.real) {
            self.asked += 1;
            let function = Function { number: self.asked, ..ask(client, object, &self.wrong) };
            self.functions.insert(handle, function, |handle| client.session.objects.get(handle).is_some());
        }
        let function = self.functions.get_mut(&handle)?;
        let version = client.code.globals.version();
        if function.globals.0 != version {
            function.globals = (version, globals(client, handle));
        }
        Some(function)
    }

    /// Adds the accesses that a launch may make. The values of a graph's step are resolved later: see `graph.rs`.
    pub(super) fn launch(&mut self, client: &ClientView<'_>, launch: &Launch<'_>, access: &mut Access) {
        access.functions.push(launch.function);
        if self.know(client, launch.function).is_none() {
            // The launch fails.
            return;
        }
        let Some(function) = self.functions.get(&launch.function) else { return };
        if function.class == Class::Everything {
            return access.everything();
        }
        let mut found = Access::nothing();
        scan(launch.parameters, &function.constant, &self.maps, |value, at, written| {
            if let Some(unit) = self.gathered.find(client, value) {
                if written && access.slots.is_some() {
                    access.add_slot(Slot { function: launch.function, offset: at as u32 }, unit);
                } else {
                    found.add(unit, written);
                }
            }
        });
        if let Set::Units(units) = &found.reads {
            access.named += units.len();
            let Set::Units(writes) = &found.writes else { return };
            units.iter().for_each(|unit| access.add(*unit, writes.binary_search(unit).is_ok()));
        }
        function.globals.1.iter().for_each(|unit| access.add(*unit, true));
    }

    /// The values that a launch's parameters name, with their offsets, and the function's variables, by address; `None` if it may
    /// access everything.
    pub(super) fn values(&mut self, client: &ClientView<'_>, launch: &Launch<'_>) -> Option<Vec<Value>> {
        self.know(client, launch.function)?;
        let function = self.functions.get(&launch.function).filter(|f| f.class != Class::Everything)?;
        let variable = |unit: &Unit| Value { value: unit.start, slot: None, written: true };
        let mut values: Vec<_> = function.globals.1.iter().map(variable).collect();
        scan(launch.parameters, &function.constant, &self.maps, |value, at, written| {
            let slot = Some(Slot { function: launch.function, offset: at as u32 });
            values.push(Value { value, slot, written });
        });
        Some(values)
    }

    /// The number of a function that is launched, which no other function has had, its code, and its name.
    pub(crate) fn kernel(&self, handle: u64) -> Option<(u64, &str, &str)> {
        self.functions.get(&handle).map(|f| (f.number, f.code.as_str(), f.name.as_str()))
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
