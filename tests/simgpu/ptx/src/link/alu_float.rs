//! Floating point arithmetic.

use super::compiler::Compiler;
use super::linker::Refusable;
use super::modifiers::has;
use super::rows::Width;
use crate::ast::{Opcode, Operand, Type};
use crate::exec::machine::Exec;
use crate::exec::operations::float;
use crate::exec::operations::half::{self, Format};
use crate::exec::operations::round::Rounding;

/// The rounding mode and flags that an opcode's modifiers ask for.
pub(super) fn flags(opcode: &Opcode) -> u64 {
    let mut flags = 0;
    for modifier in &opcode.modifiers {
        flags |= match modifier.as_str() {
            "ftz" => float::FTZ,
            "sat" => float::SATURATE,
            "relu" => half::RELU,
            name => Rounding::named(name).map_or(0, |mode| mode as u64),
        };
    }
    flags
}

impl Compiler<'_, '_> {
    pub(super) fn float_alu(&mut self, opcode: &Opcode, operands: &[Operand], ty: Type) -> Refusable<()> {
        let [to, from @ ..] = operands else { return Err("operands".to_owned()) };
        let name = match opcode.name.as_str() {
            "min" if has(opcode, "NaN") => "min.nan",
            "max" if has(opcode, "NaN") => "max.nan",
            name => name,
        };
        if has(opcode, "xorsign") {
            return Err("xorsign".to_owned());
        }
        let flags = flags(opcode);
        let (exec, imm, count) = if Format::of(ty).is_some() {
            half_form(name, ty, flags)?
        } else {
            let (exec, count) = wide_form(name, ty, flags)?;
            (exec, flags, count)
        };
        if from.len() != count {
            return Err(format!("{} sources", from.len()));
        }
        let mut rows = Vec::with_capacity(3);
        for operand in from {
            rows.push(self.source(operand, ty)?);
        }
        if Format::of(ty).is_some() {
            rows.resize(3, self.constant(Width::Narrow, 0));
        }
        let d = self.result(to, ty)?;
        self.run(exec, d, &rows, imm);
        Ok(())
    }
}

fn wide_form(name: &str, ty: Type, flags: u64) -> Refusable<(Exec, usize)> {
    let found = match name {
        "fma" | "mad" => float::fused_multiply_add(ty, flags).map(|exec| (exec, 3)),
        _ => float::binary(name, ty, flags)
            .map(|exec| (exec, 2))
            .or_else(|| float::unary(name, ty, flags).map(|exec| (exec, 1))),
    };
    found.ok_or_else(|| "not for this type".to_owned())
}

fn half_form(name: &str, ty: Type, flags: u64) -> Refusable<(Exec, u64, usize)> {
    if let Some(exec) = half::sign(name, ty) {
        return Ok((exec, flags, 1));
    }
    let (exec, imm) = half::select(name, ty).ok_or("not for this type")?;
    let count = match name {
        "fma" => 3,
        "ex2" | "tanh" => 1,
        _ => 2,
    };
    Ok((exec, flags | imm, count))
}
