//! Loads, stores and atomic instructions.

use super::compiler::{Compiler, Place};
use super::linker::Refusable;
use super::modifiers::{has, last_type};
use super::rows::Width;
use crate::PARAM_WINDOW;
use crate::ast::{Opcode, Operand, Type};
use crate::exec::machine::{Access, Action, NO_ROW, Row};
use crate::exec::operations::access::{self, How};
use crate::exec::operations::atomic;

/// The target of an access.
struct Target {
    how: How,
    row: Row,
    offset: u64,
    /// Whether the target is just an offset in the kernel's parameters.
    param: bool,
}

fn space_of(opcode: &Opcode) -> &str {
    opcode
        .modifiers
        .iter()
        .map(|m| m.split("::").next().unwrap_or(m))
        .find(|m| matches!(*m, "global" | "shared" | "local" | "param" | "const"))
        .unwrap_or("")
}

impl Compiler<'_, '_> {
    fn target(&mut self, opcode: &Opcode, operand: &Operand, count: u32) -> Refusable<Target> {
        let Operand::Memory(base, offset) = operand else { return Err("address".to_owned()) };
        let space = space_of(opcode);
        let modifier = |name: &str| has(opcode, name);
        let elsewhere = matches!(space, "" | "global");
        let mut how = How {
            access: match space {
                "shared" => Access::Shared,
                "local" => Access::Local,
                _ => Access::Generic,
            },
            wide: true,
            frame: false,
            poll: elsewhere && (modifier("volatile") || modifier("acquire") || modifier("relaxed")),
            fence: modifier("acquire") || modifier("release") || modifier("acq_rel"),
            count,
        };
        let target = |how, row, offset: u64, param| Ok(Target { how, row, offset, param });
        let offset = offset.cast_unsigned();
        match base.as_ref() {
            Operand::Var(var, _) => match self.place(*var)? {
                Place::Param(at) if space == "param" => target(how, NO_ROW, u64::from(at).wrapping_add(offset), true),
                Place::Param(at) => {
                    let row = self.constant(Width::Wide, PARAM_WINDOW + u64::from(at));
                    target(how, row, offset, false)
                }
                Place::Stack(at) if matches!(space, "param" | "local") => {
                    (how.access, how.frame) = (Access::Local, true);
                    target(how, NO_ROW, u64::from(at).wrapping_add(offset), false)
                }
                Place::Shared(at) if space == "shared" => {
                    let row = self.constant(Width::Wide, u64::from(at));
                    target(how, row, offset, false)
                }
                Place::Dynamic if space == "shared" => {
                    how.wide = false;
                    let row = self.address_value(base, Width::Narrow)?;
                    target(how, row, offset, false)
                }
                _ => Err("variable in another space".to_owned()),
            },
            Operand::Name(..) => {
                let row = self.address_value(base, Width::Wide)?;
                target(how, row, offset, false)
            }
            Operand::Int(address) => {
                let row = self.constant(Width::Wide, address.cast_unsigned());
                target(how, row, offset, false)
            }
            Operand::Reg(register) => {
                let ty = self.register_type(*register)?;
                how.wide = ty.bytes() == 8;
                let row = self.source(base, if how.wide { Type::B64 } else { Type::B32 })?;
                target(how, row, offset, false)
            }
            _ => Err("address".to_owned()),
        }
    }

    fn vector<'o>(opcode: &Opcode, operand: &'o Operand) -> Refusable<&'o [Operand]> {
        let lanes = opcode.modifiers.iter().find_map(|m| match m.as_str() {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        });
        match (operand, lanes) {
            (Operand::Vector(parts), Some(lanes)) if parts.len() == lanes => Ok(parts),
            // ptxas takes braces around one register for nothing.
            (Operand::Vector(parts), None) if parts.len() == 1 => Ok(parts),
            (Operand::Vector(_), _) | (_, Some(_)) => Err("vector of another length".to_owned()),
            (single, None) => Ok(std::slice::from_ref(single)),
        }
    }

    pub(super) fn load(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let [to, from, ..] = operands else { return Err("operands".to_owned()) };
        let parts = Self::vector(opcode, to)?;
        if has(opcode, "async") || has(opcode, "bulk") {
            return Err("asynchronous".to_owned());
        }
        let count = parts.len() as u32;
        let target = self.target(opcode, from, count)?;
        let register = parts.iter().find_map(|part| match part {
            Operand::Reg(register) => Some(self.register_type(*register)),
            _ => None,
        });
        let register = register.transpose()?.unwrap_or(ty);
        let mut rows = Vec::with_capacity(parts.len());
        for part in parts {
            rows.push(self.destination(part, register)?);
        }
        let exec = if target.param {
            access::select_param(ty, register.bytes())
        } else {
            access::select_load(ty, register.bytes())
        };
        let mut inst = self.inst(Action::Run(exec.ok_or("not for this type")?));
        inst.d = if count == 1 {
            if rows[0] == NO_ROW { self.result(&parts[0], register)? } else { rows[0] }
        } else {
            self.list(&rows)
        };
        (inst.a, inst.e, inst.imm) = (target.row, target.how.pack(), target.offset);
        self.push(inst);
        Ok(())
    }

    pub(super) fn store(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let [to, from, ..] = operands else { return Err("operands".to_owned()) };
        if has(opcode, "async") || has(opcode, "bulk") {
            return Err("asynchronous".to_owned());
        }
        let parts = Self::vector(opcode, from)?;
        let count = parts.len() as u32;
        let target = self.target(opcode, to, count)?;
        if target.param {
            return Err("kernel parameters cannot be written".to_owned());
        }
        let mut wide = ty.bytes() == 8;
        for part in parts {
            if let Operand::Reg(register) = part {
                wide = self.register_type(*register)?.bytes() == 8;
            }
        }
        let as_type = match (wide, ty.bytes()) {
            (true, 8) | (false, _) => ty,
            (true, _) => Type::B64,
        };
        let mut rows = Vec::with_capacity(parts.len());
        for part in parts {
            rows.push(self.source(part, as_type)?);
        }
        let exec = access::select_store(ty, wide).ok_or("not for this type")?;
        let mut inst = self.inst(Action::Run(exec));
        inst.d = if count == 1 { rows[0] } else { self.list(&rows) };
        (inst.a, inst.e, inst.imm) = (target.row, target.how.pack(), target.offset);
        self.push(inst);
        Ok(())
    }

    pub(super) fn list(&mut self, rows: &[Row]) -> u32 {
        let at = self.linker.lists.len() as u32;
        self.linker.lists.extend_from_slice(rows);
        at
    }

    pub(super) fn atomic(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        const OPERATIONS: &[&str] = &["add", "and", "or", "xor", "exch", "cas", "inc", "dec", "min", "max"];
        let ty = last_type(opcode)?;
        let operation = opcode.modifiers.iter().find(|m| OPERATIONS.contains(&m.as_str()));
        let operation = operation.ok_or("operation")?;
        if opcode.modifiers.iter().any(|m| matches!(m.as_str(), "async" | "v2" | "v4" | "v8")) {
            return Err("asynchronous or of vectors".to_owned());
        }
        let exec = atomic::select(operation, ty).ok_or("not for this type")?;
        let (d, place, values) = match operands {
            [to, place, values @ ..] if opcode.name == "atom" => (self.destination(to, ty)?, place, values),
            [place, values @ ..] => (NO_ROW, place, values),
            _ => return Err("operands".to_owned()),
        };
        let mut target = self.target(opcode, place, 1)?;
        if target.param {
            return Err("kernel parameters cannot be written".to_owned());
        }
        // Locks are made of these instructions.
        target.how.poll = target.how.access != Access::Local && matches!(operation.as_str(), "cas" | "exch");
        let mut inst = self.inst(Action::Run(exec));
        inst.d = d;
        (inst.b, inst.c) = match values {
            [b] if operation != "cas" => (self.source(b, ty)?, NO_ROW),
            [b, c] if operation == "cas" => (self.source(b, ty)?, self.source(c, ty)?),
            _ => return Err("operands".to_owned()),
        };
        if inst.c == NO_ROW {
            inst.c = inst.b;
        }
        (inst.a, inst.e, inst.imm) = (target.row, target.how.pack(), target.offset);
        self.push(inst);
        Ok(())
    }
}
