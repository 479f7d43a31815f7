//! Whether code may get the address of a function, and so may keep it in memory.
//!
//! Code that only calls functions by their names does not: what it has of addresses is where calls return to, and that lasts
//! as long as a kernel runs. An answer of no is certain as far as the image tells; in doubt the answer is yes.

use super::CodeError;
use super::elf::{Elf, Section, Symbol, Symbols, u32_at};
use super::reach::CALLGRAPH;

/// Whether a cubin's code, or the initial value of one of its variables, has a function's address.
pub(super) fn takes_addresses(elf: &Elf<'_>) -> Result<bool, CodeError> {
    let symbols = elf.symbols()?;
    Ok(is_in_callgraph(elf)? || is_in_relocations(elf, &symbols)?)
}

/// The call graph says which functions' addresses are taken (its parts -2 and -4, see [`super::reach`]).
fn is_in_callgraph(elf: &Elf<'_>) -> Result<bool, CodeError> {
    for section in elf.sections.iter().filter(|section| section.kind == CALLGRAPH) {
        let mut part = 0;
        for pair in elf.data(section)?.chunks_exact(8) {
            match (u32_at(pair, 0), u32_at(pair, 4).map(u32::cast_signed)) {
                (Some(0), Some(mark @ ..=-1)) => part = mark,
                _ if matches!(part, -2 | -4) => return Ok(true),
                _ => {}
            }
        }
    }
    Ok(false)
}

/// Whether a place in variables or in code is filled with the address of a function. A section of code has addresses of
/// itself: there calls return to.
fn is_in_relocations(elf: &Elf<'_>, symbols: &Symbols) -> Result<bool, CodeError> {
    let names = elf.sections.iter().map(|section| elf.section_name(section)).collect::<Result<Vec<_>, _>>()?;
    let holds = |number: u32| {
        let section = elf.sections.get(number as usize);
        section.is_some_and(Section::is_code) || names.get(number as usize).is_some_and(|name| is_of_values(name))
    };
    // The constants of a kernel, as `.nv.constant2.KERNEL`, are part of the kernel.
    let own = |section: u32, of: u32| {
        let suffix = |name: &[u8], prefix: &[u8]| name.strip_prefix(prefix).map(<[u8]>::to_vec);
        let (Some(place), Some(code)) = (names.get(section as usize), names.get(of as usize)) else { return false };
        let kernel = suffix(code, b".text.");
        section == of || (kernel.is_some() && suffix(place, b".nv.constant").is_some_and(|it| of_kernel(&it) == kernel))
    };
    let is_function = |symbol: &Symbol| {
        let defined_in_code = elf.sections.get(symbol.section as usize).is_some_and(Section::is_code);
        symbol.section != 0 && (symbol.is_function() || defined_in_code)
    };
    let relocations = elf.relocations(symbols, holds)?;
    Ok(relocations.iter().any(|(section, relocation)| match symbols.list.get(relocation.symbol as usize) {
        Some(symbol) => is_function(symbol) && !own(*section, symbol.section),
        None => true,
    }))
}

/// Whether a section holds what code reads.
fn is_of_values(name: &[u8]) -> bool {
    name == b".nv.global" || name.starts_with(b".nv.global.") || name.starts_with(b".nv.constant")
}

/// Of `2.KERNEL`: the kernel.
fn of_kernel(bank: &[u8]) -> Option<Vec<u8>> {
    let dot = bank.iter().position(|byte| *byte == b'.')?;
    bank.get(dot + 1..).map(<[u8]>::to_vec)
}
