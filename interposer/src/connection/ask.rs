//! Questions to the daemon, each on a connection of its own. A question has no effect, so it can be repeated.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rekindle_wire::control::{DEFAULT_SOCKET, Opening, Reply, Request};
use rekindle_wire::descriptor;
use rekindle_wire::frame::{self, Message};

use crate::process::log;

/// How many times a question is sent, and the time between two attempts: the daemon may be restarting, and after a dump the
/// restored process finds the connection closed.
const ATTEMPTS: u32 = 50;
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Asks the daemon. `None` if it does not answer or fails; `REKINDLE_LOG` shows the reason.
pub(crate) fn ask(request: &Request) -> Option<Reply> {
    answer(request).map(|message| message.body)
}

/// Asks the daemon for a file.
pub(crate) fn for_file(request: &Request) -> Option<OwnedFd> {
    answer(request)?.fds.pop()
}

fn answer(request: &Request) -> Option<Message<Reply>> {
    let path = std::env::var("REKINDLE_SOCKET").unwrap_or_else(|_| DEFAULT_SOCKET.into());
    for _ in 0..ATTEMPTS {
        match once(&path, request) {
            Some(Message { body: Reply::Failed(failure), .. }) => {
                log::note(&failure.reason);
                return None;
            }
            Some(reply) => return Some(reply),
            None => std::thread::sleep(RETRY_INTERVAL),
        }
    }
    log::note(&format!("the daemon at {path} does not answer"));
    None
}

fn once(path: &str, request: &Request) -> Option<Message<Reply>> {
    let socket = descriptor::connect(path).ok()?;
    frame::send(&socket, &Opening::new(request).ok()?, &[], &[]).ok()?;
    frame::receive(&socket).ok()
}
