//! Events that processes share. Each is an event of the driver's in every process that has it, and beside it words of memory
//! that all of them have mapped and registered:
//!
//! ```text
//!   page (a memfd)  ├─ recorded │ slot 1 │ ... │ slot 31 ─┼─ recorded │ ...        an event each
//! ```
//!
//! A record counts `recorded` up to n at once, and has its stream write n into slot n % 31 when it comes there. Whoever waits
//! looks how far the event is recorded now, and waits (a stream, on the device) until that slot has come so far. A record
//! whose slot has not come to its last use waits for that: no value is overwritten by an earlier one. So neither has to know
//! who else has the event, and no process needs rights over another's.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire};

use rekindle_cuda_abi::table::Function;
use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, EventFence, EventOpen, NO_TICKET, OfEvent};
use rekindle_wire::ipc::{Named, PieceId, Shared, SharedPiece, Token};
use rekindle_wire::layout::SEALS;

use crate::gpu::driver::Driver;
use crate::resources::ipc::{new_name, write_name};
use crate::resources::not_loaded::NotLoaded;
use crate::resources::pinned::{is_sealed, map_at};
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::state;

/// Bytes of a page, and of an event in it.
const PAGE: u64 = 64 << 10;
const EVENT: u64 = 256;
const PER_PAGE: u64 = PAGE / EVENT;
/// Slots of an event, in which records take turns.
const SLOTS: u64 = EVENT / 8 - 1;
/// Where pages are mapped: above ring and staging, for the same reason.
const PAGES_AT: u64 = 0x7001_0000_0000;
/// `CU_STREAM_MEM_OP_WAIT_VALUE_64` and `CU_STREAM_MEM_OP_WRITE_VALUE_64`.
const WAIT: u64 = 4;
const WRITE: u64 = 5;

/// A page of events.
#[derive(Debug)]
struct Page {
    file: OwnedFd,
    at: u64,
    /// Whether it is another process's.
    came: bool,
    /// Whether its state is in another client's part of the image.
    elsewhere: bool,
    /// Events of it that have been used, of one of our own.
    used: u64,
}

/// Where an event is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place {
    page: PieceId,
    index: u64,
    /// Records that are held: what they have counted up to.
    held: VecDeque<u64>,
}

/// All events that others have, or may have.
#[derive(Debug, Default)]
pub(crate) struct IpcEvents {
    pages: BTreeMap<PieceId, Page>,
    by_handle: BTreeMap<u64, Place>,
    exported: BTreeMap<Token, u64>,
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

    fn recorded(&self, index: u64) -> &AtomicU64 {
        self.word(index, 0)
    }

    fn slot(&self, index: u64, count: u64) -> &AtomicU64 {
        self.word(index, 1 + count % SLOTS)
    }
}

/// Whether a slot has come to a record, or a later one in the same slot, as streams compare.
fn has_come(slot: &AtomicU64, count: u64) -> bool {
    slot.load(Acquire).wrapping_sub(count).cast_signed() >= 0
}

fn page_file() -> Option<OwnedFd> {
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

    /// The ids of pages that others may have, of its own and of theirs.
    pub(crate) fn shares(&self) -> (Vec<PieceId>, Vec<PieceId>) {
        let named: BTreeSet<u64> = self.exported.values().copied().collect();
        let of = |came: bool| {
            let events = self.by_handle.iter().filter(|(handle, _)| came || named.contains(handle));
            let pages: BTreeSet<PieceId> = events.map(|(_, place)| place.page).collect();
            pages.into_iter().filter(|id| self.pages.get(id).is_some_and(|page| page.came == came)).collect()
        };
        (of(false), of(true))
    }

    /// Whose state of which page is saved.
    pub(crate) fn leave_out(&mut self, elsewhere: &BTreeSet<PieceId>) {
        self.pages.iter_mut().for_each(|(id, page)| page.elsewhere = elsewhere.contains(id));
    }

    /// Whether a record is held.
    pub(crate) fn holds_any(&self) -> bool {
        self.by_handle.values().any(|place| !place.held.is_empty())
    }

    /// An event's record is held.
    pub(crate) fn hold(&mut self, call: u16, parameters: &[u8]) {
        let event = Reader::new(parameters).word().ok();
        if Some(call) == self.record
            && let Some(place) = event.and_then(|handle| self.by_handle.get_mut(&handle))
            && let Some(page) = self.pages.get(&place.page)
        {
            place.held.push_back(page.recorded(place.index).fetch_add(1, AcqRel) + 1);
        }
    }

    /// For the image. Nothing is under way, so of each event its count says all.
    pub(crate) fn write(&self) -> state::SharedEvents {
        let page = |(id, page): (&PieceId, &Page)| {
            let used: BTreeSet<u64> = self.by_handle.values().filter(|p| p.page == *id).map(|p| p.index).collect();
            let count = |index: u64| state::EventCount {
                index,
                recorded: page.recorded(index).load(Acquire),
                ..Default::default()
            };
            state::EventPage {
                id: id.to_vec(),
                came: page.came,
                elsewhere: page.elsewhere,
                used: page.used,
                counts: used.into_iter().map(count).collect(),
                ..Default::default()
            }
        };
        let event = |(&handle, place): (&u64, &Place)| state::SharedEvent {
            handle,
            page: place.page.to_vec(),
            index: place.index,
            held: place.held.iter().copied().collect(),
            ..Default::default()
        };
        state::SharedEvents {
            pages: self.pages.iter().map(page).collect(),
            events: self.by_handle.iter().map(event).collect(),
            exported: self.exported.iter().map(|(token, handle)| state::named(token, *handle)).collect(),
            ..Default::default()
        }
    }
}

/// A page as an image has it.
#[derive(Debug)]
pub(crate) struct SavedPage {
    pub(crate) id: PieceId,
    came: bool,
    pub(crate) elsewhere: bool,
    used: u64,
    counts: Vec<(u64, u64)>,
}

/// What [`IpcEvents::write`] wrote.
#[derive(Debug, Default)]
pub(crate) struct SavedEvents {
    pub(crate) pages: Vec<SavedPage>,
    by_handle: BTreeMap<u64, Place>,
    exported: BTreeMap<Token, u64>,
}

impl SavedEvents {
    pub(crate) fn read(state: &state::SharedEvents) -> Result<Self, Malformed> {
        let mut saved = Self::default();
        for it in &state.pages {
            let counts = it.counts.iter().map(|it| (it.index, it.recorded)).collect();
            let (came, elsewhere, used) = (it.came, it.elsewhere, it.used);
            saved.pages.push(SavedPage { id: state::name(&it.id)?, came, elsewhere, used, counts });
        }
        for it in &state.events {
            let (page, held) = (state::name(&it.page)?, it.held.iter().copied().collect());
            saved.by_handle.insert(it.handle, Place { page, index: it.index, held });
        }
        for it in &state.exported {
            saved.exported.insert(state::name(&it.name)?, it.of);
        }
        Ok(saved)
    }
}

impl SavedPage {
    /// A page anew, in which all is done that was recorded, but for what is `held`.
    pub(crate) fn make(&self, held: &SavedEvents) -> Option<OwnedFd> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::from(page_file()?);
        for &(index, count) in self.counts.iter().filter(|(index, _)| *index < PER_PAGE) {
            let places = held.by_handle.values().filter(|p| p.page == self.id && p.index == index);
            let waiting: BTreeSet<u64> = places.flat_map(|p| p.held.iter().copied()).collect();
            let mut words = vec![count];
            for slot in 0..SLOTS {
                // The last record in this slot that is done.
                let last = (0..=count).rev().take_while(|n| count - n < SLOTS).find(|n| n % SLOTS == slot).unwrap_or(0);
                words.push(if waiting.contains(&last) { last.saturating_sub(SLOTS) } else { last });
            }
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            file.write_all_at(&bytes, index * EVENT).ok()?;
        }
        Some(file.into())
    }
}

impl Executor {
    /// Executes a command about events that are shared.
    pub(crate) fn ipc_event_command(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match call {
            command::EVENT_SHARE => {
                let OfEvent { event: handle } = OfEvent::read(args)?;
                self.handle_event(handle)?;
                let (page, index) = self.free_event().map_err(Refused::Code)?;
                self.memory.ipc_events.by_handle.insert(handle, Place { page, index, held: VecDeque::new() });
            }
            command::EVENT_EXPORT => {
                let OfEvent { event: handle } = OfEvent::read(args)?;
                let events = &mut self.memory.ipc_events;
                // Of one that came from elsewhere it has no handle to give.
                let own = |place: &Place| events.pages.get(&place.page).is_some_and(|page| !page.came);
                if !events.by_handle.get(&handle).is_some_and(own) {
                    return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE));
                }
                let token = match events.exported.iter().find(|(_, named)| **named == handle) {
                    Some((token, _)) => *token,
                    None => new_name().ok_or(Refused::Code(CUDA_ERROR_OPERATING_SYSTEM))?,
                };
                events.exported.insert(token, handle);
                write_name(reply, &token);
            }
            command::EVENT_OPEN => {
                let EventOpen { ticket, event: handle } = EventOpen::read(args)?;
                self.handle_event(handle)?;
                let Some((shared, mut files)) = self.memory.arrived.ticket(ticket) else {
                    return Ok(Outcome::Done(NO_TICKET));
                };
                let (Named::Event, Some(file), Some(piece)) = (shared.named, files.pop(), shared.pieces.first()) else {
                    return Err(Refused::Code(CUDA_ERROR_INVALID_HANDLE));
                };
                self.open_page(piece.id, file, true).map_err(Refused::Code)?;
                let place = Place { page: piece.id, index: shared.offset, held: VecDeque::new() };
                self.memory.ipc_events.by_handle.insert(handle, place);
            }
            // Whatever came before it has been executed, or is held.
            _ => {
                EventFence::read(args)?;
            }
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// An event that nobody has had.
    fn free_event(&mut self) -> Result<(PieceId, u64), CUresult> {
        self.forget_events();
        let free = self.memory.ipc_events.pages.iter_mut().find(|(_, page)| !page.came && page.used < PER_PAGE);
        if let Some((id, page)) = free {
            page.used += 1;
            return Ok((*id, page.used - 1));
        }
        let (id, file) = new_name().zip(page_file()).ok_or(CUDA_ERROR_OPERATING_SYSTEM)?;
        self.open_page(id, file, false)?;
        if let Some(page) = self.memory.ipc_events.pages.get_mut(&id) {
            page.used = 1;
        }
        Ok((id, 0))
    }

    /// Drops events that are destroyed, and pages of which none is left once nothing uses them any more.
    pub(crate) fn forget_events(&mut self) {
        let (objects, events) = (&self.session.objects, &mut self.memory.ipc_events);
        events.by_handle.retain(|handle, _| objects.get(*handle).is_some());
        events.exported.retain(|_, handle| objects.get(*handle).is_some());
        if !self.session.waiting.busy(0).is_empty() {
            return;
        }
        let used: BTreeSet<PieceId> = events.by_handle.values().map(|place| place.page).collect();
        let unused: Vec<PieceId> = events.pages.keys().filter(|id| !used.contains(*id)).copied().collect();
        for id in unused {
            if let Some(page) = self.memory.ipc_events.pages.remove(&id) {
                self.unregister_page(page.at);
                // SAFETY: mapped by `open_page`; no event of it is left, and no stream is busy.
                unsafe { libc::munmap(page.at as *mut _, PAGE as usize) };
            }
        }
    }

    /// Maps a page, and lets devices use it.
    fn open_page(&mut self, id: PieceId, file: OwnedFd, came: bool) -> Result<(), CUresult> {
        if self.memory.ipc_events.pages.contains_key(&id) {
            return Ok(());
        }
        if !is_sealed(&file, PAGE) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let taken: BTreeSet<u64> = self.memory.ipc_events.pages.values().map(|page| page.at).collect();
        let free = (0..).map(|i| PAGES_AT + i * PAGE).find(|at| !taken.contains(at));
        let at = free.filter(|at| map_at(&file, *at, PAGE).is_some()).ok_or(CUDA_ERROR_MAP_FAILED)?;
        if let Err(code) = self.register_page(at) {
            // SAFETY: mapped above, and nobody knows of it.
            unsafe { libc::munmap(at as *mut _, PAGE as usize) };
            return Err(code);
        }
        self.memory.ipc_events.pages.insert(id, Page { file, at, came, elsewhere: false, used: PER_PAGE });
        Ok(())
    }

    fn register_page(&mut self, at: u64) -> Result<(), CUresult> {
        const PORTABLE_AND_MAPPED: u32 = 3;
        let primary = self.memory.devices.first().map_or(0, |d| d.primary);
        self.enter_real(primary).map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
        // SAFETY: the page is mapped as long as it is registered.
        let result = unsafe { (self.driver().cuMemHostRegister_v2)(at as *mut _, PAGE as usize, PORTABLE_AND_MAPPED) };
        let _ = self.enter_context(self.header.context);
        if result == CUDA_SUCCESS { Ok(()) } else { Err(result) }
    }

    fn unregister_page(&mut self, at: u64) {
        let primary = self.memory.devices.first().map_or(0, |d| d.primary);
        if self.enter_real(primary).is_ok() {
            // SAFETY: registered by `register_page`; no stream is busy with it.
            unsafe { (self.driver().cuMemHostUnregister)(at as *mut _) };
        }
        let _ = self.enter_context(self.header.context);
    }

    /// A device's context, which is reset, no longer knows what it has registered.
    pub(crate) fn unregister_events(&mut self, ordinal: usize) {
        let pages: Vec<u64> = self.memory.ipc_events.pages.values().map(|page| page.at).collect();
        pages.into_iter().filter(|_| ordinal == 0).for_each(|at| self.unregister_page(at));
    }

    /// And again, afterwards.
    pub(crate) fn register_events(&mut self, ordinal: usize) -> Result<(), Refused> {
        let pages: Vec<u64> = self.memory.ipc_events.pages.values().map(|page| page.at).collect();
        pages.into_iter().filter(|_| ordinal == 0).try_for_each(|at| self.register_page(at)).map_err(Refused::Code)
    }

    /// What a call about an event that is shared does beside what the driver has done.
    pub(crate) fn ipc_event_call(&mut self, call: u16, parameters: &[u8]) -> Result<CUresult, Refused> {
        let events = &self.memory.ipc_events;
        if events.by_handle.is_empty() {
            return Ok(CUDA_SUCCESS);
        }
        let mut reader = Reader::new(parameters);
        let words = [reader.word().unwrap_or(0), reader.word().unwrap_or(0)];
        if Some(call) == events.record {
            self.write_record(words[0], words[1])?;
        } else if Some(call) == events.wait {
            if let Some((address, count)) = self.waits_for(words[1]) {
                let stream = self.handle_stream(words[0])?;
                self.session.waiting.add_to(self.stream_key(words[0])?, 1);
                check(self.stream_op(stream, [WAIT, address, count]))?;
            }
        } else if Some(call) == events.query && self.waits_for(words[0]).is_some() {
            return Ok(CUDA_ERROR_NOT_READY);
        }
        Ok(CUDA_SUCCESS)
    }

    fn write_record(&mut self, event: u64, stream: u64) -> Result<(), Refused> {
        let Some(place) = self.memory.ipc_events.by_handle.get_mut(&event) else { return Ok(()) };
        let Some(page) = self.memory.ipc_events.pages.get(&place.page) else { return Ok(()) };
        let count = match place.held.pop_front() {
            Some(count) => count,
            None => page.recorded(place.index).fetch_add(1, AcqRel) + 1,
        };
        let slot = page.slot(place.index, count);
        let address = std::ptr::from_ref(slot) as u64;
        let before = count.saturating_sub(SLOTS);
        let late = before > 0 && !has_come(slot, before);
        let real = self.handle_stream(stream)?;
        self.session.waiting.add_to(self.stream_key(stream)?, 2);
        if late {
            check(self.stream_op(real, [WAIT, address, before]))?;
        }
        check(self.stream_op(real, [WRITE, address, count]))
    }

    /// The slot that must come to a value before an event is as far as it is recorded now; None if it is.
    fn waits_for(&self, event: u64) -> Option<(u64, u64)> {
        let place = self.memory.ipc_events.by_handle.get(&event)?;
        let page = self.memory.ipc_events.pages.get(&place.page)?;
        let count = page.recorded(place.index).load(Acquire);
        let slot = page.slot(place.index, count);
        (!has_come(slot, count)).then_some((std::ptr::from_ref(slot) as u64, count))
    }

    /// Has a stream of the worker's own wait for an event.
    pub(crate) fn wait_for_shared(&self, event: u64, stream: CUstream) -> CUresult {
        match self.waits_for(event) {
            Some((address, count)) => self.stream_op(stream, [WAIT, address, count]),
            None => CUDA_SUCCESS,
        }
    }

    fn stream_op(&self, stream: CUstream, [operation, address, value]: [u64; 3]) -> CUresult {
        stream_op(self.driver(), stream, [operation, address, value, 0, 0, 0])
    }

    /// What an event's name stands for.
    pub(crate) fn named_event(&self, token: &Token) -> Option<(Shared, OwnedFd)> {
        let place = self.memory.ipc_events.by_handle.get(self.memory.ipc_events.exported.get(token)?)?;
        let page = self.memory.ipc_events.pages.get(&place.page)?;
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

    /// Events of an image's client, whose pages were made, or came, before.
    pub(crate) fn restore_events(&mut self, saved: SavedEvents) -> Result<(), NotLoaded> {
        for page in &saved.pages {
            let file = self
                .memory
                .arrived
                .file(&page.id)
                .ok_or(NotLoaded::Image("the image lacks events that its processes share"))?;
            let opened = self.open_page(page.id, file, page.came);
            opened.map_err(NotLoaded::Events)?;
            if let Some(open) = self.memory.ipc_events.pages.get_mut(&page.id) {
                open.used = page.used;
            }
        }
        let known = |place: &Place| self.memory.ipc_events.pages.contains_key(&place.page) && place.index < PER_PAGE;
        if !saved.by_handle.values().all(known) {
            return Err(NotLoaded::Image("the image's events have no place"));
        }
        self.memory.ipc_events.by_handle = saved.by_handle;
        self.memory.ipc_events.exported = saved.exported;
        Ok(())
    }
}

fn stream_op(driver: &Driver, stream: CUstream, mut operation: [u64; 6]) -> CUresult {
    // SAFETY: one structure of the driver's layout, which it has read when it returns; the word lies in a page that is
    // mapped and registered until nothing uses it.
    unsafe { (driver.cuStreamBatchMemOp_v2)(stream, 1, operation.as_mut_ptr().cast(), 0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_page_made_again_says_that_all_is_done_but_what_is_held() {
        let page = |count| SavedPage { id: [1; 16], came: false, elsewhere: false, used: 2, counts: vec![(1, count)] };
        let slots = |count: u64, held: &[u64]| {
            let place = Place { page: [1; 16], index: 1, held: held.iter().copied().collect() };
            let events = SavedEvents { by_handle: BTreeMap::from([(5, place)]), ..SavedEvents::default() };
            let file = std::fs::File::from(page(count).make(&events).unwrap());
            let mut bytes = [0; EVENT as usize];
            file.read_exact_at(&mut bytes, EVENT).unwrap();
            let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            words.map(AtomicU64::new).collect::<Vec<_>>()
        };
        for count in [0, 1, 7, SLOTS, SLOTS + 1, 1000] {
            let words = slots(count, &[]);
            assert_eq!(words[0].load(Acquire), count);
            assert!(has_come(&words[1 + (count % SLOTS) as usize], count), "{count}");
        }
        let words = slots(100, &[99, 100]);
        for (count, done) in [(98, true), (99, false), (100, false)] {
            assert_eq!(has_come(&words[1 + (count % SLOTS) as usize], count), done, "{count}");
        }
    }
}
