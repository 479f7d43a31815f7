//! What the worker says of its client before anybody dumps it: whether it could be saved.

use std::sync::atomic::Ordering;

use rekindle_cuda_abi::types::result_name;

use crate::resources::Memory;
use crate::session::Session;

/// Why a client cannot be saved whose log of code was cut.
pub(crate) const TOO_MUCH_UNLOADED: &str = "it has unloaded more code than is kept, each time \
    with later code loaded already, and code that it has now could not be placed where it is; it can be when it has unloaded \
    what it loaded up to then, or has destroyed the context";

/// Why a dump would fail now. Whether the devices would come to rest in time, nobody can say beforehand.
pub(crate) fn obstacles(session: &Session, memory: &Memory) -> Vec<String> {
    let mut found: Vec<String> = session.unsavable.iter().cloned().collect();
    let sticky = session.shared.map_or(0, |shared| shared.header().sticky.load(Ordering::Acquire));
    if sticky != 0 {
        found.push(format!("its context is broken by an earlier error ({})", result_name(sticky)));
    }
    found.extend(session.objects.is_cut().then(|| TOO_MUCH_UNLOADED.to_owned()));
    found.extend(held_for_others(memory).map(str::to_owned));
    found
}

/// Why a client with a deferred record of a shared event cannot be saved: the process that saves the event's page knows of its
/// own records only.
pub(crate) fn held_for_others(memory: &Memory) -> Option<&'static str> {
    let why = "an event that other processes have is recorded behind a callback that has not returned";
    memory.ipc_events.holds_any().then_some(why)
}
