//! Handles that this crate gives out: a kind and a number, never an address.

/// The first bits of handles of graphs.
pub(crate) const GRAPH: u64 = 0x21;
/// Handles of nodes.
pub(crate) const NODE: u64 = 0x22;
/// Handles of executable graphs.
pub(crate) const EXEC: u64 = 0x23;
/// Handles of user objects.
pub(crate) const USER: u64 = 0x24;

/// Gives out the handles of one kind. They count up, and none is given out twice.
#[derive(Debug, Default)]
pub(crate) struct Handles<const KIND: u64> {
    last: u64,
}

impl<const KIND: u64> Handles<KIND> {
    pub(crate) fn fresh(&mut self) -> u64 {
        self.last += 1;
        KIND << 48 | self.last
    }
}
