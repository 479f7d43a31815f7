//! What the worker says of its client before anybody dumps it: what it has asked for, and whether it could be saved.

use std::sync::atomic::Ordering;

use rekindle_cuda_abi::types::result_name;
use rekindle_wire::calls::{self, Count};

use crate::checkpoint::save::TOO_MUCH_UNLOADED;
use crate::serve::executor::Executor;

impl Executor {
    /// How often the client has asked for each driver call.
    pub(crate) fn counts(&self) -> Vec<Count> {
        self.session.shared.as_ref().map(calls::read).unwrap_or_default()
    }

    /// Why a dump would fail now. Whether the devices would come to rest in time, nobody can say beforehand.
    pub(crate) fn obstacles(&self) -> Vec<String> {
        let mut found: Vec<String> = self.session.unsavable.iter().cloned().collect();
        let sticky = self.session.shared.map_or(0, |shared| shared.header().sticky.load(Ordering::Acquire));
        if sticky != 0 {
            found.push(format!("its context is broken by an earlier error ({})", result_name(sticky)));
        }
        found.extend(self.session.objects.is_cut().then(|| TOO_MUCH_UNLOADED.to_owned()));
        found.extend(self.held_for_others().map(str::to_owned));
        found
    }

    /// Who saves the page of an event that processes share knows of its own records only.
    pub(crate) fn held_for_others(&self) -> Option<&'static str> {
        let why = "an event that other processes have is recorded behind a callback that has not returned";
        self.memory.ipc_events.holds_any().then_some(why)
    }
}
