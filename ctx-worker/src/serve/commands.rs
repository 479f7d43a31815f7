//! The commands that are not lines of the driver table: the worker's side of each.

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{
    self, CopyBytes, CopyChunk, CopyMemory, EndContext, Kind, MakeContext, MemAlloc, MemFree, OfStream, PinnedMap,
    PinnedUnmap, SyncContext, SyncEvent, WindowReserved,
};
use rekindle_wire::layout::{CHUNK_SIZE, CHUNKS};
use rekindle_wire::window;

use crate::gpu::driver::{CallFailed, stream_is_busy};
use crate::resources::code::to_unload;
use crate::resources::code_reserve::CodeReserve;
use crate::resources::memory::MemoryError;
use crate::resources::{pinned, tensor_maps};
use crate::schedule::callbacks::thread_end;
use crate::serve::executor::Executor;
use crate::session::objects::{Object, Objects};
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::waiting::{PoolAllocation, StreamKey, Then};

impl Executor {
    /// Executes a command of `wire::command`.
    pub(crate) fn command(
        &mut self,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match number {
            command::LAUNCH => self.launch(args),
            command::COPY => self.copy(args),
            command::COPY_BYTES => self.copy_bytes(args),
            command::COPY_FROM_CHUNK => self.copy_chunk(args, true),
            command::COPY_TO_CHUNK => self.copy_chunk(args, false),
            command::STREAM_SYNC => self.stream_sync(args),
            command::EVENT_SYNC => self.event_sync(args),
            command::CONTEXT_SYNC => self.context_sync(args),
            command::STREAM_DESTROY => self.stream_destroy(args),
            command::MEM_ALLOC => self.mem_alloc(args, reply),
            command::MEM_FREE => self.mem_free(args),
            command::MEM_INFO => self.mem_info(args, reply),
            command::WINDOW_RESERVED => self.window_reserved(args),
            command::PINNED_MAP => self.pinned_map(args),
            command::PINNED_UNMAP => self.pinned_unmap(args),
            command::MANAGED_MAP => self.managed_map(args),
            command::MANAGED_UNMAP => self.managed_unmap(args),
            command::MANAGED_VARIABLE => self.managed_variable(args),
            command::MANAGED_TO_DEVICE => self.managed_to_device(args),
            command::CONTEXT_RETAIN => self.context_retain(args, reply),
            command::CONTEXT_RESET => self.context_reset(args),
            command::CONTEXT_RELEASE => self.context_release(args),
            command::CONTEXT_CREATE => self.context_create(args, reply),
            command::CONTEXT_DESTROY => self.context_destroy(args),
            number if command::SHAPES.contains(&number) => self.shape_command(number, args, reply),
            command::CALLBACK_NEXT => self.callback_next(args, reply),
            command::HELD_ROOM => self.held_room(args),
            command::THREAD_END => thread_end(&mut self.call, args),
            command::GRAPH_CREATE..=command::GRAPH_DESTROY => {
                let refusal = self.prepare_heaps_of_graph(number, args)?;
                let (call, mut loading, code) = self.code_parts();
                let outcome = code.graph_command(call, &mut loading, number, args)?;
                self.launched_allocating(&outcome, refusal);
                Ok(outcome)
            }
            command::MEM_OPS => self.memory.mem_ops(&mut self.call, &self.code.globals, args),
            command::LAUNCH_ON_DEVICES => self.launch_on_devices(args),
            command::PRINTS => self.code.prints.fetch(&self.call.session, args, reply),
            command::OCCUPANCY_BLOCK_SIZE => {
                let (call, mut loading, code) = self.code_parts();
                code.occupancy_block_size(call, &mut loading, args, reply)
            }
            command::OCCUPANCY_CLUSTERS => {
                let (call, mut loading, code) = self.code_parts();
                code.occupancy_clusters(call, &mut loading, args, reply)
            }
            command::PEER_ENABLE => self.memory.peer_enable(&mut self.call, args),
            command::PEER_DISABLE => self.memory.peer_disable(&mut self.call, args),
            command::POOL_CREATE..=command::POOL_MEMORY_EXPORT => self.pool_command(number, args, reply),
            command::ADDRESS_RESERVE..=command::PIECE_GRANULARITY => {
                self.memory.vmm_command(&mut self.call, number, args, reply)
            }
            command::MEMORY_EXPORT..=command::PIECE_IMPORT => {
                self.memory.ipc_command(&mut self.call, number, args, reply)
            }
            command::EVENT_SHARE..=command::EVENT_FENCE => {
                self.memory.ipc_event_command(&mut self.call, number, args, reply)
            }
            command::RESOURCE_OF_DEVICE..=command::CONTEXT_WAIT => self.green_command(number, args, reply),
            command::TENSOR_MAP => self.tensor_map(args, reply),
            command::MODULE_UNLOAD => self.unload(Kind::Module, args),
            command::LIBRARY_UNLOAD => self.unload(Kind::Library, args),
            _ => {
                let (call, mut loading, code) = self.code_parts();
                code.code_command(call, &mut loading, number, args, reply)
            }
        }
    }

    fn unload(&mut self, kind: Kind, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let handle = to_unload(&self.call, kind, args)?;
        // Work that runs from the code must be done: the driver waits here too.
        self.finish_streams(0)?;
        self.code.unload(&mut self.call, kind, handle, args)?;
        self.memory.managed.forget_variables(|it| it.parent == handle);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn mem_info(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let taken = self
            .device_of_context(self.call.header.context)
            .map_or(0, |device| self.checkpoint.taken_by_clones(device));
        self.memory.mem_info(&self.call, taken, args, reply)
    }

    /// Executes a command for boxes, arrays, textures and surfaces.
    fn shape_command(&mut self, number: u16, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        if number == command::COPY_BOX_FROM_CHUNK || number == command::COPY_BOX_TO_CHUNK {
            return self.copy_box_chunk(args, number == command::COPY_BOX_FROM_CHUNK);
        }
        self.memory.shape_command(&mut self.call, &self.code.globals, number, args, reply)
    }

    fn copy_box_chunk(&mut self, args: &mut Reader<'_>, to_device: bool) -> Result<Outcome, Refused> {
        let (chunk, key) = self.memory.copy_box_chunk(&mut self.call, &self.code.globals, args, to_device)?;
        if !to_device {
            self.note_transfer(self.device_of_context(key.context).ok(), key);
        }
        self.when_done(vec![key], Then::Chunk(chunk))?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn pool_command(&mut self, number: u16, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        self.memory.pool_command(&mut self.call, &mut self.scheduler.deferred, number, args, reply)
    }

    /// Called when the frees for which an allocation from a pool has waited are done.
    pub(crate) fn retry_pool_alloc(&mut self, wanted: &PoolAllocation, reply: u16) {
        self.memory.pools.settle(self.driver());
        let mut payload = Writer::new();
        let mut allocate = |executor: &mut Self| {
            let Self { call, memory, scheduler, .. } = executor;
            match memory.allocate_from_pool(call, &mut scheduler.deferred, wanted, None, &mut payload) {
                Ok(result) => result,
                Err(Refused::Code(code)) => code,
                Err(_) => CUDA_ERROR_UNKNOWN,
            }
        };
        let mut result = allocate(self);
        let mut first = true;
        while result == CUDA_ERROR_OUT_OF_MEMORY && self.make_room(command::POOL_ALLOC, first) {
            first = false;
            result = allocate(self);
        }
        self.answer(reply, result, payload.bytes());
    }

    fn tensor_map(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let (map, address) = tensor_maps::encode(self.driver(), args, reply)?;
        // While accesses are tracked, a map names the address for which it was encoded.
        self.checkpoint.tracker.encoded(map, address);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn copy(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let CopyMemory { destination: target, source, bytes, stream } = CopyMemory::read(args)?;
        let key = self.stream_key(stream)?;
        let stream = self.handle_stream(stream)?;
        self.reachable(target, bytes)?;
        self.reachable(source, bytes)?;
        if let Some(result) = self.memory.copy_staged(&self.call, target, source, bytes, stream)? {
            return Ok(Outcome::Done(result));
        }
        self.allow_peer(target)?;
        self.allow_peer(source)?;
        // SAFETY: both ranges are device or pinned memory of this client, checked above.
        check(unsafe { (self.driver().cuMemcpyAsync)(target, source, bytes as usize, stream) })?;
        if window::pinned().contains(&target) {
            self.note_transfer(window::device_of(source), key);
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn copy_bytes(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let CopyBytes { destination: target, stream, bytes } = CopyBytes::read(args)?;
        let stream = self.handle_stream(stream)?;
        self.reachable(target, bytes.len() as u64)?;
        self.allow_peer(target)?;
        // SAFETY: the bytes are this process's ordinary memory, which the driver has taken when it returns.
        Ok(Outcome::Done(unsafe {
            (self.driver().cuMemcpyHtoDAsync_v2)(target, bytes.as_ptr().cast(), bytes.len(), stream)
        }))
    }

    fn copy_chunk(&mut self, args: &mut Reader<'_>, to_device: bool) -> Result<Outcome, Refused> {
        let CopyChunk { device, chunk, bytes, stream } = CopyChunk::read(args)?;
        let (chunk, bytes) = (chunk as usize, bytes as usize);
        if chunk >= CHUNKS || bytes > CHUNK_SIZE {
            return Err(Malformed("a staging chunk that does not exist").into());
        }
        self.reachable(device, bytes as u64)?;
        let host = self.call.staged(chunk, self.memory.first_primary())?;
        self.allow_peer(device)?;
        let key = self.stream_key(stream)?;
        let real = self.handle_stream(stream)?;
        // SAFETY: `bytes` at most a chunk; the device range was checked.
        check(unsafe {
            if to_device {
                (self.driver().cuMemcpyHtoDAsync_v2)(device, host.cast(), bytes, real)
            } else {
                (self.driver().cuMemcpyDtoHAsync_v2)(host.cast(), device, bytes, real)
            }
        })?;
        if !to_device {
            self.note_transfer(self.device_of_context(key.context).ok(), key);
        }
        self.when_done(vec![key], Then::Chunk(chunk))?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn stream_destroy(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let OfStream { stream: handle } = OfStream::read(args)?;
        let object = *self.call.session.objects.get(handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        if object.kind != Kind::Stream {
            return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE));
        }
        self.call.session.objects.remove(handle);
        self.scheduler.free_streams.destroyed(handle);
        match self.call.session.waiting.retire(StreamKey { context: object.context, handle, thread: 0 }) {
            Some(dying) => self.when_done(vec![dying], Then::Destroy(dying))?,
            // SAFETY: the stream is the driver's own, idle, and nobody has a handle of it any more.
            None => check(unsafe { (self.driver().cuStreamDestroy_v2)(object.real) })?,
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn stream_sync(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let OfStream { stream } = OfStream::read(args)?;
        let key = self.stream_key(stream)?;
        if self.call.session.waiting.is_at_rest(key) {
            // A wait that ended in an error counts as done too: the driver returns the error.
            let answer = match self.call.session.waiting.real(key) {
                Some(real) => {
                    self.enter_context(key.context)?;
                    // SAFETY: the stream is the driver's own; a query has no other effect.
                    unsafe { (self.driver().cuStreamQuery)(real) }
                }
                None => CUDA_SUCCESS,
            };
            if answer != CUDA_ERROR_NOT_READY {
                self.note_sticky(answer);
                self.memory.release_pools(self.call.gpu.driver);
                return Ok(Outcome::Done(answer));
            }
        }
        self.handle_stream(stream)?;
        self.when_done(vec![key], Then::Reply(self.call.header.reply))?;
        Ok(Outcome::Later)
    }

    fn event_sync(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let SyncEvent { event } = SyncEvent::read(args)?;
        let real = self.handle_event(event)?;
        // Refers to the event's record as it is now, whatever is recorded later: a stream of our own waits for it, in which
        // nothing else waits.
        let context = self.call.session.objects.get(event).map_or(0, |o| o.context);
        self.enter_context(context)?;
        let driver = self.driver();
        let key = self.call.session.waiting.event_stream(context);
        const NON_BLOCKING: u32 = 1;
        let is_busy = |stream| stream_is_busy(driver, stream);
        let own = self.call.session.waiting.enqueue(key, is_busy, || {
            let mut stream = 0;
            // SAFETY: the out parameter is a local; the context is current.
            match unsafe { (driver.cuStreamCreate)(&raw mut stream, NON_BLOCKING) } {
                CUDA_SUCCESS => Ok(stream),
                error => Err(error),
            }
        });
        let own = own.map_err(Refused::Code)?;
        // SAFETY: both handles are the driver's own.
        check(unsafe { (driver.cuStreamWaitEvent)(own, real, 0) })?;
        check(self.memory.ipc_events.wait_for(driver, event, own))?;
        self.when_done(vec![key], Then::Reply(self.call.header.reply))?;
        Ok(Outcome::Later)
    }

    fn context_sync(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let SyncContext { context } = SyncContext::read(args)?;
        let busy = self.call.session.waiting.busy(context);
        self.when_done(busy, Then::Reply(self.call.header.reply))?;
        Ok(Outcome::Later)
    }

    fn mem_alloc(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let MemAlloc { bytes: size } = MemAlloc::read(args)?;
        let (driver, context) = (self.driver(), self.call.owner());
        let ordinal = self.device_of_context(context)?;
        if size == 0 {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let mut given = self.memory.devices[ordinal].memory.allocate(driver, size, context);
        if matches!(given, Err(MemoryError::Driver(_))) && self.memory.shrink_pools(driver, ordinal) {
            given = self.memory.devices[ordinal].memory.allocate(driver, size, context);
        }
        match given {
            Ok(address) => {
                reply.word(address);
                reply.word(size);
                Ok(Outcome::Done(CUDA_SUCCESS))
            }
            Err(MemoryError::Window(end)) if end != u64::MAX => {
                reply.word(end);
                Ok(Outcome::Done(command::WINDOW_FULL))
            }
            Err(error) => Err(Refused::Code(error.code())),
        }
    }

    /// The worker's number of the device that a context is on.
    pub(crate) fn device_of_context(&self, context: u64) -> Result<usize, Refused> {
        self.call.session.device_of_context(context)
    }

    fn mem_free(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let MemFree { address } = MemFree::read(args)?;
        let found = self.memory.devices.iter().find_map(|d| d.memory.allocations().get(&address)).copied();
        found.ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        if self.memory.free_to_pool(address) {
            return Ok(Outcome::Done(CUDA_SUCCESS));
        }
        // Like the driver, a free waits for all work, in all contexts: another device may be copying from here.
        let busy = self.call.session.waiting.busy(0);
        self.when_done(busy, Then::Free { address, reply: self.call.header.reply })?;
        Ok(Outcome::Later)
    }

    fn window_reserved(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let WindowReserved { device, end } = WindowReserved::read(args)?;
        let device = usize::try_from(device).ok().and_then(|o| self.memory.devices.get_mut(o));
        device.ok_or(Refused::Code(CUDA_ERROR_INVALID_DEVICE))?.memory.client_reserves(end);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn pinned_map(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let PinnedMap { address, size, flags, serial } = PinnedMap::read(args)?;
        let allocation = pinned::Allocation { size, flags, context: self.call.owner() };
        if let Err(refused) = self.memory.pinned_fits(size) {
            // Nobody waits for the memory any longer.
            self.memory.pinned.arrived.take(address, Some(serial));
            return Err(refused);
        }
        Ok(Outcome::Done(self.memory.pinned.map(self.driver(), address, Some(serial), allocation)))
    }

    fn pinned_unmap(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let PinnedUnmap { address } = PinnedUnmap::read(args)?;
        if !self.memory.pinned.allocations().contains_key(&address) {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let busy = self.call.session.waiting.busy(0);
        self.when_done(busy, Then::Unpin { address, reply: self.call.header.reply })?;
        Ok(Outcome::Later)
    }

    fn context_retain(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let MakeContext { context: handle, device, flags } = MakeContext::read(args)?;
        let ordinal = device as usize;
        let device = self.memory.devices.get(ordinal).ok_or(Refused::Code(CUDA_ERROR_INVALID_DEVICE))?;
        if device.used {
            self.reset_primary(ordinal)?;
            self.place_own_code(ordinal).map_err(|failed| Refused::Code(failed.code))?;
        }
        let (real, device) = (self.memory.devices[ordinal].primary, self.memory.devices[ordinal].device);
        if flags != 0 {
            // SAFETY: no pointers. Of no effect on a context that is active already except for its scheduling flags,
            // which concern a waiting thread, and no thread waits in the driver here.
            unsafe { (self.driver().cuDevicePrimaryCtxSetFlags_v2)(device, flags) };
        }
        if self.call.session.objects.get(handle).is_none() {
            self.new_context(handle, real, ordinal, command::CONTEXT_RETAIN, args)?;
        }
        self.api_version(real, reply)
    }

    fn new_context(
        &mut self,
        handle: u64,
        real: u64,
        ordinal: usize,
        call: u16,
        args: &Reader<'_>,
    ) -> Result<(), Refused> {
        let object = Object { kind: Kind::Context, real, context: handle, parent: ordinal as u64, allocates: false };
        if !self.call.session.objects.insert(handle, object) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        self.call.session.objects.record(call, handle, 0, args.all(), None);
        Ok(())
    }

    fn api_version(&self, real: CUcontext, reply: &mut Writer) -> Result<Outcome, Refused> {
        let mut version = 0;
        // SAFETY: the out parameter is a local.
        let result = unsafe { (self.driver().cuCtxGetApiVersion)(real, &raw mut version) };
        reply.word(u64::from(version));
        Ok(Outcome::Done(result))
    }

    fn context_create(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let MakeContext { context: handle, device, flags } = MakeContext::read(args)?;
        let ordinal = device as usize;
        let device = self.memory.devices.get(ordinal).ok_or(Refused::Code(CUDA_ERROR_INVALID_DEVICE))?.device;
        let mut real = 0;
        // SAFETY: the out parameter is a local.
        check(unsafe { (self.driver().cuCtxCreate_v2)(&raw mut real, flags, device) })?;
        self.context_changed();
        self.new_context(handle, real, ordinal, command::CONTEXT_CREATE, args)?;
        self.api_version(real, reply)
    }

    /// Waits until a context is idle, and removes the worker's data for it: all of its objects, as `take` does.
    pub(super) fn clear_context(
        &mut self,
        handle: u64,
        take: impl FnOnce(&mut Objects) -> Vec<(u64, Object)>,
    ) -> Result<(), Refused> {
        // The earlier commands have been executed, but the device may still be busy.
        self.finish_streams(handle)?;
        self.enter_context(handle)?;
        let driver = self.driver();
        for device in &mut self.memory.devices {
            let mine = |a: &crate::resources::memory::Allocation| a.context == handle;
            let gone: Vec<u64> =
                device.memory.allocations().iter().filter(|(_, a)| mine(a)).map(|(address, _)| *address).collect();
            for address in gone {
                device.memory.free(driver, address);
            }
        }
        let pins: Vec<u64> =
            self.memory.pinned.allocations().iter().filter(|(_, a)| a.context == handle).map(|(a, _)| *a).collect();
        for address in pins {
            self.memory.pinned.unmap(driver, address);
        }
        self.memory.managed.forget_context(handle);
        self.memory.clear_arrays(&mut self.call, handle);
        self.code.clear_graphs(driver, handle);
        for (gone, _) in take(&mut self.call.session.objects) {
            self.scheduler.times.forget(gone);
            self.scheduler.free_streams.destroyed(gone);
            self.code.links.forget(driver, gone);
            self.code.loaded.remove(&gone);
        }
        self.scheduler.times.forget_context(driver, handle);
        self.code.forget_code(&mut self.call.session);
        self.call.session.waiting.forget_context(handle);
        self.call.session.objects.unrecord_naming(command::PEER_ENABLE, handle);
        self.memory.pools.forget_context(handle);
        self.code.forget_globals(handle);
        Ok(())
    }

    fn context_destroy(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let EndContext { context: handle } = EndContext::read(args)?;
        let ordinal = self.device_of_context(handle)?;
        let real = self.call.session.objects.get(handle).map_or(0, |o| o.real);
        if real == self.memory.devices[ordinal].primary {
            return Err(Refused::Code(CUDA_ERROR_INVALID_CONTEXT));
        }
        self.clear_context(handle, |objects| objects.destroy_context(handle, command::CONTEXT_DESTROY, args.all()))?;
        // SAFETY: the context is the driver's own, made by CONTEXT_CREATE, and not used again.
        let result = unsafe { (self.driver().cuCtxDestroy_v2)(real) };
        self.context_changed();
        Ok(Outcome::Done(result))
    }

    fn context_release(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        self.release_primary(args)?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn context_reset(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ordinal = self.release_primary(args)?;
        // Other contexts may use memory that was allocated from these pools.
        self.finish_streams(0)?;
        self.memory.reset_pools(self.call.gpu.driver, ordinal);
        self.reset_primary(ordinal)?;
        self.place_own_code(ordinal).map_err(|failed| Refused::Code(failed.code))?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Removes all of the client's objects in a primary context, and returns its device.
    fn release_primary(&mut self, args: &mut Reader<'_>) -> Result<usize, Refused> {
        let EndContext { context: handle } = EndContext::read(args)?;
        let ordinal = self.device_of_context(handle)?;
        self.end_green_contexts_of(handle)?;
        self.clear_context(handle, |objects| objects.remove_context(handle))?;
        self.call.session.objects.remove(handle);
        // The context of the command does not exist any more.
        self.call.header.context = 0;
        self.memory.devices[ordinal].used = true;
        self.memory.kernel_heaps.release(self.call.gpu.driver, ordinal);
        self.context_changed();
        Ok(ordinal)
    }

    /// Resets a primary context. The worker's own resources in it are removed before and restored afterwards.
    pub(crate) fn reset_primary(&mut self, ordinal: usize) -> Result<(), Refused> {
        // Copies of other devices use the same staging.
        self.finish_streams(0)?;
        self.checkpoint.wait_for_background();
        let driver = self.driver();
        match &mut self.checkpoint.engine {
            Some(engine) => engine.release(driver, ordinal),
            // A disk hangs, and no lane will use the device any more.
            None => {
                if ordinal == 0 {
                    self.checkpoint.buffers.unregister(driver);
                }
                self.checkpoint.reset_meanwhile.push(ordinal);
            }
        }
        self.checkpoint.peek.release(driver, ordinal);
        self.memory.kernel_heaps.release(driver, ordinal);
        self.checkpoint.release_hashers(driver, ordinal);
        if ordinal == 0 {
            self.call.session.staging.unregister(driver);
            self.memory.managed.transit.release(driver);
        }
        self.memory.ipc_events.unregister(&mut self.call, self.memory.first_primary(), ordinal);
        let device = self.memory.devices[ordinal].device;
        let mut real = 0;
        // SAFETY: the reset destroys what is left in the context; it is retained anew at once.
        let result = unsafe {
            let reset = (self.driver().cuDevicePrimaryCtxReset_v2)(device);
            if reset == CUDA_SUCCESS { (self.driver().cuDevicePrimaryCtxRetain)(&raw mut real, device) } else { reset }
        };
        self.context_changed();
        check(result)?;
        self.memory.devices[ordinal].primary = real;
        self.memory.devices[ordinal].used = false;
        self.memory.devices[ordinal].reset = true;
        // Done as at a worker's start, so that later code gets the same addresses.
        let hasher = self.checkpoint.hasher.prepare(self.driver(), (ordinal, device), real);
        self.context_changed();
        hasher.map_err(|failed| Refused::Code(failed.code))?;
        self.reserve_for_code(ordinal, self.memory.devices[ordinal].code_reserve.bytes())
            .map_err(|failed| Refused::Code(failed.code))?;
        let primaries: Vec<_> = self.memory.devices.iter().map(|it| it.primary).collect();
        let peek = self.checkpoint.peek.prepare(driver, &primaries);
        self.context_changed();
        peek.map_err(|failed| Refused::Code(failed.code))?;
        self.memory.ipc_events.register(&mut self.call, self.memory.first_primary(), ordinal)
    }

    /// Makes the reserve for code in a primary context that has none.
    fn reserve_for_code(&mut self, ordinal: usize, bytes: u64) -> Result<(), CallFailed> {
        let made = CodeReserve::make(self.call.gpu.driver, self.memory.devices[ordinal].primary, bytes);
        self.context_changed();
        self.memory.devices[ordinal].code_reserve = made?;
        Ok(())
    }

    /// Changes the reserve for code to what an image's worker had, before any code is loaded.
    pub(crate) fn change_code_reserve(&mut self, ordinal: usize, bytes: u64) -> Result<(), CallFailed> {
        let driver = self.call.gpu.driver;
        let Some(device) = self.memory.devices.get_mut(ordinal).filter(|it| it.code_reserve.bytes() != bytes) else {
            return Ok(());
        };
        let released = std::mem::take(&mut device.code_reserve).release(driver, device.primary);
        self.context_changed();
        released?;
        self.reserve_for_code(ordinal, bytes)
    }
}

#[cfg(test)]
mod tests {
    use rekindle_wire::command::LoadCode;
    use rekindle_wire::layout::{SHARED_SIZE, Shared};
    use rekindle_wire::ring::CommandHeader;

    use super::*;
    use crate::resources::code_store::Image;
    use crate::serve::fixture;

    #[test]
    fn contexts_that_come_and_go_with_code_leave_nothing_of_it_in_the_worker() {
        let mut worker = fixture::executor();
        let layout = std::alloc::Layout::from_size_align(SHARED_SIZE, 4096).unwrap();
        // SAFETY: the layout has a size; the memory is leaked, so it stays.
        worker.call.session.shared = Some(unsafe { Shared::new(std::alloc::alloc_zeroed(layout)) });
        for number in 1..40 {
            let (context, module) = (Kind::Context.handle(number), Kind::Module.handle(number));
            let made = Object { kind: Kind::Context, real: 0x1000, context, parent: 0, allocates: false };
            assert!(worker.call.session.objects.insert(context, made));
            worker.call.session.objects.record(command::CONTEXT_CREATE, context, 0, &[], None);
            let text = format!(".version 7.0\n.target sm_75\n.global .u32 a{number};");
            let image = [&1_u64.to_le_bytes(), &(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
            // As on a device. This worker has none, and its driver would know nothing of the code.
            let hash = rekindle_images::CodeHash::of(&image);
            worker.code.store.keep(Image::new(hash, image.clone(), (9, 0)).unwrap());
            worker.code.store.part(number, 0, image.len() as u64, &image).unwrap();
            worker.call.header = CommandHeader { call: command::MODULE_LOAD, context, ..CommandHeader::default() };
            let mut args = Writer::new();
            LoadCode { handle: module, image: number, options: &[] }.write(&mut args);
            let mut args = Reader::new(args.bytes());
            worker.command(command::MODULE_LOAD, &mut args, &mut Writer::new()).unwrap();
            assert_eq!((worker.code.loaded.len(), worker.call.session.objects.code().1.len()), (1, 1));
            worker
                .clear_context(context, |objects| objects.destroy_context(context, command::CONTEXT_DESTROY, &[]))
                .unwrap();
            assert!(worker.code.loaded.is_empty() && worker.code.globals.is_empty());
            assert!(worker.call.session.objects.log().is_empty());
            assert_eq!(worker.code.store.bytes_besides(&[].into()), 0);
        }
    }
}
