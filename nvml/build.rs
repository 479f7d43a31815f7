//! Generates the exported symbols from the table of NVML's functions.

use std::{env, fs, path::Path};

use rekindle_cuda_abi::nvml;

fn main() {
    let table = match nvml::parse(nvml::TEXT) {
        Ok(table) => table,
        Err(error) => panic!("{error}"),
    };
    let out = env::var("OUT_DIR").unwrap_or_else(|_| panic!("cargo sets OUT_DIR"));
    if let Err(error) = fs::write(Path::new(&out).join("exports.rs"), nvml::exports(&table)) {
        panic!("exports.rs: {error}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
}
