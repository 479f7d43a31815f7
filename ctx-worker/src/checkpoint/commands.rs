//! What a command that goes to the driver means for a checkpoint: it may write memory that is not copied yet, and change
//! what is known of the client.

use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, GraphCreate, GraphDestroy, GraphSet};
use rekindle_wire::ring::CommandHeader;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::access::observe::Watch;
use crate::gpu::driver::Driver;
use crate::resources::{Code, Memory};
use crate::session::call::Call;

impl Checkpoint {
    /// A command is about to go to the driver, while memory is not copied yet that it may write.
    pub(crate) fn look_out(&mut self, call: &mut Call, memory: &Memory, code: &Code, parameters: &[u8]) {
        if let Some(guard) = &mut self.copying.guard {
            guard.look_out(&mut self.tracker, &self.hasher, call, memory, code, parameters);
        }
    }

    /// A command is about to be executed, whose writes are looked at. `None` where none are, or it concerns no memory.
    pub(crate) fn watch(&mut self, call: &mut Call, memory: &Memory, code: &Code, parameters: &[u8]) -> Option<Watch> {
        self.observed.as_mut()?.watch(&mut self.tracker, call, memory, code, parameters)
    }

    /// The command has been handed to the driver.
    pub(crate) fn watched(&mut self, call: &mut Call, memory: &Memory, code: &Code, watch: Watch) {
        if let Some(observation) = &mut self.observed {
            observation.watched(&mut self.tracker, call, memory, code, watch);
        }
    }

    /// A primary context is about to be reset.
    pub(crate) fn release_hashers(&mut self, driver: &Driver, ordinal: usize) {
        self.hasher.release(driver, ordinal);
        if let Some(observation) = &mut self.observed {
            observation.release_hasher(driver, ordinal);
        }
    }

    /// A command changes what is known of a graph.
    pub(crate) fn graph_may_change(&mut self, header: &CommandHeader, parameters: &[u8]) {
        let mut args = Reader::new(parameters);
        let exec = match header.call {
            command::GRAPH_CREATE => GraphCreate::read(&mut args).map(|it| it.exec),
            command::GRAPH_SET => GraphSet::read(&mut args).map(|it| it.exec),
            command::GRAPH_DESTROY => GraphDestroy::read(&mut args).map(|it| it.exec),
            _ => return,
        };
        if let Ok(exec) = exec {
            self.tracker.graph_changed(exec);
        }
    }
}
