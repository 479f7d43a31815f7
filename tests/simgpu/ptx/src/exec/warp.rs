//! A warp: its registers, its fragments, and the loop that executes instructions.

use super::block::Barriers;
use super::collective::Inputs;
use super::core::{Core, Launch};
use super::fragment::{Fragment, Pause, State};
use super::lanes::Lanes;
use super::special::SPECIAL_WORDS;
use super::{Action, Flow, Inst, LANES, NO_ROW, convert};
use crate::fault::FaultKind;

/// How long a fragment runs while others of its warp could run too. Lanes may wait for lanes of
/// their own warp, so each must get its turn.
const FRAGMENT_QUANTUM: i64 = 20_000;
/// Why a warp stopped running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Its time is up.
    Preempted,
    /// No fragment can run before a barrier opens.
    Blocked,
    /// All lanes have ended.
    Ended,
    /// [`Core::fault`] says what happened.
    Fault,
}

/// A warp.
pub(crate) struct Warp {
    pub(super) fragments: Vec<Fragment>,
    /// Registers of all frames.
    pub(super) words: Vec<u64>,
    special: Vec<u32>,
    /// The lanes' stacks, one after the other.
    pub(super) stack: Vec<u64>,
    pub(super) stack_bytes: u32,
    pub(super) inputs: Inputs,
    /// The lanes that have not ended.
    pub(crate) live: u32,
    /// Its number in its block.
    pub(crate) number: u32,
    pub(super) clock: u64,
    rotate: bool,
    /// How often each lane has arrived at the cluster's barrier.
    pub(super) arrivals: [u32; LANES],
    /// The line of the instruction that failed.
    pub(crate) line: u32,
}

impl Warp {
    pub(crate) fn new(launch: &Launch<'_>, number: u32) -> Warp {
        let mut special = vec![0; SPECIAL_WORDS];
        super::special::fill(&mut special, launch, number);
        Warp {
            fragments: Vec::new(),
            words: Vec::new(),
            special,
            stack: Vec::new(),
            stack_bytes: 0,
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
        let compiled = &launch.program.functions[kernel];
        let threads: u32 = launch.block.iter().product();
        let lanes = (threads - self.number * LANES as u32).min(LANES as u32);
        let mask = u32::MAX >> (LANES as u32 - lanes);
        super::special::fill_block(&mut self.special, launch, block, self.number);
        // Registers and stacks of an earlier block are still there; no defined program sees them,
        // but results must not depend on what ran before.
        self.words.fill(0);
        self.stack.fill(0);
        self.words.resize(self.words.len().max(words_to_cells(compiled.words)), 0);
        self.reserve_stack(compiled.stack_bytes);
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

    /// Makes each lane's stack at least so large.
    pub(super) fn reserve_stack(&mut self, bytes: u32) {
        if bytes <= self.stack_bytes {
            return;
        }
        let bytes = bytes.next_multiple_of(16).max(self.stack_bytes.saturating_mul(2));
        let (old, new) = ((self.stack_bytes / 8) as usize, (bytes / 8) as usize);
        let mut stack = vec![0; new * LANES];
        for lane in 0..LANES {
            stack[lane * new..][..old].copy_from_slice(&self.stack[lane * old..][..old]);
        }
        self.stack = stack;
        self.stack_bytes = bytes;
    }

    /// Tells the core where this warp's state lies.
    pub(super) fn attach(&mut self, w: &mut Core<'_>, fragment: &Fragment) {
        w.regions[0] = self.words.as_mut_ptr().cast::<u32>().wrapping_add(fragment.words as usize);
        w.regions[2] = self.special.as_mut_ptr();
        w.stack = self.stack.as_mut_ptr().cast();
        w.stack_stride = u64::from(self.stack_bytes);
        w.frame = u64::from(fragment.stack);
    }

    /// The first live lane, to be named where no lane is to blame.
    pub(crate) fn some_lane(&self) -> usize {
        self.live.trailing_zeros().min(31) as usize
    }

    /// Lets go the fragments that wait at a barrier, with the result of its reduction.
    pub(crate) fn release(&mut self, w: &mut Core<'_>, barrier: u32, op: impl Fn(&Inst) -> u32) {
        for index in 0..self.fragments.len() {
            if self.fragments[index].state != State::Barrier(barrier) {
                continue;
            }
            let fragment = &mut self.fragments[index];
            fragment.state = State::Ready;
            let inst = w.launch.program.code[fragment.pc as usize];
            fragment.pc += 1;
            let fragment = self.fragments[index].clone();
            self.attach(w, &fragment);
            w.active = fragment.mask;
            let result = op(&inst);
            if inst.d != NO_ROW {
                for lane in Lanes(w.active) {
                    w.put(inst.d, lane, result);
                }
            }
            if inst.e != NO_ROW {
                w.set_predicate(inst.e, result);
            }
        }
    }

    /// Chooses the fragment to run next, takes it out and joins with it those at the same place.
    /// Gives also the first `pc` at which it must look at others again.
    fn pick(&mut self) -> Option<(Fragment, u32)> {
        if let [only] = self.fragments.as_slice() {
            return (only.state == State::Ready).then(|| (self.fragments.swap_remove(0), u32::MAX));
        }
        let ready = |f: &&Fragment| f.state == State::Ready;
        let rotate = std::mem::take(&mut self.rotate);
        // Those deepest in calls and furthest behind run first, so that others are caught up with.
        let order = |f: &Fragment| (std::cmp::Reverse(f.frames.len()), f.pc);
        let index = if rotate {
            let oldest = self.fragments.iter().filter(ready).min_by_key(|f| f.ran)?;
            self.fragments.iter().position(|f| std::ptr::eq(f, oldest))?
        } else {
            let first = self.fragments.iter().filter(ready).min_by_key(|f| order(f))?;
            self.fragments.iter().position(|f| std::ptr::eq(f, first))?
        };
        let mut chosen = self.fragments.swap_remove(index);
        let mut limit = u32::MAX;
        let mut at = 0;
        while at < self.fragments.len() {
            let other = &self.fragments[at];
            if other.state == State::Ready && other.joins(&chosen) {
                chosen.mask |= other.mask;
                self.fragments.swap_remove(at);
                continue;
            }
            if other.state == State::Ready && other.frames.len() == chosen.frames.len() && !rotate {
                limit = limit.min(other.pc);
            }
            at += 1;
        }
        Some((chosen, limit))
    }

    /// Runs until the core's budget is used up or nothing can run.
    pub(crate) fn run(&mut self, w: &mut Core<'_>, barriers: &mut Barriers) -> Stop {
        loop {
            if self.live == 0 {
                return Stop::Ended;
            }
            if w.budget <= 0 {
                return Stop::Preempted;
            }
            let Some((mut fragment, limit)) = self.pick() else {
                return Stop::Blocked;
            };
            let alone = !self.fragments.iter().any(|f| f.state == State::Ready);
            let quantum = if alone { w.budget } else { w.budget.min(FRAGMENT_QUANTUM) };
            let kept = w.budget - quantum;
            w.budget = quantum;
            let pause = self.execute(w, &mut fragment, limit, barriers);
            w.budget += kept;
            self.clock += 1;
            fragment.ran = self.clock;
            match pause {
                Pause::Gone => {}
                Pause::Reschedule | Pause::Waits => self.fragments.push(fragment),
                Pause::Quantum => {
                    self.rotate = true;
                    self.fragments.push(fragment);
                }
                Pause::Fault => {
                    self.fragments.push(fragment);
                    return Stop::Fault;
                }
            }
        }
    }

    /// Runs one fragment.
    fn execute(&mut self, w: &mut Core<'_>, fragment: &mut Fragment, limit: u32, barriers: &mut Barriers) -> Pause {
        self.attach(w, fragment);
        let program = w.launch.program;
        let code = program.code.as_slice();
        let mut pc = fragment.pc;
        let mut mask = fragment.mask;
        // The limit matters only if it is ahead.
        let limit = if limit > pc { limit } else { u32::MAX };
        loop {
            let inst = &code[pc as usize];
            let mut active = mask;
            if inst.guard != NO_ROW {
                active &= w.predicate(inst.guard) ^ inst.guard_flip;
            }
            w.budget -= 1;
            if active != 0 {
                w.active = active;
                match inst.action {
                    Action::Run(exec) => {
                        if exec(w, inst) == Flow::Fault {
                            return self.fail(fragment, pc, inst);
                        }
                    }
                    Action::Compare(test) => convert::compare(w, inst, test),
                    Action::Branch(target) => {
                        if active == mask {
                            let back = target <= pc;
                            pc = target;
                            if back && w.budget <= 0 {
                                fragment.pc = pc;
                                return Pause::Quantum;
                            }
                            if !back && pc >= limit {
                                fragment.pc = pc;
                                return Pause::Reschedule;
                            }
                            // A jump back to others that are behind this fragment.
                            continue;
                        }
                        self.part(fragment, mask & !active, pc + 1);
                        fragment.mask = active;
                        fragment.pc = target;
                        return self.after_parting(w);
                    }
                    _ => {
                        fragment.pc = pc;
                        fragment.mask = mask;
                        match self.control(w, fragment, inst, active, barriers) {
                            None => {
                                pc = fragment.pc;
                                mask = fragment.mask;
                                continue;
                            }
                            Some(pause) => return pause,
                        }
                    }
                }
            }
            pc += 1;
            if pc == limit || w.budget <= 0 {
                fragment.pc = pc;
                return if w.budget <= 0 { Pause::Quantum } else { Pause::Reschedule };
            }
        }
    }

    pub(super) fn after_parting(&self, w: &Core<'_>) -> Pause {
        if w.budget <= 0 { Pause::Quantum } else { Pause::Reschedule }
    }

    pub(super) fn fail(&mut self, fragment: &mut Fragment, pc: u32, inst: &Inst) -> Pause {
        fragment.pc = pc;
        self.line = inst.line;
        Pause::Fault
    }

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

    /// Keeps only the active lanes in a fragment; the others go on behind the instruction.
    pub(super) fn narrow(&mut self, fragment: &mut Fragment, active: u32) {
        if active != fragment.mask {
            self.part(fragment, fragment.mask & !active, fragment.pc + 1);
            fragment.mask = active;
        }
    }
}

pub(super) fn words_to_cells(words: u32) -> usize {
    (words as usize).div_ceil(2)
}
