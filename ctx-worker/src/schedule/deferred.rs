//! Commands that wait in software, before they go to the driver.
//!
//! ```text
//!   ring ──> what it must come after is deferred, or its stream has no room? ──no──> driver
//!                         │ yes                                                        ^
//!                         └──> deferred, in the order of the ring ── looked through ───┘   when a callback has returned,
//!                                                                                          or a stream has room again
//! ```
//!
//! Commands are deferred for one of two reasons. A **host callback**: later commands on its stream wait until the application
//! has run it, and a stream that waits for nothing else is idle. And a stream that is **full**: the driver blocks when about a
//! thousand commands are in flight on a stream, and the executor, which serves all streams, must not block.
//!
//! A deferral spreads: to commands enqueued behind it, to events recorded there and streams that wait for them, between the
//! legacy default stream and blocking streams, and to callers that synchronise or free. Queries are answered that the work is
//! not done. Deferred commands are part of the saved state, as they came from the ring.

use std::collections::{HashMap, HashSet, VecDeque};

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Reader, Writer};
use rekindle_wire::command::{self, HostFunc};
use rekindle_wire::ring::CommandHeader;

use crate::gpu::driver::Driver;
use crate::resources::ipc::events::SharedRecord;
use crate::schedule::callbacks::Callbacks;
use crate::schedule::dependencies::{Dependencies, EventUse, Role, Scope, Turn};
use crate::session::outcome::Refused;
use crate::session::waiting::{StreamKey, Waiting};

/// A thread with more deferred commands than this waits until there are half as many.
const MANY: usize = 4096;
/// A client whose deferred commands take more memory than this does not obey that limit.
const MOST_BYTES: usize = 1 << 30;

/// The progress of a deferred command that needs more than its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The command's turn has not come.
    Queued,
    /// The command waits for the device.
    OnDevice,
    /// The stream has reached a callback, with this result. The callback is to be run, or is running.
    Callback(CUresult),
}

/// A value that an attribute had when a launch was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    /// Whether the value was set for the kernel, on its device, and not for the function in one context.
    pub(super) of_kernel: bool,
    pub(super) attribute: u32,
    pub(super) value: i32,
}

/// A deferred command.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) id: u64,
    pub(crate) header: CommandHeader,
    pub(crate) parameters: Vec<u8>,
    pub(crate) dependencies: Dependencies,
    pub(crate) progress: Progress,
    /// For a launch, the attributes of its function that have been set since.
    pub(crate) settings: Vec<Setting>,
    /// For a command about an event that processes share, the record that it makes or waits for.
    pub(crate) shared_record: Option<SharedRecord>,
}

/// The next step for a deferred command that no earlier command blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The command stays deferred.
    Stays,
    /// The command stays deferred until the device has reached it; the executor must wait for that.
    WaitsOnDevice,
    /// The command goes to the driver.
    Goes,
    /// The command is over.
    Ends,
}

/// A summary of the deferred commands: a command that must follow any of them is deferred too.
#[derive(Debug, Default)]
struct Blocked {
    count: usize,
    lanes: HashSet<StreamKey>,
    /// Contexts whose legacy default stream, or one of whose blocking streams, is in `lanes`.
    legacy: HashSet<u64>,
    blocking: HashSet<u64>,
    /// Events whose record is deferred; all events that deferred commands name.
    recorded: HashSet<u64>,
    named: HashSet<u64>,
    /// Contexts with deferred commands; contexts that deferred commands end.
    contexts: HashSet<u64>,
    ending: HashSet<u64>,
}

impl Blocked {
    fn lane(&self, dependencies: &Dependencies) -> bool {
        dependencies.lane.is_some_and(|lane| {
            let context = lane.key.context;
            self.lanes.contains(&lane.key)
                || match lane.role {
                    Role::Legacy => self.blocking.contains(&context),
                    Role::Blocking => self.legacy.contains(&context),
                    Role::Free => false,
                }
        })
    }

    fn blocks(&self, dependencies: &Dependencies) -> bool {
        let event = |&(event, what): &(u64, EventUse)| match what {
            EventUse::Wait => self.recorded.contains(&event),
            EventUse::Record | EventUse::Destroy => self.named.contains(&event),
        };
        self.count > 0
            && (self.lane(dependencies)
                || dependencies.events.iter().any(event)
                || self.ending.contains(&dependencies.context)
                || match dependencies.scope {
                    Scope::Nothing => false,
                    Scope::Context(context) => self.contexts.contains(&context),
                    Scope::Everything => true,
                })
    }

    fn add(&mut self, dependencies: &Dependencies) {
        self.count += 1;
        self.contexts.insert(dependencies.context);
        if let Some(lane) = dependencies.lane {
            let context = lane.key.context;
            self.contexts.insert(context);
            self.lanes.insert(lane.key);
            match lane.role {
                Role::Legacy => drop(self.legacy.insert(context)),
                Role::Blocking => drop(self.blocking.insert(context)),
                Role::Free => {}
            }
        }
        for &(event, what) in &dependencies.events {
            self.named.insert(event);
            if what == EventUse::Record {
                self.recorded.insert(event);
            }
        }
        if let Turn::AtRest(context) = dependencies.turn
            && context != 0
        {
            self.ending.insert(context);
        }
    }
}

/// The commands that streams may take during a quiesce.
#[derive(Clone, Copy, Debug)]
struct Steps {
    /// The number that is left.
    left: u32,
    /// There was one, which goes to an idle stream only.
    one: bool,
}

/// All deferred commands.
#[derive(Debug, Default)]
pub(crate) struct DeferredCommands {
    pub(crate) list: VecDeque<Entry>,
    blocked: Blocked,
    pub(crate) next: u64,
    bytes: usize,
    /// Streams that lack only room.
    full: HashSet<StreamKey>,
    /// Whether the list must be checked, because something has happened.
    pub(crate) changed: bool,
    /// Whether the list is being checked.
    pub(crate) looking: bool,
    /// During a quiesce, streams take only these.
    closing: Option<Steps>,
    arrivals: HashMap<u64, CUresult>,
    pub(crate) callbacks: Callbacks,
    by_thread: HashMap<u32, usize>,
    /// Threads that wait for room, and their reply slots.
    pub(crate) waiting_for_room: Vec<(u32, u16)>,
}

impl DeferredCommands {
    /// Called when a deferred command's wait for the device is over.
    pub(crate) fn arrived(&mut self, id: u64, result: CUresult) {
        self.arrivals.insert(id, result);
        self.changed = true;
    }

    /// Called when a callback has returned.
    pub(crate) fn callback_returned(&mut self, id: u64) -> bool {
        let was_running = self.callbacks.running.remove(&id);
        if was_running {
            self.callbacks.returned.insert(id);
            self.changed = true;
        }
        was_running
    }

    /// The next callback to be run, in the form for the application's callback thread.
    pub(crate) fn next_callback(&mut self) -> Option<Writer> {
        while let Some(id) = self.callbacks.ready.pop_front() {
            let Some(entry) = self.entry(id) else { continue };
            let Progress::Callback(status) = entry.progress else { continue };
            let Ok(HostFunc { function, data, kind, named, .. }) = HostFunc::read(&mut Reader::new(&entry.parameters))
            else {
                continue;
            };
            let mut callback = Writer::new();
            [id, kind, function, data, named, status as u64].into_iter().for_each(|word| callback.word(word));
            self.callbacks.running.insert(id);
            return Some(callback);
        }
        None
    }

    /// Whether no deferred command can continue unless the application does something.
    pub(crate) fn is_at_rest(&self) -> bool {
        !self.changed && self.arrivals.is_empty() && (self.full.is_empty() || self.closing.is_some())
    }

    /// Whether a command is deferred that lacks only room in its stream. In a quiesce that may be room that the quiesce denies.
    pub(crate) fn lacks_room(&self) -> bool {
        !self.full.is_empty()
    }

    /// Called when a quiesce begins, or continues by `steps` commands for the device. One goes to a stream that is idle.
    pub(crate) fn close(&mut self, steps: u32) {
        self.closing = Some(Steps { left: steps, one: steps <= 1 });
    }

    /// Whether all steps have been made.
    pub(crate) fn has_stepped(&self) -> bool {
        self.closing.is_some_and(|steps| steps.left == 0)
    }

    /// Called when a quiesce is over, with or without success.
    pub(crate) fn open(&mut self) {
        self.closing = None;
        self.changed = true;
    }

    /// Whether a command must follow any deferred command.
    pub(crate) fn blocks(&self, dependencies: &Dependencies) -> bool {
        self.blocked.blocks(dependencies)
    }

    /// Whether the command's stream has room for it now.
    pub(crate) fn has_room(&self, driver: &Driver, waiting: &mut Waiting, dependencies: &Dependencies) -> bool {
        let Some(lane) = dependencies.lane.filter(|_| dependencies.turn != Turn::Ask) else { return true };
        self.stream_has_room(driver, waiting, lane.key)
    }

    fn stream_has_room(&self, driver: &Driver, waiting: &mut Waiting, stream: StreamKey) -> bool {
        match self.closing {
            None => waiting.has_room(driver, stream),
            Some(Steps { left: 0, .. }) => false,
            Some(Steps { one: true, .. }) => waiting.is_idle(stream),
            Some(Steps { one: false, .. }) => waiting.has_room(driver, stream),
        }
    }

    /// Counts a command of this stream that goes to the driver.
    pub(crate) fn count_step(&mut self, dependencies: &Dependencies) {
        if dependencies.lane.is_some() && dependencies.turn != Turn::Ask {
            self.closing = self.closing.map(|steps| Steps { left: steps.left.saturating_sub(1), ..steps });
        }
    }

    /// Notes what a command that is about to be deferred lacks: room in its stream, or only its turn.
    pub(crate) fn note_lack(&mut self, driver: &Driver, waiting: &mut Waiting, dependencies: &Dependencies) {
        if self.blocked.blocks(dependencies) {
            return;
        }
        match dependencies.lane {
            Some(lane) if !self.has_room(driver, waiting, dependencies) => drop(self.full.insert(lane.key)),
            // The command's turn has come.
            _ => self.changed = true,
        }
    }

    /// Whether the command records an event that a deferred command names, and could otherwise be executed.
    pub(crate) fn only_an_event_blocks(
        &self,
        driver: &Driver,
        waiting: &mut Waiting,
        dependencies: &Dependencies,
    ) -> bool {
        dependencies.events.iter().any(|e| e.1 == EventUse::Record && self.blocked.named.contains(&e.0))
            && !self.blocked.lane(dependencies)
            && !self.blocked.ending.contains(&dependencies.context)
            && self.has_room(driver, waiting, dependencies)
    }

    /// Whether a client sends more and more commands behind work that it holds up itself.
    pub(crate) fn is_too_much(&self) -> bool {
        self.bytes > MOST_BYTES
    }

    /// Checks whether a stream that was full has room again: then the list must be checked.
    pub(crate) fn find_room(&mut self, driver: &Driver, waiting: &mut Waiting) {
        if self.full.iter().any(|stream| self.stream_has_room(driver, waiting, *stream)) {
            self.changed = true;
        }
    }

    /// Removes all deferred commands, to be checked and kept again.
    pub(crate) fn take_all(&mut self) -> VecDeque<Entry> {
        self.blocked = Blocked::default();
        (self.bytes, self.by_thread, self.full) = (0, HashMap::new(), HashSet::new());
        std::mem::take(&mut self.list)
    }

    /// Called when no earlier command blocks a deferred command. Returns whether the command goes to the driver, or waits for
    /// another reason.
    pub(crate) fn next(&mut self, driver: &Driver, waiting: &mut Waiting, entry: &mut Entry) -> Result<Next, Refused> {
        if entry.progress == Progress::Queued && !self.has_room(driver, waiting, &entry.dependencies) {
            self.full.extend(entry.dependencies.lane.map(|lane| lane.key));
            return Ok(Next::Stays);
        }
        if entry.progress == Progress::Queued {
            self.count_step(&entry.dependencies);
        }
        let arrival = self.arrivals.remove(&entry.id);
        Ok(match (entry.dependencies.turn, entry.progress, arrival) {
            (Turn::Callback | Turn::AtRest(_), Progress::Queued, _) => {
                entry.progress = Progress::OnDevice;
                Next::WaitsOnDevice
            }
            (_, Progress::OnDevice, None) => Next::Stays,
            (Turn::Callback, Progress::OnDevice, Some(result)) => {
                let HostFunc { kind, .. } = HostFunc::read(&mut Reader::new(&entry.parameters))?;
                if result != CUDA_SUCCESS && kind == command::HOST_FUNCTION {
                    // Callbacks are not called in a broken context.
                    return Ok(Next::Ends);
                }
                entry.progress = Progress::Callback(result);
                self.callbacks.ready.push_back(entry.id);
                Next::Stays
            }
            (_, Progress::Callback(_), _) if self.callbacks.returned.remove(&entry.id) => Next::Ends,
            (_, Progress::Callback(_), _) => Next::Stays,
            (..) => Next::Goes,
        })
    }

    /// Whether some thread is far ahead.
    pub(crate) fn has_many(&self) -> bool {
        self.by_thread.values().any(|n| *n > MANY)
    }

    /// Removes and returns the reply slots of threads that waited because they were far ahead, and are not any more.
    pub(crate) fn relieved(&mut self) -> Vec<u16> {
        let threads = std::mem::take(&mut self.waiting_for_room);
        let mut relieved = Vec::new();
        for (thread, slot) in threads {
            if self.of_thread(thread) > MANY / 2 {
                self.waiting_for_room.push((thread, slot));
            } else {
                relieved.push(slot);
            }
        }
        relieved
    }

    fn of_thread(&self, thread: u32) -> usize {
        self.by_thread.get(&thread).copied().unwrap_or(0)
    }

    /// Adds a command behind all others.
    pub(crate) fn add(
        &mut self,
        header: CommandHeader,
        parameters: Vec<u8>,
        dependencies: Dependencies,
        progress: Progress,
        shared_record: Option<SharedRecord>,
    ) {
        self.next += 1;
        let settings = Vec::new();
        self.keep(Entry { id: self.next, header, parameters, dependencies, progress, settings, shared_record });
    }

    /// Adds a command that was deferred when it was saved.
    pub(crate) fn restore(&mut self, entry: Entry) {
        self.next = self.next.max(entry.id);
        self.changed = true;
        self.keep(entry);
    }

    /// Keeps a command behind all others that are deferred.
    pub(crate) fn keep(&mut self, entry: Entry) {
        self.blocked.add(&entry.dependencies);
        self.bytes += entry.parameters.len();
        *self.by_thread.entry(entry.header.thread).or_default() += 1;
        self.list.push_back(entry);
    }

    pub(crate) fn entry(&self, id: u64) -> Option<&Entry> {
        self.list.iter().find(|e| e.id == id)
    }

    /// Removes a command that need not be executed any more. Commands behind it stay deferred until the next check, which an
    /// earlier deferred command causes.
    pub(crate) fn take_out(&mut self, id: u64) {
        let at = self.list.iter().position(|e| e.id == id);
        let Some(entry) = at.and_then(|at| self.list.remove(at)) else { return };
        self.bytes = self.bytes.saturating_sub(entry.parameters.len());
        if let Some(count) = self.by_thread.get_mut(&entry.header.thread) {
            *count = count.saturating_sub(1);
        }
    }
}
