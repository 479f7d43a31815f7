//! Generates the exported symbols from the table of NVML's functions.

use rekindle_cuda_abi::{build_script, nvml};

fn main() {
    let table = match nvml::parse(nvml::TEXT) {
        Ok(table) => table,
        Err(error) => panic!("{error}"),
    };
    build_script::write("exports.rs", &nvml::exports(&table));
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
}
