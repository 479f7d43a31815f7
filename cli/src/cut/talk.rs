//! What the coordinator of a cut and the hosts say to each other, in the form of `rekindle migrate`'s messages.
//!
//! Each phase has one message to each host and one answer from it. Besides, the coordinator says `Ping` now and then, which each host
//! answers: a connection that is silent is lost.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use rekindle_wire::control::FailureKind;
use serde::{Deserialize, Serialize};

use super::manifest::Entry;
use crate::failure::Failure;
use crate::network::connection::Connection;

/// How often the coordinator says that it lives.
pub(super) const PING: Duration = Duration::from_secs(3);
/// For how long a connection may be silent.
pub(super) const SILENCE: Duration = Duration::from_secs(15);

/// From the coordinator to a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ToPart {
    /// A cut begins. Answer: `Ready`.
    Make(Make),
    /// All trees are ready, or all are dumped: look at the tree's connections. Answer: `Seen`.
    Look,
    /// Dump the tree, and hold it. Answer: `Dumped`.
    Dump,
    /// All trees are dumped: let it go on, or let it stand still if it is to be killed. Answer: `Durable`.
    Go,
    /// The cut is good. No answer.
    Good,
    /// The cut is good, or the restore is given up: kill the tree. Answer: `Ended`.
    End,
    /// A restore begins. Answer: `Checked`.
    Restore(Restore),
    /// All parts are there: restore the tree. Answer: `Placed`.
    Start,
    /// The sockets of all trees are there: unlock the connections, and complete the tree. Answer: `Held`.
    Connect,
    /// All trees are complete: let it run. Answer: `Running`.
    Run,
    /// All trees run. No answer.
    Done,
    /// The coordinator lives. Answer: `Pong`.
    Ping,
    /// On a connection of its own: how far is the restore of this part? Answer: `State`.
    Ask(Which),
    /// On a connection of its own: the tree of a restore runs, or it ends. Answer: `Running` or `Ended`.
    Settle {
        /// The part.
        which: Which,
        /// Whether it runs.
        run: bool,
    },
    /// On a connection of its own: all trees of a restore run. Answer: `Running`.
    Over(Which),
    /// On a connection of its own: the cut is good, and what was dumped was to end with it. Answer: `Ended`.
    EndDumped(Which),
}

/// A part of a cut.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Which {
    /// The cut.
    pub(super) cut: String,
    /// The part.
    pub(super) part: Entry,
}

/// The beginning of a cut.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Make {
    /// [`VERSION`](super::manifest::VERSION).
    pub(super) version: u32,
    /// The cut's name.
    pub(super) cut: String,
    /// The number of the part among the cut's.
    pub(super) index: usize,
    /// The host's name.
    pub(super) host: String,
    /// The directory for the part.
    pub(super) dir: PathBuf,
    /// The root of the tree.
    pub(super) pid: i32,
    /// Whether the tree is to be killed.
    pub(super) stop: bool,
    /// Options for CRIU.
    pub(super) options: Vec<String>,
}

/// The beginning of a restore.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Restore {
    /// [`VERSION`](super::manifest::VERSION).
    pub(super) version: u32,
    /// The part.
    pub(super) which: Which,
}

/// How far the restore of a part is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum State {
    /// Nobody restores it there, and it does not run.
    Gone,
    /// It is not complete yet.
    Restoring,
    /// Complete.
    Held,
    /// Whether the others run as well is not known there.
    Running,
    /// All have run. What has become of this one since is nobody's concern.
    Over,
}

/// The TCP connections of a tree at one moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Seen {
    /// Those that its processes have.
    pub(super) connections: Vec<Connection>,
    /// Those that wait in the queues of its listeners: the other end may have sent something already.
    pub(super) unaccepted: Vec<Connection>,
    /// Those of the host that somebody has closed, and of which the other end has not got everything yet.
    pub(super) orphans: Vec<Connection>,
    /// The addresses of the host.
    pub(super) addresses: Vec<IpAddr>,
    /// What tells the host's network from others.
    pub(super) network: String,
}

/// From a host to the coordinator.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum FromPart {
    /// To `Make`: the tree can be dumped. Its connections before all have said so.
    Ready(Seen),
    /// To `Look`.
    Seen(Seen),
    /// To `Dump`: the tree stands still. Its connections since then.
    Dumped(Seen),
    /// To `Go`: the part is complete.
    Durable {
        /// The hash of its note.
        note: u64,
        /// Its processes.
        processes: usize,
        /// For how long it stood still until all others were dumped, in milliseconds.
        waited_ms: u64,
    },
    /// To `End`, `Settle` and `EndDumped`: the tree does not run.
    Ended,
    /// To `Restore`: the part is there.
    Checked,
    /// To `Start`: processes and sockets are there.
    Placed,
    /// To `Connect`: the tree is complete.
    Held,
    /// To `Run` and `Settle`: the tree runs.
    Running,
    /// To `Ask`.
    State(State),
    /// To `Ping`.
    Pong,
    /// To anything, or by itself.
    Failed {
        /// For programs.
        kind: FailureKind,
        /// For people.
        reason: String,
    },
}

impl FromPart {
    /// The answer that tells a failure.
    pub(super) fn failed(failure: &Failure) -> Self {
        Self::Failed { kind: failure.kind(), reason: failure.to_string() }
    }
}
