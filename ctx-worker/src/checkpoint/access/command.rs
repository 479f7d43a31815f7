//! What each command may read and write.

use rekindle_cuda_abi::table::Function as Line;
use rekindle_wire::boxes::{BoxCopy, End, span};
use rekindle_wire::codec::{Malformed, Reader};
use rekindle_wire::command::{self, Launch, MemOp};
use rekindle_wire::ring::CommandHeader;

use super::{Access, Tracker};
use crate::schedule::dependencies::word;
use crate::serve::executor::Executor;

/// A line of the driver table that fills memory: where its parameters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fill {
    address: usize,
    /// Bytes of what it fills with.
    element: u64,
    width: usize,
    /// Pitch and height, of rows.
    rows: Option<(usize, usize)>,
}

/// For each line of the table that travels as it is, whether it fills memory.
pub(crate) struct Fills(Vec<Option<Fill>>);

impl Fills {
    pub(crate) fn new(table: &[Line]) -> Self {
        Self(table.iter().map(fill_of).collect())
    }
}

fn fill_of(line: &Line) -> Option<Fill> {
    let place = |name: &str| line.params.iter().flatten().position(|p| p.name == name);
    let kind = line.symbol.strip_prefix("cuMemsetD")?.strip_suffix("Async")?;
    let bits: u64 = kind.strip_prefix("2D").unwrap_or(kind).parse().ok()?;
    let rows = place("dstPitch").zip(place("Height"));
    let width = place("N").or(place("Width"))?;
    line.route.travels().then_some(Fill { address: place("dstDevice")?, element: bits / 8, width, rows })
}

/// Bytes from the first that a fill writes to behind its last; what no address has counts as all.
pub(super) fn fill(pitch: u64, element: u64, width: u64, height: u64) -> u64 {
    span([width.saturating_mul(element), height, 1], pitch, height).unwrap_or(u64::MAX)
}

/// Where the ends of a copy of a box begin, how many bytes they have, and which are written.
pub(super) fn ends(ends: &[(End, bool)], size: [u64; 3]) -> impl Iterator<Item = (u64, u64, bool)> {
    ends.iter().map(move |&(end, written)| match end {
        End::Memory { address, pitch, rows } => (address, span(size, pitch, rows).unwrap_or(u64::MAX), written),
        End::Array { array, .. } => (array, 1, written),
    })
}

impl Tracker {
    /// What a command may do that is about to go to the driver, whose context is current. A command that this does not
    /// understand may do anything.
    pub(crate) fn access(&mut self, worker: &Executor, header: &CommandHeader, parameters: &[u8]) -> Access {
        let mut access = Access::nothing();
        self.gathered.update(worker);
        if header.call < command::FIRST {
            if let Some(Some(fill)) = self.fills.0.get(usize::from(header.call)).copied() {
                self.fill(worker, fill, parameters, &mut access);
            }
        } else if self.command(worker, header.call, parameters, &mut access).is_err() {
            return Access::unknown();
        }
        self.gathered.add_shared(&mut access);
        access
    }

    fn fill(&self, worker: &Executor, shape: Fill, parameters: &[u8], access: &mut Access) {
        let at = |place| word(parameters, place);
        let (Some(address), Some(width)) = (at(shape.address), at(shape.width)) else { return };
        let (pitch, height) = match shape.rows {
            Some((pitch, height)) => (at(pitch).unwrap_or(0), at(height).unwrap_or(0)),
            None => (0, 1),
        };
        let bytes = fill(pitch, shape.element, width, height);
        self.range(worker, (address, bytes, true), access);
    }

    fn range(&self, worker: &Executor, (address, bytes, written): (u64, u64, bool), access: &mut Access) {
        self.gathered.overlapping(worker, address, bytes, |unit| access.add(unit, written));
    }

    fn command(
        &mut self,
        worker: &Executor,
        call: u16,
        parameters: &[u8],
        access: &mut Access,
    ) -> Result<(), Malformed> {
        let mut args = Reader::new(parameters);
        match call {
            command::LAUNCH => self.launch(worker, &Launch::read(&mut args)?, access),
            command::LAUNCH_ON_DEVICES => {
                let (_flags, count) = (args.word()?, args.word()?);
                for _ in 0..count {
                    let launch = Launch::read(&mut Reader::new(args.blob()?))?;
                    self.launch(worker, &launch, access);
                }
            }
            command::GRAPH_LAUNCH => self.graph(worker, args.word()?, access),
            command::COPY => {
                let (target, source, bytes) = (args.word()?, args.word()?, args.word()?);
                self.range(worker, (target, bytes, true), access);
                self.range(worker, (source, bytes, false), access);
            }
            command::COPY_BYTES => {
                let (target, _stream) = (args.word()?, args.word()?);
                let bytes = args.blob()?.len() as u64;
                self.range(worker, (target, bytes, true), access);
            }
            command::COPY_FROM_CHUNK | command::COPY_TO_CHUNK => {
                let (device, _chunk, bytes) = (args.word()?, args.word()?, args.word()?);
                self.range(worker, (device, bytes, call == command::COPY_FROM_CHUNK), access);
            }
            command::COPY_BOX => {
                let copy = BoxCopy::read(&mut args, true)?;
                let source = copy.source.ok_or(Malformed("a copy without source"))?;
                ends(&[(copy.end, true), (source, false)], copy.size).for_each(|end| self.range(worker, end, access));
            }
            command::COPY_BOX_FROM_CHUNK | command::COPY_BOX_TO_CHUNK => {
                let copy = BoxCopy::read(&mut args, false)?;
                let written = call == command::COPY_BOX_FROM_CHUNK;
                ends(&[(copy.end, written)], copy.size).for_each(|end| self.range(worker, end, access));
            }
            command::COPY_BOX_BYTES => {
                let (copy, _) = BoxCopy::read_with_bytes(&mut args)?;
                ends(&[(copy.end, true)], copy.size).for_each(|end| self.range(worker, end, access));
            }
            command::MEM_OPS => {
                let _stream = args.word()?;
                let mut operations = Reader::new(args.blob()?);
                while operations.end().is_err() {
                    let operation = MemOp::read(&mut operations)?;
                    // Waits are 1 and 4, writes 2 and 5.
                    let written = matches!(operation.operation, 2 | 5);
                    self.range(worker, (operation.address, operation.width(), written), access);
                }
            }
            // They make and end objects and memory, order streams, and ask.
            command::CONTEXT_RETAIN..=command::PINNED_UNMAP
            | command::CODE_PART..=command::INSTANTIATE
            | command::ARRAY_CREATE..=command::TEXTURE_DESTROY
            | command::POOL_CREATE..=command::POOL_SET_CURRENT
            | command::PEER_ENABLE..=command::PEER_DISABLE
            | command::ADDRESS_RESERVE..=command::TENSOR_MAP
            | command::MEMORY_EXPORT..=command::EVENT_FENCE
            | command::HOST_FUNC..=command::THREAD_END
            | command::OCCUPANCY_BLOCK_SIZE..=command::PRINTS
            | command::LINK_CREATE..=command::CODE_LOG
            | command::MEM_INFO
            | command::GRAPH_CREATE..=command::GRAPH_SET
            | command::GRAPH_UPLOAD..=command::GRAPH_DESTROY => {}
            // Until it says here what it does.
            _ => access.everything(),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_cuda_abi::table;

    #[test]
    fn every_line_that_travels_with_an_address_fills_memory() {
        let table = table::parse(table::TEXT).unwrap();
        let mut fills = 0;
        for line in table.iter().filter(|line| line.route.travels()) {
            let address = line.params.iter().flatten().any(|p| p.c_type == "CUdeviceptr");
            assert_eq!(address, fill_of(line).is_some(), "{}: say what it reads and writes", line.symbol);
            fills += u32::from(address);
        }
        assert!(fills >= 6);
        let line = table.iter().find(|line| line.symbol == "cuMemsetD2D16Async").unwrap();
        let expected = Fill { address: 0, element: 2, width: 3, rows: Some((1, 4)) };
        assert_eq!(fill_of(line), Some(expected));
    }

    #[test]
    fn a_fill_ends_behind_its_last_row() {
        assert_eq!(fill(0, 4, 10, 1), 40);
        assert_eq!(fill(100, 1, 10, 3), 210);
        assert_eq!(fill(100, 1, 10, 0), 0);
        assert_eq!(fill(u64::MAX, 1, 10, 3), u64::MAX);
    }
}
