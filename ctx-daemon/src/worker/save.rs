//! Saving a quiesced client: its device memory into the data file, everything else into its part of the manifest.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rekindle_images::content::ContentKey;
use rekindle_images::{
    Allocation, Blob, Client, ClientGpu, DataWriter, Global, Object, ObjectKind, Piece, Pinned, Ring, Window,
    WindowKind,
};
use rekindle_wire::codec::Writer;
use rekindle_wire::control::{Copying as How, SavedCode, Secured, Waits};
use rekindle_wire::ipc::PieceId;
use rekindle_wire::{command, layout, window};

use super::copying::{Cancel, Clones, Copying, Guard, Keeping, Place, Precopied, Task};
use super::engine::{Engine, EngineError, Job, jobs};
use super::executor::Executor;
use super::times::Ages;
use super::vmm::{self, Alias};

/// How long a copy that was given up may take to end, before the next one.
const GIVEN_UP: Duration = Duration::from_secs(5);

/// The version of [`Client::worker_state`] and of [`Object::args`] that this worker writes.
pub(crate) const STATE_VERSION: u32 = 8;

/// The kind of blob that holds a code image whose parts had not all arrived.
pub(crate) const ARRIVING_CODE: u32 = 1;
/// The kind of blob that holds the held commands.
pub(crate) const HELD_COMMANDS: u32 = 3;

/// The kind of blob that holds what kernels have printed and the application has not fetched: its handle is 0 for stdout,
/// 1 for stderr.
pub(crate) const PRINTED: u32 = 0x1c0;

/// The kind of blob that holds the programs of executable graphs.
pub(crate) const GRAPHS: u32 = 0x1c2;

/// The kind of blob that holds a compiler's log that its caller may be about to fetch: its handle is twice the thread's
/// number, and one more for errors.
pub(crate) const CODE_LOG: u32 = 0x1c1;
/// In [`Allocation::flags`]: it came from the pool that its handle names, instead of belonging to a context.
pub(crate) const POOLED: u64 = 1;
/// In [`Allocation::flags`]: it is the piece that its handle names, at the address where it was saved.
pub(crate) const PIECE: u64 = 2;

/// A client's part of the manifest, but for where the content of its memory is.
struct Draft {
    client: Client,
    /// To be the first of the client's blobs.
    arrays: Vec<Blob>,
    /// For each job, whose it is.
    regions: Vec<Region>,
}

impl Draft {
    /// With the jobs' pieces, in their order.
    fn complete(self, pieces: Vec<Piece>) -> Client {
        let Self { mut client, mut arrays, regions } = self;
        for (region, piece) in regions.iter().zip(pieces) {
            match *region {
                Region::Allocation(i) => client.allocations[i].pieces.push(piece),
                Region::Global(i) => client.globals[i].pieces.push(piece),
                Region::Array(i) => arrays[i].pieces.push(piece),
            }
        }
        client.blobs.extend(arrays);
        client
    }
}

/// The engine, and what came of its copy; nothing where it never got one.
type Copied = Option<(Engine, Result<(), EngineError>)>;

/// A copy that goes on in the background: until it is over the engine is with it.
pub(crate) struct Background {
    pub(crate) copying: Arc<Copying>,
    /// Until it has been waited for.
    thread: Option<JoinHandle<Copied>>,
    /// What came of it, then.
    result: Option<Result<(), EngineError>>,
    /// Of a save.
    draft: Option<Draft>,
}

/// What is asked of a save.
pub(crate) struct Wanted {
    /// The position of the first command that is not executed yet.
    pub(crate) head: u64,
    pub(crate) key: ContentKey,
    /// Of the data file; not used where a pre-copy has one already.
    pub(crate) writer: DataWriter,
    /// Whether a pre-copy was made for this image.
    pub(crate) precopied: bool,
    pub(crate) elsewhere: BTreeSet<PieceId>,
    pub(crate) how: How,
    pub(crate) cancel: Arc<Cancel>,
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

impl Executor {
    /// Begins to save the client but for memory that is elsewhere in the image. Nothing runs on the device, and nothing
    /// is written to memory that the client shares. What it says is true of this moment; the copy goes on in the
    /// background, see [`Executor::progress`].
    pub(crate) fn begin_saving(&mut self, wanted: Wanted) -> Result<(Vec<SavedCode>, Secured), String> {
        self.leave_out(&wanted.elsewhere);
        if let Some(why) = &self.unsavable {
            return Err(format!("it cannot be checkpointed: {why}"));
        }
        if let Some(why) = self.held_for_others() {
            return Err(format!("it cannot be checkpointed now: {why}; the next dump may find that it has"));
        }
        self.discard_finished();
        if self.background.is_some() {
            return Err("it is being copied already: wait until that is over".into());
        }
        let aliases = self.map_aliases()?;
        let begun = self.begin_with(&aliases, wanted);
        if begun.is_err() {
            self.unmap_aliases(&aliases);
        }
        begun
    }

    fn begin_with(&mut self, aliases: &[Alias], wanted: Wanted) -> Result<(Vec<SavedCode>, Secured), String> {
        self.prepare_engine()?;
        // Every stream is idle: what was freed in its order is free.
        self.pools.settle(self.driver());
        self.join_reserving();
        let precopied = self.precopied.take().filter(|_| wanted.precopied);
        let writer = match &precopied {
            Some(precopied) => Arc::clone(&precopied.writer),
            None => Arc::new(wanted.writer),
        };

        let mut all = Vec::new();
        let allocations = self.describe_allocations(aliases, &mut all);
        let globals = self.describe_globals(&mut all)?;
        let mut arrays = Vec::new();
        for (blob, jobs) in self.describe_arrays()? {
            all.extend(jobs.into_iter().map(|job| (Region::Array(arrays.len()), Place::Other, job)));
            arrays.push(blob);
        }
        let (regions, mut tasks): (Vec<_>, Vec<_>) =
            all.into_iter().map(|(region, place, job)| (region, self.task(place, job))).unzip();
        let mut room = self.reserved.lock().ok().and_then(|mut reserved| reserved.take());
        let secured = self.secure(&mut tasks, wanted.how, &wanted.key, room.as_mut(), precopied.as_ref(), &writer);
        let secured = match secured {
            Ok(secured) => secured,
            Err(why) => {
                room.into_iter().for_each(|room| room.release(self.driver()));
                return Err(why);
            }
        };

        let described = self.describe(&writer, wanted.head, allocations, globals);
        let (client, code) = match described {
            Ok(described) => described,
            Err(why) => {
                room.into_iter().for_each(|room| room.release(self.driver()));
                return Err(why);
            }
        };
        let copying = Copying::new(tasks, room, false);
        let draft = Draft { client, arrays, regions };
        self.guard = Some(Guard::new(Arc::clone(&copying)));
        self.copy_in_background(copying, writer, wanted.cancel, aliases.to_vec(), Some(draft))?;
        Ok((code, secured))
    }

    /// The client's part of the manifest, but for where the content of its memory is; and the code that it has.
    fn describe(
        &mut self,
        writer: &DataWriter,
        head: u64,
        allocations: Vec<Allocation>,
        globals: Vec<Global>,
    ) -> Result<(Client, Vec<SavedCode>), String> {
        let failed = |e: &dyn std::fmt::Display| e.to_string();
        let mut blobs = self.save_arriving(writer)?;
        if let Some(held) = self.held_bytes() {
            let pieces = writer.append_all(&held).map_err(|e| failed(&e))?;
            blobs.push(Blob { kind: HELD_COMMANDS, handle: 0, device: 0, size: held.len() as u64, pieces });
        }
        if let Some(graphs) = self.graph_bytes() {
            let pieces = writer.append_all(&graphs).map_err(|e| failed(&e))?;
            blobs.push(Blob { kind: GRAPHS, handle: 0, device: 0, size: graphs.len() as u64, pieces });
        }
        blobs.extend(self.save_prints(writer)?);
        blobs.extend(self.save_code_logs(writer)?);
        let ages = self.event_ages();

        let hashes: BTreeSet<_> = self.objects.log().iter().filter_map(|r| r.code).collect();
        let code = hashes
            .iter()
            .map(|hash| {
                let size = self.code.get(hash).map(|i| i.bytes.len() as u64);
                size.map(|size| SavedCode { hash: hash.to_string(), size }).ok_or("a code image is missing")
            })
            .collect::<Result<Vec<_>, _>>()?;
        let client = Client {
            wire_version: rekindle_wire::WIRE_VERSION,
            gpus: self.describe_gpus(),
            ring: Ring { size: layout::SHARED_SIZE as u64, head },
            worker_version: STATE_VERSION,
            worker_state: self.state_bytes(&ages),
            windows: self.describe_windows(),
            object_kinds: self.describe_kinds(),
            objects: self.describe_objects(),
            pinned: self.describe_pinned(),
            allocations,
            globals,
            blobs,
            ..Default::default()
        };
        Ok((client, code))
    }

    /// Begins to copy while the client runs; or again what has changed since, into the same file.
    pub(crate) fn begin_precopy(&mut self, writer: DataWriter, cancel: Arc<Cancel>) -> Result<(), String> {
        self.discard_finished();
        if self.background.is_some() {
            return Err("it is being copied already: wait until that is over".into());
        }
        self.prepare_engine()?;
        let precopied = match self.precopied.take() {
            Some(precopied) => precopied,
            None => Precopied::new(Arc::new(writer)),
        };
        let aliases = self.map_aliases()?;
        let mut all = Vec::new();
        self.describe_allocations(&aliases, &mut all);
        let tasks = all.into_iter().map(|(_, place, job)| self.task(place, job));
        // What others write too is copied when all are at rest. What has not changed since an earlier round is not written
        // again.
        let mut tasks: Vec<_> = tasks.filter(|task| task.keeping != Keeping::Closed).collect();
        for task in &mut tasks {
            (task.keeping, task.expected) = (Keeping::Unkept, None);
            task.before = precopied.before(task.place, task.job.offset, task.job.length);
        }
        let writer = Arc::clone(&precopied.writer);
        self.precopied = Some(precopied);
        let copying = Copying::new(tasks, None, true);
        self.copy_in_background(copying, writer, cancel, aliases, None)
    }

    /// A job, kept closed where nothing else keeps it.
    fn task(&self, place: Place, job: Job) -> Task {
        let shared = match place {
            Place::Allocation(address) => {
                let memory = self.devices.get(job.device).map(|device| &device.memory);
                let size = memory.and_then(|m| m.allocations().get(&address)).map_or(0, |a| a.size);
                memory.is_some_and(|memory| memory.is_given_away(address, size))
            }
            Place::Piece(handle) => self.vmm.pieces.get(&handle).is_none_or(|piece| piece.sharing.is_some()),
            Place::Other => true,
        };
        let closed = shared || self.surprised.contains(&place);
        Task {
            job,
            place,
            keeping: if closed { Keeping::Closed } else { Keeping::Protected },
            expected: None,
            before: None,
        }
    }

    fn prepare_engine(&mut self) -> Result<(), String> {
        let primaries: Vec<_> = self.devices.iter().map(|d| d.primary).collect();
        let driver = self.driver();
        let engine = self.engine.as_mut().ok_or("it is being copied already: wait until that is over")?;
        let prepared = engine.prepare(driver, &primaries).map_err(|e| e.to_string());
        self.context_changed();
        prepared
    }

    fn copy_in_background(
        &mut self,
        copying: Arc<Copying>,
        writer: Arc<DataWriter>,
        cancel: Arc<Cancel>,
        aliases: Vec<Alias>,
        draft: Option<Draft>,
    ) -> Result<(), String> {
        let (driver, of_thread) = (self.driver(), Arc::clone(&copying));
        // What the file holds besides the memory.
        let others = |draft: &Draft| draft.client.blobs.iter().flat_map(|it| it.pieces.clone()).collect::<Vec<_>>();
        let last = draft.as_ref().map(others);
        let (hand_over, handed_over) = std::sync::mpsc::channel::<Engine>();
        let to_unmap = aliases.clone();
        let work = move || {
            let mut engine = handed_over.recv().ok()?;
            let mut result = engine.copy_out(driver, &of_thread, &writer);
            if let (Ok(()), Some(others)) = (&result, last) {
                // A pre-copy may have left what is not in the image after all.
                let pieces = of_thread.pieces();
                result = pieces.and_then(|all| Ok(writer.seal_keeping(all.iter().chain(&others)).map(drop)?));
            }
            // No lane is at work any more, and soon no clone is being made: what they used may go away.
            let room = of_thread.stop();
            vmm::unmap_aliases(driver, &aliases);
            room.into_iter().for_each(|room| room.release(driver));
            of_thread.end();
            Some((engine, result))
        };
        let started = std::thread::Builder::new().name("copy".into()).spawn(work);
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
                return Err("cannot start a thread that copies".into());
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

    /// How far the copy is. Once it is over this is said once.
    pub(crate) fn progress(&mut self) -> Result<Progress, String> {
        let copying = match &self.background {
            None => return Err("nothing is being copied".into()),
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
        let Some(background) = self.background.take() else { return Err("nothing is being copied".into()) };
        let (waits, names) = self.end_guard();
        match background.result.unwrap_or(Err(EngineError::Lost)) {
            Ok(()) => {}
            Err(error) => {
                self.precopied = None;
                self.surprised.extend(copying.wrong_places());
                return Err(match error {
                    EngineError::WrongGuess { .. } => format!("{error}, by one of the kernels {}", names.join(", ")),
                    error => error.to_string(),
                });
            }
        }
        let client = match background.draft {
            Some(draft) => Some(Box::new(draft.complete(copying.pieces().map_err(|e| e.to_string())?))),
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

    /// Forgets a copy that nobody asks about any more: one that is over, or that was given up and is about to be.
    fn discard_finished(&mut self) {
        let over = |background: &Background| {
            let copying = &background.copying;
            let patience = Instant::now() + GIVEN_UP;
            while copying.has_failed() && !copying.is_over() && Instant::now() < patience {
                std::thread::sleep(Duration::from_millis(2));
            }
            copying.is_over()
        };
        if self.background.as_ref().is_some_and(over)
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
        self.precopied = None;
        self.join_reserving();
        self.give_up_reserved();
    }

    /// Sets device memory aside for clones, and says `done` when that has been done.
    pub(crate) fn reserve_clones(
        &mut self,
        bytes: Option<u64>,
        done: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        let devices: Vec<_> = self.devices.iter().map(|d| (d.device, d.primary)).collect();
        let has = |ordinal: usize| {
            let memory = self.devices.get(ordinal).map_or(0, |d| d.memory.bytes());
            memory.saturating_add(self.vmm.bytes(ordinal))
        };
        // Each job begins at a boundary of its own.
        let wanted: Vec<u64> =
            (0..devices.len()).map(|i| has(i).min(bytes.unwrap_or(u64::MAX))).map(|b| b + b / 64).collect();
        let (driver, reserved) = (self.driver(), Arc::clone(&self.reserved));
        let work = move || {
            let clones = Clones::reserve(driver, &devices, &wanted);
            let former = reserved.lock().ok().and_then(|mut reserved| reserved.replace(clones));
            former.into_iter().for_each(|former| former.release(driver));
            done();
        };
        self.join_reserving();
        self.reserving = Some(std::thread::Builder::new().name("reserve".into()).spawn(work)?);
        Ok(())
    }

    /// Waits until memory has been set aside that is being so.
    fn join_reserving(&mut self) {
        if let Some(thread) = self.reserving.take() {
            drop(thread.join());
        }
    }

    /// Bytes of a device's memory that clones take.
    pub(crate) fn taken_by_clones(&self, device: usize) -> u64 {
        let aside = self.reserved.lock().ok().and_then(|reserved| Some(reserved.as_ref()?.bytes(device)));
        let used = self.background.as_ref().map(|background| background.copying.reserved(device));
        aside.unwrap_or(0).saturating_add(used.unwrap_or(0))
    }

    /// There is no memory for what the client asks for: whether there may be now, after clones have been given up, or
    /// copied.
    pub(crate) fn make_room(&mut self) -> bool {
        self.join_reserving();
        if (0..self.devices.len()).all(|device| self.taken_by_clones(device) == 0) {
            return false;
        }
        self.give_up_reserved();
        // One that was given up may hang for a disk's sake.
        self.background.as_ref().is_none_or(|background| background.copying.wait_unless_failed())
    }

    /// Gives back device memory that was set aside and is not used.
    pub(crate) fn give_up_reserved(&mut self) {
        let reserved = self.reserved.lock().ok().and_then(|mut reserved| reserved.take());
        reserved.into_iter().for_each(|reserved| reserved.release(self.driver()));
    }

    fn describe_allocations(&self, aliases: &[Alias], all: &mut Vec<(Region, Place, Job)>) -> Vec<Allocation> {
        let mut list = Vec::new();
        for (ordinal, device) in self.devices.iter().enumerate() {
            for (&address, allocation) in device.memory.allocations() {
                let region = Region::Allocation(list.len());
                let place = Place::Allocation(address);
                all.extend(jobs(address, allocation.size, ordinal, device.primary).map(|j| (region, place, j)));
                list.push(Allocation {
                    device: ordinal as u32,
                    address,
                    size: allocation.size,
                    requested_size: allocation.size,
                    flags: if allocation.pool == 0 { 0 } else { POOLED },
                    handle: if allocation.pool == 0 { allocation.context } else { allocation.pool },
                    pieces: Vec::new(),
                });
            }
        }
        for Alias { address, handle, piece } in aliases {
            let Some(device) = self.devices.get(piece.device) else { continue };
            let region = Region::Allocation(list.len());
            let place = Place::Piece(*handle);
            all.extend(jobs(*address, piece.size, piece.device, device.primary).map(|j| (region, place, j)));
            list.push(Allocation {
                device: piece.device as u32,
                address: *address,
                size: piece.size,
                requested_size: piece.size,
                flags: PIECE,
                handle: *handle,
                pieces: Vec::new(),
            });
        }
        list
    }

    fn describe_globals(&self, all: &mut Vec<(Region, Place, Job)>) -> Result<Vec<Global>, String> {
        let mut list = Vec::new();
        let mut places: Vec<_> = self.globals.iter().collect();
        places.sort_by_key(|(key, _)| **key);
        for (&(module, context), globals) in places {
            let known = self.objects.get(context).ok_or("a variable's context is gone")?;
            let ordinal = known.parent as usize;
            for global in globals {
                if global.size == 0 {
                    continue;
                }
                let region = Region::Global(list.len());
                let jobs = jobs(global.address, global.size, ordinal, known.real);
                all.extend(jobs.map(|j| (region, Place::Other, j)));
                list.push(Global {
                    device: ordinal as u32,
                    module,
                    name: global.name.to_string_lossy().into_owned(),
                    address: global.address,
                    size: global.size,
                    pieces: Vec::new(),
                });
            }
        }
        Ok(list)
    }

    fn save_arriving(&self, writer: &DataWriter) -> Result<Vec<Blob>, String> {
        let save = |(&number, bytes): (&u64, &Vec<u8>)| {
            let pieces = writer.append_all(bytes).map_err(|e| e.to_string())?;
            Ok(Blob { kind: ARRIVING_CODE, handle: number, device: 0, size: bytes.len() as u64, pieces })
        };
        self.code.arriving().iter().map(save).collect()
    }

    fn save_prints(&self, writer: &DataWriter) -> Result<Vec<Blob>, String> {
        let save = |(output, text): (u64, &Vec<u8>)| {
            let pieces = writer.append_all(text).map_err(|e| e.to_string())?;
            Ok(Blob { kind: PRINTED, handle: output, device: 0, size: text.len() as u64, pieces })
        };
        (0..).zip(self.prints.pending()).filter(|(_, text)| !text.is_empty()).map(save).collect()
    }

    fn save_code_logs(&self, writer: &DataWriter) -> Result<Vec<Blob>, String> {
        let save = |(handle, text): (u64, &Vec<u8>)| {
            let pieces = writer.append_all(text).map_err(|e| e.to_string())?;
            Ok(Blob { kind: CODE_LOG, handle, device: 0, size: text.len() as u64, pieces })
        };
        let logs = self.code_logs.iter().flat_map(|(thread, logs)| (u64::from(*thread) << 1..).zip(logs));
        logs.filter(|(_, text)| !text.is_empty()).map(save).collect()
    }

    fn describe_gpus(&self) -> Vec<ClientGpu> {
        let gpus = self.attached.devices.iter().enumerate();
        gpus.map(|(i, d)| ClientGpu { ordinal: i as u32, uuid: d.uuid }).collect()
    }

    fn describe_windows(&self) -> Vec<Window> {
        let device = |(i, d): (usize, &super::executor::Device)| {
            let start = window::device(i).start;
            let size = d.memory.client_reserved() - start;
            (size > 0).then_some(Window { kind: WindowKind::Device, address: start, size })
        };
        let mut windows: Vec<_> = self.devices.iter().enumerate().filter_map(device).collect();
        let allocations = self.pinned.allocations();
        if let Some((last, allocation)) = allocations.last_key_value() {
            let size = last + allocation.size - window::PINNED_BASE;
            windows.push(Window { kind: WindowKind::Pinned, address: window::PINNED_BASE, size });
        }
        windows
    }

    fn describe_kinds(&self) -> Vec<ObjectKind> {
        let calls: BTreeSet<u16> = self.objects.log().iter().map(|r| r.call).collect();
        let name = |call| command::name(&self.table, call).unwrap_or("?").to_owned();
        calls.into_iter().map(|call| ObjectKind { kind: u32::from(call), name: name(call) }).collect()
    }

    fn describe_objects(&self) -> Vec<Object> {
        let records = self.objects.log().iter();
        records
            .map(|r| Object {
                sequence: r.sequence,
                kind: u32::from(r.call),
                handle: r.owner,
                device: self.device_of_context(r.context).unwrap_or(0) as u32,
                context: r.context,
                args_version: STATE_VERSION,
                args: r.args.clone(),
                code: r.code.into_iter().collect(),
            })
            .collect()
    }

    fn describe_pinned(&self) -> Vec<Pinned> {
        let pinned = self.pinned.allocations().iter();
        pinned
            .map(|(&address, p)| Pinned { address, size: p.size, flags: u64::from(p.flags), pieces: Vec::new() })
            .collect()
    }

    /// What has no place of its own in the manifest: memory that others share, which must come first; the events that were recorded, in that order, with their ages, the contexts of pinned memory, and
    /// how far the client has reserved each window, which devices' contexts were reset, pools, and what the client maps itself.
    fn state_bytes(&self, ages: &Ages) -> Vec<u8> {
        let mut state = Writer::new();
        self.write_shared(&mut state);
        let mut recorded: Vec<(u64, u64)> = self.recorded.iter().map(|(event, when)| (*when, *event)).collect();
        recorded.sort_unstable();
        state.word(recorded.len() as u64);
        for (_, event) in recorded {
            state.word(event);
            state.word(ages.get(&event).copied().unwrap_or(f64::NAN).to_bits());
        }
        state.word(self.pinned.allocations().len() as u64);
        for (&address, pinned) in self.pinned.allocations() {
            state.word(address);
            state.word(pinned.context);
        }
        state.word(self.devices.len() as u64);
        for device in &self.devices {
            state.word(device.memory.client_reserved());
            state.word(u64::from(device.reset));
            device.memory.write_names(&mut state);
        }
        self.pools.write(&mut state);
        self.vmm.write(&mut state);
        state.into_bytes()
    }
}

/// The region that a piece belongs to, by its place in its list.
#[derive(Clone, Copy)]
enum Region {
    Allocation(usize),
    Global(usize),
    Array(usize),
}
