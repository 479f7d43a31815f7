//! What applications may call besides the driver's functions, see `include/rekindle.h`.

use std::ffi::c_int;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use rekindle_wire::control::{DEFAULT_SOCKET, Opening, Reply, Request};
use rekindle_wire::{descriptor, frame};

use crate::state::client::{self, Client};

/// For how long a caller is kept by a daemon that says nothing. One that is well answers when the worker is at rest, and
/// before that where it takes long: processes may wait for each other, so that the caller must go on.
const KEPT: Duration = Duration::from_secs(2);

/// This is where the application wants to be checkpointed: 1 if somebody has waited for that, and a checkpoint begins; 0
/// otherwise, after a look at one word of memory.
#[unsafe(no_mangle)]
#[allow(unreachable_pub, reason = "exported to applications")]
pub extern "C" fn rekindle_checkpoint() -> c_int {
    std::panic::catch_unwind(|| client::get().is_ok_and(|client| is_awaited(client) && say(client)))
        .unwrap_or(false)
        .into()
}

fn is_awaited(client: &Client) -> bool {
    client.connection.shared.header().moment.load(Acquire) != 0
}

fn say(client: &Client) -> bool {
    // Of several threads, and until the worker says otherwise, one.
    if client.connection.shared.header().moment.swap(0, Release) == 0 {
        return false;
    }
    let path = std::env::var("REKINDLE_SOCKET").unwrap_or_else(|_| DEFAULT_SOCKET.into());
    let Some(socket) = ask(&path) else {
        // Whoever waits may have more luck the next time.
        client.connection.shared.header().moment.store(1, Release);
        return false;
    };
    match frame::receive::<Reply>(&socket) {
        Ok(message) => message.body == Reply::Moment { awaited: true },
        // It begins, and takes its time, or has been restored in the meantime.
        Err(_) => true,
    }
}

fn ask(path: &str) -> Option<UnixStream> {
    let socket = descriptor::connect(path).ok()?;
    socket.set_read_timeout(Some(KEPT)).ok()?;
    frame::send(&socket, &Opening::new(&Request::Moment).ok()?, &[], &[]).ok()?;
    Some(socket)
}
