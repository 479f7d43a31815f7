//! Held commands as bytes of the saved state. At a quiesce each is as it came from the ring, or a callback that the
//! application is to run or is running.

use rekindle_wire::codec::Malformed;
use rekindle_wire::ring::CommandHeader;

use crate::schedule::deferred::{Entry, Progress};
use crate::schedule::deferred_settings::Setting;
use crate::serve::executor::Executor;
use crate::session::state::{self, Held, HeldCommand, HeldProgress, StateError, WaitingForRoom};

impl Executor {
    /// Everything that is held; `None` where nothing is, and nobody waits for it.
    pub(crate) fn held_bytes(&self) -> Result<Option<Vec<u8>>, StateError> {
        let held = &self.scheduler.deferred;
        if held.list.is_empty() && held.callback_thread == 0 && held.waiting_for_room.is_empty() {
            return Ok(None);
        }
        let waiting = |&(thread, reply): &(u32, u16)| WaitingForRoom {
            thread,
            reply: u32::from(reply),
            ..WaitingForRoom::default()
        };
        let command = |entry: &Entry| {
            let (progress, status) = match entry.progress {
                Progress::Callback(status) if held.running.contains(&entry.id) => (HeldProgress::RUNNING, status),
                Progress::Callback(status) => (HeldProgress::READY, status),
                Progress::Queued | Progress::OnDevice => (HeldProgress::QUEUED, 0),
            };
            HeldCommand {
                id: entry.id,
                call: u32::from(entry.header.call),
                reply: u32::from(entry.header.reply),
                thread: entry.header.thread,
                context: entry.header.context,
                progress: progress.into(),
                status,
                parameters: entry.parameters.clone(),
                settings: entry.settings.iter().map(|setting| setting.saved()).collect(),
                ..HeldCommand::default()
            }
        };
        let saved = Held {
            callback_thread: u32::from(held.callback_thread),
            waiting_for_room: held.waiting_for_room.iter().map(waiting).collect(),
            commands: held.list.iter().map(command).collect(),
            ..Held::default()
        };
        state::bytes(&saved).map(Some)
    }

    /// Takes up what [`Executor::held_bytes`] gave. All objects are there.
    pub(crate) fn restore_held(&mut self, bytes: &[u8]) -> Result<(), Malformed> {
        let saved: Held = state::parse(bytes)?;
        let slot = |word: u32| u16::try_from(word).map_err(|_| Malformed("a reply slot that does not exist"));
        self.scheduler.deferred.callback_thread = slot(saved.callback_thread)?;
        for it in &saved.waiting_for_room {
            self.scheduler.deferred.waiting_for_room.push((it.thread, slot(it.reply)?));
        }
        for it in saved.commands {
            let header = CommandHeader {
                call: u16::try_from(it.call).map_err(|_| Malformed("a call that does not exist"))?,
                reply: slot(it.reply)?,
                length: it.parameters.len() as u32,
                context: it.context,
                thread: it.thread,
            };
            let progress = it.progress.enum_value().map_err(|_| Malformed("a held command in no known state"))?;
            match progress {
                HeldProgress::READY => self.scheduler.deferred.ready.push_back(it.id),
                HeldProgress::RUNNING => drop(self.scheduler.deferred.running.insert(it.id)),
                HeldProgress::QUEUED => {}
            }
            let progress = match progress {
                HeldProgress::QUEUED => Progress::Queued,
                HeldProgress::READY | HeldProgress::RUNNING => Progress::Callback(it.status),
            };
            let uses = self.uses(&header, &it.parameters);
            let settings = it.settings.iter().map(Setting::restored).collect();
            self.scheduler.deferred.restore(Entry {
                id: it.id,
                header,
                parameters: it.parameters,
                uses,
                progress,
                settings,
            });
        }
        Ok(())
    }
}
