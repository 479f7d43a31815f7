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
use crate::checkpoint::engine::Engine;
use crate::checkpoint::save::{Draft, Text};
use crate::gpu::driver::CallFailed;
use crate::resources::job::EngineError;
use crate::resources::memory::BackgroundCopy;
use crate::resources::vmm::aliases::{Alias, AliasError, unmap_aliases};
use crate::serve::executor::Executor;
use crate::session::state::StateError;
use crate::signal_stack::Thread;

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
    State(#[from] StateError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("{error}, by one of the kernels {kernels}")]
    MispredictedWrite { error: EngineError, kernels: String },
}

impl Failing for CopyError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Engine(error) | Self::MispredictedWrite { error, .. } => error.kind(),
            Self::State(error) => error.kind(),
            Self::Already => FailureKind::Refused,
            Self::Nothing | Self::Thread | Self::Spawn(_) | Self::TooMuch | Self::Aliases(_) | Self::Driver(_) => {
                FailureKind::Internal
            }
        }
    }
}

impl Executor {
    pub(crate) fn prepare_engine(&mut self) -> Result<(), CopyError> {
        let primaries: Vec<_> = self.memory.devices.iter().map(|d| d.primary).collect();
        let driver = self.driver();
        let engine = self.checkpoint.engine.as_mut().ok_or(CopyError::Already)?;
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
            unmap_aliases(driver, &aliases);
            room.into_iter().for_each(|room| room.release(driver));
            of_thread.end();
            Some((engine, result))
        };
        let started = Thread::named("copy").spawn(work);
        let engine = self.checkpoint.engine.take();
        let (thread, engine) = match (started, engine) {
            (Ok(thread), Some(engine)) => (thread, engine),
            (started, engine) => {
                self.checkpoint.engine = engine;
                self.checkpoint.copying.guard = None;
                // Where there is a thread, it ends without an engine.
                drop(hand_over);
                drop(started.map(JoinHandle::join));
                unmap_aliases(driver, &to_unmap);
                copying.stop().into_iter().for_each(|room| room.release(driver));
                copying.end();
                return Err(CopyError::Thread);
            }
        };
        for device in &mut self.memory.devices {
            let copying: Arc<dyn BackgroundCopy> = Arc::clone(&copying) as _;
            device.memory.set_kept(Some(copying));
        }
        cancel.begun(&copying);
        // It waits for the engine alone.
        let _ = hand_over.send(engine);
        self.checkpoint.copying.background = Some(Background { copying, thread: Some(thread), result: None, draft });
        Ok(())
    }

    /// How far the copy is. Once it is over this is said once.
    pub(crate) fn progress(&mut self) -> Result<Progress, CopyError> {
        let copying = match &self.checkpoint.copying.background {
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
        let Some(background) = self.checkpoint.copying.background.take() else { return Err(CopyError::Nothing) };
        let (waits, ran) = self.end_guard();
        let texts = match background.result.unwrap_or(Err(EngineError::Lost)) {
            Ok(texts) => texts,
            Err(error) => {
                self.checkpoint.copying.precopied = None;
                if !matches!(error, EngineError::MispredictedWrite { .. }) {
                    return Err(error.into());
                }
                self.note_mispredicted(&copying, &ran);
                return Err(CopyError::MispredictedWrite { error, kernels: listed(&ran) });
            }
        };
        let client = match background.draft {
            Some(draft) => Some(Box::new(draft.complete(copying.pieces()?, texts))),
            None => {
                if let Some(precopied) = &mut self.checkpoint.copying.precopied {
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
        let Some(background) = &mut self.checkpoint.copying.background else { return };
        if let Some(thread) = background.thread.take() {
            let ended = thread.join().ok().flatten();
            let (engine, result) =
                ended.map_or((None, Err(EngineError::Lost)), |(engine, result)| (Some(engine), result));
            (self.checkpoint.engine, background.result) = (engine, Some(result));
            let reset = std::mem::take(&mut self.checkpoint.reset_meanwhile);
            self.checkpoint.engine.iter_mut().for_each(|engine| reset.iter().for_each(|device| engine.forget(*device)));
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
        if self.checkpoint.copying.background.as_ref().is_some_and(|background| which(&background.copying))
            && let Err(why) = self.progress()
        {
            tracing::debug!("a copy that nobody asked about: {why}");
        }
    }

    /// Waits until nothing is copied in the background any more, nor memory set aside, and has the engine back; what came
    /// of the copy is told by [`Executor::progress`].
    ///
    /// The daemon gives up a copy that does not come further for as long as its configuration says. What such a copy has on
    /// the host may wait for its disk for ever, and the engine with it: then the engine stays away, but no lane uses a
    /// device any more, nor will.
    pub(crate) fn wait_for_background(&mut self) {
        self.join_reserving();
        if let Some(background) = &self.checkpoint.copying.background {
            let copying = &background.copying;
            if !copying.wait_unless_failed() {
                copying.wait_until_quiet();
                if !copying.wait_until_over_for(GIVEN_UP) {
                    tracing::warn!("a copy that was given up hangs in its disk: going on without it");
                    return;
                }
            }
        }
        self.join_background();
    }

    /// The ring is about to be opened: a copy that needs it closed is given up, and what was prepared for one that did not
    /// begin is given back.
    pub(crate) fn before_opening(&mut self) {
        if let Some(background) = &self.checkpoint.copying.background
            && (!background.copying.may_open() || background.draft.is_none())
        {
            background.copying.fail();
            background.copying.wait_until_quiet();
        }
        if let Some(background) = &self.checkpoint.copying.background {
            background.copying.application_runs();
        }
        self.checkpoint.copying.precopied = None;
        self.join_reserving();
        self.give_up_reserved();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};

    use super::*;
    use crate::checkpoint::copying::tests::tasks;
    use crate::checkpoint::copying::{Preservation, Taken};
    use crate::resources::device::Device;
    use crate::resources::memory::DeviceMemory;
    use crate::serve::fixture;

    /// A worker whose copy is about to write what a lane has read.
    fn copying(goes_on: Receiver<()>) -> (Executor, Taken) {
        let mut worker = fixture::executor();
        let memory = DeviceMemory::new(0, 0);
        worker.memory.devices.push(Device {
            device: 0,
            primary: 1,
            used: true,
            reset: false,
            capability: (9, 0),
            memory,
        });
        worker.prepare_engine().unwrap();
        let copying = Copying::new(tasks(Preservation::Protected), None, false);
        let taken = copying.take().unwrap();
        let (engine, of_thread) = (worker.checkpoint.engine.take().unwrap(), Arc::clone(&copying));
        let thread = std::thread::spawn(move || {
            let _ = goes_on.recv();
            of_thread.end();
            Some((engine, Err(EngineError::Cancelled)))
        });
        worker.checkpoint.copying.background =
            Some(Background { copying, thread: Some(thread), result: None, draft: None });
        (worker, taken)
    }

    #[test]
    fn a_reset_goes_on_without_a_copy_that_was_given_up_and_hangs_in_its_disk() {
        let (disk, goes_on) = channel();
        let (says, done) = channel();
        let (gives_up, given_up) = channel();
        std::thread::spawn(move || {
            let (mut worker, taken) = copying(goes_on);
            let copying = Arc::clone(&worker.checkpoint.copying.background.as_ref().unwrap().copying);
            let buffers = worker.checkpoint.buffers.clone();
            copying.is_read(&taken);
            gives_up.send(copying).unwrap();
            worker.reset_primary(0).unwrap();
            says.send("reset").unwrap();
            assert!(worker.checkpoint.engine.is_none() && worker.memory.devices[0].reset);
            // The lane that hangs may read its buffer yet.
            assert!(buffers.are_mapped());
            assert!(matches!(worker.prepare_engine(), Err(CopyError::Already)));
            disk.send(()).unwrap();
            worker.checkpoint.copying.background.as_ref().unwrap().copying.wait_until_over_for(Duration::from_secs(60));
            worker.discard_finished();
            assert!(worker.checkpoint.copying.background.is_none() && worker.checkpoint.reset_meanwhile.is_empty());
            // With streams and events of the context as it is now.
            assert!(worker.checkpoint.engine.as_ref().is_some_and(|engine| engine.has_nothing_of(0)));
            worker.prepare_engine().unwrap();
            says.send("prepared").unwrap();
        });
        let copying: Arc<Copying> = given_up.recv().unwrap();
        // Not before it is given up.
        done.recv_timeout(Duration::from_millis(100)).unwrap_err();
        copying.cancel();
        assert_eq!(done.recv_timeout(Duration::from_secs(60)), Ok("reset"));
        assert_eq!(done.recv_timeout(Duration::from_secs(60)), Ok("prepared"));
    }

    #[test]
    fn a_reset_waits_for_a_lane_that_reads_a_clone_though_its_copy_was_given_up() {
        use crate::checkpoint::copying::Clones;
        let mut tasks = tasks(Preservation::Protected);
        tasks.truncate(1);
        tasks[0].preservation = Preservation::Cloned(rekindle_wire::window::clones(0).start);
        let copying = Copying::new(tasks, Some(Clones::imagined(8 << 20)), false);
        let taken = copying.take().unwrap();
        copying.fail();
        let (says, quiet) = channel();
        let waiting = Arc::clone(&copying);
        std::thread::spawn(move || {
            waiting.wait_until_quiet();
            says.send(())
        });
        quiet.recv_timeout(Duration::from_millis(100)).unwrap_err();
        copying.is_read(&taken);
        assert_eq!(quiet.recv_timeout(Duration::from_secs(60)), Ok(()));
    }
}
