//! The rights of a peer.

use super::pidns::PidView;
use super::sys::{self, Credentials};

/// Whether a peer may dump and restore, and see everybody. What it may name is limited further by what it sees.
pub(crate) fn is_operator(peer: Credentials) -> bool {
    peer.uid == 0 || peer.uid == sys::own_uid()
}

/// Whether a peer may dump and restore. Root of a container may not: an image says itself which GPUs it wants.
pub(crate) fn may_checkpoint(peer: Credentials) -> bool {
    is_operator(peer) && matches!(PidView::of(peer.pid), Ok(PidView::Same))
}
