//! Messages on a connection, and the descriptors that come with them.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use rekindle_wire::control::{Failure, Reply};
use rekindle_wire::frame;
use tracing::debug;

/// The largest request.
pub(crate) const MAX_REQUEST: usize = 64 << 10;

/// The path of a directory, for messages.
pub(crate) fn shown(dir: &OwnedFd) -> PathBuf {
    let link = format!("/proc/self/fd/{}", dir.as_raw_fd());
    std::fs::read_link(link).unwrap_or_else(|_| "the image directory".into())
}

/// Answers that the request failed.
pub(crate) fn fail(stream: &UnixStream, failure: impl Into<Failure>) {
    reply(stream, &Reply::Failed(failure.into()));
}

/// Sends a reply. A peer that does not wait for the reply is ignored.
pub(crate) fn reply(stream: &UnixStream, reply: &Reply) {
    reply_with(stream, reply, &[]);
}

/// As [`reply`], with descriptors.
pub(crate) fn reply_with(stream: &UnixStream, reply: &Reply, fds: &[RawFd]) {
    if let Err(error) = frame::send(stream, reply, &[], fds) {
        debug!(%error, "cannot reply");
    }
}

/// Sends the answer, or the failure.
pub(crate) fn respond(stream: &UnixStream, answer: Result<Reply, Failure>) {
    reply(stream, &answer.unwrap_or_else(Reply::Failed));
}
