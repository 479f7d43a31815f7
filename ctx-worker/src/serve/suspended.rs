//! The requests `Suspend` and `BringBack`, and the state between them: the client has no GPU memory, and no command is executed.
//!
//! ```text
//!   Quiesced ──Suspend──> Suspended ──a command, BringBack, Quiesce──> Filling ──content is there──> Open
//!                          ^      │ the GPU has no room
//!                          └──────┘ again every 100 ms
//! ```
//!
//! The client's commands wait in the ring, in their order. Everything that is needed to go on is in this process, so a suspended
//! client needs no daemon.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rekindle_images::{Client, DataFile, DataReader, HashKey};
use rekindle_wire::control::{self, Suspension, WorkerReply};
use rekindle_wire::standstill;
use tracing::{error, info, warn};

use crate::checkpoint::suspend::{Kept, Origin, is_out_of_memory};
use crate::checkpoint::template::Template;
use crate::serve::channel::{self, Event};
use crate::serve::refusal::Refusal;
use crate::serve::request_loop::{Answered, News, Server, done, or_failed};
use crate::serve::state::{Closed, How, State, Suspended};

/// How often a client that is to resume looks for room on its GPU.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// How long a suspended worker sleeps at a time.
const SLEEP: Duration = Duration::from_secs(5);

impl Suspended {
    /// For listings.
    pub(super) fn describe(&self) -> Suspension {
        Suspension { bytes: self.bytes, hold: self.hold, waits_for_room: self.waits_since.is_some(), deep: false }
    }
}

impl Server {
    /// A client that is suspended already: its commands wait for a request to resume from now on, or do not.
    pub(super) fn hold_suspended(&self, mut suspended: Box<Suspended>, hold: bool) -> (State, Answered) {
        suspended.hold = hold;
        if hold {
            suspended.waits_since = None;
        }
        (State::Suspended(suspended), Ok((WorkerReply::Suspended { bytes: 0 }, Vec::new())))
    }

    /// Gives the memory of a quiesced client back, whose content lies in these files.
    pub(super) fn suspend(
        &mut self,
        closed: Closed,
        (data, key): (Vec<control::DataFile>, Result<HashKey, Refusal>),
        How { hold, deep }: How,
        blob: &[u8],
        fds: Vec<OwnedFd>,
    ) -> (State, Answered) {
        let kept = key.and_then(|key| {
            let client = Box::new(Client::from_bytes(blob)?);
            if fds.len() != data.len() {
                return Err(Refusal::Files { came: fds.len(), files: data.len() });
            }
            let file = |(it, fd): (control::DataFile, OwnedFd)| {
                (DataFile { depth: it.depth, index: it.index }, channel::file(fd))
            };
            let reader = DataReader::new(key, data.into_iter().zip(fds).map(file));
            let kept = Kept {
                client,
                reader: Some(reader),
                template: Template::default(),
                origin: Origin::Suspension,
                borrowing: None,
            };
            let (mut layers, checkpoint) = self.executor.layers();
            checkpoint.can_suspend(&mut layers, &kept)?;
            Ok(kept)
        });
        let kept = match kept {
            Ok(kept) => kept,
            Err(refusal) => return (State::Quiesced(closed), Err(refusal)),
        };
        self.executor.checkpoint.before_opening(self.executor.call.gpu.driver);
        self.channel.silence.listen(false);
        standstill::allow(closed.consumer.shared());
        if deep {
            let (keeper, bytes) = self.keep(closed, kept, hold);
            return (State::Keeper(keeper), Ok((WorkerReply::Suspended { bytes }, Vec::new())));
        }
        let (mut layers, checkpoint) = self.executor.layers();
        let began = Instant::now();
        match checkpoint.give_back(&mut layers, false) {
            Ok(bytes) => {
                info!(bytes, ms = began.elapsed().as_millis() as u64, hold, "suspended");
                let suspended = Suspended { consumer: closed.consumer, kept, bytes, hold, waits_since: None };
                (State::Suspended(Box::new(suspended)), Ok((WorkerReply::Suspended { bytes }, Vec::new())))
            }
            Err(failed) => or_failed(Err(Refusal::Suspend(failed.into()))),
        }
    }

    /// Waits until there is news, a command comes, or it is time to look for room again.
    pub(super) fn wait_suspended(&self, suspended: &Suspended, events: &Receiver<Event>) -> News {
        loop {
            match events.try_recv() {
                Ok(event) => return News::Event(event),
                Err(TryRecvError::Disconnected) => return News::End,
                Err(TryRecvError::Empty) => {}
            }
            if suspended.waits_since.is_some() {
                return events.recv_timeout(RETRY_INTERVAL).map_or(News::Resume, News::Event);
            }
            // Commands that the quiesce has deferred are not in the ring any more.
            let is_wanted = suspended.consumer.ready() || self.executor.has_commands_held_back();
            if suspended.hold {
                return events.recv().map_or(News::End, News::Event);
            }
            if is_wanted {
                return News::Resume;
            }
            // An event that arrives after the check above sets this.
            if !self.channel.news.swap(false, Ordering::AcqRel) {
                self.sleep(&suspended.consumer, SLEEP);
            }
        }
    }

    /// Makes the client's memory again and begins to load its content. If the GPU has no room, the client stays suspended and
    /// tries again.
    pub(super) fn resume(&mut self, mut suspended: Box<Suspended>) -> (State, Answered) {
        let channel = Arc::clone(&self.channel);
        let over = move || {
            channel.tell(Event::LoadOver);
        };
        let (mut layers, checkpoint) = self.executor.layers();
        match checkpoint.bring_back(&mut layers, &mut suspended.kept, over) {
            Ok(()) => {
                let waited = suspended.waits_since.map_or(Duration::ZERO, |since| since.elapsed());
                info!(bytes = suspended.bytes, waited_ms = waited.as_millis() as u64, "resuming");
                (State::Filling(suspended.consumer), done(Ok(())))
            }
            Err(why) if is_out_of_memory(&why) => {
                let first = suspended.waits_since.is_none();
                if first {
                    warn!(
                        bytes = suspended.bytes,
                        "the GPU has no room for the client's memory now ({why}): waiting for it"
                    );
                }
                suspended.waits_since.get_or_insert_with(Instant::now);
                // Clones of other processes make room, or other processes are suspended.
                self.channel.ask_for_room(self.executor.room_to_resume());
                let what = "it is suspended, and its GPU has no room for its memory now".to_owned();
                (State::Suspended(suspended), Ok((WorkerReply::Busy { what }, Vec::new())))
            }
            Err(why) => {
                error!("the client's memory cannot be made again: {why}");
                or_failed(Err(why.into()))
            }
        }
    }

    /// A client that is to come to rest needs its memory.
    pub(super) fn quiesce_suspended(&mut self, suspended: Box<Suspended>, timeout: Duration) -> (State, Answered) {
        match self.resume(suspended) {
            (State::Filling(consumer), _) => self.quiesce_filling(consumer, timeout),
            other => other,
        }
    }
}
