//! Barriers, fences, and collective operations of a warp.

use super::compiler::Compiler;
use super::linker::Refusable;
use super::modifiers::{has, last_type, types};
use super::rows::Width;
use crate::ast::{Opcode, Operand, Type};
use crate::exec::machine::{Action, BarrierOp, Collective, Exec, Flow, Reduction};
use crate::exec::operations::{access, rank, special};

/// The modifier that is one of these; the order of modifiers differs between sources.
fn one_of(opcode: &Opcode, names: &[&'static str]) -> Option<&'static str> {
    names.iter().copied().find(|name| has(opcode, name))
}

impl Compiler<'_, '_> {
    pub(super) fn fence(&mut self) -> Refusable<()> {
        self.push(self.inst(Action::Run(access::full_fence())));
        Ok(())
    }

    pub(super) fn nanosleep(&mut self, _operands: &[Operand]) -> Refusable<()> {
        let exec: Exec = |w, _| {
            w.poll();
            Flow::Next
        };
        self.push(self.inst(Action::Run(exec)));
        Ok(())
    }

    /// `bar` and `barrier`, of the block or of the warp.
    pub(super) fn barrier(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        if has(opcode, "warp") {
            let [members] = operands else { return Err("operands".to_owned()) };
            let members = self.source(members, Type::U32)?;
            let mut inst = self.inst(Action::Collective(Collective::Sync));
            inst.imm = u64::from(members);
            self.push(inst);
            return Ok(());
        }
        if has(opcode, "cluster") {
            let action = if has(opcode, "wait") { Action::ClusterWait } else { Action::ClusterArrive };
            self.push(self.inst(action));
            return Ok(());
        }
        let op = if has(opcode, "arrive") {
            BarrierOp::Arrive
        } else if has(opcode, "popc") {
            BarrierOp::Count
        } else if has(opcode, "and") {
            BarrierOp::All
        } else if has(opcode, "or") {
            BarrierOp::Any
        } else {
            BarrierOp::Wait
        };
        let mut inst = self.inst(Action::Barrier(op));
        let mut operands = operands;
        if matches!(op, BarrierOp::Count | BarrierOp::All | BarrierOp::Any) {
            let [to, middle @ .., predicate] = operands else { return Err("operands".to_owned()) };
            if op == BarrierOp::Count {
                inst.d = self.result(to, Type::U32)?;
            } else {
                inst.e = self.result(to, Type::Pred)?;
            }
            let (row, negated) = self.predicate(predicate)?;
            inst.c = row;
            inst.imm = if negated { u64::from(u32::MAX) } else { 0 };
            operands = middle;
        }
        match operands {
            [id] => inst.a = self.source(id, Type::U32)?,
            [id, count] => {
                inst.a = self.source(id, Type::U32)?;
                inst.b = self.source(count, Type::U32)?;
            }
            _ => return Err("operands".to_owned()),
        }
        self.push(inst);
        Ok(())
    }

    /// `mapa`: an address in the shared memory of another block of the cluster.
    pub(super) fn mapa(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let [to, from, rank] = operands else { return Err("operands".to_owned()) };
        let (a, b, d) = (self.source(from, ty)?, self.source(rank, Type::U32)?, self.result(to, ty)?);
        self.run(rank::mapa(ty.bytes() == 8), d, &[a, b], 0);
        Ok(())
    }

    /// `getctarank`: the rank of the block whose shared memory an address is in.
    pub(super) fn rank_of(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let [to, from] = operands else { return Err("operands".to_owned()) };
        let own = special::row("%cluster_ctarank").ok_or("register")?;
        let (a, d) = (self.source(from, ty)?, self.result(to, Type::U32)?);
        self.run(rank::rank_of(ty.bytes() == 8), d, &[a, own], 0);
        Ok(())
    }

    pub(super) fn collective(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        if opcode.name == "activemask" {
            let [to] = operands else { return Err("operands".to_owned()) };
            let exec: Exec = |w, i| {
                let active = w.active;
                w.map0(i, || active)
            };
            let d = self.result(to, Type::B32)?;
            self.run(exec, d, &[], 0);
            return Ok(());
        }
        if !has(opcode, "sync") {
            return Err("without .sync".to_owned());
        }
        match opcode.name.as_str() {
            "shfl" => self.shuffle(opcode, operands),
            "vote" => self.vote(opcode, operands),
            "match" => self.matching(opcode, operands),
            "redux" => self.redux(opcode, operands),
            _ => self.elect(operands),
        }
    }

    fn shuffle(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, a, b, c, members] = operands else { return Err("operands".to_owned()) };
        let collective = match one_of(opcode, &["up", "down", "bfly", "idx"]) {
            Some("up") => Collective::ShuffleUp,
            Some("down") => Collective::ShuffleDown,
            Some("bfly") => Collective::ShuffleXor,
            Some("idx") => Collective::ShuffleIndex,
            _ => return Err("mode".to_owned()),
        };
        let mut inst = self.inst(Action::Collective(collective));
        if let Operand::Pair(value, within) = to {
            inst.d = self.result(value, Type::B32)?;
            inst.e = self.destination(within, Type::Pred)?;
        } else {
            inst.d = self.result(to, Type::B32)?;
        }
        inst.a = self.source(a, Type::B32)?;
        inst.b = self.source(b, Type::B32)?;
        inst.c = self.source(c, Type::B32)?;
        inst.imm = u64::from(self.source(members, Type::B32)?);
        self.push(inst);
        Ok(())
    }

    fn vote(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, predicate, members] = operands else { return Err("operands".to_owned()) };
        let collective = match one_of(opcode, &["all", "any", "uni", "ballot"]) {
            Some("all") => Collective::VoteAll,
            Some("any") => Collective::VoteAny,
            Some("uni") => Collective::VoteUniform,
            Some("ballot") => Collective::Ballot,
            _ => return Err("mode".to_owned()),
        };
        let mut inst = self.inst(Action::Collective(collective));
        let ty = if collective == Collective::Ballot { Type::B32 } else { Type::Pred };
        inst.d = self.result(to, ty)?;
        let (row, negated) = self.predicate(predicate)?;
        inst.a = row;
        let flip = if negated { u64::from(u32::MAX) } else { 0 };
        inst.b = self.constant(Width::Predicate, flip);
        inst.imm = u64::from(self.source(members, Type::B32)?);
        self.push(inst);
        Ok(())
    }

    fn matching(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, a, members] = operands else { return Err("operands".to_owned()) };
        let ty = last_type(opcode)?;
        let wide = ty.bytes() == 8;
        let collective = if has(opcode, "all") { Collective::MatchAll(wide) } else { Collective::MatchAny(wide) };
        let mut inst = self.inst(Action::Collective(collective));
        if let Operand::Pair(value, all) = to {
            inst.d = self.result(value, Type::B32)?;
            inst.e = self.destination(all, Type::Pred)?;
        } else {
            inst.d = self.result(to, Type::B32)?;
        }
        inst.a = self.source(a, ty)?;
        inst.imm = u64::from(self.source(members, Type::B32)?);
        self.push(inst);
        Ok(())
    }

    fn redux(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, a, members] = operands else { return Err("operands".to_owned()) };
        let ty = types(opcode).last().copied().unwrap_or(Type::B32);
        let names = ["add", "min", "max", "and", "or", "xor"];
        let reduction = match (one_of(opcode, &names), ty) {
            _ if ty.float() => return Err("of floating point numbers".to_owned()),
            (Some("add"), _) => Reduction::Add,
            (Some("min"), Type::S32) => Reduction::MinSigned,
            (Some("max"), Type::S32) => Reduction::MaxSigned,
            (Some("min"), _) => Reduction::MinUnsigned,
            (Some("max"), _) => Reduction::MaxUnsigned,
            (Some("and"), _) => Reduction::And,
            (Some("or"), _) => Reduction::Or,
            (Some("xor"), _) => Reduction::Xor,
            _ => return Err("operation".to_owned()),
        };
        let mut inst = self.inst(Action::Collective(Collective::Reduce(reduction)));
        inst.d = self.result(to, ty)?;
        inst.a = self.source(a, ty)?;
        inst.imm = u64::from(self.source(members, Type::B32)?);
        self.push(inst);
        Ok(())
    }

    fn elect(&mut self, operands: &[Operand]) -> Refusable<()> {
        let [Operand::Pair(leader, elected), members] = operands else {
            return Err("operands".to_owned());
        };
        let mut inst = self.inst(Action::Collective(Collective::Elect));
        inst.d = self.destination(leader, Type::B32)?;
        inst.e = self.destination(elected, Type::Pred)?;
        inst.imm = u64::from(self.source(members, Type::B32)?);
        self.push(inst);
        Ok(())
    }
}
