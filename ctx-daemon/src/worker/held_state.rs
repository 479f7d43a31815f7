//! Held commands as bytes of the saved state. At a quiesce each is as it came from the ring, or a callback that the
//! application is to run or is running.

use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::ring::CommandHeader;

use super::executor::Executor;
use super::held::{Entry, Progress};

/// How far a command is, in the saved state.
const QUEUED: u64 = 0;
const READY: u64 = 1;
const RUNNING: u64 = 2;

impl Executor {
    /// Everything that is held; `None` where nothing is, and nobody waits for it.
    pub(crate) fn held_bytes(&self) -> Option<Vec<u8>> {
        let held = &self.held;
        if held.list.is_empty() && held.callback_thread == 0 && held.waiting_for_room.is_empty() {
            return None;
        }
        let mut bytes = Writer::new();
        bytes.word(u64::from(held.callback_thread));
        bytes.word(held.waiting_for_room.len() as u64);
        for &(thread, slot) in &held.waiting_for_room {
            bytes.word(u64::from(thread));
            bytes.word(u64::from(slot));
        }
        bytes.word(held.list.len() as u64);
        for entry in &held.list {
            let (progress, status) = match entry.progress {
                Progress::Callback(status) if held.running.contains(&entry.id) => (RUNNING, status),
                Progress::Callback(status) => (READY, status),
                Progress::Queued | Progress::OnDevice => (QUEUED, 0),
            };
            let header = &entry.header;
            bytes.word(entry.id);
            bytes.word(u64::from(header.call) | u64::from(header.reply) << 16 | u64::from(header.thread) << 32);
            bytes.word(header.context);
            bytes.word(progress);
            bytes.word(status as u64);
            bytes.blob(&entry.parameters);
        }
        Some(bytes.into_bytes())
    }

    /// Takes up what [`Executor::held_bytes`] gave. All objects are there.
    pub(crate) fn restore_held(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let mut from = Reader::new(bytes);
        let slot = |word: u64| u16::try_from(word).map_err(|_| Malformed("a reply slot that does not exist"));
        self.held.callback_thread = slot(from.word()?)?;
        for _ in 0..from.word()? {
            let thread = from.word32()?;
            self.held.waiting_for_room.push((thread, slot(from.word()?)?));
        }
        for _ in 0..from.word()? {
            let (id, packed, context) = (from.word()?, from.word()?, from.word()?);
            let (state, status) = (from.word()?, from.word()? as i32);
            let parameters = from.blob()?.to_vec();
            let header = CommandHeader {
                call: packed as u16,
                reply: (packed >> 16) as u16,
                length: parameters.len() as u32,
                context,
                thread: (packed >> 32) as u32,
            };
            let progress = match state {
                QUEUED => Progress::Queued,
                READY | RUNNING => Progress::Callback(status),
                _ => return Err(Malformed("a held command that is in no known state")),
            };
            match state {
                READY => self.held.ready.push_back(id),
                RUNNING => drop(self.held.running.insert(id)),
                _ => {}
            }
            let uses = self.uses(&header, &parameters);
            self.held.restore(Entry { id, header, parameters, uses, progress });
        }
        from.end()
    }
}
