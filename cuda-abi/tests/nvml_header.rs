//! The table of NVML's functions beside NVIDIA's `nvml.h`: no symbol missing, no signature off, no size wrong.
//!
//! Needs the header of CUDA 13.0 (`scripts/setup --build` puts it there) and a C compiler.

#![allow(clippy::expect_used, reason = "a test")]

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rekindle_cuda_abi::nvml::{self, Route, Table};

/// With this every version of a function is declared under its own name.
const ALL_VERSIONS: &str = "-DNVML_NO_UNVERSIONED_FUNC_DEFS";

fn header() -> PathBuf {
    let folder = std::env::var_os("REKINDLE_CUDA_INCLUDE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.toolchain/cuda/include"), PathBuf::from);
    let header = folder.join("nvml.h");
    assert!(header.exists(), "no nvml.h in {}: run scripts/setup --build", folder.display());
    header
}

fn table() -> Table {
    nvml::parse(nvml::TEXT).expect("the table parses")
}

/// Function names and types of parameters.
fn declarations() -> HashMap<String, Vec<String>> {
    let text =
        Command::new("gcc").args(["-E", "-P", ALL_VERSIONS, "-x", "c"]).arg(header()).output().expect("gcc runs");
    assert!(text.status.success(), "{}", String::from_utf8_lossy(&text.stderr));
    let text = String::from_utf8(text.stdout).expect("the header is text");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut all = HashMap::new();
    for (at, _) in text.match_indices(" nvml") {
        let rest = &text[at + 1..];
        let Some((name, rest)) = rest.split_once('(') else { continue };
        let name = name.trim_end();
        let Some((params, after)) = rest.split_once(')') else { continue };
        let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let returns = text[..at].ends_with("nvmlReturn_t") || text[..at].ends_with("const char*");
        if is_name && returns && after.trim_start().starts_with(';') {
            let types = params.split(',').map(|p| {
                let p = p.trim();
                let end = p.rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map_or(0, |i| i + 1);
                p[..end].chars().filter(|c| !c.is_whitespace()).collect::<String>()
            });
            let types = if params.trim() == "void" { Vec::new() } else { types.collect() };
            all.insert(name.to_owned(), types);
        }
    }
    all
}

#[test]
fn the_table_is_what_the_header_declares() {
    let header = declarations();
    assert!(header.len() > 390, "only {} declarations found", header.len());
    let table = table();
    let mut wrong = Vec::new();
    for (name, types) in &header {
        let Some(function) = table.find(name) else {
            wrong.push(format!("{name} is missing"));
            continue;
        };
        let spelled = |c_type: &str| c_type.chars().filter(|c| !c.is_whitespace()).collect::<String>();
        let ours: Vec<_> = function.params.iter().map(|p| spelled(&p.c_type)).collect();
        if ours != *types {
            wrong.push(format!("{name}({ours:?}), and the header has {types:?}"));
        }
    }
    wrong.extend(
        table
            .functions
            .iter()
            .filter(|f| !header.contains_key(&f.symbol))
            .map(|f| format!("{} is not there", f.symbol)),
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Sizes, and whether the first member is `version`, as the compiler has them.
#[test]
fn types_have_the_sizes_that_the_compiler_gives_them() {
    let table = table();
    let mut program = format!("#include <stdio.h>\n#include \"{}\"\nint main(void) {{\n", header().display());
    for (name, size) in &table.sizes {
        let _ = writeln!(program, "printf(\"{name} %zu\\n\", sizeof({name}));");
        if size.versioned {
            let _ = writeln!(
                program,
                "{{ {name} it; (void)it.version; _Static_assert(__builtin_offsetof({name}, version) == 0, \"{name}\"); }}"
            );
        }
    }
    program.push_str("return 0; }\n");
    let dir = std::env::temp_dir().join(format!("nvml-sizes-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let (source, built) = (dir.join("sizes.c"), dir.join("sizes"));
    std::fs::write(&source, program).expect("the program is written");
    let compiled = Command::new("gcc").args([ALL_VERSIONS, "-o"]).arg(&built).arg(&source).output().expect("gcc runs");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    let output = Command::new(&built).output().expect("the program runs");
    let _ = std::fs::remove_dir_all(&dir);
    let text = String::from_utf8(output.stdout).expect("text");
    let mut seen = 0;
    for line in text.lines() {
        let (name, size) = line.split_once(' ').expect("name and size");
        assert_eq!(table.sizes[name].bytes.to_string(), size, "{name}");
        seen += 1;
    }
    assert_eq!(seen, table.sizes.len());
}

/// A getter that can be asked changes nothing.
#[test]
fn nothing_that_can_be_asked_sets_anything() {
    for f in table().functions.iter().filter(|f| f.route == Route::Ask) {
        assert!(f.symbol.contains("Get") || f.symbol == "nvmlDeviceOnSameBoard", "{}", f.symbol);
    }
}
