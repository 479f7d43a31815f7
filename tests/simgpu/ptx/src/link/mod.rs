//! A parsed module into a program: functions decoded, names resolved.

mod alu;
mod alu_float;
mod call;
mod convert;
mod copy;
mod function;
mod memory;
mod moves;
mod rows;
mod survey;
mod sync;
mod texture;

use std::collections::HashMap;

pub(crate) use self::survey::{Survey, kernels, survey};

use self::function::Compiler;
use self::rows::Constants;
use crate::exec::{Inst, Row};
use crate::fault::{LinkError, Unsupported};
use crate::module::Module;
use crate::program::{Compiled, Program, Shape, Site};

/// How far apart functions lie in the code window.
const CODE_STRIDE: u64 = 16;

/// A refusal of an instruction: what about it is not supported.
type Refusable<T> = Result<T, String>;

/// What all functions of a program share while it is made.
struct Linker<'m> {
    module: &'m Module,
    addresses: HashMap<String, u64>,
    code: Vec<Inst>,
    constants: Constants,
    lists: Vec<Row>,
    tables: Vec<Vec<u32>>,
    sites: Vec<Site>,
    refusals: Vec<Unsupported>,
    /// Where functions' parameters and results lie in their frames.
    shapes: Vec<Shape>,
}

/// Links a module; see [`Module::link`].
pub(crate) fn link(
    module: &Module,
    code_base: u64,
    addresses: &dyn Fn(&str) -> Option<u64>,
) -> Result<Program, LinkError> {
    let ast = &module.parsed.ast;
    let mut known = HashMap::new();
    for (index, function) in ast.functions.iter().enumerate() {
        known.insert(function.name.clone(), code_base.wrapping_add(index as u64 * CODE_STRIDE));
    }
    for global in module.globals() {
        let address = addresses(&global.name).ok_or_else(|| LinkError::Undefined(global.name.clone()))?;
        known.insert(global.name.clone(), address);
    }
    let shape = |vars: &[crate::ast::Var]| vars.iter().map(|v| (v.size, v.align)).collect();
    let shapes: Vec<Shape> =
        ast.functions.iter().map(|f| Shape { params: shape(&f.params), returns: shape(&f.returns) }).collect();
    let mut linker = Linker {
        module,
        addresses: known,
        code: Vec::new(),
        constants: Constants::default(),
        lists: Vec::new(),
        tables: Vec::new(),
        sites: Vec::new(),
        refusals: Vec::new(),
        shapes,
    };
    let mut functions = Vec::with_capacity(ast.functions.len());
    let mut refused = Vec::with_capacity(ast.functions.len());
    for (index, function) in ast.functions.iter().enumerate() {
        let (compiled, refusal) = match &function.body {
            Some(body) => Compiler::new(&mut linker, index, function, body).compile(),
            None => (Compiled { entry: 0, words: 0, stack_bytes: 0, callable: false, shape: Shape::default() }, None),
        };
        functions.push(compiled);
        refused.push(refusal);
    }
    Ok(linker.finish(functions, &refused, code_base))
}

impl Linker<'_> {
    fn finish(self, functions: Vec<Compiled>, refused: &[Option<usize>], code_base: u64) -> Program {
        let (module, survey) = (self.module, &self.module.survey);
        let mut kernel_index = HashMap::new();
        for (number, kernel) in module.kernels().iter().enumerate() {
            let Some(&function) = module.parsed.ast.function_index.get(&kernel.name) else {
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
            kernels: module.kernels().to_vec(),
            kernel_index,
            addresses: self.addresses,
            code_base,
            least_stack: least_stack.min(1 << 20) as u32,
        }
    }
}
