//! A copy that goes on in the background: its thread, and what has become of it.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rekindle_images::{Blob, Client, DataWriter};
use rekindle_wire::control::Waits;

use super::Copying;
use crate::checkpoint::draft::{Draft, Text};
use crate::checkpoint::engine::Engine;
use crate::resources::job::EngineError;

/// How long a copy that was given up may take to end, before the next one.
pub(in crate::checkpoint) const GIVEN_UP: Duration = Duration::from_secs(5);

/// The engine, and what came of its copy, with what was written besides memory; nothing where it never got one.
pub(in crate::checkpoint) type Copied = Option<(Engine, Result<Vec<Blob>, EngineError>)>;

/// A copy that goes on in the background: until it is over the engine is with it.
pub(crate) struct Background {
    pub(crate) copying: Arc<Copying>,
    /// Until it has been waited for.
    pub(in crate::checkpoint) thread: Option<JoinHandle<Copied>>,
    /// What came of it, then.
    pub(in crate::checkpoint) result: Option<Result<Vec<Blob>, EngineError>>,
    /// Of a save.
    pub(in crate::checkpoint) draft: Option<Draft>,
}

/// How far a copy is.
pub(crate) enum Progress {
    Saving {
        may_open: bool,
        copied: u64,
        bytes: u64,
    },
    /// It is over; the client's part of the manifest, if it was a save.
    Saved {
        client: Option<Box<Client>>,
        bytes: u64,
        waits: Waits,
    },
}

/// Writes what there is besides memory, and makes the files whole.
pub(in crate::checkpoint) fn finish(
    copying: &Copying,
    writer: &DataWriter,
    texts: &[Text],
) -> Result<Vec<Blob>, EngineError> {
    let blobs = texts.iter().map(|text| text.write(writer)).collect::<Result<Vec<_>, _>>()?;
    let memory = copying.pieces()?;
    // A pre-copy may have left what is not in the image after all.
    writer.seal_keeping(memory.iter().chain(blobs.iter().flat_map(|blob| &blob.pieces)))?;
    Ok(blobs)
}
