//! A linked module, which a launch executes.

use std::collections::HashMap;

use crate::declaration::{Global, Kernel, Relocation};
use crate::exec::machine::{Inst, Row};
use crate::fault::Unsupported;

/// A module whose variables and functions have addresses, decoded for execution.
pub struct Program {
    pub(crate) code: Vec<Inst>,
    /// Rows of constants, all lanes alike.
    pub(crate) constants: Vec<u64>,
    /// Rows of vectors that are loaded or stored.
    pub(crate) lists: Vec<Row>,
    /// Targets of `brx.idx`.
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) sites: Vec<Site>,
    /// In the order of the module's functions.
    pub(crate) functions: Vec<Compiled>,
    pub(crate) refusals: Vec<Unsupported>,
    pub(crate) kernels: Vec<Kernel>,
    /// For each kernel, its function, and the refusal it reaches.
    pub(crate) kernel_index: HashMap<String, (usize, usize, Option<usize>)>,
    pub(crate) addresses: HashMap<String, u64>,
    pub(crate) code_base: u64,
    /// The stack that the largest chain of calls without recursion may need.
    pub(crate) least_stack: u32,
}

/// A function, decoded.
#[derive(Debug, Clone)]
pub(crate) struct Compiled {
    /// Its first instruction.
    pub(crate) entry: u32,
    /// The number of words of its registers.
    pub(crate) words: u32,
    /// The bytes of its variables on a lane's stack.
    pub(crate) stack_bytes: u32,
    /// Whether it is a device function with a body.
    pub(crate) callable: bool,
    pub(crate) shape: Shape,
}

/// The shape on which a caller and a function must agree: sizes and alignments of parameters and results.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) params: Vec<(u64, u64)>,
    pub(crate) returns: Vec<(u64, u64)>,
}

/// Bytes copied between a caller's variables and a function's parameters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copied {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) bytes: u32,
}

/// A place from which a function is called.
#[derive(Debug, Clone, Default)]
pub(crate) struct Site {
    /// The function, for direct calls.
    pub(crate) target: u32,
    pub(crate) shape: Shape,
    /// The sizes of the caller's own registers and variables.
    pub(crate) caller_words: u32,
    pub(crate) caller_stack: u32,
    pub(crate) copies: Vec<Copied>,
    pub(crate) returns: Vec<Copied>,
    /// For builtins: the places of arguments and result in the caller's frame.
    pub(crate) arguments: Vec<u32>,
    pub(crate) result: Option<u32>,
}

impl std::fmt::Debug for Program {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Program")
            .field("instructions", &self.code.len())
            .field("functions", &self.functions.len())
            .finish_non_exhaustive()
    }
}

impl Program {
    /// The address of a variable or function of the module.
    #[must_use]
    pub fn address(&self, name: &str) -> Option<u64> {
        self.addresses.get(name).copied()
    }

    /// The first content of one of the module's variables, addresses filled in, `size` bytes long.
    #[must_use]
    pub fn image(&self, global: &Global) -> Vec<u8> {
        let mut image = global.init.clone();
        image.resize(usize::try_from(global.size).unwrap_or(0).max(image.len()), 0);
        for Relocation { offset, width, shift, symbol, addend } in &global.relocations {
            let address = self.address(symbol).unwrap_or(0).wrapping_add_signed(*addend);
            let bytes = (address >> u32::from(*shift).min(63)).to_le_bytes();
            let (at, width) = (usize::try_from(*offset).unwrap_or(usize::MAX), usize::from(*width));
            let place = at.checked_add(width).and_then(|end| image.get_mut(at..end));
            if let (Some(place), Some(bytes)) = (place, bytes.get(..width)) {
                place.copy_from_slice(bytes);
            }
        }
        image
    }

    /// The kernels, in the order of the text.
    #[must_use]
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The kernel of that name.
    #[must_use]
    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernel_index.get(name).and_then(|&(kernel, ..)| self.kernels.get(kernel))
    }

    /// The kernel at an address, as kernels name those that they launch.
    #[must_use]
    pub fn kernel_at(&self, address: u64) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| self.address(&kernel.name) == Some(address))
    }

    /// Whether a kernel, and everything it can call, can be executed. An unknown kernel can.
    ///
    /// # Errors
    ///
    /// The kernel cannot be executed; the error is the first reason.
    pub fn supported(&self, kernel: &str) -> Result<(), &Unsupported> {
        let refusal = self.kernel_index.get(kernel).and_then(|&(_, _, refusal)| refusal);
        refusal.and_then(|index| self.refusals.get(index)).map_or(Ok(()), Err)
    }

    pub(crate) fn function_of(&self, kernel: &str) -> Option<usize> {
        self.kernel_index.get(kernel).map(|&(_, function, _)| function)
    }
}

// A program holds no pointers except to functions of this crate.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<Program>();
};
