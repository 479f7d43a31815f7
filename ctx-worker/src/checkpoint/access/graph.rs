//! Predicts the accesses of a graph launch: the values that the graph's steps name are collected at the first launch after the
//! graph was made or changed, and looked up at each launch, since memory may have been allocated or freed.

use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, GraphCreate, GraphSet, Launch};
use rekindle_wire::graph::{Program, Step, Task};
use rekindle_wire::window;

use super::client::ClientView;
use super::params::Class;
use super::ranges::{ends, fill};
use super::set::Access;
use super::tracker::{GraphNames, Tracker, Value};
use crate::schedule::dependencies::word;

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

    /// Adds the memory that copies and memsets of a graph write which a command makes or changes: the driver makes their nodes for
    /// memory only that may be written.
    pub(super) fn nodes(&self, client: &ClientView<'_>, call: u16, parameters: &[u8], access: &mut Access) {
        let made = |handle| client.code.graphs.get(&handle).map_or(&[][..], |graph| &graph.program().steps);
        let mut add = |steps: &[Step]| {
            for (address, bytes) in written_by_nodes(steps) {
                self.gathered.overlapping(client, address, bytes, |unit| access.add(unit, true));
            }
        };
        // A command that cannot be read fails.
        match call {
            command::GRAPH_CREATE => {
                let create = GraphCreate::read(&mut Reader::new(parameters)).ok();
                let bytes = create.and_then(|it| client.code.store.peek(it.image).ok());
                if let Some(Ok(program)) = bytes.map(Program::from_bytes) {
                    add(&program.steps);
                }
            }
            // Where the driver cannot change a node, the whole graph is made again.
            command::GRAPH_SET => {
                if let Ok(set) = GraphSet::read(&mut Reader::new(parameters)) {
                    add(made(set.exec));
                    if let Ok(step) = Step::read(&mut Reader::new(set.step), set.place as usize) {
                        add(&[step]);
                    }
                }
            }
            command::GRAPH_UPLOAD => add(word(parameters, 0).map_or(&[], made)),
            _ => {}
        }
    }

    fn names(&mut self, client: &ClientView<'_>, program: &Program) -> GraphNames {
        // A node that is disabled is made, too.
        let exact = written_by_nodes(&program.steps).collect();
        let mut names = GraphNames { exact, ..GraphNames::default() };
        for step in program.steps.iter().filter(|step| step.enabled) {
            match &step.task {
                Task::Nothing | Task::Conditional(_) => {}
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
                    names.ranges.extend(ends(&[(*target, true), (*source, false)], *size));
                }
                Task::Fill { address, pitch, element, width, height, .. } => {
                    names.ranges.push((*address, fill(*pitch, u64::from(*element), *width, *height), true));
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

/// The memory that copies and memsets write, as addresses and lengths.
fn written_by_nodes(steps: &[Step]) -> impl Iterator<Item = (u64, u64)> {
    steps.iter().filter_map(|step| match &step.task {
        Task::Copy { target, size, .. } => {
            ends(&[(*target, true)], *size).next().map(|(address, bytes, _)| (address, bytes))
        }
        Task::Fill { address, pitch, element, width, height, .. } => {
            Some((*address, fill(*pitch, u64::from(*element), *width, *height)))
        }
        Task::Nothing | Task::Kernel(_) | Task::Conditional(_) => None,
    })
}
