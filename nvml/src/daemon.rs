//! Questions to the daemon, each on a connection of its own.

use std::io;
use std::time::Duration;

use rekindle_wire::control::{DEFAULT_SOCKET, FailureKind, Opening, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use rekindle_wire::{descriptor, stderr};

use crate::result::*;

/// How many times a question is sent, and the time between two attempts: the daemon may be restarting.
const ATTEMPTS: u32 = 20;
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// The result of one attempt.
enum Attempt {
    Answered(Box<Reply>),
    /// No daemon listens, or the connection closed before the answer: the daemon has ended, or this process was dumped
    /// meanwhile and is restored now.
    Gone,
    Failed(u32),
}

/// Asks the daemon, and waits for one that is restarting.
pub(crate) fn ask(request: &Request) -> Result<Reply, u32> {
    ask_within(request, ATTEMPTS)
}

/// Asks the daemon without waiting for one that is restarting.
pub(crate) fn ask_at_once(request: &Request) -> Result<Reply, u32> {
    // The second attempt is for a connection that a checkpoint has closed.
    ask_within(request, 2)
}

fn ask_within(request: &Request, attempts: u32) -> Result<Reply, u32> {
    for attempt in 1..=attempts {
        match attempt_one(request) {
            Attempt::Answered(reply) => return accepted(*reply),
            Attempt::Failed(error) => return Err(error),
            Attempt::Gone if attempt < attempts => std::thread::sleep(RETRY_INTERVAL),
            Attempt::Gone => {}
        }
    }
    Err(ERROR_DRIVER_NOT_LOADED)
}

fn accepted(reply: Reply) -> Result<Reply, u32> {
    let Reply::Failed(failure) = reply else { return Ok(reply) };
    note(&failure.reason);
    let version = failure.kind == FailureKind::Version;
    Err(if version { ERROR_LIB_RM_VERSION_MISMATCH } else { ERROR_UNKNOWN })
}

fn attempt_one(request: &Request) -> Attempt {
    let path = std::env::var("REKINDLE_SOCKET").unwrap_or_else(|_| DEFAULT_SOCKET.into());
    let socket = match descriptor::connect(&path) {
        Ok(socket) => socket,
        Err(error) => {
            note(&format!("cannot reach the Rekindle daemon at {path} ({error})"));
            return match error.kind() {
                io::ErrorKind::PermissionDenied => Attempt::Failed(ERROR_NO_PERMISSION),
                _ => Attempt::Gone,
            };
        }
    };
    let Ok(opening) = Opening::new(request) else { return Attempt::Failed(ERROR_UNKNOWN) };
    let answer = frame::send(&socket, &opening, &[], &[]).and_then(|()| frame::receive::<Reply>(&socket));
    match answer {
        Ok(message) => Attempt::Answered(Box::new(message.body)),
        Err(FrameError::Closed | FrameError::Io(_)) => Attempt::Gone,
        Err(error) => {
            note(&format!("the daemon at {path} answered in a way that this version does not understand ({error})"));
            Attempt::Failed(ERROR_LIB_RM_VERSION_MISMATCH)
        }
    }
}

/// Writes a line if `REKINDLE_LOG` is set: stderr belongs to the application.
fn note(line: &str) {
    if std::env::var_os("REKINDLE_LOG").is_some() {
        stderr::line(&format!("rekindle: NVML: {line}"));
    }
}
