//! Work that waits for the device: the executor checks it between commands, and waits for it where everything must be idle.

use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::*;
use rekindle_wire::reply;

use crate::resources::graphs::destroy_graph;
use crate::schedule::rest::{Broken, Rest, busy_stream, what_runs};
use crate::serve::executor::Executor;
use crate::session::outcome::Refused;
use crate::session::waiting::Then;

impl Executor {
    /// Checks waiting work, and completes work that is done.
    pub(crate) fn poll(&mut self) {
        let mut finished = std::mem::take(&mut self.scheduler.finished);
        self.call.session.waiting.finished(self.call.gpu.driver, &mut finished);
        finished.iter().for_each(|(_, result)| self.note_sticky(*result));
        if !finished.is_empty() {
            self.collect_prints();
        }
        for (then, result) in finished.drain(..) {
            match then {
                Then::Reply(slot) => {
                    self.memory.release_pools(self.call.gpu.driver);
                    self.answer(slot, result, &[]);
                }
                Then::PoolAlloc { wanted, reply } => self.retry_pool_alloc(&wanted, reply),
                Then::Chunk(chunk) => {
                    self.note_sticky(result);
                    match self.call.session.shared {
                        Some(shared) if result == CUDA_SUCCESS => reply::finish(shared.chunk(chunk)),
                        Some(shared) => reply::fail(shared.chunk(chunk), result),
                        None => {}
                    }
                }
                Then::Transferred(transfer) => self.checkpoint.pace.transferred(transfer),
                Then::Free { address, reply } => {
                    let freed = self.memory.free_memory(self.call.gpu.driver, address);
                    self.answer(reply, if result == CUDA_SUCCESS { freed } else { result }, &[]);
                }
                Then::Unmap { address, size, reply } => {
                    let unmapped = self.memory.unmap_pieces(self.call.gpu.driver, address, size);
                    self.answer(reply, if result == CUDA_SUCCESS { unmapped } else { result }, &[]);
                }
                Then::DestroyArray { array, reply } => {
                    let destroyed = self.memory.destroy_array(&mut self.call, array);
                    self.answer(reply, if result == CUDA_SUCCESS { destroyed } else { result }, &[]);
                }
                Then::DestroyGraph { exec, graph } => destroy_graph(self.call.gpu.driver, exec, graph),
                Then::Deferred(id) => {
                    self.note_sticky(result);
                    self.scheduler.deferred.arrived(id, result);
                }
                Then::Destroy(key) => {
                    if let Some(real) = self.call.session.waiting.remove(key) {
                        // SAFETY: the stream is the driver's own, idle, and nobody has a handle of it.
                        unsafe { (self.call.gpu.driver.cuStreamDestroy_v2)(real) };
                    }
                }
                Then::Unpin { address, reply } => {
                    let context = self.memory.pinned.allocations().get(&address).map_or(0, |a| a.context);
                    let _ = self.enter_context(context);
                    let freed = self.memory.pinned.unmap(self.call.gpu.driver, address);
                    self.answer(reply, if result == CUDA_SUCCESS { freed } else { result }, &[]);
                }
            }
        }
        self.scheduler.finished = finished;
        self.look_at_deferred();
    }

    /// Waits until every stream of a context (of all contexts, for 0) is idle. An error of the device is returned to the next
    /// command that asks.
    pub(crate) fn finish_streams(&mut self, context: u64) -> Result<(), Refused> {
        for key in self.call.session.waiting.busy(context) {
            if let Some(real) = self.call.session.waiting.real(key) {
                self.enter_context(key.context)?;
                // SAFETY: the handle is the driver's own.
                unsafe { (self.driver().cuStreamSynchronize)(real) };
            }
            self.call.session.waiting.all_done(key);
        }
        self.poll();
        self.collect_prints();
        self.enter_context(self.call.header.context)
    }

    /// Waits until every stream is idle and nothing waits for the device. No command is taken from the ring meanwhile.
    pub(crate) fn drain(&mut self, timeout: Duration) -> Result<Rest, Broken> {
        let deadline = Instant::now() + timeout;
        loop {
            self.poll();
            let busy = busy_stream(&mut self.call).inspect_err(|broken| self.note_sticky(broken.0))?;
            match busy {
                None if self.call.session.waiting.is_empty() && self.scheduler.deferred.is_at_rest() => {
                    self.collect_prints();
                    return Ok(Rest::Idle);
                }
                _ if Instant::now() < deadline => std::thread::sleep(Duration::from_micros(50)),
                Some(key) => return Ok(Rest::Busy(what_runs(&self.call.session, key))),
                None => return Ok(Rest::Busy("an event is pending".into())),
            }
        }
    }
}
