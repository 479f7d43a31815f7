//! The driver's checkpoint of other processes: a stand-in for that of NVIDIA's driver, with its states, errors and conditions.
//!
//! A process takes part if `SIMGPU_DEVICE_FILE` names the file that it is to open and map, as NVIDIA's driver does with its devices.
//! Then it has a thread that works for whoever checkpoints it, and a page of memory that both share:
//!
//! ```text
//!   another process: cuCheckpointProcess...(pid) ── remote ──► page ──► worker, a thread of this process
//!                                                                        ├ lock: gate closed, all work ended
//!                                                                        ├ checkpoint: memory to the host, device file closed
//!                                                                        ├ restore: the reverse
//!                                                                        └ unlock: gate opened
//! ```
//!
//! As with the driver, nothing happens unless that thread runs; a call in the wrong state is `CUDA_ERROR_ILLEGAL_STATE`; a lock waits
//! for the process's work, and so for ever where that waits for another process that is locked; and the number of a thread in place
//! of a process's ends that process.
//!
//! Not as with the driver: memory of `cuMemCreate` stays where it is, memory of other processes makes a checkpoint fail
//! (`CUDA_ERROR_NOT_SUPPORTED`), and a map of GPUs is refused.

mod device_file;
pub(crate) mod gate;
mod page;
pub(crate) mod remote;
mod worker;

pub(crate) use worker::begin;
