//! Green contexts: making and destroying them and what they are made of, and the events of whole contexts.
//!
//! A green context is a context of the driver's with some of the multiprocessors. Its streams are its own; all else that a
//! client makes in it belongs to the primary context of its device ([`Session::owner`](crate::session::Session::owner)).

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{
    self, ContextEvent, EndContext, Kind, MakeGreenContext, ResourceDescribe, ResourceOfContext, ResourceOfDevice,
    ResourceSplit,
};

use crate::serve::executor::Executor;
use crate::session::green::GreenContext;
use crate::session::objects::Object;
use crate::session::outcome::{Outcome, Refused, check};

/// The most parts that a resource is split into: more than any device has multiprocessors.
const MOST_PARTS: usize = 1024;

/// What a restore needs to have been made again as it was.
const TAKEN: Malformed = Malformed("a new handle that is taken, or of another kind");

/// Appends what the client's program may read of a resource.
fn tell(reply: &mut Writer, resource: &CUdevResource) {
    let CUdevSmResource { count, smallest_part, alignment } = resource.processors;
    [count, smallest_part, alignment].into_iter().for_each(|word| reply.word(u64::from(word)));
}

/// Checks that a resource has as many multiprocessors as it had when it was made first; 0 stands for any number.
fn is_as_expected(resource: &CUdevResource, expected: u64) -> Result<(), Refused> {
    if expected == 0 || u64::from(resource.processors.count) == expected {
        return Ok(());
    }
    // The driver's word for a resource that does not fit.
    Err(Refused::Code(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION))
}

impl Executor {
    /// Executes a command for resources, green contexts, or events of whole contexts.
    pub(crate) fn green_command(
        &mut self,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match number {
            command::RESOURCE_OF_DEVICE => self.resource_of_device(args, reply),
            command::RESOURCE_OF_CONTEXT => self.resource_of_context(args, reply),
            command::RESOURCE_SPLIT => self.resource_split(args, reply),
            command::RESOURCE_DESCRIBE => self.resource_describe(args),
            command::GREEN_CONTEXT_CREATE => self.green_context_create(args),
            command::GREEN_CONTEXT_DESTROY => self.green_context_destroy(args),
            command::CONTEXT_RECORD => self.context_record(args),
            command::CONTEXT_WAIT => self.context_wait(args),
            other => Err(Refused::UnknownCall(other)),
        }
    }

    fn real_device(&self, ordinal: u64) -> Result<CUdevice, Refused> {
        let device = usize::try_from(ordinal).ok().and_then(|ordinal| self.memory.devices.get(ordinal));
        device.map(|device| device.device).ok_or(Refused::Code(CUDA_ERROR_INVALID_DEVICE))
    }

    /// Keeps a new resource, which the record makes again.
    fn keep_resource(
        &mut self,
        call: u16,
        (handle, resource): (u64, CUdevResource),
        record: &Writer,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        if !self.call.session.green.keep_resource(handle, resource) {
            return Err(TAKEN.into());
        }
        self.call.session.objects.record(call, handle, 0, record.bytes(), None);
        tell(reply, &resource);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn resource_of_device(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let wanted = ResourceOfDevice::read(args)?;
        let device = self.real_device(wanted.device)?;
        let mut resource = CUdevResource::default();
        // SAFETY: the out parameter is a local.
        check(unsafe { (self.driver().cuDeviceGetDevResource)(device, &raw mut resource, CU_DEV_RESOURCE_TYPE_SM) })?;
        is_as_expected(&resource, wanted.expected)?;
        let mut record = Writer::new();
        ResourceOfDevice { expected: u64::from(resource.processors.count), ..wanted }.write(&mut record);
        self.keep_resource(command::RESOURCE_OF_DEVICE, (wanted.resource, resource), &record, reply)
    }

    /// The resource is that of a green context. If there is none any more, as in a restore, one is made to be asked.
    fn resource_of_context(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let wanted = ResourceOfContext::read(args)?;
        let device = self.real_device(wanted.device)?;
        let driver = self.driver();
        let living = self.call.session.green.made_of(wanted.descriptor).map(|it| it.real);
        let mut green = living.unwrap_or(0);
        if living.is_none() {
            let descriptor = self.call.session.green.descriptor(wanted.descriptor).map_err(Refused::Code)?;
            // SAFETY: the out parameter is a local, the descriptor the driver's own.
            check(unsafe {
                (driver.cuGreenCtxCreate)(&raw mut green, descriptor, device, CU_GREEN_CTX_DEFAULT_STREAM)
            })?;
        }
        let mut resource = CUdevResource::default();
        // SAFETY: the out parameter is a local, the green context the driver's own.
        let asked =
            check(unsafe { (driver.cuGreenCtxGetDevResource)(green, &raw mut resource, CU_DEV_RESOURCE_TYPE_SM) });
        if living.is_none() {
            // SAFETY: the green context was made above, and nobody else has it.
            check(unsafe { (driver.cuGreenCtxDestroy)(green) })?;
            self.context_changed();
        }
        asked?;
        is_as_expected(&resource, wanted.expected)?;
        let mut record = Writer::new();
        ResourceOfContext { expected: u64::from(resource.processors.count), ..wanted }.write(&mut record);
        self.keep_resource(command::RESOURCE_OF_CONTEXT, (wanted.resource, resource), &record, reply)
    }

    fn resource_split(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let wanted = ResourceSplit::read(args)?;
        if wanted.parts.len() > MOST_PARTS {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let whole = self.call.session.green.resource(wanted.resource).map_err(Refused::Code)?;
        let mut count = wanted.parts.len() as u32;
        let (mut parts, mut rest) = (vec![CUdevResource::default(); wanted.parts.len()], CUdevResource::default());
        let into = if parts.is_empty() { std::ptr::null_mut() } else { parts.as_mut_ptr() };
        let left = if wanted.rest == 0 { std::ptr::null_mut() } else { &raw mut rest };
        // SAFETY: the array has `count` elements, or is null; the other pointers are to locals, or null.
        check(unsafe {
            let split = self.driver().cuDevSmResourceSplitByCount;
            split(into, &raw mut count, &raw const whole, left, wanted.flags, wanted.least)
        })?;
        reply.word(u64::from(count));
        if parts.is_empty() {
            return Ok(Outcome::Done(CUDA_SUCCESS));
        }
        // The driver may have made fewer parts, and what is left may be nothing.
        parts.truncate(count as usize);
        let made = parts.iter().zip(&wanted.parts).map(|(part, handle)| (*handle, *part));
        let made: Vec<_> = made.chain((wanted.rest != 0).then_some((wanted.rest, rest))).collect();
        let counts: Vec<u64> = made.iter().map(|(_, it)| u64::from(it.processors.count)).collect();
        if !wanted.expected.is_empty() && wanted.expected != counts {
            return Err(Refused::Code(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION));
        }
        for (handle, resource) in &made {
            if !self.call.session.green.keep_resource(*handle, *resource) {
                return Err(TAKEN.into());
            }
            tell(reply, resource);
        }
        let (owner, mut record) = (made.first().map_or(wanted.resource, |it| it.0), Writer::new());
        ResourceSplit { expected: counts, ..wanted }.write(&mut record);
        self.call.session.objects.record(command::RESOURCE_SPLIT, owner, 0, record.bytes(), None);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn resource_describe(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ResourceDescribe { descriptor: handle, resources } = ResourceDescribe::read(args)?;
        let resources = resources.iter().map(|it| self.call.session.green.resource(*it));
        let mut resources: Vec<_> = resources.collect::<Result<_, _>>().map_err(Refused::Code)?;
        let mut real = 0;
        // SAFETY: the out parameter is a local; the array has as many elements as it says.
        check(unsafe {
            let generate = self.driver().cuDevResourceGenerateDesc;
            generate(&raw mut real, resources.as_mut_ptr(), resources.len() as u32)
        })?;
        if !self.call.session.green.keep_descriptor(handle, real) {
            return Err(TAKEN.into());
        }
        self.call.session.objects.record(command::RESOURCE_DESCRIBE, handle, 0, args.all(), None);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn green_context_create(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let MakeGreenContext { context: handle, primary, descriptor, flags } = MakeGreenContext::read(args)?;
        let ordinal = self.device_of_context(primary)?;
        let device = self.real_device(ordinal as u64)?;
        if self.call.session.objects.get(primary).is_none_or(|it| it.real != self.memory.devices[ordinal].primary) {
            return Err(Refused::Code(CUDA_ERROR_INVALID_CONTEXT));
        }
        let real_descriptor = self.call.session.green.descriptor(descriptor).map_err(Refused::Code)?;
        let driver = self.driver();
        let (mut green, mut real) = (0, 0);
        // SAFETY: the out parameter is a local, the descriptor the driver's own.
        check(unsafe { (driver.cuGreenCtxCreate)(&raw mut green, real_descriptor, device, flags) })?;
        // SAFETY: as above.
        let converted = check(unsafe { (driver.cuCtxFromGreenCtx)(&raw mut real, green) });
        self.context_changed();
        let object = Object { kind: Kind::Context, real, context: primary, parent: ordinal as u64, allocates: false };
        let kept = converted.and_then(|()| match self.call.session.objects.insert(handle, object) {
            true => Ok(()),
            false => Err(TAKEN.into()),
        });
        if let Err(refused) = kept {
            // SAFETY: made above, and nobody else has it.
            unsafe { (driver.cuGreenCtxDestroy)(green) };
            return Err(refused);
        }
        self.call.session.green.keep_context(handle, GreenContext { real: green, descriptor });
        self.call.session.objects.record(command::GREEN_CONTEXT_CREATE, handle, 0, args.all(), None);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn green_context_destroy(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let EndContext { context: handle } = EndContext::read(args)?;
        self.end_green_context(handle)?;
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Destroys a green context, with its streams: the driver would keep those, of no use to anybody.
    fn end_green_context(&mut self, handle: u64) -> Result<(), Refused> {
        let green = self.call.session.green.context(handle).ok_or(Refused::Code(CUDA_ERROR_INVALID_CONTEXT))?;
        // The earlier commands have been executed, but the device may still be busy.
        self.finish_streams(handle)?;
        let driver = self.driver();
        let objects = &self.call.session.objects;
        let mine = |it: &Object| it.context == handle;
        let streams = objects.of_kind(Kind::Stream).into_iter().filter_map(|it| objects.get(it).copied()).filter(mine);
        let streams: Vec<CUstream> = streams.map(|it| it.real).collect();
        let (own, events) = self.call.session.waiting.own_streams(handle);
        self.clear_context(handle, |objects| objects.remove_context(handle))?;
        self.enter_context(handle)?;
        for stream in streams.into_iter().chain(own) {
            // SAFETY: the stream is the driver's own, and nothing names it any more.
            unsafe { (driver.cuStreamDestroy_v2)(stream) };
        }
        for event in events {
            // SAFETY: as above.
            unsafe { (driver.cuEventDestroy_v2)(event) };
        }
        self.call.session.objects.remove(handle);
        self.call.session.green.take_context(handle);
        if self.call.header.context == handle {
            // The context of the command does not exist any more.
            self.call.header.context = 0;
        }
        self.enter_context(0)?;
        // SAFETY: the green context is the driver's own, and not used again.
        let result = unsafe { (driver.cuGreenCtxDestroy)(green.real) };
        self.context_changed();
        check(result)
    }

    /// Destroys the green contexts of a primary context, which is about to end. A client that keeps to its protocol has
    /// destroyed them before.
    pub(crate) fn end_green_contexts_of(&mut self, primary: u64) -> Result<(), Refused> {
        self.call.session.objects.green_contexts(primary).into_iter().try_for_each(|it| self.end_green_context(it))
    }

    fn context_record(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ContextEvent { context, event } = ContextEvent::read(args)?;
        let (real, event_real) = (self.real_context(context)?, self.handle_event(event)?);
        let driver = self.driver();
        // SAFETY: the handles are the driver's own.
        check(unsafe {
            match self.call.session.green.context(context) {
                Some(green) => (driver.cuGreenCtxRecordEvent)(green.real, event_real),
                None => (driver.cuCtxRecordEvent)(real, event_real),
            }
        })?;
        self.scheduler.times.event_recorded(event);
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn context_wait(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ContextEvent { context, event } = ContextEvent::read(args)?;
        let (real, event) = (self.real_context(context)?, self.handle_event(event)?);
        let driver = self.driver();
        // SAFETY: the handles are the driver's own.
        Ok(Outcome::Done(unsafe {
            match self.call.session.green.context(context) {
                Some(green) => (driver.cuGreenCtxWaitEvent)(green.real, event),
                None => (driver.cuCtxWaitEvent)(real, event),
            }
        }))
    }

    fn real_context(&self, context: u64) -> Result<CUcontext, Refused> {
        let object = self.call.session.objects.get(context).filter(|it| it.kind == Kind::Context);
        object.map(|it| it.real).ok_or(Refused::Code(CUDA_ERROR_INVALID_CONTEXT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::fixture;

    /// Splits a resource into one part, of which a restore knows how many multiprocessors it had. This driver's parts have none.
    fn split(worker: &mut Executor, part: u64, expected: Vec<u64>) -> Result<Outcome, Refused> {
        let resource = Kind::Resource.handle(1);
        let mut args = Writer::new();
        let parts = vec![Kind::Resource.handle(part)];
        ResourceSplit { resource, flags: 0, least: 8, rest: 0, parts, expected }.write(&mut args);
        worker.green_command(command::RESOURCE_SPLIT, &mut Reader::new(args.bytes()), &mut Writer::new())
    }

    #[test]
    fn a_part_that_has_not_as_many_multiprocessors_as_it_had_is_refused() {
        let mut worker = fixture::executor();
        assert!(worker.call.session.green.keep_resource(Kind::Resource.handle(1), CUdevResource::default()));
        assert!(matches!(split(&mut worker, 2, vec![]), Ok(Outcome::Done(CUDA_SUCCESS))));
        assert!(matches!(split(&mut worker, 3, vec![0]), Ok(Outcome::Done(CUDA_SUCCESS))));
        let refused = split(&mut worker, 4, vec![8]);
        assert!(matches!(refused, Err(Refused::Code(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION))));
        assert_eq!(worker.call.session.objects.log().len(), 2, "what is refused is not made again");
        assert!(matches!(split(&mut worker, 2, vec![]), Err(Refused::Malformed(_))), "the handle is taken");
    }
}
