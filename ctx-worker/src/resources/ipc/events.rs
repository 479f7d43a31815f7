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

use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) page: PieceId,
    pub(super) index: u64,
    /// The values that deferred records have counted up to.
    pub(super) deferred: VecDeque<u64>,
}

/// All events that other processes have, or may have.
#[derive(Debug, Default)]
pub(crate) struct IpcEvents {
    pub(super) pages: BTreeMap<PieceId, Page>,
    pub(super) by_handle: BTreeMap<u64, Place>,
    pub(super) exported: BTreeMap<Token, u64>,
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
        let named: BTreeSet<u64> = self.exported.values().copied().collect();
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

    /// Whether a record is deferred.
    pub(crate) fn has_deferred(&self) -> bool {
        self.by_handle.values().any(|place| !place.deferred.is_empty())
    }

    /// Notes that an event's record is deferred.
    pub(crate) fn defer(&mut self, call: u16, parameters: &[u8]) {
        let event = Reader::new(parameters).word().ok();
        if Some(call) == self.record
            && let Some(place) = event.and_then(|handle| self.by_handle.get_mut(&handle))
            && let Some(page) = self.pages.get(&place.page)
        {
            place.deferred.push_back(page.recorded(place.index).fetch_add(1, AcqRel) + 1);
        }
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
                self.by_handle.insert(handle, Place { page, index, deferred: VecDeque::new() });
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
                let place = Place { page: piece.id, index: shared.offset, deferred: VecDeque::new() };
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
        if self.by_handle.is_empty() {
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
        let Some(place) = self.by_handle.get_mut(&event) else { return Ok(()) };
        let Some(page) = self.pages.get(&place.page) else { return Ok(()) };
        let count = match place.deferred.pop_front() {
            Some(count) => count,
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

    /// The slot and the value that it must reach before the event is as far as it is recorded now; None if it is.
    fn waits_for(&self, event: u64) -> Option<(u64, u64)> {
        let place = self.by_handle.get(&event)?;
        let page = self.pages.get(&place.page)?;
        let count = page.recorded(place.index).load(Acquire);
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
