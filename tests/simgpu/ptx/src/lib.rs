//! A PTX parser and interpreter, with which the software GPU executes kernels.
//!
//! ```text
//!  PTX text ──lex──► tokens ──parse──► Module ──link──► Program ──launch──► memory, printf
//!                                        │                 ▲
//!                                        │ globals():      │ the loader's addresses
//!                                        └─ names, sizes, ─┘
//!                                           initial bytes
//! ```
//!
//! [`Module::parse`] reads the text of one module. The loader looks at [`Module::globals`], chooses
//! an address for each variable, and calls [`Module::link`], which turns every function into a flat
//! list of decoded instructions. [`Program::image`] then gives the first content of each variable,
//! and [`launch()`] runs a kernel on the caller's [`Memory`].
//!
//! # Layers
//!
//! A file imports from its own layer and from those above it in this table.
//!
//! | layer | holds |
//! |---|---|
//! | `fault`, `format`, `texture`, `memory`, `launch` | errors, `printf`'s format, and the interfaces that the caller of a launch implements |
//! | `declaration`, `ast`, `lex`, `parse/` | the declarations of a module; the parser from text to tree |
//! | `exec/machine/`, `exec/operations/` | the machine's state; the effect of each instruction on it |
//! | `program` | the decoded instructions of a module |
//! | `exec/warp/`, `exec/block`, `exec/grid` | the execution of a program |
//! | `link/` | the linker from tree to program |
//! | `module` | a module from its text to its program |
//!
//! # How it runs
//!
//! A warp's registers are rows of 32 lanes, and one decoded instruction works on a whole row, so
//! decoding costs little. Lanes that part at a branch become *fragments*, each with its own program
//! counter, which are joined again when they meet; the fragment that is behind runs first, and
//! every fragment, warp and block is preempted after some time, so lanes may wait for each other,
//! for another block, or for the CPU. All blocks run on the calling thread.
//!
//! # Addresses
//!
//! The value of a generic address shows its space. The windows lie above the 47 bits that a Linux process can map, so no
//! address of the caller's is ever in one:
//!
//! ```text
//!  0x0000_0000_0000_0000 ┐
//!                        │ global and constant memory: the caller's `Memory`
//!  0x0000_7fff_ffff_ffff ┘
//!  0x0000_8000_0000_0000   SHARED_WINDOW   the block's shared memory
//!  0x0000_8100_0000_0000   LOCAL_WINDOW    the thread's own stack
//!  0x0000_8200_0000_0000   PARAM_WINDOW    the kernel's parameters, read only
//!  0x0000_8300_0000_0000   GRID_WINDOW     the barrier word of a cooperative launch
//!  0x0000_8400_0000_0000   CODE_WINDOW     functions; never readable, only callable
//! ```

mod ast;
mod declaration;
mod exec;
mod fault;
mod format;
mod launch;
mod lex;
mod link;
mod memory;
mod module;
mod parse;
mod program;
mod texture;

pub use declaration::{Global, Kernel, Param, Relocation, Space};
pub use exec::grid::launch;
pub use fault::{Fault, FaultKind, LaunchFault, LinkError, ParseError, Unsupported};
pub use launch::{Children, Conditions, Env, Heap, LaunchConfig};
pub use memory::{Memory, Span};
pub use module::Module;
pub use program::Program;
pub use texture::{Boundary, Coordinates, Detail, Fetch, Geometry, Spot, Textures};

/// The beginning of shared memory in the generic address space.
pub const SHARED_WINDOW: u64 = 0x0000_8000_0000_0000;
/// The beginning of local memory in the generic address space.
pub const LOCAL_WINDOW: u64 = 0x0000_8100_0000_0000;
/// The beginning of a kernel's parameters in the generic address space.
pub const PARAM_WINDOW: u64 = 0x0000_8200_0000_0000;
/// The beginning of a cooperative launch's workspace, which `%envreg1` and `%envreg2` name.
pub const GRID_WINDOW: u64 = 0x0000_8300_0000_0000;
/// A suitable base for the addresses of functions, for [`Module::link`].
pub const CODE_WINDOW: u64 = 0x0000_8400_0000_0000;
