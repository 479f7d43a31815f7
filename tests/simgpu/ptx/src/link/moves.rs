//! `mov`, `cvta`, `isspacep`: values and addresses.

use super::compiler::Compiler;
use super::linker::Refusable;
use super::modifiers::last_type;
use super::rows::Width;
use crate::ast::{Opcode, Operand, Type};
use crate::exec::machine::{Exec, Flow, Inst, Row, exec};
use crate::exec::operations::int::{self, predicate_logic};
use crate::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};

impl Compiler<'_, '_> {
    pub(super) fn mov(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let [to, from] = operands else { return Err("operands".to_owned()) };
        match (to, from) {
            _ if ty == Type::Pred => {
                let exec = predicate_logic("mov").ok_or("mov")?;
                let row = self.predicate_row(from)?;
                let d = self.destination(to, ty)?;
                self.run(exec, d, &[row], 0);
                Ok(())
            }
            (Operand::Vector(parts), from) => self.unpack(parts, from, ty),
            (to, Operand::Vector(parts)) => self.pack(to, parts, ty),
            _ => {
                let a = self.source(from, ty)?;
                let d = self.result(to, ty)?;
                let width = Width::of(ty).ok_or("128 bits")?;
                self.run(int::copy(width == Width::Wide), d, &[a], 0);
                Ok(())
            }
        }
    }

    fn unpack(&mut self, parts: &[Operand], from: &Operand, ty: Type) -> Refusable<()> {
        let a = self.source(from, ty)?;
        let bits = ty.bytes() * 8 / (parts.len() as u32).max(1);
        let exec: Exec = match (ty.bytes(), bits) {
            (8, 32) => |w, i| w.map1(i, |a: u64| (a >> i.imm) as u32),
            (8, 16) => |w, i| w.map1(i, |a: u64| (a >> i.imm) as u16),
            (8, 8) => |w, i| w.map1(i, |a: u64| (a >> i.imm) as u8),
            (4, 16) => |w, i| w.map1(i, |a: u32| (a >> i.imm) as u16),
            (4, 8) => |w, i| w.map1(i, |a: u32| (a >> i.imm) as u8),
            (2, 8) => |w, i| w.map1(i, |a: u16| (a >> i.imm) as u8),
            _ => return Err("vector of this shape".to_owned()),
        };
        // The source may be among the parts, so all are taken apart before any is written.
        let part = if bits == 32 { Type::B32 } else { Type::B16 };
        let mut pending = Vec::new();
        for (index, operand) in parts.iter().enumerate() {
            if *operand == Operand::Sink {
                continue;
            }
            let d = self.destination(operand, part)?;
            let row = if d == a { self.temporary(Width::Narrow) } else { d };
            self.run(exec, row, &[a], u64::from(bits) * index as u64);
            if row != d {
                pending.push((d, row));
            }
        }
        for (d, row) in pending {
            self.run(int::copy(false), d, &[row], 0);
        }
        Ok(())
    }

    fn pack(&mut self, to: &Operand, parts: &[Operand], ty: Type) -> Refusable<()> {
        let d = self.result(to, ty)?;
        let bits = ty.bytes() * 8 / (parts.len() as u32).max(1);
        let part = match bits {
            32 => Type::B32,
            16 => Type::B16,
            8 => Type::B8,
            _ => return Err("vector of this shape".to_owned()),
        };
        let rows = parts.iter().map(|p| self.source(p, part)).collect::<Refusable<Vec<Row>>>()?;
        match (ty.bytes(), rows.as_slice()) {
            (8, &[low, high]) => {
                let join = exec!(u64; |a: u32, b: u32| u64::from(b) << 32 | u64::from(a));
                self.run(join, d, &[low, high], 0);
            }
            (8, &[a, b, c, e]) => {
                let join = exec!(u32; |a: u16, b: u16| u32::from(b) << 16 | u32::from(a));
                let (low, high) = (self.temporary(Width::Narrow), self.temporary(Width::Narrow));
                self.run(join, low, &[a, b], 0);
                self.run(join, high, &[c, e], 0);
                let join = exec!(u64; |a: u32, b: u32| u64::from(b) << 32 | u64::from(a));
                self.run(join, d, &[low, high], 0);
            }
            (4, &[low, high]) => {
                let join = exec!(u32; |a: u16, b: u16| u32::from(b) << 16 | u32::from(a));
                self.run(join, d, &[low, high], 0);
            }
            (4, &[a, b, c, e]) => {
                let join = exec!(u32; |a: u8, b: u8, c: u8, e: u8| u32::from_le_bytes([a, b, c, e]));
                self.run(join, d, &[a, b, c, e], 0);
            }
            (2, &[low, high]) => {
                let join = exec!(u16; |a: u8, b: u8| u16::from_le_bytes([a, b]));
                self.run(join, d, &[low, high], 0);
            }
            _ => return Err("vector of this shape".to_owned()),
        }
        Ok(())
    }

    /// `cvta.space` and `cvta.to.space`.
    pub(super) fn cvta(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let [to, from] = operands else { return Err("operands".to_owned()) };
        if ty.bytes() != 8 {
            return Err("addresses of 32 bits".to_owned());
        }
        let back = opcode.modifiers.iter().any(|m| m == "to");
        let space = |name: &str| opcode.modifiers.iter().any(|m| m.split("::").next() == Some(name));
        let window = if space("shared") {
            SHARED_WINDOW
        } else if space("local") {
            LOCAL_WINDOW
        } else {
            // Global, constant and parameter addresses are generic already.
            0
        };
        let a = self.source(from, ty)?;
        let d = self.result(to, ty)?;
        let by = if back { window.wrapping_neg() } else { window };
        let exec: Exec = if by == 0 { int::copy(true) } else { |w, i| w.map1(i, |a: u64| a.wrapping_add(i.imm)) };
        self.run(exec, d, &[a], by);
        Ok(())
    }

    pub(super) fn isspacep(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, from] = operands else { return Err("operands".to_owned()) };
        let space = opcode.modifiers.first().map_or("", String::as_str);
        let range = match space.split("::").next() {
            Some("shared") => (SHARED_WINDOW, LOCAL_WINDOW),
            Some("local") => (LOCAL_WINDOW, PARAM_WINDOW),
            Some("param") => (PARAM_WINDOW, crate::GRID_WINDOW),
            Some("global") => (0, SHARED_WINDOW),
            // Constants lie in global memory here; the instruction asks whether `ld.const` works.
            Some("const") => (0, 0),
            _ => return Err("space".to_owned()),
        };
        let a = self.source(from, Type::U64)?;
        let d = self.destination(to, Type::Pred)?;
        let low = self.constant(Width::Wide, range.0);
        let high = self.constant(Width::Wide, range.1);
        let exec: Exec = |w, i| {
            let from = w.test2(i, |a: u64, low: u64| a >= low);
            let below = w.test2(&Inst { b: i.c, ..*i }, |a: u64, high: u64| a < high);
            w.set_predicate(i.d, from & below);
            Flow::Next
        };
        self.run(exec, d, &[a, low, high], 0);
        Ok(())
    }
}
