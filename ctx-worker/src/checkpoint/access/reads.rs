//! The other reporting mode: checks whether commands use only the memory that predictions name, and records in which order
//! memory is used.
//!
//! ```text
//!   command ──> what may it use? ──> idle; the device may access nothing else ──> driver ──> idle: a fault is this command's
//! ```
//!
//! So it is the MMU that proves predictions of reads, as hashes prove those of writes ([`super::observe`]). A fault ends the
//! client's context, so the first wrong prediction is the last. As there, everything is synchronous, and a command that does not
//! end by itself is not watched. The device keeps its access to mappings that the client has made itself, to memory that other
//! processes have too, and to what shares a slab with memory that the command may use.
//!
//! The record begins with the first command of a client, or with the first one after its restore, and is about the memory that
//! there was then: what a restore has to load.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rekindle_cuda_abi::types::CU_MEM_ACCESS_READWRITE;
use rekindle_wire::access::{AccessReport, FirstUses};
use rekindle_wire::command;
use tracing::warn;

use super::client::ClientView;
use super::observe::{self, TIMEOUT};
use super::set::{Access, Set};
use super::tracker::Tracker;
use crate::gpu::driver::CallFailed;
use crate::resources::units::Unit;
use crate::resources::{Code, Memory};
use crate::schedule::rest::comes_to_rest;
use crate::session::call::Call;

/// No access.
const NO_ACCESS: u32 = 0;

/// Watches what a client's commands use.
#[derive(Default)]
pub(crate) struct Reads {
    /// The ranges that their device cannot access now: the start and the length of each, by device.
    closed: BTreeMap<usize, BTreeMap<u64, u64>>,
    /// What of the first memory no command may have used yet; none before the first command.
    unused: Option<BTreeSet<Unit>>,
    /// Whether the device did not become idle at the last wait.
    restless: bool,
    stopped: bool,
}

/// A command that is about to be executed, and what it may use.
pub(crate) struct Watch {
    access: Access,
    call: u16,
}

impl Reads {
    /// Begins to watch, before there is a client.
    pub(crate) fn start() -> Self {
        observe::begin(AccessReport { first_uses: Some(FirstUses::default()), ..AccessReport::default() });
        Self::default()
    }

    /// Called before a command is executed. Returns `None` if nothing is to be done afterwards.
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
            // The command may free, allocate or export memory.
            if header.call >= command::FIRST && !observe::asks(header.call) {
                self.open(call, memory);
            }
            return None;
        }
        self.count(tracker, &client, &access, header.call);
        if self.stopped {
            return None;
        }
        if !self.is_at_rest(call) {
            self.open(call, memory);
            observe::count(|report| report.unwatched += 1);
            return None;
        }
        let reached = self.allow_only(call, memory, &access.reads);
        call.gpu.leave();
        let _ = call.enter_own();
        match reached {
            Ok(()) => Some(Watch { access, call: header.call }),
            Err(why) => {
                self.stop(&why.to_string());
                self.open(call, memory);
                None
            }
        }
    }

    /// Called after the command has been handed to the driver.
    pub(crate) fn watched(&mut self, tracker: &mut Tracker, call: &mut Call, watch: &Watch) {
        let patience = if self.restless { Duration::ZERO } else { TIMEOUT };
        match comes_to_rest(call, patience) {
            Ok(true) => observe::count(|report| report.watched += 1),
            Ok(false) => {
                self.restless = true;
                observe::count(|report| report.unwatched += 1);
            }
            Err(error) => {
                let by = observe::blame(tracker, &call.session, (&watch.access, watch.call));
                warn!("{by} may have used memory that it had not named: {error}");
                observe::count(|report| {
                    if let Some(uses) = &mut report.first_uses {
                        uses.fault = Some(by);
                    }
                });
                self.stop(&error.to_string());
            }
        }
        call.gpu.leave();
        let _ = call.enter_own();
    }

    /// Lets devices access all memory. Called before anything but a watched command uses memory.
    pub(crate) fn open(&mut self, call: &mut Call, memory: &Memory) {
        let driver = call.driver();
        for (ordinal, ranges) in std::mem::take(&mut self.closed) {
            let Some(device) = memory.devices.get(ordinal) else { continue };
            let _ = call.gpu.enter(device.primary);
            for (base, length) in ranges {
                // Freed meanwhile, or the context is broken: then nothing uses it.
                if let Err(why) = device.memory.set_own_access(driver, (base, length), CU_MEM_ACCESS_READWRITE) {
                    tracing::debug!("access to {base:#x} does not come back: {why}");
                }
            }
        }
        call.gpu.leave();
        let _ = call.enter_own();
    }

    /// Lets each device access only what these units lie in.
    fn allow_only(&mut self, call: &mut Call, memory: &Memory, used: &Set) -> Result<(), CallFailed> {
        let driver = call.driver();
        for (ordinal, device) in memory.devices.iter().enumerate() {
            let closed = self.closed.entry(ordinal).or_default();
            let ranges: Vec<(u64, u64)> = device.memory.own_ranges().collect();
            // What was freed meanwhile.
            closed.retain(|base, length| ranges.binary_search(&(*base, *length)).is_ok());
            for (base, length) in ranges {
                let is_used = is_used(used, Unit::new(base, length));
                if is_used != closed.contains_key(&base) {
                    continue;
                }
                call.gpu.enter(device.primary).map_err(|code| CallFailed { call: "cuCtxSetCurrent", code })?;
                let flags = if is_used { CU_MEM_ACCESS_READWRITE } else { NO_ACCESS };
                device.memory.set_own_access(driver, (base, length), flags)?;
                match is_used {
                    true => closed.remove(&base),
                    false => closed.insert(base, length),
                };
            }
        }
        Ok(())
    }

    /// Notes what the command uses first.
    fn count(&mut self, tracker: &mut Tracker, client: &ClientView<'_>, access: &Access, call: u16) {
        observe::count_command(tracker, access, call);
        let unused = match &mut self.unused {
            Some(unused) => unused,
            none => {
                let units: BTreeSet<Unit> = tracker.all_units(client).into_iter().collect();
                let bytes = units.iter().map(Unit::size).sum();
                observe::count(|report| report.first_uses = Some(FirstUses { content: bytes, ..FirstUses::default() }));
                none.insert(units)
            }
        };
        let bytes: u64 = match &access.reads {
            Set::Units(units) => units.iter().filter(|unit| unused.remove(unit)).map(Unit::size).sum(),
            Set::Everything => std::mem::take(unused).iter().map(Unit::size).sum(),
        };
        observe::count(|report| report.first_uses.iter_mut().for_each(|uses| uses.used(bytes)));
    }

    fn is_at_rest(&mut self, call: &mut Call) -> bool {
        let patience = if self.restless { Duration::ZERO } else { TIMEOUT };
        let rest = comes_to_rest(call, patience);
        self.restless = !matches!(rest, Ok(true));
        if let Err(why) = rest {
            self.stop(&why.to_string());
        }
        call.gpu.leave();
        let _ = call.enter_own();
        !self.restless
    }

    fn stop(&mut self, why: &str) {
        warn!("accesses are not watched any more: {why}");
        self.stopped = true;
        observe::count(|report| report.stopped = Some(why.to_owned()));
    }
}

/// Whether one of the units overlaps a range.
fn is_used(used: &Set, range: Unit) -> bool {
    match used {
        Set::Everything => true,
        Set::Units(units) => {
            let behind = units.partition_point(|unit| unit.start < range.end);
            units[..behind].iter().rev().take_while(|unit| unit.end > range.start).next().is_some()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_used_by_any_unit_that_overlaps_it() {
        let used = Set::Units(vec![Unit::new(0x1000, 0x100), Unit::new(0x3000, 0x1000)]);
        let uses = |start, size| is_used(&used, Unit::new(start, size));
        assert!(uses(0x0, 0x2000) && uses(0x3800, 0x10) && uses(0x10ff, 1) && uses(0x3fff, 0x1000));
        assert!(!uses(0x0, 0x1000) && !uses(0x1100, 0x1f00) && !uses(0x4000, 0x1000));
        assert!(is_used(&Set::Everything, Unit::new(0, 1)) && !is_used(&Set::none(), Unit::new(0, 1)));
    }
}
