//! The table of NVML's functions, `nvml.table`: parsing it, and what a call's parameters are.
//!
//! Build scripts parse it to generate the exported symbols of our `libnvidia-ml.so.1`; the daemon, to check what a
//! process asks before it reaches the machine's own library.

use std::collections::HashMap;
use std::fmt::Write;

use crate::table::{Param, TableError, parse_param};

/// The table's text, as built into this crate.
pub const TEXT: &str = include_str!("../nvml.table");

/// The most bytes that a call writes through one pointer; more is refused.
pub const MAX_BUFFER: usize = 64 << 10;

/// How a call is answered. The head of `nvml.table` explains each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// A function of our library answers.
    Local,
    /// The machine's own library answers.
    Ask,
    /// `NVML_ERROR_NOT_SUPPORTED`.
    Refused,
}

/// The kind of a parameter of an `ask` function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// An `nvmlDevice_t`.
    Device,
    /// A number.
    Number,
    /// A pointer to so many bytes, which the call writes.
    Bytes(usize),
    /// A pointer to a structure whose first word is its version, which says its size. The call reads and writes it.
    Versioned,
    /// A pointer to as many elements, of `each` bytes, as the number in parameter `count` says. The call reads and writes
    /// them.
    Many {
        /// The place of the parameter with their number.
        count: usize,
        /// Bytes of one.
        each: usize,
    },
}

/// A function of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// The exported symbol.
    pub symbol: String,
    /// How it is answered.
    pub route: Route,
    /// Its parameters.
    pub params: Vec<Param>,
}

/// A type that is written through a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Its bytes in the header that the table was made from.
    pub bytes: usize,
    /// Whether it begins with its version.
    pub versioned: bool,
}

/// The whole table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// The functions, by their names' order.
    pub functions: Vec<Function>,
    /// The types, by name.
    pub sizes: HashMap<String, Size>,
}

/// Parses a table in the form that the head of `nvml.table` describes.
pub fn parse(text: &str) -> Result<Table, TableError> {
    let mut table = Table::default();
    for (index, line) in text.lines().enumerate() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        parse_line(line, &mut table).map_err(|what| TableError { line: index + 1, what })?;
    }
    for f in table.functions.iter().filter(|f| f.route == Route::Ask) {
        if table.shapes(f).is_none() {
            let what = format!("{} has a parameter that is no device, number or sized pointer", f.symbol);
            return Err(TableError { line: 0, what });
        }
    }
    Ok(table)
}

fn parse_line(line: &str, table: &mut Table) -> Result<(), String> {
    let columns: Vec<_> = line.split('|').map(str::trim).collect();
    let route = match columns.as_slice() {
        ["size", name, bytes] => {
            let (bytes, versioned) =
                bytes.split_once(' ').map_or((*bytes, false), |(b, word)| (b, word == "versioned"));
            let bytes = bytes.parse().map_err(|_| format!("the size of {name} is no number"))?;
            table.sizes.insert((*name).into(), Size { bytes, versioned });
            return Ok(());
        }
        ["local", _] => Route::Local,
        ["ask", _] => Route::Ask,
        ["refused", _] => Route::Refused,
        _ => return Err("expected ROUTE | SYMBOL(PARAMETERS), or size | TYPE | BYTES".into()),
    };
    let (symbol, rest) = columns[1].split_once('(').ok_or("no parameter list")?;
    let params = match rest.strip_suffix(')').ok_or("parameter list does not end")? {
        "void" => Vec::new(),
        list => list.split(',').map(|p| parse_param(p.trim())).collect::<Result<_, _>>()?,
    };
    table.functions.push(Function { symbol: symbol.into(), route, params });
    Ok(())
}

impl Table {
    /// A function by its symbol.
    pub fn find(&self, symbol: &str) -> Option<&Function> {
        self.functions.iter().find(|f| f.symbol == symbol)
    }

    /// The parameters of a function that can be asked; none where one is something else.
    pub fn shapes(&self, f: &Function) -> Option<Vec<Shape>> {
        let shape = |(n, p): (usize, &Param)| self.shape(f, n, p);
        f.params.iter().enumerate().map(shape).collect()
    }

    fn shape(&self, f: &Function, n: usize, p: &Param) -> Option<Shape> {
        let beside = |at: Option<usize>, name: &str| at.filter(|at| f.params.get(*at).is_some_and(|p| p.name == name));
        let Some(pointee) = p.c_type.strip_suffix('*').map(str::trim) else {
            return Some(if p.c_type == "nvmlDevice_t" { Shape::Device } else { Shape::Number });
        };
        let many = |at, each| Some(Shape::Many { count: at?, each });
        match pointee {
            "char" => many(beside(Some(n + 1), "length"), 1),
            "unsigned long" if p.name == "cpuSet" => many(beside(n.checked_sub(1), "cpuSetSize"), 8),
            "unsigned long" if p.name == "nodeSet" => many(beside(n.checked_sub(1), "nodeSetSize"), 8),
            "nvmlFieldValue_t" => many(beside(n.checked_sub(1), "valuesCount"), self.sizes.get(pointee)?.bytes),
            "unsigned int" | "int" => Some(Shape::Bytes(4)),
            "unsigned long long" | "unsigned long" => Some(Shape::Bytes(8)),
            other => {
                let size = self.sizes.get(other)?;
                Some(if size.versioned { Shape::Versioned } else { Shape::Bytes(size.bytes) })
            }
        }
    }
}

/// The size of a versioned structure, by its first word; none where no structure is of that size.
pub fn versioned_size(version: u32) -> Option<usize> {
    let size = (version & 0x00ff_ffff) as usize;
    (4..=MAX_BUFFER).contains(&size).then_some(size)
}

/// The Rust type of a C type of `nvml.h`. Enumerations are `u32`, devices `usize`, structures opaque.
fn rust_type(c: &str) -> &'static str {
    match c {
        "nvmlDevice_t" => "usize",
        "int" => "i32",
        "unsigned long long" => "u64",
        "char *" => "*mut c_char",
        "const char *" => "*const c_char",
        "int *" => "*mut i32",
        "unsigned int *" => "*mut u32",
        "nvmlDevice_t *" => "*mut usize",
        pointer if pointer.ends_with('*') => "*mut c_void",
        _ => "u32",
    }
}

/// Every exported symbol. The crate has `api::SYMBOL` for each `local` one, `entry(closure) -> u32`, which keeps a panic
/// from unwinding into C, `ask(symbol, shapes, values) -> u32` and `refuse(symbol) -> u32`.
pub fn exports(table: &Table) -> String {
    let mut out = String::from("// Generated from nvml.table.\n");
    for f in &table.functions {
        let name = &f.symbol;
        let names: Vec<_> = (0..f.params.len()).map(|n| format!("a{n}")).collect();
        let signature: Vec<_> =
            f.params.iter().zip(&names).map(|(p, name)| format!("{name}: {}", rust_type(&p.c_type))).collect();
        let signature = signature.join(", ");
        let body = match f.route {
            Route::Local if name == "nvmlErrorString" => {
                let _ = writeln!(
                    out,
                    "#[unsafe(no_mangle)] pub extern \"C\" fn {name}(a0: u32) -> *const c_char {{ crate::api::{name}(a0) }}"
                );
                continue;
            }
            Route::Local => format!("crate::entry(|| unsafe {{ crate::api::{name}({}) }})", names.join(", ")),
            Route::Ask => {
                let shapes = table.shapes(f).unwrap_or_default();
                let values: Vec<_> = names.iter().map(|name| format!("{name} as u64")).collect();
                let shapes: Vec<_> = shapes.iter().map(|s| format!("Shape::{s:?}")).collect();
                format!(
                    "crate::entry(|| unsafe {{ crate::ask(\"{name}\", &[{}], &[{}]) }})",
                    shapes.join(", "),
                    values.join(", ")
                )
            }
            Route::Refused => {
                let _ = writeln!(
                    out,
                    "#[unsafe(no_mangle)] pub extern \"C\" fn {name}() -> u32 {{ crate::entry(|| crate::refuse(\"{name}\")) }}"
                );
                continue;
            }
        };
        let _ =
            writeln!(out, "#[unsafe(no_mangle)] pub unsafe extern \"C\" fn {name}({signature}) -> u32 {{ {body} }}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_parses_and_lists_every_function_once() {
        let table = parse(TEXT).unwrap();
        let mut symbols: Vec<_> = table.functions.iter().map(|f| &f.symbol).collect();
        let all = symbols.len();
        symbols.dedup();
        assert_eq!((all, symbols.len()), (398, 398));
    }

    #[test]
    fn parameters_have_the_shapes_that_their_types_say() {
        let table = parse(TEXT).unwrap();
        let shapes = |name: &str| table.shapes(table.find(name).unwrap()).unwrap();
        assert_eq!(shapes("nvmlDeviceGetPowerUsage"), [Shape::Device, Shape::Bytes(4)]);
        assert_eq!(shapes("nvmlDeviceGetP2PStatus"), [Shape::Device, Shape::Device, Shape::Number, Shape::Bytes(4)]);
        let text = Shape::Many { count: 2, each: 1 };
        assert_eq!(shapes("nvmlDeviceGetVbiosVersion"), [Shape::Device, text, Shape::Number]);
        let values = Shape::Many { count: 1, each: 40 };
        assert_eq!(shapes("nvmlDeviceGetFieldValues"), [Shape::Device, Shape::Number, values]);
        assert_eq!(shapes("nvmlDeviceGetGpuFabricInfoV"), [Shape::Device, Shape::Versioned]);
    }

    #[test]
    fn bad_lines_are_named() {
        assert_eq!(parse("\nnowhere | nvmlInit(void)").unwrap_err().line, 2);
        assert!(parse("size | nvmlX_t | many").is_err());
        // A pointer to what has no size.
        assert!(parse("ask | nvmlDeviceGetX(nvmlDevice_t device, nvmlX_t *x)").is_err());
    }
}
