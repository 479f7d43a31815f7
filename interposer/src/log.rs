//! What the interposer says on stderr, which belongs to the application: one line when CUDA cannot start or the worker
//! dies, and with `REKINDLE_LOG` set also which calls were refused, once each.

use std::collections::HashSet;
use std::sync::{Mutex, OnceLock};

/// A line that the user must see.
pub(crate) fn error(line: &str) {
    eprintln!("rekindle: {line}");
}

/// Whether `REKINDLE_LOG` asks for more.
fn wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| std::env::var_os("REKINDLE_LOG").is_some())
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
        eprintln!("rekindle: refused {symbol}: not supported");
    }
}
