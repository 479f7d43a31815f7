//! The daemon's news of a restore.

use std::path::Path;

use rekindle_wire::control::{CommandSpan, Reply, Request, RestoreInfo};

use crate::daemon::{Session, unexpected_answer};
use crate::failure::Failure;

/// A connection over which the daemon tells how far the restore is that a CRIU of this process makes.
pub(super) struct Watch(Session);

impl Watch {
    /// Asks for the news before CRIU is started. With `hears_first`, the processes wait before they run until this process has
    /// heard of it, and has asked again.
    pub(super) fn open(socket: &Path, hears_first: bool, span: Option<CommandSpan>) -> Result<Self, Failure> {
        match Session::open(socket, &Request::WatchRestore { hears_first, span })? {
            (session, Reply::Awaited) => Ok(Self(session)),
            _ => Err(unexpected_answer().into()),
        }
    }

    /// How far the restore is. None before it has begun, and where the daemon has ended.
    pub(super) fn progress(&self) -> Option<RestoreInfo> {
        match self.0.ask(&Request::Progress) {
            Ok(Reply::RestoreProgress(info)) => info.map(|it| *it),
            _ => None,
        }
    }
}
