//! Unloaded code and destroyed contexts, and whether they still determine addresses.
//!
//! The driver gives code the addresses that it finds free. So the place of code depends on the code that was there when it
//! was loaded or first used, and also on the code that had been unloaded by then. Addresses of functions and variables may
//! be stored anywhere in device memory, so a restore must place all code where it was. The restore repeats what the client
//! did: an unloaded module or library, and a destroyed context, keeps its records in the log, and a record of its end is
//! added.
//!
//! ```text
//!   load A   load B   unload A   load C   unload C              the log without what no longer counts:
//!   ├──── life of A ──────┤      ├─ life of C ─┤                  load A, load B, unload A
//!            └ B is loaded while A is there                     C was alone while it lived
//! ```
//!
//! A life counts if code was placed during it that is still there, or whose own life counts. For each placing that is left
//! in the log, the records of all code that was there then are left too. So the code whose records are dropped was never in
//! the way of any code that is kept.
//!
//! A program that always loads the next code before it unloads the last keeps all of its code in the log, until the code
//! that was placed meanwhile is gone too. So the log has a limit. When the log passes the limit it is cut: of the lives
//! that are over, the half that began last is dropped. Up to the beginning of the first dropped life the log stays as it
//! was. Behind that record a restore places code where the image says that its variables were (`checkpoint/cut.rs`), and
//! needs no life that is over.

use std::collections::{BTreeSet, HashMap, HashSet};

use rekindle_wire::command::{self, Kind};

use crate::session::record::Record;

/// The number of ended lives that the log keeps.
const MOST: usize = 16_384;

/// This variable sets another limit in a worker with debug assertions, so that tests need not make so many lives.
#[cfg(debug_assertions)]
const MOST_LIVES: &str = "REKINDLE_MOST_LIVES";

/// [`MOST`], or the limit that a test has set.
fn most() -> usize {
    #[cfg(debug_assertions)]
    if let Some(most) = std::env::var(MOST_LIVES).ok().and_then(|text| text.parse().ok()) {
        return most;
    }
    MOST
}

/// Whether records of an object place code, or end an object that placed code.
pub(crate) fn places_code(handle: u64) -> bool {
    [Kind::Context, Kind::Module, Kind::Library, Kind::Kernel, Kind::Function].iter().any(|kind| kind.owns(handle))
}

/// Unloaded code and destroyed contexts that still determine addresses.
#[derive(Default)]
pub(crate) struct Lives {
    /// Unloaded code and destroyed contexts, each with the sequence number of the record that ended it.
    ended: HashMap<u64, u64>,
    /// The parts of each life, with the life: functions and kernels; for a context also its modules.
    parts: HashMap<u64, u64>,
    /// The number of ended lives at which the worker next examines which of them count.
    look_at: usize,
    /// The span of the lives that were cut out of the log: the first and last sequence number.
    cut: Option<(u64, u64)>,
}

impl Lives {
    /// Notes that a module or library has been unloaded, with these parts.
    pub(crate) fn end(&mut self, life: u64, sequence: u64, parts: impl Iterator<Item = u64>) {
        self.ended.insert(life, sequence);
        self.parts.extend(parts.filter(|part| *part != life).map(|part| (part, life)));
    }

    /// A context has been destroyed, with this code in it. Code that was unloaded in it before is now part of the context's
    /// life.
    pub(crate) fn end_context(&mut self, log: &[Record], context: u64, sequence: u64, code: impl Iterator<Item = u64>) {
        let within = log.iter().filter(|r| r.context == context && Kind::Module.owns(r.owner));
        let modules: HashSet<u64> = within.map(|r| r.owner).filter(|owner| self.ended.contains_key(owner)).collect();
        self.ended.retain(|life, _| !modules.contains(life));
        self.parts.values_mut().filter(|life| modules.contains(life)).for_each(|life| *life = context);
        self.parts.extend(modules.into_iter().chain(code).map(|part| (part, context)));
        self.ended.insert(context, sequence);
    }

    /// The life that a record belongs to, if that life is over.
    fn life(&self, record: &Record) -> Option<u64> {
        if let Some(life) = self.parts.get(&record.owner) {
            return Some(*life);
        }
        let own = self.ended.contains_key(&record.owner).then_some(record.owner);
        own.or_else(|| (self.ended.contains_key(&record.context) && !self.outlives(record)).then_some(record.context))
    }

    /// Whether a record holds without the context in which it was made: libraries and kernels belong to no context.
    fn outlives(&self, record: &Record) -> bool {
        let loads = Kind::Library.owns(record.owner) && record.code.is_some();
        // The record of a kernel's use only determines where its code is in that context. Other records of a kernel hold
        // everywhere.
        let of_kernel = Kind::Kernel.owns(record.owner) && record.args != record.owner.to_le_bytes();
        loads || of_kernel || self.ends(record)
    }

    fn ends(&self, record: &Record) -> bool {
        self.ended.get(&record.owner) == Some(&record.sequence)
    }

    /// Whether the driver may have chosen addresses when it executed a record.
    fn places(&self, record: &Record) -> bool {
        let code = places_code(record.owner) && !Kind::Context.owns(record.owner);
        (code || record.call == command::CONTEXT_CREATE) && !self.ends(record)
    }

    /// Drops the records of lives that do not count any more. Where there are many lives this does not happen at each end,
    /// since the time would grow with the square of their number.
    pub(crate) fn forget(&mut self, log: &mut Vec<Record>) {
        if self.ended.len() >= self.look_at {
            self.forget_now(log);
        }
    }

    /// Does the same as [`Self::forget`], at once.
    pub(crate) fn forget_now(&mut self, log: &mut Vec<Record>) {
        let gone = self.uncounted(log);
        self.drop_lives(log, &gone);
        if self.ended.len() > most() {
            self.cut(log);
        }
        self.look_at = self.ended.len() + self.ended.len() / 8 + 1;
    }

    fn uncounted(&self, log: &[Record]) -> HashSet<u64> {
        let mut spans: HashMap<u64, (usize, usize)> = HashMap::new();
        let mut placings: HashMap<u64, Vec<usize>> = HashMap::new();
        // The places in the log where code was placed that is still there, or whose life counts.
        let mut kept = BTreeSet::new();
        for (at, record) in log.iter().enumerate() {
            let life = self.life(record);
            if let Some(life) = life {
                spans.entry(life).or_insert((at, at)).1 = at;
            }
            match life {
                _ if !self.places(record) => {}
                Some(life) => placings.entry(life).or_default().push(at),
                None => {
                    kept.insert(at);
                }
            }
        }
        // Whether an earlier life counts mostly depends on later lives; where it is the other way round, one more turn
        // finds it.
        let mut open: Vec<_> = spans.into_iter().collect();
        open.sort_unstable_by_key(|(_, span)| std::cmp::Reverse(*span));
        loop {
            let before = open.len();
            open.retain(|(life, (begin, end))| {
                let counts = kept.range(begin + 1..*end).next().is_some();
                if counts {
                    kept.extend(placings.get(life).into_iter().flatten());
                }
                !counts
            });
            if open.len() == before {
                return open.into_iter().map(|(life, _)| life).collect();
            }
        }
    }

    fn drop_lives(&mut self, log: &mut Vec<Record>, gone: &HashSet<u64>) {
        if gone.is_empty() {
            return;
        }
        log.retain(|r| {
            let life = self.life(r);
            let of_context = gone.contains(&r.context) && !self.outlives(r);
            !of_context && !life.is_some_and(|life| gone.contains(&life))
        });
        log.iter_mut().filter(|r| gone.contains(&r.context)).for_each(|r| r.context = 0);
        self.ended.retain(|life, _| !gone.contains(life));
        self.parts.retain(|_, life| !gone.contains(life));
    }

    /// Drops all records made in a context, since it was reset. Records of objects without a life of their own are left to
    /// the objects' owners.
    pub(crate) fn drop_context(&mut self, log: &mut Vec<Record>, context: u64) {
        let modules: HashSet<u64> = {
            let within = log.iter().filter(|r| r.context == context && Kind::Module.owns(r.owner));
            within.map(|r| r.owner).filter(|owner| self.ended.contains_key(owner)).collect()
        };
        self.drop_lives(log, &modules);
        log.retain(|r| r.context != context || self.outlives(r));
        log.iter_mut().filter(|r| r.context == context).for_each(|r| r.context = 0);
    }

    /// Drops the half of the ended lives that began last, since the log takes too much memory; `false` where no life is
    /// over.
    pub(crate) fn cut(&mut self, log: &mut Vec<Record>) -> bool {
        let begins = self.begins(log);
        let mut sorted: Vec<u64> = begins.values().copied().collect();
        sorted.sort_unstable();
        let Some(&middle) = sorted.get(sorted.len() / 2) else { return false };
        self.drop_from(log, &begins, middle);
        true
    }

    /// Drops all lives that are over and began behind a cut: no replay needs them.
    pub(crate) fn forget_behind_cut(&mut self, log: &mut Vec<Record>) {
        if let Some(from) = self.cut_from(log) {
            let begins = self.begins(log);
            self.drop_from(log, &begins, from + 1);
        }
    }

    /// The record with which each ended life began.
    fn begins(&self, log: &[Record]) -> HashMap<u64, u64> {
        let mut begins = HashMap::new();
        for record in log {
            if let Some(life) = self.life(record) {
                begins.entry(life).or_insert(record.sequence);
            }
        }
        begins
    }

    /// Drops the lives that began with this record or later.
    fn drop_from(&mut self, log: &mut Vec<Record>, begins: &HashMap<u64, u64>, begin: u64) {
        let gone: HashSet<u64> = begins.iter().filter(|(_, first)| **first >= begin).map(|(life, _)| *life).collect();
        let Some(first) = gone.iter().filter_map(|life| begins.get(life)).min() else { return };
        let last = gone.iter().filter_map(|life| self.ended.get(life)).max().unwrap_or(first);
        // The record before the first of them is the last of the whole log. An earlier cut does not count if nothing is
        // left that depends on it.
        let (from, to) = (first - 1, *last);
        let before = if self.cut_from(log).is_some() { self.cut } else { None };
        self.cut = Some(before.map_or((from, to), |it| (it.0.min(from), it.1.max(to))));
        self.drop_lives(log, &gone);
    }

    /// A log was replayed that was whole up to the record `from`. Behind it, up to `last`, the driver may have placed code
    /// at other addresses than the log alone would lead to.
    pub(crate) fn was_cut(&mut self, from: u64, last: u64) {
        self.cut = Some((from, last + 1));
    }

    /// The record up to which the log is whole; `None` if no code is left that was placed during a life that was cut out.
    pub(crate) fn cut_from(&self, log: &[Record]) -> Option<u64> {
        let (from, to) = self.cut?;
        log.iter().any(|r| from < r.sequence && r.sequence < to && self.places(r)).then_some(from)
    }

    /// The objects that are still there and whose code was placed behind a record.
    pub(crate) fn placed_behind(&self, log: &[Record], from: u64) -> HashSet<u64> {
        let behind = log.iter().filter(|r| r.sequence > from && self.places(r) && self.life(r).is_none());
        behind.map(|r| r.owner).collect()
    }
}
