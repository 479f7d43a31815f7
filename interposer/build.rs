//! Generates the exported symbols and the encoders of generated calls from the table of driver functions.

use rekindle_cuda_abi::{build_script, generate, table};

fn main() {
    let table = build_script::driver_table();
    // A line that only travels is implemented by its encoder alone.
    let module = |f: &table::Function| match f.route {
        route if route.by_hand() => Some("api"),
        route if route.travels() => Some("call::remote"),
        _ => None,
    };
    build_script::write("exports.rs", &generate::exports(&table, module));
    build_script::write("encoders.rs", &generate::encoders(&table));
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // The library registers handlers for fork; it must stay where they point.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
