//! The worker: one process for one application, which owns the real CUDA contexts.
//!
//! ```text
//!   daemon ──channel──> [channel thread] ──requests──> executor <──commands── ring <── application
//!   application ──connection──> [connection thread] ──memfds──> executor
//! ```
//!
//! The life of a command: [`serve`] takes it from the ring, [`held`] keeps it while it may not go to the driver
//! yet, [`executor`] hands it to the driver (through generated dispatch, [`commands`], [`launch`] or [`code`]),
//! [`waiting`] answers it later if it waits. The life of a checkpoint: `Quiesce`
//! in [`serve`], [`save`], [`engine`]; of a restore: [`load`], then `Connect` in [`serve`].

pub(crate) mod access;
mod arrays;
mod boxes;
mod callbacks;
mod channel;
mod check;
mod code;
mod code_store;
mod commands;
mod copying;
mod crash;
mod driver;
pub(crate) mod engine;
mod event_fields;
#[allow(non_snake_case, reason = "generated code names handles by their C types")]
mod executor;
#[cfg(test)]
mod fixture;
mod graphs;
mod held;
mod held_early;
mod held_settings;
mod held_state;
mod initial;
mod ipc;
mod ipc_events;
mod jit;
mod launch;
mod limits;
mod linker;
mod lives;
mod load;
mod mem_ops;
mod memory;
mod not_loaded;
mod objects;
mod occupancy;
mod others_room;
mod peers;
mod pinned;
mod pool_commands;
mod pools;
pub(crate) mod prints;
mod refusal;
mod rest;
mod sandbox;
mod save;
mod serve;
mod signal_stack;
mod silence;
mod start;
pub(crate) mod state;
mod tensor_maps;
mod textures;
mod times;
mod uses;
mod vmm;
mod waiting;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use rekindle_wire::control::WorkerReply;
use tracing::error;

use crate::confinement::Confinement;

/// How many cores this process may use. Asked for once, before the sandbox: cgroups have a part in it.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, |cores| cores.get()))
}

/// Runs a worker until its client is gone. `channel` leads to the daemon; `cuda_driver` is the library to load;
/// `confined` what is given up before there is a client; `report_access` how much memory is compared around commands, in
/// the reporting mode.
pub(crate) fn main(
    channel: UnixStream,
    cuda_driver: PathBuf,
    confined: Option<Confinement>,
    report_access: Option<u64>,
) -> ExitCode {
    // Stderr may come to be the application's.
    std::panic::set_hook(Box::new(|panic| error!("{panic}")));
    let executor = match start::start(&cuda_driver, confined.as_ref(), report_access) {
        Ok(executor) => executor,
        Err(why) => {
            error!("no worker can start: {why}");
            let failed = WorkerReply::Failed(why.into());
            let _ = rekindle_wire::frame::send(&channel, &failed, &[], &[]);
            return ExitCode::from(1);
        }
    };
    serve::serve(executor, channel)
}
