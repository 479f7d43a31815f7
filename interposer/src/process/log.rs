//! What the interposer says on stderr, which belongs to the application: one line when CUDA cannot start or the worker
//! dies; with `REKINDLE_LOG` set also which calls were refused, once each; and with `REKINDLE_LOG=errors` every call that
//! does not succeed, with its code.

use std::collections::HashSet;
use std::sync::{Mutex, OnceLock};

use rekindle_cuda_abi::types::*;
use rekindle_wire::stderr;

/// A line that the user must see.
pub(crate) fn error(line: &str) {
    stderr::line(&format!("rekindle: {line}"));
}

/// Whether `REKINDLE_LOG` asks for more.
fn wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os("REKINDLE_LOG").is_some())
}

/// Notes that a call has not succeeded. What is no error is not noted: that something is not done yet.
#[cold]
pub(crate) fn failed(symbol: &'static str, code: CUresult) {
    static ERRORS: OnceLock<bool> = OnceLock::new();
    if *ERRORS.get_or_init(|| std::env::var_os("REKINDLE_LOG").is_some_and(|v| v == "errors"))
        && code != CUDA_ERROR_NOT_READY
    {
        error(&format!("{symbol} answers {code}"));
    }
}

/// A line for who has asked for more.
pub(crate) fn note(line: &str) {
    if wanted() {
        error(line);
    }
}

/// Notes that a function is not implemented.
pub(crate) fn refused(symbol: &'static str) {
    static SEEN: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);
    if !wanted() {
        return;
    }
    if let Ok(mut seen) = SEEN.lock()
        && seen.get_or_insert_default().insert(symbol)
    {
        error(&format!("refused {symbol}: not supported"));
    }
}
