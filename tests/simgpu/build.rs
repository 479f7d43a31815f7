//! Exports every symbol of `libcuda.so.1`: those that `src/api` has a function for call it, the others refuse.

use std::collections::BTreeSet;
use std::path::Path;
use std::{env, fs, io};

use rekindle_cuda_abi::{generate, table};

/// Where the functions around graphs are, which the interposer has too.
const GRAPHS: &str = "../../graphs/src/api";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let table = table::parse(table::TEXT)?;
    let mut implemented = functions(Path::new("src/api"))?;
    implemented.extend(functions(Path::new(GRAPHS))?);
    for name in &implemented {
        if !table.iter().any(|f| f.symbol == *name) {
            return Err(format!("src/api has {name}, which is no driver function").into());
        }
    }
    let source = generate::exports(&table, |f| implemented.contains(&f.symbol).then_some("api"));
    fs::write(Path::new(&env::var("OUT_DIR")?).join("exports.rs"), source)?;
    println!("cargo::rerun-if-changed=src/api");
    println!("cargo::rerun-if-changed={GRAPHS}");
    // Programs record and look up this name. Look-ups answer with this library's functions, whoever else has some of
    // the same names. Streams have threads that outlive a dlclose.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1,-Bsymbolic,-z,nodelete");
    Ok(())
}

/// The driver functions that the files of a folder define.
fn functions(folder: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for file in fs::read_dir(folder)? {
        let text = fs::read_to_string(file?.path())?;
        for line in text.lines() {
            let function = line.strip_prefix("pub unsafe fn cu").or_else(|| line.strip_prefix("pub fn cu"));
            if let Some(rest) = function {
                let name = rest.split(['(', '<']).next().unwrap_or_default();
                names.insert(format!("cu{name}"));
            }
        }
    }
    Ok(names)
}
