//! The state of one client besides memory and code: its objects and their log, its streams, and how its commands end.

pub(crate) mod call;
pub mod failure;
pub(crate) mod green;
pub(crate) mod lives;
pub(crate) mod memory_pressure;
pub(crate) mod objects;
pub(crate) mod outcome;
pub(crate) mod record;
pub mod share;
pub(crate) mod staging;
pub(crate) mod state;
pub(crate) mod waiting;

use rekindle_cuda_abi::table::Function;
use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Attached;
use rekindle_wire::command::Kind;
use rekindle_wire::layout::Shared;
use rekindle_wire::ring::CommandHeader;

use self::green::Green;
use self::objects::Objects;
use self::outcome::Refused;
use self::staging::Staging;
use self::waiting::{StreamKey, Waiting};
use crate::gpu::Gpu;

/// The worker's state of its client besides memory and code.
pub(crate) struct Session {
    /// The driver's functions. The number of a driver's call is its place in this table.
    pub(crate) table: Vec<Function>,
    /// The description of the driver and its devices that a client gets.
    pub(crate) attached: Attached,
    /// The client's objects, and their log.
    pub(crate) objects: Objects,
    /// What the client's green contexts are made of, and the driver's green contexts.
    pub(crate) green: Green,
    /// The client's streams, and the actions that wait for them.
    pub(crate) waiting: Waiting,
    /// The client's shared memory, once there is a client.
    pub(crate) shared: Option<Shared>,
    /// The client's staging, once there is a client.
    pub(crate) staging: Staging,
    /// Why the client cannot be checkpointed from now on; `None` if it can.
    pub(crate) unsavable: Option<String>,
}

impl Session {
    /// A session that has no client yet.
    pub(crate) fn new(table: Vec<Function>, attached: Attached) -> Self {
        Self {
            table,
            attached,
            objects: Objects::default(),
            green: Green::default(),
            waiting: Waiting::default(),
            shared: None,
            staging: Staging::default(),
            unsavable: None,
        }
    }

    /// The driver's handle of an object of one of these kinds.
    pub(crate) fn object(&self, handle: u64, kinds: &[Kind]) -> Result<u64, Refused> {
        match self.objects.get(handle) {
            Some(o) if kinds.contains(&o.kind) => Ok(o.real),
            _ => Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
        }
    }

    /// The worker's number of the device that a context is on.
    pub(crate) fn device_of_context(&self, context: u64) -> Result<usize, Refused> {
        match self.objects.get(context) {
            // A context's parent is its device.
            Some(o) if o.kind == Kind::Context => Ok(o.parent as usize),
            _ => Err(Refused::Code(CUDA_ERROR_INVALID_CONTEXT)),
        }
    }

    /// The context that what is made in a context belongs to: the context itself, or the primary one of a green context.
    pub(crate) fn owner(&self, context: u64) -> u64 {
        self.objects.get(context).map_or(context, |it| it.context)
    }

    /// The number of multiprocessors of a device.
    pub(crate) fn processors(&self, ordinal: usize) -> u32 {
        const MULTIPROCESSOR_COUNT: usize = 16;
        let described = self.attached.devices.get(ordinal);
        described.and_then(|d| d.attributes.get(MULTIPROCESSOR_COUNT)).map_or(1, |a| a.1.unsigned_abs())
    }

    /// The stream that a parameter of a command names.
    pub(crate) fn stream_key(&self, header: &CommandHeader, handle: u64) -> Result<StreamKey, Refused> {
        let context = header.context;
        match handle {
            CU_STREAM_LEGACY | CU_STREAM_PER_THREAD if context == 0 => Err(Refused::Code(CUDA_ERROR_INVALID_CONTEXT)),
            CU_STREAM_LEGACY => Ok(StreamKey { context, handle, thread: 0 }),
            CU_STREAM_PER_THREAD => Ok(StreamKey { context, handle, thread: header.thread }),
            handle => match self.objects.get(handle) {
                Some(o) if o.kind == Kind::Stream => Ok(StreamKey { context: o.context, handle, thread: 0 }),
                _ => Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
            },
        }
    }

    /// Makes the client's context the driver's current one; 0 leaves none.
    pub(crate) fn enter(&self, gpu: &mut Gpu, context: u64) -> Result<(), Refused> {
        let real = match context {
            0 => 0,
            handle => match self.objects.get(handle) {
                Some(o) if o.kind == Kind::Context => o.real,
                _ => return Err(Refused::Code(CUDA_ERROR_CONTEXT_IS_DESTROYED)),
            },
        };
        gpu.enter(real).map_err(Refused::Code)
    }
}
