//! The part of a deferred command that is done at once, since the caller would have its result from the driver at once.

use rekindle_cuda_abi::types::*;
use rekindle_wire::boxes;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, CopyBoxBytes, CopyBoxChunk, CopyBytes, CopyChunk, Kind, MAX_INLINE_BYTES};
use rekindle_wire::reply;
use rekindle_wire::ring::CommandHeader;

use crate::resources::Memory;
use crate::schedule::Scheduler;
use crate::schedule::deferred::{DeferredCommands, Progress};
use crate::schedule::dependencies::{Dependencies, EventUse, word};
use crate::schedule::event_fields;
use crate::session::Session;
use crate::session::call::Call;
use crate::session::objects::Object;
use crate::session::outcome::Refused;

impl Scheduler {
    /// Gives deferred commands another event in place of this one, with its record, so that this event can be recorded anew. Returns that
    /// one's handle.
    pub(crate) fn set_event_aside(&mut self, call: &mut Call, memory: &Memory, event: u64) -> Result<u64, Refused> {
        let object = *call.session.objects.get(event).ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let created = call.session.objects.log().iter().find(|r| r.owner == event).cloned();
        let created = created.ok_or(Refused::Code(CUDA_ERROR_INVALID_HANDLE))?;
        let flags = word(&created.args, 1).unwrap_or(0);
        call.enter(object.context)?;
        let mut real = 0;
        // SAFETY: the out parameter is a local.
        match unsafe { (call.driver().cuEventCreate)(&raw mut real, flags as u32) } {
            CUDA_SUCCESS => {}
            error => return Err(Refused::Code(error)),
        }
        // The client's numbers count up from 1.
        self.deferred.next += 1;
        let aside = Kind::Event.handle(1 << 47 | self.deferred.next);
        let mut args = Writer::new();
        args.word(aside);
        args.word(flags);
        call.session.objects.insert(aside, object);
        call.session.objects.record(created.call, aside, object.context, args.bytes(), None);
        call.session.objects.replace(event, Object { real, ..object });
        if let Some(when) = self.times.recorded.remove(&event) {
            self.times.recorded.insert(aside, when);
        }
        if let Some(age) = self.times.ages.remove(&event) {
            self.times.ages.insert(aside, age);
        }
        let is = |e: &(u64, EventUse)| e.0 == event;
        for entry in self.deferred.list.iter_mut().filter(|e| e.dependencies.events.iter().any(is)) {
            for use_ in entry.dependencies.events.iter_mut().filter(|e| is(e)) {
                use_.0 = aside;
            }
            event_fields::rename(&self.shapes, entry.header.call, &mut entry.parameters, event, aside)?;
        }
        // The event is destroyed when no deferred command names it any more.
        let destroy =
            command::number(&call.session.table, "cuEventDestroy_v2").ok_or(Refused::UnknownCall(u16::MAX))?;
        let header = CommandHeader { call: destroy, context: object.context, ..Default::default() };
        let parameters = aside.to_le_bytes().to_vec();
        let dependencies = self.dependencies(&call.session, memory, &header, &parameters);
        self.deferred.add(header, parameters, dependencies, Progress::Queued, None);
        self.deferred.changed = true;
        Ok(aside)
    }
}

impl DeferredCommands {
    /// Copies the bytes of a staging chunk: there are few chunks, and the client needs them for other streams. Returns `false`
    /// if the command names no chunk: then it fails when it is executed.
    pub(crate) fn defer_chunk(
        &mut self,
        session: &Session,
        header: CommandHeader,
        parameters: &[u8],
        dependencies: &Dependencies,
    ) -> Result<bool, Refused> {
        let CopyChunk { device, chunk, bytes, stream } = CopyChunk::read(&mut Reader::new(parameters))?;
        let (chunk, bytes) = (chunk as usize, bytes as usize);
        let Some(staged) = session.staging.content(chunk, bytes) else {
            return Ok(false);
        };
        for (number, copied) in staged.chunks(MAX_INLINE_BYTES).enumerate() {
            let offset = number * MAX_INLINE_BYTES;
            let mut args = Writer::new();
            let destination = device.wrapping_add(offset as u64);
            CopyBytes { destination, stream, bytes: copied }.write(&mut args);
            let header = CommandHeader { call: command::COPY_BYTES, ..header };
            self.add(header, args.into_bytes(), dependencies.clone(), Progress::Queued, None);
        }
        chunk_is_free(session, chunk);
        Ok(true)
    }

    /// The same for the rows of a box. The copy is divided like a box that does not fit into a chunk.
    pub(crate) fn defer_box_chunk(
        &mut self,
        session: &Session,
        header: CommandHeader,
        parameters: &[u8],
        dependencies: &Dependencies,
    ) -> Result<bool, Refused> {
        let copy = CopyBoxChunk::read(&mut Reader::new(parameters))?;
        let (Ok(chunk), Some(bytes)) = (usize::try_from(copy.chunk), boxes::bytes(copy.size)) else {
            return Ok(false);
        };
        let Some(staged) = usize::try_from(bytes).ok().and_then(|bytes| session.staging.content(chunk, bytes)) else {
            return Ok(false);
        };
        let mut rest = &staged[..];
        for part in boxes::cut(copy.size, MAX_INLINE_BYTES as u64) {
            let Some(end) = copy.end.part(part.at) else {
                return Ok(false);
            };
            let Some((copied, behind)) = rest.split_at_checked(part.bytes() as usize) else {
                return Ok(false);
            };
            rest = behind;
            let mut args = Writer::new();
            let (size, stream) = (part.size, copy.stream);
            CopyBoxBytes { first: 0, second: 0, end, size, stream, bytes: copied }.write(&mut args);
            let header = CommandHeader { call: command::COPY_BOX_BYTES, ..header };
            self.add(header, args.into_bytes(), dependencies.clone(), Progress::Queued, None);
        }
        chunk_is_free(session, chunk);
        Ok(true)
    }
}

fn chunk_is_free(session: &Session, chunk: usize) {
    if let Some(shared) = session.shared {
        reply::finish(shared.chunk(chunk));
    }
}
