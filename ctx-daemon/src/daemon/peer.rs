//! The rights of a peer.

use super::pidns::PidView;
use super::sys::{self, Credentials};

/// Whether a peer may dump, restore, and see all clients. The pids that it may name are limited further by those it can see.
pub(crate) fn is_operator(peer: Credentials) -> bool {
    peer.uid == 0 || peer.uid == sys::own_uid()
}

/// Whether a peer may dump and restore. Root of a container may not: an image names the GPUs that it wants.
pub(crate) fn may_checkpoint(peer: Credentials) -> bool {
    is_operator(peer) && matches!(PidView::of(peer.pid), Ok(PidView::Same))
}
