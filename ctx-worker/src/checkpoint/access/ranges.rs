//! Ranges of memory that calls and steps of graphs fill or copy, by their parameters.

use rekindle_cuda_abi::table::Function as Line;
use rekindle_wire::boxes::{End, span};

/// A line of the driver table that fills memory: where its parameters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fill {
    pub(super) address: usize,
    /// Bytes of what it fills with.
    pub(super) element: u64,
    pub(super) width: usize,
    /// Pitch and height, of rows.
    pub(super) rows: Option<(usize, usize)>,
}

/// For each line of the table that travels as it is, whether it fills memory.
pub(super) struct Fills(Vec<Option<Fill>>);

impl Fills {
    pub(super) fn new(table: &[Line]) -> Self {
        Self(table.iter().map(fill_of).collect())
    }

    /// How a line fills memory, if it does.
    pub(super) fn get(&self, call: u16) -> Option<Fill> {
        self.0.get(usize::from(call)).copied().flatten()
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
