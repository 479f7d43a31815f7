//! The connection of a command that migrates a tree: the migration lasts as long as it.

use std::os::unix::net::UnixStream;

use rekindle_images::Protocol;
use rekindle_wire::control::{CommandSpan, Failing, Failure, Reply, Request};
use rekindle_wire::frame::{self, FrameError};
use tracing::{debug, warn};

use super::super::Daemon;
use super::super::checkpoints::OrderGuard;
use super::super::message::{self, MAX_REQUEST};
use super::super::party::Party;
use super::super::peer::may_checkpoint;
use super::super::pidns::PidView;
use super::super::process::Process;
use super::super::sys::Credentials;
use super::{MigrationGuard, NoMigration};

/// What is asked for.
#[derive(Clone, Copy)]
pub(in crate::daemon) struct Asked<'a> {
    /// The root of the tree, as the asker numbers it.
    pub(in crate::daemon) root: i32,
    /// The migration's name.
    pub(in crate::daemon) name: &'a str,
    /// Whether the tree is a container.
    pub(in crate::daemon) is_container: bool,
}

/// Serves a migration until its connection closes.
pub(in crate::daemon) fn serve(
    daemon: &Daemon,
    stream: &UnixStream,
    peer: (Credentials, Party),
    asked: Asked<'_>,
    span: Option<CommandSpan>,
) {
    let name = asked.name;
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let (migration, order) = match begin(daemon, peer, asked, span) {
        Ok(begun) => begun,
        Err(error) => return message::fail(stream, error.failure()),
    };
    message::reply(stream, &Reply::Awaited);
    loop {
        match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) if matches!(message.body, Request::Progress) => {
                migration.looks();
                message::reply(stream, &Reply::Progress(order.progress()));
            }
            Ok(message) if matches!(message.body, Request::HandOver) => match migration.hand_over() {
                Ok(()) => message::reply(stream, &Reply::HandedOver),
                Err(error) => {
                    warn!(migration = name, "not handed over: {error}");
                    message::fail(stream, error.failure());
                }
            },
            Ok(_) => return message::fail(stream, Failure::internal("only Progress and HandOver can be asked now")),
            Err(FrameError::Closed) => return,
            Err(error) => return debug!(%error, "a migration's connection closes"),
        }
    }
}

fn begin<'a>(
    daemon: &'a Daemon,
    (peer, party): (Credentials, Party),
    Asked { root, name, is_container }: Asked<'_>,
    span: Option<CommandSpan>,
) -> Result<(MigrationGuard<'a>, OrderGuard<'a>), NoMigration> {
    if !may_checkpoint(peer) {
        return Err(NoMigration::NotAllowed);
    }
    let ours = PidView::of(peer.pid)?.to_ours(root)?;
    let process = Process::with_pid(ours).map_err(|_| NoMigration::NoProcess(root))?;
    let migration = daemon.migrations.begin(name, process, is_container)?;
    // Memory was copied beforehand, and what is copied now must be sent while the tree stands still.
    let protocol = Some(Protocol::Stop);
    let order = daemon.checkpoints.order(party, ours, protocol, None, span.map(|span| (peer.pid, span)))?;
    Ok((migration, order))
}
