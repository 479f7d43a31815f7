//! The modifiers of an opcode.

use super::linker::Refusable;
use crate::ast::{Opcode, Type};

/// Whether an opcode has a modifier.
pub(super) fn has(opcode: &Opcode, modifier: &str) -> bool {
    opcode.modifiers.iter().any(|m| m == modifier)
}

/// The types among an opcode's modifiers.
pub(super) fn types(opcode: &Opcode) -> Vec<Type> {
    opcode.modifiers.iter().filter_map(|m| Type::named(m)).collect()
}

/// The last modifier that is a type.
pub(super) fn last_type(opcode: &Opcode) -> Refusable<Type> {
    let found = opcode.modifiers.iter().rev().find_map(|m| Type::named(m));
    found.ok_or_else(|| "no type".to_owned())
}
