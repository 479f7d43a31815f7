//! Commands that wait in software, before they go to the driver.
//!
//! ```text
//!   ring ──> what it must come after is held, or its stream has no room? ──no──> driver
//!                         │ yes                                                    ^
//!                         └──> held, in the order of the ring ── looked through ───┘   when a callback has returned,
//!                                                                                      or a stream has room again
//! ```
//!
//! Two things begin a hold. A **host callback**: what follows it on its stream waits until the application has run it,
//! and a stream that waits for nothing else is idle. And a stream that is **full**: the driver blocks when about a
//! thousand commands are in flight on a stream, and the executor, which serves all streams, must not.
//!
//! A hold spreads: to what is enqueued behind it, to events recorded there and streams that wait for them, between the
//! legacy default stream and blocking ones, to who synchronises or frees. Who asks is told that it is not done. Held
//! commands are part of the saved state, as they came from the ring.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::Ordering::Release;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, HostFunc};
use rekindle_wire::ring::CommandHeader;

use crate::schedule::deferred_settings::Setting;
use crate::schedule::dependencies::{EventUse, Role, Scope, Turn, Uses, word};
use crate::serve::executor::Executor;
use crate::session::outcome::Refused;
use crate::session::waiting::{StreamKey, Then};

/// More held commands of one thread than this make it wait until there are half as many.
const MANY: usize = 4096;
/// A client whose held commands take more than this does not keep to that.
const MOST_BYTES: usize = 1 << 30;

/// How far a held command is that needs more than its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Its turn has not come.
    Queued,
    /// It waits for the device.
    OnDevice,
    /// A callback: the stream has come to it, with this result. It is to be run, or is running.
    Callback(CUresult),
}

/// A held command.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) header: CommandHeader,
    pub(crate) parameters: Vec<u8>,
    pub(crate) uses: Uses,
    pub(crate) progress: Progress,
    /// Of a launch: attributes of its function that have been set since.
    pub(crate) settings: Vec<Setting>,
}

/// What is held, in summary: what comes after any of it is held too.
#[derive(Debug, Default)]
struct Blocked {
    count: usize,
    lanes: HashSet<StreamKey>,
    /// Contexts whose legacy default stream, or one of whose blocking streams, is in `lanes`.
    legacy: HashSet<u64>,
    blocking: HashSet<u64>,
    /// Events whose record is held; all events that something held names.
    recorded: HashSet<u64>,
    named: HashSet<u64>,
    /// Contexts with something held; those that something held ends.
    contexts: HashSet<u64>,
    ending: HashSet<u64>,
}

impl Blocked {
    fn lane(&self, uses: &Uses) -> bool {
        uses.lane.is_some_and(|lane| {
            let context = lane.key.context;
            self.lanes.contains(&lane.key)
                || match lane.role {
                    Role::Legacy => self.blocking.contains(&context),
                    Role::Blocking => self.legacy.contains(&context),
                    Role::Free => false,
                }
        })
    }

    fn holds(&self, uses: &Uses) -> bool {
        let event = |&(event, what): &(u64, EventUse)| match what {
            EventUse::Wait => self.recorded.contains(&event),
            EventUse::Record | EventUse::Destroy => self.named.contains(&event),
        };
        self.count > 0
            && (self.lane(uses)
                || uses.events.iter().any(event)
                || self.ending.contains(&uses.context)
                || match uses.scope {
                    Scope::Nothing => false,
                    Scope::Context(context) => self.contexts.contains(&context),
                    Scope::Everything => true,
                })
    }

    fn add(&mut self, uses: &Uses) {
        self.count += 1;
        self.contexts.insert(uses.context);
        if let Some(lane) = uses.lane {
            let context = lane.key.context;
            self.contexts.insert(context);
            self.lanes.insert(lane.key);
            match lane.role {
                Role::Legacy => drop(self.legacy.insert(context)),
                Role::Blocking => drop(self.blocking.insert(context)),
                Role::Free => {}
            }
        }
        for &(event, what) in &uses.events {
            self.named.insert(event);
            if what == EventUse::Record {
                self.recorded.insert(event);
            }
        }
        if let Turn::AtRest(context) = uses.turn
            && context != 0
        {
            self.ending.insert(context);
        }
    }
}

/// Everything that is held.
#[derive(Debug, Default)]
pub(crate) struct Held {
    pub(crate) list: VecDeque<Entry>,
    blocked: Blocked,
    pub(crate) next: u64,
    bytes: usize,
    /// Streams whose only lack is room.
    full: HashSet<StreamKey>,
    /// Something has happened: the list must be looked through.
    pub(crate) changed: bool,
    looking: bool,
    /// While a quiesce goes on, streams take commands only when they are idle, and only so many.
    closing: Option<u32>,
    arrivals: HashMap<u64, CUresult>,
    /// Callbacks: to be run, running, returned.
    pub(crate) ready: VecDeque<u64>,
    pub(crate) running: HashSet<u64>,
    pub(crate) returned: HashSet<u64>,
    /// The reply slot in which the client's callback thread waits, 0 for none.
    pub(crate) callback_thread: u16,
    by_thread: HashMap<u32, usize>,
    /// Threads that wait for room, and their reply slots.
    pub(crate) waiting_for_room: Vec<(u32, u16)>,
    /// Streams that are not ordered with the legacy default stream.
    free_streams: HashSet<u64>,
}

impl Held {
    pub(crate) fn is_free(&self, stream: u64) -> bool {
        self.free_streams.contains(&stream)
    }

    /// `cuStreamCreateWithPriority` was executed.
    pub(crate) fn stream_created(&mut self, handle: u64, args: &Reader<'_>) {
        const NON_BLOCKING: u64 = 1;
        if word(args.all(), 1) == Some(NON_BLOCKING) {
            self.free_streams.insert(handle);
        }
    }

    pub(crate) fn stream_destroyed(&mut self, handle: u64) {
        self.free_streams.remove(&handle);
    }

    /// What a held command waited for on the device is done.
    pub(crate) fn arrived(&mut self, id: u64, result: CUresult) {
        self.arrivals.insert(id, result);
        self.changed = true;
    }

    /// A callback has returned.
    pub(crate) fn callback_returned(&mut self, id: u64) -> bool {
        let was_running = self.running.remove(&id);
        if was_running {
            self.returned.insert(id);
            self.changed = true;
        }
        was_running
    }

    /// Whether nothing here goes on unless the application does something.
    pub(crate) fn is_at_rest(&self) -> bool {
        !self.changed && self.arrivals.is_empty() && (self.full.is_empty() || self.closing.is_some())
    }

    /// A quiesce begins, or goes on by `steps` commands for the device.
    pub(crate) fn close(&mut self, steps: u32) {
        self.closing = Some(steps);
    }

    /// Whether all steps have been made.
    pub(crate) fn has_stepped(&self) -> bool {
        self.closing == Some(0)
    }

    /// A quiesce is over, with or without success.
    pub(crate) fn open(&mut self) {
        self.closing = None;
        self.changed = true;
    }

    pub(crate) fn of_thread(&self, thread: u32) -> usize {
        self.by_thread.get(&thread).copied().unwrap_or(0)
    }

    /// Adds a command behind all others.
    pub(crate) fn add(&mut self, header: CommandHeader, parameters: Vec<u8>, uses: Uses, progress: Progress) {
        self.next += 1;
        self.keep(Entry { id: self.next, header, parameters, uses, progress, settings: Vec::new() });
    }

    /// Adds a command that was held when it was saved.
    pub(crate) fn restore(&mut self, entry: Entry) {
        self.next = self.next.max(entry.id);
        self.changed = true;
        self.keep(entry);
    }

    fn keep(&mut self, entry: Entry) {
        self.blocked.add(&entry.uses);
        self.bytes += entry.parameters.len();
        *self.by_thread.entry(entry.header.thread).or_default() += 1;
        self.list.push_back(entry);
    }

    pub(crate) fn entry(&self, id: u64) -> Option<&Entry> {
        self.list.iter().find(|e| e.id == id)
    }

    /// Takes a command out that need not be executed any more. What it held up stays held until the next look, which
    /// comes because of what it was behind.
    pub(crate) fn take_out(&mut self, id: u64) {
        let at = self.list.iter().position(|e| e.id == id);
        let Some(entry) = at.and_then(|at| self.list.remove(at)) else { return };
        self.bytes = self.bytes.saturating_sub(entry.parameters.len());
        if let Some(count) = self.by_thread.get_mut(&entry.header.thread) {
            *count = count.saturating_sub(1);
        }
    }
}

impl Executor {
    /// Executes a command, or holds it. An error means that the client does not speak our language, and is given up.
    pub(crate) fn execute(&mut self, header: CommandHeader, parameters: &[u8]) -> Result<(), Refused> {
        self.scheduler.times.commands += 1;
        let uses = self.uses(&header, parameters);
        let waits = matches!(uses.turn, Turn::Callback | Turn::AtRest(_));
        if waits || self.scheduler.deferred.blocked.holds(&uses) || !self.has_room(&uses) {
            return self.hold(header, parameters, uses);
        }
        self.count_step(&uses);
        self.perform(header, parameters)?;
        self.tick(&uses);
        Ok(())
    }

    /// Whether something waits that the executor must look at again and again.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.session.waiting.is_empty() || !self.scheduler.deferred.is_at_rest()
    }

    /// Whether the command's stream takes it now.
    fn has_room(&mut self, uses: &Uses) -> bool {
        let Some(lane) = uses.lane.filter(|_| uses.turn != Turn::Ask) else { return true };
        match self.scheduler.deferred.closing {
            None => self.session.waiting.has_room(self.driver(), lane.key),
            Some(steps) => steps > 0 && self.session.waiting.is_idle(lane.key),
        }
    }

    /// A command of this stream goes to the driver.
    fn count_step(&mut self, uses: &Uses) {
        if uses.lane.is_some() && uses.turn != Turn::Ask {
            self.scheduler.deferred.closing = self.scheduler.deferred.closing.map(|steps| steps.saturating_sub(1));
        }
    }

    /// Records a private event where much has been enqueued, to learn later how much of it is done.
    fn tick(&mut self, uses: &Uses) {
        let Some(lane) = uses.lane.filter(|lane| self.session.waiting.wants_tick(lane.key)) else { return };
        if self.enter_context(lane.key.context).is_ok() {
            self.session.waiting.tick(self.driver(), lane.key);
        }
    }

    fn hold(&mut self, header: CommandHeader, parameters: &[u8], uses: Uses) -> Result<(), Refused> {
        self.header = header;
        if uses.turn == Turn::Ask {
            self.answer(header.reply, CUDA_ERROR_NOT_READY, &[]);
            return Ok(());
        }
        self.memory.ipc_events.hold(header.call, parameters);
        let mut header = header;
        if !self.scheduler.deferred.blocked.holds(&uses) {
            match uses.lane {
                Some(lane) if !self.has_room(&uses) => drop(self.scheduler.deferred.full.insert(lane.key)),
                // Its turn has come.
                _ => self.scheduler.deferred.changed = true,
            }
        }
        match header.call {
            // Its stream goes on: what is held means the event as it was before.
            _ if self.only_an_event_holds(&uses) => {
                for (event, _) in &uses.events {
                    self.set_event_aside(*event)?;
                }
                self.count_step(&uses);
                self.perform(header, parameters)?;
                self.tick(&uses);
                return Ok(());
            }
            command::LAUNCH if header.reply != 0 => {
                // The driver would say now whether it may be, and its caller may have to go on for it ever to be.
                let allowed = self.enter_context(header.context).and_then(|()| {
                    let (mut call, mut loading, code) = self.code_parts();
                    code.check_launch(&mut call, &mut loading, parameters)
                });
                match allowed {
                    Ok(()) => self.answer(header.reply, CUDA_SUCCESS, &[]),
                    Err(Refused::Code(code)) => {
                        self.answer(header.reply, code, &[]);
                        return Ok(());
                    }
                    Err(refused) => return Err(refused),
                }
                header.reply = 0;
                self.scheduler.deferred.add(header, parameters.to_vec(), uses, Progress::Queued);
            }
            command::COPY_FROM_CHUNK => self.hold_chunk(header, parameters, &uses)?,
            command::COPY_BOX_FROM_CHUNK => self.hold_box_chunk(header, parameters, &uses)?,
            _ => self.scheduler.deferred.add(header, parameters.to_vec(), uses, Progress::Queued),
        }
        if self.scheduler.deferred.bytes > MOST_BYTES {
            self.give_up(&"it sends more and more behind what it holds up itself");
        }
        self.show_pressure();
        self.look_at_held();
        Ok(())
    }

    /// Whether it records an event that something held names, and could be executed otherwise.
    fn only_an_event_holds(&mut self, uses: &Uses) -> bool {
        uses.events.iter().any(|e| e.1 == EventUse::Record && self.scheduler.deferred.blocked.named.contains(&e.0))
            && !self.scheduler.deferred.blocked.lane(uses)
            && !self.scheduler.deferred.blocked.ending.contains(&uses.context)
            && self.has_room(uses)
    }

    /// Executes what need not be held any more, in its order.
    pub(crate) fn look_at_held(&mut self) {
        if self.scheduler.deferred.looking {
            return;
        }
        let (driver, waiting) = (self.driver(), &mut self.session.waiting);
        let room = |stream: &StreamKey| match self.scheduler.deferred.closing {
            None => waiting.has_room(driver, *stream),
            Some(steps) => steps > 0 && waiting.is_idle(*stream),
        };
        if self.scheduler.deferred.full.iter().any(room) {
            self.scheduler.deferred.changed = true;
        }
        while std::mem::take(&mut self.scheduler.deferred.changed) {
            self.scheduler.deferred.looking = true;
            if let Err(refused) = self.look_once() {
                self.give_up(&refused);
            }
            self.scheduler.deferred.looking = false;
            self.show_pressure();
            self.run_callback();
        }
    }

    fn look_once(&mut self) -> Result<(), Refused> {
        let held = &mut self.scheduler.deferred;
        held.blocked = Blocked::default();
        (held.bytes, held.by_thread, held.full) = (0, HashMap::new(), HashSet::new());
        for mut entry in std::mem::take(&mut held.list) {
            if self.scheduler.deferred.blocked.holds(&entry.uses) || !self.goes(&mut entry)? {
                self.scheduler.deferred.keep(entry);
            }
        }
        Ok(())
    }

    /// Nothing before a held command holds it: whether it goes, or waits for something of its own.
    fn goes(&mut self, entry: &mut Entry) -> Result<bool, Refused> {
        if entry.progress == Progress::Queued && !self.has_room(&entry.uses) {
            self.scheduler.deferred.full.extend(entry.uses.lane.map(|lane| lane.key));
            return Ok(false);
        }
        if entry.progress == Progress::Queued {
            self.count_step(&entry.uses);
        }
        let arrival = self.scheduler.deferred.arrivals.remove(&entry.id);
        match (entry.uses.turn, entry.progress, arrival) {
            (Turn::Callback | Turn::AtRest(_), Progress::Queued, _) => {
                entry.progress = Progress::OnDevice;
                if let Err(code) = self.wait_on_device(entry) {
                    self.scheduler.deferred.arrived(entry.id, code);
                }
                Ok(false)
            }
            (_, Progress::OnDevice, None) => Ok(false),
            (Turn::Callback, Progress::OnDevice, Some(result)) => {
                let HostFunc { kind, .. } = HostFunc::read(&mut Reader::new(&entry.parameters))?;
                if result != CUDA_SUCCESS && kind == command::HOST_FUNCTION {
                    // Not called in a broken context.
                    return Ok(true);
                }
                entry.progress = Progress::Callback(result);
                self.scheduler.deferred.ready.push_back(entry.id);
                Ok(false)
            }
            (_, Progress::Callback(_), _) => Ok(self.scheduler.deferred.returned.remove(&entry.id)),
            (..) => {
                if entry.settings.is_empty() {
                    self.perform(entry.header, &entry.parameters)?;
                } else {
                    self.perform_as_set(entry)?;
                }
                self.tick(&entry.uses);
                Ok(true)
            }
        }
    }

    fn wait_on_device(&mut self, entry: &Entry) -> Result<(), CUresult> {
        self.header = entry.header;
        let code = |refused| match refused {
            Refused::Code(code) => code,
            _ => CUDA_ERROR_INVALID_VALUE,
        };
        let streams = match entry.uses.turn {
            Turn::Callback => {
                let callback = HostFunc::read(&mut Reader::new(&entry.parameters));
                let HostFunc { stream, .. } = callback.map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
                self.enter_context(entry.header.context).map_err(code)?;
                self.handle_stream(stream).map_err(code)?;
                vec![self.stream_key(stream).map_err(code)?]
            }
            _ => self.session.waiting.busy(0),
        };
        self.when_done(streams, Then::Held(entry.id)).map_err(code)
    }

    /// Says whether some thread is far ahead, and lets those go on that no longer are.
    pub(crate) fn show_pressure(&mut self) {
        let Some(shared) = self.session.shared else { return };
        let many = self.scheduler.deferred.by_thread.values().any(|n| *n > MANY);
        shared.header().pressure.store(u32::from(many), Release);
        if self.scheduler.deferred.waiting_for_room.is_empty() {
            return;
        }
        let threads = std::mem::take(&mut self.scheduler.deferred.waiting_for_room);
        for (thread, slot) in threads {
            if self.scheduler.deferred.of_thread(thread) > MANY / 2 {
                self.scheduler.deferred.waiting_for_room.push((thread, slot));
            } else {
                self.answer(slot, CUDA_SUCCESS, &[]);
            }
        }
    }
}
