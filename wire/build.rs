//! Generates what each call of the driver looks like on the ring, from the table of driver functions.

use std::{env, fs, path::Path};

use rekindle_cuda_abi::{generate, table};

fn main() {
    let table = match table::parse(table::TEXT) {
        Ok(table) => table,
        Err(error) => panic!("{error}"),
    };
    let out = env::var("OUT_DIR").unwrap_or_else(|_| panic!("cargo sets OUT_DIR"));
    let file = Path::new(&out).join("encodings.rs");
    if let Err(error) = fs::write(&file, generate::encodings(&table)) {
        panic!("{}: {error}", file.display());
    }
    println!("cargo::rerun-if-changed=build.rs");
}
