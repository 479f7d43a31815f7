//! A parsed module into a program: functions decoded, names resolved.
//!
//! A file imports from its own layer and from those above it in this table.
//!
//! | layer | holds |
//! |---|---|
//! | `survey`, `rows` | the functions and variables that a function reaches; the places of registers and constants |
//! | `linker`, `modifiers` | the state that the functions of a program share; the modifiers of an opcode |
//! | `compiler`, `operands` | one function in the making; the rows of its operands |
//! | `moves`, `memory`, `alu`, `alu_float`, `convert`, `call`, `sync`, `copy`, `texture` | the instructions, by family |
//! | `function` | a function from its first instruction to its last |

mod alu;
mod alu_float;
mod call;
mod compiler;
mod convert;
mod copy;
mod function;
mod linker;
mod memory;
mod modifiers;
mod moves;
mod operands;
mod rows;
mod survey;
mod sync;
mod texture;

pub(crate) use self::survey::{Survey, survey};

use self::linker::Linker;
use crate::fault::LinkError;
use crate::parse::Parsed;
use crate::program::{Compiled, Program, Shape};

/// Links a module; see [`Module::link`](crate::Module::link).
pub(crate) fn link(
    parsed: &Parsed,
    survey: &Survey,
    code_base: u64,
    addresses: &dyn Fn(&str) -> Option<u64>,
) -> Result<Program, LinkError> {
    let ast = &parsed.ast;
    let mut linker = Linker::new(ast, survey, &parsed.globals, code_base, addresses)?;
    let mut functions = Vec::with_capacity(ast.functions.len());
    let mut refused = Vec::with_capacity(ast.functions.len());
    for (index, function) in ast.functions.iter().enumerate() {
        let (compiled, refusal) = match &function.body {
            Some(body) => function::compile(&mut linker, index, function, body),
            None => (Compiled { entry: 0, words: 0, stack_bytes: 0, callable: false, shape: Shape::default() }, None),
        };
        functions.push(compiled);
        refused.push(refusal);
    }
    Ok(linker.finish(functions, &refused, code_base))
}
