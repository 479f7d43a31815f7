//! The content of a restored client's memory on its way to the device. `checkpoint/background_load.rs` loads it.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rekindle_images::DataReader;
use rekindle_wire::control::LoadTimes;

use crate::checkpoint::engine::{Engine, Fill};
use crate::resources::job::EngineError;
use crate::resources::vmm::aliases::Alias;

/// Content that is about to be loaded.
pub(crate) struct Content {
    pub(crate) fill: Fill,
    pub(crate) reader: DataReader,
    /// Mappings through which pieces are filled, and which the load removes at its end.
    pub(crate) aliases: Vec<Alias>,
}

/// The result of the thread: the engine, how long the lanes took, and whether they succeeded.
pub(crate) type Ended = (Engine, Duration, Result<(), EngineError>);

/// A load that is under way.
pub(crate) struct UnderWay {
    pub(crate) content: Arc<Content>,
    pub(crate) thread: JoinHandle<Option<Ended>>,
    pub(crate) times: LoadTimes,
}

/// The load of a restored client's content.
#[derive(Default)]
pub(crate) enum ContentLoad {
    /// The client was not restored.
    #[default]
    None,
    UnderWay(UnderWay),
    /// All content is there.
    Loaded(LoadTimes),
    /// The content could not be loaded. The client has no other memory, and must end.
    Failed,
}

/// How far a load is.
pub(crate) enum LoadProgress {
    UnderWay { loaded: u64, bytes: u64 },
    Over,
}
