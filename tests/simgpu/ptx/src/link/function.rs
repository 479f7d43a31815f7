//! One function, from its first instruction to its last.

use super::compiler::{Compiler, Guard};
use super::linker::{Linker, Refusable};
use super::rows::Width;
use crate::ast::{Body, Function, Instruction, Opcode, Operand, Type};
use crate::exec::machine::{Action, NO_ROW};
use crate::program::{Compiled, Shape};

/// The most words that the registers of a function may take.
const WORDS_LIMIT: u32 = 1 << 22;

/// Decodes a function. Also returns the number of its first refusal, if there is one.
pub(super) fn compile<'m>(
    linker: &mut Linker<'m>,
    index: usize,
    function: &'m Function,
    body: &'m Body,
) -> (Compiled, Option<usize>) {
    let first_site = linker.sites.len();
    let entry = linker.code.len() as u32;
    let mut compiler = Compiler::new(linker, index, function, body);
    compiler.check_registers();
    // The place of each instruction of the text in the code.
    let mut starts = Vec::with_capacity(body.instructions.len() + 1);
    for instruction in &body.instructions {
        starts.push(compiler.linker.code.len() as u32);
        compiler.instruction(instruction);
    }
    // A label may be at the very end, and execution must not run on into the next function.
    starts.push(compiler.linker.code.len() as u32);
    compiler.guard = Guard::NONE;
    compiler.push(compiler.inst(Action::Return));
    let words = compiler.frame.words.next_multiple_of(4);
    let (stack_bytes, refusal) = (compiler.stack_bytes, compiler.refusal);
    resolve_branches(linker, entry, &starts);
    for site in &mut linker.sites[first_site..] {
        site.caller_words = words;
    }
    let shape = if function.entry { Shape::default() } else { linker.shapes[index].clone() };
    (Compiled { entry, words, stack_bytes, callable: !function.entry, shape }, refusal)
}

/// Replaces the targets of the function's branches, which are instructions of the text until then.
fn resolve_branches(linker: &mut Linker<'_>, entry: u32, starts: &[u32]) {
    let end = starts.len() - 1;
    let place = |index: u32| starts[(index as usize).min(end)];
    for inst in &mut linker.code[entry as usize..] {
        match &mut inst.action {
            Action::Branch(target) => *target = place(*target),
            Action::BranchTable(table) => {
                for target in &mut linker.tables[*table as usize] {
                    *target = place(*target);
                }
            }
            _ => {}
        }
    }
}

impl<'m> Compiler<'_, 'm> {
    /// Refuses a function whose body or registers cannot be decoded.
    fn check_registers(&mut self) {
        if let Some((line, what)) = &self.body.refused {
            self.line = *line;
            self.refuse(what.clone());
        }
        if self.frame.words > WORDS_LIMIT {
            self.refuse("too many registers".to_owned());
        }
        for (index, width) in self.body.registers.iter().map(|&ty| Width::of(ty)).enumerate() {
            if width.is_none() && self.rows[index] == NO_ROW {
                self.refuse("register of 128 bits".to_owned());
                break;
            }
        }
    }

    fn instruction(&mut self, instruction: &'m Instruction) {
        self.line = instruction.line;
        self.guard = Guard::NONE;
        if let Some((register, negated)) = instruction.guard {
            if self.body.registers.get(register as usize) != Some(&Type::Pred) {
                return self.refuse("guard that is no predicate".to_owned());
            }
            self.guard = Guard { row: self.rows[register as usize], flip: if negated { u32::MAX } else { 0 } };
        }
        let ast = self.linker.ast;
        let opcode = &ast.opcodes[instruction.opcode as usize];
        let before = self.linker.code.len();
        if let Err(what) = self.decode(opcode, &instruction.operands) {
            // No part of a refused instruction must stay.
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
            // There are no multicast objects, so there is no address for these; libraries have such code and do not reach it.
            "multimem" => self.plain(Action::Trap),
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
}
