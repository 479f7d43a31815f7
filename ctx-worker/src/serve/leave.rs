//! How a worker gives back all that it has on GPUs: memory, code, streams and contexts. It goes on as its client's keeper
//! (`serve/keeper.rs`).
//!
//! What the driver itself keeps of a process without contexts ends with the process. A keeper that must be rid of that too would
//! execute a program of its own, with the descriptors of its client; the sandbox forbids that now (`sandbox/calls.rs`).

use tracing::warn;

use crate::gpu::driver::{CallFailed, checked};
use crate::serve::executor::Executor;

impl Executor {
    /// Gives back all that this worker has on GPUs, whose state is saved. Returns the bytes of the client's memory. The tables
    /// keep describing the client. Nothing may call the driver any more, as it knows none of the tables' handles.
    ///
    /// What cannot be given back is logged, and stays until the process ends: the client is saved in any case.
    pub(crate) fn leave_gpus(&mut self) -> u64 {
        let bytes = {
            let (mut layers, checkpoint) = self.layers();
            checkpoint.discarded.clear();
            let bytes = checkpoint.physical(&layers);
            said("releasing memory", checkpoint.give_back(&mut layers, false).map(drop));
            bytes
        };
        let driver = self.driver();
        let devices: Vec<_> = self.memory.devices.iter().map(|it| (it.device, it.primary)).collect();
        let _ = self.call.gpu.enter(self.memory.first_primary());
        for ordinal in 0..devices.len() {
            if let Some(engine) = &mut self.checkpoint.engine {
                engine.release(driver, ordinal);
            }
            self.checkpoint.peek.release(driver, ordinal);
            self.checkpoint.release_hashers(driver, ordinal);
            self.memory.ipc_events.unregister(&mut self.call, self.memory.first_primary(), ordinal);
        }
        self.call.session.staging.unregister(driver);
        self.memory.managed.transit.release(driver);
        said("releasing the memory for hashes", self.checkpoint.hasher.leave(driver));
        let _ = self.call.gpu.enter(self.memory.first_primary());
        said("unregistering pinned memory", self.memory.pinned.unregister_all(driver));
        for green in self.call.session.green.take_contexts() {
            // SAFETY: the green context is one that GREEN_CONTEXT_CREATE has made, and is not used again.
            said(
                "destroying a green context",
                checked("cuGreenCtxDestroy", unsafe { (driver.cuGreenCtxDestroy)(green.real) }),
            );
        }
        let objects = &self.call.session.objects;
        let contexts = objects.contexts().into_iter().filter_map(|it| objects.get(it).map(|it| it.real));
        for real in contexts.filter(|real| devices.iter().all(|(_, primary)| primary != real)) {
            // SAFETY: the context is one that CONTEXT_CREATE has made, and is not used again.
            said("destroying a context", checked("cuCtxDestroy", unsafe { (driver.cuCtxDestroy_v2)(real) }));
        }
        for (device, _) in devices {
            // SAFETY: nothing uses the primary context again.
            let reset = unsafe { (driver.cuDevicePrimaryCtxReset_v2)(device) };
            said("resetting a primary context", checked("cuDevicePrimaryCtxReset", reset));
        }
        self.context_changed();
        bytes
    }
}

fn said(what: &str, result: Result<(), CallFailed>) {
    if let Err(error) = result {
        warn!("{what}: {error}; some memory of a GPU stays in use until this client resumes");
    }
}
