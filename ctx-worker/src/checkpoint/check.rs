//! Whether a client could be saved now, and the reasons if not.

use std::sync::atomic::Ordering;

use rekindle_cuda_abi::types::result_name;

use crate::checkpoint::cut::cannot_be_placed_again;
use crate::resources::{Code, Memory};
use crate::session::Session;

/// Reasons why a dump would fail now. Whether the devices become idle in time cannot be predicted.
pub(crate) fn obstacles(session: &Session, memory: &Memory, code: &Code) -> Vec<String> {
    let mut found: Vec<String> = session.unsavable.iter().cloned().collect();
    found.extend(memory.kernel_heaps.obstacle());
    let sticky = session.shared.map_or(0, |shared| shared.header().sticky.load(Ordering::Acquire));
    if sticky != 0 {
        found.push(format!("its context is broken by an earlier error ({})", result_name(sticky)));
    }
    found.extend(cannot_be_placed_again(session, code, true));
    found
}
