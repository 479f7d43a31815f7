//! A copy that goes on in the background: its thread, what has become of it, and who waits for its end.
//!
//! ```text
//!   begin (save or pre-copy) ──engine──► thread "copy": lanes; seal; aliases unmapped, room given back
//!                                           │ over
//!   progress: Saving, Saving, … ────────────┴─► Saved, and the engine is back
//! ```

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rekindle_images::{Blob, Client, DataWriter};
use rekindle_wire::control::{Failing, FailureKind, Waits};
use thiserror::Error;

use super::guard::listed;
use super::{Cancel, Copying};
use crate::worker::driver::CallFailed;
use crate::worker::engine::{Engine, EngineError};
use crate::worker::executor::Executor;
use crate::worker::save::{Draft, Text};
use crate::worker::signal_stack::Thread;
use crate::worker::vmm::{self, Alias, AliasError};

/// How long a copy that was given up may take to end, before the next one.
pub(super) const GIVEN_UP: Duration = Duration::from_secs(5);

/// The engine, and what came of its copy, with what was written besides memory; nothing where it never got one.
type Copied = Option<(Engine, Result<Vec<Blob>, EngineError>)>;

/// A copy that goes on in the background: until it is over the engine is with it.
pub(crate) struct Background {
    pub(crate) copying: Arc<Copying>,
    /// Until it has been waited for.
    thread: Option<JoinHandle<Copied>>,
    /// What came of it, then.
    result: Option<Result<Vec<Blob>, EngineError>>,
    /// Of a save.
    draft: Option<Draft>,
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
fn finish(copying: &Copying, writer: &DataWriter, texts: &[Text]) -> Result<Vec<Blob>, EngineError> {
    let blobs = texts.iter().map(|text| text.write(writer)).collect::<Result<Vec<_>, _>>()?;
    let memory = copying.pieces()?;
    // A pre-copy may have left what is not in the image after all.
    writer.seal_keeping(memory.iter().chain(blobs.iter().flat_map(|blob| &blob.pieces)))?;
    Ok(blobs)
}

/// Why device memory is not copied.
#[derive(Debug, Error)]
pub(crate) enum CopyError {
    #[error("nothing is being copied")]
    Nothing,
    #[error("it is being copied already: wait until that is over")]
    Already,
    #[error("cannot start a thread that copies")]
    Thread,
    #[error("{0}")]
    Spawn(std::io::Error),
    #[error("more memory than can be hashed at a time")]
    TooMuch,
    #[error(transparent)]
    Aliases(#[from] AliasError),
    #[error(transparent)]
    Driver(#[from] CallFailed),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("{error}, by one of the kernels {kernels}")]
    WrongGuess { error: EngineError, kernels: String },
}

impl Failing for CopyError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Engine(error) | Self::WrongGuess { error, .. } => error.kind(),
            Self::Already => FailureKind::Refused,
            Self::Nothing | Self::Thread | Self::Spawn(_) | Self::TooMuch | Self::Aliases(_) | Self::Driver(_) => {
                FailureKind::Internal
            }
        }
    }
}

impl Executor {
    pub(crate) fn prepare_engine(&mut self) -> Result<(), CopyError> {
        let primaries: Vec<_> = self.devices.iter().map(|d| d.primary).collect();
        let driver = self.driver();
        let engine = self.engine.as_mut().ok_or(CopyError::Already)?;
        let prepared = engine.prepare(driver, &primaries);
        self.context_changed();
        Ok(prepared?)
    }

    pub(crate) fn copy_in_background(
        &mut self,
        copying: Arc<Copying>,
        writer: Arc<DataWriter>,
        cancel: Arc<Cancel>,
        aliases: Vec<Alias>,
        mut draft: Option<Draft>,
    ) -> Result<(), CopyError> {
        let (driver, of_thread) = (self.driver(), Arc::clone(&copying));
        let texts = draft.as_mut().map(Draft::take_texts);
        let (hand_over, handed_over) = std::sync::mpsc::channel::<Engine>();
        let to_unmap = aliases.clone();
        let work = move || {
            let mut engine = handed_over.recv().ok()?;
            let copied = engine.copy_out(driver, &of_thread, &writer);
            let result = copied.and_then(|()| match texts {
                Some(texts) => finish(&of_thread, &writer, &texts),
                None => Ok(Vec::new()),
            });
            // No lane is at work any more, and soon no clone is being made: what they used may go away.
            let room = of_thread.stop();
            vmm::unmap_aliases(driver, &aliases);
            room.into_iter().for_each(|room| room.release(driver));
            of_thread.end();
            Some((engine, result))
        };
        let started = Thread::named("copy").spawn(work);
        let engine = self.engine.take();
        let (thread, engine) = match (started, engine) {
            (Ok(thread), Some(engine)) => (thread, engine),
            (started, engine) => {
                self.engine = engine;
                self.guard = None;
                // Where there is a thread, it ends without an engine.
                drop(hand_over);
                drop(started.map(JoinHandle::join));
                vmm::unmap_aliases(driver, &to_unmap);
                copying.stop().into_iter().for_each(|room| room.release(driver));
                copying.end();
                return Err(CopyError::Thread);
            }
        };
        for device in &mut self.devices {
            device.memory.set_kept(Some(Arc::clone(&copying)));
        }
        cancel.begun(&copying);
        // It waits for the engine alone.
        let _ = hand_over.send(engine);
        self.background = Some(Background { copying, thread: Some(thread), result: None, draft });
        Ok(())
    }

    /// How far the copy is. Once it is over this is said once.
    pub(crate) fn progress(&mut self) -> Result<Progress, CopyError> {
        let copying = match &self.background {
            None => return Err(CopyError::Nothing),
            Some(background) => Arc::clone(&background.copying),
        };
        if !copying.is_over() {
            return Ok(Progress::Saving {
                may_open: copying.may_open(),
                copied: copying.copied(),
                bytes: copying.bytes,
            });
        }
        self.join_background();
        let Some(background) = self.background.take() else { return Err(CopyError::Nothing) };
        let (waits, ran) = self.end_guard();
        let texts = match background.result.unwrap_or(Err(EngineError::Lost)) {
            Ok(texts) => texts,
            Err(error) => {
                self.precopied = None;
                if !matches!(error, EngineError::WrongGuess { .. }) {
                    return Err(error.into());
                }
                self.guessed_wrong(&copying, &ran);
                return Err(CopyError::WrongGuess { error, kernels: listed(&ran) });
            }
        };
        let client = match background.draft {
            Some(draft) => Some(Box::new(draft.complete(copying.pieces()?, texts))),
            None => {
                if let Some(precopied) = &mut self.precopied {
                    precopied.add(copying.copied_pieces());
                }
                None
            }
        };
        let bytes = if client.is_some() { copying.bytes } else { copying.changed() };
        Ok(Progress::Saved { client, bytes, waits })
    }

    /// Takes the engine back from a copy that is over, or about to be.
    fn join_background(&mut self) {
        let Some(background) = &mut self.background else { return };
        if let Some(thread) = background.thread.take() {
            let ended = thread.join().ok().flatten();
            let (engine, result) =
                ended.map_or((None, Err(EngineError::Lost)), |(engine, result)| (Some(engine), result));
            (self.engine, background.result) = (engine, Some(result));
        }
    }

    /// Forgets a copy that nobody asks about any more: one that is over, or that was given up and is about to be.
    pub(crate) fn discard_finished(&mut self) {
        self.discard(|copying| copying.is_over() || copying.has_failed() && copying.wait_until_over_for(GIVEN_UP));
    }

    /// Forgets a copy that is over and that nobody will ask about.
    pub(crate) fn discard_cancelled(&mut self) {
        self.discard(|copying| copying.is_over() && copying.is_cancelled());
    }

    fn discard(&mut self, which: impl FnOnce(&Copying) -> bool) {
        if self.background.as_ref().is_some_and(|background| which(&background.copying))
            && let Err(why) = self.progress()
        {
            tracing::debug!("a copy that nobody asked about: {why}");
        }
    }

    /// Waits until nothing is copied in the background any more, nor memory set aside, and has the engine back; what came
    /// of the copy is told by [`Executor::progress`].
    pub(crate) fn wait_for_background(&mut self) {
        self.join_reserving();
        if let Some(background) = &self.background {
            background.copying.wait_until_over();
        }
        self.join_background();
    }

    /// The ring is about to be opened: a copy that needs it closed is given up, and what was prepared for one that did not
    /// begin is given back.
    pub(crate) fn before_opening(&mut self) {
        if let Some(background) = &self.background
            && (!background.copying.may_open() || background.draft.is_none())
        {
            background.copying.fail();
            background.copying.wait_until_quiet();
        }
        if let Some(background) = &self.background {
            background.copying.application_runs();
        }
        self.precopied = None;
        self.join_reserving();
        self.give_up_reserved();
    }
}
