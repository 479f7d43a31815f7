//! `cvt`, `setp` and `set`.

use super::alu_float::flags;
use super::compiler::Compiler;
use super::linker::Refusable;
use super::modifiers::{has, last_type, types};
use super::rows::Width;
use crate::ast::{Opcode, Operand, Type};
use crate::exec::machine::{Action, NO_ROW, Row};
use crate::exec::operations::round::Rounding;
use crate::exec::operations::{convert, float, half, packed};

impl Compiler<'_, '_> {
    pub(super) fn cvt(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        if has(opcode, "pack") {
            return Err("packed integers".to_owned());
        }
        let [target, source] = types(opcode)[..] else { return Err("types".to_owned()) };
        let mut flags = flags(opcode);
        for modifier in &opcode.modifiers {
            if let Some(mode) = Rounding::named_whole(modifier) {
                flags |= convert::WHOLE | mode as u64;
            }
        }
        if let ([to, a, b], Type::F16x2 | Type::Bf16x2, Type::F32) = (operands, target, source) {
            let exec = half::pack(target).ok_or("pack")?;
            let (a, b) = (self.source(a, source)?, self.source(b, source)?);
            let d = self.result(to, target)?;
            self.run(exec, d, &[a, b], flags);
            return Ok(());
        }
        let [to, from] = operands else { return Err("operands".to_owned()) };
        let a = self.cvt_source(from, source)?;
        let register = match to {
            Operand::Reg(register) => self.register_type(*register)?,
            _ => target,
        };
        let d = self.result(to, register)?;
        let wide = register.bytes() == 8;
        if !source.float() && !target.float() && flags & float::SATURATE == 0 {
            // The low 16 bits are the same, and a register of 16 must not hold more.
            let unsigned = register.bytes() == 2 && target == Type::S16;
            let target = if unsigned { Type::U16 } else { target };
            let exec = convert::integer(source, target, wide).ok_or("not for these types")?;
            self.run(exec, d, &[a], 0);
            if target == Type::S8 && register.bytes() == 2 {
                self.run(convert::narrow_result(), d, &[d], 0);
            }
            return Ok(());
        }
        let given = if target.bytes() == 8 { Width::Wide } else { Width::Narrow };
        let (exec, imm) = convert::general(source, target, flags).ok_or("not for these types")?;
        if (given == Width::Wide) == wide {
            self.run(exec, d, &[a], flags | imm);
            if register.bytes() == 2 && target.signed() {
                self.run(convert::narrow_result(), d, &[d], 0);
            }
            return Ok(());
        }
        if !wide {
            return Err("destination too narrow".to_owned());
        }
        let narrow = self.temporary(Width::Narrow);
        self.run(exec, narrow, &[a], flags | imm);
        let from = if target.signed() { Type::S32 } else { Type::U32 };
        let exec = convert::integer(from, Type::U64, true).ok_or("extension")?;
        self.run(exec, d, &[narrow], 0);
        Ok(())
    }

    /// The source may be a register wider than the type.
    fn cvt_source(&mut self, operand: &Operand, ty: Type) -> Refusable<Row> {
        if let Operand::Reg(register) = operand
            && Width::of(self.register_type(*register)?) == Some(Width::Wide)
            && ty.bytes() < 8
        {
            let row = self.source(operand, Type::B64)?;
            return self.resize(row, Width::Wide, Width::Narrow);
        }
        self.source(operand, ty)
    }

    pub(super) fn compare(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let operator = opcode.modifiers.first().map_or("", String::as_str);
        if half::Format::of(ty).is_some() && (opcode.name == "set" || ty.bytes() == 4) {
            return self.compare_halves(opcode, operands, operator, ty);
        }
        let test = convert::test(operator, ty, has(opcode, "ftz")).ok_or("not for this type")?;
        let (to, a, b, c) = match operands {
            [to, a, b] => (to, a, b, None),
            [to, a, b, c] => (to, a, b, Some(c)),
            _ => return Err("operands".to_owned()),
        };
        let mut inst = self.inst(Action::Compare(test));
        (inst.a, inst.b) = (self.source(a, ty)?, self.source(b, ty)?);
        if let Some(c) = c {
            let (row, negated) = self.predicate(c)?;
            inst.c = row;
            inst.imm |= match opcode.modifiers.get(1).map(String::as_str) {
                Some("and") => convert::AND,
                Some("or") => convert::OR,
                Some("xor") => convert::XOR,
                _ => return Err("combination".to_owned()),
            };
            inst.imm |= if negated { convert::NEGATE } else { 0 };
        }
        if opcode.name == "set" {
            let target = types(opcode).first().copied().unwrap_or(ty);
            inst.imm |= match target {
                Type::U32 | Type::S32 => convert::SET_ONES,
                Type::F32 => convert::SET_FLOAT,
                _ => return Err("not for this type".to_owned()),
            };
            inst.d = self.result(to, target)?;
        } else if let Operand::Pair(first, second) = to {
            inst.d = self.destination(first, Type::Pred)?;
            inst.e = self.destination(second, Type::Pred)?;
        } else {
            inst.d = self.destination(to, Type::Pred)?;
        }
        if inst.d == NO_ROW && inst.e == NO_ROW {
            return Ok(());
        }
        if inst.d == NO_ROW {
            inst.d = self.temporary(Width::Predicate);
        }
        self.push(inst);
        Ok(())
    }

    /// Comparisons of pairs, or those whose result is a number of 16 bits.
    fn compare_halves(&mut self, opcode: &Opcode, operands: &[Operand], operator: &str, ty: Type) -> Refusable<()> {
        let [to, a, b] = operands else { return Err("combination".to_owned()) };
        let (a, b) = (self.source(a, ty)?, self.source(b, ty)?);
        if opcode.name == "set" {
            let target = types(opcode).first().copied().unwrap_or(ty);
            let (exec, imm) = packed::set(operator, ty, !target.float()).ok_or("not for this type")?;
            // Of a single number, a whole word cannot be made here.
            if target.bytes() != ty.bytes() {
                return Err("not for these types".to_owned());
            }
            let d = self.result(to, target)?;
            self.run(exec, d, &[a, b], imm);
            return Ok(());
        }
        let Operand::Pair(low, high) = to else { return Err("one predicate".to_owned()) };
        let (exec, imm) = packed::set_predicates(operator, ty).ok_or("not for this type")?;
        let mut inst = self.inst(Action::Run(exec));
        inst.d = self.result(low, Type::Pred)?;
        inst.e = self.result(high, Type::Pred)?;
        (inst.a, inst.b, inst.imm) = (a, b, imm);
        self.push(inst);
        Ok(())
    }
}
