//! The content of a restored client's memory on its way to the device. `checkpoint/background_load.rs` loads it.

use std::fs::File;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rekindle_images::DataReader;
use rekindle_wire::control::LoadTimes;

use crate::checkpoint::engine::{Engine, Fill};
use crate::checkpoint::mapping::Mapping;
use crate::checkpoint::template::Template;
use crate::resources::job::EngineError;
use crate::resources::vmm::aliases::Alias;

/// Where content comes from that is about to be loaded.
pub(crate) struct Source {
    pub(crate) reader: Arc<DataReader>,
    /// Whether the files are of no use after the load, and nobody else has them.
    pub(crate) is_last_use: bool,
}

/// Files whose content was loaded, and which nobody else has. Closing a file on a tmpfs frees its pages, which takes 2.8 ms a
/// gigabyte with pages of 2 MiB: the client would wait for that. So they are freed little by little while the client runs again.
#[derive(Default)]
pub(crate) struct Discarded {
    files: Vec<File>,
    last: Option<Instant>,
}

/// The bytes that are freed at a time, in a fifth of a millisecond.
const DISCARD_STEP: u64 = 64 << 20;
/// The time between two steps while the client always has commands: a tenth of the worker's time, for 31 ms a gigabyte.
const DISCARD_INTERVAL: Duration = Duration::from_millis(2);

impl Discarded {
    pub(crate) fn add(&mut self, files: impl Iterator<Item = File>) {
        self.files.extend(files);
    }

    /// Frees a little if the last time was long enough ago. To be called again and again while commands come.
    pub(crate) fn beside_commands(&mut self) {
        if !self.files.is_empty() && self.last.is_none_or(|last| last.elapsed() >= DISCARD_INTERVAL) {
            self.step();
        }
    }

    /// Frees a little. Returns whether there was something left.
    pub(crate) fn step(&mut self) -> bool {
        let Some(file) = self.files.last() else { return false };
        let bytes = file.metadata().map_or(0, |it| it.len());
        // A file that cannot be cut is freed at once.
        if bytes == 0 || file.set_len(bytes.saturating_sub(DISCARD_STEP)).is_err() {
            self.files.pop();
        }
        self.last = Some(Instant::now());
        true
    }

    /// Frees all.
    pub(crate) fn clear(&mut self) {
        self.files.clear();
    }
}

/// The result of the thread: the engine, how long the lanes took, and whether they succeeded.
pub(crate) type Ended = (Engine, Duration, Result<(), EngineError>);

/// A load that is under way.
pub(crate) struct UnderWay {
    pub(crate) source: Arc<Source>,
    /// Content that is on the devices already.
    pub(crate) template: Template,
    /// What is loaded, one after the other.
    pub(crate) fills: Vec<Arc<Fill>>,
    /// Mappings through which pieces are filled, and which the load removes at its end.
    pub(crate) aliases: Vec<Alias>,
    /// The way to the thread, as long as there is more to come.
    pub(crate) more: Option<Sender<Arc<Fill>>>,
    /// The thread that maps memory meanwhile.
    pub(crate) mapping: Mapping,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_freed_step_by_step() {
        let files: Vec<_> = [3 * DISCARD_STEP + 1, 0, 5]
            .map(|bytes| {
                let file = tempfile::tempfile().unwrap();
                file.set_len(bytes).unwrap();
                file
            })
            .into();
        let watched = files[0].try_clone().unwrap();
        let bytes = || watched.metadata().unwrap().len();
        let mut discarded = Discarded::default();
        assert!(!discarded.step());
        discarded.add(files.into_iter());
        // Two steps for the last file, one for the empty one.
        assert!((0..3).all(|_| discarded.step()) && bytes() == 3 * DISCARD_STEP + 1);
        assert!(discarded.step() && bytes() == 2 * DISCARD_STEP + 1);
        discarded.last = Some(Instant::now() + Duration::from_secs(60));
        discarded.beside_commands();
        assert_eq!(bytes(), 2 * DISCARD_STEP + 1, "it is too early for another step beside commands");
        assert_eq!((0..9).take_while(|_| discarded.step()).count(), 4);
        assert!(bytes() == 0 && discarded.files.is_empty());
    }
}
