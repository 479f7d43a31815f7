//! The recorded answers of each driver call, by the cases of `tests/conformance/cases`.
//!
//! ```text
//!   cases/FAMILY.c ── built ── run on a driver, and under Rekindle ── expected/FAMILY.txt, differences
//!                                                                         │
//!                            driver.table ── every call that is declared ─┴─ is answered there (tests/coverage.rs)
//! ```
//!
//! A line is `CALL, CASE: ANSWER`. An answer is a result code of the driver, or a value.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

/// The kinds of answers that are recorded for one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// There is a case in which the call succeeds.
    pub success: bool,
    /// There is a case in which the call fails with an error code.
    pub failure: bool,
}

/// Reads all recorded answers, and returns for each call the kinds of answers.
///
/// # Errors
/// The files cannot be read.
pub fn recorded() -> io::Result<BTreeMap<String, Shown>> {
    let mut calls = BTreeMap::new();
    for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("expected"))? {
        add(&mut calls, &fs::read_to_string(entry?.path())?);
    }
    Ok(calls)
}

/// Adds the answers of one family.
pub fn add(calls: &mut BTreeMap<String, Shown>, answers: &str) {
    for line in answers.lines() {
        let Some((call, rest)) = line.split_once(", ") else { continue };
        let shown = calls.entry(call.to_owned()).or_default();
        let answer = rest.rsplit_once(": ").map_or(rest, |(_, answer)| answer);
        match answer.split_whitespace().next() {
            // Not an error: the work is not done yet.
            Some(code) if code.starts_with("CUDA_ERROR_") && code != "CUDA_ERROR_NOT_READY" => shown.failure = true,
            _ => shown.success = true,
        }
    }
}
