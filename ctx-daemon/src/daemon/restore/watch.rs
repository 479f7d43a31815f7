//! A watch: a command that has CRIU restore an image hears of the progress and the result.

use std::os::unix::net::UnixStream;

use rekindle_wire::control::{CommandSpan, Failure, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use tracing::debug;

use super::super::Daemon;
use super::super::message::{self, MAX_REQUEST};
use super::super::sys::Credentials;
use super::watches::Wish;

/// Serves a watch until its connection closes.
pub(in crate::daemon) fn serve(
    daemon: &Daemon,
    stream: &UnixStream,
    peer: Credentials,
    wish: Wish,
    span: Option<CommandSpan>,
) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let holds = matches!(wish, Wish::Hold { .. });
    let watch = daemon.watches.add(peer.pid, wish, span);
    message::reply(stream, &Reply::Awaited);
    let mut told = false;
    loop {
        match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) if matches!(message.body, Request::Progress) => {
                if told {
                    watch.has_heard();
                }
                let info = watch.info();
                told = info.as_ref().is_some_and(|it| it.running_ns.is_some());
                message::reply(stream, &Reply::RestoreProgress(info.map(Box::new)));
            }
            Ok(message) if matches!(message.body, Request::Own) && holds => {
                if watch.own() {
                    message::reply(stream, &Reply::Owned);
                } else {
                    message::fail(stream, Failure::refused("the processes are not complete, or have run already"));
                }
            }
            Ok(_) => {
                return message::fail(
                    stream,
                    Failure::internal("only Progress can be asked now, or Own of a held restore"),
                );
            }
            Err(FrameError::Closed) => return,
            Err(error) => return debug!(%error, "a watch's connection closes"),
        }
    }
}
