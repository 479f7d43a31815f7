//! Lines on stderr, which belongs to the application: one when CUDA cannot start or the worker dies. If `REKINDLE_LOG` is
//! set, also one for each function that was refused; with `REKINDLE_LOG=errors`, one for each call that fails, with its
//! result.

use std::collections::HashSet;
use std::sync::{Mutex, OnceLock};

use rekindle_cuda_abi::logs::Logs;
use rekindle_cuda_abi::refusals;
use rekindle_cuda_abi::types::*;
use rekindle_wire::stderr;

/// Writes a line that the user must see.
pub(crate) fn error(line: &str) {
    stderr::line(&format!("rekindle: {line}"));
}

/// Whether `REKINDLE_LOG` is set.
fn is_verbose() -> bool {
    static VERBOSE: OnceLock<bool> = OnceLock::new();
    *VERBOSE.get_or_init(|| std::env::var_os("REKINDLE_LOG").is_some())
}

/// Logs a call that has failed, unless its result only says that something is not ready yet.
#[cold]
pub(crate) fn failed(symbol: &'static str, code: CUresult) {
    static ERRORS: OnceLock<bool> = OnceLock::new();
    if *ERRORS.get_or_init(|| std::env::var_os("REKINDLE_LOG").is_some_and(|v| v == "errors"))
        && code != CUDA_ERROR_NOT_READY
    {
        error(&format!("{symbol} returns {code}"));
    }
}

/// Writes a line if `REKINDLE_LOG` is set.
pub(crate) fn note(line: &str) {
    if is_verbose() {
        error(line);
    }
}

/// What programs can read of the log ([`rekindle_cuda_abi::logs`]).
pub(crate) static LOGS: Logs = Logs::new();

/// Logs that a function is not implemented.
#[cold]
pub(crate) fn unsupported(symbol: &'static str) {
    let reason = refusals::why(symbol).map(|reason| format!(": {reason}")).unwrap_or_default();
    LOGS.write(&format!("Rekindle does not support {symbol}{reason}"));
    note_once(symbol);
}

/// Logs that a form of a function is not implemented.
#[cold]
pub(crate) fn refused(what: &'static str) {
    LOGS.write(&format!("Rekindle does not support {what}"));
    note_once(what);
}

/// Writes a line for each thing that is refused, if `REKINDLE_LOG` is set.
fn note_once(symbol: &'static str) {
    static SEEN: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);
    if !is_verbose() {
        return;
    }
    if let Ok(mut seen) = SEEN.lock()
        && seen.get_or_insert_default().insert(symbol)
    {
        error(&format!("refused {symbol}: not supported"));
    }
}
