//! One function while it is decoded: its frame, and its instructions so far.

use super::linker::{Linker, Refusable};
use super::rows::{Frame, Width};
use crate::ast::{Body, Function, NameRef, Type, VarSpace};
use crate::exec::machine::{Action, Exec, Inst, NO_ROW, Row};
use crate::fault::Unsupported;

/// The largest frame on a thread's stack.
const STACK_LIMIT: u64 = 512 << 10;

/// The place of one of a function's variables.
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
    /// No place: the variable is too large.
    Nowhere,
}

/// The predicate that an instruction depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guard {
    /// Its row, or [`NO_ROW`].
    pub(super) row: Row,
    /// All ones if the predicate is negated.
    pub(super) flip: u32,
}

impl Guard {
    /// The guard of an instruction that always runs.
    pub(super) const NONE: Guard = Guard { row: NO_ROW, flip: 0 };
}

/// One function while it is decoded.
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
    /// The guard and line of the instruction being decoded.
    pub(super) guard: Guard,
    pub(super) line: u32,
    /// The first refusal of the function.
    pub(super) refusal: Option<usize>,
}

impl<'c, 'm> Compiler<'c, 'm> {
    pub(super) fn new(linker: &'c mut Linker<'m>, index: usize, function: &'m Function, body: &'m Body) -> Self {
        let mut frame = Frame::default();
        let carry = frame.row(Width::Predicate);
        let rows = body.registers.iter().map(|&ty| Width::of(ty).map_or(NO_ROW, |width| frame.row(width))).collect();
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
            guard: Guard::NONE,
            line: 0,
            refusal: None,
        };
        compiler.place_variables();
        compiler
    }

    fn place_variables(&mut self) {
        let shared = &self.linker.survey.shared[self.index];
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

    /// Puts a refusal in the place of an instruction.
    pub(super) fn refuse(&mut self, what: String) {
        let index = self.linker.refusals.len();
        let function = self.function.name.clone();
        self.linker.refusals.push(Unsupported { function, line: self.line, what });
        self.refusal.get_or_insert(index);
        self.push(self.inst(Action::Refused(index as u32)));
    }

    /// An instruction with the current guard and line, and no operands yet.
    pub(super) fn inst(&self, action: Action) -> Inst {
        let none = NO_ROW;
        let (Guard { row: guard, flip: guard_flip }, line) = (self.guard, self.line);
        Inst { action, guard, guard_flip, d: none, e: none, a: none, b: none, c: none, imm: 0, line }
    }

    /// Adds an instruction.
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

    /// The row of a constant.
    pub(super) fn constant(&mut self, width: Width, bits: u64) -> Row {
        self.linker.constants.row(width, bits)
    }

    /// A new row of the frame.
    pub(super) fn temporary(&mut self, width: Width) -> Row {
        self.frame.row(width)
    }

    /// The place of a variable of the function.
    pub(super) fn place(&self, var: u32) -> Refusable<Place> {
        self.places.get(var as usize).copied().ok_or_else(|| "unknown variable".to_owned())
    }

    /// The type of a register.
    pub(super) fn register_type(&self, register: u32) -> Refusable<Type> {
        self.body.registers.get(register as usize).copied().ok_or_else(|| "no register".to_owned())
    }

    /// The meaning of a name of the function.
    pub(super) fn name(&self, index: u32) -> Refusable<&'m NameRef> {
        self.body.names.get(index as usize).ok_or_else(|| "unknown name".to_owned())
    }
}
