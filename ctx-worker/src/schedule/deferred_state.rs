//! Deferred commands as bytes of the saved state. At a quiesce each deferred command is either as it came from the ring, or a
//! callback that the application is to run or is running.

use rekindle_images::BlobKind;
use rekindle_wire::codec::Malformed;
use rekindle_wire::ring::CommandHeader;

use crate::resources::Memory;
use crate::resources::ipc::events::SharedRecord;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::saved::{Part, Saved};
use crate::schedule::Scheduler;
use crate::schedule::deferred::{DeferredCommands, Entry, Progress, Setting};
use crate::session::Session;
use crate::session::state::{self, DeferredCommand, DeferredProgress, FormerAttribute, StateError, WaitingForRoom};

impl Setting {
    /// The form in which an image keeps the setting.
    pub(crate) fn saved(&self) -> FormerAttribute {
        let Self { of_kernel, attribute, value } = *self;
        FormerAttribute { of_kernel, attribute, value, ..FormerAttribute::default() }
    }

    /// Restores a setting from the result of [`Setting::saved`].
    pub(crate) fn restored(saved: &FormerAttribute) -> Self {
        Self { of_kernel: saved.of_kernel, attribute: saved.attribute, value: saved.value }
    }
}

impl DeferredCommands {
    /// All deferred commands; `None` if no command is deferred and nobody waits for room.
    fn saved(&self) -> Result<Option<Vec<u8>>, StateError> {
        if self.list.is_empty() && self.callbacks.thread == 0 && self.waiting_for_room.is_empty() {
            return Ok(None);
        }
        let waiting = |&(thread, reply): &(u32, u16)| WaitingForRoom {
            thread,
            reply: u32::from(reply),
            ..WaitingForRoom::default()
        };
        let command = |entry: &Entry| {
            let (progress, status) = match entry.progress {
                Progress::Callback(status) if self.callbacks.running.contains(&entry.id) => {
                    (DeferredProgress::RUNNING, status)
                }
                Progress::Callback(status) => (DeferredProgress::READY, status),
                Progress::Queued | Progress::OnDevice => (DeferredProgress::QUEUED, 0),
            };
            DeferredCommand {
                id: entry.id,
                call: u32::from(entry.header.call),
                reply: u32::from(entry.header.reply),
                thread: entry.header.thread,
                context: entry.header.context,
                progress: progress.into(),
                status,
                parameters: entry.parameters.clone(),
                settings: entry.settings.iter().map(|setting| setting.saved()).collect(),
                shared_record: entry.shared_record.map(SharedRecord::saved).into(),
                ..DeferredCommand::default()
            }
        };
        let saved = state::DeferredCommands {
            callback_thread: u32::from(self.callbacks.thread),
            waiting_for_room: self.waiting_for_room.iter().map(waiting).collect(),
            commands: self.list.iter().map(command).collect(),
            ..state::DeferredCommands::default()
        };
        state::bytes(&saved).map(Some)
    }
}

/// All deferred commands are saved in one part.
impl Saved for Scheduler {
    const KIND: BlobKind = BlobKind::DeferredCommands;
    type With<'a> = (&'a Session, &'a Memory);

    fn save(&self) -> Result<Vec<Part>, StateError> {
        Ok(self.deferred.saved()?.into_iter().map(|bytes| Part { handle: 0, bytes }).collect())
    }

    fn load(&mut self, part: Part, (session, memory): Self::With<'_>) -> Result<(), NotLoaded> {
        let restored = self.restore_deferred(session, memory, &part.bytes);
        restored.map_err(|why| NotLoaded::Part { part: "deferred commands", why })
    }
}

impl Scheduler {
    /// Restores the result of [`DeferredCommands::saved`].
    fn restore_deferred(&mut self, session: &Session, memory: &Memory, bytes: &[u8]) -> Result<(), Malformed> {
        let saved: state::DeferredCommands = state::parse(bytes)?;
        let slot = |word: u32| u16::try_from(word).map_err(|_| Malformed("a reply slot that does not exist"));
        self.deferred.callbacks.thread = slot(saved.callback_thread)?;
        for it in &saved.waiting_for_room {
            self.deferred.waiting_for_room.push((it.thread, slot(it.reply)?));
        }
        for it in saved.commands {
            let header = CommandHeader {
                call: u16::try_from(it.call).map_err(|_| Malformed("a call that does not exist"))?,
                reply: slot(it.reply)?,
                length: it.parameters.len() as u32,
                context: it.context,
                thread: it.thread,
            };
            let progress = it.progress.enum_value().map_err(|_| Malformed("a deferred command in no known state"))?;
            match progress {
                DeferredProgress::READY => self.deferred.callbacks.ready.push_back(it.id),
                DeferredProgress::RUNNING => drop(self.deferred.callbacks.running.insert(it.id)),
                DeferredProgress::QUEUED => {}
            }
            let progress = match progress {
                DeferredProgress::QUEUED => Progress::Queued,
                DeferredProgress::READY | DeferredProgress::RUNNING => Progress::Callback(it.status),
            };
            let dependencies = self.dependencies(session, memory, &header, &it.parameters);
            let settings = it.settings.iter().map(Setting::restored).collect();
            let shared_record = it.shared_record.as_ref().map(SharedRecord::restored).transpose()?;
            self.deferred.restore(Entry {
                id: it.id,
                header,
                parameters: it.parameters,
                dependencies,
                progress,
                settings,
                shared_record,
            });
        }
        Ok(())
    }
}
