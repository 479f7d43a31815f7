//! CRIU's log.

use std::ffi::{CString, c_char, c_uint};

use crate::symbols;

/// CRIU's log levels.
#[derive(Clone, Copy, Debug)]
pub enum Level {
    /// The reason why a dump or a restore fails.
    Error = 1,
    /// CRIU shows this level by default.
    Warn = 2,
    /// CRIU shows this level with `-v3`.
    Info = 3,
}

/// Writes one line, whatever characters the text has: some of it comes from the daemon.
pub fn write(level: Level, text: &str) {
    // runc and others look for "Error (" in the log to explain a failure.
    let prefix = match level {
        Level::Error => "Error (rekindle): ",
        Level::Warn => "Warn  (rekindle): ",
        Level::Info => "rekindle: ",
    };
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    // At this point `text` has no NUL.
    let Ok(line) = CString::new(format!("{prefix}{text}\n")) else {
        return;
    };
    // SAFETY: the declaration of CRIU's criu/include/log.h, where the level is unsigned.
    let print = unsafe { symbols::function::<unsafe extern "C" fn(c_uint, *const c_char, ...)>(c"print_on_level") };
    if let Some(print) = print {
        // SAFETY: "%s" and one string that ends in NUL; CRIU copies it.
        unsafe { print(level as c_uint, c"%s".as_ptr(), line.as_ptr()) }
    }
}

/// Writes the reason for which a dump or a restore fails.
pub fn error(text: &str) {
    write(Level::Error, text);
}

/// Writes a line that an operator should read.
pub fn warn(text: &str) {
    write(Level::Warn, text);
}

/// Writes a line about a normal event.
pub fn info(text: &str) {
    write(Level::Info, text);
}
