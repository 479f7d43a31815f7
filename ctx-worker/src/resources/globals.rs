//! Variables of the client's code, as the driver has placed them.

use std::collections::HashMap;
use std::ffi::{CStr, CString};

use rekindle_images::InitialHash;

use crate::resources::units::Versioned;

/// A global variable of a module or library, at its place in a context.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) name: CString,
    pub(crate) address: u64,
    pub(crate) size: u64,
    /// The hash of the variable's content when it was placed, if the content has addresses and could be read
    /// (`initial.rs`).
    pub(crate) initial: Option<InitialHash>,
}

impl Placed {
    pub(crate) fn new(name: &CStr, (address, size): (u64, u64)) -> Self {
        Self { name: name.to_owned(), address, size, initial: None }
    }
}

/// The places of the globals of each module, or library in a context: (module or library, context).
pub(crate) type Globals = Versioned<HashMap<(u64, u64), Vec<Placed>>>;

/// Whether a range lies in one variable.
pub(crate) fn is_global(globals: &Globals, address: u64, bytes: u64) -> bool {
    globals
        .values()
        .flatten()
        .any(|g| address >= g.address && address.checked_add(bytes).is_some_and(|end| end <= g.address + g.size))
}
