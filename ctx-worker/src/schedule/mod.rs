//! Decides when each command goes to the driver: dependencies, deferred commands, waiting without blocking, rest.

pub(crate) mod callbacks;
pub(crate) mod deferred;
pub(crate) mod deferred_early;
pub(crate) mod deferred_frees;
pub(crate) mod deferred_settings;
pub(crate) mod deferred_state;
pub(crate) mod dependencies;
pub(crate) mod event_fields;
pub(crate) mod gpu_time;
pub(crate) mod rest;
pub(crate) mod times;

use rekindle_cuda_abi::table::Function;
use rekindle_cuda_abi::types::*;
use rekindle_wire::command;
use rekindle_wire::ring::CommandHeader;

use self::deferred::DeferredCommands;
use self::dependencies::{Dependencies, FreeStreams, Shapes};
use self::times::Times;
use crate::resources::Memory;
use crate::session::Session;
use crate::session::waiting::Then;

/// Decides when each command goes to the driver.
pub(crate) struct Scheduler {
    /// The streams and events of each line of the table.
    pub(crate) shapes: Shapes,
    /// Streams that are not ordered with the legacy default stream.
    pub(crate) free_streams: FreeStreams,
    /// Commands that wait in software.
    pub(crate) deferred: DeferredCommands,
    /// The times at which events were recorded.
    pub(crate) times: Times,
    /// Waits that have ended since the last check; kept to reuse its memory.
    pub(crate) finished: Vec<(Then, CUresult)>,
    /// The number of `cuEventRecord`.
    pub(crate) event_record: u16,
    /// The numbers of the forms of `cuEventElapsedTime`.
    pub(crate) elapsed: [u16; 2],
    /// The numbers of `cuFuncSetAttribute` and `cuKernelSetAttribute`.
    pub(crate) attribute_setters: [u16; 2],
}

impl Scheduler {
    /// The scheduler of a worker that has no client yet.
    pub(crate) fn new(table: &[Function]) -> Self {
        let number = |name| command::number(table, name).unwrap_or(u16::MAX);
        Self {
            shapes: Shapes::new(table),
            free_streams: FreeStreams::default(),
            deferred: DeferredCommands::default(),
            times: Times::default(),
            finished: Vec::new(),
            event_record: number("cuEventRecord"),
            elapsed: ["cuEventElapsedTime", "cuEventElapsedTime_v2"].map(number),
            attribute_setters: ["cuFuncSetAttribute", "cuKernelSetAttribute"].map(number),
        }
    }

    /// The streams and events of a command.
    pub(crate) fn dependencies(
        &self,
        session: &Session,
        memory: &Memory,
        header: &CommandHeader,
        parameters: &[u8],
    ) -> Dependencies {
        self.shapes.dependencies(&self.free_streams, session, memory, header, parameters)
    }
}
