//! The executor: takes commands from the ring in their order, and does what the daemon asks between them.
//!
//! ```text
//!             Adopt / Load + Connect                    Quiesce
//!   SPARE ──────────────────────────> OPEN ──────────────────────────> QUIESCED
//!                                      ^ │ every stream idle, nothing    ^ │  Save, SaveCode
//!                                      │ │ waits, no command taken       │ │
//!                                      │ └─────> CLOSING ─Quiesce────────┘ │
//!                                      │         no command taken  <───────┤
//!                                      └──────────────Open─────────────────┘ Advance: some are
//! ```
//!
//! From quiesced to open nothing is written to memory that the client shares: no reply, no chunk, not even the ring's
//! head. So what CRIU saves of it is its state at the quiesce, plus what the client enqueues until it is frozen.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use rekindle_cuda_abi::table::{self, Function};
use rekindle_cuda_abi::types::*;
use rekindle_wire::attach::Attached;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind};
use rekindle_wire::control::Limits;
use rekindle_wire::layout::Shared;
use rekindle_wire::reply;
use rekindle_wire::ring::CommandHeader;
use tracing::{error, warn};

use crate::checkpoint::access::Tracker;
use crate::checkpoint::access::hash::Hasher;
use crate::checkpoint::access::observe::Observation;
use crate::checkpoint::copying::Background;
use crate::checkpoint::copying::{Clones, Guard, Place, Precopied};
use crate::checkpoint::engine::{Buffers, Engine, Pace, Stage};
use crate::gpu::driver::{Driver, is_sticky, stream_is_busy};
use crate::resources::arrays::Arrays;
use crate::resources::code::Globals;
use crate::resources::code_store::{CodeStore, Image};
use crate::resources::device::Device;
use crate::resources::graphs::Graphs;
use crate::resources::ipc::Arrived;
use crate::resources::ipc_events::IpcEvents;
use crate::resources::linker::Link;
use crate::resources::pinned::PinnedMemory;
use crate::resources::pools::Pools;
use crate::resources::prints::Prints;
use crate::resources::textures::Filler;
use crate::resources::vmm::Vmm;
use crate::schedule::deferred::Held;
use crate::schedule::dependencies::Shapes;
use crate::schedule::times::Ages;
use crate::session::objects::{Object, Objects};
use crate::session::outcome::{Outcome, Refused};
use crate::session::waiting::{StreamKey, Then, Waiting};

/// The worker's state around the driver.
pub(crate) struct Executor {
    driver: &'static Driver,
    pub(crate) table: Vec<Function>,
    pub(crate) attached: Attached,
    pub(crate) devices: Vec<Device>,
    pub(crate) objects: Objects,
    pub(crate) waiting: Waiting,
    pub(crate) code: CodeStore,
    /// The image that each module or library was loaded from.
    pub(crate) loaded: HashMap<u64, Arc<Image>>,
    /// Where their variables lie.
    pub(crate) globals: Globals,
    pub(crate) pinned: PinnedMemory,
    pub(crate) arrays: Arrays,
    pub(crate) limits: Limits,
    pub(crate) fillers: Vec<Filler>,
    pub(crate) prints: Prints,
    pub(crate) links: HashMap<u64, Link>,
    pub(crate) graphs: Graphs,
    /// What the last compilation of each of the client's threads has said, until the thread has read it: information,
    /// errors.
    pub(crate) code_logs: HashMap<u32, [Vec<u8>; 2]>,
    pub(crate) pools: Pools,
    pub(crate) vmm: Vmm,
    pub(crate) arrived: Arrived,
    pub(crate) ipc_events: IpcEvents,
    /// What copies; not here while it does so in the background.
    pub(crate) engine: Option<Engine>,
    /// Hashes device memory.
    pub(crate) hasher: Hasher,
    /// What is known of the memory that commands use; not here while it is asked.
    pub(crate) tracker: Option<Box<Tracker>>,
    /// Devices whose primary contexts were reset while the engine was away.
    pub(crate) reset_meanwhile: Vec<usize>,
    /// The engine's, to be had while it is away.
    pub(crate) buffers: Buffers,
    pub(crate) stage: Stage,
    pub(crate) pace: Pace,
    /// A copy that goes on in the background.
    pub(crate) background: Option<Background>,
    /// What commands have to look at before they are executed, meanwhile.
    pub(crate) guard: Option<Guard>,
    /// Sets it aside.
    pub(crate) reserving: Option<crate::checkpoint::copying::Reserving>,
    /// Device memory that was set aside for clones.
    pub(crate) reserved: Arc<Mutex<Option<Clones>>>,
    /// Whether memory that others' clones take may be there soon; waits a moment.
    pub(crate) others_room: Option<Box<dyn Fn(bool) -> bool + Send>>,
    /// What was copied before the quiesce.
    pub(crate) precopied: Option<Precopied>,
    /// Memory that was written by what was not expected to.
    pub(crate) surprised: HashSet<Place>,
    /// When commands first wrote each during the last copy: 0, 1, ... They may do so again.
    pub(crate) written_soon: HashMap<Place, u32>,
    /// The client's shared memory, once there is a client.
    pub(crate) shared: Option<Shared>,
    pub(crate) staging: *mut u8,
    /// The command under way.
    pub(crate) header: CommandHeader,
    /// The driver's current context of this thread.
    current: CUcontext,
    /// Why the client cannot be checkpointed from now on, if so.
    pub(crate) unsavable: Option<String>,
    /// Events that were recorded, and when: the number of the command.
    pub(crate) recorded: HashMap<u64, u64>,
    pub(crate) commands: u64,
    /// Pinned memory that a restored client has, until its memfds are here.
    pub(crate) expected_pins: Vec<(u64, crate::resources::pinned::Allocation)>,
    event_record: u16,
    /// `cuFuncLoad`.
    pub(crate) function_load: u16,
    /// The forms of `cuEventElapsedTime`.
    elapsed: [u16; 2],
    /// `cuFuncSetAttribute` and `cuKernelSetAttribute`.
    pub(crate) attribute_setters: [u16; 2],
    /// Events that were recorded before a restore.
    pub(crate) ages: Ages,
    /// In each context that has such events, one that was recorded at the restore.
    pub(crate) restored_at: HashMap<u64, CUevent>,
    finished: Vec<(Then, CUresult)>,
    /// What each line of the table has to do with streams and events.
    pub(crate) shapes: Shapes,
    /// Commands that wait in software.
    pub(crate) held: Held,
    /// What looks at the client's accesses, where the daemon's configuration asks for that.
    pub(crate) observed: Option<Box<Observation>>,
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
        let event_record = command::number(&table, "cuEventRecord").unwrap_or(u16::MAX);
        let function_load = command::number(&table, "cuFuncLoad").unwrap_or(u16::MAX);
        let elapsed = ["cuEventElapsedTime", "cuEventElapsedTime_v2"];
        let elapsed = elapsed.map(|name| command::number(&table, name).unwrap_or(u16::MAX));
        let setters = ["cuFuncSetAttribute", "cuKernelSetAttribute"];
        let attribute_setters = setters.map(|name| command::number(&table, name).unwrap_or(u16::MAX));
        let shapes = Shapes::new(&table);
        Self {
            driver,
            attached,
            pools: Pools::new(devices.len()),
            vmm: Vmm::default(),
            arrived: Arrived::default(),
            ipc_events: IpcEvents::new(&table),
            devices,
            reset_meanwhile: Vec::new(),
            buffers: engine.buffers.clone(),
            stage: engine.stage.clone(),
            pace: engine.pace.clone(),
            engine: Some(engine),
            hasher,
            tracker: Some(Box::new(Tracker::new(&table))),
            background: None,
            guard: None,
            reserving: None,
            reserved: Arc::default(),
            others_room: None,
            precopied: None,
            surprised: HashSet::new(),
            written_soon: HashMap::new(),
            table,
            objects: Objects::default(),
            waiting: Waiting::default(),
            code: CodeStore::default(),
            loaded: HashMap::new(),
            globals: Globals::default(),
            pinned: PinnedMemory::default(),
            arrays: Arrays::default(),
            limits: Limits::default(),
            fillers: Vec::new(),
            prints: Prints::default(),
            links: HashMap::new(),
            graphs: Graphs::new(),
            code_logs: HashMap::new(),
            shared: None,
            staging: std::ptr::null_mut(),
            header: CommandHeader::default(),
            current: 0,
            unsavable: None,
            recorded: HashMap::new(),
            commands: 0,
            expected_pins: Vec::new(),
            event_record,
            function_load,
            elapsed,
            attribute_setters,
            ages: Ages::new(),
            restored_at: HashMap::new(),
            finished: Vec::new(),
            shapes,
            held: Held::default(),
            observed: None,
        }
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// Hands one command to the driver. An error means that the client does not speak our language, and is given up.
    pub(crate) fn perform(&mut self, header: CommandHeader, parameters: &[u8]) -> Result<(), Refused> {
        self.header = header;
        self.graph_may_change(&header, parameters);
        if self.guard.is_some() {
            self.look_out(&header, parameters);
        }
        let watch = if self.observed.is_some() { self.watch(&header, parameters) } else { None };
        let mut payload = Writer::new();
        let mut outcome = self.carry_out(&header, parameters, &mut payload);
        let mut first = true;
        while is_out_of_memory(&outcome) && is_repeatable(header.call) && self.make_room(first) {
            first = false;
            payload = Writer::new();
            outcome = self.carry_out(&header, parameters, &mut payload);
        }
        match outcome {
            Ok(Outcome::Later) => {}
            Ok(Outcome::Done(result)) => self.answer(header.reply, result, payload.bytes()),
            Err(Refused::Code(code)) => {
                // Whoever waits for a chunk gets the error from it.
                if !matches!(header.call, command::COPY_TO_CHUNK | command::COPY_BOX_TO_CHUNK) {
                    self.answer(header.reply, code, &[]);
                }
                if command::THROUGH_CHUNK.contains(&header.call) {
                    self.fail_chunk(parameters, code);
                }
            }
            Err(refused) => return Err(refused),
        }
        if let Some(watch) = watch {
            self.watched(watch);
        }
        Ok(())
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
                    result = self.ipc_event_call(header.call, parameters)?;
                }
                if header.call == self.event_record && result == CUDA_SUCCESS {
                    let event = Reader::new(parameters).word()?;
                    self.event_recorded(event);
                } else if self.elapsed.contains(&header.call) && result == CUDA_SUCCESS && !self.ages.is_empty() {
                    self.correct_elapsed(parameters, payload);
                }
                Ok(Outcome::Done(result))
            } else {
                self.command(header.call, &mut args, payload)
            }
        })
    }

    /// A copy through a staging chunk does not happen: nobody must wait for it.
    fn fail_chunk(&mut self, parameters: &[u8], code: CUresult) {
        let mut args = Reader::new(parameters);
        if let (Ok(_), Ok(chunk), Some(shared)) = (args.word(), args.word(), self.shared)
            && chunk < rekindle_wire::layout::CHUNKS as u64
        {
            self.note_sticky(code);
            reply::fail(shared.chunk(chunk as usize), code);
        }
    }

    /// Keeps an error after which the context is lost, so that every later call returns it. Whoever sees it finds what
    /// kernels have printed before it.
    pub(crate) fn note_sticky(&mut self, code: CUresult) {
        let Some(shared) = self.shared else { return };
        let sticky = &shared.header().sticky;
        if is_sticky(code) && sticky.load(std::sync::atomic::Ordering::Acquire) == 0 {
            self.collect_prints();
            sticky.store(code, std::sync::atomic::Ordering::Release);
        }
    }

    /// Executes a generated call; for a restore.
    pub(crate) fn dispatch(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<CUresult, Refused> {
        dispatch(self, call, args, reply)
    }

    /// Answers a call; the error of one that nobody waits for is kept for a later call.
    pub(crate) fn answer(&mut self, reply_slot: u16, result: CUresult, payload: &[u8]) {
        let Some(shared) = self.shared else { return };
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
                let call = command::name(&self.table, self.header.call).unwrap_or("?").to_string();
                warn!(call, error = result_name(result), "a call that did not wait failed");
                shared.header().deferred.store(result, std::sync::atomic::Ordering::Release);
            }
            None => {}
        }
    }

    /// Looks at what waits, and finishes what is done.
    pub(crate) fn poll(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        self.waiting.finished(self.driver, &mut finished);
        finished.iter().for_each(|(_, result)| self.note_sticky(*result));
        if !finished.is_empty() {
            self.collect_prints();
        }
        for (then, result) in finished.drain(..) {
            match then {
                Then::Reply(slot) => {
                    self.release_pools();
                    self.answer(slot, result, &[]);
                }
                Then::PoolAlloc { wanted, reply } => self.retry_pool_alloc(&wanted, reply),
                Then::Chunk(chunk) => {
                    self.note_sticky(result);
                    match self.shared {
                        Some(shared) if result == CUDA_SUCCESS => reply::finish(shared.chunk(chunk)),
                        Some(shared) => reply::fail(shared.chunk(chunk), result),
                        None => {}
                    }
                }
                Then::Transferred(transfer) => self.pace.transferred(transfer),
                Then::Free { address, reply } => {
                    let freed = self.free_memory(address);
                    self.answer(reply, if result == CUDA_SUCCESS { freed } else { result }, &[]);
                }
                Then::Unmap { address, size, reply } => {
                    let unmapped = self.unmap_pieces(address, size);
                    self.answer(reply, if result == CUDA_SUCCESS { unmapped } else { result }, &[]);
                }
                Then::DestroyArray { array, reply } => {
                    let destroyed = self.destroy_array(array);
                    self.answer(reply, if result == CUDA_SUCCESS { destroyed } else { result }, &[]);
                }
                Then::DestroyGraph { exec, graph } => self.destroy_graph(exec, graph),
                Then::Held(id) => {
                    self.note_sticky(result);
                    self.held.arrived(id, result);
                }
                Then::Destroy(key) => {
                    if let Some(real) = self.waiting.remove(key) {
                        // SAFETY: the stream is the driver's own, idle, and nobody has a handle of it.
                        unsafe { (self.driver.cuStreamDestroy_v2)(real) };
                    }
                }
                Then::Unpin { address, reply } => {
                    let context = self.pinned.allocations().get(&address).map_or(0, |a| a.context);
                    let _ = self.enter_context(context);
                    let freed = self.pinned.unmap(self.driver, address);
                    self.answer(reply, if result == CUDA_SUCCESS { freed } else { result }, &[]);
                }
            }
        }
        self.finished = finished;
        self.look_at_held();
    }

    pub(crate) fn free_memory(&mut self, address: u64) -> CUresult {
        for device in &mut self.devices {
            match device.memory.free(self.driver, address) {
                Some(Ok(())) => return CUDA_SUCCESS,
                Some(Err(failed)) => return failed.code,
                None => {}
            }
        }
        CUDA_ERROR_INVALID_VALUE
    }

    /// Makes the client's context the driver's current one; 0 leaves none.
    pub(crate) fn enter_context(&mut self, context: u64) -> Result<(), Refused> {
        let real = match context {
            0 => 0,
            handle => match self.objects.get(handle) {
                Some(o) if o.kind == Kind::Context => o.real,
                _ => return Err(Refused::Code(CUDA_ERROR_CONTEXT_IS_DESTROYED)),
            },
        };
        self.enter_real(real)
    }

    /// Makes one of the driver's contexts current.
    pub(crate) fn enter_real(&mut self, real: CUcontext) -> Result<(), Refused> {
        if self.current != real {
            // SAFETY: 0, or a context that the driver gave.
            match unsafe { (self.driver.cuCtxSetCurrent)(real) } {
                CUDA_SUCCESS => self.current = real,
                error => return Err(Refused::Code(error)),
            }
        }
        Ok(())
    }

    /// The driver's current context was changed, or destroyed, by something else.
    pub(crate) fn context_changed(&mut self) {
        // SAFETY: leaves the thread without a context.
        unsafe { (self.driver.cuCtxSetCurrent)(0) };
        self.current = 0;
    }

    fn object(&self, handle: u64, kinds: &[Kind]) -> Result<u64, Refused> {
        match self.objects.get(handle) {
            Some(o) if kinds.contains(&o.kind) => Ok(o.real),
            _ => Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
        }
    }

    // What the generated dispatch asks for.

    pub(crate) fn device(&self, ordinal: u64) -> Result<CUdevice, Refused> {
        let device = usize::try_from(ordinal).ok().and_then(|o| self.devices.get(o));
        device.map(|d| d.device).ok_or(Refused::Code(CUDA_ERROR_INVALID_DEVICE))
    }

    pub(crate) fn handle_event(&self, handle: u64) -> Result<u64, Refused> {
        self.object(handle, &[Kind::Event])
    }

    /// A function that is about to be used, so that its code is loaded; a kernel is as good, as in the driver.
    pub(crate) fn handle_function(&mut self, handle: u64) -> Result<u64, Refused> {
        let real = self.handle_unused_function(handle)?;
        self.use_function(handle);
        Ok(real)
    }

    /// A function that is asked about and not used.
    pub(crate) fn handle_unused_function(&self, handle: u64) -> Result<u64, Refused> {
        self.object(handle, &[Kind::Function, Kind::Kernel])
    }

    pub(crate) fn handle_kernel(&mut self, handle: u64) -> Result<u64, Refused> {
        self.handle_function(handle)
    }

    /// A stream in which something is about to be enqueued.
    pub(crate) fn handle_stream(&mut self, handle: u64) -> Result<u64, Refused> {
        let key = self.stream_key(handle)?;
        let (driver, objects) = (self.driver, &self.objects);
        let is_busy = |stream| stream_is_busy(driver, stream);
        let real = self.waiting.enqueue(key, is_busy, || match handle {
            CU_STREAM_LEGACY => Ok(CU_STREAM_LEGACY),
            CU_STREAM_PER_THREAD => {
                let mut stream = 0;
                // SAFETY: the out parameter is a local; the context is current.
                match unsafe { (driver.cuStreamCreate)(&raw mut stream, 0) } {
                    CUDA_SUCCESS => Ok(stream),
                    error => Err(error),
                }
            }
            handle => objects.get(handle).map(|o| o.real).ok_or(CUDA_ERROR_INVALID_HANDLE),
        });
        real.map_err(Refused::Code)
    }

    /// The stream that a parameter of the command under way names.
    pub(crate) fn stream_key(&self, handle: u64) -> Result<StreamKey, Refused> {
        let context = self.header.context;
        match handle {
            CU_STREAM_LEGACY | CU_STREAM_PER_THREAD if context == 0 => Err(Refused::Code(CUDA_ERROR_INVALID_CONTEXT)),
            CU_STREAM_LEGACY => Ok(StreamKey { context, handle, thread: 0 }),
            CU_STREAM_PER_THREAD => Ok(StreamKey { context, handle, thread: self.header.thread }),
            handle => match self.objects.get(handle) {
                Some(o) if o.kind == Kind::Stream => Ok(StreamKey { context: o.context, handle, thread: 0 }),
                _ => Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE)),
            },
        }
    }

    /// A generated call has created an object.
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
            self.held.stream_created(handle, args);
        }
        let context = self.header.context;
        if !self.objects.insert(handle, Object { kind, real, context, parent: 0, allocates: false }) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.objects.record(call, handle, context, args.all(), None);
        Ok(())
    }

    /// A generated call has destroyed an object.
    pub(crate) fn destroyed(&mut self, handle: u64) {
        self.objects.remove(handle);
        self.forget_event(handle);
        self.held.stream_destroyed(handle);
    }

    /// A generated call has changed an object (0: the context); `value` is the place of the parameter that says to what.
    pub(crate) fn changed(&mut self, handle: u64, call: u16, args: &Reader<'_>, value: Option<usize>) {
        // A function is loaded at its first use, which has its record.
        if call == self.function_load {
            return;
        }
        let context = self.header.context;
        self.objects.record_change(call, if handle == 0 { context } else { handle }, context, args.all(), value);
    }

    /// Waits for everything in these streams, then does something. Streams of other contexts are marked in theirs.
    pub(crate) fn when_done(&mut self, streams: Vec<StreamKey>, then: Then) -> Result<(), Refused> {
        let mut marks = Vec::with_capacity(streams.len());
        for key in streams {
            self.enter_context(key.context)?;
            marks.push(self.waiting.mark(self.driver, key).map_err(Refused::Code)?);
        }
        self.enter_context(self.header.context)?;
        self.waiting.add(marks, then);
        Ok(())
    }

    /// The command under way has enqueued a transfer from a device to the host in a stream, which copies look out for. Where
    /// none is under way this is a look at a word.
    pub(crate) fn note_transfer(&mut self, device: Option<usize>, stream: StreamKey) {
        let Some(transfer) = device.and_then(|device| self.pace.transfer(device)) else { return };
        // The transfer itself goes on, whether it is known when it ends or not.
        if self.when_done(vec![stream], Then::Transferred(transfer)).is_err() {
            self.pace.transferred(transfer);
        }
    }

    /// The client has broken its ring or sent what no interposer sends.
    pub(crate) fn give_up(&self, why: &dyn std::fmt::Display) -> ! {
        error!("the client's ring is broken ({why}); giving it up");
        // SAFETY: ends the process without running the driver's exit handlers, which could wait for the device. The
        // kernel frees everything, and the closing connection tells the client.
        unsafe { libc::_exit(3) }
    }
}

/// Whether a command that has failed can be executed again: it has taken nothing with it.
fn is_repeatable(call: u16) -> bool {
    use command::{ARRAY_CREATE, LAUNCH, MEM_ALLOC, MIPMAP_CREATE, PIECE_CREATE, POOL_ALLOC};
    call < command::FIRST || [ARRAY_CREATE, LAUNCH, MEM_ALLOC, MIPMAP_CREATE, PIECE_CREATE, POOL_ALLOC].contains(&call)
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
