//! A dump: CRIU's plugin says what CRIU is doing, on one connection.
//!
//! | from | to | a dump |
//! |---|---|---|
//! | `Pausing` | `NotOurs` | `Pause`: no process of the tree is a client |
//! | `Pausing` | `Quiesced` | `Pause`: the tree is held, memory is pre-copied if the protocol says so, and the rings are closed |
//! | `Pausing` | `Failed` | the clients cannot be quiesced, and go on |
//! | `Quiesced` | `Saving` | the first `Frozen`: the image is written while CRIU writes its own |
//! | `NotOurs` | `Saving` | `Socket`: a process of the tree was in the middle of its handshake, or of a question |
//! | `Saving` | `Durable` | `Finish`: the rings open if the tasks go on, and the image is on disk |
//! | `Quiesced` | `Failed` | a step has failed: the image is removed, and the rings open |
//! | `Saving` | `Failed` | the same |
//! | `NotOurs` | `Failed` | the same |
//! | `Quiesced` | `Over` | the connection is closed: the same, and the tree is free |
//! | `Saving` | `Over` | the connection is closed, while the plugin waits for the image or before: the same |
//! | `NotOurs` | `Over` | the connection is closed: the tree is free |
//! | `Durable` | `Over` | the connection is closed: rings that are still closed open, and the tree is free |
//! | `Failed` | `Over` | the connection is closed: the tree is free |
//!
//! `pausing.rs`, `not_ours.rs`, `quiesced.rs` and `saving.rs` have the states. `tree.rs` has the part that all of them need.
//!
//! An older image in the directory stays whole until the new one is committed, or until a dump of a tree without clients
//! has succeeded. CRIU overwrites its own files from the freeze on: before that the older image is marked, so that it is
//! never restored with files of another dump.
//!
//! The image's GPU side is the state at the quiesce. Rings stay closed until CRIU has written the processes' memory,
//! although the copy may be done before: what an open ring executes may write to memory that the application shares, and
//! that is in CRIU's image.
//!
//! The dump of a tree that is migrated waits once more, in `Finish`, when its image is durable: the answer comes when the tree was
//! handed over to another host, and then CRIU kills it (`daemon/migrate/`).
//!
//! Native processes of the tree, which the driver checkpoints, are locked when the clients are quiesced. They are given back at
//! `NativeResume`, which is in turn in every state, and otherwise when the connection is closed (`daemon/native/`).
//!
//! The reply to the failed request, and to every later one, tells the failure, which releases at once what the dump held. A
//! request out of turn changes nothing. Nothing that a dump holds outlives its connection.

mod base;
mod beside;
mod error;
pub(super) mod files;
mod freeze;
mod lazy_pages;
mod libraries;
mod manifest;
mod not_ours;
mod pausing;
mod pre_copy;
mod precopy;
mod progress;
mod protocol;
mod quiesced;
mod rehearsal;
mod save;
mod saving;
mod socket;
mod spans;
mod tree;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rekindle_ctx_worker::transition::{machine, step};
use rekindle_wire::control::{Failing, Failure, Reply, Request, TraceParent};
use rekindle_wire::frame::{self, FrameError};
use tracing::warn;

use self::error::DumpError;
pub(super) use self::files::MOST as MOST_DATA_FILES;
pub(super) use self::manifest::{describe_client, describe_host, driver_build, driver_version, gpu, is_unattached};
use self::not_ours::NotOurs;
use self::pausing::{Paused, Pausing};
pub(super) use self::pre_copy::serve as pre_copy;
pub(super) use self::progress::{Present, Progress};
use self::quiesced::Quiesced;
use self::saving::{Durable, Saving};
use self::tree::Tree;
use super::Daemon;
use super::checkpoints::DumpGuard;
use super::groups::Stage;
use super::message::{self, MAX_REQUEST};
use super::moment::wait_for_moment;
use super::pidns::PidView;
use super::sys::Credentials;

/// A dump. See the table above.
enum State {
    Pausing(Pausing),
    NotOurs(NotOurs),
    Quiesced(Box<Quiesced>),
    Saving(Saving),
    Durable(#[expect(dead_code, reason = "held until the connection closes")] Durable),
    Failed(Failure),
    Over,
}

machine! {
    enum StateName names State { Pausing, NotOurs, Quiesced, Saving, Durable, Failed, Over }
    Pausing -> NotOurs,
    Pausing -> Quiesced,
    Pausing -> Failed,
    Quiesced -> Saving,
    NotOurs -> Saving,
    Saving -> Durable,
    Quiesced -> Failed,
    Saving -> Failed,
    NotOurs -> Failed,
    Quiesced -> Over,
    Saving -> Over,
    NotOurs -> Over,
    Durable -> Over,
    Failed -> Over,
}

/// The first request.
pub(super) struct Asked {
    pub(super) root: i32,
    pub(super) leave_running: bool,
    pub(super) traceparent: Option<TraceParent>,
    /// The control version that the plugin speaks.
    pub(super) wire: u32,
}

/// The result of a transition: the next state and the reply to the request, or an error, which leads to `Failed`.
type Next = Result<(State, Reply), DumpError>;

/// Serves a dump from its `Pause` on, until the connection closes.
pub(super) fn serve(daemon: &Arc<Daemon>, stream: &UnixStream, peer: Credentials, asked: Asked, fds: Vec<OwnedFd>) {
    let Asked { root, leave_running, traceparent, wire } = asked;
    let _session = match daemon.connections.session(stream) {
        Ok(session) => session,
        Err(error) => return message::fail(stream, error),
    };
    let ours = PidView::of(peer.pid).and_then(|view| view.to_ours(root));
    let under = daemon.checkpoints.begin(ours.unwrap_or(root), traceparent);
    let member = daemon.groups.member(under.root);
    let whole = lazy_pages::wait(under.root, stream, daemon.config.timeouts.stall);
    let moment = whole.and_then(|()| Ok(wait_for_moment(daemon, stream, &under)?));
    let begun = moment.and_then(|()| {
        let pausing = Pausing::new(fds, wire)?;
        Ok((Tree::hold(daemon, stream, peer, root, leave_running, &under.progress, member)?, pausing))
    });
    let (tree, pausing) = match begun {
        Ok(begun) => begun,
        Err(error) => return message::fail(stream, failed(&under, &error)),
    };
    let dump = format!("dump of process {}", tree.root);
    let (mut state, mut answer) = step(&dump, State::Pausing(pausing), |state| state.pause(&tree, &under));
    let failed = answer.is_err();
    message::respond(stream, answer);
    if failed {
        // There is no further request.
        step(&dump, state, |state| (state.end(&under), ()));
        return;
    }
    loop {
        let request = match frame::receive_at_most::<Request>(stream, MAX_REQUEST, 0) {
            Ok(message) => message.body,
            Err(FrameError::Closed) => break,
            Err(error) => {
                warn!(root, "dump: closing the connection: {error}");
                message::fail(stream, error);
                break;
            }
        };
        (state, answer) = step(&dump, state, |state| state.answer(&tree, &under, request));
        if matches!(state, State::Over) {
            return;
        }
        message::respond(stream, answer);
    }
    step(&dump, state, |state| (state.end(&under), ()));
}

/// Logs why a dump has failed, and notes it for those who ask.
fn failed(under: &DumpGuard<'_>, error: &DumpError) -> Failure {
    warn!(root = under.root, "dump failed: {error}");
    let failure = error.failure();
    under.progress.failed(&failure);
    failure
}

impl State {
    /// The state after a transition. A state whose transition has failed is released by now, since CRIU may take long to give
    /// up.
    fn after(done: Next, under: &DumpGuard<'_>) -> (Self, Result<Reply, Failure>) {
        match done {
            Ok((state, reply)) => (state, Ok(reply)),
            Err(DumpError::Closed) => (Self::gone(under), Err(DumpError::Closed.failure())),
            Err(error) => {
                let failure = failed(under, &error);
                (Self::Failed(failure.clone()), Err(failure))
            }
        }
    }

    /// The state of a dump whose connection has closed too early.
    fn gone(under: &DumpGuard<'_>) -> Self {
        warn!(root = under.root, "dump given up: its connection closed before the image was durable");
        Self::Over
    }

    fn pause(self, tree: &Tree<'_>, under: &DumpGuard<'_>) -> (Self, Result<Reply, Failure>) {
        let Self::Pausing(pausing) = self else { return (self, Err(DumpError::Order("the request Pause").failure())) };
        let paused = pausing.pause(tree, under).map(|(paused, reply)| match paused {
            Paused::NotOurs(not_ours) => (Self::NotOurs(not_ours), reply),
            Paused::Quiesced(quiesced) => (Self::Quiesced(quiesced), reply),
        });
        Self::after(paused, under)
    }

    fn answer(self, tree: &Tree<'_>, under: &DumpGuard<'_>, request: Request) -> (Self, Result<Reply, Failure>) {
        let done = match (request, self) {
            (Request::NativeResume { pid }, state) => return (state, tree.give_back_native(pid)),
            (_, Self::Failed(failure)) => {
                let again = DumpError::Failed(failure.clone()).failure();
                return (Self::Failed(failure), Err(again));
            }
            (Request::Frozen { pid }, state @ (Self::Quiesced(_) | Self::Saving(_) | Self::NotOurs(_))) => {
                state.frozen(tree, pid)
            }
            (Request::Socket { id, cookie }, state) => state.socket(tree, id, cookie),
            (Request::NativeCheckpoint { pid }, Self::Saving(saving)) => {
                let done = saving.check().map_err(DumpError::from).and_then(|()| tree.checkpoint_native(pid));
                done.map(|()| (Self::Saving(saving), Reply::NativeDone { open: false }))
            }
            (Request::Finish, Self::Saving(saving)) => {
                saving.finish(tree).map(|durable| (Self::Durable(durable), Reply::Durable))
            }
            (Request::Finish, Self::NotOurs(not_ours)) => {
                not_ours.finish();
                tree.all_are_durable().map(|()| (Self::NotOurs(not_ours), Reply::Durable)).map_err(DumpError::from)
            }
            (request, state) => return (state, Err(DumpError::Order(name(&request)).failure())),
        };
        Self::after(done, under)
    }

    fn frozen(self, tree: &Tree<'_>, pid: i32) -> Next {
        let pid = tree.view.to_ours(pid)?;
        let saving = match self {
            Self::Quiesced(quiesced) => {
                // The copy goes on while others are frozen.
                let saving = quiesced.save(tree)?;
                tree.reach(Stage::Frozen)?;
                saving
            }
            Self::Saving(saving) => {
                saving.check()?;
                saving
            }
            Self::NotOurs(not_ours) => {
                not_ours.frozen();
                tree.reach(Stage::Frozen)?;
                return Ok((Self::NotOurs(not_ours), Reply::Frozen { ours: false }));
            }
            state => return Ok((state, Reply::Frozen { ours: false })),
        };
        Ok((Self::Saving(saving), tree.frozen(pid)))
    }

    /// Notes the owner of the socket, if it is a process of ours. A tree without clients that has such a socket becomes ours.
    fn socket(self, tree: &Tree<'_>, id: u32, cookie: u64) -> Next {
        let whose = match &self {
            Self::Saving(saving) => tree.whose(saving.clients(), cookie),
            Self::NotOurs(_) => tree.whose(&[], cookie),
            _ => None,
        };
        let (mut saving, (whose, again)) = match (self, whose) {
            (Self::Saving(saving), Some(whose)) => (saving, whose),
            (Self::NotOurs(not_ours), Some(whose)) => (not_ours.save(tree)?, whose),
            (state, _) => return Ok((state, Reply::Socket { ours: false, again: false })),
        };
        let reply = saving.note(id, whose, again);
        Ok((Self::Saving(saving), reply))
    }

    fn end(self, under: &DumpGuard<'_>) -> Self {
        match self {
            state @ (Self::Quiesced(_) | Self::Saving(_)) => {
                drop(state);
                Self::gone(under)
            }
            _ => Self::Over,
        }
    }
}

/// The name of a request, for messages.
fn name(request: &Request) -> &'static str {
    match request {
        Request::Frozen { .. } => "the request Frozen",
        Request::Finish => "the request Finish",
        Request::NativeCheckpoint { .. } => "the request NativeCheckpoint",
        _ => "this request",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_ctx_worker::transition;

    #[test]
    fn the_table_above_is_the_list_of_transitions() {
        assert_eq!(transition::table(include_str!("mod.rs"), "a dump"), transition::list::<StateName>());
    }
}
