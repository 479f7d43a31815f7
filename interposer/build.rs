//! Generates the exported symbols and the encoders of generated calls from the table of driver functions.

use std::{env, fs, path::Path};

use rekindle_cuda_abi::{generate, table};

fn main() {
    let table = match table::parse(table::TEXT) {
        Ok(table) => table,
        Err(error) => panic!("{error}"),
    };
    let out = env::var("OUT_DIR").unwrap_or_else(|_| panic!("cargo sets OUT_DIR"));
    let write = |name: &str, text: String| {
        if let Err(error) = fs::write(Path::new(&out).join(name), text) {
            panic!("{name}: {error}");
        }
    };
    // A line that only travels is implemented by its encoder alone.
    let module = |f: &table::Function| match f.route {
        route if route.by_hand() => Some("api"),
        route if route.travels() => Some("call::remote"),
        _ => None,
    };
    write("exports.rs", generate::exports(&table, module));
    write("encoders.rs", generate::encoders(&table));
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // The library registers handlers for fork; it must stay where they point.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
