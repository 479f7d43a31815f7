//! The executor: takes commands from the ring in their order, and serves the daemon's requests between them. `state.rs`
//! describes the states of the worker.

use rekindle_cuda_abi::table;
use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Attached;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind};
use rekindle_wire::reply;
use rekindle_wire::ring::CommandHeader;
use tracing::{error, warn};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::access::hash::Hasher;
use crate::checkpoint::borrowing::Trial;
use crate::checkpoint::engine::Engine;
use crate::checkpoint::layers::Layers;
use crate::gpu::Gpu;
use crate::gpu::driver::{Driver, is_sticky};
use crate::resources::device::Device;
use crate::resources::initial::Loading;
use crate::resources::managed::ManagedError;
use crate::resources::shortage::to_be_free;
use crate::resources::{Code, Memory};
use crate::schedule::Scheduler;
use crate::schedule::deferred_settings::Change;
use crate::session::Session;
use crate::session::call::Call;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused};
use crate::session::waiting::{StreamKey, Then};

/// The worker's state around the driver: one owner for each layer.
pub(crate) struct Executor {
    /// The driver, the session, and the command under way.
    pub(crate) call: Call,
    pub(crate) memory: Memory,
    pub(crate) code: Code,
    pub(crate) scheduler: Scheduler,
    pub(crate) checkpoint: Checkpoint,
    /// How the last copy of managed memory to the device went, if it was made.
    pub(super) managed_copied: Option<Result<(), ManagedError>>,
}

impl Executor {
    pub(crate) fn new(
        driver: &'static Driver,
        devices: Vec<Device>,
        engine: Engine,
        hasher: Hasher,
        attached: Attached,
    ) -> Self {
        let table = table::parse(table::TEXT).unwrap_or_default();
        Self {
            memory: Memory::new(devices, &table),
            code: Code::new(&table),
            scheduler: Scheduler::new(&table),
            checkpoint: Checkpoint::new(engine, hasher, &table),
            call: Call {
                gpu: Gpu::new(driver),
                session: Session::new(table, attached),
                header: CommandHeader::default(),
            },
            managed_copied: None,
        }
    }

    /// The command under way, with the parts of the worker that are needed when the driver loads code.
    pub(crate) fn code_parts(&mut self) -> (&mut Call, Loading<'_>, &mut Code) {
        let loading = Loading { memory: &mut self.memory, reader: &mut self.checkpoint.peek };
        (&mut self.call, loading, &mut self.code)
    }

    /// The layers below a checkpoint, and the checkpoint.
    pub(crate) fn layers(&mut self) -> (Layers<'_>, &mut Checkpoint) {
        let (call, memory, code, scheduler) = (&mut self.call, &mut self.memory, &mut self.code, &mut self.scheduler);
        (Layers { call, memory, code, scheduler }, &mut self.checkpoint)
    }

    /// Called when an allocation of the client found no memory: the command, for which the driver may have wanted memory of
    /// its own. Returns whether there may be memory now.
    pub(crate) fn make_room(&mut self, command: u16, first: bool) -> bool {
        let context = self.call.header.context;
        let by_driver = wants_memory_for_driver(command).then(|| self.call.session.device_of_context(context).ok());
        let Self { call, memory, checkpoint, .. } = self;
        let driver = call.gpu.driver;
        let mut needs = || memory.needs(&mut call.gpu, by_driver.flatten());
        checkpoint.make_room(driver, memory.devices.len(), first, &mut needs)
    }

    /// The bytes that must be free on each device so that a suspended client, which has found no room, can resume.
    pub(crate) fn room_to_resume(&mut self) -> Vec<u64> {
        let free = self.memory.memory_of_devices(&mut self.call.gpu).unwrap_or_default();
        let free: Vec<u64> = free.into_iter().map(|it| it.free).collect();
        to_be_free(&free, &self.memory.physical())
    }

    /// Refuses memory that does not belong to the client.
    pub(crate) fn reachable(&self, address: u64, bytes: u64) -> Result<(), Refused> {
        self.memory.reachable(&self.code.globals, address, bytes)
    }

    /// Lets the current context's device use memory of another device that a command names.
    pub(crate) fn allow_peer(&mut self, address: u64) -> Result<(), Refused> {
        self.memory.allow_peer(&self.call, address)
    }

    /// Called after a synchronisation: reads the output that kernels have printed.
    pub(crate) fn collect_prints(&mut self) {
        self.code.prints.collect(&mut self.call);
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.call.gpu.driver
    }

    /// Hands one command to the driver. An error means that the client violates the protocol; the worker gives it up.
    pub(crate) fn perform(&mut self, header: CommandHeader, parameters: &[u8]) -> Result<(), Refused> {
        let brought = self.bring_managed_to_device(&header);
        self.call.header = header;
        self.checkpoint.graph_may_change(&header, parameters);
        if self.checkpoint.copying.guard.is_some() {
            let (layers, checkpoint) = self.layers();
            checkpoint.look_out(layers.call, layers.memory, layers.code, parameters);
        }
        let watch = if self.checkpoint.reports() {
            let (layers, checkpoint) = self.layers();
            checkpoint.watch(layers.call, layers.memory, layers.code, parameters)
        } else {
            None
        };
        let mut payload = Writer::new();
        let owned = brought.and_then(|()| self.own_what_is_written(parameters));
        // What was not brought, or is not its own, it must not use in a further attempt either.
        let may_run = owned.is_ok();
        let (trial, mut outcome) = match owned {
            Ok(trial) => (trial, self.carry_out(&header, parameters, &mut payload)),
            Err(code) => (None, Err(Refused::Code(code))),
        };
        let mut first = true;
        while may_run && is_out_of_memory(&outcome) && is_repeatable(header.call) && self.make_room(header.call, first)
        {
            first = false;
            payload = Writer::new();
            outcome = self.carry_out(&header, parameters, &mut payload);
        }
        let executed = matches!(outcome, Ok(Outcome::Done(CUDA_SUCCESS) | Outcome::Later));
        match outcome {
            Ok(Outcome::Later) => {}
            Ok(Outcome::Done(result)) => self.answer(header.reply, result, payload.bytes()),
            Err(Refused::Code(code)) => {
                // The thread that waits for a chunk gets the error from the chunk.
                if !matches!(header.call, command::COPY_TO_CHUNK | command::COPY_BOX_TO_CHUNK) {
                    self.answer(header.reply, code, &[]);
                }
                if let Some(chunk) = command::chunk(header.call, parameters) {
                    self.fail_chunk(chunk, code);
                }
            }
            Err(refused) => return Err(refused),
        }
        if let Some(watch) = watch {
            let (layers, checkpoint) = self.layers();
            checkpoint.watched(layers.call, layers.memory, layers.code, watch);
        }
        if let Some(trial) = trial {
            let (mut layers, checkpoint) = self.layers();
            checkpoint.judge(&mut layers, trial, executed);
        }
        Ok(())
    }

    /// Called before anything but a command uses the client's memory, for the reporting mode that takes it out of reach.
    pub(crate) fn open_all_memory(&mut self) {
        let (layers, checkpoint) = self.layers();
        checkpoint.open_all(layers.call, layers.memory);
    }

    /// Gives memory of its own to what the command under way may write, if the client borrows memory.
    fn own_what_is_written(&mut self, parameters: &[u8]) -> Result<Option<Trial>, CUresult> {
        let mut first = true;
        loop {
            if self.checkpoint.borrowing.is_none() {
                return Ok(None);
            }
            let (mut layers, checkpoint) = self.layers();
            let owned = checkpoint.own_what_is_written(&mut layers, parameters);
            let is_short = matches!(owned, Err(CUDA_ERROR_OUT_OF_MEMORY));
            if !is_short || !self.make_room(self.call.header.call, first) {
                return owned;
            }
            first = false;
        }
    }

    fn carry_out(
        &mut self,
        header: &CommandHeader,
        parameters: &[u8],
        payload: &mut Writer,
    ) -> Result<Outcome, Refused> {
        self.enter_context(header.context).and_then(|()| {
            let mut args = Reader::new(parameters);
            if header.call < command::FIRST {
                let change = self.about_to_set(header, parameters);
                if change.is_some() {
                    self.enter_context(header.context)?;
                }
                let mut result = dispatch(self, header.call, &mut args, payload)?;
                if let Some(change) = change.filter(|_| result == CUDA_SUCCESS) {
                    self.has_set(change);
                    self.enter_context(header.context)?;
                }
                if result == CUDA_SUCCESS {
                    result = self.memory.ipc_events.after_call(&mut self.call, header.call, parameters)?;
                }
                if header.call == self.scheduler.event_record && result == CUDA_SUCCESS {
                    let event = Reader::new(parameters).word()?;
                    self.scheduler.times.event_recorded(event);
                } else if self.scheduler.elapsed.contains(&header.call)
                    && result == CUDA_SUCCESS
                    && !self.scheduler.times.ages.is_empty()
                {
                    self.scheduler.times.correct_elapsed(&self.call, parameters, payload);
                }
                Ok(Outcome::Done(result))
            } else {
                self.command(header.call, &mut args, payload)
            }
        })
    }

    /// Notes the values that deferred launches have of an attribute that this call is about to set.
    fn about_to_set(&mut self, header: &CommandHeader, parameters: &[u8]) -> Option<Change> {
        let mut loading = Loading { memory: &mut self.memory, reader: &mut self.checkpoint.peek };
        self.scheduler.about_to_set(&mut self.call, &mut loading, &mut self.code, header, parameters)
    }

    /// Called when the call has set the attribute.
    fn has_set(&mut self, change: Change) {
        let mut loading = Loading { memory: &mut self.memory, reader: &mut self.checkpoint.peek };
        self.scheduler.has_set(&mut self.call, &mut loading, &mut self.code, change);
    }

    /// Fails a copy through a staging chunk, so that nobody waits for it.
    fn fail_chunk(&mut self, chunk: u64, code: CUresult) {
        if let Some(shared) = self.call.session.shared
            && chunk < rekindle_wire::layout::CHUNKS as u64
        {
            self.note_sticky(code);
            reply::fail(shared.chunk(chunk as usize), code);
        }
    }

    /// Keeps an error after which the context is lost, so that every later call returns it. Output that kernels have printed
    /// before the error is read first.
    pub(crate) fn note_sticky(&mut self, code: CUresult) {
        let Some(shared) = self.call.session.shared else { return };
        let sticky = &shared.header().sticky;
        if is_sticky(code) && sticky.load(std::sync::atomic::Ordering::Acquire) == 0 {
            self.collect_prints();
            // Before the client has the error, which may end it.
            self.checkpoint.context_is_lost(&self.memory, code);
            sticky.store(code, std::sync::atomic::Ordering::Release);
        }
    }

    /// Executes a generated call, for a restore.
    pub(crate) fn dispatch(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<CUresult, Refused> {
        dispatch(self, call, args, reply)
    }

    /// Answers a call. If nobody waits for the answer, an error is kept for a later call.
    pub(crate) fn answer(&mut self, reply_slot: u16, result: CUresult, payload: &[u8]) {
        let Some(shared) = self.call.session.shared else { return };
        self.note_sticky(result);
        match reply_slot.checked_sub(1) {
            Some(slot) if !reply::answer(&shared, slot as usize, result, payload) => {
                warn!(slot, bytes = payload.len(), "a reply found nobody waiting, or no room");
                if payload.len() > rekindle_wire::layout::REPLY_BYTES {
                    reply::answer(&shared, slot as usize, CUDA_ERROR_NOT_SUPPORTED, &[]);
                }
            }
            Some(_) => {}
            None if result != CUDA_SUCCESS && !is_sticky(result) => {
                let call = command::name(&self.call.session.table, self.call.header.call).unwrap_or("?").to_string();
                warn!(call, error = result_name(result), "a call that did not wait failed");
                shared.header().deferred.store(result, std::sync::atomic::Ordering::Release);
            }
            None => {}
        }
    }

    /// Makes the client's context the driver's current one; 0 leaves none.
    pub(crate) fn enter_context(&mut self, context: u64) -> Result<(), Refused> {
        self.call.session.enter(&mut self.call.gpu, context)
    }

    /// Makes one of the driver's contexts current.
    pub(crate) fn enter_real(&mut self, real: CUcontext) -> Result<(), Refused> {
        self.call.gpu.enter(real).map_err(Refused::Code)
    }

    /// Called when other code has changed or destroyed the driver's current context.
    pub(crate) fn context_changed(&mut self) {
        self.call.gpu.leave();
    }

    // Functions that the generated dispatch calls.

    pub(crate) fn device(&self, ordinal: u64) -> Result<CUdevice, Refused> {
        self.memory.device(ordinal)
    }

    pub(crate) fn handle_event(&self, handle: u64) -> Result<u64, Refused> {
        self.call.session.object(handle, &[Kind::Event])
    }

    /// Resolves a function that is about to be used, so that its code is loaded. A kernel is accepted too, as in the driver.
    pub(crate) fn handle_function(&mut self, handle: u64) -> Result<u64, Refused> {
        let (call, mut loading, code) = self.code_parts();
        code.function(call, &mut loading, handle)
    }

    /// Resolves a function that is queried and not used.
    pub(crate) fn handle_unused_function(&self, handle: u64) -> Result<u64, Refused> {
        self.call.session.object(handle, &[Kind::Function, Kind::Kernel])
    }

    /// Places the variables of a module or library in the current context, unless they have been placed there.
    pub(crate) fn instantiate(&mut self, parent: u64) -> Result<(), Refused> {
        let (call, mut loading, code) = self.code_parts();
        code.instantiate(call, &mut loading, parent)
    }

    pub(crate) fn handle_kernel(&mut self, handle: u64) -> Result<u64, Refused> {
        self.handle_function(handle)
    }

    /// Resolves a stream in which work is about to be enqueued.
    pub(crate) fn handle_stream(&mut self, handle: u64) -> Result<u64, Refused> {
        self.call.stream(handle)
    }

    /// The stream that a parameter of the command under way names.
    pub(crate) fn stream_key(&self, handle: u64) -> Result<StreamKey, Refused> {
        self.call.session.stream_key(&self.call.header, handle)
    }

    /// Called when a generated call has created an object.
    pub(crate) fn created(
        &mut self,
        kind: &str,
        handle: u64,
        real: u64,
        call: u16,
        args: &Reader<'_>,
    ) -> Result<(), Refused> {
        let kind = match kind {
            "stream" => Kind::Stream,
            "event" => Kind::Event,
            _ => return Err(Refused::UnknownCall(call)),
        };
        if kind == Kind::Stream {
            self.scheduler.free_streams.created(handle, args);
        }
        // A stream of a green context is its own; an event belongs to the primary context.
        let context = if kind == Kind::Stream { self.call.header.context } else { self.call.owner() };
        if !self.call.session.objects.insert(handle, Object { kind, real, context, parent: 0, allocates: false }) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.call.session.objects.record(call, handle, context, args.all(), None);
        Ok(())
    }

    /// Called when a generated call has destroyed an object.
    pub(crate) fn destroyed(&mut self, handle: u64) {
        self.call.session.objects.remove(handle);
        self.scheduler.times.forget(handle);
        self.scheduler.free_streams.destroyed(handle);
    }

    /// Called when a generated call has changed an object (0: the context). `value` is the place of the parameter with the new
    /// value.
    pub(crate) fn changed(&mut self, handle: u64, call: u16, args: &Reader<'_>, value: Option<usize>) {
        // A function is loaded at its first use, which has its own record.
        if call == self.code.function_load {
            return;
        }
        let context = self.call.owner();
        self.call.session.objects.record_change(
            call,
            if handle == 0 { context } else { handle },
            context,
            args.all(),
            value,
        );
    }

    /// Waits for all work in these streams, then executes `then`. Streams of other contexts are marked in their contexts.
    pub(crate) fn when_done(&mut self, streams: Vec<StreamKey>, then: Then) -> Result<(), Refused> {
        self.call.when_done(streams, then)
    }

    /// Notes a transfer from a device to the host that the command under way has enqueued in a stream. Copies give way to such
    /// transfers. If no copy is under way, this costs one check of a word.
    pub(crate) fn note_transfer(&mut self, device: Option<usize>, stream: StreamKey) {
        let Some(transfer) = device.and_then(|device| self.checkpoint.pace.transfer(device)) else { return };
        // The transfer itself proceeds even if its end is not noticed.
        if self.when_done(vec![stream], Then::Transferred(transfer)).is_err() {
            self.checkpoint.pace.transferred(transfer);
        }
    }

    /// Ends the worker: the client has broken its ring, or has sent a message that no interposer sends.
    pub(crate) fn give_up(&self, why: &dyn std::fmt::Display) -> ! {
        error!("the client's ring is broken ({why}); giving it up");
        // SAFETY: ends the process without running the driver's exit handlers, which could wait for the device. The
        // kernel frees everything, and the closing connection tells the client.
        unsafe { libc::_exit(3) }
    }
}

/// Whether a command that has failed can be executed again, since it has consumed nothing.
fn is_repeatable(call: u16) -> bool {
    use command::{ARRAY_CREATE, LAUNCH, MEM_ALLOC, MIPMAP_CREATE, PIECE_CREATE, POOL_ALLOC};
    call < command::FIRST || [ARRAY_CREATE, LAUNCH, MEM_ALLOC, MIPMAP_CREATE, PIECE_CREATE, POOL_ALLOC].contains(&call)
}

/// Whether a command allocates no memory for the client, so that only the driver's own memory can have been short.
fn wants_memory_for_driver(call: u16) -> bool {
    call < command::FIRST || call == command::LAUNCH
}

fn is_out_of_memory(outcome: &Result<Outcome, Refused>) -> bool {
    matches!(outcome, Ok(Outcome::Done(CUDA_ERROR_OUT_OF_MEMORY)) | Err(Refused::Code(CUDA_ERROR_OUT_OF_MEMORY)))
}

#[allow(clippy::all, clippy::undocumented_unsafe_blocks, unused_variables, unused_mut, reason = "generated")]
mod generated {
    use super::{Executor, Reader, Refused, Writer};
    use rekindle_cuda_abi::types::*;
    include!(concat!(env!("OUT_DIR"), "/dispatch.rs"));
}
use generated::dispatch;
