//! For build scripts that generate code from the table of driver functions. A failure ends the build with a message.

use std::path::Path;
use std::{env, fs};

use crate::table::{self, Function};

/// The functions of `driver.table`.
///
/// # Panics
/// Where a line of the table is wrong.
pub fn driver_table() -> Vec<Function> {
    match table::parse(table::TEXT) {
        Ok(table) => table,
        Err(error) => panic!("{error}"),
    }
}

/// Writes a generated file into cargo's `OUT_DIR`.
///
/// # Panics
/// Outside of a build script, or where the file cannot be written.
pub fn write(name: &str, text: &str) {
    let out = env::var("OUT_DIR").unwrap_or_else(|_| panic!("cargo sets OUT_DIR"));
    if let Err(error) = fs::write(Path::new(&out).join(name), text) {
        panic!("{name}: {error}");
    }
}
