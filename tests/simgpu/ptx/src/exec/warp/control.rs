//! Instructions of more than one step: calls, barriers, collectives.

use super::barrier::Barriers;
use super::fragment::{Fragment, Frame, Pause, State};
use super::state::{Warp, words_to_cells};
use crate::exec::machine::{Action, BarrierOp, Core, Flow, Inst, Lanes, NO_ROW};
use crate::exec::operations::builtin;
use crate::fault::FaultKind;

/// The limit of nested calls, whatever the size of the stack.
const DEPTH_LIMIT: usize = 4096;

impl Warp<'_> {
    /// Executes an instruction of more than one step. None if the fragment goes on at once.
    pub(super) fn control(
        &mut self,
        w: &mut Core<'_>,
        fragment: &mut Fragment,
        inst: &Inst,
        active: u32,
        barriers: &mut Barriers,
    ) -> Option<Pause> {
        let program = self.program;
        match inst.action {
            Action::Run(_) | Action::Compare(_) | Action::Branch(_) => None,
            Action::BranchTable(table) => {
                let lane = active.trailing_zeros() as usize;
                let index: u32 = w.get(inst.a, lane);
                let same = Lanes(active).filter(|&l| w.get::<u32>(inst.a, l) == index).fold(0, |mask, l| mask | 1 << l);
                let Some(&target) = program.tables[table as usize].get(index as usize) else {
                    return Some(self.fault(w, inst, FaultKind::BadCall));
                };
                // Lanes with another index come back to this instruction, the inactive ones go on.
                if active & !same != 0 {
                    self.part(fragment, active & !same, fragment.pc);
                }
                if fragment.mask & !active != 0 {
                    self.part(fragment, fragment.mask & !active, fragment.pc + 1);
                }
                fragment.mask = same;
                fragment.pc = target;
                Some(self.after_parting(w))
            }
            Action::Call(site) => {
                self.narrow(fragment, active);
                let target = program.sites[site as usize].target;
                self.call(w, fragment, inst, site, target)
            }
            Action::CallIndirect(site) => {
                let lane = active.trailing_zeros() as usize;
                let address: u64 = w.get(inst.a, lane);
                let same =
                    Lanes(active).filter(|&l| w.get::<u64>(inst.a, l) == address).fold(0, |mask, l| mask | 1 << l);
                if active & !same != 0 {
                    self.part(fragment, active & !same, fragment.pc);
                }
                if fragment.mask & !active != 0 {
                    self.part(fragment, fragment.mask & !active, fragment.pc + 1);
                }
                fragment.mask = same;
                w.active = same;
                let offset = address.wrapping_sub(program.code_base);
                let index = (offset / 16) as usize;
                let callable = program.functions.get(index).is_some_and(|f| {
                    let shape = &program.sites[site as usize].shape;
                    offset.is_multiple_of(16) && f.callable && f.shape == *shape
                });
                if !callable {
                    w.fail(FaultKind::BadCall, address, lane);
                    self.line = inst.line;
                    return Some(Pause::Fault);
                }
                self.call(w, fragment, inst, site, index as u32)
            }
            Action::Builtin(function, site) => {
                let site = &program.sites[site as usize];
                match builtin::run(w, inst, function, &site.arguments, site.result) {
                    Flow::Next => {
                        fragment.pc += 1;
                        None
                    }
                    Flow::Fault => Some(self.fail(fragment, fragment.pc, inst)),
                }
            }
            Action::Return => {
                if fragment.frames.is_empty() {
                    return Some(self.exit(w, fragment, active));
                }
                self.narrow(fragment, active);
                let frame = fragment.frames.pop()?;
                let site = &program.sites[frame.site as usize];
                for lane in Lanes(active) {
                    for copy in &site.returns {
                        self.stacks.copy(lane, fragment.stack + copy.from, frame.stack + copy.to, copy.bytes);
                    }
                }
                (fragment.pc, fragment.words, fragment.stack) = (frame.pc, frame.words, frame.stack);
                self.attach(w, fragment);
                // Fragments that called together continue together.
                (!self.fragments.is_empty()).then_some(Pause::Reschedule)
            }
            Action::Exit => Some(self.exit(w, fragment, active)),
            Action::Trap => Some(self.fault(w, inst, FaultKind::Trap)),
            Action::Refused(index) => {
                let refusal = program.refusals[index as usize].clone();
                Some(self.fault(w, inst, FaultKind::Unsupported(refusal)))
            }
            Action::Barrier(op) => self.barrier(w, fragment, inst, active, op, barriers),
            Action::ClusterArrive => {
                Lanes(active).for_each(|lane| self.arrivals[lane] += 1);
                if let Some(cluster) = w.shared.cluster() {
                    cluster.arrive(active.count_ones());
                }
                fragment.pc += 1;
                None
            }
            Action::ClusterWait => {
                let phase = w.shared.cluster().map_or(u32::MAX, |it| it.phase());
                if Lanes(active).all(|lane| self.arrivals[lane] <= phase) {
                    fragment.pc += 1;
                    return None;
                }
                // The awaited threads are in another block, or in another fragment of this warp.
                w.poll();
                Some(Pause::Quantum)
            }
            Action::Collective(collective) => {
                self.narrow(fragment, active);
                // The fragment joins the fragments of this warp that wait at the same instruction.
                let mut at = 0;
                while at < self.fragments.len() {
                    let other = &self.fragments[at];
                    if other.state == State::Collective && other.joins(fragment) {
                        fragment.mask |= other.mask;
                        self.fragments.swap_remove(at);
                    } else {
                        at += 1;
                    }
                }
                w.active = fragment.mask;
                self.inputs.take(w, inst, collective);
                if self.inputs.ready(fragment.mask, self.live) == fragment.mask {
                    self.inputs.finish(w, inst, collective, fragment.mask);
                    fragment.pc += 1;
                    let others = !self.fragments.is_empty();
                    return others.then_some(Pause::Reschedule);
                }
                fragment.state = State::Collective;
                let waiting = fragment.clone();
                self.fragments.push(waiting);
                self.finish_collectives(w);
                // The fragment is among the others now, and ready if its collective is complete.
                Some(Pause::Gone)
            }
        }
    }

    /// Continues the fragments that wait at collective instructions and whose members have all arrived.
    fn finish_collectives(&mut self, w: &mut Core<'_>) {
        let waiting = |f: &&Fragment| f.state == State::Collective;
        let present = self.fragments.iter().filter(waiting).fold(0, |mask, f| mask | f.mask);
        if present == 0 {
            return;
        }
        let ready = self.inputs.ready(present, self.live);
        for index in 0..self.fragments.len() {
            let fragment = self.fragments[index].clone();
            if fragment.state != State::Collective || fragment.mask & ready == 0 {
                continue;
            }
            let inst = &self.program.code[fragment.pc as usize];
            let Action::Collective(collective) = inst.action else { continue };
            self.attach(w, &fragment);
            w.active = fragment.mask & ready;
            self.inputs.finish(w, inst, collective, ready);
            let rest = fragment.mask & !ready;
            if rest != 0 {
                let mut left = fragment.clone();
                left.mask = rest;
                self.fragments.push(left);
            }
            let done = &mut self.fragments[index];
            done.mask &= ready;
            done.state = State::Ready;
            done.pc += 1;
        }
    }

    /// Ends the active lanes of a fragment.
    fn exit(&mut self, w: &mut Core<'_>, fragment: &mut Fragment, active: u32) -> Pause {
        self.live &= !active;
        if let Some(cluster) = w.shared.cluster() {
            let arrived = Lanes(active).filter(|lane| self.arrivals[*lane] > cluster.phase()).count();
            cluster.end(active.count_ones(), arrived as u32);
        }
        fragment.mask &= !active;
        fragment.pc += 1;
        // No collective waits for these lanes any more.
        if !self.fragments.is_empty() {
            self.finish_collectives(w);
        }
        if fragment.mask == 0 { Pause::Gone } else { Pause::Reschedule }
    }

    fn barrier(
        &mut self,
        w: &mut Core<'_>,
        fragment: &mut Fragment,
        inst: &Inst,
        active: u32,
        op: BarrierOp,
        barriers: &mut Barriers,
    ) -> Option<Pause> {
        // Lanes may name different barriers; the first lane's comes first.
        let lane = active.trailing_zeros() as usize;
        let id: u32 = w.get(inst.a, lane);
        let same = Lanes(active).filter(|&l| w.get::<u32>(inst.a, l) == id).fold(0, |mask, l| mask | 1 << l);
        if active & !same != 0 {
            self.part(fragment, active & !same, fragment.pc);
        }
        if fragment.mask & !active != 0 {
            self.part(fragment, fragment.mask & !active, fragment.pc + 1);
        }
        fragment.mask = same;
        w.active = same;
        let expected = (inst.b != NO_ROW).then(|| w.get::<u32>(inst.b, lane));
        let predicate = if inst.c == NO_ROW { 0 } else { (w.predicate(inst.c) ^ inst.imm as u32) & same };
        if !barriers.arrive(id, same, expected, predicate) {
            return Some(self.fault(w, inst, FaultKind::InvalidLaunch(format!("barrier {id}"))));
        }
        if op == BarrierOp::Arrive {
            fragment.pc += 1;
            // The arrival may have opened the barrier for others.
            return Some(Pause::Reschedule);
        }
        fragment.state = State::Barrier(id);
        Some(Pause::Waits)
    }

    /// Continues the fragments that wait at a barrier, with the result of its reduction.
    pub(crate) fn release(&mut self, w: &mut Core<'_>, barrier: u32, op: impl Fn(&Inst) -> u32) {
        for index in 0..self.fragments.len() {
            if self.fragments[index].state != State::Barrier(barrier) {
                continue;
            }
            let fragment = &mut self.fragments[index];
            fragment.state = State::Ready;
            let inst = self.program.code[fragment.pc as usize];
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

    /// Enters a function with all lanes of a fragment.
    fn call(
        &mut self,
        w: &mut Core<'_>,
        fragment: &mut Fragment,
        inst: &Inst,
        site: u32,
        target: u32,
    ) -> Option<Pause> {
        let program = self.program;
        let (called, from) = (&program.functions[target as usize], &program.sites[site as usize]);
        let frame = Frame { pc: fragment.pc + 1, words: fragment.words, stack: fragment.stack, site };
        let words = fragment.words + from.caller_words;
        let stack = fragment.stack + from.caller_stack;
        let needed = stack.saturating_add(called.stack_bytes);
        if needed > w.launch.env.stack_bytes.max(program.least_stack) || fragment.frames.len() >= DEPTH_LIMIT {
            return Some(self.fault(w, inst, FaultKind::StackOverflow));
        }
        self.stacks.reserve(needed);
        let cells = words_to_cells(words + called.words);
        if cells > self.words.len() {
            self.words.resize(cells.max(self.words.len() * 2), 0);
        }
        for lane in Lanes(fragment.mask) {
            for copy in &from.copies {
                self.stacks.copy(lane, fragment.stack + copy.from, stack + copy.to, copy.bytes);
            }
        }
        fragment.frames.push(frame);
        (fragment.pc, fragment.words, fragment.stack) = (called.entry, words, stack);
        self.attach(w, fragment);
        (!self.fragments.is_empty()).then_some(Pause::Reschedule)
    }
}
