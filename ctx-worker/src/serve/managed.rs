//! Moves managed memory between the client's pages and the device. `resources/managed.rs` has the states.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, Clause, ManagedMap, ManagedToDevice, ManagedUnmap, ManagedVariable};
use rekindle_wire::ring::CommandHeader;
use rekindle_wire::userfault::{Fault, Userfault};
use rekindle_wire::window;
use tracing::{error, warn};

use crate::cores::cores;
use crate::gpu::driver::checked;
use crate::resources::globals::is_global;
use crate::resources::managed::{BATCH, CHUNK, ManagedError, Owned, Pages, Part, Side, Variable};
use crate::resources::pinned::is_sealed;
use crate::schedule::rest::busy_stream;
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};
use crate::session::state;
use crate::signal_stack::Thread;

/// Does something with parts of a buffer, several at a time: one processor fills memory slower than the link does. Where there can be
/// no more threads, this one does all of it.
fn in_parts(buffer: &mut [u8], act: impl Fn(usize, &mut [u8]) -> io::Result<()> + Sync) -> io::Result<()> {
    const MOST: usize = 8;
    let threads = (buffer.len() / CHUNK as usize).clamp(1, MOST).min(cores().div_ceil(2));
    if threads == 1 {
        return act(0, buffer);
    }
    let length = buffer.len().div_ceil(threads).next_multiple_of(4096);
    let parts = Mutex::new(buffer.chunks_mut(length).enumerate());
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || -> io::Result<()> {
        while let Some((index, part)) = next() {
            act(index * length, part)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let helper = || Thread::named("managed").spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..threads).filter_map(|_| helper()).collect();
        let own = work();
        let failed = || io::Error::other("a thread has panicked");
        helpers.into_iter().map(|it| it.join().unwrap_or_else(|_| Err(failed()))).fold(own, Result::and)
    })
}

/// Whether a command may read or write memory of the client's by its address.
fn uses_memory(call: u16, fills: bool) -> bool {
    use Clause::{Launches, LaunchesEach, LaunchesGraph, Operates, Reads, ReadsBox, Writes, WritesBox};
    if call < command::FIRST {
        return fills;
    }
    let uses = |clause: &Clause| {
        matches!(
            clause,
            Reads { .. }
                | Writes { .. }
                | ReadsBox { .. }
                | WritesBox { .. }
                | Operates(_)
                | Launches
                | LaunchesEach(_)
                | LaunchesGraph(_)
        )
    };
    command::declaration(call).is_none_or(|it| it.clauses.iter().any(uses))
}

impl Executor {
    /// Called before a command goes to the driver: what it may use becomes the device's. An error is the command's result.
    pub(crate) fn bring_managed_to_device(&mut self, header: &CommandHeader) -> Result<(), CUresult> {
        let uses = || uses_memory(header.call, self.checkpoint.tracker.is_fill(header.call));
        let concerns = self.memory.managed.is_with_client() || self.memory.managed.has_fresh();
        if !concerns || header.call == command::MANAGED_TO_DEVICE || !uses() {
            return Ok(());
        }
        self.memory.managed.age();
        for (side, part) in self.memory.managed.parts(|side| side != Side::Device) {
            self.take_from_client(side, &part).map_err(|why| {
                error!("managed memory does not get to the device: {why}");
                why.code()
            })?;
        }
        Ok(())
    }

    /// As [`Executor::bring_managed_to_device`], of the pages that have an address of a range.
    fn bring_range_to_device(&mut self, range: &Range<u64>) -> Result<(), ManagedError> {
        let mut parts = self.memory.managed.parts(|side| side != Side::Device);
        parts.retain(|(_, part)| part.range.start < range.end && range.start < part.range.end);
        parts.into_iter().try_for_each(|(side, part)| self.take_from_client(side, &part))
    }

    fn take_from_client(&mut self, side: Side, part: &Part) -> Result<(), ManagedError> {
        if side == Side::Process {
            let faults = self.userfault()?;
            // No thread writes from here on until it has the page again, so that the copy is all of its writes. A client that ends its
            // context may have unmapped the pages already; the file has them.
            match faults.protect(&part.range, true) {
                Err(why) if why.raw_os_error() == Some(libc::ENOENT) => {}
                done => done?,
            }
            for (owned, context) in self.memory.managed.owned(part.base, &part.range) {
                let mut at = owned.start;
                while at < owned.end {
                    let bytes = BATCH.min(owned.end - at);
                    if let Err(why) = self.copy_to_device(context, at, bytes) {
                        // They stay the client's.
                        let _ = faults.protect(&part.range, false);
                        return Err(why);
                    }
                    at += bytes;
                }
            }
        }
        Ok(self.memory.managed.take_away(part)?)
    }

    /// Copies what the client has there to the device, as a command: its writes are expected, counted and waited for as those of
    /// any other.
    fn copy_to_device(&mut self, context: u64, address: u64, bytes: u64) -> Result<(), ManagedError> {
        let header = CommandHeader { call: command::MANAGED_TO_DEVICE, context, ..CommandHeader::default() };
        let mut parameters = Writer::new();
        ManagedToDevice { address, bytes }.write(&mut parameters);
        self.managed_copied = None;
        self.perform(header, parameters.bytes()).map_err(ManagedError::Context)?;
        // A command that was refused before it was carried out has copied nothing.
        self.managed_copied.take().unwrap_or(Err(ManagedError::Context(Refused::Code(CUDA_ERROR_OUT_OF_MEMORY))))
    }

    /// The command of [`Executor::copy_to_device`].
    pub(super) fn managed_to_device(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ManagedToDevice { address, bytes } = ManagedToDevice::read(args)?;
        // A client that sends this has the copy, if it is one of its own memory.
        let Some((_, part)) = self.memory.managed.chunk_at(address) else {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        };
        let range = address..address.checked_add(bytes).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        let is_owned = matches!(self.memory.managed.owned(part.base, &range).as_slice(), [(it, _)] if *it == range);
        if bytes > BATCH || range.end > self.memory.managed.end_of(part.base) || !is_owned {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let copied = self.copy_pages_to_device(&part, address, bytes);
        let result = copied.as_ref().err().map_or(CUDA_SUCCESS, ManagedError::code);
        self.managed_copied = Some(copied);
        Ok(Outcome::Done(result))
    }

    fn copy_pages_to_device(&mut self, part: &Part, address: u64, bytes: u64) -> Result<(), ManagedError> {
        self.through_transit(bytes, |worker, content| {
            match worker.memory.managed.pages(part.base) {
                Some(pages) => {
                    in_parts(content, |at, part_of_it| pages.read(part_of_it, address - part.base + at as u64))?
                }
                None => return Err(io::Error::from(io::ErrorKind::NotFound).into()),
            }
            let (driver, stream) = (worker.driver(), worker.own_stream(address)?);
            // SAFETY: the device's range is the client's, checked by the callers; the copy has ended when the content changes.
            unsafe {
                let enqueued = (driver.cuMemcpyHtoDAsync_v2)(address, content.as_ptr().cast(), content.len(), stream);
                checked("cuMemcpyHtoDAsync", enqueued)?;
                Ok(checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))?)
            }
        })
    }

    /// Does something with so many bytes of host memory that the driver knows.
    fn through_transit(
        &mut self,
        bytes: u64,
        act: impl FnOnce(&mut Self, &mut [u8]) -> Result<(), ManagedError>,
    ) -> Result<(), ManagedError> {
        self.enter_real(self.memory.first_primary()).map_err(ManagedError::Context)?;
        let driver = self.driver();
        let mut transit = std::mem::take(&mut self.memory.managed.transit);
        let done = match transit.bytes(driver, bytes as usize) {
            Ok(content) => act(self, content),
            Err(why) => Err(why.into()),
        };
        self.memory.managed.transit = transit;
        done
    }

    /// A stream in which nothing of the client's runs, on the device that has an address, in whose context the driver is from here
    /// on.
    fn own_stream(&mut self, address: u64) -> Result<CUstream, ManagedError> {
        let device = window::device_of(address).and_then(|it| Some((it, self.memory.devices.get(it)?.primary)));
        let Some((ordinal, primary)) = device else { return self.stream_for_variable(address) };
        self.enter_real(primary).map_err(ManagedError::Context)?;
        // Before the worker has a client, there is none, and nothing to copy.
        Ok(self.checkpoint.hasher.stream(ordinal).unwrap_or(CU_STREAM_LEGACY))
    }

    /// As [`Executor::own_stream`], for a variable. Its context may be one of the client's own, where the worker has no stream.
    fn stream_for_variable(&mut self, address: u64) -> Result<CUstream, ManagedError> {
        const NONE: ManagedError = ManagedError::Context(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        let (_, part) = self.memory.managed.chunk_at(address).ok_or(NONE)?;
        let owned = self.memory.managed.owned(part.base, &(address..address + 1));
        let context = owned.first().ok_or(NONE)?.1;
        let session = &self.call.session;
        let ordinal = session.device_of_context(context).map_err(ManagedError::Context)?;
        let real = session.objects.get(context).ok_or(NONE)?.real;
        let is_primary = self.memory.devices.get(ordinal).is_some_and(|it| it.primary == real);
        self.enter_real(real).map_err(ManagedError::Context)?;
        let own = if is_primary { self.checkpoint.hasher.stream(ordinal) } else { None };
        Ok(own.unwrap_or(CU_STREAM_PER_THREAD))
    }

    fn userfault(&self) -> Result<Arc<Userfault>, ManagedError> {
        let faults = self.memory.managed.faults.clone();
        faults.ok_or_else(|| ManagedError::Pages(io::ErrorKind::NotConnected.into()))
    }

    /// Gives the client pages that the device has. The devices are idle. Nothing has changed if this fails.
    fn give_to_client(&mut self, part: &Part, protected: bool) -> Result<(), ManagedError> {
        self.open_all_memory();
        let faults = self.userfault()?;
        let mut at = part.range.start;
        let mut given = Ok(());
        while at < part.range.end && given.is_ok() {
            let bytes = BATCH.min(part.range.end - at);
            given = self.through_transit(bytes, |worker, content| {
                worker.read_owned(part.base, at, content)?;
                // Nobody writes what may be taken away again.
                Ok(in_parts(content, |offset, part| faults.copy(at + offset as u64, part, true))?)
            });
            at += bytes;
        }
        let given = given.and_then(|()| if protected { Ok(()) } else { Ok(faults.protect(&part.range, false)?) });
        if let Err(why) = given {
            // A page that stayed would be taken for the device's content later.
            self.memory.managed.take_away(part)?;
            return Err(why);
        }
        self.memory.managed.set(part, if protected { Side::Both } else { Side::Process });
        // A thread that has touched a page since then finds it.
        Ok(faults.wake(&part.range)?)
    }

    /// Reads what the device has of some pages. What is not the client's reads as zeros.
    fn read_owned(&mut self, base: u64, address: u64, content: &mut [u8]) -> Result<(), ManagedError> {
        let all = address..address + content.len() as u64;
        let owned = self.memory.managed.owned(base, &all);
        if !matches!(owned.as_slice(), [(it, _)] if *it == all) {
            content.fill(0);
        }
        for (range, _) in owned {
            let place = (range.start - address) as usize..(range.end - address) as usize;
            self.copy_from_device(range.start, &mut content[place])?;
        }
        Ok(())
    }

    fn copy_from_device(&mut self, address: u64, content: &mut [u8]) -> Result<(), ManagedError> {
        let (driver, stream) = (self.driver(), self.own_stream(address)?);
        // SAFETY: the device's range is the client's, of an allocation that is there; the copy has ended when this returns.
        unsafe {
            let enqueued = (driver.cuMemcpyDtoHAsync_v2)(content.as_mut_ptr().cast(), address, content.len(), stream);
            let enqueued = checked("cuMemcpyDtoHAsync", enqueued);
            let done = checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream));
            Ok(enqueued.and(done)?)
        }
    }

    /// Gives the client all of its managed memory, for writing. The devices are idle, and stay so until the ring is open.
    pub(crate) fn give_all_to_client(&mut self) -> Result<(), ManagedError> {
        if self.memory.managed.is_empty() {
            return Ok(());
        }
        for (side, part) in self.memory.managed.parts(|side| side != Side::Process) {
            let given = match side {
                Side::Device => self.give_to_client(&part, false),
                _ => self.let_write(&part),
            };
            match given {
                Err(why) if why.is_gone() => break,
                given => given?,
            }
        }
        while let Some(fault) = self.memory.managed.next_fault() {
            self.serve_fault(fault);
        }
        self.clear_stale_content()
    }

    /// Fills the device's side of managed memory that the client has with zeros, which an image does not contain.
    fn clear_stale_content(&mut self) -> Result<(), ManagedError> {
        // What is borrowed cannot be written, and is a template's.
        if self.checkpoint.borrowing.is_some() {
            return Ok(());
        }
        self.open_all_memory();
        for (_, part) in self.memory.managed.parts(|side| side == Side::Process) {
            for (owned, _) in self.memory.managed.owned(part.base, &part.range) {
                self.fill_with_zeros(owned.start, owned.end - owned.start)?;
            }
        }
        Ok(())
    }

    /// Fills device memory with zeros that no command uses: it is new, or the client has the content.
    fn fill_with_zeros(&mut self, address: u64, bytes: u64) -> Result<(), ManagedError> {
        let (driver, stream) = (self.driver(), self.own_stream(address)?);
        // SAFETY: the range is the client's, of an allocation that is there; it is filled when this returns.
        unsafe {
            checked("cuMemsetD8Async", (driver.cuMemsetD8Async)(address, 0, bytes as usize, stream))?;
            Ok(checked("cuStreamSynchronize", (driver.cuStreamSynchronize)(stream))?)
        }
    }

    /// Gives the client pages of zeros where it has none.
    fn give_zeros(&mut self, part: &Part) -> Result<(), ManagedError> {
        let faults = self.userfault()?;
        faults.zero(part.range.clone())?;
        Ok(faults.wake(&part.range)?)
    }

    fn let_write(&mut self, part: &Part) -> Result<(), ManagedError> {
        self.userfault()?.protect(&part.range, false)?;
        self.memory.managed.set(part, Side::Process);
        Ok(())
    }

    /// Gives threads the pages that they wait for, if the devices are idle.
    pub(crate) fn serve_faults(&mut self) {
        if !self.memory.managed.has_faults() {
            return;
        }
        match busy_stream(&mut self.call) {
            Ok(None) => {}
            Ok(Some(_)) => return,
            Err(broken) => self.note_sticky(broken.0),
        }
        while let Some(fault) = self.memory.managed.next_fault() {
            self.serve_fault(fault);
        }
    }

    fn serve_fault(&mut self, fault: Fault) {
        let Some((side, part)) = self.memory.managed.chunk_at(fault.address) else {
            // It was freed meanwhile.
            let page = fault.address..fault.address + 4096;
            let _ = self.userfault().map(|faults| faults.wake(&page));
            return;
        };
        let part = if side == Side::Device { self.memory.managed.chunks_ahead(&part) } else { part };
        let served = match side {
            Side::Device if self.memory.managed.is_fresh(part.base) => {
                self.memory.managed.set(&part, Side::Process);
                self.give_zeros(&part)
            }
            Side::Device => self.give_to_client(&part, !fault.writes),
            Side::Both if !fault.writes && fault.is_protected => {
                self.userfault().and_then(|it| Ok(it.wake(&part.range)?))
            }
            // Also where the thread's page has come with others meanwhile, or was protected for a copy that failed.
            Side::Both | Side::Process if fault.is_protected => self.let_write(&part),
            // The process itself has given the page back (madvise(2), MADV_REMOVE), or never had it before a restore: it is zeros.
            Side::Both | Side::Process => self.let_write(&part).and_then(|()| self.give_zeros(&part)),
        };
        match served {
            Err(why) if why.is_gone() => {}
            Err(why) => {
                // Whoever touches it gets SIGBUS, as of memory that the driver has lost.
                warn!("a page of managed memory does not get to the process, which gets SIGBUS: {why}");
                let poisoned = self.userfault().and_then(|it| {
                    // What is left of a protection would keep the poison away.
                    let _ = it.protect(&part.range, false);
                    it.poison(part.range.clone())?;
                    Ok(it.wake(&part.range)?)
                });
                if let Err(why) = poisoned {
                    error!("the thread goes on waiting for it: {why}");
                }
            }
            Ok(()) => {}
        }
    }

    pub(super) fn managed_map(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ManagedMap { address, size, serial } = ManagedMap::read(args)?;
        let (_, file) =
            self.memory.pinned.arrived.take(address, Some(serial)).ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?;
        let context = self.call.owner();
        let device = window::device_of(address).and_then(|it| self.memory.devices.get(it));
        let is_there = device.is_some_and(|it| it.memory.allocations().get(&address).is_some_and(|a| a.size >= size));
        if !is_there || size == 0 || !size.is_multiple_of(4096) || !is_sealed(&file, size) {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        self.memory.managed.faults = self.memory.pinned.arrived.userfault();
        if let Err(why) = self.fill_with_zeros(address, size) {
            return Ok(Outcome::Done(why.code()));
        }
        let pages = Pages::new(size, Owned::All(context), file.into(), Side::Device, true);
        if let Err(why) = self.memory.managed.add(address, pages) {
            warn!("the process's pages of managed memory cannot be watched: {why}");
            return Ok(Outcome::Done(CUDA_ERROR_NOT_SUPPORTED));
        }
        let opened = self.memory.open_managed(self.call.gpu.driver);
        if opened.is_err() {
            self.memory.managed.remove(address);
        }
        Ok(Outcome::Done(opened.err().unwrap_or(CUDA_SUCCESS)))
    }

    /// Takes the managed memory of a restored client, which has all of its content.
    pub(super) fn adopt_managed(&mut self) -> Result<(), ManagedError> {
        let arrived = Arc::clone(&self.memory.pinned.arrived);
        self.memory.managed.faults = arrived.userfault();
        for expected in self.memory.managed.take_expected() {
            let (address, size) = (expected.address, expected.size);
            let (_, file) = arrived.take(address, None).ok_or(ManagedError::NotCome(address))?;
            if !is_sealed(&file, size) {
                return Err(ManagedError::NotCome(address));
            }
            let owned = self.owned_of_restored(&expected).ok_or(ManagedError::NotCome(address))?;
            let pages = Pages::new(size, owned, file.into(), Side::Process, false);
            self.memory.managed.add(address, pages).map_err(ManagedError::Pages)?;
        }
        let opened = self.memory.open_managed(self.call.gpu.driver);
        opened.map_err(|code| ManagedError::Context(Refused::Code(code)))
    }

    /// What a restored client has in some pages. Its variables must be there.
    fn owned_of_restored(&self, expected: &state::ManagedMemory) -> Option<Owned> {
        if expected.variables.is_empty() {
            return Some(Owned::All(expected.context));
        }
        let variable = |it: &state::ManagedVariable| {
            let range = it.address..it.address.checked_add(it.size)?;
            let inside = range.start >= expected.address && range.end <= expected.address.checked_add(expected.size)?;
            let is_there = is_global(&self.code.globals, it.address, it.size);
            (inside && is_there).then_some(Variable { range, parent: it.parent, context: it.context })
        };
        Some(Owned::Variables(expected.variables.iter().map(variable).collect::<Option<_>>()?))
    }

    pub(super) fn managed_variable(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        const INVALID: Refused = Refused::Code(CUDA_ERROR_INVALID_VALUE);
        let ManagedVariable { parent, address, size, pages, length, serial } = ManagedVariable::read(args)?;
        let (header, context) = (self.call.header, self.call.owner());
        let parent =
            self.code.managed_variable(&self.call.session, (parent, context), (address, size)).ok_or(INVALID)?;
        let range = address..address + size;
        if self.memory.managed.has_variable(&range) {
            return Err(INVALID);
        }
        // The process may have pages that it shares with other variables. What it has of them does not have this one's content.
        let brought = self.bring_range_to_device(&range);
        self.call.header = header;
        if let Err(why) = brought {
            return Ok(Outcome::Done(why.code()));
        }
        if length > 0 {
            let (_, file) = self.memory.pinned.arrived.take(pages, Some(serial)).ok_or(INVALID)?;
            let new = pages..pages.checked_add(length).ok_or(INVALID)?;
            let aligned = new.start.is_multiple_of(4096) && new.end.is_multiple_of(4096);
            let near = new.start.saturating_add(4096) > range.start && new.end < range.end.saturating_add(4096);
            if !aligned || !near || !is_sealed(&file, length) || self.memory.managed.has_any(&new) {
                return Err(INVALID);
            }
            self.memory.managed.faults = self.memory.pinned.arrived.userfault();
            let none = Owned::Variables(Vec::new());
            if let Err(why) = self.memory.managed.add(pages, Pages::new(length, none, file.into(), Side::Device, false))
            {
                warn!("the process's pages of managed variables cannot be watched: {why}");
                return Ok(Outcome::Done(CUDA_ERROR_NOT_SUPPORTED));
            }
        }
        if !self.memory.managed.add_variable(&Variable { range: range.clone(), parent, context }) {
            self.memory.managed.forget_variables(|it| it.range.start < range.end && range.start < it.range.end);
            return Err(INVALID);
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    pub(super) fn managed_unmap(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let ManagedUnmap { address } = ManagedUnmap::read(args)?;
        let removed = self.memory.managed.remove(address);
        Ok(Outcome::Done(removed.map_or(CUDA_ERROR_INVALID_VALUE, |_| CUDA_SUCCESS)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_a_buffer_is_done_once_and_an_error_of_any_part_counts() {
        let mut buffer = vec![0_u8; 3 * CHUNK as usize + 4096];
        let number = |at: usize, part: &mut [u8]| {
            part.iter_mut().enumerate().for_each(|(index, byte)| *byte += ((at + index) / 4096 % 251) as u8 + 1);
            Ok(())
        };
        in_parts(&mut buffer, number).unwrap();
        assert!(buffer.iter().enumerate().all(|(index, byte)| usize::from(*byte) == index / 4096 % 251 + 1));
        let last = buffer.len() - 1;
        let fails = |at: usize, part: &mut [u8]| match at + part.len() > last {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => Ok(()),
        };
        assert_eq!(in_parts(&mut buffer, fails).unwrap_err().kind(), io::ErrorKind::StorageFull);
        in_parts(&mut [], |_, _| Ok(())).unwrap();
    }

    #[test]
    fn commands_that_name_memory_take_it_from_the_client_and_those_that_wait_leave_it() {
        for call in [command::LAUNCH, command::COPY, command::COPY_TO_CHUNK, command::GRAPH_LAUNCH, command::MEM_OPS] {
            assert!(uses_memory(call, false), "{call}");
        }
        for call in [command::STREAM_SYNC, command::EVENT_SYNC, command::MEM_ALLOC, command::HOST_FUNC] {
            assert!(!uses_memory(call, false), "{call}");
        }
        assert!(uses_memory(3, true) && !uses_memory(3, false) && uses_memory(command::FIRST + 4000, false));
    }
}
