//! Variables and kernels of a cubin.
//!
//! As nvcc 13.0 writes them for sm_75 to sm_121, linked or not, with and without debug information:
//!
//! - variables are symbols of type 1 (`STT_OBJECT`), or 13 in objects that are yet to be linked, in
//!   `.nv.global` (zero at first), `.nv.global.init` and `.nv.constant3`; the constant banks of
//!   kernels are `.nv.constantN.KERNEL` and hold none;
//! - `st_other` has bit 2 for managed variables and bit 4 for kernels;
//! - a section of type `0x70000000`, `.nv.info.FUNCTION`, has the number of the function's `.text`
//!   section in `sh_info` and a list of attributes:
//!
//! ```text
//! u8 format, u8 attribute, u16 value or size; format 4: as many bytes follow, others: none
//!
//! 0x17 KPARAM_INFO     u32, u16 ordinal, u16 offset, u32: size in bits 18-31
//! 0x45 KPARAM_INFO_V2  u32, u16 ordinal, u16 offset, u16 size, u16   where a size or offset is large
//! 0x19 CBANK_PARAM_SIZE in the value: bytes of all parameters
//! 0x0f EXTERNS         u32 symbol numbers of functions it refers to
//! ```

use super::attributes::{attributes, function_infos};
use super::elf::{Elf, Relocation, Symbol, Symbols, u16_at, u32_at};
use super::items::{Binding, Global, Kernel, Param, Space};
use super::{CodeError, MOST_NAMED, reach};

/// In `st_other`: the variable is managed.
const MANAGED: u8 = 0x04;
/// In `st_other`: the function is a kernel (`STO_CUDA_ENTRY`).
const ENTRY: u8 = 0x10;

const KPARAM_INFO: u8 = 0x17;
const CBANK_PARAM_SIZE: u8 = 0x19;
const KPARAM_INFO_V2: u8 = 0x45;

/// The memory that each section's variables lie in, by the sections' numbers.
fn spaces(elf: &Elf<'_>) -> Result<Vec<Option<Space>>, CodeError> {
    elf.sections.iter().map(|section| Ok(space_of(elf.section_name(section)?))).collect()
}

/// Makes the managed variables of a cubin ordinary ones. Returns whether there were any.
pub(super) fn make_unmanaged(bytes: &mut [u8]) -> Result<bool, CodeError> {
    let elf = Elf::parse(bytes)?;
    let spaces = spaces(&elf)?;
    // Without a section: a variable of other code that a linker joins to this (`extern`), or one that it is still to place.
    const ELSEWHERE: [u32; 2] = [0, 0xfff2];
    let is_managed = |symbol: &Symbol| {
        let is_variable =
            ELSEWHERE.contains(&symbol.section) || matches!(spaces.get(symbol.section as usize), Some(Some(_)));
        symbol.is_object() && is_variable && symbol.other & MANAGED != 0
    };
    let symbols = elf.symbols()?;
    let managed = symbols.list.iter().enumerate().filter(|(_, symbol)| is_managed(symbol));
    let places: Vec<usize> = managed.filter_map(|(number, _)| elf.other_of_symbol(number)).collect();
    for &place in &places {
        if let Some(other) = bytes.get_mut(place) {
            *other &= !MANAGED;
        }
    }
    Ok(!places.is_empty())
}

/// The variables, in the order of the symbol table.
pub(super) fn globals(elf: &Elf<'_>) -> Result<Vec<Global>, CodeError> {
    let spaces = spaces(elf)?;
    let symbols = elf.symbols()?;
    let is_of_variables = |section: u32| matches!(spaces.get(section as usize), Some(Some(_)));
    let mut relocations = elf.relocations(&symbols, is_of_variables)?;
    relocations.sort_by_key(|(section, relocation)| (*section, relocation.offset));
    let mut globals = Vec::new();
    for symbol in symbols.list.iter().filter(|symbol| symbol.is_object()) {
        let Some(&Some(space)) = spaces.get(symbol.section as usize) else {
            continue;
        };
        globals.push(Global {
            name: name(elf, &symbols, symbol)?,
            size: symbol.size,
            space,
            managed: symbol.other & MANAGED != 0,
            binding: match symbol.binding() {
                0 => Binding::Local,
                2 => Binding::Weak,
                _ => Binding::Global,
            },
            in_function: false,
            points_to: points_to(elf, &symbols, symbol, &relocations)?,
        });
    }
    Ok(globals)
}

/// The symbols whose addresses a variable holds at first. `relocations` are those of variables' sections, by their places.
fn points_to(
    elf: &Elf<'_>,
    symbols: &Symbols,
    variable: &Symbol,
    relocations: &[(u32, Relocation)],
) -> Result<Vec<String>, CodeError> {
    let first = (variable.section, variable.value);
    let last = (variable.section, variable.value.saturating_add(variable.size));
    let start = relocations.partition_point(|(section, relocation)| (*section, relocation.offset) < first);
    let held = relocations.get(start..).unwrap_or_default().iter();
    let held = held.take_while(|(section, relocation)| (*section, relocation.offset) < last);
    held.take(MOST_NAMED).map(|(_, relocation)| name_of(elf, symbols, relocation.symbol)).collect()
}

/// The name of a symbol, by its number. One that stands for a section has the section's.
fn name_of(elf: &Elf<'_>, symbols: &Symbols, number: u32) -> Result<String, CodeError> {
    const NONE: CodeError = CodeError::Malformed("a relocation by a symbol that there is not");
    let symbol = symbols.list.get(number as usize).ok_or(NONE)?;
    let name = elf.symbol_name(symbols, symbol)?;
    let section = elf.sections.get(symbol.section as usize).filter(|_| name.is_empty());
    let name = section.map_or(Ok(name), |section| elf.section_name(section))?;
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// The memory that a section's variables lie in, if it is one of variables.
fn space_of(section: &[u8]) -> Option<Space> {
    match section.strip_prefix(b".nv.constant") {
        // A number and nothing after it: with a name after it, it is a kernel's.
        Some(bank) if !bank.is_empty() && bank.iter().all(u8::is_ascii_digit) => Some(Space::Constant),
        Some(_) => None,
        None => (section == b".nv.global" || section.starts_with(b".nv.global.")).then_some(Space::Global),
    }
}

/// The kernels, in the order of the symbol table.
pub(super) fn kernels(elf: &Elf<'_>) -> Result<Vec<Kernel>, CodeError> {
    let symbols = elf.symbols()?;
    let allocating = reach::allocating_sections(elf, &symbols)?;
    // The attributes of a function, by the number of its text section.
    let mut infos = vec![None; elf.sections.len()];
    for (section, text) in function_infos(elf) {
        if let Some(info) = infos.get_mut(text as usize) {
            *info = Some(section);
        }
    }
    let mut kernels = Vec::new();
    for symbol in &symbols.list {
        if !symbol.is_function() || symbol.other & ENTRY == 0 || symbol.section == 0 {
            continue;
        }
        let index = symbol.section as usize;
        let params = match infos.get(index) {
            Some(&Some(section)) => params(elf.data(section)?),
            _ => None,
        };
        kernels.push(Kernel {
            name: name(elf, &symbols, symbol)?,
            params,
            // A kernel outside of all sections is of a damaged file.
            allocates: allocating.get(index).copied().unwrap_or(true),
        });
    }
    Ok(kernels)
}

fn name(elf: &Elf<'_>, symbols: &Symbols, symbol: &Symbol) -> Result<String, CodeError> {
    std::str::from_utf8(elf.symbol_name(symbols, symbol)?)
        .map(str::to_owned)
        .map_err(|_| CodeError::Malformed("a name is not UTF-8"))
}

/// The parameters that the attributes tell, `None` if these are damaged, of an unknown form, or
/// speak of parameters without describing all of them.
fn params(data: &[u8]) -> Option<Vec<Param>> {
    let mut total = 0;
    let mut found = Vec::new();
    for attribute in attributes(data) {
        let attribute = attribute?;
        let bytes = attribute.bytes;
        let size = match attribute.kind {
            KPARAM_INFO => u32_at(bytes, 8)? >> 18,
            KPARAM_INFO_V2 => u16_at(bytes, 8)?.into(),
            CBANK_PARAM_SIZE => {
                total = u32::from(attribute.value);
                continue;
            }
            _ => continue,
        };
        let offset = u32::from(u16_at(bytes, 6)?);
        found.push((u16_at(bytes, 4)?, Param { offset, size }));
    }
    found.sort_by_key(|(ordinal, _)| *ordinal);
    let mut end = 0;
    for (index, (ordinal, param)) in found.iter().enumerate() {
        if usize::from(*ordinal) != index || param.offset < end {
            return None;
        }
        end = param.offset + param.size;
    }
    (end == total).then(|| found.into_iter().map(|(_, param)| param).collect())
}
