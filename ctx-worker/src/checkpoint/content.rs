//! The content of a restored client's memory, which a thread loads while CRIU makes the client's process, and while that
//! process runs again. No command of the client is executed before the content is there.
//!
//! ```text
//!   begin_load ──engine──► thread "load": lanes; aliases unmapped
//!                             │ over: the request loop gets an event
//!   end_load: engine and result are back
//! ```

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rekindle_images::DataReader;
use rekindle_wire::control::LoadTimes;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::engine::{Engine, Fill, small_thread};
use crate::gpu::Gpu;
use crate::resources::device::Device;
use crate::resources::job::EngineError;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::vmm::aliases::{Alias, unmap_aliases};

/// How often a load that somebody waits for is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Content that is about to be loaded.
pub(crate) struct Content {
    pub(crate) fill: Fill,
    pub(crate) reader: DataReader,
    /// Mappings through which pieces are filled, and which the load removes at its end.
    pub(crate) aliases: Vec<Alias>,
}

/// What the thread returns: the engine, how long the load took, and its result.
type Ended = (Engine, Duration, Result<(), EngineError>);

/// The load of a restored client's content.
#[derive(Default)]
pub(crate) enum ContentLoad {
    /// The client was not restored.
    #[default]
    None,
    UnderWay {
        fill: Arc<Fill>,
        thread: JoinHandle<Option<Ended>>,
        times: LoadTimes,
    },
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

impl Checkpoint {
    /// Begins to load in a separate thread, which calls `over` at its end. `times` tells how long the steps before took.
    pub(crate) fn begin_load(
        &mut self,
        gpu: &mut Gpu,
        devices: &[Device],
        content: Content,
        times: LoadTimes,
        over: impl FnOnce() + Send + 'static,
    ) -> Result<(), NotLoaded> {
        let Content { fill, reader, aliases } = content;
        let driver = gpu.driver;
        let primaries: Vec<_> = devices.iter().map(|d| d.primary).collect();
        let engine = self.engine.as_mut().ok_or(NotLoaded::Busy)?;
        let prepared = engine.prepare(driver, &primaries);
        gpu.leave();
        prepared?;
        let fill = Arc::new(fill);
        let of_thread = Arc::clone(&fill);
        let (hand_over, handed_over) = std::sync::mpsc::channel::<Engine>();
        let work = move || {
            let mut engine = handed_over.recv().ok()?;
            let began = Instant::now();
            let result = engine.load(driver, &of_thread, &reader);
            unmap_aliases(driver, &aliases);
            let took = began.elapsed();
            over();
            Some((engine, took, result))
        };
        let thread = small_thread("load").spawn(work).map_err(|_| EngineError::NoThread)?;
        // The thread waits only for the engine.
        let handed = self.engine.take().map(|engine| hand_over.send(engine));
        debug_assert!(matches!(handed, Some(Ok(()))));
        self.content = ContentLoad::UnderWay { fill, thread, times };
        Ok(())
    }

    /// How far the load of the content is.
    pub(crate) fn load_progress(&self) -> LoadProgress {
        match &self.content {
            ContentLoad::UnderWay { fill, thread, .. } if !thread.is_finished() => {
                LoadProgress::UnderWay { loaded: fill.loaded(), bytes: fill.bytes() }
            }
            _ => LoadProgress::Over,
        }
    }

    /// Waits for the end of the load until the timeout is over. Returns whether the load is over.
    pub(crate) fn wait_for_load(&self, timeout: Duration) -> bool {
        let began = Instant::now();
        while matches!(self.load_progress(), LoadProgress::UnderWay { .. }) {
            if began.elapsed() >= timeout {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL.min(timeout));
        }
        true
    }

    /// Waits for the end of the load, takes the engine back, and tells how long the load took. The first call after a load
    /// that has failed returns its error, later ones that it failed.
    pub(crate) fn end_load(&mut self) -> Result<LoadTimes, EngineError> {
        match std::mem::replace(&mut self.content, ContentLoad::Failed) {
            ContentLoad::None => Err(EngineError::NothingToLoad),
            ContentLoad::Failed => Err(EngineError::Lost),
            ContentLoad::Loaded(times) => {
                self.content = ContentLoad::Loaded(times);
                Ok(times)
            }
            ContentLoad::UnderWay { fill, thread, mut times } => {
                let (engine, took, result) = thread.join().ok().flatten().ok_or(EngineError::Lost)?;
                self.engine = Some(engine);
                result?;
                times.content_ns = took.as_nanos() as u64;
                (times.bytes, times.set) = (fill.bytes(), fill.set());
                self.content = ContentLoad::Loaded(times);
                Ok(times)
            }
        }
    }
}
