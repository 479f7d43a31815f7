//! The state that the functions of a program share during linking, and the resulting program.

use std::collections::HashMap;

use super::rows::Constants;
use super::survey::{self, Survey};
use crate::ast::{Ast, Var};
use crate::declaration::Global;
use crate::exec::machine::{Inst, Row};
use crate::fault::{LinkError, Unsupported};
use crate::program::{Compiled, Program, Shape, Site};

/// The distance of functions in the code window.
const CODE_STRIDE: u64 = 16;

/// A value, or the unsupported part of an instruction.
pub(super) type Refusable<T> = Result<T, String>;

/// The state that all functions of a program share during linking.
pub(super) struct Linker<'m> {
    pub(super) ast: &'m Ast,
    pub(super) survey: &'m Survey,
    pub(super) addresses: HashMap<String, u64>,
    pub(super) code: Vec<Inst>,
    pub(super) constants: Constants,
    pub(super) lists: Vec<Row>,
    pub(super) tables: Vec<Vec<u32>>,
    pub(super) sites: Vec<Site>,
    pub(super) refusals: Vec<Unsupported>,
    /// The places of functions' parameters and results in their frames.
    pub(super) shapes: Vec<Shape>,
}

/// The shape on which a caller and a function with these parameters and results must agree.
fn shape_of(params: &[Var], returns: &[Var]) -> Shape {
    let sizes = |vars: &[Var]| vars.iter().map(|var| (var.size, var.align)).collect();
    Shape { params: sizes(params), returns: sizes(returns) }
}

impl<'m> Linker<'m> {
    /// A linker that knows the addresses of the functions and variables.
    pub(super) fn new(
        ast: &'m Ast,
        survey: &'m Survey,
        globals: &[Global],
        code_base: u64,
        addresses: &dyn Fn(&str) -> Option<u64>,
    ) -> Result<Self, LinkError> {
        let mut known = HashMap::new();
        for (index, function) in ast.functions.iter().enumerate() {
            known.insert(function.name.clone(), code_base.wrapping_add(index as u64 * CODE_STRIDE));
        }
        for global in globals {
            let address = addresses(&global.name).ok_or_else(|| LinkError::Undefined(global.name.clone()))?;
            known.insert(global.name.clone(), address);
        }
        Ok(Linker {
            ast,
            survey,
            addresses: known,
            code: Vec::new(),
            constants: Constants::default(),
            lists: Vec::new(),
            tables: Vec::new(),
            sites: Vec::new(),
            refusals: Vec::new(),
            shapes: ast.functions.iter().map(|f| shape_of(&f.params, &f.returns)).collect(),
        })
    }

    /// The program of all functions. `refused` has the first refusal of each.
    pub(super) fn finish(self, functions: Vec<Compiled>, refused: &[Option<usize>], code_base: u64) -> Program {
        let (ast, survey) = (self.ast, self.survey);
        let mut kernel_index = HashMap::new();
        for (number, kernel) in survey.kernels.iter().enumerate() {
            let Some(&function) = ast.function_index.get(&kernel.name) else {
                continue;
            };
            let reached = survey::reached(function, &survey.direct);
            let refusal = reached.iter().find_map(|&f| refused[f as usize]);
            kernel_index.insert(kernel.name.clone(), (number, function as usize, refusal));
        }
        let least_stack = functions.iter().map(|f| u64::from(f.stack_bytes)).sum::<u64>();
        Program {
            code: self.code,
            constants: self.constants.finish(),
            lists: self.lists,
            tables: self.tables,
            sites: self.sites,
            functions,
            refusals: self.refusals,
            kernels: survey.kernels.clone(),
            kernel_index,
            addresses: self.addresses,
            code_base,
            least_stack: least_stack.min(1 << 20) as u32,
        }
    }
}
