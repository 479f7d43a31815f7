//! One function: its frame, and its instructions one by one.

use super::rows::{Frame, Width};
use super::{Linker, Refusable};
use crate::ast::{Body, Function, Instruction, NameRef, Opcode, Operand, Type, VarSpace};
use crate::exec::{Action, Exec, Inst, NO_ROW, Row, special};
use crate::fault::Unsupported;
use crate::program::{Compiled, Shape};

/// No frame on a thread's stack is larger.
const STACK_LIMIT: u64 = 512 << 10;

/// Where one of a function's variables lies.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place {
    /// In the frame on the stack.
    Stack(u32),
    /// In the kernel's parameters.
    Param(u32),
    /// In shared memory.
    Shared(u32),
    /// At the beginning of dynamic shared memory.
    Dynamic,
    /// Nowhere: it is too large.
    Nowhere,
}

/// Decodes one function.
pub(super) struct Compiler<'c, 'm> {
    pub(super) linker: &'c mut Linker<'m>,
    pub(super) index: usize,
    pub(super) function: &'m Function,
    pub(super) body: &'m Body,
    pub(super) rows: Vec<Row>,
    pub(super) frame: Frame,
    pub(super) places: Vec<Place>,
    pub(super) stack_bytes: u32,
    /// The row of the carry flag.
    pub(super) carry: Row,
    /// Where each instruction of the text begins in the code.
    starts: Vec<u32>,
    /// The guard and line of the instruction being decoded.
    guard: Row,
    guard_flip: u32,
    line: u32,
    refusal: Option<usize>,
    /// The first of its call sites.
    first_site: usize,
}

impl<'c, 'm> Compiler<'c, 'm> {
    pub(super) fn new(linker: &'c mut Linker<'m>, index: usize, function: &'m Function, body: &'m Body) -> Self {
        let mut frame = Frame::default();
        let carry = frame.row(Width::Predicate);
        let rows = body.registers.iter().map(|&ty| Width::of(ty).map_or(NO_ROW, |width| frame.row(width))).collect();
        let first_site = linker.sites.len();
        let mut compiler = Compiler {
            linker,
            index,
            function,
            body,
            rows,
            frame,
            places: Vec::new(),
            stack_bytes: 0,
            carry,
            starts: Vec::new(),
            guard: NO_ROW,
            guard_flip: 0,
            line: 0,
            refusal: None,
            first_site,
        };
        compiler.place_variables();
        compiler
    }

    fn place_variables(&mut self) {
        let shared = &self.linker.module.survey.shared[self.index];
        let params = self.function.params.len() as u32;
        let mut stack = 0u64;
        let (kernel_params, _) = super::survey::layout(&self.function.params);
        for (index, var) in self.body.vars.iter().enumerate() {
            let place = match var.space {
                VarSpace::Shared if var.unsized_ => Place::Dynamic,
                VarSpace::Shared => shared.own.get(&(index as u32)).map_or(Place::Nowhere, |&at| Place::Shared(at)),
                VarSpace::Param if self.function.entry && (index as u32) < params => {
                    Place::Param(kernel_params[index].offset)
                }
                _ => {
                    let at = stack.next_multiple_of(var.align.clamp(1, 1 << 12));
                    let end = at.saturating_add(var.size);
                    if end > STACK_LIMIT {
                        Place::Nowhere
                    } else {
                        stack = end;
                        Place::Stack(at as u32)
                    }
                }
            };
            self.places.push(place);
        }
        self.stack_bytes = stack.next_multiple_of(16) as u32;
    }

    /// Decodes everything. Gives also the number of the first refusal, if there is one.
    pub(super) fn compile(mut self) -> (Compiled, Option<usize>) {
        let entry = self.linker.code.len() as u32;
        if let Some((line, what)) = &self.body.refused {
            self.line = *line;
            self.refuse(what.clone());
        }
        if self.frame.words > 1 << 22 {
            self.refuse("too many registers".to_owned());
        }
        for (index, width) in self.body.registers.iter().map(|&ty| Width::of(ty)).enumerate() {
            if width.is_none() && self.rows[index] == NO_ROW {
                self.refuse("register of 128 bits".to_owned());
                break;
            }
        }
        let body = self.body;
        for instruction in &body.instructions {
            self.starts.push(self.linker.code.len() as u32);
            self.instruction(instruction);
        }
        // A label may stand at the very end, and nothing may run on into the next function.
        self.starts.push(self.linker.code.len() as u32);
        (self.guard, self.guard_flip) = (NO_ROW, 0);
        self.push(self.inst(Action::Return));
        self.resolve_branches(entry);
        let words = self.frame.words.next_multiple_of(4);
        for site in &mut self.linker.sites[self.first_site..] {
            site.caller_words = words;
        }
        let shape = if self.function.entry { Shape::default() } else { self.linker.shapes[self.index].clone() };
        let (stack_bytes, callable) = (self.stack_bytes, !self.function.entry);
        (Compiled { entry, words, stack_bytes, callable, shape }, self.refusal)
    }

    /// Until now branches name instructions of the text.
    fn resolve_branches(&mut self, entry: u32) {
        let end = self.starts.len() - 1;
        let place = |index: u32| self.starts[(index as usize).min(end)];
        for inst in &mut self.linker.code[entry as usize..] {
            match &mut inst.action {
                Action::Branch(target) => *target = place(*target),
                Action::BranchTable(table) => {
                    for target in &mut self.linker.tables[*table as usize] {
                        *target = place(*target);
                    }
                }
                _ => {}
            }
        }
    }

    fn refuse(&mut self, what: String) {
        let index = self.linker.refusals.len();
        let function = self.function.name.clone();
        self.linker.refusals.push(Unsupported { function, line: self.line, what });
        self.refusal.get_or_insert(index);
        self.push(self.inst(Action::Refused(index as u32)));
    }

    fn instruction(&mut self, instruction: &'m Instruction) {
        self.line = instruction.line;
        (self.guard, self.guard_flip) = (NO_ROW, 0);
        if let Some((register, negated)) = instruction.guard {
            if self.body.registers.get(register as usize) != Some(&Type::Pred) {
                return self.refuse("guard that is no predicate".to_owned());
            }
            self.guard = self.rows[register as usize];
            self.guard_flip = if negated { u32::MAX } else { 0 };
        }
        let module = self.linker.module;
        let opcode = &module.parsed.ast.opcodes[instruction.opcode as usize];
        let before = self.linker.code.len();
        if let Err(what) = self.decode(opcode, &instruction.operands) {
            // Half of an instruction must not stay.
            self.linker.code.truncate(before);
            self.refuse(format!("{opcode}: {what}"));
        }
    }

    fn decode(&mut self, opcode: &Opcode, operands: &[Operand]) -> Refusable<()> {
        match opcode.name.as_str() {
            "mov" => self.mov(opcode, operands),
            "ld" | "ldu" => self.load(opcode, operands),
            "st" => self.store(opcode, operands),
            "atom" | "red" => self.atomic(opcode, operands),
            "cvta" => self.cvta(opcode, operands),
            "isspacep" => self.isspacep(opcode, operands),
            "cvt" => self.cvt(opcode, operands),
            "setp" | "set" => self.compare(opcode, operands),
            "bra" => self.branch(operands),
            "brx" => self.branch_table(operands),
            "call" => self.call(operands),
            "ret" => self.plain(Action::Return),
            "exit" => self.plain(Action::Exit),
            "trap" | "brkpt" => self.plain(Action::Trap),
            "bar" | "barrier" => self.barrier(opcode, operands),
            "shfl" | "vote" | "match" | "redux" | "elect" | "activemask" => self.collective(opcode, operands),
            "membar" | "fence" => self.fence(),
            "prefetch" | "prefetchu" | "applypriority" | "discard" | "griddepcontrol" | "pmevent" | "setmaxnreg" => {
                Ok(())
            }
            "mapa" => self.mapa(opcode, operands),
            "getctarank" => self.rank_of(opcode, operands),
            "mbarrier" => self.mbarrier(opcode, operands),
            "cp" => self.cp(opcode, operands),
            "tex" | "tld4" => self.tex(opcode, operands),
            "suld" => self.surface_load(opcode, operands),
            "sust" => self.surface_store(opcode, operands),
            "sured" => self.surface_reduce(opcode, operands),
            "txq" | "suq" => self.texture_query(opcode, operands),
            "createpolicy" => self.policy(opcode, operands),
            "nanosleep" => self.nanosleep(operands),
            _ => self.alu(opcode, operands),
        }
    }

    fn plain(&mut self, action: Action) -> Refusable<()> {
        self.push(self.inst(action));
        Ok(())
    }

    /// An instruction with the current guard and line, and no operands yet.
    pub(super) fn inst(&self, action: Action) -> Inst {
        let none = NO_ROW;
        let (guard, guard_flip, line) = (self.guard, self.guard_flip, self.line);
        Inst { action, guard, guard_flip, d: none, e: none, a: none, b: none, c: none, imm: 0, line }
    }

    pub(super) fn push(&mut self, inst: Inst) {
        self.linker.code.push(inst);
    }

    /// Adds an instruction that maps sources to a destination.
    pub(super) fn run(&mut self, exec: Exec, d: Row, sources: &[Row], imm: u64) {
        let source = |index: usize| sources.get(index).copied().unwrap_or(NO_ROW);
        let mut inst = self.inst(Action::Run(exec));
        (inst.d, inst.a, inst.b, inst.c, inst.e) = (d, source(0), source(1), source(2), source(3));
        inst.imm = imm;
        self.push(inst);
    }

    pub(super) fn constant(&mut self, width: Width, bits: u64) -> Row {
        self.linker.constants.row(width, bits)
    }

    pub(super) fn temporary(&mut self, width: Width) -> Row {
        self.frame.row(width)
    }

    /// The type of a register.
    pub(super) fn register_type(&self, register: u32) -> Refusable<Type> {
        self.body.registers.get(register as usize).copied().ok_or_else(|| "no register".to_owned())
    }

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

    /// The bits of an immediate operand, as the type has them.
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

    /// The row of a predicate operand, negated by an instruction of its own if need be.
    pub(super) fn predicate_row(&mut self, operand: &Operand) -> Refusable<Row> {
        let (row, negated) = self.predicate(operand)?;
        if !negated {
            return Ok(row);
        }
        let inverse = self.temporary(Width::Predicate);
        let not = crate::exec::int::predicate_logic("not").ok_or("not")?;
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
        let exec = crate::exec::convert::integer(source, target, to == Width::Wide).ok_or("resize")?;
        let resized = self.temporary(to);
        self.run(exec, resized, &[row], 0);
        Ok(resized)
    }

    /// What a name of the function stands for.
    pub(super) fn name(&self, index: u32) -> Refusable<&'m NameRef> {
        self.body.names.get(index as usize).ok_or_else(|| "unknown name".to_owned())
    }
}
