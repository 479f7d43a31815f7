//! Attributes of a cubin's functions: the sections `.nv.info.FUNCTION`.

use super::elf::{Elf, Section, u16_at};

/// `SHT_CUDA_INFO`, the type of `.nv.info` and `.nv.info.FUNCTION`.
const CUDA_INFO: u32 = 0x7000_0000;
/// `EIATTR_EXTERNS`.
pub(super) const EXTERNS: u8 = 0x0f;

/// The sections with the attributes of functions, each with the number of its text section.
pub(super) fn function_infos<'e>(elf: &'e Elf<'_>) -> impl Iterator<Item = (&'e Section, u32)> {
    elf.sections
        .iter()
        // The section of the whole module has no function.
        .filter(|section| section.kind == CUDA_INFO && section.info != 0)
        .map(|section| (section, section.info))
}

/// An attribute of a function.
pub(super) struct Attribute<'a> {
    /// The attribute's kind.
    pub(super) kind: u8,
    /// The value in the attribute's own four bytes.
    pub(super) value: u16,
    /// The bytes after these.
    pub(super) bytes: &'a [u8],
}

/// Splits a section of attributes. The last one is `None` where the rest cannot be understood.
pub(super) fn attributes(mut data: &[u8]) -> impl Iterator<Item = Option<Attribute<'_>>> {
    std::iter::from_fn(move || {
        if data.is_empty() {
            return None;
        }
        let split = split_attribute(data);
        data = split.as_ref().map_or(&[], |(_, rest)| rest);
        Some(split.map(|(attribute, _)| attribute))
    })
}

/// The first attribute, and what follows it.
fn split_attribute(data: &[u8]) -> Option<(Attribute<'_>, &[u8])> {
    let (&format, &kind) = (data.first()?, data.get(1)?);
    let value = u16_at(data, 2)?;
    let size = match format {
        1..=3 => 0,
        4 => usize::from(value),
        _ => return None,
    };
    let (bytes, rest) = data.get(4..)?.split_at_checked(size)?;
    Some((Attribute { kind, value, bytes }, rest))
}
