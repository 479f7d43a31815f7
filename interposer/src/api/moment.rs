//! The optional interface for applications, see `include/rekindle.h`.

use std::ffi::c_int;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use rekindle_wire::control::{DEFAULT_SOCKET, Opening, Reply, Request};
use rekindle_wire::{descriptor, frame};

use crate::state::client::{self, Client};

/// How long a caller waits for the daemon. The daemon answers when the worker is quiesced, or earlier if that takes long:
/// processes may wait for each other, so the caller must continue.
const TIMEOUT: Duration = Duration::from_secs(2);

/// The application can be checkpointed here. Returns 1 if a checkpoint waits for that and begins now; otherwise 0, after
/// reading one word of memory.
#[unsafe(no_mangle)]
#[allow(unreachable_pub, reason = "exported to applications")]
pub extern "C" fn rekindle_checkpoint() -> c_int {
    std::panic::catch_unwind(|| client::get().is_ok_and(|client| is_awaited(client) && announce(client)))
        .unwrap_or(false)
        .into()
}

fn is_awaited(client: &Client) -> bool {
    client.connection.shared.header().moment.load(Acquire) != 0
}

fn announce(client: &Client) -> bool {
    // Of several threads, one announces the moment, until the worker sets the word again.
    if client.connection.shared.header().moment.swap(0, Release) == 0 {
        return false;
    }
    let path = std::env::var("REKINDLE_SOCKET").unwrap_or_else(|_| DEFAULT_SOCKET.into());
    let Some(socket) = send_moment(&path) else {
        // The checkpoint may succeed at the next moment.
        client.connection.shared.header().moment.store(1, Release);
        return false;
    };
    match frame::receive::<Reply>(&socket) {
        Ok(message) => message.body == Reply::Moment { awaited: true },
        // The checkpoint has begun and takes longer than the timeout, or this process has been restored meanwhile.
        Err(_) => true,
    }
}

fn send_moment(path: &str) -> Option<UnixStream> {
    let socket = descriptor::connect(path).ok()?;
    socket.set_read_timeout(Some(TIMEOUT)).ok()?;
    frame::send(&socket, &Opening::new(&Request::Moment).ok()?, &[], &[]).ok()?;
    Some(socket)
}
