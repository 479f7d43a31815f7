//! Parameters of the command that encodes tensor maps ([`crate::command::TENSOR_MAP`]).

use std::ops::RangeInclusive;

/// Bytes of a `CUtensorMap`.
pub const BYTES: usize = 128;
/// The most dimensions of a tensor.
pub const MAX_RANK: usize = 5;

/// Which call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cuTensorMapEncodeTiled`.
    Tiled,
    /// `cuTensorMapEncodeIm2col`.
    Im2col,
    /// `cuTensorMapEncodeIm2colWide`.
    Im2colWide,
    /// `cuTensorMapReplaceAddress`.
    Replace,
}

impl Kind {
    /// By its number.
    pub fn of(word: u64) -> Option<Self> {
        [Self::Tiled, Self::Im2col, Self::Im2colWide, Self::Replace].into_iter().find(|kind| *kind as u64 == word)
    }

    /// How many dimensions a tensor may have.
    pub fn ranks(self) -> RangeInclusive<usize> {
        match self {
            Self::Tiled => 1..=MAX_RANK,
            _ => 3..=MAX_RANK,
        }
    }
}
