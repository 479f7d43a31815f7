//! How a command that goes to the driver affects a checkpoint: the command may write memory that is not copied yet, or make
//! predictions about the client outdated.

use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, GraphCreate, GraphDestroy, GraphSet};
use rekindle_wire::ring::CommandHeader;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::access::{observe, reads};
use crate::gpu::driver::Driver;
use crate::resources::{Code, Memory};
use crate::session::call::Call;

/// What a reporting mode knows of a command before it is executed.
pub(crate) enum Watch {
    Writes(observe::Watch),
    Reads(reads::Watch),
}

impl Checkpoint {
    /// Called before a command goes to the driver, while memory that the command may write is not copied yet.
    pub(crate) fn look_out(&mut self, call: &mut Call, memory: &Memory, code: &Code, parameters: &[u8]) {
        if let Some(guard) = &mut self.copying.guard {
            guard.look_out(&mut self.tracker, &self.hasher, call, memory, code, parameters);
        }
    }

    /// Whether the accesses of commands are reported.
    pub(crate) fn reports(&self) -> bool {
        self.observed.is_some() || self.reads.is_some()
    }

    /// Called before a command whose accesses are reported is executed. Returns `None` if the command accesses no memory.
    pub(crate) fn watch(&mut self, call: &mut Call, memory: &Memory, code: &Code, parameters: &[u8]) -> Option<Watch> {
        if let Some(reads) = &mut self.reads {
            return reads.watch(&mut self.tracker, call, memory, code, parameters).map(Watch::Reads);
        }
        self.observed.as_mut()?.watch(&mut self.tracker, call, memory, code, parameters).map(Watch::Writes)
    }

    /// Called before anything but a command uses memory.
    pub(crate) fn open_all(&mut self, call: &mut Call, memory: &Memory) {
        if let Some(reads) = &mut self.reads {
            reads.open(call, memory);
        }
    }

    /// Called after the command has been handed to the driver.
    pub(crate) fn watched(&mut self, call: &mut Call, memory: &Memory, code: &Code, watch: Watch) {
        match (watch, &mut self.observed, &mut self.reads) {
            (Watch::Writes(watch), Some(observation), _) => {
                observation.watched(&mut self.tracker, call, memory, code, watch);
            }
            (Watch::Reads(watch), _, Some(reads)) => reads.watched(&mut self.tracker, call, &watch),
            _ => {}
        }
    }

    /// Called before a primary context is reset.
    pub(crate) fn release_hashers(&mut self, driver: &Driver, ordinal: usize) {
        self.hasher.release(driver, ordinal);
        if let Some(observation) = &mut self.observed {
            observation.release_hasher(driver, ordinal);
        }
    }

    /// Discards the predictions for a graph that a command changes.
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
            if let Some(borrowing) = &mut self.borrowing {
                borrowing.graph_changed(exec);
            }
        }
    }
}
