//! The states of a worker. Each state owns the data that only this state needs.
//!
//! | from | to | a worker |
//! |---|---|---|
//! | `Spare` | `Open` | `Adopt`: the worker serves a client |
//! | `Spare` | `Loaded` | `Load`: the state of a restored client is in place |
//! | `Spare` | `Warm` | `Load` in advance: the state of a client is in place, and its memory is given back |
//! | `Spare` | `Failed` | the client cannot be adopted, loaded or rehearsed |
//! | `Spare` | `Rehearsed` | `Load` for a rehearsal: the worker is of no use any more |
//! | `Warm` | `Loaded` | `BringBack`: the memory is made, and content is being loaded |
//! | `Warm` | `Failed` | the memory cannot be made |
//! | `Loaded` | `Connected` | `Connect`: the restored process is there, with its ring |
//! | `Loaded` | `Failed` | the process cannot be connected, or content cannot be loaded |
//! | `Connected` | `Open` | `Open`: all processes of the restore are there, and so is the content |
//! | `Connected` | `Filling` | `Open`: all processes are there and run, and content is still being loaded |
//! | `Connected` | `Failed` | content cannot be loaded |
//! | `Filling` | `Open` | all content is there |
//! | `Filling` | `Closing` | `Quiesce`: all content is there, but a device is busy |
//! | `Filling` | `Quiesced` | `Quiesce`: all content is there, and every stream is idle |
//! | `Filling` | `Failed` | content cannot be loaded: the daemon ends the process |
//! | `Open` | `Closing` | `Quiesce`, `Advance`: no command is taken, but a device is busy |
//! | `Open` | `Quiesced` | `Quiesce`, `Advance`: every stream is idle and nothing waits for it |
//! | `Closing` | `Quiesced` | `Quiesce`, `Advance`: the device has come to rest |
//! | `Closing` | `Open` | `Open`, a broken context, or a daemon that is gone or silent |
//! | `Quiesced` | `Closing` | `Advance`: some commands were executed, and a device is busy |
//! | `Quiesced` | `Open` | `Open`, a broken context, or a daemon that is gone or silent |
//! | `Quiesced` | `Suspended` | `Suspend`: the client's GPU memory is given back |
//! | `Quiesced` | `Keeper` | `Suspend`, deeply: all that the worker has on GPUs is given back |
//! | `Quiesced` | `Failed` | giving the memory back has failed |
//! | `Suspended` | `Filling` | a command, or `BringBack`: the memory is there again, and content is being loaded |
//! | `Suspended` | `Closing` | `Quiesce`: all content is there again, but a device is busy |
//! | `Suspended` | `Quiesced` | `Quiesce`: all content is there again, and every stream is idle |
//! | `Suspended` | `Failed` | the memory cannot be made again: the process ends |
//!
//! A `Keeper` stays one until another worker has taken its client over, or the client is gone; then its process ends.
//!
//! In `Filling`, `Suspended` and `Keeper` the client's commands wait in the ring, in their order.
//!
//! From `Quiesced` to `Open` the worker writes nothing to memory that the client shares: no reply, no chunk, not even the
//! ring's head. So CRIU saves that memory as it was at the quiesce, with what the client enqueues until it is frozen.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rekindle_images::{Client, DataFile};
use rekindle_wire::attach::Pinned;
use rekindle_wire::control::{Failure, TemplatePiece};
use rekindle_wire::ring::Consumer;

use crate::checkpoint::borrowing::Borrowing;
use crate::checkpoint::suspend::Kept;
use crate::checkpoint::template::Imported;
use crate::schedule::rest;
use crate::session::share::Withdrawn;
use crate::transition::machine;

/// The state of a worker. See the table above.
pub(crate) enum State {
    Spare(Spare),
    /// The worker has another client's code in its contexts. It waits for its end.
    Rehearsed,
    /// The worker waits for a restore of this client, which has no GPU memory yet.
    Warm(Box<Warm>),
    Loaded(Loaded),
    /// The process is connected, and its ring is not open.
    Connected(Connected),
    /// The process runs. The worker takes its commands when all content is there.
    Filling(Consumer),
    Open(Consumer),
    /// No command is taken, but the device is still busy.
    Closing(Closed),
    Quiesced(Closed),
    /// The client's GPU memory is given back. The process runs until it needs an answer.
    Suspended(Box<Suspended>),
    /// All that the worker had on GPUs is given back. It executes nothing any more, see `serve/keeper.rs`.
    Keeper(Box<Keeper>),
    /// The reason why the worker serves no client. It keeps its resources until the daemon ends it.
    Failed(Failure),
}

machine! {
    pub(crate) enum StateName names State { Spare, Rehearsed, Warm, Loaded, Connected, Filling, Open, Closing, Quiesced, Suspended, Keeper, Failed }
    Spare -> Open,
    Spare -> Loaded,
    Spare -> Warm,
    Spare -> Rehearsed,
    Spare -> Failed,
    Warm -> Loaded,
    Warm -> Failed,
    Loaded -> Connected,
    Loaded -> Failed,
    Connected -> Open,
    Connected -> Filling,
    Connected -> Failed,
    Filling -> Open,
    Filling -> Closing,
    Filling -> Quiesced,
    Filling -> Failed,
    Open -> Closing,
    Open -> Quiesced,
    Closing -> Quiesced,
    Closing -> Open,
    Quiesced -> Closing,
    Quiesced -> Open,
    Quiesced -> Suspended,
    Quiesced -> Keeper,
    Quiesced -> Failed,
    Suspended -> Filling,
    Suspended -> Closing,
    Suspended -> Quiesced,
    Suspended -> Failed,
}

/// A worker without a client, with the files that arrived before `Load`.
#[derive(Default)]
pub(crate) struct Spare {
    pub(crate) data: Vec<(DataFile, File)>,
    pub(crate) code: Vec<(String, OwnedFd)>,
    /// For a client that is to borrow memory from a template.
    pub(crate) lent: Option<Box<Lent>>,
    /// For a client that is to copy what a template has of it.
    pub(crate) template: Option<Imported>,
}

/// What a client borrows memory from.
pub(crate) struct Lent {
    pub(crate) template: Vec<(TemplatePiece, OwnedFd)>,
    pub(crate) borrowing: Borrowing,
}

/// A client that is loaded in advance, but for its GPU memory.
pub(crate) struct Warm {
    pub(crate) kept: Kept,
    /// Bytes of memory that the client needs.
    pub(crate) bytes: u64,
}

/// A worker with the state of a client whose process is not connected yet.
pub(crate) struct Loaded {
    pub(crate) client: Box<Client>,
    /// The pinned memory that arrived before `Connect`.
    pub(crate) pinned: Vec<(Pinned, OwnedFd)>,
}

/// A worker whose client's process is connected.
pub(crate) struct Connected {
    pub(crate) consumer: Consumer,
    /// The worker that keeps the process until this one takes it over.
    pub(crate) keeper: Option<Predecessor>,
}

/// The worker that keeps a client that this worker is about to take over.
pub(crate) struct Predecessor {
    /// Leads to that worker.
    pub(crate) socket: UnixStream,
    /// The client's connection, which this worker reads from when the client is its own.
    pub(crate) connection: UnixStream,
}

/// A ring from which no command is taken.
pub(crate) struct Closed {
    pub(crate) consumer: Consumer,
    /// The state of the streams in this quiesce.
    pub(crate) streams: rest::Closing,
}

/// How a client is suspended.
pub(crate) struct How {
    /// Whether its commands wait until somebody resumes it.
    pub(crate) hold: bool,
    /// Whether the worker gives back all that it has on GPUs.
    pub(crate) deep: bool,
}

/// A client whose GPU memory is given back.
pub(crate) struct Suspended {
    pub(crate) consumer: Consumer,
    pub(crate) kept: Kept,
    /// Bytes of memory that are given back.
    pub(crate) bytes: u64,
    /// Whether commands wait for a request to resume.
    pub(crate) hold: bool,
    /// When the client was to resume first, if its GPU has had no room since.
    pub(crate) waits_since: Option<Instant>,
}

/// A deeply suspended client.
pub(crate) struct Keeper {
    pub(crate) consumer: Consumer,
    pub(crate) kept: Kept,
    /// Bytes of memory that are given back.
    pub(crate) bytes: u64,
    /// Whether commands wait for a request to resume.
    pub(crate) hold: bool,
    /// When another worker was last asked for, since the client has had a command.
    pub(crate) asked: Option<Instant>,
    /// The worker that takes the client over when it asks for it.
    pub(crate) heir: Arc<Mutex<Option<Heir>>>,
}

/// A worker that the daemon has named to take a client over from its keeper.
pub(crate) struct Heir {
    /// Leads to that worker.
    pub(crate) socket: Arc<UnixStream>,
    /// The memory that it counts, and the keeper again if it does not come.
    pub(crate) memory: Vec<Withdrawn>,
}

#[cfg(test)]
mod tests {
    use super::StateName;
    use crate::transition::{list, table};

    #[test]
    fn the_table_above_is_the_list_of_transitions() {
        assert_eq!(table(include_str!("state.rs"), "a worker"), list::<StateName>());
    }
}
