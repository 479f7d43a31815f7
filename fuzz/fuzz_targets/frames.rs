//! Bytes on a socket, cut into pieces as a slow sender would.

#![no_main]

use std::io::Write;
use std::os::unix::net::UnixStream;

use libfuzzer_sys::fuzz_target;
use rekindle_wire::frame;

fuzz_target!(|data: &[u8]| {
    let Ok((mut sender, receiver)) = UnixStream::pair() else { return };
    // More than the socket's buffer holds would wait for ever.
    if data.len() > 64 << 10 || sender.write_all(data).is_err() {
        return;
    }
    drop(sender);
    while frame::receive_at_most::<serde_json::Value>(&receiver, 64 << 10, 64 << 10).is_ok() {}
});
