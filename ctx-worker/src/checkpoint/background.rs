//! A copy in the background: its thread, its progress, and the functions that wait for its end.
//!
//! ```text
//!   begin (save or pre-copy) ──engine──► thread "copy": lanes; seal; aliases unmapped, room given back
//!                                           │ over
//!   progress: Saving, Saving, … ────────────┴─► Saved, and the engine is back
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;

use rekindle_images::DataWriter;
use rekindle_wire::control::Waits;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::copying::background::{Background, GIVEN_UP, Progress, finish};
use crate::checkpoint::copying::error::CopyError;
use crate::checkpoint::copying::guard::listed;
use crate::checkpoint::copying::{Cancel, Copying};
use crate::checkpoint::draft::Draft;
use crate::checkpoint::engine::Engine;
use crate::gpu::Gpu;
use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::resources::device::Device;
use crate::resources::job::EngineError;
use crate::resources::memory::BackgroundCopy;
use crate::resources::vmm::aliases::{Alias, unmap_aliases};
use crate::signal_stack::Thread;

/// The input of a copy in the background.
pub(crate) struct Begin {
    pub(crate) copying: Arc<Copying>,
    pub(crate) writer: Arc<DataWriter>,
    pub(crate) cancel: Arc<Cancel>,
    /// Mappings that the copy removes at its end.
    pub(crate) aliases: Vec<Alias>,
    /// The draft of the manifest, if the copy is for a save.
    pub(crate) draft: Option<Draft>,
}

impl Checkpoint {
    /// Makes the buffers and streams that the engine lacks.
    pub(crate) fn prepare_engine(&mut self, gpu: &mut Gpu, devices: &[Device]) -> Result<(), CopyError> {
        let primaries: Vec<_> = devices.iter().map(|d| d.primary).collect();
        let engine = self.engine.as_mut().ok_or(CopyError::Already)?;
        let prepared = engine.prepare(gpu.driver, &primaries);
        gpu.leave();
        Ok(prepared?)
    }

    /// Begins to copy in a separate thread.
    pub(crate) fn copy_in_background(
        &mut self,
        driver: &'static Driver,
        memory: &mut Memory,
        begin: Begin,
    ) -> Result<(), CopyError> {
        let Begin { copying, writer, cancel, aliases, mut draft } = begin;
        let of_thread = Arc::clone(&copying);
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
            // No lane is working any more, and soon no clone and no hash is being made: their resources may be released.
            let room = of_thread.stop();
            of_thread.hashes.wait_until_made();
            unmap_aliases(driver, &aliases);
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
                self.copying.guard = None;
                // If the thread was started, it ends without an engine.
                drop(hand_over);
                drop(started.map(JoinHandle::join));
                unmap_aliases(driver, &to_unmap);
                copying.stop().into_iter().for_each(|room| room.release(driver));
                copying.end();
                return Err(CopyError::Thread);
            }
        };
        for device in &mut memory.devices {
            let copying: Arc<dyn BackgroundCopy> = Arc::clone(&copying) as _;
            device.memory.set_kept(Some(copying));
        }
        cancel.begun(&copying);
        // The thread waits only for the engine.
        let _ = hand_over.send(engine);
        self.copying.background = Some(Background { copying, thread: Some(thread), result: None, draft });
        Ok(())
    }

    /// The progress of the copy. The end of the copy is reported once.
    pub(crate) fn progress(&mut self, memory: &mut Memory) -> Result<Progress, CopyError> {
        let copying = match &self.copying.background {
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
        let Some(background) = self.copying.background.take() else { return Err(CopyError::Nothing) };
        let (waits, ran) = self.end_guard(memory);
        let texts = match background.result.unwrap_or(Err(EngineError::Lost)) {
            Ok(texts) => texts,
            Err(error) => {
                self.copying.precopied = None;
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
                if let Some(precopied) = &mut self.copying.precopied {
                    precopied.add(copying.copied_pieces());
                }
                None
            }
        };
        let bytes = if client.is_some() { copying.bytes } else { copying.changed() };
        Ok(Progress::Saved { client, bytes, waits })
    }

    /// Takes the engine back from a copy that is over or about to be.
    fn join_background(&mut self) {
        let Some(background) = &mut self.copying.background else { return };
        if let Some(thread) = background.thread.take() {
            let ended = thread.join().ok().flatten();
            let (engine, result) =
                ended.map_or((None, Err(EngineError::Lost)), |(engine, result)| (Some(engine), result));
            (self.engine, background.result) = (engine, Some(result));
            let reset = std::mem::take(&mut self.reset_meanwhile);
            self.engine.iter_mut().for_each(|engine| reset.iter().for_each(|device| engine.forget(*device)));
        }
    }

    /// Discards a copy that nobody asks about any more: a copy that is over, or that was given up and is about to be over.
    pub(crate) fn discard_finished(&mut self, memory: &mut Memory) {
        self.discard(memory, |copying| {
            copying.is_over() || copying.has_failed() && copying.wait_until_over_for(GIVEN_UP)
        });
    }

    /// Discards a copy that is over and that nobody will ask about.
    pub(crate) fn discard_cancelled(&mut self, memory: &mut Memory) {
        self.discard(memory, |copying| copying.is_over() && copying.is_cancelled());
    }

    fn discard(&mut self, memory: &mut Memory, which: impl FnOnce(&Copying) -> bool) {
        if self.copying.background.as_ref().is_some_and(|background| which(&background.copying))
            && let Err(why) = self.progress(memory)
        {
            tracing::debug!("a copy that nobody asked about: {why}");
        }
    }

    /// Waits until no memory is copied or reserved in the background any more, and takes the engine back.
    /// [`Checkpoint::progress`] reports the result of the copy.
    ///
    /// The daemon gives up a copy that makes no progress for as long as its configuration says. The content that such a copy
    /// has on the host may wait for its disk for ever, and the engine with it: then the engine stays away, but no lane uses a
    /// device any more, nor will.
    pub(crate) fn wait_for_background(&mut self) {
        self.join_reserving();
        if let Some(background) = &self.copying.background {
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

    /// Called before the ring is opened: gives up a copy that needs the ring closed, and releases the preparations for a copy
    /// that did not begin.
    pub(crate) fn before_opening(&mut self, driver: &Driver) {
        if let Some(background) = &self.copying.background
            && (!background.copying.may_open() || background.draft.is_none())
        {
            background.copying.fail();
            background.copying.wait_until_quiet();
        }
        if let Some(background) = &self.copying.background {
            background.copying.application_runs();
        }
        self.copying.precopied = None;
        self.join_reserving();
        self.give_up_reserved(driver);
    }

    /// Ends the checks of commands. Returns how long commands waited, and the names of kernels that ran meanwhile.
    fn end_guard(&mut self, memory: &mut Memory) -> (Waits, BTreeSet<String>) {
        let Some(guard) = self.copying.guard.take() else { return Default::default() };
        for device in &mut memory.devices {
            device.memory.set_kept(None);
        }
        self.copying.written_soon = guard.named;
        let name = |function: &u64| Some(self.tracker.function(*function)?.1.to_owned());
        (guard.waits, guard.ran.iter().filter_map(name).collect())
    }

    /// A copy has failed because of one of these kernels: the next copy relies less on the predictions about them.
    fn note_mispredicted(&mut self, copying: &Copying, ran: &BTreeSet<String>) {
        self.copying.mispredicted.extend(copying.wrong_places());
        self.tracker.one_was_wrong(ran);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Duration;

    use super::*;
    use crate::checkpoint::copying::tests::tasks;
    use crate::checkpoint::copying::{Preservation, Taken};
    use crate::resources::code_reserve::CodeReserve;
    use crate::resources::device::Device;
    use crate::resources::memory::DeviceMemory;
    use crate::serve::executor::Executor;
    use crate::serve::fixture;
    use rekindle_wire::window;

    fn prepare(worker: &mut Executor) -> Result<(), CopyError> {
        worker.checkpoint.prepare_engine(&mut worker.call.gpu, &worker.memory.devices)
    }

    /// A worker whose copy is about to write the content that a lane has read.
    fn copying(goes_on: Receiver<()>) -> (Executor, Taken) {
        let mut worker = fixture::executor();
        let memory = DeviceMemory::new(0, 0, window::MAX_PIECE);
        worker.memory.devices.push(Device {
            device: 0,
            primary: 1,
            used: true,
            reset: false,
            placed_after: 0,
            code_reserve: CodeReserve::default(),
            capability: (9, 0),
            most: u64::MAX,
            memory,
        });
        prepare(&mut worker).unwrap();
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
            // The lane that hangs may still read its buffer.
            assert!(buffers.are_mapped());
            assert!(matches!(prepare(&mut worker), Err(CopyError::Already)));
            disk.send(()).unwrap();
            worker.checkpoint.copying.background.as_ref().unwrap().copying.wait_until_over_for(Duration::from_secs(60));
            let Executor { checkpoint, memory, .. } = &mut worker;
            checkpoint.discard_finished(memory);
            assert!(worker.checkpoint.copying.background.is_none() && worker.checkpoint.reset_meanwhile.is_empty());
            // The streams and events belong to the new context.
            assert!(worker.checkpoint.engine.as_ref().is_some_and(|engine| engine.has_nothing_of(0)));
            prepare(&mut worker).unwrap();
            says.send("prepared").unwrap();
        });
        let copying: Arc<Copying> = given_up.recv().unwrap();
        // The copy does not end before it is given up.
        done.recv_timeout(Duration::from_millis(100)).unwrap_err();
        copying.cancel();
        assert_eq!(done.recv_timeout(Duration::from_secs(60)), Ok("reset"));
        assert_eq!(done.recv_timeout(Duration::from_secs(60)), Ok("prepared"));
    }
}
