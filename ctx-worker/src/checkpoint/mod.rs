//! A checkpoint and a restore: what commands access, copies of memory, saved state.

pub(crate) mod access;
pub(crate) mod background;
pub(crate) mod check;
mod commands;
pub(crate) mod copying;
pub(crate) mod cut;
pub(crate) mod describe;
pub(crate) mod draft;
pub(crate) mod engine;
pub(crate) mod holders;
pub(crate) mod layers;
pub(crate) mod load;
mod parts;
mod precopy;
mod room;
pub(crate) mod save;
pub(crate) mod save_error;
mod secure;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use rekindle_cuda_abi::table::Function;

use self::access::hash::Hasher;
use self::access::observe::Observation;
use self::access::tracker::Tracker;
use self::copying::background::Background;
use self::copying::guard::Guard;
use self::copying::reserving::Reserving;
use self::copying::{Clones, Place, Precopied};
use self::engine::{Buffers, Engine, Pace, Stage};

/// What copies the client's memory, and knows what commands do to it.
pub(crate) struct Checkpoint {
    /// What copies; not here while it does so in the background.
    pub(crate) engine: Option<Engine>,
    /// Devices whose primary contexts were reset while the engine was away.
    pub(crate) reset_meanwhile: Vec<usize>,
    /// The engine's, to be had while it is away.
    pub(crate) buffers: Buffers,
    pub(crate) stage: Stage,
    pub(crate) pace: Pace,
    /// Hashes device memory.
    pub(crate) hasher: Hasher,
    /// What is known of the memory that commands use.
    pub(crate) tracker: Box<Tracker>,
    /// What looks at the client's accesses, where the daemon's configuration asks for that.
    pub(crate) observed: Option<Box<Observation>>,
    pub(crate) copying: CopyState,
}

/// The state of copies of the client's memory: one in the background, and what the last one has left.
#[derive(Default)]
pub(crate) struct CopyState {
    /// A copy that goes on in the background.
    pub(crate) background: Option<Background>,
    /// What commands have to look at before they are executed, meanwhile.
    pub(crate) guard: Option<Guard>,
    /// Reserves device memory for clones.
    pub(crate) reserving: Option<Reserving>,
    /// Device memory that was reserved for clones.
    pub(crate) reserved: Arc<Mutex<Option<Clones>>>,
    /// Whether memory that others' clones take may be there soon; waits a moment.
    pub(crate) memory_pressure: Option<Box<dyn Fn(bool) -> bool + Send>>,
    /// What was copied before the quiesce.
    pub(crate) precopied: Option<Precopied>,
    /// Memory that was written by a command that was not expected to write it.
    pub(crate) mispredicted: HashSet<Place>,
    /// When commands first wrote each during the last copy: 0, 1, ... They may do so again.
    pub(crate) written_soon: HashMap<Place, u32>,
}

impl Checkpoint {
    /// The state of a worker that has no client yet.
    pub(crate) fn new(engine: Engine, hasher: Hasher, table: &[Function]) -> Self {
        Self {
            reset_meanwhile: Vec::new(),
            buffers: engine.buffers.clone(),
            stage: engine.stage.clone(),
            pace: engine.pace.clone(),
            engine: Some(engine),
            hasher,
            tracker: Box::new(Tracker::new(table)),
            observed: None,
            copying: CopyState::default(),
        }
    }
}
