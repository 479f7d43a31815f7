//! Code and contexts that are gone, and whether they still count.
//!
//! The driver gives code the addresses that it finds free, so where code lies depends on what was there when it was
//! loaded or first used, also on what has been unloaded since. Addresses of functions and variables may be stored
//! anywhere in device memory, so a restore must place all code where it was. It does so by doing as was done: a module
//! or library that is unloaded, and a context that is destroyed, keeps its records in the log, with one of its end.
//!
//! ```text
//!   load A   load B   unload A   load C   unload C              the log without what no longer counts:
//!   ├──── life of A ──────┤      ├─ life of C ─┤                  load A, load B, unload A
//!            └ B is loaded while A is there                     C was alone while it lived
//! ```
//!
//! A life counts if code was placed in it that is still there, or whose own life counts. At each placing that is left in
//! the log, all that was there then is left too; so what is dropped was never in the way of anything that is kept.
//!
//! A program that always loads the next code before it unloads the last keeps all of it in the log, until code that was
//! placed meanwhile is gone too. There is a limit. Past it the log is cut: of the lives that are over, the half is dropped that
//! began last. Up to the first of them the log stays as it was. Behind it a restore places code where the image says that its
//! variables were (`checkpoint/cut.rs`), and there it needs no life that is over.

use std::collections::{BTreeSet, HashMap, HashSet};

use rekindle_wire::command::{self, Kind};

use crate::session::record::Record;

/// How many lives that are over the log keeps.
const MOST: usize = 16_384;

/// With this variable a worker with debug assertions keeps another number of them, so that tests need not make so many.
#[cfg(debug_assertions)]
const MOST_LIVES: &str = "REKINDLE_MOST_LIVES";

/// [`MOST`], or what a test has asked for.
fn most() -> usize {
    #[cfg(debug_assertions)]
    if let Some(most) = std::env::var(MOST_LIVES).ok().and_then(|text| text.parse().ok()) {
        return most;
    }
    MOST
}

/// Whether records of an object place code, or end what did.
pub(crate) fn places_code(handle: u64) -> bool {
    [Kind::Context, Kind::Module, Kind::Library, Kind::Kernel, Kind::Function].iter().any(|kind| kind.owns(handle))
}

/// What is known of lives that are over and count.
#[derive(Default)]
pub(crate) struct Lives {
    /// Unloaded code and destroyed contexts, each with the sequence number of the record that ended it.
    ended: HashMap<u64, u64>,
    /// What was part of each: functions, kernels; modules of a context.
    parts: HashMap<u64, u64>,
    /// How many may have ended before it is looked again which count.
    look_at: usize,
    /// From where to where lives lasted that were cut out of the log, as sequence numbers.
    cut: Option<(u64, u64)>,
}

impl Lives {
    /// A module or library has been unloaded, with these parts.
    pub(crate) fn end(&mut self, life: u64, sequence: u64, parts: impl Iterator<Item = u64>) {
        self.ended.insert(life, sequence);
        self.parts.extend(parts.filter(|part| *part != life).map(|part| (part, life)));
    }

    /// A context has been destroyed, with this code in it. What was unloaded in it before is part of its life now.
    pub(crate) fn end_context(&mut self, log: &[Record], context: u64, sequence: u64, code: impl Iterator<Item = u64>) {
        let within = log.iter().filter(|r| r.context == context && Kind::Module.owns(r.owner));
        let modules: HashSet<u64> = within.map(|r| r.owner).filter(|owner| self.ended.contains_key(owner)).collect();
        self.ended.retain(|life, _| !modules.contains(life));
        self.parts.values_mut().filter(|life| modules.contains(life)).for_each(|life| *life = context);
        self.parts.extend(modules.into_iter().chain(code).map(|part| (part, context)));
        self.ended.insert(context, sequence);
    }

    /// Whose life a record is of, where that is over.
    fn life(&self, record: &Record) -> Option<u64> {
        if let Some(life) = self.parts.get(&record.owner) {
            return Some(*life);
        }
        let own = self.ended.contains_key(&record.owner).then_some(record.owner);
        own.or_else(|| (self.ended.contains_key(&record.context) && !self.outlives(record)).then_some(record.context))
    }

    /// Whether a record holds without the context in which it was made: libraries and kernels belong to none.
    fn outlives(&self, record: &Record) -> bool {
        let loads = Kind::Library.owns(record.owner) && record.code.is_some();
        // That a kernel was used says of the context alone where its code is; what else is said of it holds everywhere.
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

    /// Drops the records of lives that do not count any more. Not at each end, where there are many: that would take a
    /// time that grows with their square.
    pub(crate) fn forget(&mut self, log: &mut Vec<Record>) {
        if self.ended.len() >= self.look_at {
            self.forget_now(log);
        }
    }

    /// The same, at once.
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
        // Where code was placed that is there, or counts.
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
        // Later lives mostly decide about earlier ones; where it is the other way round, one more turn finds it.
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

    /// Drops everything that was done in a context: it is anew. What has no life of its own is left to its owner.
    pub(crate) fn drop_context(&mut self, log: &mut Vec<Record>, context: u64) {
        let modules: HashSet<u64> = {
            let within = log.iter().filter(|r| r.context == context && Kind::Module.owns(r.owner));
            within.map(|r| r.owner).filter(|owner| self.ended.contains_key(owner)).collect()
        };
        self.drop_lives(log, &modules);
        log.retain(|r| r.context != context || self.outlives(r));
        log.iter_mut().filter(|r| r.context == context).for_each(|r| r.context = 0);
    }

    /// Drops the half of the lives that are over which began last, since they take too much memory; `false` where none is
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

    /// With which record each life began that is over.
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
        // The record before the first of them is the last of the whole log. An earlier cut that nothing is left of does not
        // count.
        let (from, to) = (first - 1, *last);
        let before = if self.cut_from(log).is_some() { self.cut } else { None };
        self.cut = Some(before.map_or((from, to), |it| (it.0.min(from), it.1.max(to))));
        self.drop_lives(log, &gone);
    }

    /// A log was replayed that was whole up to the record `from`: behind it, up to `last`, the driver may have placed code
    /// elsewhere than the log alone would have it.
    pub(crate) fn was_cut(&mut self, from: u64, last: u64) {
        self.cut = Some((from, last + 1));
    }

    /// Up to which record the log is whole, if code is there that was placed while something lived that was cut out of it.
    pub(crate) fn cut_from(&self, log: &[Record]) -> Option<u64> {
        let (from, to) = self.cut?;
        log.iter().any(|r| from < r.sequence && r.sequence < to && self.places(r)).then_some(from)
    }

    /// What is there and had code placed behind a record.
    pub(crate) fn placed_behind(&self, log: &[Record], from: u64) -> HashSet<u64> {
        let behind = log.iter().filter(|r| r.sequence > from && self.places(r) && self.life(r).is_none());
        behind.map(|r| r.owner).collect()
    }
}
