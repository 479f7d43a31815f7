//! Branches and calls.

use super::compiler::{Compiler, Place};
use super::linker::Refusable;
use crate::ast::{NameRef, Operand, Type, Var, VarSpace};
use crate::exec::machine::{Action, Builtin, Signature};
use crate::program::{Copied, Shape, Site};

impl<'m> Compiler<'_, 'm> {
    pub(super) fn branch(&mut self, operands: &[Operand]) -> Refusable<()> {
        let [Operand::Name(name, 0)] = operands else { return Err("target".to_owned()) };
        let NameRef::Label(target) = self.name(*name)? else { return Err("no such label".to_owned()) };
        self.push(self.inst(Action::Branch(*target)));
        Ok(())
    }

    pub(super) fn branch_table(&mut self, operands: &[Operand]) -> Refusable<()> {
        let [index, Operand::Name(name, 0)] = operands else { return Err("operands".to_owned()) };
        let NameRef::Targets(targets) = self.name(*name)? else { return Err("targets".to_owned()) };
        // Targets are resolved with the function's branches, so each function has its own table.
        let table = self.linker.tables.len() as u32;
        self.linker.tables.push(targets.clone());
        let a = self.source(index, Type::U32)?;
        let mut inst = self.inst(Action::BranchTable(table));
        inst.a = a;
        self.push(inst);
        Ok(())
    }

    /// The call's own parameter variables, as places on the stack.
    fn variables(&self, operand: Option<&Operand>) -> Refusable<Vec<(u32, &'m Var)>> {
        let Some(operand) = operand else { return Ok(Vec::new()) };
        let Operand::List(list) = operand else { return Err("arguments".to_owned()) };
        let mut variables = Vec::with_capacity(list.len());
        for item in list {
            let Operand::Var(var, 0) = item else {
                return Err("argument that is no parameter variable".to_owned());
            };
            let declared = &self.body.vars[*var as usize];
            match self.place(*var)? {
                Place::Stack(at) if declared.space == VarSpace::Param => {
                    variables.push((at, declared));
                }
                _ => return Err("argument that is no parameter variable".to_owned()),
            }
        }
        Ok(variables)
    }

    pub(super) fn call(&mut self, operands: &[Operand]) -> Refusable<()> {
        let (results, rest) = match operands {
            [results @ Operand::List(_), rest @ ..] => (Some(results), rest),
            rest => (None, rest),
        };
        let [target, rest @ ..] = rest else { return Err("operands".to_owned()) };
        let arguments = rest.first().filter(|operand| matches!(operand, Operand::List(_)));
        let arguments = self.variables(arguments)?;
        let results = self.variables(results)?;
        match target {
            Operand::Name(name, 0) => {
                let NameRef::Symbol(symbol) = self.name(*name)? else {
                    return Err("no such function".to_owned());
                };
                self.direct_call(symbol, &arguments, &results)
            }
            Operand::Reg(_) => {
                let prototype = rest.iter().find_map(|operand| match operand {
                    Operand::Name(name, 0) => match self.body.names.get(*name as usize) {
                        Some(NameRef::Prototype(prototype)) => {
                            Some(shape(prototype.params.iter(), prototype.returns.iter()))
                        }
                        Some(NameRef::Functions(functions)) => {
                            let first = functions.first()?;
                            let index = *self.linker.ast.function_index.get(first)?;
                            self.linker.shapes.get(index as usize).cloned()
                        }
                        _ => None,
                    },
                    _ => None,
                });
                let shape = prototype.ok_or("no prototype")?;
                let a = self.source(target, Type::U64)?;
                let site = self.site(0, shape, &arguments, &results)?;
                let mut inst = self.inst(Action::CallIndirect(site));
                inst.a = a;
                self.push(inst);
                Ok(())
            }
            _ => Err("target".to_owned()),
        }
    }

    fn direct_call(&mut self, symbol: &str, arguments: &[(u32, &Var)], results: &[(u32, &Var)]) -> Refusable<()> {
        let ast = self.linker.ast;
        let index = ast.function_index.get(symbol).copied();
        let defined = index.filter(|&i| ast.functions[i as usize].body.is_some());
        if let Some(index) = defined {
            if ast.functions[index as usize].entry {
                return Err("call of a kernel".to_owned());
            }
            let shape = self.linker.shapes[index as usize].clone();
            let site = self.site(index, shape, arguments, results)?;
            self.push(self.inst(Action::Call(site)));
            return Ok(());
        }
        let Some(builtin) = Builtin::named(symbol) else {
            return Err(format!("function {symbol} is not defined"));
        };
        let Signature { arguments: sizes, result } = builtin.signature();
        // What is larger than a register is an array of 32-bit words.
        let aligned = |at: u32, size: u64| u64::from(at).is_multiple_of(if size > 8 { 4 } else { size });
        let fits = arguments.len() == sizes.len()
            && arguments.iter().zip(sizes).all(|((at, var), &size)| var.size == size && aligned(*at, size));
        let result_fits = match results {
            [] => true,
            [(_, var)] => Some(var.size) == result,
            _ => false,
        };
        if !fits || !result_fits {
            return Err(format!("wrong arguments for {symbol}"));
        }
        let site = Site {
            arguments: arguments.iter().map(|&(at, _)| at).collect(),
            result: results.first().map(|&(at, _)| at),
            ..Site::default()
        };
        let number = self.linker.sites.len() as u32;
        self.linker.sites.push(site);
        self.push(self.inst(Action::Builtin(builtin, number)));
        Ok(())
    }

    /// Makes a call site, after checking that both sides agree on the shape.
    fn site(
        &mut self,
        target: u32,
        wanted: Shape,
        arguments: &[(u32, &Var)],
        results: &[(u32, &Var)],
    ) -> Refusable<u32> {
        let given = shape(arguments.iter().map(|a| a.1), results.iter().map(|r| r.1));
        let sizes = |list: &[(u64, u64)]| list.iter().map(|&(size, _)| size).collect::<Vec<_>>();
        if sizes(&given.params) != sizes(&wanted.params) || sizes(&given.returns) != sizes(&wanted.returns) {
            return Err("arguments of another shape".to_owned());
        }
        // A function's frame begins with its parameters, then its results.
        let mut at = 0u64;
        let mut places = Vec::new();
        for &(size, align) in wanted.params.iter().chain(&wanted.returns) {
            at = at.next_multiple_of(align.clamp(1, 1 << 12));
            places.push(u32::try_from(at).map_err(|_| "parameters too large")?);
            at = at.saturating_add(size);
        }
        let (params, returns) = places.split_at(wanted.params.len());
        let copies =
            arguments.iter().zip(params).map(|(&(from, var), &to)| Copied { from, to, bytes: var.size as u32 });
        let returns =
            results.iter().zip(returns).map(|(&(to, var), &from)| Copied { from, to, bytes: var.size as u32 });
        let site = Site {
            target,
            caller_words: 0,
            caller_stack: self.stack_bytes,
            copies: copies.collect(),
            returns: returns.collect(),
            shape: wanted,
            ..Site::default()
        };
        self.linker.sites.push(site);
        Ok(self.linker.sites.len() as u32 - 1)
    }
}

fn shape<'v>(params: impl Iterator<Item = &'v Var>, returns: impl Iterator<Item = &'v Var>) -> Shape {
    Shape { params: params.map(|v| (v.size, v.align)).collect(), returns: returns.map(|v| (v.size, v.align)).collect() }
}
