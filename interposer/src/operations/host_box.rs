//! Boxes of two and three dimensions in ordinary host memory.

use rekindle_wire::boxes::Part;

/// A box in ordinary host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBox {
    /// The first byte.
    pub(crate) address: usize,
    /// Bytes from row to row.
    pub(crate) pitch: usize,
    /// Rows from slice to slice.
    pub(crate) rows: usize,
}

impl HostBox {
    /// Where a row of a part begins.
    pub(crate) fn row(&self, part: &Part, y: u64, z: u64) -> *mut u8 {
        let rows = (part.at[2] + z) as usize * self.rows + (part.at[1] + y) as usize;
        (self.address + rows * self.pitch + part.at[0] as usize) as *mut u8
    }
}

/// Copies a box within the host's memory; overlapping rows are allowed as in the driver.
///
/// # Safety
/// Both boxes hold as many bytes.
pub(crate) unsafe fn within_host(target: HostBox, source: HostBox, size: [u64; 3]) {
    let whole = Part { at: [0; 3], size };
    for z in 0..size[2] {
        for y in 0..size[1] {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy(source.row(&whole, y, z), target.row(&whole, y, z), size[0] as usize) };
        }
    }
}
