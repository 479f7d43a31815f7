//! The state in an image of events that processes share.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering::Acquire;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Malformed;
use rekindle_wire::ipc::{PieceId, Token};

use super::Arrived;
use super::events::{EVENT, IpcEvents, PER_PAGE, Page, Place, SLOTS, page_file};
use crate::resources::not_loaded::NotLoaded;
use crate::session::call::Call;
use crate::session::state;

impl IpcEvents {
    /// Writes the events for the image. No record is under way, so an event's count is its whole state.
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
            held: place.deferred.iter().copied().collect(),
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

/// A page of events in an image.
#[derive(Debug)]
pub(crate) struct SavedPage {
    pub(crate) id: PieceId,
    came: bool,
    pub(crate) elsewhere: bool,
    used: u64,
    counts: Vec<(u64, u64)>,
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
            let counts = it.counts.iter().map(|it| (it.index, it.recorded)).collect();
            let (came, elsewhere, used) = (it.came, it.elsewhere, it.used);
            saved.pages.push(SavedPage { id: state::name(&it.id)?, came, elsewhere, used, counts });
        }
        for it in &state.events {
            let (page, deferred) = (state::name(&it.page)?, it.held.iter().copied().collect());
            saved.by_handle.insert(it.handle, Place { page, index: it.index, deferred });
        }
        for it in &state.exported {
            saved.exported.insert(state::name(&it.name)?, it.of);
        }
        Ok(saved)
    }
}

impl SavedPage {
    /// Makes a page anew, in which all records are done except for those in `deferred`.
    pub(crate) fn make(&self, deferred: &SavedEvents) -> Option<OwnedFd> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::from(page_file()?);
        for &(index, count) in self.counts.iter().filter(|(index, _)| *index < PER_PAGE) {
            let places = deferred.by_handle.values().filter(|p| p.page == self.id && p.index == index);
            let waiting: BTreeSet<u64> = places.flat_map(|p| p.deferred.iter().copied()).collect();
            let mut words = vec![count];
            for slot in 0..SLOTS {
                // The last completed record in this slot.
                let last = (0..=count).rev().take_while(|n| count - n < SLOTS).find(|n| n % SLOTS == slot).unwrap_or(0);
                words.push(if waiting.contains(&last) { last.saturating_sub(SLOTS) } else { last });
            }
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            file.write_all_at(&bytes, index * EVENT).ok()?;
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

    #[test]
    fn a_page_made_again_says_that_all_is_done_but_what_is_deferred() {
        let page = |count| SavedPage { id: [1; 16], came: false, elsewhere: false, used: 2, counts: vec![(1, count)] };
        let slots = |count: u64, deferred: &[u64]| {
            let place = Place { page: [1; 16], index: 1, deferred: deferred.iter().copied().collect() };
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
