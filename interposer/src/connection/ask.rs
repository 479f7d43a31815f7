//! Questions to the daemon: a connection, the question, its answer. What is asked can be asked again.

use std::time::Duration;

use rekindle_wire::control::{DEFAULT_SOCKET, Opening, Reply, Request};
use rekindle_wire::{descriptor, frame};

use crate::process::log;

/// How long a daemon that is not there is looked for, since it may be starting anew: so often, so far apart. Also a process
/// that is dumped in between finds the connection closed.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(100);

/// Asks; None where there is no answer, which is said to who has asked for more.
pub(crate) fn ask(request: &Request) -> Option<Reply> {
    let path = std::env::var("REKINDLE_SOCKET").unwrap_or_else(|_| DEFAULT_SOCKET.into());
    for _ in 0..TRIES {
        match once(&path, request) {
            Some(Reply::Failed(failure)) => {
                log::note(&failure.reason);
                return None;
            }
            Some(reply) => return Some(reply),
            None => std::thread::sleep(PAUSE),
        }
    }
    log::note(&format!("the daemon at {path} does not answer"));
    None
}

fn once(path: &str, request: &Request) -> Option<Reply> {
    let socket = descriptor::connect(path).ok()?;
    frame::send(&socket, &Opening::new(request).ok()?, &[], &[]).ok()?;
    frame::receive(&socket).ok().map(|message| message.body)
}
