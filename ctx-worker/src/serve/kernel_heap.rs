//! Launches of kernels that could call `malloc`: before the first one in a primary context, the heap is made and found
//! (`resources/kernel_heap.rs`). A client whose heap cannot be saved cannot be either, once it has launched such a kernel.

use std::collections::BTreeSet;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, GraphInStream};

use crate::resources::kernel_heap_error::HeapError;
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};

/// Why a client cannot be saved that uses another heap than those of primary contexts.
const OTHER_CONTEXT: &str = "it has launched a kernel that calls malloc on the device in a context of its own making";

impl Executor {
    /// Called before a kernel that could call `malloc` is launched by a command, in a stream, in a context or one that it belongs to. Nothing
    /// runs in the stream from now on before the heap was found. Returns why the client cannot be saved once the kernel has been launched.
    ///
    /// # Errors
    /// A lack of memory: the command is repeated when there is more.
    pub(super) fn prepare_heap(&mut self, context: u64, stream: CUstream) -> Result<Option<String>, Refused> {
        if self.call.session.unsavable.is_some() {
            return Ok(None);
        }
        let Some((ordinal, primary)) = self.primary_of(context) else { return Ok(Some(OTHER_CONTEXT.to_owned())) };
        let driver = self.call.gpu.driver;
        if self.memory.kernel_heaps.may_be_used(driver, ordinal) {
            return Ok(None);
        }
        self.enter_real(primary)?;
        let made = match self.memory.kernel_heaps.has(ordinal) {
            true => Ok(()),
            false => {
                let records = self.call.session.objects.recorded();
                self.memory.kernel_heaps.make(driver, (ordinal, primary), records)
            }
        };
        let ready = made.and_then(|()| Ok(self.memory.kernel_heaps.wait(driver, ordinal, stream)?));
        self.context_changed();
        self.enter_context(context)?;
        match ready {
            Ok(()) => Ok(None),
            Err(HeapError::Driver(failed)) if failed.code == CUDA_ERROR_OUT_OF_MEMORY => {
                Err(Refused::Code(CUDA_ERROR_OUT_OF_MEMORY))
            }
            Err(why) => Ok(Some(why.to_string())),
        }
    }

    /// The same for a command about graphs: the kernels of one that is launched may call `malloc`, each in the context of its step.
    pub(super) fn prepare_heaps_of_graph(&mut self, number: u16, args: &Reader<'_>) -> Result<Option<String>, Refused> {
        if number != command::GRAPH_LAUNCH {
            return Ok(None);
        }
        let GraphInStream { exec, stream } = GraphInStream::read(&mut args.clone())?;
        let objects = &self.call.session.objects;
        let allocates = |function: u64| objects.get(function).is_some_and(|it| it.allocates);
        let graph = self.code.graphs.get(&exec).filter(|graph| graph.functions().any(allocates));
        let Some(graph) = graph else { return Ok(None) };
        let contexts: BTreeSet<u64> =
            graph.launches().filter(|(_, function)| allocates(*function)).map(|(context, _)| context).collect();
        let driver = self.call.gpu.driver;
        let is_ready = |context: &u64| {
            let primary = self.primary_of(*context);
            primary.is_some_and(|(ordinal, _)| self.memory.kernel_heaps.may_be_used(driver, ordinal))
        };
        if contexts.iter().all(is_ready) {
            return Ok(None);
        }
        // Without a stream, the launch itself fails.
        let Ok(stream) = self.handle_stream(stream) else { return Ok(None) };
        let mut refusal = None;
        for context in contexts {
            refusal = refusal.or(self.prepare_heap(context, stream)?);
        }
        self.enter_context(self.call.header.context)?;
        Ok(refusal)
    }

    /// Called after a launch, with what was returned before it.
    pub(super) fn launched_allocating(&mut self, outcome: &Outcome, refusal: Option<String>) {
        if let (Outcome::Done(CUDA_SUCCESS), Some(why)) = (outcome, refusal) {
            self.call.session.unsavable.get_or_insert(why);
        }
    }

    /// The primary context that a context is, or belongs to, and its device.
    fn primary_of(&self, context: u64) -> Option<(usize, CUcontext)> {
        let owner = self.call.session.owner(context);
        let real = self.call.session.objects.get(owner)?.real;
        let ordinal = self.call.session.device_of_context(owner).ok()?;
        let primary = self.memory.devices.get(ordinal)?.primary;
        (primary == real).then_some((ordinal, primary))
    }
}
