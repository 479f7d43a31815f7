//! The worker: one process for one application, which owns the real CUDA contexts.
//!
//! ```text
//!   daemon ──channel──> [channel thread] ──requests──> executor <──commands── ring <── application
//!   application ──connection──> [connection thread] ──memfds──> executor
//! ```
//!
//! The files lie in layers. A file imports from its own layer and from those above it in this table. Each layer has owners
//! of the worker's state. Their methods take the command under way (`Call`) and whatever else they need as parameters;
//! `Executor` (`serve/executor.rs`) has one of each. Where a lower layer needs a function that only a higher layer has, the
//! lower layer asks through a trait: `DeferredFrees` for memory of deferred frees, `ReadDevice` for the content of
//! variables. A kind of resource with parts of its own in an image saves and loads itself (`Saved`); `checkpoint/parts.rs`
//! lists these kinds.
//!
//! | layer | holds | owner |
//! |---|---|---|
//! | `gpu/` | the driver, its calls and its current context | `Gpu` |
//! | `session/` | the client's objects and their log, its streams and what waits for them, the command under way (`Call`), saved state's format | `Session` |
//! | `resources/` | the devices, memory of every kind with its limits, and code | `Memory`, `Code` |
//! | `schedule/` | dependencies of commands, deferred commands, rest | `Scheduler` |
//! | `checkpoint/` | accesses of commands, copies of memory, save and load | `Checkpoint` |
//! | `serve/` | the start, the sandbox, the loop, commands of the client and requests of the daemon | `Executor` |
//!
//! The life of a command: `serve/request_loop.rs` takes it from the ring, `serve/deferral.rs` executes it or keeps it while
//! `schedule/deferred.rs` says that it may not go to the driver yet, `serve/executor.rs` hands it to the driver (through
//! generated dispatch, `serve/commands.rs` or `serve/launch.rs`), `serve/poll.rs` answers it later if it waits. The life of
//! a checkpoint: `Quiesce` in `serve/request_loop.rs`, `checkpoint/save.rs`, `checkpoint/engine`; of a restore:
//! `serve/load.rs`, `checkpoint/load.rs`, then `Connect` in `serve/request_loop.rs`. The worker's states are in
//! `serve/state.rs`.

pub mod bench;
mod checkpoint;
mod cores;
mod gpu;
mod resources;
mod schedule;
mod serve;
mod session;
mod signal_stack;
pub mod transition;

pub use checkpoint::engine::unit::written_memfd;
pub use gpu::virtual_gpus::VirtualGpus;
pub use resources::prints::log_writer;
pub use serve::{confinement, rejoin};
pub use session::failure;
pub use session::share;

/// The format of a worker's state in an image, as far as a daemon reads it.
pub mod state {
    pub use crate::session::state::{StateError, check, needs_rehearsal};
}

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;

use rekindle_wire::control::WorkerReply;
use tracing::error;

pub use crate::checkpoint::access::mode::Reporting;
use crate::serve::confinement::Confinement;
use crate::serve::{request_loop, start};

/// Runs a worker until its client is gone. `channel` leads to the daemon. `cuda_driver` is the library to load. `confined`
/// describes the rights that the worker gives up before there is a client. `virtual_gpus` says whether GPUs are shown as several.
/// `report_access` is the reporting mode.
pub fn main(
    channel: UnixStream,
    cuda_driver: PathBuf,
    virtual_gpus: Option<VirtualGpus>,
    confined: Option<Confinement>,
    report_access: Option<Reporting>,
) -> ExitCode {
    // Stderr may become the application's, so a panic goes to the log.
    std::panic::set_hook(Box::new(|panic| error!("{panic}")));
    let executor = match start::start(&cuda_driver, virtual_gpus.as_ref(), confined.as_ref(), report_access) {
        Ok(executor) => executor,
        Err(why) => {
            error!("no worker can start: {why}");
            let failed = WorkerReply::Failed(why.into());
            let _ = rekindle_wire::frame::send(&channel, &failed, &[], &[]);
            return ExitCode::from(1);
        }
    };
    request_loop::serve(executor, channel)
}
