//! What is known of the writes of kernels, in this client and in others of its image.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rekindle_wire::control::{Learned, LearnedKernel};

use crate::checkpoint::access::tracker::Tracker;

/// After so many launches without a write, a kernel only reads what a parameter names.
const LAUNCHES: u32 = 3;
/// After so many launches that have shown nothing, a parameter is not watched any more.
const IN_VAIN: u32 = 64;
/// The most launches before a fault whose kernels may have caused it: as many as the driver takes before it waits.
const RECENT: u64 = 1024;

/// What a kernel does with the memory that a parameter names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum Verdict {
    Unknown {
        /// Launches that have left it as it was, and have changed other memory.
        clean: u32,
        /// Launches that have changed no memory, or have written what was there before.
        in_vain: u32,
    },
    Reads,
    Writes,
    /// Too many launches have shown nothing: it is taken to write, and another client may learn more.
    Unclear,
}

impl Default for Verdict {
    fn default() -> Self {
        Self::Unknown { clean: 0, in_vain: 0 }
    }
}

/// What a launch has done with the memory that a parameter names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::checkpoint) enum Seen {
    Changed,
    /// It is as before, and other memory that the kernel was given has changed.
    Same,
    /// Nothing has changed: the kernel may have written the content that was there.
    Nothing,
}

/// A kernel, by its place in the record.
pub(in crate::checkpoint) type KernelId = usize;

#[derive(Debug, Default)]
struct Kernel {
    code: String,
    name: String,
    /// By the offsets of parameters.
    slots: BTreeMap<u32, Verdict>,
    suspected: u32,
    /// The number of its last launch; 0 before the first.
    launched: u64,
}

/// What is known.
#[derive(Debug, Default)]
pub(in crate::checkpoint) struct Record {
    kernels: Vec<Kernel>,
    by_name: HashMap<(String, String), KernelId>,
    /// By the numbers that the tracker gives to functions.
    by_number: HashMap<u64, KernelId>,
    written: BTreeSet<u64>,
    launches: u64,
    /// Increases with every new verdict.
    version: u64,
    /// What nobody else knows yet.
    news: Learned,
}

impl Record {
    pub(in crate::checkpoint) fn new(learned: Learned) -> Self {
        let mut record = Self { written: learned.written.into_iter().collect(), ..Self::default() };
        for LearnedKernel { code, name, reads, writes, suspected } in learned.kernels {
            let id = record.id(&code, &name);
            let kernel = &mut record.kernels[id];
            kernel.suspected = suspected;
            kernel.slots.extend(reads.into_iter().map(|offset| (offset, Verdict::Reads)));
            kernel.slots.extend(writes.into_iter().map(|offset| (offset, Verdict::Writes)));
        }
        record
    }

    fn id(&mut self, code: &str, name: &str) -> KernelId {
        let next = self.kernels.len();
        let id = *self.by_name.entry((code.to_owned(), name.to_owned())).or_insert(next);
        if id == next {
            self.kernels.push(Kernel { code: code.to_owned(), name: name.to_owned(), ..Kernel::default() });
        }
        id
    }

    /// A function is about to be launched. None for one that does not exist.
    pub(in crate::checkpoint) fn launches(&mut self, tracker: &Tracker, function: u64) -> Option<KernelId> {
        let (number, code, name) = tracker.kernel(function)?;
        let id = match self.by_number.get(&number) {
            Some(id) => *id,
            None => {
                let id = self.id(code, name);
                self.by_number.insert(number, id);
                id
            }
        };
        self.launches += 1;
        self.kernels[id].launched = self.launches;
        Some(id)
    }

    /// Kernels that were launched before are launched again.
    pub(in crate::checkpoint) fn launches_again(&mut self, kernels: &[KernelId]) {
        self.launches += 1;
        kernels.iter().for_each(|id| self.kernels[*id].launched = self.launches);
    }

    /// What a kernel does with the memory that a parameter names.
    pub(in crate::checkpoint) fn verdict(&self, kernel: KernelId, offset: u32) -> Verdict {
        self.kernels[kernel].slots.get(&offset).copied().unwrap_or_default()
    }

    /// Whether a launch has left the memory that a parameter names as it was, and none has written it.
    pub(in crate::checkpoint) fn has_read(&self, kernel: KernelId, offset: u32) -> bool {
        match self.verdict(kernel, offset) {
            Verdict::Unknown { clean, .. } => clean > 0,
            Verdict::Reads => true,
            Verdict::Writes | Verdict::Unclear => false,
        }
    }

    /// Whether a kernel may write everything.
    pub(in crate::checkpoint) fn writes_everything(&self, kernel: KernelId) -> bool {
        let Kernel { suspected, .. } = self.kernels[kernel];
        LearnedKernel { suspected, ..LearnedKernel::default() }.writes_everything()
    }

    /// Increases with every new verdict.
    pub(in crate::checkpoint) fn version(&self) -> u64 {
        self.version
    }

    /// Allocations that are known to be written.
    pub(in crate::checkpoint) fn written(&self) -> &BTreeSet<u64> {
        &self.written
    }

    /// An allocation is written.
    pub(in crate::checkpoint) fn writes(&mut self, allocation: u64) {
        if self.written.insert(allocation) {
            self.news.written.push(allocation);
        }
    }

    /// A launch is over.
    pub(in crate::checkpoint) fn saw(&mut self, kernel: KernelId, offset: u32, seen: Seen) {
        let slot = self.kernels[kernel].slots.entry(offset).or_default();
        let next = match (*slot, seen) {
            (Verdict::Writes | Verdict::Unclear, _) => return,
            (_, Seen::Changed) => Verdict::Writes,
            (Verdict::Unknown { clean, in_vain }, Seen::Same) if clean + 1 < LAUNCHES => {
                Verdict::Unknown { clean: clean + 1, in_vain }
            }
            (Verdict::Unknown { clean, in_vain }, Seen::Nothing) if in_vain + 1 < IN_VAIN => {
                Verdict::Unknown { clean, in_vain: in_vain + 1 }
            }
            (Verdict::Unknown { .. }, Seen::Nothing) => Verdict::Unclear,
            (Verdict::Unknown { .. }, Seen::Same) | (Verdict::Reads, _) => Verdict::Reads,
        };
        let before = std::mem::replace(slot, next);
        self.version += u64::from(before != next);
        let Kernel { code, name, .. } = &self.kernels[kernel];
        let mut news = LearnedKernel { code: code.clone(), name: name.clone(), ..LearnedKernel::default() };
        match next {
            Verdict::Reads if before != next => news.reads.push(offset),
            Verdict::Writes => news.writes.push(offset),
            _ => return,
        }
        self.news.add(&Learned { kernels: vec![news], written: Vec::new() });
    }

    /// Memory was written that was only to be read: one of the last kernels has done that, by a parameter that it only read
    /// through before, or elsewhere. Returns their names.
    pub(in crate::checkpoint) fn fault(&mut self) -> BTreeSet<String> {
        let since = self.launches.saturating_sub(RECENT);
        let mut names = BTreeSet::new();
        for kernel in self.kernels.iter_mut().filter(|it| it.launched > since) {
            let reads = kernel.slots.iter_mut().filter(|(_, verdict)| **verdict == Verdict::Reads);
            let writes: Vec<u32> = reads.map(|(offset, verdict)| (*verdict = Verdict::Writes, *offset).1).collect();
            kernel.suspected += 1;
            names.insert(kernel.name.clone());
            let (code, name) = (kernel.code.clone(), kernel.name.clone());
            let news = LearnedKernel { code, name, reads: Vec::new(), writes, suspected: 1 };
            self.news.add(&Learned { kernels: vec![news], written: Vec::new() });
        }
        names
    }

    /// What was learned since the last time.
    pub(in crate::checkpoint) fn take_news(&mut self) -> Learned {
        std::mem::take(&mut self.news)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(reads: &[u32], writes: &[u32], suspected: u32) -> LearnedKernel {
        let (code, name) = ("c".to_owned(), "k".to_owned());
        LearnedKernel { code, name, reads: reads.to_vec(), writes: writes.to_vec(), suspected }
    }

    fn record(kernel: LearnedKernel) -> Record {
        Record::new(Learned { kernels: vec![kernel], written: vec![7] })
    }

    #[test]
    fn a_parameter_is_only_read_after_some_launches_and_written_after_one() {
        let mut record = record(kernel(&[], &[], 0));
        for clean in 1..LAUNCHES {
            record.saw(0, 8, Seen::Same);
            assert_eq!(record.verdict(0, 8), Verdict::Unknown { clean, in_vain: 0 });
            assert!(record.has_read(0, 8) && !record.has_read(0, 16));
            assert!(record.take_news().is_empty());
        }
        record.saw(0, 8, Seen::Same);
        assert_eq!((record.verdict(0, 8), record.verdict(0, 16)), (Verdict::Reads, Verdict::default()));
        assert_eq!(record.take_news().kernels, [kernel(&[8], &[], 0)]);
        record.saw(0, 8, Seen::Changed);
        record.saw(0, 8, Seen::Same);
        assert_eq!(record.verdict(0, 8), Verdict::Writes);
        assert_eq!(record.take_news().kernels, [kernel(&[], &[8], 0)]);
    }

    #[test]
    fn launches_that_change_nothing_prove_nothing_and_are_not_watched_for_ever() {
        let mut record = record(kernel(&[], &[], 0));
        (1..IN_VAIN).for_each(|_| record.saw(0, 8, Seen::Nothing));
        assert_eq!(record.verdict(0, 8), Verdict::Unknown { clean: 0, in_vain: IN_VAIN - 1 });
        record.saw(0, 8, Seen::Nothing);
        assert_eq!(record.verdict(0, 8), Verdict::Unclear);
        assert!(record.take_news().is_empty(), "nobody knows that it writes");
    }

    #[test]
    fn what_others_have_learned_counts_and_is_no_news() {
        let mut record = record(kernel(&[0], &[8], 0));
        assert_eq!((record.verdict(0, 0), record.verdict(0, 8)), (Verdict::Reads, Verdict::Writes));
        record.writes(7);
        assert!(record.take_news().is_empty());
        record.writes(9);
        assert_eq!(record.take_news(), Learned { kernels: Vec::new(), written: vec![9] });
        assert_eq!(record.written().iter().copied().collect::<Vec<_>>(), [7, 9]);
    }

    #[test]
    fn after_a_fault_nothing_that_ran_is_trusted_and_after_the_second_it_may_write_everything() {
        let mut record = record(kernel(&[0], &[8], 0));
        assert!(record.fault().is_empty(), "the kernel has not run");
        record.launches = 5000;
        record.kernels[0].launched = 5000 - RECENT;
        assert!(record.fault().is_empty(), "its launch is over");
        record.kernels[0].launched = 5000;
        assert_eq!(record.fault().into_iter().collect::<Vec<_>>(), ["k"]);
        assert_eq!(record.verdict(0, 0), Verdict::Writes);
        assert_eq!(record.take_news().kernels, [kernel(&[], &[0], 1)]);
        let again = Record::new(Learned { kernels: vec![kernel(&[], &[0], 2)], written: Vec::new() });
        assert!(again.writes_everything(0) && !record.writes_everything(0));
    }
}
