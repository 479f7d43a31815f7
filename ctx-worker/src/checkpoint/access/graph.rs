//! Predicts the accesses of a graph launch: the values that the graph's steps name are collected at the first launch after the
//! graph was made or changed, and looked up at each launch, since memory may have been allocated or freed.

use rekindle_wire::codec::Reader;
use rekindle_wire::command::Launch;
use rekindle_wire::graph::{Program, Task};
use rekindle_wire::window;

use super::client::ClientView;
use super::params::Class;
use super::ranges::{ends, fill};
use super::set::Access;
use super::tracker::{GraphNames, Tracker, Value};

impl Tracker {
    /// Adds the accesses that a launch of a graph may make.
    pub(super) fn graph(&mut self, client: &ClientView<'_>, handle: u64, access: &mut Access) {
        let Some(program) = client.code.graphs.get(&handle).map(|graph| graph.program()) else { return };
        if self.graphs.get(&handle).is_none() {
            let names = self.names(client, program);
            self.graphs.insert(handle, names, |handle| client.code.graphs.contains_key(&handle));
        }
        let Some(names) = self.graphs.get(&handle) else { return };
        access.functions.extend(&names.functions);
        if access.slots.is_some() {
            for &(slot, address) in &names.slots {
                self.gathered.overlapping(client, address, 1, |unit| access.add_slot(slot, unit));
            }
            for &(address, bytes) in &names.exact {
                self.gathered.overlapping(client, address, bytes, |unit| access.add(unit, true));
            }
        } else {
            for &(address, bytes, written) in &names.ranges {
                self.gathered.overlapping(client, address, bytes, |unit| access.add(unit, written));
            }
        }
        // A kernel may have made a mispredicted write since.
        let everything = |function: &u64| self.function(*function).is_none_or(|(c, _)| c == Class::Everything);
        if names.unknown || names.functions.iter().any(everything) {
            access.everything();
        }
    }

    fn names(&mut self, client: &ClientView<'_>, program: &Program) -> GraphNames {
        let mut names = GraphNames::default();
        for step in program.steps.iter().filter(|step| step.enabled) {
            match &step.task {
                Task::Nothing => {}
                Task::Kernel(launch) => {
                    let Ok(launch) = Launch::read(&mut Reader::new(launch)) else {
                        names.unknown = true;
                        continue;
                    };
                    names.functions.push(launch.function);
                    let values = self.values(client, &launch).unwrap_or_default();
                    let slot = |it: &Value| {
                        let written = it.written && window::device_of(it.value).is_some();
                        Some((it.slot.filter(|_| written)?, it.value))
                    };
                    names.slots.extend(values.iter().filter_map(slot));
                    names.ranges.extend(values.into_iter().map(|it| (it.value, 1, it.written)));
                }
                Task::Copy { target, source, size } => {
                    names.exact.extend(ends(&[(*target, true)], *size).map(|(address, bytes, _)| (address, bytes)));
                    names.ranges.extend(ends(&[(*target, true), (*source, false)], *size));
                }
                Task::Fill { address, pitch, element, width, height, .. } => {
                    let bytes = fill(*pitch, u64::from(*element), *width, *height);
                    names.exact.push((*address, bytes));
                    names.ranges.push((*address, bytes, true));
                }
            }
        }
        names.ranges.sort_unstable();
        names.ranges.dedup();
        names.slots.sort_unstable();
        names.slots.dedup();
        names
    }
}
