//! A question to the daemon: a connection, the question, its answer.

use std::io;
use std::time::Duration;

use rekindle_wire::control::{DEFAULT_SOCKET, FailureKind, Opening, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use rekindle_wire::{descriptor, stderr};

use crate::result::*;

/// How long a daemon that is not there is looked for, since it may be starting anew: so often, so far apart.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(100);

/// What came of one try.
enum Tried {
    Answered(Reply),
    /// Nobody listens, or the connection closed in the middle: the daemon has ended, or this process was frozen there
    /// and has been restored.
    Gone,
    Failed(u32),
}

/// Asks, and waits for a daemon that has just ended to be there again.
pub(crate) fn ask(request: &Request) -> Result<Reply, u32> {
    ask_within(request, TRIES)
}

/// Asks the daemon that is there.
pub(crate) fn ask_at_once(request: &Request) -> Result<Reply, u32> {
    // A second try, for a connection that a checkpoint cut.
    ask_within(request, 2)
}

fn ask_within(request: &Request, tries: u32) -> Result<Reply, u32> {
    for attempt in 1..=tries {
        match attempt_one(request) {
            Tried::Answered(Reply::Failed(failure)) => {
                note(&failure.reason);
                let version = failure.kind == FailureKind::Version;
                return Err(if version { ERROR_LIB_RM_VERSION_MISMATCH } else { ERROR_UNKNOWN });
            }
            Tried::Answered(reply) => return Ok(reply),
            Tried::Failed(error) => return Err(error),
            Tried::Gone if attempt < tries => std::thread::sleep(PAUSE),
            Tried::Gone => {}
        }
    }
    Err(ERROR_DRIVER_NOT_LOADED)
}

fn attempt_one(request: &Request) -> Tried {
    let path = std::env::var("REKINDLE_SOCKET").unwrap_or_else(|_| DEFAULT_SOCKET.into());
    let socket = match descriptor::connect(&path) {
        Ok(socket) => socket,
        Err(error) => {
            note(&format!("cannot reach the Rekindle daemon at {path} ({error})"));
            return match error.kind() {
                io::ErrorKind::PermissionDenied => Tried::Failed(ERROR_NO_PERMISSION),
                _ => Tried::Gone,
            };
        }
    };
    let Ok(opening) = Opening::new(request) else { return Tried::Failed(ERROR_UNKNOWN) };
    let answer = frame::send(&socket, &opening, &[], &[]).and_then(|()| frame::receive::<Reply>(&socket));
    match answer {
        Ok(message) => Tried::Answered(message.body),
        Err(FrameError::Closed | FrameError::Io(_)) => Tried::Gone,
        Err(error) => {
            note(&format!("the daemon at {path} answered in a way that this version does not understand ({error})"));
            Tried::Failed(ERROR_LIB_RM_VERSION_MISMATCH)
        }
    }
}

/// A line for who has asked for more: stderr belongs to the application.
fn note(line: &str) {
    if std::env::var_os("REKINDLE_LOG").is_some() {
        stderr::line(&format!("rekindle: NVML: {line}"));
    }
}
