//! Which kernels of a cubin may get to the device's heap.
//!
//! The heap's functions are the driver's: a cubin refers to them by an undefined symbol. What leads
//! to that symbol is told in three places, of which each alone may be missing (linked or not, older
//! compilers), so all are followed:
//!
//! - `.nv.callgraph` (type `0x70000001`): pairs of u32 symbol numbers, in parts that start with the
//!   pairs (0, -1) to (0, -4): caller and callee; function and its prototype, for those whose
//!   address is taken; caller through a pointer and the prototype; function and the function whose
//!   address it takes;
//! - `EXTERNS` in a function's attributes: the functions it refers to, which the linker and `ptxas`
//!   make complete for calls through pointers;
//! - relocations of its text.

use super::CodeError;
use super::attributes::{EXTERNS, attributes, function_infos};
use super::elf::{Elf, Section, Symbols, u32_at};
use super::graph::Graph;

/// The functions through which device code allocates: `malloc` (also `new`, and what a linked
/// `cudaMalloc` comes to), what `__nv_aligned_device_malloc` calls, and `cudaMalloc` before it is
/// linked, by its names in the device runtime.
pub(super) const ALLOCATORS: [&[u8]; 4] =
    [b"malloc", b"__cuda_syscall_aligned_malloc", b"__cudaCDP2Malloc", b"cudaMalloc"];

/// `SHT_CUDA_CALLGRAPH`.
pub(super) const CALLGRAPH: u32 = 0x7000_0001;

/// The numbers of the symbols that are allocators.
fn allocators(elf: &Elf<'_>, symbols: &Symbols) -> Result<Vec<u32>, CodeError> {
    let mut found = Vec::new();
    for (number, symbol) in (0..).zip(&symbols.list) {
        if symbol.section == 0 && ALLOCATORS.contains(&elf.symbol_name(symbols, symbol)?) {
            found.push(number);
        }
    }
    Ok(found)
}

/// Whether the cubin refers to an allocator at all.
pub(super) fn refers_to_allocator(elf: &Elf<'_>) -> Result<bool, CodeError> {
    Ok(!allocators(elf, &elf.symbols()?)?.is_empty())
}

/// Which sections' code may allocate, by their numbers.
///
/// A section is the unit, since `ptxas` copies the functions that a kernel calls into the kernel's
/// own section.
pub(super) fn allocating_sections(elf: &Elf<'_>, symbols: &Symbols) -> Result<Vec<bool>, CodeError> {
    let sections = elf.sections.len();
    let allocators = allocators(elf, symbols)?;
    if allocators.is_empty() {
        return Ok(vec![false; sections]);
    }
    let mut calls = Calls::new(sections, symbols);
    calls.add_callgraph(elf)?;
    calls.add_externs(elf)?;
    calls.add_relocations(elf, symbols)?;
    let targets: Vec<u32> = allocators.iter().filter_map(|s| calls.node(*s)).collect();
    let count = calls.any_taken as usize + 1;
    let mut marked = calls.graph.reaching(count, targets.into_iter());
    marked.truncate(sections);
    // Something refers to an allocator, and nothing says what: it may be anything.
    if !marked.contains(&true) {
        marked.fill(true);
    }
    Ok(marked)
}

/// The graph of a cubin. A node is a section, an undefined symbol (numbered after the sections), or
/// "any function whose address is taken", which comes last.
struct Calls {
    /// The node of each symbol; `None` for those in sections that there are not.
    nodes: Vec<Option<u32>>,
    any_taken: u32,
    graph: Graph,
}

impl Calls {
    fn new(sections: usize, symbols: &Symbols) -> Self {
        // Both counts are of tables in one file, far below 2^32.
        let sections = sections as u32;
        let nodes: Vec<_> = (sections..)
            .zip(&symbols.list)
            .map(|(number, symbol)| match symbol.section {
                0 => Some(number),
                section => (section < sections).then_some(section),
            })
            .collect();
        Self { any_taken: sections + nodes.len() as u32, nodes, graph: Graph::default() }
    }

    /// The node of a symbol, by its number.
    fn node(&self, symbol: u32) -> Option<u32> {
        self.nodes.get(symbol as usize).copied().flatten()
    }

    fn add(&mut self, from: Option<u32>, to: Option<u32>) {
        if let (Some(from), Some(to)) = (from, to) {
            self.graph.add(from, to);
        }
    }

    fn add_callgraph(&mut self, elf: &Elf<'_>) -> Result<(), CodeError> {
        let any = Some(self.any_taken);
        for section in elf.sections.iter().filter(|s| s.kind == CALLGRAPH) {
            let mut part = 0;
            for pair in elf.data(section)?.chunks_exact(8) {
                let (Some(first), Some(second)) = (u32_at(pair, 0), u32_at(pair, 4)) else {
                    continue;
                };
                let (from, to) = (self.node(first), self.node(second));
                match (first, second.cast_signed(), part) {
                    (0, mark @ ..=-1, _) => part = mark,
                    (_, _, -2) => self.add(any, from),
                    (_, _, -3) => self.add(from, any),
                    (_, _, -4) => self.add(any, to),
                    // -1, and what else there may be one day.
                    _ => self.add(from, to),
                }
            }
        }
        Ok(())
    }

    fn add_externs(&mut self, elf: &Elf<'_>) -> Result<(), CodeError> {
        for (section, text) in function_infos(elf) {
            // The attributes after a damaged one are lost; the other sources remain.
            for attribute in attributes(elf.data(section)?).flatten() {
                if attribute.kind == EXTERNS {
                    for number in attribute.bytes.chunks_exact(4) {
                        let to = u32_at(number, 0).and_then(|symbol| self.node(symbol));
                        self.add(Some(text), to);
                    }
                }
            }
        }
        Ok(())
    }

    fn add_relocations(&mut self, elf: &Elf<'_>, symbols: &Symbols) -> Result<(), CodeError> {
        let is_code = |number: u32| elf.sections.get(number as usize).is_some_and(Section::is_code);
        for (section, relocation) in elf.relocations(symbols, is_code)? {
            let to = self.node(relocation.symbol);
            self.add(Some(section), to);
        }
        Ok(())
    }
}
