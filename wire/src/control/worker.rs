//! Messages between a worker and its daemon, on the worker's channel. The worker inherits this channel from the daemon. When
//! a daemon is replaced, the channel is a connection that the worker makes to the new daemon:
//!
//! ```text
//!   spare        Ready (unasked)
//!   attach       (JoinContainer -> Done | Failed)    Adopt -> Done | Failed     the worker has answered the client, either way
//!   dump         Calm* -> Done | Busy | Failed, where several clients are dumped together
//!                (Quiesce | Advance)* -> Done | Busy | Failed, until all clients of a tree are at rest together
//!                Pace -> Done at any time, Stage -> Done | Failed before the quiesce, where there is host memory to spare
//!                Reserve -> Done, Precopy -> Done | Failed, Progress+ before the quiesce, where the protocol says so
//!                Save -> Begun | Failed, SaveCode -> Done | Failed, Progress -> Saving | Saved | Failed
//!                (Cancel cuts the copy short)     Alive again and again, ConfirmQuiesced -> Done | Failed
//!                Open    -> Done, once a `Saving` has said that it may, or after `Saved`
//!   memory       NeedsRoom (unasked) -> Room, Room     GiveWay     at any time
//!                Room { how_much } -> Needs, and then Room again and again
//!   sharing      Export -> Exported | Failed     Import -> Done | Failed     Shares -> Shares     at any time
//!   restore      MakeShared+, TakeShared*, Data*, Code*, Load -> LoadStep* (if asked for), Done | Failed
//!                where the `Load` was a warm one: TakeTemplate*, BringBack -> Done | Busy | Failed
//!                where the client is only about to come: Code*, LoadCode -> Done | Failed before all of that
//!                where a part of its content is on the GPU already: CopyTemplate, TakeTemplate* before the `Load`
//!                where it is to borrow memory: Borrow, TakeTemplate* before that `Load`, Borrow before `BringBack`,
//!                Learned (unasked) again and again while the client runs
//!                ExportTemplate+ -> Template | Failed, once a `Loaded` has said that all content is there
//!                Pinned*, Connect -> Done | Failed     Open -> Done
//!                LoadProgress -> Loading | Loaded | Failed, from `Load` on
//!   suspend      (as a dump, up to the `Saved` of a copy that stops the client)     Suspend -> Suspended | Failed
//!                BringBack -> Done | Busy | Failed, and LoadProgress as in a restore
//!   move         (Suspend{deep}: the worker has become the client's keeper)     NeedsRoom (unasked): the client has a command
//!                to the keeper: Kept -> Kept, SaveCode -> Done, HandOver -> HandedOver     to the worker that takes over: as in
//!                a restore; its Connect names the keeper, and its Open ends the keeper
//! ```
//!
//! A quiesced worker that receives nothing from its daemon for a time gives up the copy under way and opens its ring by
//! itself: the daemon may be stopped, or hang. If the daemon goes on then, the answer to `ConfirmQuiesced` says so, and
//! no image is made of the client.
//!
//! Worker and daemon may be of different releases (`docs/compatibility.md`). A worker answers `Failed` to a request
//! that it does not know. The other side must know each message that has no answer or comes unasked: such messages go
//! only to a side that speaks the version in which they were added.
//!
//! A channel that closes tells a worker that the daemon is gone. A spare worker, and a worker that is being restored, ends.
//! A worker that serves a client gives up the copy under way, opens its ring, and sends `Rejoin` until a daemon takes it. The
//! worker sends `Rejoin` at the workers' endpoint, whose path is the path of the daemon's socket with `.workers` appended.

use serde::{Deserialize, Serialize};

use super::{ContainerLimits, Failure, Suspension};
use crate::access::AccessReport;
use crate::attach::Attach;
use crate::ipc::{PieceId, Shared, Token};
use crate::nvml;

/// What an [`WorkerRequest::Advance`] of an older daemon means.
fn one() -> u32 {
    1
}

/// The daemon's requests to a worker, one at a time, each but `Cancel`, `Alive`, `GiveWay` and `Room` answered by a
/// [`WorkerReply`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum WorkerRequest {
    /// Serve this client. Comes with its connection, ring and staging; the worker sends it the [`crate::attach::Answer`].
    Adopt {
        /// The client's own request.
        attach: Attach,
        /// The limits of the client.
        limits: Limits,
    },
    /// Count your client's memory together with the memory of the other clients of its container. Comes with the container's
    /// table, before `Adopt`, or before `Connect`.
    #[serde(rename = "Belong")]
    JoinContainer {
        /// The worker's row in the table.
        row: u32,
        /// The GPUs that the container has, in the order of the table's columns.
        gpus: Vec<[u8; 16]>,
        /// The limits of all clients of the container together.
        limits: ContainerLimits,
    },
    /// Let your streams have only so many commands in flight for a time, or until `Open`. `Busy` if one has more yet.
    Calm {
        /// The most commands in flight on a stream.
        most: u32,
        /// For how long, if no other `Calm` comes.
        for_ms: u64,
    },
    /// Stop at a command boundary and wait until every stream is idle. A worker that says `Busy` has stopped too.
    Quiesce {
        /// How long to wait for the streams.
        timeout_ms: u64,
    },
    /// Execute the commands from the ring up to and including the next commands for the device, and quiesce again:
    /// another process may wait for one of those.
    Advance {
        /// How long to wait, for the commands and for the rest.
        timeout_ms: u64,
        /// The number of commands for the device. One goes to an idle stream; several go to the device as they come.
        #[serde(default = "one")]
        commands: u32,
    },
    /// Open the ring again.
    Open,
    /// Set device memory aside for clones, in the background. Before the quiesce; given back when the copy is over, or
    /// with `Open`.
    Reserve {
        /// Bytes to set aside on each device, where they are free; none for as much as the client has.
        bytes: Option<u64>,
    },
    /// From now on copied content may lie in these units of host memory until it is in its file. Sent before a quiesce,
    /// and for any number of copies: `Stage` without units takes the units back. Comes with the memfds of `new`, which are
    /// sealed and belong to no other worker. A worker that is copying says `Failed`.
    Stage {
        /// Bytes of each unit.
        unit: u64,
        /// All units, by numbers that name no other units as long as the daemon lives.
        units: Vec<u64>,
        /// The units among them that the worker does not have yet, in the order of the descriptors.
        new: Vec<u64>,
    },
    /// Limit the speed of copies out of devices from now on, including copies under way.
    Pace {
        /// Bytes a second over the link of each device, by the worker's numbers; 0 for no limit.
        bandwidth: Vec<u64>,
        /// Whether the client's own transfers over the link come first. Holds for copies that have not begun.
        application_first: bool,
    },
    /// Begin a pre-copy: copy the device memory into the data files that come with this request while the client runs, or
    /// copy again the memory that has changed since the last pre-copy. Files and blob are as in `Save`. `Progress` tells when
    /// the pre-copy is done. `Save` then copies the memory that has changed since, into the same files.
    Precopy {
        /// As in `Save`.
        hash_key: [u8; 16],
        /// As in `Save`.
        files: Vec<u32>,
        /// As in `Save`.
        compression: String,
    },
    /// Begin to write the device memory into the data files that come with this request, and say what the image needs. Where
    /// writing past the page cache is worth it, all files come a second time after that, opened for such writes. Only while
    /// quiesced. The blob is a table of content that need not be written, since another image has it, and may be empty.
    Save {
        /// Goes into every hash; from the image's manifest.
        hash_key: [u8; 16],
        /// The numbers of the data files, at least one: in the order of the descriptors.
        files: Vec<u32>,
        /// Memory that is saved with other clients of the image.
        elsewhere: Vec<PieceId>,
        /// How content is compressed: `off`, `lz4`, `zstd`, `auto`.
        compression: String,
        /// How memory is kept as it is while the client goes on.
        copying: Copying,
        /// Whether `Precopy` was asked for this image.
        precopied: bool,
        /// Whether the daemon proves by a `Load` for a rehearsal that a log which was cut can be replayed. Daemons from before
        /// this field do not.
        #[serde(default)]
        rehearses: bool,
        /// Whether content that the device has hashed is not hashed again on the host, where the client does not run during the
        /// copy: a load notices what has changed on the way. Workers from before this field hash it again.
        #[serde(default)]
        hash_on_device: bool,
    },
    /// How far is the copy?
    Progress,
    /// Write a code image into the file that comes with this.
    SaveCode {
        /// The code image, by its content's hash as lowercase hex.
        hash: String,
    },
    /// Give up the `Save` under way, which then fails. `Cancel` may come before the answer to another request, and
    /// has no answer of its own; a worker that is not saving (any more) ignores `Cancel`.
    Cancel,
    /// Code files for the `Load` that follows, where `Load` has more than one message can carry. The files come with this, in
    /// order. Any number of times.
    Code {
        /// Their hashes.
        code: Vec<String>,
    },
    /// Data files for the `Load` that follows, where `Load` has more than one message can carry. The files come with this, in
    /// order. Any number of times.
    Data {
        /// The data files, in the order of the descriptors.
        data: Vec<DataFile>,
    },
    /// Become the client that the blob (its part of the manifest) describes: map, load code, replay, load data. Comes
    /// with the data files in the order of `data`, then the code files in the order of `code`.
    Load {
        /// The data files.
        data: Vec<DataFile>,
        /// How the image's pieces are hashed, as its format numbers that.
        hash_algorithm: u32,
        /// Goes into every hash; from the image's manifest.
        hash_key: [u8; 16],
        /// The hashes of the code files.
        code: Vec<String>,
        /// The limits of the client, beyond the memory that it has in the image.
        limits: Limits,
        /// For a rehearsal: only load the code, replay, and compare the code's addresses. No data files come with this request,
        /// and the worker is of no use afterwards.
        #[serde(default)]
        rehearsal: bool,
        /// Whether the answer may come before the content of device memory is there. `LoadProgress` tells when it is. A worker
        /// whose ring is opened before that executes no command until then. Only for workers of [`LOADS_BESIDE`] or later.
        #[serde(default)]
        early: bool,
        /// Whether the answer comes before there is memory for the content, which goes back to the devices. `BringBack` makes
        /// the memory and begins to load the content, as with `early`. Only for workers of [`WARMS`] or later.
        #[serde(default)]
        warm: bool,
        /// Whether the worker is to send a `LoadStep` when it begins a step. Workers from before this field do not.
        #[serde(default)]
        steps: bool,
    },
    /// How far is the load of the content of device memory? Only for workers of [`LOADS_BESIDE`] or later. After `Failed` the
    /// client has no content, and must end.
    LoadProgress,
    /// Give the client's GPU memory back, whose content a `Save` has put into the data files that come with this request, in the
    /// order of `data`. The blob is the client's part of the manifest, from `Saved`. Only while quiesced. The worker brings the
    /// memory back when the client's next command comes, unless `hold` is set, or when `BringBack` or `Quiesce` come. Needs no
    /// daemon for that. Only for workers of [`SUSPENDS`] or later.
    ///
    /// A client that is suspended already takes on `hold`, and nothing else: only for workers of [`MAKES_ROOM`] or later.
    Suspend {
        /// The data files.
        data: Vec<DataFile>,
        /// How the pieces are hashed, as in `Load`.
        hash_algorithm: u32,
        /// As in `Load`.
        hash_key: [u8; 16],
        /// Whether the client's commands wait until `BringBack`.
        hold: bool,
        /// Whether the worker gives back all that it has on GPUs, its contexts among it, and from then on only keeps the client
        /// until another worker takes the client over. Only for workers of [`MOVES`] or later.
        #[serde(default)]
        deep: bool,
    },
    /// What does another worker need to load this client? Only for keepers, the workers of clients that are suspended deeply.
    /// `SaveCode` gets the code.
    Kept,
    /// Another worker is about to take the client over: give it the client's connection, which this worker reads no more. Comes
    /// with a socket that leads to that worker. When that worker asks there for the client, this one answers and ends, unless a
    /// later `HandOver` has named another. Only for keepers.
    HandOver,
    /// Bring the memory of a suspended client, or of one that was loaded warm, back; the client runs when its content is loaded,
    /// which `LoadProgress` tells. `Busy`: the GPU has no room for it now. A client that is not suspended answers `Done`. Only for
    /// workers of [`SUSPENDS`] or later.
    BringBack,
    /// Give out descriptors of the physical memory behind the content of a loaded client, from a certain piece on: a template,
    /// from which other workers copy. Only before `Connect`, when all content is there. Only for workers of [`WARMS`] or later.
    ExportTemplate {
        /// The first wanted piece.
        first: usize,
    },
    /// Copy content from these pieces when `BringBack` comes, instead of loading it. They come with the descriptors of the
    /// pieces, in order. Any number of times, after a warm `Load`, after a `Borrow` and before the warm `Load`, or after a
    /// `CopyTemplate` and before a `Load`, which then copies. Only for workers of [`WARMS`] or later.
    TakeTemplate {
        /// The pieces.
        pieces: Vec<TemplatePiece>,
    },
    /// Load the libraries of a client that may come: the blob is the client, and `Code` has brought the code, as for `Load`, which
    /// comes with all of the code again. The worker stays as it was, also after a failure. Only for workers of [`LOADS_CODE`] or later.
    LoadCode,
    /// The pieces that `TakeTemplate` brings after this have content of the client that `Load` brings, or of its former self: copy from
    /// there what has the wanted hash. An older worker refuses this, and loads all.
    CopyTemplate,
    /// Map large pieces of the template, which `TakeTemplate` brings after this, instead of copying them: for reading only, until
    /// the client writes there. Comes with what other clients of the image have taught as the blob, a [`super::Learned`] in JSON.
    /// Sent again before `BringBack`, with what was learned meanwhile. Only for workers of [`LENDS`] or later.
    Borrow,
    /// Memfds of pinned memory for the `Connect` that follows, where `Connect` has more than one message can carry. They come
    /// with this, in order. Any number of times.
    Pinned {
        /// Their addresses and sizes.
        pinned: Vec<crate::attach::Pinned>,
    },
    /// The process whose `Connect` follows has managed memory. Comes with its userfaultfd; the memfds are among those of `pinned`. Older
    /// workers do not load such a client, whose state they do not know.
    Userfault,
    /// The restored process exists. Comes with its connection, ring, staging, and the memfds of `pinned` in order.
    Connect {
        /// Pinned memory that the process has mapped.
        pinned: Vec<crate::attach::Pinned>,
        /// The message by which the process attached, if it was never gone and another worker keeps it. The socket that leads to
        /// that worker then comes with this, behind the connection. `Open` takes the process over from that worker first. Only
        /// for workers of [`MOVES`] or later.
        #[serde(default)]
        takes_over: Option<Attach>,
    },
    /// The process will run before `Load` is answered, of which the worker has said [`ASSURED`]. Comes with a copy of its connection,
    /// from which on the worker needs no daemon. `Ahead` follows. Not answered. Only for workers of [`RUNS_AHEAD`] or later.
    Comes {
        /// The message with which the process would attach now.
        attach: Box<Attach>,
    },
    /// A `Userfault`, `Pinned`, `Connect` or `Open` that is sent before `Load` is answered, with its descriptors, and is done after
    /// that. Not answered: if it fails, `LoadProgress` tells the failure. Only for workers of [`RUNS_AHEAD`] or later.
    Ahead {
        /// What is to be done.
        request: Box<WorkerRequest>,
    },
    /// For `rekindle ps`.
    Describe,
    /// How often has the client asked for each driver call?
    Calls,
    /// Keep the protocol that was chosen for the client, for the daemon that takes the place of this one.
    Remember {
        /// The protocol's name; none where no protocol is chosen any more.
        protocol: Option<String>,
    },
    /// Tell the client whether it is to say when it has come to a point where it wants to be checkpointed.
    Moment {
        /// Whether a dump waits for this point.
        awaited: bool,
    },
    /// The counts of the client's accesses. `Failed` where the reporting mode is off.
    Access,
    /// Whether the client has been at rest ever since it was quiesced. `Failed` if the worker has opened the ring by itself,
    /// since the daemon was silent.
    #[serde(rename = "Hold")]
    ConfirmQuiesced,
    /// The daemon is alive. Sent at any time, as long as a ring is to stay closed; not answered.
    Alive,
    /// Another client finds no device memory: give back the memory that is set aside for clones and not used yet. Not
    /// answered.
    GiveWay,
    /// Answers a `NeedsRoom`; sent again when the wait for memory is over. Not answered.
    Room {
        /// Whether memory may become free soon that clones of other clients take now, or that the daemon is looking for.
        coming: bool,
        /// Whether the worker is to say how much memory it needs: it sends `Needs`, and waits without trying until this comes
        /// again with `coming` false. Only from daemons that know `Needs`.
        #[serde(default)]
        how_much: bool,
        /// Whether memory was given back for this worker. If it is not enough, the worker may ask again.
        #[serde(default)]
        again: bool,
    },
    /// Whether the client could be saved now.
    Check,
    /// How much memory the devices have, as the driver counts it.
    Memory,
    /// Give out descriptors of the memory that the token names, from a certain piece on.
    Export {
        /// The name.
        token: Token,
        /// The first wanted piece.
        first: usize,
    },
    /// Keep this memory for the client, which will ask for it. Comes with the descriptors of its pieces, which may take
    /// several of these.
    Import {
        /// The number by which the client will ask for the memory.
        ticket: u64,
        /// The shared object.
        shared: Shared,
    },
    /// Keep this file, which the client has mapped shared and registers: it will have it mapped. Only for workers of
    /// [`REGISTERS_FILES`] or later.
    Registers {
        /// Where the client has mapped it, and the place in the file.
        pinned: crate::attach::Pinned,
    },
    /// Which memory does the client share, or may it have shared?
    Shares,
    /// For the client that the blob describes, which is to be loaded: make the memory whose content this client has and that
    /// others may share. `Load` follows when all such memory has been sent.
    MakeShared {
        /// The first piece whose descriptor is wanted.
        first: usize,
    },
    /// Memory that other workers have made for the `Load` that follows. Comes with the descriptors, in this order.
    TakeShared {
        /// The names of the pieces.
        ids: Vec<PieceId>,
    },
}

/// The first control version whose workers load content beside the restored process: `Load { early }`, `LoadProgress`.
pub const LOADS_BESIDE: u32 = 10;

/// The first control version whose workers suspend clients: `Suspend`, `BringBack`.
pub const SUSPENDS: u32 = 11;

/// The first control version whose workers load clients in advance: `Load { warm }`.
pub const WARMS: u32 = 12;

/// The steps of a load in their order, by the names that `LoadStep` has for them.
pub const LOAD_STEPS: [&str; 4] = ["code", "replay", "map", "content"];

/// The names that `LoadStep` has for what is no step: all device memory of the client is made, and mapped. A worker that makes it beside
/// the process says so after its answer to `Load`; others, and those that say nothing of it, have made it before.
pub const MEMORY_MADE: &str = "made";
/// See [`MEMORY_MADE`].
pub const MEMORY_MAPPED: &str = "mapped";

/// The name that `LoadStep` has for this: the worker will load the rest, as far as it can know, so that the process may run. Only after
/// a `Load` with `early`, and before its answer.
pub const ASSURED: &str = "assured";

/// The first control version whose workers load code before there is a client: `LoadCode`.
pub const LOADS_CODE: u32 = 21;

/// The first control version whose workers take a process that runs before its client is loaded: `Comes`, `Ahead`.
pub const RUNS_AHEAD: u32 = 20;

/// The first control version whose workers say how much memory they need, and what a suspension gives back: `Needs`,
/// `Description.physical`.
pub const MAKES_ROOM: u32 = 12;

/// The first control version whose workers suspend clients deeply and take them over from each other: `Suspend { deep }`, `Kept`,
/// `HandOver`, `Connect { takes_over }`.
pub const MOVES: u32 = 12;

/// The first control version whose workers borrow memory from a template: `Borrow`, `Learned`.
pub const LENDS: u32 = 13;

/// The first control version whose workers map files that their client has mapped: `Registers`, [`crate::attach::Pinned::file_offset`].
pub const REGISTERS_FILES: u32 = 15;

/// A data file of an image, or of an image that it builds on.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct DataFile {
    /// 0 for the image's own, 1 for its parent's, 2 for the parent's parent's.
    pub depth: u32,
    /// Its number in that image.
    pub index: u32,
}

/// A piece of physical memory that a template has.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct TemplatePiece {
    /// The device, by the worker's number.
    pub device: u32,
    /// Where the content belongs in a client.
    pub address: u64,
    /// Bytes.
    pub size: u64,
}

/// The most memory that one client may have, where there is a limit.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory on each device.
    pub device_memory: Option<u64>,
    /// Bytes of pinned host memory.
    pub pinned_memory: Option<u64>,
}

/// How a worker keeps the state of the quiesce while it copies.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub enum Copying {
    /// The ring stays closed until all is copied.
    #[default]
    Stop,
    /// The worker clones on the device as much as fits into the memory that was set aside; the rest is kept as in `Cow`.
    Clone,
    /// The worker clones, or copies out, the memory that a command may write, before the command.
    Cow,
}

/// The work of a worker at a quiesce, and the work that it is about to do.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Secured {
    /// Bytes whose hashes were made on the device, and how long that took, in nanoseconds.
    pub hashed: u64,
    /// See `hashed`.
    pub hash_ns: u64,
    /// Bytes that were cloned (and hashed in passing), and how long that took, in nanoseconds.
    pub cloned: u64,
    /// See `cloned`.
    pub clone_ns: u64,
    /// Bytes that are copied before the ring may open.
    pub closed: u64,
    /// Bytes that a copy made while the client ran has already.
    pub unchanged: u64,
    /// Bytes in all.
    pub bytes: u64,
}

/// How long commands had to wait after the ring was open, and for how much memory.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Waits {
    /// Commands before which memory had to be cloned or copied out.
    pub commands: u64,
    /// Bytes that were cloned for these commands.
    pub cloned: u64,
    /// How long these commands waited, in nanoseconds.
    pub ns: u64,
}

/// How long the steps of a load took, in nanoseconds, and how much was loaded.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct LoadTimes {
    /// Reading code images.
    pub code_ns: u64,
    /// Executing the object log again, which loads the code into the contexts.
    pub replay_ns: u64,
    /// Mapping device memory, comparing addresses, and loading state other than memory.
    pub map_ns: u64,
    /// Copying the content of device memory from the files.
    pub content_ns: u64,
    /// Comparing its hashes on the device.
    pub hash_ns: u64,
    /// Bytes of device memory.
    pub bytes: u64,
    /// Bytes among them that are zeros, which were set and not copied.
    pub set: u64,
    /// Bytes among them that were on the devices already, and were copied from there.
    #[serde(default)]
    pub copied: u64,
}

/// A code image that a `Save` found.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SavedCode {
    /// Its content's hash, as lowercase hex.
    pub hash: String,
    /// Bytes.
    pub size: u64,
}

/// A worker's answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum WorkerReply {
    /// Sent once, unasked, when contexts are ready.
    Ready {
        /// The devices, for the daemon's checks.
        attached: crate::attach::Attached,
        /// [`crate::CONTROL_VERSION`] of the worker, whose program may have been replaced since the daemon started.
        #[serde(default)]
        wire: u32,
        /// The oldest version that the worker understands too.
        #[serde(default)]
        oldest: u32,
    },
    /// Sent unasked, at any time: the client finds no device memory. `Room` follows. From a keeper, again and again: the client
    /// has a command, and needs a worker.
    NeedsRoom,
    /// Sent before the answer to a `Load` that asks for it: the worker begins this step. Only [`MEMORY_MADE`] and [`MEMORY_MAPPED`]
    /// may come later.
    LoadStep {
        /// One of [`LOAD_STEPS`], [`ASSURED`], [`MEMORY_MADE`], [`MEMORY_MAPPED`], or a step of a later version.
        step: String,
    },
    /// Sent unasked, after `Room { how_much: true }`.
    Needs {
        /// Bytes that must be free on each device, by the worker's numbers; 0 where it needs none. Empty where no memory of
        /// other clients would help.
        free: Vec<u64>,
        /// How long the command that needs them has asked and tried already, in milliseconds: the time that the daemon has for it
        /// began then.
        #[serde(default)]
        waited_ms: u64,
    },
    /// The request was done.
    Done,
    /// To `Quiesce` and `Advance`: no command is executed, but the device is not at rest. To `Calm`: a stream has more commands in
    /// flight.
    Busy {
        /// The work that keeps the device busy.
        what: String,
    },
    /// The request was not done, for this reason; the client goes on as before.
    Failed(Failure),
    /// To `Save`: the copy has begun.
    Begun {
        /// The code images that the manifest refers to.
        code: Vec<SavedCode>,
        /// The work at the quiesce.
        secured: Secured,
    },
    /// To `Progress`: the copy goes on.
    Saving {
        /// Whether the ring may be opened.
        may_open: bool,
        /// Bytes copied.
        copied: u64,
        /// Bytes to copy in all.
        bytes: u64,
    },
    /// To `Progress`: everything is copied. After a `Save` the blob is the client's part of the manifest.
    Saved {
        /// Bytes of device memory.
        bytes: u64,
        /// How long commands had to wait.
        waits: Waits,
    },
    /// To `LoadProgress`: content is being loaded.
    Loading {
        /// Bytes loaded.
        loaded: u64,
        /// Bytes to load in all.
        bytes: u64,
    },
    /// To `LoadProgress`: all content is there.
    Loaded {
        /// How long the load took.
        times: LoadTimes,
    },
    /// To `Describe`.
    Description {
        /// See [`super::ClientInfo`].
        device_memory: Vec<u64>,
        /// See [`super::ClientInfo`].
        pinned_memory: u64,
        /// See [`super::ClientInfo`].
        commands: u64,
        /// See [`super::ClientInfo`].
        #[serde(default)]
        suspended: Option<Suspension>,
        /// Milliseconds for which the client has had no command and nothing ran for it. 0 from workers before [`SUSPENDS`].
        #[serde(default)]
        idle_ms: u64,
        /// Bytes of physical memory that the client has on each device, and gives back when it is suspended. Empty from workers
        /// before [`MAKES_ROOM`].
        #[serde(default)]
        physical: Vec<u64>,
        /// Calls that were refused because Rekindle does not support them, as the client has counted them. None from workers before
        /// this field.
        #[serde(default)]
        refused_calls: Option<u64>,
        /// How many nanoseconds ago this worker executed its client's first command. None before that, and from workers before this
        /// field.
        #[serde(default)]
        first_command_ago_ns: Option<u64>,
        /// See [`super::ClientInfo`]. Empty from workers before this field.
        #[serde(default)]
        gpu_time_ns: Vec<u64>,
    },
    /// To `Suspend`: the memory has gone back to the devices.
    Suspended {
        /// Bytes that are free now.
        bytes: u64,
    },
    /// To `ExportTemplate`, with the descriptors of `pieces`.
    Template {
        /// The number of pieces in all.
        count: usize,
        /// The pieces that come with this reply.
        pieces: Vec<TemplatePiece>,
    },
    /// Unasked, to the daemon that has sent `Borrow`: what the client's commands have taught since the last time, as the blob, a
    /// [`super::Learned`] in JSON.
    Learned {
        /// Why the client cannot go on: it has written memory that it has borrowed.
        fault: Option<String>,
    },
    /// To `Kept`, with the data files, and with the client's part of the manifest as the blob.
    Kept {
        /// The data files, in the order of the descriptors.
        data: Vec<DataFile>,
        /// As in `Load`.
        hash_algorithm: u32,
        /// As in `Load`.
        hash_key: [u8; 16],
    },
    /// To `HandOver`, with the client's connection.
    HandedOver,
    /// To `Calls`.
    Calls {
        /// The counts, by the places of functions in the driver table.
        counts: Vec<crate::calls::Count>,
    },
    /// To `Access`.
    Access {
        /// The counts.
        report: Box<AccessReport>,
    },
    /// To `Check`.
    Checked {
        /// Why the client could not be saved; none if it could.
        reasons: Vec<String>,
    },
    /// To `Export`, with the descriptors.
    Exported {
        /// The shared object.
        shared: Shared,
    },
    /// To `MakeShared`, with the descriptors of `ids`.
    MadeShared {
        /// The number of pieces in all.
        count: usize,
        /// The names of the pieces that come with this reply.
        ids: Vec<PieceId>,
        /// The memory that the client needs of others.
        needed: Vec<PieceId>,
    },
    /// To `Shares`.
    Shares {
        /// The client's own memory that has been given names.
        own: Vec<PieceId>,
        /// Memory of others that the client has.
        others: Vec<PieceId>,
    },
    /// To `Memory`.
    Memory {
        /// The memory of each device.
        devices: Vec<nvml::Memory>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_that_were_renamed_keep_their_names_on_the_channel() {
        assert_eq!(serde_json::to_value(WorkerRequest::ConfirmQuiesced).unwrap(), "Hold");
        let limits = ContainerLimits { device_memory: None, pinned_memory: None, workers: None };
        let request = WorkerRequest::JoinContainer { row: 1, gpus: Vec::new(), limits };
        assert_eq!(serde_json::to_value(request).unwrap()["Belong"]["row"], 1);
    }
}
