//! The state in an image of events that processes share.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Acquire;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Malformed;
use rekindle_wire::ipc::{PieceId, Token};

use super::Arrived;
use super::events::{EVENT, IpcEvents, PER_PAGE, Page, Place, SLOTS, SharedRecord, page_file};
use crate::resources::not_loaded::NotLoaded;
use crate::session::call::Call;
use crate::session::state;

impl IpcEvents {
    /// Writes the events for the image. All devices are at rest, so a slot has not reached the value of a record only where that is
    /// deferred, in this process or another.
    pub(crate) fn write(&self) -> state::SharedEvents {
        let page = |(id, page): (&PieceId, &Page)| {
            // Other processes may have events that this one has not, or has destroyed.
            let used = (0..PER_PAGE).filter(|index| page.recorded(*index).load(Acquire) != 0);
            let count = |index: u64| state::EventCount {
                index,
                recorded: page.recorded(index).load(Acquire),
                slots: page.slots(index),
                ..Default::default()
            };
            state::EventPage {
                id: id.to_vec(),
                came: page.came,
                elsewhere: page.elsewhere,
                used: page.used,
                counts: used.map(count).collect(),
                ..Default::default()
            }
        };
        let event = |(&handle, place): (&u64, &Place)| state::SharedEvent {
            handle,
            page: place.page.to_vec(),
            index: place.index,
            ..Default::default()
        };
        state::SharedEvents {
            pages: self.pages.iter().map(page).collect(),
            events: self.by_handle.iter().map(event).collect(),
            exported: self.exported.iter().map(|(token, handle)| state::named(token, *handle)).collect(),
            ..Default::default()
        }
    }

    /// Restores the events of an image's client. Their pages were made, or came, before.
    pub(super) fn restore(
        &mut self,
        call: &mut Call,
        primary: CUcontext,
        arrived: &Arrived,
        saved: SavedEvents,
    ) -> Result<(), NotLoaded> {
        for page in &saved.pages {
            let file =
                arrived.file(&page.id).ok_or(NotLoaded::Image("the image lacks events that its processes share"))?;
            let opened = self.open_page(call, primary, page.id, file, page.came);
            opened.map_err(NotLoaded::Events)?;
            if let Some(open) = self.pages.get_mut(&page.id) {
                open.used = page.used;
            }
        }
        let known = |place: &Place| self.pages.contains_key(&place.page) && place.index < PER_PAGE;
        if !saved.by_handle.values().all(known) {
            return Err(NotLoaded::Image("the image's events have no place"));
        }
        self.by_handle = saved.by_handle;
        self.exported = saved.exported;
        Ok(())
    }
}

impl SharedRecord {
    /// The form in which an image keeps it.
    pub(crate) fn saved(self) -> state::SharedRecord {
        let Self { place: Place { page, index }, count } = self;
        state::SharedRecord { page: page.to_vec(), index, count, ..Default::default() }
    }

    /// Restores the result of [`SharedRecord::saved`].
    pub(crate) fn restored(saved: &state::SharedRecord) -> Result<Self, Malformed> {
        let place = Place { page: state::name(&saved.page)?, index: saved.index };
        Ok(Self { place, count: saved.count })
    }
}

/// A page of events in an image.
#[derive(Debug)]
pub(crate) struct SavedPage {
    pub(crate) id: PieceId,
    came: bool,
    pub(crate) elsewhere: bool,
    used: u64,
    counts: Vec<state::EventCount>,
}

/// The events that [`IpcEvents::write`] wrote.
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
            let (came, elsewhere, used) = (it.came, it.elsewhere, it.used);
            let known = |it: &state::EventCount| it.index < PER_PAGE && [0, SLOTS as usize].contains(&it.slots.len());
            if !it.counts.iter().all(known) {
                return Err(Malformed("an event that no page has room for"));
            }
            saved.pages.push(SavedPage { id: state::name(&it.id)?, came, elsewhere, used, counts: it.counts.clone() });
        }
        for it in &state.events {
            saved.by_handle.insert(it.handle, Place { page: state::name(&it.page)?, index: it.index });
        }
        for it in &state.exported {
            saved.exported.insert(state::name(&it.name)?, it.of);
        }
        Ok(saved)
    }
}

impl SavedPage {
    /// Makes a page anew. Before version 19 of the state, all records were done.
    pub(crate) fn make(&self) -> Option<OwnedFd> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::from(page_file()?);
        for event in &self.counts {
            let count = event.recorded;
            // The last record in this slot.
            let last =
                |slot| (0..=count).rev().take_while(|n| count - n < SLOTS).find(|n| n % SLOTS == slot).unwrap_or(0);
            let slots = if event.slots.is_empty() { (0..SLOTS).map(last).collect() } else { event.slots.clone() };
            let words = [count].into_iter().chain(slots);
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            file.write_all_at(&bytes, event.index * EVENT).ok()?;
        }
        Some(file.into())
    }
}

#[cfg(test)]
mod tests {
    use super::super::events::has_come;
    use super::*;
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::AtomicU64;

    /// The words of event 1 of a page that is made again.
    fn made_again(recorded: u64, slots: Vec<u64>) -> Vec<AtomicU64> {
        let event = state::EventCount { index: 1, recorded, slots, ..Default::default() };
        let page = SavedPage { id: [1; 16], came: false, elsewhere: false, used: 2, counts: vec![event] };
        let file = std::fs::File::from(page.make().unwrap());
        let mut bytes = [0; EVENT as usize];
        file.read_exact_at(&mut bytes, EVENT).unwrap();
        bytes.chunks_exact(8).map(|word| AtomicU64::new(u64::from_le_bytes(word.try_into().unwrap()))).collect()
    }

    #[test]
    fn a_page_made_again_has_what_its_slots_had_reached() {
        // Of 100 records, 99 and 100 are deferred, in whichever process.
        let slots: Vec<u64> = (0..SLOTS).map(|slot| (0..=98).rev().find(|n| n % SLOTS == slot).unwrap()).collect();
        let words = made_again(100, slots);
        assert_eq!(words[0].load(Acquire), 100);
        for (count, done) in [(98, true), (99, false), (100, false)] {
            assert_eq!(has_come(&words[1 + (count % SLOTS) as usize], count), done, "{count}");
        }
    }

    #[test]
    fn in_a_page_of_a_former_release_all_is_done() {
        for count in [0, 1, 7, SLOTS, SLOTS + 1, 1000] {
            let words = made_again(count, Vec::new());
            assert_eq!(words[0].load(Acquire), count);
            assert!(has_come(&words[1 + (count % SLOTS) as usize], count), "{count}");
        }
    }
}
