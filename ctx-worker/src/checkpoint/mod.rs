//! Checkpoint and restore: predicting the accesses of commands, copying memory, saving and loading state.

pub(crate) mod access;
pub(crate) mod background;
mod background_load;
pub(crate) mod borrowing;
pub(crate) mod check;
mod commands;
pub(crate) mod content;
pub(crate) mod copying;
pub(crate) mod cut;
pub(crate) mod describe;
pub(crate) mod draft;
pub(crate) mod engine;
pub(crate) mod holders;
pub(crate) mod layers;
pub(crate) mod load;
mod map_beside;
mod mapping;
mod own_memory;
mod parts;
mod precopy;
mod room;
pub(crate) mod save;
pub(crate) mod save_error;
mod secure;
pub(crate) mod suspend;
pub(crate) mod template;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use rekindle_cuda_abi::table::Function;

use self::access::hash::Hasher;
use self::access::observe::Observation;
use self::access::reads::Reads;
use self::access::tracker::Tracker;
use self::borrowing::Borrowing;
use self::content::{ContentLoad, Discarded};
use self::copying::background::Background;
use self::copying::guard::Guard;
use self::copying::reserving::Reserving;
use self::copying::{Clones, Place, Precopied};
use self::engine::{Buffers, Engine, Pace, Peek, Stage};

/// Copies the client's memory and predicts how commands access it.
pub(crate) struct Checkpoint {
    /// The copy engine. `None` while it copies or loads in the background.
    pub(crate) engine: Option<Engine>,
    /// Reads initial values of variables, also while the engine is away.
    pub(crate) peek: Peek,
    /// Devices whose primary contexts were reset while the engine was copying in the background.
    pub(crate) reset_meanwhile: Vec<usize>,
    /// The engine's buffers, accessible while it copies in the background.
    pub(crate) buffers: Buffers,
    pub(crate) stage: Stage,
    pub(crate) pace: Pace,
    /// Hashes device memory.
    pub(crate) hasher: Hasher,
    /// Predicts which memory commands access.
    pub(crate) tracker: Box<Tracker>,
    /// Compares the client's writes with the predicted ones, if the daemon's configuration asks for that.
    pub(crate) observed: Option<Box<Observation>>,
    /// In the reporting mode for reads.
    pub(crate) reads: Option<Box<Reads>>,
    pub(crate) copying: CopyState,
    /// The load of a restored client's content.
    pub(crate) content: ContentLoad,
    /// What is known of the writes of a client that borrows memory.
    pub(crate) borrowing: Option<Borrowing>,
    /// What is left of the content of a client that was suspended.
    pub(crate) discarded: Discarded,
}

/// The state of copies of the client's memory: the copy in the background, and the results of the last copy.
#[derive(Default)]
pub(crate) struct CopyState {
    /// The copy that runs in the background.
    pub(crate) background: Option<Background>,
    /// Checks commands before they are executed, while that copy runs.
    pub(crate) guard: Option<Guard>,
    /// Reserves device memory for clones.
    pub(crate) reserving: Option<Reserving>,
    /// Device memory that was reserved for clones.
    pub(crate) reserved: Arc<Mutex<Option<Clones>>>,
    /// Whether memory that other processes have may be free soon. The function waits for a while.
    pub(crate) memory_pressure: Option<Box<IsComing>>,
    /// The result of pre-copies, made before the quiesce.
    pub(crate) precopied: Option<Precopied>,
    /// Memory that a mispredicted write has changed.
    pub(crate) mispredicted: HashSet<Place>,
    /// The order in which commands first wrote each place during the last copy: 0, 1, ... They may do so again.
    pub(crate) written_soon: HashMap<Place, u32>,
}

/// Gets whether the command has not been retried yet, and a function that returns the bytes that must be free on each device.
pub(crate) type IsComing = dyn Fn(bool, &mut dyn FnMut() -> Vec<u64>) -> bool + Send;

impl Checkpoint {
    /// The state of a worker that has no client yet.
    pub(crate) fn new(engine: Engine, hasher: Hasher, table: &[Function]) -> Self {
        Self {
            reset_meanwhile: Vec::new(),
            buffers: engine.buffers.clone(),
            stage: engine.stage.clone(),
            pace: engine.pace.clone(),
            peek: Peek::beside(&engine),
            engine: Some(engine),
            hasher,
            tracker: Box::new(Tracker::new(table)),
            observed: None,
            reads: None,
            copying: CopyState::default(),
            content: ContentLoad::default(),
            borrowing: None,
            discarded: Discarded::default(),
        }
    }
}
