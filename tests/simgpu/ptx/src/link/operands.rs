//! The rows of an instruction's operands, and the instructions that load a value into them.

use super::compiler::{Compiler, Place};
use super::linker::Refusable;
use super::rows::Width;
use crate::ast::{NameRef, Operand, Type, VarSpace};
use crate::exec::machine::{Exec, NO_ROW, Row, exec};
use crate::exec::operations::int::predicate_logic;
use crate::exec::operations::{convert, special};
use crate::{LOCAL_WINDOW, PARAM_WINDOW};

impl Compiler<'_, '_> {
    /// The row of an operand that is written; [`NO_ROW`] for `_`.
    pub(super) fn destination(&self, operand: &Operand, ty: Type) -> Refusable<Row> {
        match operand {
            Operand::Sink => Ok(NO_ROW),
            Operand::Reg(register) => {
                let (is, row) = (self.register_type(*register)?, self.rows[*register as usize]);
                if Width::of(is) == Width::of(ty) && row != NO_ROW {
                    Ok(row)
                } else {
                    Err(format!("destination of type {is:?} instead of {ty:?}"))
                }
            }
            _ => Err("destination that is no register".to_owned()),
        }
    }

    /// The row of an operand that must be written.
    pub(super) fn result(&mut self, operand: &Operand, ty: Type) -> Refusable<Row> {
        let row = self.destination(operand, ty)?;
        if row != NO_ROW {
            return Ok(row);
        }
        let width = Width::of(ty).ok_or("result of 128 bits")?;
        Ok(self.temporary(width))
    }

    /// The bits of an immediate operand of the type.
    fn immediate(operand: &Operand, ty: Type) -> Option<u64> {
        let bits = match *operand {
            Operand::Int(value) if ty == Type::F32 => u64::from((value as f32).to_bits()),
            Operand::Int(value) if ty == Type::F64 => (value as f64).to_bits(),
            Operand::Int(value) => value.cast_unsigned(),
            Operand::F32(bits) if ty.bytes() == 8 => f64::from(f32::from_bits(bits)).to_bits(),
            Operand::F32(bits) => u64::from(bits),
            Operand::F64(bits) if ty.bytes() == 4 => u64::from((f64::from_bits(bits) as f32).to_bits()),
            Operand::F64(bits) => bits,
            _ => return None,
        };
        Some(match ty.bytes() {
            1 => bits & 0xff,
            2 => bits & 0xffff,
            4 => bits & 0xffff_ffff,
            _ => bits,
        })
    }

    /// The row of an operand that is read.
    pub(super) fn source(&mut self, operand: &Operand, ty: Type) -> Refusable<Row> {
        let width = Width::of(ty).ok_or("operand of 128 bits")?;
        if ty == Type::Pred {
            return self.predicate(operand).map(|(row, _)| row);
        }
        if let Some(bits) = Self::immediate(operand, ty) {
            return Ok(self.constant(width, bits));
        }
        match operand {
            Operand::Reg(register) => {
                let (is, row) = (self.register_type(*register)?, self.rows[*register as usize]);
                if row == NO_ROW {
                    return Err("register of 128 bits".to_owned());
                }
                if Width::of(is) == Some(width) {
                    return Ok(row);
                }
                Err(format!("operand of type {is:?} instead of {ty:?}"))
            }
            Operand::Special(name) => self.special(name, width),
            Operand::Var(..) | Operand::Name(..) => self.address_value(operand, width),
            _ => Err("operand of an unknown kind".to_owned()),
        }
    }

    /// The row of a predicate operand, and whether it is negated. Constants may be given.
    pub(super) fn predicate(&mut self, operand: &Operand) -> Refusable<(Row, bool)> {
        match operand {
            Operand::Not(inner) => {
                let (row, negated) = self.predicate_plain(inner)?;
                Ok((row, !negated))
            }
            plain => self.predicate_plain(plain),
        }
    }

    fn predicate_plain(&mut self, operand: &Operand) -> Refusable<(Row, bool)> {
        match operand {
            Operand::Int(value) => {
                let bits = if *value == 0 { 0 } else { u64::from(u32::MAX) };
                Ok((self.constant(Width::Predicate, bits), false))
            }
            Operand::Reg(register) if self.register_type(*register)? == Type::Pred => {
                Ok((self.rows[*register as usize], false))
            }
            _ => Err("operand that is no predicate".to_owned()),
        }
    }

    /// The row of a predicate operand; an extra instruction negates it if necessary.
    pub(super) fn predicate_row(&mut self, operand: &Operand) -> Refusable<Row> {
        let (row, negated) = self.predicate(operand)?;
        if !negated {
            return Ok(row);
        }
        let inverse = self.temporary(Width::Predicate);
        let not = predicate_logic("not").ok_or("not")?;
        self.run(not, inverse, &[row], 0);
        Ok(inverse)
    }

    fn special(&mut self, name: &str, width: Width) -> Refusable<Row> {
        if let Some((exec, wide)) = special::clock(name) {
            let given = if wide { Width::Wide } else { Width::Narrow };
            let row = self.temporary(given);
            self.run(exec, row, &[], 0);
            return self.resize(row, given, width);
        }
        let row = special::row(name).ok_or_else(|| format!("special register {name}"))?;
        self.resize(row, Width::Narrow, width)
    }

    /// A row with the same unsigned numbers, of another width.
    pub(super) fn resize(&mut self, row: Row, from: Width, to: Width) -> Refusable<Row> {
        let (source, target) = match (from, to) {
            _ if from == to => return Ok(row),
            (Width::Narrow, Width::Wide) => (Type::U32, Type::U64),
            (Width::Wide, Width::Narrow) => (Type::U64, Type::U32),
            _ => return Err("predicate among numbers".to_owned()),
        };
        let exec = convert::integer(source, target, to == Width::Wide).ok_or("resize")?;
        let resized = self.temporary(to);
        self.run(exec, resized, &[row], 0);
        Ok(resized)
    }

    /// The address of a variable or symbol, as `mov` gives it: within its own space for shared and
    /// local variables, generic for others.
    pub(super) fn address_value(&mut self, operand: &Operand, width: Width) -> Refusable<Row> {
        let plus = |at: u32, addend: i64| u64::from(at).wrapping_add_signed(addend);
        match *operand {
            Operand::Var(var, addend) => match self.place(var)? {
                Place::Stack(at) => {
                    // Parameters have generic addresses, so that functions can hand them on.
                    let is_param = self.body.vars[var as usize].space == VarSpace::Param;
                    let window = if is_param { LOCAL_WINDOW } else { 0 };
                    let exec: Exec = |w, i| {
                        let at = w.local.frame.wrapping_add(i.imm);
                        w.map0(i, || at)
                    };
                    let row = self.temporary(Width::Wide);
                    self.run(exec, row, &[], window.wrapping_add(plus(at, addend)));
                    self.resize(row, Width::Wide, width)
                }
                Place::Param(at) => Ok(self.constant(width, PARAM_WINDOW + plus(at, addend))),
                Place::Shared(at) => Ok(self.constant(width, plus(at, addend))),
                Place::Dynamic => self.dynamic_shared(addend, width),
                Place::Nowhere => Err("variable too large".to_owned()),
            },
            Operand::Name(name, addend) => {
                let NameRef::Symbol(symbol) = self.name(name)? else {
                    return Err("label as a value".to_owned());
                };
                self.symbol_value(symbol, addend, width)
            }
            _ => Err("address of something else".to_owned()),
        }
    }

    fn symbol_value(&mut self, symbol: &str, addend: i64, width: Width) -> Refusable<Row> {
        let (ast, survey) = (self.linker.ast, self.linker.survey);
        if let Some(&at) = survey.shared[self.index].symbols.get(symbol) {
            return Ok(self.constant(width, u64::from(at).wrapping_add_signed(addend)));
        }
        if ast.shared.iter().any(|v| v.name == symbol && v.unsized_) {
            return self.dynamic_shared(addend, width);
        }
        match self.linker.addresses.get(symbol) {
            Some(&address) => Ok(self.constant(width, address.wrapping_add_signed(addend))),
            None => Err(format!("unknown symbol {symbol}")),
        }
    }

    fn dynamic_shared(&mut self, addend: i64, width: Width) -> Refusable<Row> {
        let row = special::row(special::DYNAMIC_BASE).ok_or("dynamic shared memory")?;
        let row = if addend == 0 {
            row
        } else {
            let sum = self.temporary(Width::Narrow);
            let by = self.constant(Width::Narrow, addend.cast_unsigned());
            self.run(exec!(u32; |a: u32, b: u32| a.wrapping_add(b)), sum, &[row, by], 0);
            sum
        };
        self.resize(row, Width::Narrow, width)
    }
}
