//! Copies of boxes: rows of bytes, in slices of rows, between memory and arrays.
//!
//! ```text
//!   COPY_BOX             end  ──> end           both within the worker's reach
//!   COPY_BOX_FROM_CHUNK  staging chunk ──> end  the chunk holds the box's rows with nothing between them
//!   COPY_BOX_TO_CHUNK    end ──> staging chunk
//! ```

use crate::codec::{Malformed, Reader, Writer};

/// The source or the destination of a copy of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Device or pinned memory: the address of the box's first byte, bytes from row to row, rows from slice to slice.
    Memory {
        /// Of the first byte.
        address: u64,
        /// Bytes from row to row.
        pitch: u64,
        /// Rows from slice to slice.
        rows: u64,
    },
    /// A place in an array: bytes, rows, slices.
    Array {
        /// Its handle.
        array: u64,
        /// Where the box begins.
        at: [u64; 3],
    },
}

const MEMORY: u64 = 0;
const ARRAY: u64 = 1;

impl End {
    /// Appends its words.
    pub(crate) fn write(&self, w: &mut Writer) {
        let words = match *self {
            End::Memory { address, pitch, rows } => [MEMORY, address, pitch, rows, 0],
            End::Array { array, at: [x, y, z] } => [ARRAY, array, x, y, z],
        };
        words.into_iter().for_each(|word| w.word(word));
    }

    /// Takes what [`End::write`] appended.
    pub(crate) fn read(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (kind, place, words) = (r.word()?, r.word()?, [r.word()?, r.word()?, r.word()?]);
        Ok(match kind {
            MEMORY => End::Memory { address: place, pitch: words[0], rows: words[1] },
            ARRAY => End::Array { array: place, at: words },
            _ => return Err(Malformed("an end of a copy that is of no kind")),
        })
    }

    /// The same end, for a part of the box that begins at `at`; `None` where no such address exists.
    #[must_use]
    pub fn part(&self, at: [u64; 3]) -> Option<Self> {
        Some(match *self {
            End::Memory { address, pitch, rows } => {
                let rows_before = at[2].checked_mul(rows)?.checked_add(at[1])?;
                let offset = rows_before.checked_mul(pitch)?.checked_add(at[0])?;
                End::Memory { address: address.checked_add(offset)?, pitch, rows }
            }
            End::Array { array, at: [x, y, z] } => {
                End::Array { array, at: [x.checked_add(at[0])?, y.checked_add(at[1])?, z.checked_add(at[2])?] }
            }
        })
    }
}

/// Bytes from a box's first to behind its last, in memory; `None` where that is more than addresses have.
#[must_use]
pub fn span(size: [u64; 3], pitch: u64, rows: u64) -> Option<u64> {
    if size.contains(&0) {
        return Some(0);
    }
    let rows_before = (size[2] - 1).checked_mul(rows)?.checked_add(size[1] - 1)?;
    rows_before.checked_mul(pitch)?.checked_add(size[0])
}

/// Bytes of a box; `None` where they are more than can be counted.
#[must_use]
pub fn bytes(size: [u64; 3]) -> Option<u64> {
    size.iter().try_fold(1_u64, |product, n| product.checked_mul(*n))
}

/// A part of a box: where it begins in the box, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Bytes, rows, slices before it.
    pub at: [u64; 3],
    /// Its own size.
    pub size: [u64; 3],
}

impl Part {
    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.size.iter().product()
    }
}

/// Cuts a box into boxes of at most `limit` bytes: runs of slices, of rows, or of bytes of one row. With the rows of the
/// box laid one after the other, the parts follow each other without gap.
pub fn cut(size: [u64; 3], limit: u64) -> impl Iterator<Item = Part> {
    let [width, height, depth] = size;
    let limit = limit.max(1);
    // How much one part takes in each direction.
    let step = if width == 0 || height == 0 || depth == 0 {
        [1, 1, 1]
    } else if width > limit {
        [limit, 1, 1]
    } else if height > limit / width {
        [width, limit / width, 1]
    } else {
        [width, height, (limit / width / height).max(1)]
    };
    let empty = size.contains(&0);
    let mut at = [0_u64; 3];
    std::iter::from_fn(move || {
        if empty || at[2] >= depth {
            return None;
        }
        let here = at;
        let part: [u64; 3] = std::array::from_fn(|axis| step[axis].min(size[axis] - here[axis]));
        for axis in 0..3 {
            at[axis] += step[axis];
            if axis == 2 || at[axis] < size[axis] {
                break;
            }
            at[axis] = 0;
        }
        Some(Part { at: here, size: part })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_and_cover_the_box() {
        for size in [[10, 3, 2], [1, 1, 1], [7, 1, 5], [100, 4, 3], [5, 0, 5]] {
            for limit in [1, 3, 10, 35, 1000] {
                let mut next = 0;
                for part in cut(size, limit) {
                    let [x, y, z] = part.at;
                    assert_eq!((z * size[1] + y) * size[0] + x, next, "{size:?} by {limit}");
                    assert!(part.bytes() > 0 && part.bytes() <= limit);
                    next += part.bytes();
                }
                assert_eq!(next, size.iter().product::<u64>(), "{size:?} by {limit}");
            }
        }
    }

    #[test]
    fn addresses_that_do_not_exist_are_found_out() {
        let end = End::Memory { address: u64::MAX - 4, pitch: 1 << 40, rows: 1 << 40 };
        assert_eq!(end.part([5, 0, 0]), None);
        assert_eq!(end.part([0, 0, 2]), None);
        assert_eq!(span([10, 4, 2], 16, 8), Some(8 * 16 + 3 * 16 + 10));
        assert_eq!(span([1, 1, 3], 1 << 40, 1 << 40), None);
    }
}
