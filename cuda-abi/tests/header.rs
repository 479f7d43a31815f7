//! The table beside NVIDIA's `cuda.h`: no symbol missing, no signature off.
//!
//! Needs the header of CUDA 13.0 (`scripts/setup --build` puts it there) and a C preprocessor.

#![allow(clippy::expect_used, reason = "a test")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use rekindle_cuda_abi::table::{self, Param};

fn include_folder() -> PathBuf {
    let found = std::env::var_os("REKINDLE_CUDA_INCLUDE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.toolchain/cuda/include"), PathBuf::from);
    assert!(found.join("cuda.h").exists(), "no cuda.h in {}: run scripts/setup --build", found.display());
    found
}

/// The header's declarations, in all its modes: current names, older versions, per-thread default streams.
fn declarations() -> HashMap<String, Vec<String>> {
    let include = include_folder();
    let modes = ["-DREKINDLE", "-D__CUDA_API_VERSION_INTERNAL", "-DCUDA_API_PER_THREAD_DEFAULT_STREAM"];
    let mut all: HashMap<String, Vec<String>> = HashMap::new();
    for mode in modes {
        let text = Command::new("gcc")
            .args(["-E", "-P", mode, "-x", "c", "-I"])
            .arg(&include)
            .arg(include.join("cuda.h"))
            .output()
            .expect("gcc runs");
        assert!(text.status.success(), "{}", String::from_utf8_lossy(&text.stderr));
        let text = String::from_utf8(text.stdout).expect("the header is text");
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for at in text.match_indices("CUresult cu").map(|m| m.0) {
            let rest = &text[at + "CUresult ".len()..];
            let Some((name, rest)) = rest.split_once('(') else { continue };
            let Some((params, after)) = rest.split_once(')') else { continue };
            if name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && after.trim_start().starts_with(';') {
                all.entry(name.to_string()).or_default().push(normal(params));
            }
        }
    }
    all
}

/// Types alone, spelled one way.
fn normal(params: &str) -> String {
    if params.trim() == "void" || params.trim().is_empty() {
        return String::new();
    }
    let types = params.split(',').map(|p| {
        let p = p.trim();
        let end = p.rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map_or(0, |i| i + 1);
        p[..end].chars().filter(|c| !c.is_whitespace()).collect::<String>()
    });
    types.collect::<Vec<_>>().join(",")
}

fn of_table(params: &[Param]) -> String {
    let types = params.iter().map(|p| p.c_type.chars().filter(|c| !c.is_whitespace()).collect::<String>());
    types.collect::<Vec<_>>().join(",")
}

#[test]
fn every_function_of_the_header_is_in_the_table_as_declared() {
    let header = declarations();
    assert!(header.len() > 600, "only {} declarations found", header.len());
    let table = table::parse(table::TEXT).expect("the table parses");
    let by_symbol: HashMap<_, _> = table.iter().map(|f| (f.symbol.as_str(), f)).collect();
    let mut wrong = Vec::new();
    for (name, signatures) in &header {
        match by_symbol.get(name.as_str()).map(|f| &f.params) {
            None => wrong.push(format!("{name} is missing")),
            Some(None) => wrong.push(format!("{name} has no parameters in the table")),
            Some(Some(params)) => {
                let ours = of_table(params);
                if !signatures.contains(&ours) {
                    wrong.push(format!("{name}({ours}), and the header has {signatures:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_the_header_does_not_declare_is_refused() {
    let header = declarations();
    let table = table::parse(table::TEXT).expect("the table parses");
    for f in table.iter().filter(|f| !header.contains_key(&f.symbol) && !header.contains_key(f.base())) {
        let profiler = f.symbol.starts_with("cuProfiler");
        assert!(profiler || f.params.is_none(), "{} is not in the header", f.symbol);
    }
}
