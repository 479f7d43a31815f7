//! Rows: the places of registers in a frame, and of constants in the pool.

use std::collections::HashMap;

use crate::ast::Type;
use crate::exec::machine::{CONSTANT, LANES, Row};

/// The width of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Width {
    /// One word for all lanes.
    Predicate,
    /// A word a lane.
    Narrow,
    /// Two words a lane.
    Wide,
}

impl Width {
    /// The width of a register of that type; none if there are no such rows.
    pub(super) fn of(ty: Type) -> Option<Width> {
        match (ty, ty.bytes()) {
            (Type::Pred, _) => Some(Width::Predicate),
            (_, ..=4) => Some(Width::Narrow),
            (_, 8) => Some(Width::Wide),
            _ => None,
        }
    }

    fn words(self) -> u32 {
        match self {
            Width::Predicate => 1,
            Width::Narrow => LANES as u32,
            Width::Wide => 2 * LANES as u32,
        }
    }
}

/// The registers of a frame.
#[derive(Debug, Default)]
pub(super) struct Frame {
    pub(super) words: u32,
}

impl Frame {
    /// A new row.
    pub(super) fn row(&mut self, width: Width) -> Row {
        if width != Width::Predicate {
            // Wide rows must be aligned to 8 bytes, and vectors like 16.
            self.words = self.words.next_multiple_of(4);
        }
        let row = self.words;
        self.words += width.words();
        row
    }
}

/// The constants of a program.
#[derive(Debug, Default)]
pub(super) struct Constants {
    cells: Vec<u64>,
    known: HashMap<(Width, u64), Row>,
}

impl Constants {
    /// The row that has the constant in all lanes.
    pub(super) fn row(&mut self, width: Width, bits: u64) -> Row {
        if let Some(&row) = self.known.get(&(width, bits)) {
            return row;
        }
        let row = CONSTANT | (self.cells.len() * 2) as u32;
        match width {
            // A word would be enough, but cells have two.
            Width::Predicate => self.cells.push(bits),
            Width::Narrow => {
                let word = bits & 0xffff_ffff;
                self.cells.extend([word << 32 | word; LANES / 2]);
            }
            Width::Wide => self.cells.extend([bits; LANES]),
        }
        self.known.insert((width, bits), row);
        row
    }

    pub(super) fn finish(self) -> Vec<u64> {
        self.cells
    }
}
