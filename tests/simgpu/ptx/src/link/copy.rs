//! Asynchronous copies and barriers in memory.

use super::compiler::Compiler;
use super::linker::Refusable;
use super::modifiers::{has, last_type};
use super::rows::Width;
use crate::ast::{Opcode, Operand, Type};
use crate::exec::machine::{Action, Exec, NO_ROW, Row};
use crate::exec::operations::{copy, int};
use crate::{LOCAL_WINDOW, SHARED_WINDOW};

impl Compiler<'_, '_> {
    /// A row with the generic address of an operand in brackets.
    fn generic_address(&mut self, operand: &Operand, space: &str) -> Refusable<Row> {
        let Operand::Memory(base, offset) = operand else { return Err("address".to_owned()) };
        let row = match base.as_ref() {
            Operand::Reg(register) if self.register_type(*register)?.bytes() == 4 => {
                let row = self.source(base, Type::B32)?;
                self.resize(row, Width::Narrow, Width::Wide)?
            }
            base => self.source(base, Type::B64)?,
        };
        let window = match space {
            "shared" => SHARED_WINDOW,
            "local" => LOCAL_WINDOW,
            _ => 0,
        };
        let by = window.wrapping_add_signed(*offset);
        if by == 0 {
            return Ok(row);
        }
        let address = self.temporary(Width::Wide);
        let add: Exec = |w, i| w.map1(i, |a: u64| a.wrapping_add(i.imm));
        self.run(add, address, &[row], by);
        Ok(address)
    }

    /// The spaces that an opcode names, without the parts behind their colons.
    fn spaces(opcode: &Opcode) -> Vec<&str> {
        let plain = opcode.modifiers.iter().map(|m| m.split("::").next().unwrap_or(m));
        plain.filter(|m| matches!(*m, "shared" | "global" | "local")).collect()
    }

    pub(super) fn mbarrier(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let operation = opcode.modifiers.first().map_or("", String::as_str);
        let space = Self::spaces(opcode).first().copied().unwrap_or("").to_owned();
        match operation {
            "pending_count" => {
                let [to, state] = operands else { return Err("operands".to_owned()) };
                let a = self.source(state, Type::B64)?;
                let d = self.result(to, Type::B32)?;
                self.run(copy::pending(), d, &[a], 0);
                Ok(())
            }
            "test_wait" | "try_wait" => {
                let [to, place, phase, ..] = operands else { return Err("operands".to_owned()) };
                let parity = has(opcode, "parity");
                let a = self.generic_address(place, &space)?;
                let b = self.source(phase, if parity { Type::B32 } else { Type::B64 })?;
                let d = self.result(to, Type::Pred)?;
                self.run(copy::test(parity), d, &[a, b], 0);
                Ok(())
            }
            "init" | "inval" | "expect_tx" | "complete_tx" => {
                let [place, rest @ ..] = operands else { return Err("operands".to_owned()) };
                let exec = copy::barrier(operation).ok_or("operation")?;
                let a = self.generic_address(place, &space)?;
                let number = rest.first().map(|n| self.source(n, Type::U32)).transpose()?;
                let number = number.unwrap_or(NO_ROW);
                let bytes = operation.ends_with("_tx");
                let rows = if bytes { [a, NO_ROW, number] } else { [a, number, NO_ROW] };
                self.run(exec, NO_ROW, &rows, 0);
                Ok(())
            }
            "arrive" | "arrive_drop" => self.arrive(opcode, operation, operands, &space),
            _ => Err("operation".to_owned()),
        }
    }

    fn arrive(&mut self, opcode: &Opcode, operation: &str, operands: &[Operand], space: &str) -> Refusable<()> {
        let (to, rest) = match operands {
            [Operand::Memory(..), ..] => (&Operand::Sink, operands),
            [to, rest @ ..] => (to, rest),
            [] => return Err("operands".to_owned()),
        };
        let [place, rest @ ..] = rest else { return Err("operands".to_owned()) };
        let bytes = has(opcode, "expect_tx");
        let name = if bytes { format!("{operation}.expect_tx") } else { operation.to_owned() };
        let exec = copy::barrier(&name).ok_or("operation")?;
        let a = self.generic_address(place, space)?;
        let number = rest.first().map(|n| self.source(n, Type::U32)).transpose()?;
        let number = number.unwrap_or(NO_ROW);
        let d = self.destination(to, Type::B64)?;
        let rows = if bytes { [a, NO_ROW, number] } else { [a, number, NO_ROW] };
        self.run(exec, d, &rows, 0);
        Ok(())
    }

    /// `cp.async` and related instructions. Every copy is complete at once, so waiting does nothing.
    pub(super) fn cp(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let is = |name: &str| has(opcode, name);
        if is("tensor") || is("reduce") {
            return Err("of tensors".to_owned());
        }
        if is("commit_group") || is("wait_group") || is("wait_all") || is("prefetch") {
            return Ok(());
        }
        let spaces = Self::spaces(opcode);
        if is("mbarrier") {
            // Without `.noinc` the arrival is counted as one more before it is made.
            if !is("noinc") {
                return Ok(());
            }
            let [place] = operands else { return Err("operands".to_owned()) };
            let a = self.generic_address(place, spaces.first().copied().unwrap_or(""))?;
            self.run(copy::barrier("arrive").ok_or("arrive")?, NO_ROW, &[a], 0);
            return Ok(());
        }
        let (&[to_space, from_space], [to, from, bytes, rest @ ..]) = (spaces.as_slice(), operands) else {
            return Err("operands".to_owned());
        };
        let a = self.generic_address(to, to_space)?;
        let b = self.generic_address(from, from_space)?;
        let c = self.source(bytes, Type::U32)?;
        if is("bulk") {
            let told = match rest.first() {
                Some(place @ Operand::Memory(..)) => self.generic_address(place, "shared")?,
                _ => NO_ROW,
            };
            self.run(copy::bulk(), NO_ROW, &[a, b, c, told], 0);
            return Ok(());
        }
        let taken = match rest.first() {
            None => c,
            Some(Operand::Reg(register)) if self.register_type(*register)? == Type::Pred => {
                return Err("ignored source".to_owned());
            }
            // A cache policy has 64 bits.
            Some(Operand::Reg(register)) if self.register_type(*register)?.bytes() == 8 => c,
            Some(taken) => self.source(taken, Type::U32)?,
        };
        self.run(copy::small(), NO_ROW, &[a, b, c, taken], 0);
        Ok(())
    }

    /// `createpolicy`: a hint for caches, which changes no result.
    pub(super) fn policy(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, ..] = operands else { return Err("operands".to_owned()) };
        let ty = last_type(opcode).unwrap_or(Type::B64);
        let d = self.result(to, ty)?;
        let zero = self.constant(Width::Wide, 0);
        let mut inst = self.inst(Action::Run(int::copy(true)));
        (inst.d, inst.a) = (d, zero);
        if ty.bytes() != 8 {
            return Err("policy".to_owned());
        }
        self.push(inst);
        Ok(())
    }
}
