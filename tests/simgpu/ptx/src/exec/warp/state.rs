//! The state of a warp: its registers, its stacks, and the fragments of its lanes.

use super::collective::Inputs;
use super::fragment::{Fragment, Pause, State};
use super::stacks::Stacks;
use crate::exec::machine::{Core, Inst, LANES, Launch};
use crate::exec::operations::special::{self, SPECIAL_WORDS};
use crate::fault::FaultKind;
use crate::program::Program;

/// A warp.
pub(crate) struct Warp<'l> {
    pub(super) program: &'l Program,
    pub(super) fragments: Vec<Fragment>,
    /// Registers of all frames.
    pub(super) words: Vec<u64>,
    special: Vec<u32>,
    pub(super) stacks: Stacks,
    pub(super) inputs: Inputs,
    /// The lanes that have not ended.
    pub(crate) live: u32,
    /// Its number in its block.
    pub(crate) number: u32,
    /// Counts the turns of fragments.
    pub(super) clock: u64,
    /// Whether the fragment that ran longest ago is the next to run.
    pub(super) rotate: bool,
    /// The number of times that each lane has arrived at the cluster's barrier.
    pub(super) arrivals: [u32; LANES],
    /// The line of the instruction that failed.
    pub(crate) line: u32,
}

impl<'l> Warp<'l> {
    pub(crate) fn new(program: &'l Program, launch: &Launch<'_>, number: u32) -> Self {
        let mut special = vec![0; SPECIAL_WORDS];
        special::fill(&mut special, launch, number);
        Warp {
            program,
            fragments: Vec::new(),
            words: Vec::new(),
            special,
            stacks: Stacks::default(),
            inputs: Inputs::default(),
            live: 0,
            number,
            clock: 0,
            rotate: false,
            arrivals: [0; LANES],
            line: 0,
        }
    }

    /// Puts the warp at the beginning of a kernel, for a block.
    pub(crate) fn start(&mut self, launch: &Launch<'_>, kernel: usize, block: [u32; 3]) {
        let compiled = &self.program.functions[kernel];
        let threads: u32 = launch.block.iter().product();
        let lanes = (threads - self.number * LANES as u32).min(LANES as u32);
        let mask = u32::MAX >> (LANES as u32 - lanes);
        special::fill_block(&mut self.special, launch, block, self.number);
        // Registers and stacks of an earlier block are still there. No defined program reads them, but results must not depend
        // on earlier blocks.
        self.words.fill(0);
        self.stacks.clear();
        self.words.resize(self.words.len().max(words_to_cells(compiled.words)), 0);
        self.stacks.reserve(compiled.stack_bytes);
        self.fragments.clear();
        self.fragments.push(Fragment {
            mask,
            pc: compiled.entry,
            words: 0,
            stack: 0,
            frames: Vec::new(),
            state: State::Ready,
            ran: 0,
        });
        self.live = mask;
        self.rotate = false;
        self.arrivals = [0; LANES];
    }

    /// Tells the core where this warp's state lies.
    pub(super) fn attach(&mut self, w: &mut Core<'_>, fragment: &Fragment) {
        w.regions[0] = self.words.as_mut_ptr().cast::<u32>().wrapping_add(fragment.words as usize);
        w.regions[2] = self.special.as_mut_ptr();
        w.local = self.stacks.local(fragment.stack);
    }

    /// The first live lane, named in errors that no single lane has caused.
    pub(crate) fn some_lane(&self) -> usize {
        self.live.trailing_zeros().min(31) as usize
    }

    /// The reason why a fragment stops after it has left lanes behind.
    pub(super) fn after_parting(&self, w: &Core<'_>) -> Pause {
        if w.budget <= 0 { Pause::Quantum } else { Pause::Reschedule }
    }

    /// Stops at an instruction that failed.
    pub(super) fn fail(&mut self, fragment: &mut Fragment, pc: u32, inst: &Inst) -> Pause {
        fragment.pc = pc;
        self.line = inst.line;
        Pause::Fault
    }

    /// Makes an instruction fail.
    pub(super) fn fault(&mut self, w: &mut Core<'_>, inst: &Inst, kind: FaultKind) -> Pause {
        let lane = w.active.trailing_zeros() as usize;
        w.fail(kind, 0, lane);
        self.line = inst.line;
        Pause::Fault
    }

    /// Leaves some lanes of a fragment behind, at `pc`.
    pub(super) fn part(&mut self, fragment: &Fragment, mask: u32, pc: u32) {
        let frames = fragment.frames.clone();
        self.clock += 1;
        let (words, stack, ran) = (fragment.words, fragment.stack, self.clock);
        self.fragments.push(Fragment { mask, pc, words, stack, frames, state: State::Ready, ran });
    }

    /// Keeps only the active lanes in a fragment; the others continue after the instruction.
    pub(super) fn narrow(&mut self, fragment: &mut Fragment, active: u32) {
        if active != fragment.mask {
            self.part(fragment, fragment.mask & !active, fragment.pc + 1);
            fragment.mask = active;
        }
    }
}

/// The number of cells for this number of words.
pub(super) fn words_to_cells(words: u32) -> usize {
    (words as usize).div_ceil(2)
}
