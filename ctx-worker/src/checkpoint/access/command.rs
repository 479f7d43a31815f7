//! Predicts which memory each command may read and write.

use rekindle_wire::boxes::End;
use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::{self, Clause, Field, Launch, MemOp};
use rekindle_wire::ring::CommandHeader;

use super::client::ClientView;
use super::ranges::{Fill, ends, fill};
use super::set::Access;
use super::tracker::Tracker;
use crate::schedule::dependencies::word;

/// Reads parameters from the given word on.
fn reader(parameters: &[u8], place: usize) -> Reader<'_> {
    Reader::new(parameters.get(place * 8..).unwrap_or_default())
}

impl Tracker {
    /// The accesses that a command may make that is about to go to the driver, whose context is current. An unknown command may
    /// access everything.
    pub(crate) fn access(&mut self, client: &ClientView<'_>, header: &CommandHeader, parameters: &[u8]) -> Access {
        self.accesses(client, header, parameters, Access::nothing())
    }

    /// Like [`Tracker::access`], and tells the writes of kernels by the parameters that name them, and what must be writable when a
    /// graph is made.
    pub(crate) fn access_by_slots(
        &mut self,
        client: &ClientView<'_>,
        header: &CommandHeader,
        parameters: &[u8],
    ) -> Access {
        self.accesses(client, header, parameters, Access::nothing_by_slots())
    }

    fn accesses(
        &mut self,
        client: &ClientView<'_>,
        header: &CommandHeader,
        parameters: &[u8],
        mut access: Access,
    ) -> Access {
        self.gathered.update(client);
        if header.call < command::FIRST {
            if let Some(fill) = self.fills.get(header.call) {
                self.fill(client, fill, parameters, &mut access);
            }
        } else if self.command(client, header.call, parameters, &mut access).is_err() {
            return Access::unknown();
        }
        if access.slots.is_some() {
            self.nodes(client, header.call, parameters, &mut access);
        }
        self.gathered.add_shared(&mut access);
        access
    }

    fn fill(&self, client: &ClientView<'_>, shape: Fill, parameters: &[u8], access: &mut Access) {
        let at = |place| word(parameters, place);
        let (Some(address), Some(width)) = (at(shape.address), at(shape.width)) else { return };
        let (pitch, height) = match shape.rows {
            Some((pitch, height)) => (at(pitch).unwrap_or(0), at(height).unwrap_or(0)),
            None => (0, 1),
        };
        let bytes = fill(pitch, shape.element, width, height);
        self.range(client, (address, bytes, true), access);
    }

    fn range(&self, client: &ClientView<'_>, (address, bytes, written): (u64, u64, bool), access: &mut Access) {
        self.gathered.overlapping(client, address, bytes, |unit| access.add(unit, written));
    }

    /// Adds one end of a copy of a box. `at` gives the words at which the end and the size of the box begin.
    fn a_box(
        &self,
        client: &ClientView<'_>,
        (parameters, end, size, written): (&[u8], usize, usize, bool),
        access: &mut Access,
    ) -> Result<(), Malformed> {
        let end = End::take(&mut reader(parameters, end))?;
        let size = <[u64; 3]>::take(&mut reader(parameters, size))?;
        ends(&[(end, written)], size).for_each(|end| self.range(client, end, access));
        Ok(())
    }

    fn command(
        &mut self,
        client: &ClientView<'_>,
        call: u16,
        parameters: &[u8],
        access: &mut Access,
    ) -> Result<(), Malformed> {
        let Some(declaration) = command::declaration(call) else {
            // The number belongs to no command.
            access.everything();
            return Ok(());
        };
        let at = |place| word(parameters, place).ok_or(Malformed("ends before its last parameter"));
        for clause in declaration.clauses {
            match *clause {
                Clause::Writes { address, bytes } => self.range(client, (at(address)?, at(bytes)?, true), access),
                Clause::Reads { address, bytes } => self.range(client, (at(address)?, at(bytes)?, false), access),
                Clause::WritesBox { end, size } => self.a_box(client, (parameters, end, size, true), access)?,
                Clause::ReadsBox { end, size } => self.a_box(client, (parameters, end, size, false), access)?,
                Clause::Operates(place) => {
                    let mut operations = Reader::new(reader(parameters, place).blob()?);
                    while operations.end().is_err() {
                        let operation = MemOp::read(&mut operations)?;
                        // Waits are 1 and 4, writes 2 and 5.
                        let written = matches!(operation.operation, 2 | 5);
                        self.range(client, (operation.address, operation.width(), written), access);
                    }
                }
                Clause::Launches => self.launch(client, &Launch::read(&mut Reader::new(parameters))?, access),
                Clause::LaunchesEach(place) => {
                    for launch in Vec::<&[u8]>::take(&mut reader(parameters, place))? {
                        self.launch(client, &Launch::read(&mut Reader::new(launch))?, access);
                    }
                }
                Clause::LaunchesGraph(place) => self.graph(client, at(place)?, access),
                // Clauses about the command's order.
                Clause::InStream(_)
                | Clause::WaitsFor(_)
                | Clause::RecordsBy(_)
                | Clause::Alone(_)
                | Clause::AfterEverything
                | Clause::AfterContext(_)
                | Clause::AtRest
                | Clause::EndsContext(_)
                | Clause::Renews { .. }
                | Clause::Callback
                | Clause::Through(_) => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::set::Set;
    use super::*;
    use crate::resources::globals::Placed;

    /// Variables of one kibibyte each, at these addresses.
    const VARIABLES: [u64; 3] = [0x7000_0000_0000, 0x7000_0000_1000, 0x7000_0000_2000];

    /// The variables that a command reads and those that it writes; `None` if it may access everything.
    fn accessed(call: u16, parameters: &[u8]) -> Option<(Vec<usize>, Vec<usize>)> {
        let mut worker = crate::serve::fixture::executor();
        let placed =
            VARIABLES.map(|address| Placed { name: c"variable".into(), address, size: 1 << 10, initial: None });
        worker.code.globals.insert((1, 2), placed.into());
        let access =
            crate::serve::fixture::access_of(&mut worker, CommandHeader { call, ..Default::default() }, parameters);
        let found = |set: &Set| match set {
            Set::Everything => None,
            Set::Units(units) => {
                Some(units.iter().filter_map(|u| VARIABLES.iter().position(|v| *v == u.start)).collect())
            }
        };
        Some((found(&access.reads)?, found(&access.writes)?))
    }

    fn words(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn what_commands_access_is_what_their_parameters_name() {
        let [a, b, _] = VARIABLES;
        let end = |address| [0, address, 0x800, 1, 0];
        let two_rows = [16, 2, 1];
        let copy = [&[0, 0][..], &end(a), &end(b), &two_rows, &[0]].concat();
        let chunk = [&[0, 0][..], &end(a), &two_rows, &[0]].concat();
        let bytes = [&chunk[..], &[32, 1, 2, 3, 4]].concat();
        let operations = [0, 96, 1, a, 5, 0, 2, b, 5, 0, 6, 0, 0, 0];
        let rw = |read: &[usize], written: &[usize]| Some((read.to_vec(), written.to_vec()));
        let cases = [
            (command::COPY, &[a, b, 8, 0][..], rw(&[0, 1], &[0])),
            (command::COPY, &[a, b, 0x1001, 0], rw(&[0, 1, 2], &[0, 1])),
            (command::COPY, &[a, b], None),
            (command::COPY_BYTES, &[b, a, 8, 1], rw(&[1], &[1])),
            (command::COPY_FROM_CHUNK, &[b, 1, 8, a], rw(&[1], &[1])),
            (command::COPY_TO_CHUNK, &[b, 1, 8, a], rw(&[1], &[])),
            // The second row of the destination lies behind its variable, and before the next.
            (command::COPY_BOX, &copy, rw(&[0, 1], &[0])),
            (command::COPY_BOX_FROM_CHUNK, &chunk, rw(&[0], &[0])),
            (command::COPY_BOX_TO_CHUNK, &chunk, rw(&[0], &[])),
            (command::COPY_BOX_BYTES, &bytes, rw(&[0], &[0])),
            (command::COPY_BOX, &chunk[..10], None),
            (command::MEM_OPS, &operations, rw(&[0, 1], &[1])),
            (command::MEM_OPS, &operations[..5], None),
            (command::MEM_FREE, &[a], rw(&[], &[])),
            (command::POOL_FREE, &[a, 0], rw(&[], &[])),
            (command::GRAPH_SET, &[a, 0, 0], rw(&[], &[])),
            (command::TENSOR_MAP, &[0, 0, 1, a], rw(&[], &[])),
            (command::FIRST + 4000, &[a], None),
        ];
        for (call, parameters, expected) in cases {
            assert_eq!(accessed(call, &words(parameters)), expected, "{call:#x} {parameters:x?}");
        }
    }
}
