//! The content of a restored client's memory, which a thread loads while CRIU makes the client's process, and while that
//! process runs again. No command of the client is executed before the content is there.
//!
//! ```text
//!   begin_load ──engine──► thread "load": lanes
//!   load_more  ──fill────►                lanes again
//!   load_rest  ──fill────►                lanes again
//!                             │ over: the request loop gets an event
//!   end_load: engine and result are back; hashes compared on the device; aliases unmapped
//! ```
//!
//! What a restore can map before it replays the client's log is loaded while it replays the log.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::content::ContentKey;
use rekindle_images::{DataReader, HashKey, PieceHash};
use rekindle_wire::control::LoadTimes;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::access::hash::{self, BATCH_BYTES, MOST_PIECES};
use crate::checkpoint::content::{ContentLoad, LoadProgress, Source, UnderWay};
use crate::checkpoint::engine::{Engine, Fill, Part, small_thread};
use crate::checkpoint::mapping::Mapping;
use crate::checkpoint::template::Template;
use crate::gpu::Gpu;
use crate::resources::device::Device;
use crate::resources::job::{EngineError, Job};
use crate::resources::not_loaded::NotLoaded;
use crate::resources::vmm::aliases::{Alias, unmap_aliases};
use crate::session::call::Call;

/// How often a load that somebody waits for is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

impl Checkpoint {
    /// Begins to load in a separate thread, which calls `over` at its end. [`Checkpoint::load_rest`] must follow.
    pub(crate) fn begin_load(
        &mut self,
        gpu: &mut Gpu,
        devices: &[Device],
        (source, template): (Source, Template),
        over: impl FnOnce() + Send + 'static,
    ) -> Result<(), NotLoaded> {
        let driver = gpu.driver;
        let primaries: Vec<_> = devices.iter().map(|d| d.primary).collect();
        let engine = self.engine.as_mut().ok_or(NotLoaded::Busy)?;
        let prepared = engine.prepare(driver, &primaries);
        gpu.leave();
        prepared?;
        let source = Arc::new(source);
        let of_thread = Arc::clone(&source);
        let (hand_over, handed_over) = std::sync::mpsc::channel::<Engine>();
        let (more, fills) = std::sync::mpsc::channel::<Arc<Fill>>();
        let work = move || {
            let mut engine = handed_over.recv().ok()?;
            let mut took = Duration::ZERO;
            let result = fills.iter().try_for_each(|fill| {
                let began = Instant::now();
                let loaded = engine.load(driver, &fill, &of_thread.reader);
                took += began.elapsed();
                loaded
            });
            over();
            Some((engine, took, result))
        };
        let thread = small_thread("load").spawn(work).map_err(|_| EngineError::NoThread)?;
        // The thread waits only for the engine.
        let handed = self.engine.take().map(|engine| hand_over.send(engine));
        debug_assert!(matches!(handed, Some(Ok(()))));
        let (fills, aliases, times) = (Vec::new(), Vec::new(), LoadTimes::default());
        let more = Some(more);
        let mapping = Mapping::default();
        self.content =
            ContentLoad::UnderWay(UnderWay { source, template, fills, aliases, more, mapping, thread, times });
        Ok(())
    }

    /// Loads this too. Its memory is mapped.
    pub(crate) fn load_more(&mut self, fill: Fill) {
        let ContentLoad::UnderWay(load) = &mut self.content else { return };
        let fill = Arc::new(fill);
        // A thread that has failed takes nothing more, and its error comes with the end of the load.
        let _ = load.more.as_ref().map(|more| more.send(Arc::clone(&fill)));
        load.fills.push(fill);
    }

    /// Loads this too, and nothing after it. `aliases` are mappings for the load alone, and `times` tells how long the steps before
    /// took.
    pub(crate) fn load_rest(&mut self, fill: Fill, aliases: Vec<Alias>, times: LoadTimes) {
        self.load_more(fill);
        if let ContentLoad::UnderWay(load) = &mut self.content {
            (load.aliases, load.times, load.more) = (aliases, times, None);
        }
    }

    /// Ends a load to which no more comes, since there is no memory for the rest. Waits for what is under way, and returns the source.
    pub(crate) fn abandon_load(&mut self) -> Option<(Source, Template)> {
        let ContentLoad::UnderWay(UnderWay { source, template, more, thread, .. }) = std::mem::take(&mut self.content)
        else {
            return None;
        };
        drop(more);
        let (engine, _, _) = thread.join().ok().flatten()?;
        self.engine = Some(engine);
        // The thread has ended, so this is the only reference.
        Arc::into_inner(source).map(|source| (source, template))
    }

    /// How far the load of the content is.
    pub(crate) fn load_progress(&self) -> LoadProgress {
        match &self.content {
            ContentLoad::UnderWay(UnderWay { fills, thread, .. }) if !thread.is_finished() => LoadProgress::UnderWay {
                loaded: fills.iter().map(|fill| fill.loaded()).sum(),
                bytes: fills.iter().map(|fill| fill.bytes()).sum(),
            },
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

    /// Waits for the end of the load, takes the engine back, compares the hashes of the content, and tells how long all that
    /// took. The first call after a load that has failed returns its error, later ones that it failed.
    pub(crate) fn end_load(&mut self, call: &mut Call, devices: &mut [Device]) -> Result<LoadTimes, EngineError> {
        match std::mem::replace(&mut self.content, ContentLoad::Failed) {
            ContentLoad::None => Err(EngineError::NothingToLoad),
            ContentLoad::Failed => Err(EngineError::Lost),
            ContentLoad::Loaded(times) => {
                self.content = ContentLoad::Loaded(times);
                Ok(times)
            }
            ContentLoad::UnderWay(load) => {
                let UnderWay { source, mut template, fills, aliases, more, mut mapping, thread, mut times } = load;
                drop(more);
                let mapped = mapping.end(devices);
                let (engine, took, result) = thread.join().ok().flatten().ok_or(EngineError::Lost)?;
                self.engine = Some(engine);
                times.map_ns += mapped?.as_nanos() as u64;
                result?;
                let began = Instant::now();
                let compared = fills.iter().try_for_each(|fill| self.compare(call, devices, fill, &source.reader));
                call.gpu.leave();
                compared?;
                unmap_aliases(call.driver(), &aliases);
                (times.content_ns, times.hash_ns) = (took.as_nanos() as u64, began.elapsed().as_nanos() as u64);
                times.bytes = fills.iter().map(|fill| fill.bytes()).sum();
                times.set = fills.iter().map(|fill| fill.set()).sum();
                times.copied = fills.iter().map(|fill| fill.copied()).sum();
                self.content = ContentLoad::Loaded(times);
                template.release(call.driver());
                // The thread has ended, so this is the only reference.
                let last = Arc::into_inner(source).filter(|it| it.is_last_use).map(|it| it.reader);
                if let Some(reader) = last.and_then(Arc::into_inner) {
                    self.discarded.add(reader.into_files());
                }
                Ok(times)
            }
        }
    }

    /// Compares the hashes of content that is on the device with the image's.
    fn compare(
        &mut self,
        call: &Call,
        devices: &[Device],
        fill: &Fill,
        reader: &DataReader,
    ) -> Result<(), EngineError> {
        let HashKey::Content(key) = reader.key() else { return Ok(()) };
        let parts: Vec<_> = fill.to_compare().collect();
        let places: Vec<_> = parts.iter().map(|it| (it.job.device, it.job.address, it.job.length)).collect();
        self.hash_places(call, devices, &key, &places, |number, hash| {
            let part = parts[number];
            if hash == part.piece.hash { Ok(()) } else { Err(what_is_wrong(part, reader)) }
        })
    }

    /// Has parts copied on the device that the template has at their addresses, as far as it has the wanted content there: that is what
    /// hashes tell.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn copy_what_is_same(
        &mut self,
        call: &Call,
        devices: &[Device],
        (fill, template): (&mut Fill, &Template),
        key: HashKey,
    ) -> Result<(), EngineError> {
        let HashKey::Content(key) = key else { return Ok(()) };
        let place = |job: &Job| template.find(job.device, job.address, job.length);
        let has = |part: &&Part| place(&part.job).is_some();
        let wanted: Vec<_> = fill.to_compare().filter(has).map(|it| (it.job, it.piece.hash)).collect();
        let places: Vec<_> = wanted.iter().filter_map(|(job, _)| Some((job.device, place(job)?, job.length))).collect();
        let mut same = HashSet::new();
        self.hash_places(call, devices, &key, &places, |number, hash| {
            let (job, expected) = &wanted[number];
            if hash == *expected {
                same.insert((job.device, job.address));
            }
            Ok(())
        })?;
        fill.copy_from(|part| place(&part.job).filter(|_| same.contains(&(part.job.device, part.job.address))));
        Ok(())
    }

    /// Hashes device memory, of each place a device, an address and a length, and tells the number and the hash of each.
    fn hash_places(
        &mut self,
        call: &Call,
        devices: &[Device],
        key: &ContentKey,
        places: &[(usize, u64, u64)],
        mut tell: impl FnMut(usize, PieceHash) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let driver = call.driver();
        self.hasher.set_key(driver, key)?;
        for (ordinal, device) in devices.iter().enumerate() {
            self.hasher.prepare(driver, (ordinal, device.device), device.primary)?;
            let here: Vec<_> = (0..places.len()).filter(|number| places[*number].0 == ordinal).collect();
            let mut rest = &here[..];
            while !rest.is_empty() {
                let mut sum = 0_u64;
                let fits = |number: &&usize| {
                    sum += places[**number].2;
                    sum <= BATCH_BYTES
                };
                let count = rest.iter().take(MOST_PIECES).take_while(fits).count();
                let (batch, behind) = rest.split_at(count.max(1));
                let hashes = self.hash_some(call, ordinal, batch.iter().map(|number| places[*number]))?;
                batch.iter().zip(hashes).try_for_each(|(number, hash)| tell(*number, hash))?;
                rest = behind;
            }
        }
        Ok(())
    }

    fn hash_some(
        &mut self,
        call: &Call,
        ordinal: usize,
        places: impl Iterator<Item = (usize, u64, u64)>,
    ) -> Result<Vec<PieceHash>, EngineError> {
        let (driver, processors) = (call.driver(), call.session.processors(ordinal));
        let pieces: Vec<_> = places.map(|(_, source, length)| hash::Piece { source, target: 0, length }).collect();
        let table = self.hasher.table(driver, ordinal, &pieces)?.ok_or(EngineError::NotHashed)?;
        // SAFETY: the memory is mapped, and nothing writes it any more; nothing is copied.
        unsafe { self.hasher.enqueue(driver, (ordinal, processors), &table, false)? };
        let hashes = self.hasher.fetch(driver, ordinal, &table)?;
        if hashes.len() != pieces.len() {
            return Err(EngineError::NotHashed);
        }
        Ok(hashes.into_iter().map(PieceHash::from).collect())
    }
}

/// Why content on the device is not what the image says: the file is corrupt, or the content has changed on its way.
fn what_is_wrong(part: &Part, reader: &DataReader) -> EngineError {
    let mut content = vec![0; part.piece.length as usize];
    match reader.read(&part.piece, &mut content) {
        Err(error) => error.into(),
        Ok(()) => EngineError::NotArrived { address: part.job.address, length: part.job.length },
    }
}
