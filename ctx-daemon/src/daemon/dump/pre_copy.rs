//! A copy of memory that is made while its programs run, so that the next dump has little left to write.
//!
//! ```text
//!   PreCopy ─► quiesce ─► copy ─► the rings open ─► durable ─► PreCopied
//! ```
//!
//! It is a dump without CRIU: nothing is frozen, and the image has the clients' GPU memory and code alone. The next dump builds on
//! it (`base.rs`), and writes what has changed since. It cannot be restored by itself.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rekindle_wire::control::{PreCopyInfo, Reply};
use tracing::{info, warn};

use super::super::Daemon;
use super::super::checkpoints::DumpGuard;
use super::super::message;
use super::super::migrate::MigrationError;
use super::super::sys::Credentials;
use super::error::DumpError;
use super::pausing::{Paused, Pausing};
use super::tree::Tree;

/// Copies the memory of a tree's clients into the directory that has come with the request.
pub(in crate::daemon) fn serve(
    daemon: &Arc<Daemon>,
    stream: &UnixStream,
    (peer, wire): (Credentials, u32),
    root: i32,
    fds: Vec<OwnedFd>,
) {
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let under = daemon.checkpoints.begin_pre_copy(root);
    match copy(daemon, stream, (peer, wire), &under, fds) {
        Ok(info) => message::reply(stream, &Reply::PreCopied(info)),
        Err(error) => {
            warn!(root, "pre-copy failed: {error}");
            message::fail(stream, error);
        }
    }
}

fn copy(
    daemon: &Arc<Daemon>,
    stream: &UnixStream,
    (peer, wire): (Credentials, u32),
    under: &DumpGuard<'_>,
    fds: Vec<OwnedFd>,
) -> Result<PreCopyInfo, DumpError> {
    let pausing = Pausing::new(fds, wire)?;
    let member = daemon.groups.member(under.root);
    let tree = Tree::hold(daemon, stream, peer, under.root, true, &under.progress, member)?;
    let quiesced = match pausing.pause(&tree, under)?.0 {
        Paused::Quiesced(quiesced) => quiesced,
        Paused::NotOurs(_) => return Err(MigrationError::NoClients.into()),
    };
    let saving = quiesced.save_running(&tree)?;
    let clients = saving.clients().to_vec();
    let committed = saving.finish_pre_copy(&tree)?;
    let memory = tree.memory_of(&clients).map_or(0, |it| it.iter().flatten().sum());
    let ms = u64::try_from(tree.began.elapsed().as_millis()).unwrap_or(u64::MAX);
    info!(root = tree.root, bytes = committed.bytes, ms, "pre-copied");
    Ok(PreCopyInfo { bytes: committed.bytes, memory, ms })
}
