//! The reporting mode for writes: checks whether commands write only the memory that predictions name.
//!
//! ```text
//!   command ──> what may it do? ──> idle, hash all memory ──> driver ──> idle, hash all memory ──> what has changed
//!                                   (as after the last one)                                        and was not named?
//! ```
//!
//! Everything is synchronous, so this mode is for counting on small sizes. A command that does not end by itself (it waits for
//! a later command) is not watched any longer after [`TIMEOUT`], nor are the commands after it until the device is idle. Not
//! checked are memory that the client has mapped without access or shares with other processes, arrays, and variables in
//! contexts other than a device's primary one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rekindle_images::ImageError;
use rekindle_images::content::{ContentHash, ContentKey};
use rekindle_wire::access::AccessReport;
use rekindle_wire::command;
use thiserror::Error;
use tracing::{info, warn};

use super::client::ClientView;
use super::hash::{Hasher, MOST_PIECES};
use super::params::Class;
use super::set::Access;
use super::tracker::Tracker;
use crate::gpu::Gpu;
use crate::gpu::driver::{CallFailed, Driver};
use crate::resources::units::Unit;
use crate::resources::{Code, Memory};
use crate::schedule::rest::{Broken, comes_to_rest};
use crate::session::Session;
use crate::session::call::Call;

/// How long a command may take.
pub(super) const TIMEOUT: Duration = Duration::from_millis(500);
/// The maximum number of kernels of a graph that are named.
const NAMED: usize = 4;

/// The counts. A worker has one client. The thread of the client's connection notices its end.
static REPORT: Mutex<Option<AccessReport>> = Mutex::new(None);

fn report() -> MutexGuard<'static, Option<AccessReport>> {
    REPORT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The counts so far, if the mode is on.
pub(crate) fn counted() -> Option<AccessReport> {
    report().clone()
}

/// Writes the counts into the log as JSON, when the client is gone.
pub(crate) fn log_at_end() {
    if let Some(report) = counted()
        && let Ok(counts) = serde_json::to_string(&report)
    {
        info!("accesses: {counts}");
    }
}

/// Counts something, if the mode is on.
pub(super) fn count(add: impl FnOnce(&mut AccessReport)) {
    if let Some(report) = report().as_mut() {
        add(report);
    }
}

/// Begins to count.
pub(super) fn begin(counts: AccessReport) {
    *report() = Some(counts);
}

/// Whether a command of ours that accesses no memory changes none either.
pub(super) fn asks(call: u16) -> bool {
    [command::STREAM_SYNC, command::EVENT_SYNC, command::CONTEXT_SYNC, command::CALLBACK_NEXT].contains(&call)
}

/// Observes the accesses of a client's commands.
pub(crate) struct Observation {
    hasher: Hasher,
    /// The maximum number of bytes that are hashed.
    limit: u64,
    /// The hashes after the last command; `None` if something may have run since.
    last: Option<HashMap<Unit, ContentHash>>,
    /// Whether the device did not become idle at the last wait.
    restless: bool,
    stopped: bool,
}

/// The prediction for a command that is about to be executed.
pub(crate) struct Watch {
    access: Access,
    call: u16,
    /// The hashes of the memory before the command; `None` if it cannot be watched.
    before: Option<HashMap<Unit, ContentHash>>,
}

/// Reasons why observing cannot begin.
#[derive(Debug, Error)]
pub(crate) enum ObserveError {
    #[error(transparent)]
    Key(#[from] ImageError),
    #[error(transparent)]
    Broken(#[from] Broken),
    #[error(transparent)]
    Driver(#[from] CallFailed),
}

impl Observation {
    /// Begins to observe, before there is a client. `limit` is the maximum number of bytes that are hashed.
    ///
    /// # Errors
    /// Observing cannot begin.
    pub(crate) fn start(gpu: &mut Gpu, memory: &Memory, limit: u64) -> Result<Self, ObserveError> {
        let key = ContentKey::random()?;
        let mut hasher = Hasher::new(&key, memory.devices.len(), limit);
        for (ordinal, device) in memory.devices.iter().enumerate() {
            hasher.prepare(gpu.driver, (ordinal, device.device), device.primary)?;
        }
        gpu.leave();
        begin(AccessReport::default());
        Ok(Self { hasher, limit, last: Some(HashMap::new()), restless: false, stopped: false })
    }

    /// Called before a primary context is reset.
    pub(crate) fn release_hasher(&mut self, driver: &Driver, ordinal: usize) {
        self.hasher.release(driver, ordinal);
    }

    /// Called before a command is executed. Returns `None` if the command accesses no memory.
    pub(crate) fn watch(
        &mut self,
        tracker: &mut Tracker,
        call: &mut Call,
        memory: &Memory,
        code: &Code,
        parameters: &[u8],
    ) -> Option<Watch> {
        call.enter_own().ok()?;
        let header = call.header;
        let client = ClientView { driver: call.driver(), session: &call.session, memory, code };
        let access = tracker.access(&client, &header, parameters);
        if access.is_nothing() {
            // The command may free and allocate memory, also at the same addresses with other content.
            if header.call >= command::FIRST && !asks(header.call) {
                self.last = None;
            }
            return None;
        }
        count_command(tracker, &access, header.call);
        let patience = if self.restless { Duration::ZERO } else { TIMEOUT };
        let before = self.content(tracker, call, memory, code, patience, true);
        Some(Watch { access, call: header.call, before })
    }

    /// Called after the command has been handed to the driver.
    pub(crate) fn watched(
        &mut self,
        tracker: &mut Tracker,
        call: &mut Call,
        memory: &Memory,
        code: &Code,
        watch: Watch,
    ) {
        let patience = if self.restless { Duration::ZERO } else { TIMEOUT };
        self.last = None;
        let after = self.content(tracker, call, memory, code, patience, false);
        let (Some(before), Some(after)) = (&watch.before, after) else { return count(|report| report.unwatched += 1) };
        count(|report| report.watched += 1);
        let changed = after.iter().filter(|(unit, hash)| before.get(*unit).is_some_and(|former| former != *hash));
        let outside: Vec<Unit> =
            changed.map(|(unit, _)| *unit).filter(|unit| !watch.access.writes.contains(unit)).collect();
        if !outside.is_empty() {
            let by = blame(tracker, &call.session, (&watch.access, watch.call));
            for unit in outside {
                warn!("{by} has written {} bytes at {:#x}, which it had not named", unit.size(), unit.start);
                count(|report| report.count_outside(&by, unit.start, unit.size()));
            }
        }
        self.last = Some(after);
    }

    /// The hashes of all memory, now that nothing runs. `None` if they cannot be computed.
    fn content(
        &mut self,
        tracker: &mut Tracker,
        call: &mut Call,
        memory: &Memory,
        code: &Code,
        patience: Duration,
        before: bool,
    ) -> Option<HashMap<Unit, ContentHash>> {
        if self.stopped {
            return None;
        }
        let content = match comes_to_rest(call, patience) {
            Ok(true) => {
                self.restless = false;
                let client = ClientView { driver: call.driver(), session: &call.session, memory, code };
                self.hash(tracker, &client, before)
            }
            Ok(false) => {
                (self.restless, self.last) = (true, None);
                return None;
            }
            Err(error) => Err(error.into()),
        };
        call.gpu.leave();
        let _ = call.enter_own();
        content
            .inspect_err(|why| {
                warn!("accesses are not watched any more: {why}");
                self.stopped = true;
                count(|report| report.stopped = Some(why.to_string()));
            })
            .ok()
            .flatten()
    }

    /// Hashes the units whose hashes are not known from after the last command: all units if these were discarded.
    fn hash(
        &mut self,
        tracker: &mut Tracker,
        client: &ClientView<'_>,
        before: bool,
    ) -> Result<Option<HashMap<Unit, ContentHash>>, ObserveError> {
        let units = readable(client, &tracker.all_units(client));
        if units.len() > MOST_PIECES || units.iter().map(|(_, unit)| unit.size()).sum::<u64>() > self.limit {
            self.last = None;
            return Ok(None);
        }
        let known = self.last.take().filter(|_| before).unwrap_or_default();
        let mut content = HashMap::with_capacity(units.len());
        for (ordinal, device) in client.memory.devices.iter().enumerate() {
            let own = units.iter().filter(|(of, _)| *of == ordinal).map(|(_, unit)| *unit);
            let (old, new): (Vec<Unit>, Vec<Unit>) = own.partition(|unit| known.contains_key(unit));
            content.extend(old.into_iter().filter_map(|unit| Some((unit, *known.get(&unit)?))));
            let place = (ordinal, device.device, device.primary, client.session.processors(ordinal));
            // SAFETY: the client has them mapped, and so that this device may read them.
            let hashes = unsafe { self.hasher.hash(client.driver, place, &new) }?;
            content.extend(new.into_iter().zip(hashes));
        }
        Ok(Some(content))
    }
}

/// Counts a command.
pub(super) fn count_command(tracker: &Tracker, access: &Access, call: u16) {
    let classes: Vec<_> = access.functions.iter().filter_map(|f| Some(tracker.function(*f)?.0)).collect();
    count(|report| {
        for class in &classes {
            match class {
                Class::Values => report.launches.values += 1,
                Class::Signature => report.launches.signature += 1,
                Class::Everything => report.launches.everything += 1,
            }
        }
        match call {
            command::GRAPH_LAUNCH => report.graphs += 1,
            command::LAUNCH if !classes.contains(&Class::Everything) => report.count_named(access.named),
            command::LAUNCH | command::LAUNCH_ON_DEVICES => {}
            _ => report.exact += 1,
        }
    });
}

/// Describes a command after a mispredicted access. From now on its kernels are predicted to access everything.
pub(super) fn blame(tracker: &mut Tracker, session: &Session, (access, call): (&Access, u16)) -> String {
    let mut names: Vec<String> = Vec::new();
    for function in &access.functions {
        if let Some((_, name)) = tracker.function(*function)
            && !names.iter().any(|known| known == name)
        {
            names.push(name.to_owned());
        }
    }
    names.iter().for_each(|name| tracker.was_wrong(name));
    match names.as_slice() {
        [] => command::name(&session.table, call).unwrap_or("a command").to_owned(),
        [one] if call != command::GRAPH_LAUNCH => one.clone(),
        all if all.len() > NAMED => format!("a graph of {} kernels: {}, ...", all.len(), all[..NAMED].join(", ")),
        all => format!("a graph of {}", all.join(", ")),
    }
}

/// The units that a device's primary context can read, each with that device.
fn readable(client: &ClientView<'_>, units: &[Unit]) -> Vec<(usize, Unit)> {
    let mut globals = HashMap::new();
    for ((_, context), placed) in client.code.globals.iter() {
        let device = client.session.device_of_context(*context).ok();
        let real = client.session.objects.get(*context).map(|o| o.real);
        let primary = device.filter(|ordinal| client.memory.devices.get(*ordinal).map(|d| d.primary) == real);
        globals.extend(placed.iter().map(|global| (global.address, primary)));
    }
    let device = |unit: &Unit| {
        if let Some(ordinal) = rekindle_wire::window::device_of(unit.start) {
            let memory = &client.memory.devices.get(ordinal)?.memory;
            return (!memory.is_given_away(unit.start, unit.size())).then_some(ordinal);
        }
        match globals.get(&unit.start) {
            Some(primary) => *primary,
            None => client.memory.vmm.readable(unit),
        }
    };
    units.iter().filter_map(|unit| Some((device(unit)?, *unit))).collect()
}
