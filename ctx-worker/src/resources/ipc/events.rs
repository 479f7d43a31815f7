//! Events that processes share. Each is an event of the driver's in every process that has it. With it go words of memory
//! that all of these processes have mapped and registered:
//!
//! ```text
//!   page (a memfd)  ├─ recorded │ slot 1 │ ... │ slot 31 ─┼─ recorded │ ...        an event each
//! ```
//!
//! A record counts `recorded` up to n at once, and its stream writes n into slot n % 31 when the stream comes to that
//! place. A waiter looks how far the event is recorded now, and waits (a stream, on the device) until that slot has reached
//! that value. A record whose slot has not reached its last value waits for that value: no value is overwritten by an
//! earlier one. So no process has to know which others have the event, and no process needs rights over another.
//!
//! "Now" is when the application calls, also for commands that are deferred ([`SharedRecord`]): another process may record the event again
//! before a deferred wait is executed, and that record may wait for what comes after this wait. While a record is deferred, the same event
//! can be recorded 30 times in other streams; the next record waits, on the device, for the deferred one.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire};

use rekindle_cuda_abi::table::Function;
use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, EventFence, EventOpen, Kind, NO_TICKET, OfEvent};
use rekindle_wire::ipc::{Named, PieceId, Shared, SharedPiece, Token};
use rekindle_wire::layout::SEALS;

use super::Arrived;
use super::names::{new_name, write_name};
use crate::gpu::driver::Driver;
use crate::resources::pinned::{is_sealed, map_at};
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused, check};

/// The size of a page in bytes, and that of an event in a page.
const PAGE: u64 = 64 << 10;
pub(super) const EVENT: u64 = 256;
pub(super) const PER_PAGE: u64 = PAGE / EVENT;
/// The number of slots of an event, in which records take turns.
pub(super) const SLOTS: u64 = EVENT / 8 - 1;
/// The address at which pages are mapped: above ring and staging, for the same reason.
const PAGES_AT: u64 = 0x7001_0000_0000;
/// `CU_STREAM_MEM_OP_WAIT_VALUE_64` and `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
const WAIT: u64 = 4;
const WRITE: u64 = 5;

/// A page of events.
#[derive(Debug)]
pub(super) struct Page {
    file: OwnedFd,
    at: u64,
    /// Whether the page came from another process.
    pub(super) came: bool,
    /// Whether the page's state is in another client's part of the image.
    pub(super) elsewhere: bool,
    /// The events that have been used, in a page of this process's own.
    pub(super) used: u64,
}

/// The place of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) page: PieceId,
    pub(crate) index: u64,
}

/// Which record of an event a deferred command is about: the one that it makes, or waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedRecord {
    pub(crate) place: Place,
    /// The value that the record has counted up to.
    pub(crate) count: u64,
}

/// All events that other processes have, or may have.
#[derive(Debug, Default)]
pub(crate) struct IpcEvents {
    pub(super) pages: BTreeMap<PieceId, Page>,
    pub(super) by_handle: BTreeMap<u64, Place>,
    pub(super) exported: BTreeMap<Token, u64>,
    /// Other handles of exported events, for deferred commands.
    aside: BTreeSet<u64>,
    /// The record that the command under way is about, if it was deferred.
    pub(crate) under_way: Option<SharedRecord>,
    record: Option<u16>,
    wait: Option<u16>,
    query: Option<u16>,
}

impl Page {
    fn word(&self, index: u64, place: u64) -> &AtomicU64 {
        let offset = (index % PER_PAGE) * EVENT + place * 8;
        // SAFETY: inside the page, which is mapped as long as this is there, and aligned.
        unsafe { &*((self.at + offset) as *const AtomicU64) }
    }

    pub(super) fn recorded(&self, index: u64) -> &AtomicU64 {
        self.word(index, 0)
    }

    fn slot(&self, index: u64, count: u64) -> &AtomicU64 {
        self.word(index, 1 + count % SLOTS)
    }

    /// What all slots of an event have reached.
    pub(super) fn slots(&self, index: u64) -> Vec<u64> {
        (0..SLOTS).map(|slot| self.word(index, 1 + slot).load(Acquire)).collect()
    }
}

/// Whether a slot has reached the value of a record, or of a later record in the same slot, as streams compare.
pub(super) fn has_come(slot: &AtomicU64, count: u64) -> bool {
    slot.load(Acquire).wrapping_sub(count).cast_signed() >= 0
}

pub(super) fn page_file() -> Option<OwnedFd> {
    // SAFETY: the name is a C string; a descriptor that comes back is new and owned here.
    let file = unsafe {
        let fd = libc::memfd_create(c"rekindle-events".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        if fd < 0 {
            return None;
        }
        OwnedFd::from_raw_fd(fd)
    };
    // SAFETY: plain system calls on the descriptor made above.
    let sized = unsafe {
        libc::ftruncate(file.as_raw_fd(), PAGE as libc::off_t) == 0
            && libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SEALS) == 0
    };
    sized.then_some(file)
}

impl IpcEvents {
    pub(crate) fn new(table: &[Function]) -> Self {
        let number = |name| command::number(table, name);
        Self {
            record: number("cuEventRecord"),
            wait: number("cuStreamWaitEvent"),
            query: number("cuEventQuery"),
            ..Self::default()
        }
    }

    /// The ids of pages that other processes may have: this process's own, and those that came.
    pub(crate) fn shares(&self) -> (Vec<PieceId>, Vec<PieceId>) {
        let named: BTreeSet<u64> = self.exported.values().chain(&self.aside).copied().collect();
        let of = |came: bool| {
            let events = self.by_handle.iter().filter(|(handle, _)| came || named.contains(handle));
            let pages: BTreeSet<PieceId> = events.map(|(_, place)| place.page).collect();
            pages.into_iter().filter(|id| self.pages.get(id).is_some_and(|page| page.came == came)).collect()
        };
        (of(false), of(true))
    }

    /// Notes the pages whose state other processes save.
    pub(crate) fn leave_out(&mut self, elsewhere: &BTreeSet<PieceId>) {
        self.pages.iter_mut().for_each(|(id, page)| page.elsewhere = elsewhere.contains(id));
    }

    /// Deferred commands name an event by another handle from now on, as long as that is there.
    pub(crate) fn set_aside(&mut self, event: u64, aside: u64) {
        if let Some(place) = self.by_handle.get(&event).copied() {
            self.by_handle.insert(aside, place);
            if self.exported.values().any(|it| *it == event) || self.aside.contains(&event) {
                self.aside.insert(aside);
            }
        }
    }

    /// Has a command that is about to be deferred count now, if it is about a shared event.
    pub(crate) fn defer(&self, call: u16, parameters: &[u8]) -> Option<SharedRecord> {
        let mut reader = Reader::new(parameters);
        let (first, second) = (reader.word().ok(), reader.word().ok());
        let is_record = Some(call) == self.record;
        let event = match call {
            command::EVENT_SYNC => first,
            _ if is_record => first,
            _ if Some(call) == self.wait => second,
            _ => None,
        };
        let place = *self.by_handle.get(&event?)?;
        let recorded = self.pages.get(&place.page)?.recorded(place.index);
        let count = if is_record { recorded.fetch_add(1, AcqRel) + 1 } else { recorded.load(Acquire) };
        Some(SharedRecord { place, count })
    }

    /// Executes a command about shared events.
    pub(crate) fn command(
        &mut self,
        call: &mut Call,
        primary: CUcontext,
        arrived: &mut Arrived,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match number {
            command::EVENT_SHARE => {
                let OfEvent { event: handle } = OfEvent::read(args)?;
                call.session.object(handle, &[Kind::Event])?;
                let (page, index) = self.free_event(call, primary).map_err(Refused::Code)?;
                self.by_handle.insert(handle, Place { page, index });
            }
            command::EVENT_EXPORT => {
                let OfEvent { event: handle } = OfEvent::read(args)?;
                // For an event that came from another process there is no handle to give.
                let own = |place: &Place| self.pages.get(&place.page).is_some_and(|page| !page.came);
                if !self.by_handle.get(&handle).is_some_and(own) {
                    return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE));
                }
                let token = match self.exported.iter().find(|(_, named)| **named == handle) {
                    Some((token, _)) => *token,
                    None => new_name().ok_or(Refused::Code(CUDA_ERROR_OPERATING_SYSTEM))?,
                };
                self.exported.insert(token, handle);
                write_name(reply, &token);
            }
            command::EVENT_OPEN => {
                let EventOpen { ticket, event: handle } = EventOpen::read(args)?;
                call.session.object(handle, &[Kind::Event])?;
                let Some((shared, mut files)) = arrived.ticket(ticket) else {
                    return Ok(Outcome::Done(NO_TICKET));
                };
                let (Named::Event, Some(file), Some(piece)) = (shared.named, files.pop(), shared.pieces.first()) else {
                    return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE));
                };
                self.open_page(call, primary, piece.id, file, true).map_err(Refused::Code)?;
                let place = Place { page: piece.id, index: shared.offset };
                self.by_handle.insert(handle, place);
            }
            // All commands before this one have been executed, or are deferred.
            _ => {
                EventFence::read(args)?;
            }
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// The place of an event that has never been used.
    fn free_event(&mut self, call: &mut Call, primary: CUcontext) -> Result<(PieceId, u64), CUresult> {
        self.forget(call, primary);
        let free = self.pages.iter_mut().find(|(_, page)| !page.came && page.used < PER_PAGE);
        if let Some((id, page)) = free {
            page.used += 1;
            return Ok((*id, page.used - 1));
        }
        let (id, file) = new_name().zip(page_file()).ok_or(CUDA_ERROR_OPERATING_SYSTEM)?;
        self.open_page(call, primary, id, file, false)?;
        if let Some(page) = self.pages.get_mut(&id) {
            page.used = 1;
        }
        Ok((id, 0))
    }

    /// Drops destroyed events, and pages without events once nothing uses them any more.
    pub(crate) fn forget(&mut self, call: &mut Call, primary: CUcontext) {
        let objects = &call.session.objects;
        self.by_handle.retain(|handle, _| objects.get(*handle).is_some());
        self.exported.retain(|_, handle| objects.get(*handle).is_some());
        self.aside.retain(|handle| objects.get(*handle).is_some());
        if !call.session.waiting.busy(0).is_empty() {
            return;
        }
        let used: BTreeSet<PieceId> = self.by_handle.values().map(|place| place.page).collect();
        let unused: Vec<PieceId> = self.pages.keys().filter(|id| !used.contains(*id)).copied().collect();
        for id in unused {
            if let Some(page) = self.pages.remove(&id) {
                unregister_page(call, primary, page.at);
                // SAFETY: mapped by `open_page`; no event of it is left, and no stream is busy.
                unsafe { libc::munmap(page.at as *mut _, PAGE as usize) };
            }
        }
    }

    /// Maps a page, and lets devices use it.
    pub(super) fn open_page(
        &mut self,
        call: &mut Call,
        primary: CUcontext,
        id: PieceId,
        file: OwnedFd,
        came: bool,
    ) -> Result<(), CUresult> {
        if self.pages.contains_key(&id) {
            return Ok(());
        }
        if !is_sealed(&file, PAGE) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let taken: BTreeSet<u64> = self.pages.values().map(|page| page.at).collect();
        let free = (0..).map(|i| PAGES_AT + i * PAGE).find(|at| !taken.contains(at));
        let at = free.filter(|at| map_at(&file, *at, PAGE).is_some()).ok_or(CUDA_ERROR_MAP_FAILED)?;
        if let Err(code) = register_page(call, primary, at) {
            // SAFETY: mapped above, and nobody knows of it.
            unsafe { libc::munmap(at as *mut _, PAGE as usize) };
            return Err(code);
        }
        self.pages.insert(id, Page { file, at, came, elsewhere: false, used: PER_PAGE });
        Ok(())
    }

    /// Unregisters the pages on a device whose context is about to be reset: the reset forgets which pages are registered.
    pub(crate) fn unregister(&self, call: &mut Call, primary: CUcontext, ordinal: usize) {
        let pages: Vec<u64> = self.pages.values().map(|page| page.at).collect();
        pages.into_iter().filter(|_| ordinal == 0).for_each(|at| unregister_page(call, primary, at));
    }

    /// Registers the pages again after the reset.
    pub(crate) fn register(&self, call: &mut Call, primary: CUcontext, ordinal: usize) -> Result<(), Refused> {
        let pages: Vec<u64> = self.pages.values().map(|page| page.at).collect();
        pages
            .into_iter()
            .filter(|_| ordinal == 0)
            .try_for_each(|at| register_page(call, primary, at))
            .map_err(Refused::Code)
    }

    /// Completes a call about a shared event, after the driver has executed it.
    pub(crate) fn after_call(&mut self, call: &mut Call, number: u16, parameters: &[u8]) -> Result<CUresult, Refused> {
        if self.pages.is_empty() {
            return Ok(CUDA_SUCCESS);
        }
        let mut reader = Reader::new(parameters);
        let words = [reader.word().unwrap_or(0), reader.word().unwrap_or(0)];
        if Some(number) == self.record {
            self.write_record(call, words[0], words[1])?;
        } else if Some(number) == self.wait {
            if let Some((address, count)) = self.waits_for(words[1]) {
                let stream = call.stream(words[0])?;
                let key = call.stream_key(words[0])?;
                call.session.waiting.add_to(key, 1);
                check(stream_op(call.driver(), stream, [WAIT, address, count]))?;
            }
        } else if Some(number) == self.query && self.waits_for(words[0]).is_some() {
            return Ok(CUDA_ERROR_NOT_READY);
        }
        Ok(CUDA_SUCCESS)
    }

    fn write_record(&mut self, call: &mut Call, event: u64, stream: u64) -> Result<(), Refused> {
        let record = self.under_way;
        let Some(place) = record.map(|it| it.place).or_else(|| self.by_handle.get(&event).copied()) else {
            return Ok(());
        };
        let Some(page) = self.pages.get(&place.page) else { return Ok(()) };
        let count = match record {
            Some(record) => record.count,
            None => page.recorded(place.index).fetch_add(1, AcqRel) + 1,
        };
        let slot = page.slot(place.index, count);
        let address = std::ptr::from_ref(slot) as u64;
        let before = count.saturating_sub(SLOTS);
        let late = before > 0 && !has_come(slot, before);
        let real = call.stream(stream)?;
        let key = call.stream_key(stream)?;
        call.session.waiting.add_to(key, 2);
        if late {
            check(stream_op(call.driver(), real, [WAIT, address, before]))?;
        }
        check(stream_op(call.driver(), real, [WRITE, address, count]))
    }

    /// The slot and the value that it must reach before the event is as far as it was recorded when the command was made; None if it
    /// is.
    fn waits_for(&self, event: u64) -> Option<(u64, u64)> {
        let place = self.under_way.map(|it| it.place).or_else(|| self.by_handle.get(&event).copied())?;
        let page = self.pages.get(&place.page)?;
        let count = self.under_way.map_or_else(|| page.recorded(place.index).load(Acquire), |it| it.count);
        let slot = page.slot(place.index, count);
        (!has_come(slot, count)).then_some((std::ptr::from_ref(slot) as u64, count))
    }

    /// Makes a stream of the worker's own wait for an event.
    pub(crate) fn wait_for(&self, driver: &Driver, event: u64, stream: CUstream) -> CUresult {
        match self.waits_for(event) {
            Some((address, count)) => stream_op(driver, stream, [WAIT, address, count]),
            None => CUDA_SUCCESS,
        }
    }

    /// The event behind a name.
    pub(crate) fn named(&self, token: &Token) -> Option<(Shared, OwnedFd)> {
        let place = self.by_handle.get(self.exported.get(token)?)?;
        let page = self.pages.get(&place.page)?;
        let shared = Shared {
            named: Named::Event,
            device: [0; 16],
            offset: place.index,
            size: 0,
            flags: 0,
            count: 1,
            pieces: vec![SharedPiece { id: place.page, size: PAGE }],
        };
        Some((shared, page.file.try_clone().ok()?))
    }
}

fn register_page(call: &mut Call, primary: CUcontext, at: u64) -> Result<(), CUresult> {
    const PORTABLE_AND_MAPPED: u32 = 3;
    call.gpu.enter(primary).map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
    // SAFETY: the page is mapped as long as it is registered.
    let result = unsafe { (call.driver().cuMemHostRegister_v2)(at as *mut _, PAGE as usize, PORTABLE_AND_MAPPED) };
    let _ = call.enter_own();
    if result == CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

fn unregister_page(call: &mut Call, primary: CUcontext, at: u64) {
    if call.gpu.enter(primary).is_ok() {
        // SAFETY: registered by `register_page`; no stream is busy with it.
        unsafe { (call.driver().cuMemHostUnregister)(at as *mut _) };
    }
    let _ = call.enter_own();
}

fn stream_op(driver: &Driver, stream: CUstream, [operation, address, value]: [u64; 3]) -> CUresult {
    let mut operation = [operation, address, value, 0, 0, 0];
    // SAFETY: one structure of the driver's layout, which it has read when it returns; the word lies in a page that is
    // mapped and registered until nothing uses it.
    unsafe { (driver.cuStreamBatchMemOp_v2)(stream, 1, operation.as_mut_ptr().cast(), 0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT_OF_OTHERS: u64 = 7;

    /// Events with one that processes share, at index 3 of its page.
    fn shared() -> IpcEvents {
        let file = page_file().unwrap();
        // SAFETY: maps new memory, at an address of the kernel's choice.
        let at = unsafe {
            let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
            libc::mmap(std::ptr::null_mut(), PAGE as usize, access, libc::MAP_SHARED, fd, 0)
        };
        assert_ne!(at, libc::MAP_FAILED);
        let page = Page { file, at: at as u64, came: true, elsewhere: false, used: PER_PAGE };
        let mut events = IpcEvents { record: Some(1), wait: Some(2), query: Some(3), ..IpcEvents::default() };
        events.pages.insert([1; 16], page);
        events.by_handle.insert(EVENT_OF_OTHERS, Place { page: [1; 16], index: 3 });
        events
    }

    #[test]
    fn a_deferred_command_is_about_the_record_that_there_is_when_it_is_made() {
        let mut events = shared();
        let bytes = |words: [u64; 2]| words.map(u64::to_le_bytes).concat();
        let count = |events: &IpcEvents, call, words| events.defer(call, &bytes(words)).map(|it| it.count);
        // In which stream does not matter.
        assert_eq!(count(&events, 1, [EVENT_OF_OTHERS, 9]), Some(1));
        let wait = events.defer(2, &bytes([9, EVENT_OF_OTHERS])).unwrap();
        assert_eq!(wait.count, 1);
        // Recorded again, here or in another process.
        assert_eq!(count(&events, 1, [EVENT_OF_OTHERS, 8]), Some(2));
        assert_eq!(count(&events, command::EVENT_SYNC, [EVENT_OF_OTHERS, 0]), Some(2));
        let slot = |count: u64| events.pages[&[1; 16]].slot(3, count);
        slot(1).store(1, std::sync::atomic::Ordering::Release);
        assert_eq!(events.waits_for(EVENT_OF_OTHERS), Some((std::ptr::from_ref(slot(2)) as u64, 2)));
        // Deferred commands may name an event by another handle by now.
        events.under_way = Some(wait);
        assert_eq!(events.waits_for(EVENT_OF_OTHERS + 1), None, "the first record has come");
        events.under_way = None;
        events.set_aside(EVENT_OF_OTHERS, EVENT_OF_OTHERS + 1);
        events.set_aside(5, 6);
        assert_eq!(events.by_handle.keys().copied().collect::<Vec<_>>(), [EVENT_OF_OTHERS, EVENT_OF_OTHERS + 1]);
        // An event of the process alone.
        assert_eq!(count(&events, 1, [5, 9]), None);
    }
}
