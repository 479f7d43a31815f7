//! A copy in the background: its thread and its result.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rekindle_images::{Blob, Client, DataWriter};
use rekindle_wire::control::Waits;

use super::Copying;
use crate::checkpoint::draft::{Draft, Text};
use crate::checkpoint::engine::Engine;
use crate::resources::job::EngineError;

/// How long a copy that was given up may take to end, before the next copy begins.
pub(in crate::checkpoint) const GIVEN_UP: Duration = Duration::from_secs(5);

/// The engine, the result of its copy, and the blobs that were written besides memory. `None` if the thread never received an
/// engine.
pub(in crate::checkpoint) type Copied = Option<(Engine, Result<Vec<Blob>, EngineError>)>;

/// A copy in the background, which has the engine until it is over.
pub(crate) struct Background {
    pub(crate) copying: Arc<Copying>,
    /// The thread, until it has been waited for.
    pub(in crate::checkpoint) thread: Option<JoinHandle<Copied>>,
    /// The result of the copy, once the thread has been waited for.
    pub(in crate::checkpoint) result: Option<Result<Vec<Blob>, EngineError>>,
    /// The draft of the manifest, if the copy is for a save.
    pub(in crate::checkpoint) draft: Option<Draft>,
}

/// The progress of a copy.
pub(crate) enum Progress {
    Saving {
        may_open: bool,
        copied: u64,
        bytes: u64,
    },
    /// The copy is over. `client` is the client's part of the manifest, if the copy was for a save.
    Saved {
        client: Option<Box<Client>>,
        bytes: u64,
        waits: Waits,
    },
}

/// Writes the texts besides memory, and completes the files.
pub(in crate::checkpoint) fn finish(
    copying: &Copying,
    writer: &DataWriter,
    texts: &[Text],
) -> Result<Vec<Blob>, EngineError> {
    let blobs = texts.iter().map(|text| text.write(writer)).collect::<Result<Vec<_>, _>>()?;
    let memory = copying.pieces()?;
    // A pre-copy may have written pieces that are not in the image.
    writer.seal_keeping(memory.iter().chain(blobs.iter().flat_map(|blob| &blob.pieces)))?;
    Ok(blobs)
}
