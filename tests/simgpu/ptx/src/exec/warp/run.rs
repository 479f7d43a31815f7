//! The loop that executes the instructions of a warp, and chooses the fragment that runs next.

use super::barrier::Barriers;
use super::fragment::{Fragment, Pause, State};
use super::state::Warp;
use crate::exec::machine::{Action, Core, Flow, NO_ROW};
use crate::exec::operations::convert;

/// The number of instructions that a fragment runs while others of its warp could run too. Lanes may wait for lanes of their
/// own warp, so each fragment must get its turn.
const FRAGMENT_QUANTUM: i64 = 20_000;

/// The reason why a warp stopped running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Its time is up.
    Preempted,
    /// No fragment can run before a barrier opens.
    Blocked,
    /// All lanes have ended.
    Ended,
    /// The reason is in [`Core::fault`].
    Fault,
}

impl Warp<'_> {
    /// Chooses the next fragment, takes it out and joins those at the same place with it. Also returns the first `pc` at which
    /// the fragment must look for others again.
    fn pick(&mut self) -> Option<(Fragment, u32)> {
        if let [only] = self.fragments.as_slice() {
            return (only.state == State::Ready).then(|| (self.fragments.swap_remove(0), u32::MAX));
        }
        let ready = |f: &&Fragment| f.state == State::Ready;
        let rotate = std::mem::take(&mut self.rotate);
        // Fragments deepest in calls and furthest behind run first, so that they catch up with the others.
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
        let code = self.program.code.as_slice();
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
}
