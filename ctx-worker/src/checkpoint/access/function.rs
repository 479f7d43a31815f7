//! Functions: how their parameters are interpreted. The driver is asked once for each function.

use std::ffi::{CStr, c_char};
use std::ops::Range;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::Kind;

use super::client::ClientView;
use super::params::Class;
use super::signature;
use crate::resources::units::Unit;
use crate::session::objects::Object;

/// From a function to its kernel or module, to the library.
const STEPS: usize = 4;

/// A kernel has at most 32764 bytes of parameters.
const MOST_PARAMETERS: usize = 32 << 10;

/// The tracker's knowledge of a function.
pub(super) struct Function {
    /// No other function has had this number.
    pub(super) number: u64,
    /// The driver's handle. If it changes under the same handle of the client, the function is another one.
    pub(super) real: u64,
    /// The hash of the code that the function belongs to; empty where it is not known.
    pub(super) code: String,
    pub(super) name: String,
    pub(super) class: Class,
    /// Where pointers to constants lie in the parameters.
    pub(super) constant: Vec<Range<usize>>,
    /// The variables of the function's code, as of a version of the client's list of variables.
    pub(super) globals: (u64, Vec<Unit>),
}

/// Asks the driver for a function's name and the layout of its parameters.
pub(super) fn ask(client: &ClientView<'_>, object: &Object, wrong: &std::collections::HashSet<String>) -> Function {
    let driver = client.driver;
    let is_kernel = object.kind == Kind::Kernel;
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the out parameter is a local, the handle the driver's own.
    let told = unsafe {
        if is_kernel {
            (driver.cuKernelGetName)(&raw mut text, object.real)
        } else {
            (driver.cuFuncGetName)(&raw mut text, object.real)
        }
    };
    let name = if told != CUDA_SUCCESS || text.is_null() {
        String::from("of no known name")
    } else {
        // SAFETY: the driver gave a C string that lives as long as the code.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    let layout = layout(|i, offset, size| {
        // SAFETY: out parameters are locals of the caller, the handle is the driver's own.
        unsafe {
            if is_kernel {
                (driver.cuKernelGetParamInfo)(object.real, i, offset, size)
            } else {
                (driver.cuFuncGetParamInfo)(object.real, i, offset, size)
            }
        }
    });
    let (class, constant) = match layout {
        Some(_) if wrong.contains(&name) => (Class::Everything, Vec::new()),
        Some(layout) => classify(&name, &layout),
        None => (Class::Everything, Vec::new()),
    };
    Function {
        number: 0,
        real: object.real,
        code: code(client, object),
        name,
        class,
        constant,
        globals: (0, Vec::new()),
    }
}

/// Offsets and sizes of all parameters; `None` if the driver does not return them.
fn layout(info: impl Fn(usize, *mut usize, *mut usize) -> CUresult) -> Option<Vec<(usize, usize)>> {
    let mut layout = Vec::new();
    loop {
        let (mut offset, mut size) = (0, 0);
        match info(layout.len(), &raw mut offset, &raw mut size) {
            CUDA_SUCCESS if offset.checked_add(size)? <= MOST_PARAMETERS && layout.len() < MOST_PARAMETERS => {
                layout.push((offset, size));
            }
            CUDA_ERROR_INVALID_VALUE => return Some(layout),
            _ => return None,
        }
    }
}

/// How parameters of this layout are interpreted: by a signature, if the name has one that agrees with the layout.
fn classify(name: &str, layout: &[(usize, usize)]) -> (Class, Vec<Range<usize>>) {
    let constant = match signature::constant_pointers(name) {
        Some(constant) if constant.len() == layout.len() => constant,
        _ => return (Class::Values, Vec::new()),
    };
    let pointers = constant.iter().zip(layout).filter(|(constant, _)| **constant);
    if pointers.clone().any(|(_, (_, size))| *size != 8) {
        return (Class::Values, Vec::new());
    }
    (Class::Signature, pointers.map(|(_, (offset, size))| *offset..offset + size).collect())
}

/// The hash of the code that a function belongs to.
fn code(client: &ClientView<'_>, function: &Object) -> String {
    let mut at = function.parent;
    for _ in 0..STEPS {
        if let Some(image) = client.code.loaded.get(&at) {
            return image.hash.to_string();
        }
        at = client.session.objects.get(at).map_or(0, |object| object.parent);
    }
    String::new()
}

/// The variables of the code to which a function belongs, in all contexts.
pub(super) fn globals(client: &ClientView<'_>, handle: u64) -> Vec<Unit> {
    let mut units = Vec::new();
    let mut at = handle;
    for _ in 0..STEPS {
        let of_this = client.code.globals.iter().filter(|((parent, _), _)| *parent == at);
        units.extend(of_this.flat_map(|(_, placed)| placed.iter().map(|g| Unit::new(g.address, g.size))));
        match client.session.objects.get(at) {
            Some(object) if object.parent != 0 && object.kind != Kind::Library => at = object.parent,
            _ => break,
        }
    }
    units.sort();
    units.dedup();
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_counts_only_where_the_layout_agrees() {
        let name = "_Z3addPKfS0_Pfi";
        let layout = [(0, 8), (8, 8), (16, 8), (24, 4)];
        assert_eq!(classify(name, &layout), (Class::Signature, vec![0..8, 8..16]));
        assert_eq!(classify(name, &layout[..3]), (Class::Values, vec![]));
        assert_eq!(classify(name, &[(0, 4), (8, 8), (16, 8), (24, 4)]), (Class::Values, vec![]));
        assert_eq!(classify("add", &layout), (Class::Values, vec![]));
    }

    #[test]
    fn a_layout_ends_where_the_driver_knows_no_more() {
        let info = |i: usize, offset: *mut usize, size: *mut usize| {
            // SAFETY: locals of `layout`.
            unsafe { (*offset, *size) = (i * 8, 8) };
            if i < 3 { CUDA_SUCCESS } else { CUDA_ERROR_INVALID_VALUE }
        };
        assert_eq!(layout(info), Some(vec![(0, 8), (8, 8), (16, 8)]));
        assert_eq!(layout(|_, _, _| CUDA_ERROR_NOT_SUPPORTED), None);
        // A layout that never ends.
        assert_eq!(layout(|_, _, _| CUDA_SUCCESS), None);
    }
}
