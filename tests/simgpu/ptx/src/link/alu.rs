//! Integer arithmetic, bits, selections.

use super::compiler::Compiler;
use super::linker::Refusable;
use super::modifiers::{has, last_type, types};
use super::rows::Width;
use crate::ast::{Opcode, Operand, Type};
use crate::exec::machine::Exec;
use crate::exec::operations::{bits, carry, convert, float, int, packed};

/// The form of an instruction: the types of destination and sources.
struct Form {
    exec: Exec,
    d: Type,
    sources: Vec<Type>,
    imm: u64,
}

impl Form {
    fn of(exec: Option<Exec>, d: Type, sources: &[Type]) -> Refusable<Form> {
        let exec = exec.ok_or_else(|| "not for this type".to_owned())?;
        Ok(Form { exec, d, sources: sources.to_vec(), imm: 0 })
    }
}

fn doubled(ty: Type) -> Type {
    match ty {
        Type::U16 => Type::U32,
        Type::S16 => Type::S32,
        Type::U32 => Type::U64,
        _ => Type::S64,
    }
}

impl Compiler<'_, '_> {
    /// Any instruction that maps sources to one destination.
    pub(super) fn alu(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let name = opcode.name.as_str();
        match name {
            "selp" => return self.selp(opcode, operands),
            "slct" => return self.slct(opcode, operands),
            "testp" => return self.testp(opcode, operands),
            "and" | "or" | "xor" | "not" if last_type(opcode)? == Type::Pred => {
                return self.predicate_alu(name, operands);
            }
            "addc" | "subc" | "madc" => return self.carry(opcode, operands),
            "add" | "sub" | "mad" if has(opcode, "cc") => return self.carry(opcode, operands),
            "lop3" => return self.lop3(opcode, operands),
            _ if has(opcode, "u16x2") || has(opcode, "s16x2") => {
                return self.packed(opcode, operands);
            }
            _ => {}
        }
        let ty = last_type(opcode)?;
        if ty.float() || (name == "copysign") {
            return self.float_alu(opcode, operands, ty);
        }
        let form = self.form(opcode, ty)?;
        let [to, from @ ..] = operands else { return Err("operands".to_owned()) };
        if from.len() != form.sources.len() {
            return Err(format!("{} sources", from.len()));
        }
        let mut rows = Vec::with_capacity(from.len());
        for (operand, &ty) in from.iter().zip(&form.sources) {
            rows.push(self.source(operand, ty)?);
        }
        let d = self.result(to, form.d)?;
        self.run(form.exec, d, &rows, form.imm);
        Ok(())
    }

    fn form(&self, opcode: &Opcode, ty: Type) -> Refusable<Form> {
        use Type::{B32, S32, U32};
        let name = opcode.name.as_str();
        let part = |names: &[&'static str]| names.iter().copied().find(|part| has(opcode, part));
        let which = || part(&["lo", "hi", "wide"]).unwrap_or("lo");
        let same = |exec, count| Form::of(exec, ty, &vec![ty; count]);
        match name {
            "add" | "sub" if has(opcode, "sat") => same(int::binary(&format!("{name}.sat"), ty), 2),
            "mul" if which() == "wide" => Form::of(int::mul_wide(ty), doubled(ty), &[ty, ty]),
            "mad" if which() == "wide" => Form::of(int::mad_wide(ty), doubled(ty), &[ty, ty, doubled(ty)]),
            "mul" | "mul24" => same(int::binary(&format!("{name}.{}", which()), ty), 2),
            "mad" if has(opcode, "sat") => same(int::ternary("mad.hi.sat", ty), 3),
            "mad" | "mad24" => same(int::ternary(&format!("{name}.{}", which()), ty), 3),
            "min" | "max" if has(opcode, "relu") => same(int::binary(&format!("{name}.relu"), ty), 2),
            "add" | "sub" | "and" | "or" | "xor" | "min" | "max" | "div" | "rem" => same(int::binary(name, ty), 2),
            "sad" => same(int::ternary(name, ty), 3),
            "not" | "cnot" | "neg" | "abs" | "brev" => same(int::unary(name, ty), 1),
            "popc" | "clz" => Form::of(bits::count(name, ty), U32, &[ty]),
            "bfind" if has(opcode, "shiftamt") => Form::of(bits::count("bfind.shiftamt", ty), U32, &[ty]),
            "bfind" => Form::of(bits::count(name, ty), U32, &[ty]),
            "shl" | "shr" => Form::of(bits::shift(name, ty), ty, &[ty, U32]),
            "shf" => {
                let exec = bits::funnel(has(opcode, "l"), has(opcode, "clamp"));
                Form::of(Some(exec), B32, &[B32, B32, U32])
            }
            "bfe" => Form::of(bits::extract(ty), ty, &[ty, U32, U32]),
            "bfi" => Form::of(bits::insert(ty), ty, &[ty, ty, U32, U32]),
            "prmt" => {
                let mode = opcode.modifiers.iter().find(|m| *m != "b32").map(String::as_str);
                Form::of(bits::permute(mode), B32, &[B32, B32, B32])
            }
            "bmsk" => {
                let mode = part(&["clamp", "wrap"]).unwrap_or("clamp");
                Form::of(int::binary(&format!("bmsk.{mode}"), ty), B32, &[B32, B32])
            }
            "szext" => {
                let exec = bits::szext(!has(opcode, "wrap"), ty.signed());
                Form::of(Some(exec), ty, &[ty, U32])
            }
            "fns" => Form::of(Some(bits::find_nth()), B32, &[B32, B32, S32]),
            "dp4a" | "dp2a" => {
                let [a, b] = types(opcode)[..] else { return Err("types".to_owned()) };
                let exec = int::dot(name == "dp4a", has(opcode, "hi"), a.signed(), b.signed());
                Form::of(Some(exec), B32, &[B32, B32, B32])
            }
            "vabsdiff4" if !has(opcode, "sat") => {
                let signed = types(opcode).last().is_some_and(|ty| ty.signed());
                Form::of(Some(packed::differences(signed, has(opcode, "add"))), B32, &[B32, B32, B32])
            }
            _ => Err("unknown instruction".to_owned()),
        }
    }

    fn packed(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [to, a, b] = operands else { return Err("operands".to_owned()) };
        let signed = has(opcode, "s16x2");
        let exec = packed::integers(&opcode.name, signed, has(opcode, "relu"));
        let exec = exec.ok_or("not for this type")?;
        let (a, b) = (self.source(a, Type::B32)?, self.source(b, Type::B32)?);
        let d = self.result(to, Type::B32)?;
        self.run(exec, d, &[a, b], 0);
        Ok(())
    }

    fn predicate_alu(&mut self, name: &str, operands: &[Operand]) -> Refusable<()> {
        let exec = int::predicate_logic(name).ok_or("predicate operation")?;
        let [to, from @ ..] = operands else { return Err("operands".to_owned()) };
        if from.len() != if name == "not" { 1 } else { 2 } {
            return Err("operands".to_owned());
        }
        let mut rows = Vec::with_capacity(2);
        for operand in from {
            rows.push(self.predicate_row(operand)?);
        }
        let d = self.result(to, Type::Pred)?;
        self.run(exec, d, &rows, 0);
        Ok(())
    }

    fn lop3(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        if has(opcode, "and") || has(opcode, "or") {
            return Err("with a predicate".to_owned());
        }
        let [to, a, b, c, Operand::Int(table)] = operands else { return Err("operands".to_owned()) };
        let table = (*table as u64) & 0xff;
        let mut rows = Vec::with_capacity(4);
        for operand in [a, b, c] {
            rows.push(self.source(operand, Type::B32)?);
        }
        let d = self.result(to, Type::B32)?;
        if let Some(exec) = bits::lop3_common(table as u8) {
            self.run(exec, d, &rows, 0);
        } else {
            rows.push(self.constant(Width::Narrow, table));
            self.run(bits::lop3(), d, &rows, 0);
        }
        Ok(())
    }

    fn carry(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let carry_in = opcode.name.ends_with('c');
        let flag = carry::Carry { carry_in, carry_out: has(opcode, "cc") };
        let name = match opcode.name.as_str() {
            "add" | "addc" => "add",
            "sub" | "subc" => "sub",
            _ if has(opcode, "hi") => "mad.hi",
            _ => "mad.lo",
        };
        let exec = carry::with_carry(name, ty, flag).ok_or("not for this type")?;
        let [to, from @ ..] = operands else { return Err("operands".to_owned()) };
        if from.len() != if name.starts_with("mad") { 3 } else { 2 } {
            return Err("operands".to_owned());
        }
        let mut rows = Vec::with_capacity(3);
        for operand in from {
            rows.push(self.source(operand, ty)?);
        }
        let d = self.result(to, ty)?;
        self.run(exec, d, &rows, u64::from(self.carry));
        Ok(())
    }

    fn selp(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let [to, a, b, c] = operands else { return Err("operands".to_owned()) };
        let (a, b) = (self.source(a, ty)?, self.source(b, ty)?);
        let c = self.predicate_row(c)?;
        let d = self.result(to, ty)?;
        self.run(convert::select(ty.bytes() == 8), d, &[a, b, c], 0);
        Ok(())
    }

    fn slct(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let [ty, sign] = types(opcode)[..] else { return Err("types".to_owned()) };
        let [to, a, b, c] = operands else { return Err("operands".to_owned()) };
        let (a, b, c) = (self.source(a, ty)?, self.source(b, ty)?, self.source(c, sign)?);
        let d = self.result(to, ty)?;
        let exec = convert::select_by_sign(ty.bytes() == 8, sign == Type::F32);
        self.run(exec, d, &[a, b, c], 0);
        Ok(())
    }

    fn testp(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        let ty = last_type(opcode)?;
        let [to, a] = operands else { return Err("operands".to_owned()) };
        let name = opcode.modifiers.first().map_or("", String::as_str);
        let exec = float::test(name, ty).ok_or("test")?;
        let a = self.source(a, ty)?;
        let d = self.result(to, Type::Pred)?;
        self.run(exec, d, &[a], 0);
        Ok(())
    }
}
