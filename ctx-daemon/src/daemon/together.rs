//! A request for dumps that are made at one moment: the group (`groups.rs`) lasts as long as its connection.

use std::os::unix::net::UnixStream;

use rekindle_wire::control::{Failing, Failure, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use tracing::debug;

use super::Daemon;
use super::groups::{GroupGuard, RefusedGroup};
use super::message::{self, MAX_REQUEST};
use super::peer::may_checkpoint;
use super::pidns::PidView;
use super::sys::Credentials;

/// Serves a group until its connection closes.
pub(crate) fn serve(daemon: &Daemon, stream: &UnixStream, peer: Credentials, roots: &[i32]) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let group = match accept(daemon, peer, roots) {
        Ok(group) => group,
        Err(error) => return message::fail(stream, error.failure()),
    };
    message::reply(stream, &Reply::Awaited);
    loop {
        match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) if matches!(message.body, Request::Progress) => {
                let all_were_frozen = group.all_were_frozen();
                message::reply(stream, &Reply::Together { all_were_frozen });
            }
            Ok(_) => return message::fail(stream, Failure::internal("only Progress can be asked now")),
            Err(FrameError::Closed) => return,
            Err(error) => return debug!(%error, "a group's connection closes"),
        }
    }
}

fn accept<'a>(daemon: &'a Daemon, peer: Credentials, roots: &[i32]) -> Result<GroupGuard<'a>, RefusedGroup> {
    if !may_checkpoint(peer) {
        return Err(RefusedGroup::NotAllowed);
    }
    let view = PidView::of(peer.pid)?;
    let roots = roots.iter().map(|root| view.to_ours(*root)).collect::<Result<Vec<_>, _>>()?;
    daemon.groups.add(roots)
}
