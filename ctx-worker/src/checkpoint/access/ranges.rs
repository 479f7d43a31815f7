//! Memory ranges that calls and graph steps fill or copy, computed from their parameters.

use rekindle_cuda_abi::table::Function as Line;
use rekindle_wire::boxes::{End, span};

/// A line of the driver table that fills memory: the places of its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fill {
    pub(super) address: usize,
    /// Bytes of the fill pattern.
    pub(super) element: u64,
    pub(super) width: usize,
    /// The words of pitch and height, if the fill has rows.
    pub(super) rows: Option<(usize, usize)>,
}

/// For each line of the table that travels as it is, how it fills memory, if it does.
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

/// The number of bytes from the first to the last byte that a fill writes; a size beyond all addresses counts as the maximum.
pub(super) fn fill(pitch: u64, element: u64, width: u64, height: u64) -> u64 {
    span([width.saturating_mul(element), height, 1], pitch, height).unwrap_or(u64::MAX)
}

/// The address and length of each end of a box copy, and whether it is written.
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
