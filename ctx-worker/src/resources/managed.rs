//! Managed memory that moves: device memory, at whose address the client has pages of a memfd of its own.
//!
//! ```text
//!                    ┌──────────── a command may use it: write-protect, copy, take the pages away ───────────┐
//!                    v                                                                                       │
//!   Device: no page is there ──a thread reads: pages, protected──> Both ──a thread writes: unprotect──> Process
//!                    │                                              └── a command may use it: take the pages away ──> Device
//!                    └──────────────────────────────a thread writes: pages─────────────────────────────────> Process
//! ```
//!
//! Each chunk of [`CHUNK`] bytes is in one of these states, which only the worker's loop changes: it serves the faults of the
//! client's threads (a userfaultfd, [`rekindle_wire::userfault`]) while the devices are idle, and takes pages away before it hands
//! the driver a command that may use them. So the content has one owner at any time, as CUDA defines for devices without concurrent
//! access (CUDA C++ Programming Guide, "Unified Memory on devices without full support").
//!
//! Managed variables of the client's code move in the same way. The driver loads the code as if they were ordinary variables
//! (`code_store.rs`), so on the device they lie among others, and a restore brings them to their addresses as those. The client has
//! the pages that they lie in. What else of these pages the device has is not the client's: only the variables' bytes are copied.
//!
//! A client that is at rest has all pages itself: CRIU saves them with the process, and a suspended or frozen client needs no worker
//! for them. A restored client has them all, too.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rekindle_cuda_abi::types::*;
use rekindle_wire::userfault::{Fault, Userfault};
use thiserror::Error;

use crate::gpu::driver::CallFailed;
use crate::resources::transit::Transit;
use crate::session::outcome::Refused;
use crate::session::state;

/// The bytes of a chunk, which belongs to one side.
pub(crate) const CHUNK: u64 = 2 << 20;
/// The most chunks that one fault brings, where a thread touches one after the other.
const MOST_AHEAD: usize = 16;
const PAGE: u64 = 4096;
/// The most bytes that are on their way at a time.
pub(crate) const BATCH: u64 = MOST_AHEAD as u64 * CHUNK;

/// Why managed memory does not move.
#[derive(Debug, Error)]
pub(crate) enum ManagedError {
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error("pages of managed memory cannot be given to the process, or taken away from it: {0}")]
    Pages(#[from] io::Error),
    #[error("{0}")]
    Context(Refused),
    #[error("managed memory at {0:#x} has not come with the process")]
    NotCome(u64),
}

impl ManagedError {
    /// Whether the process is gone, so that nobody needs its pages.
    pub(crate) fn is_gone(&self) -> bool {
        matches!(self, Self::Pages(error) if error.raw_os_error() == Some(libc::ESRCH))
    }

    /// The result of a command that would have used the memory.
    pub(crate) fn code(&self) -> CUresult {
        match self {
            Self::Driver(failed) => failed.code,
            Self::Context(Refused::Code(code)) => *code,
            Self::Pages(_) | Self::Context(_) | Self::NotCome(_) => CUDA_ERROR_UNKNOWN,
        }
    }
}

/// Who has the content of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The device.
    Device,
    /// Both, and no thread of the client can write it.
    Both,
    /// The client.
    Process,
}

/// A managed variable of the client's code. On the device it lies where the driver has placed it, as any other variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Variable {
    pub(crate) range: Range<u64>,
    /// The module or library.
    pub(crate) parent: u64,
    pub(crate) context: u64,
}

/// What of the pages is the client's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Owned {
    /// All of them: they are an allocation, which belongs to this context.
    All(u64),
    /// The parts of these variables that lie in the pages. What else the device has there is other code's.
    Variables(Vec<Variable>),
}

impl Owned {
    /// The parts of a range that are the client's, each with its context.
    fn in_range(&self, range: &Range<u64>) -> Vec<(Range<u64>, u64)> {
        let variables = match self {
            Self::All(context) => return vec![(range.clone(), *context)],
            Self::Variables(variables) => variables,
        };
        let common = |it: &Variable| it.range.start.max(range.start)..it.range.end.min(range.end);
        let parts = variables.iter().map(|it| (common(it), it.context));
        parts.filter(|(part, _)| !part.is_empty()).collect()
    }
}

/// Managed memory that moves: an allocation, or pages with variables.
#[derive(Debug)]
pub(crate) struct Pages {
    /// A multiple of the page size.
    pub(crate) size: u64,
    owned: Owned,
    /// The memfd that the client has mapped there.
    file: File,
    chunks: Vec<Side>,
    /// Whether the device's content is zeros, since no command has used the memory.
    fresh: bool,
    /// The chunk behind the last that a fault has brought, and how many chunks came with that.
    ahead: (usize, usize),
}

impl Pages {
    /// `fresh`: the device's content is zeros.
    pub(crate) fn new(size: u64, owned: Owned, file: File, side: Side, fresh: bool) -> Self {
        let chunks = vec![side; size.div_ceil(CHUNK) as usize];
        Self { size, owned, file, chunks, fresh, ahead: (0, 1) }
    }

    /// The context of an allocation.
    fn context(&self) -> Option<u64> {
        match self.owned {
            Owned::All(context) => Some(context),
            Owned::Variables(_) => None,
        }
    }

    /// Reads what the client has from an offset on. Pages that were never there are zeros.
    pub(crate) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(bytes, offset)
    }

    /// Takes pages away from the client.
    fn take_away(&self, range: Range<u64>) -> io::Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (offset, length) = (range.start as libc::off_t, (range.end - range.start) as libc::off_t);
        // SAFETY: a plain call on an open file.
        if unsafe { libc::fallocate(self.file.as_raw_fd(), mode, offset, length) } == 0 {
            return Ok(());
        }
        Err(io::Error::last_os_error())
    }

    /// The offsets of chunks.
    fn offsets(&self, chunks: &Range<usize>) -> Range<u64> {
        chunks.start as u64 * CHUNK..(chunks.end as u64 * CHUNK).min(self.size)
    }

    /// The chunks that a fault in one of the device's should bring: more and more of them where threads go from one to the next.
    fn chunks_ahead(&mut self, chunk: usize) -> Range<usize> {
        let (next, last) = self.ahead;
        let wanted = if next == chunk { (last * 2).min(MOST_AHEAD) } else { 1 };
        let of_device = self.chunks[chunk..].iter().take(wanted).take_while(|it| **it == Side::Device).count();
        self.ahead = (chunk + of_device, wanted);
        chunk..chunk + of_device
    }

    /// Runs of chunks that are alike.
    fn runs(&self) -> Vec<(Side, Range<usize>)> {
        let mut at = 0;
        let run = |run: &[Side]| {
            at += run.len();
            (run[0], at - run.len()..at)
        };
        self.chunks.chunk_by(|a, b| a == b).map(run).collect()
    }
}

/// A part of managed memory: an allocation, and some of its chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) base: u64,
    pub(crate) chunks: Range<usize>,
    /// Their addresses.
    pub(crate) range: Range<u64>,
}

/// All managed memory of the client that moves.
#[derive(Debug, Default)]
pub(crate) struct ManagedMemory {
    /// The client's userfaultfd, once it has sent one.
    pub(crate) faults: Option<Arc<Userfault>>,
    allocations: BTreeMap<u64, Pages>,
    /// Chunks that are not the device's.
    taken: usize,
    /// Allocations that are fresh.
    fresh: usize,
    /// Faults of threads that still sleep.
    waiting: VecDeque<Fault>,
    /// What a restored client has, until its memfds have come.
    expected: Vec<state::ManagedMemory>,
    /// Content on its way.
    pub(crate) transit: Transit,
}

impl ManagedMemory {
    /// Whether the client has content that the device lacks, or may not change.
    pub(crate) fn is_with_client(&self) -> bool {
        self.taken > 0
    }

    /// Where allocations begin.
    pub(crate) fn bases(&self) -> Vec<u64> {
        self.allocations.keys().copied().collect()
    }

    /// Whether threads of the client wait for pages.
    pub(crate) fn has_faults(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether the device's content of an allocation is zeros.
    pub(crate) fn is_fresh(&self, base: u64) -> bool {
        self.allocations.get(&base).is_some_and(|it| it.fresh)
    }

    /// Whether there is such an allocation.
    pub(crate) fn has_fresh(&self) -> bool {
        self.fresh > 0
    }

    /// A command may write all memory from here on.
    pub(crate) fn age(&mut self) {
        if std::mem::take(&mut self.fresh) > 0 {
            self.allocations.values_mut().for_each(|it| it.fresh = false);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.allocations.is_empty()
    }

    /// Writes the list of allocations for the image.
    pub(crate) fn write(&self, state: &mut state::State) {
        let variable = |it: &Variable| state::ManagedVariable {
            address: it.range.start,
            size: it.range.end - it.range.start,
            parent: it.parent,
            context: it.context,
            ..state::ManagedVariable::default()
        };
        let variables = |it: &Pages| match &it.owned {
            Owned::All(_) => Vec::new(),
            Owned::Variables(variables) => variables.iter().map(variable).collect(),
        };
        let saved = |(&address, it): (&u64, &Pages)| state::ManagedMemory {
            address,
            size: it.size,
            context: it.context().unwrap_or(0),
            variables: variables(it),
            ..state::ManagedMemory::default()
        };
        state.managed = self.allocations.iter().map(saved).collect();
    }

    /// Reads that list.
    pub(crate) fn read(&mut self, state: &state::State) {
        self.expected.clone_from(&state.managed);
    }

    /// Whether something must come for a restored client.
    pub(crate) fn expects_any(&self) -> bool {
        !self.expected.is_empty()
    }

    /// What must come for a restored client.
    pub(crate) fn take_expected(&mut self) -> Vec<state::ManagedMemory> {
        std::mem::take(&mut self.expected)
    }

    /// Begins to move an allocation. The userfaultfd has come.
    pub(crate) fn add(&mut self, base: u64, pages: Pages) -> io::Result<()> {
        let faults = self.faults.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        faults.register(&(base..base + pages.size))?;
        if pages.chunks.contains(&Side::Device) {
            // A process that locks all of its memory (mlockall(2)) has pages already.
            pages.take_away(0..pages.size)?;
        }
        self.taken += pages.chunks.iter().filter(|it| **it != Side::Device).count();
        self.fresh += usize::from(pages.fresh);
        self.allocations.insert(base, pages);
        Ok(())
    }

    /// Stops to move an allocation. The content of its pages is nobody's.
    pub(crate) fn remove(&mut self, base: u64) -> Option<Pages> {
        let pages = self.allocations.remove(&base)?;
        self.taken -= pages.chunks.iter().filter(|it| **it != Side::Device).count();
        self.fresh -= usize::from(pages.fresh);
        if let Some(faults) = &self.faults {
            // It fails where the client has unmapped the pages, or is gone.
            let _ = faults.unregister(&(base..base + pages.size));
        }
        Some(pages)
    }

    /// Stops to move the allocations and variables of a context.
    pub(crate) fn forget_context(&mut self, context: u64) {
        let of_context = |it: &&u64| self.allocations[*it].context() == Some(context);
        let gone: Vec<u64> = self.allocations.keys().filter(of_context).copied().collect();
        gone.into_iter().for_each(|base| drop(self.remove(base)));
        self.forget_variables(|it| it.context == context);
    }

    /// Adds a variable to the pages in which it lies, of which the device has the content. `false` if some of them are not there.
    pub(crate) fn add_variable(&mut self, variable: &Variable) -> bool {
        let pages = variable.range.start & !(PAGE - 1)..variable.range.end.next_multiple_of(PAGE);
        let mut there = 0;
        for (base, it) in self.allocations.range_mut(..pages.end).rev() {
            let common = pages.start.max(*base)..pages.end.min(base + it.size);
            if common.is_empty() {
                break;
            }
            if let Owned::Variables(variables) = &mut it.owned {
                there += common.end - common.start;
                let range = variable.range.start.max(common.start)..variable.range.end.min(common.end);
                variables.push(Variable { range, ..variable.clone() });
            }
        }
        there == pages.end - pages.start
    }

    /// Forgets variables, and the pages in which there are no others.
    pub(crate) fn forget_variables(&mut self, which: impl Fn(&Variable) -> bool) {
        let mut empty = Vec::new();
        for (base, pages) in &mut self.allocations {
            if let Owned::Variables(variables) = &mut pages.owned {
                variables.retain(|it| !which(it));
                empty.extend(variables.is_empty().then_some(*base));
            }
        }
        empty.into_iter().for_each(|base| drop(self.remove(base)));
    }

    /// Whether any part of a range is a variable's.
    pub(crate) fn has_variable(&self, range: &Range<u64>) -> bool {
        let of_variables = self.allocations.values().filter(|it| it.context().is_none());
        of_variables.into_iter().any(|it| !it.owned.in_range(range).is_empty())
    }

    /// The parts of a range in some pages that are the client's, each with its context.
    pub(crate) fn owned(&self, base: u64, range: &Range<u64>) -> Vec<(Range<u64>, u64)> {
        self.allocations.get(&base).map_or_else(Vec::new, |it| it.owned.in_range(range))
    }

    /// A thread waits for a page.
    pub(crate) fn note(&mut self, fault: Fault) {
        self.waiting.push_back(fault);
    }

    /// The next fault that nobody has served.
    pub(crate) fn next_fault(&mut self) -> Option<Fault> {
        self.waiting.pop_front()
    }

    /// The end of an allocation.
    pub(crate) fn end_of(&self, base: u64) -> u64 {
        base + self.pages(base).map_or(0, |it| it.size)
    }

    pub(crate) fn pages(&self, base: u64) -> Option<&Pages> {
        self.allocations.get(&base)
    }

    /// The allocation that has an address.
    fn base_of(&self, address: u64) -> Option<u64> {
        let (base, pages) = self.allocations.range(..=address).next_back()?;
        (address < base + pages.size).then_some(*base)
    }

    /// The chunk that has an address, and its state.
    pub(crate) fn chunk_at(&self, address: u64) -> Option<(Side, Part)> {
        let base = self.base_of(address)?;
        let chunk = ((address - base) / CHUNK) as usize;
        Some((self.allocations[&base].chunks[chunk], self.part(base, chunk..chunk + 1)))
    }

    /// The chunks that a fault in a chunk of the device's should bring.
    pub(crate) fn chunks_ahead(&mut self, part: &Part) -> Part {
        let pages = self.allocations.get_mut(&part.base);
        let chunks = pages.map_or(part.chunks.clone(), |it| it.chunks_ahead(part.chunks.start));
        self.part(part.base, chunks)
    }

    /// Whether any of the pages in a range are there.
    pub(crate) fn has_any(&self, range: &Range<u64>) -> bool {
        self.allocations.range(..range.end).next_back().is_some_and(|(base, pages)| base + pages.size > range.start)
    }

    /// All chunks that are, or are not, in a state.
    pub(crate) fn parts(&self, wanted: impl Fn(Side) -> bool) -> Vec<(Side, Part)> {
        let of = |base: u64, pages: &Pages| {
            let runs = pages.runs().into_iter().filter(|(side, _)| wanted(*side));
            runs.map(|(side, chunks)| (side, self.part(base, chunks))).collect::<Vec<_>>()
        };
        self.allocations.iter().flat_map(|(base, pages)| of(*base, pages)).collect()
    }

    fn part(&self, base: u64, chunks: Range<usize>) -> Part {
        let offsets = self.allocations.get(&base).map_or(0..0, |it| it.offsets(&chunks));
        Part { base, chunks, range: base + offsets.start..base + offsets.end }
    }

    /// Notes a new state of chunks.
    pub(crate) fn set(&mut self, part: &Part, side: Side) {
        let Some(pages) = self.allocations.get_mut(&part.base) else { return };
        for chunk in &mut pages.chunks[part.chunks.clone()] {
            self.taken -= usize::from(*chunk != Side::Device);
            self.taken += usize::from(side != Side::Device);
            *chunk = side;
        }
    }

    /// Takes the pages of chunks away from the client: the device has their content.
    pub(crate) fn take_away(&mut self, part: &Part) -> io::Result<()> {
        let Some(pages) = self.allocations.get(&part.base) else { return Ok(()) };
        pages.take_away(part.range.start - part.base..part.range.end - part.base)?;
        self.set(part, Side::Device);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};

    use super::*;

    const BASE: u64 = 0x2000_0000_0000;

    fn memory(chunks: u64, side: Side) -> ManagedMemory {
        // SAFETY: makes a new descriptor that nobody else owns.
        let file = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"managed-test".as_ptr(), libc::MFD_CLOEXEC)) };
        let file = File::from(file);
        let size = chunks * CHUNK - 4096;
        file.set_len(size).unwrap();
        let pages = Pages::new(size, Owned::All(7), file, side, side == Side::Device);
        let taken = pages.chunks.iter().filter(|it| **it != Side::Device).count();
        ManagedMemory { allocations: [(BASE, pages)].into(), taken, ..ManagedMemory::default() }
    }

    #[test]
    fn a_fault_brings_more_where_threads_go_from_chunk_to_chunk() {
        let mut memory = memory(40, Side::Device);
        let mut bring = |chunk: u64| {
            let (side, part) = memory.chunk_at(BASE + chunk * CHUNK + 5).unwrap();
            assert_eq!(side, Side::Device);
            let part = memory.chunks_ahead(&part);
            memory.set(&part, Side::Both);
            part.chunks
        };
        // The first chunk is where a program begins.
        assert_eq!([bring(0), bring(2), bring(6)], [0..2, 2..6, 6..14]);
        assert_eq!([bring(14), bring(39), bring(37)], [14..30, 39..40, 37..38]);
        // It begins anew elsewhere, and ends where the device's end.
        assert_eq!([bring(30), bring(31), bring(33)], [30..31, 31..33, 33..37]);
    }

    #[test]
    fn chunks_know_their_addresses_and_the_last_is_short() {
        let memory = memory(3, Side::Process);
        assert!(memory.is_with_client() && memory.chunk_at(BASE - 1).is_none());
        assert!(memory.chunk_at(BASE + 3 * CHUNK - 4096).is_none());
        let (side, part) = memory.chunk_at(BASE + 3 * CHUNK - 4097).unwrap();
        assert_eq!((side, part.range), (Side::Process, BASE + 2 * CHUNK..BASE + 3 * CHUNK - 4096));
    }

    const PLACE: u64 = 0x7fff_0000_0000;

    /// Pages for variables, of which the client has all.
    fn pages_for_variables(memory: &mut ManagedMemory, range: Range<u64>) {
        // SAFETY: makes a new descriptor that nobody else owns.
        let file = unsafe { OwnedFd::from_raw_fd(libc::memfd_create(c"managed-test".as_ptr(), libc::MFD_CLOEXEC)) };
        let size = range.end - range.start;
        let pages = Pages::new(size, Owned::Variables(Vec::new()), file.into(), Side::Process, false);
        memory.taken += pages.chunks.len();
        memory.allocations.insert(range.start, pages);
    }

    fn variable(range: Range<u64>, parent: u64, context: u64) -> Variable {
        Variable { range, parent, context }
    }

    #[test]
    fn a_variable_owns_its_bytes_in_all_pages_that_it_lies_in() {
        let mut memory = memory(1, Side::Device);
        pages_for_variables(&mut memory, PLACE..PLACE + PAGE);
        let (first, second) = (PLACE + 8..PLACE + 12, PLACE + PAGE - 8..PLACE + 2 * PAGE + 100);
        assert!(memory.add_variable(&variable(first.clone(), 1, 7)));
        assert!(!memory.add_variable(&variable(second.clone(), 2, 7)), "it has no pages behind the first");
        memory.forget_variables(|it| it.parent == 2);
        pages_for_variables(&mut memory, PLACE + PAGE..PLACE + 3 * PAGE);
        assert!(memory.add_variable(&variable(second.clone(), 2, 8)));
        let all = PLACE..PLACE + 3 * PAGE;
        assert_eq!(memory.owned(PLACE, &all), [(first.clone(), 7), (second.start..PLACE + PAGE, 8)]);
        assert_eq!(memory.owned(PLACE + PAGE, &all), [(PLACE + PAGE..second.end, 8)]);
        assert_eq!(memory.owned(PLACE + PAGE, &(second.end - 3..second.end + 3)), [(second.end - 3..second.end, 8)]);
        assert!(memory.has_variable(&(first.start..first.start + 1)) && !memory.has_variable(&(0..PLACE)));
        assert!(memory.has_any(&(PLACE + 5..PLACE + 6)) && !memory.has_any(&(PLACE + 3 * PAGE..PLACE + 4 * PAGE)));
        // An allocation owns all of its bytes.
        assert_eq!(memory.owned(BASE, &(BASE + 5..BASE + 9)), [(BASE + 5..BASE + 9, 7)]);
    }

    #[test]
    fn pages_go_with_the_last_of_their_variables() {
        let mut memory = ManagedMemory::default();
        pages_for_variables(&mut memory, PLACE..PLACE + PAGE);
        pages_for_variables(&mut memory, PLACE + PAGE..PLACE + 2 * PAGE);
        assert!(memory.add_variable(&variable(PLACE..PLACE + 4, 1, 7)));
        assert!(memory.add_variable(&variable(PLACE + PAGE - 4..PLACE + PAGE + 4, 2, 8)));
        memory.forget_variables(|it| it.parent == 1);
        assert_eq!((memory.bases(), memory.taken), (vec![PLACE, PLACE + PAGE], 2));
        memory.forget_context(8);
        assert!(memory.is_empty() && !memory.is_with_client());
    }

    #[test]
    fn what_the_client_loses_is_a_hole_of_the_file_and_the_devices() {
        let mut memory = memory(3, Side::Process);
        let (_, part) = memory.chunk_at(BASE + CHUNK).unwrap();
        let mut bytes = [0; 2];
        memory.allocations[&BASE].file.write_all_at(&[1, 2], CHUNK).unwrap();
        memory.pages(BASE).unwrap().read(&mut bytes, CHUNK).unwrap();
        assert_eq!(bytes, [1, 2]);
        memory.take_away(&part).unwrap();
        memory.pages(BASE).unwrap().read(&mut bytes, CHUNK).unwrap();
        assert_eq!((bytes, memory.taken), ([0, 0], 2));
        let sides: Vec<_> = memory.parts(|_| true).into_iter().map(|(side, part)| (side, part.chunks)).collect();
        assert_eq!(sides, [(Side::Process, 0..1), (Side::Device, 1..2), (Side::Process, 2..3)]);
        assert_eq!(memory.parts(|it| it == Side::Device), [(Side::Device, part)]);
        memory.forget_context(7);
        assert!(memory.is_empty() && !memory.is_with_client());
    }
}
