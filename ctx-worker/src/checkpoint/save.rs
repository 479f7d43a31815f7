//! Saving a quiesced client: its device memory into the data file, everything else into its part of the manifest.

use std::collections::BTreeSet;
use std::sync::Arc;

use rekindle_images::content::ContentKey;
use rekindle_images::{
    Allocation, Blob, BlobKind, Client, ClientGpu, DataWriter, Global, ImageError, Object, ObjectKind, Piece, Pinned,
    Ring, Window, WindowKind,
};
use rekindle_wire::control::{Copying as How, Failing, FailureKind, SavedCode, Secured};
use rekindle_wire::ipc::PieceId;
use rekindle_wire::{command, layout, window};
use thiserror::Error;

use crate::checkpoint::copying::{Cancel, CopyError, Copying, Guard, Place, Preservation, Task};
use crate::resources::arrays::ArrayError;
use crate::resources::graphs;
use crate::resources::job::{Job, jobs};
use crate::resources::vmm::aliases::{Alias, unmap_aliases};
use crate::schedule::times::Ages;
use crate::serve::executor::Executor;
use crate::session::call::Call;
use crate::session::state::{self, PinnedMemory, RecordedEvent, State, StateError};

/// Why a client cannot be saved whose log of code was cut.
pub(crate) const TOO_MUCH_UNLOADED: &str = "it has unloaded more code than is kept, each time \
    with later code loaded already, and code that it has now could not be placed where it is; it can be when it has unloaded \
    what it loaded up to then, or has destroyed the context";

/// A client's part of the manifest, but for where the content of its memory is.
pub(crate) struct Draft {
    client: Client,
    texts: Vec<Text>,
    arrays: Vec<Blob>,
    /// For each job, whose it is.
    regions: Vec<Region>,
}

impl Draft {
    /// What is to be written besides memory: not by the executor, which must be there when a disk hangs.
    pub(crate) fn take_texts(&mut self) -> Vec<Text> {
        std::mem::take(&mut self.texts)
    }

    /// With the jobs' pieces, in their order, and what became of the texts.
    pub(crate) fn complete(self, pieces: Vec<Piece>, texts: Vec<Blob>) -> Client {
        let Self { mut client, mut arrays, regions, .. } = self;
        for (region, piece) in regions.iter().zip(pieces) {
            match *region {
                Region::Allocation(i) => client.allocations[i].pieces.push(piece),
                Region::Global(i) => client.globals[i].pieces.push(piece),
                Region::Array(i) => arrays[i].pieces.push(piece),
            }
        }
        client.blobs = texts;
        client.blobs.extend(arrays);
        client
    }
}

/// Something of a client's that is no memory, for a blob.
pub(crate) struct Text {
    kind: BlobKind,
    handle: u64,
    bytes: Vec<u8>,
}

impl Text {
    /// Appends it to the data files.
    pub(crate) fn write(&self, writer: &DataWriter) -> Result<Blob, ImageError> {
        let pieces = writer.append_all(&self.bytes)?;
        Ok(Blob { kind: self.kind.into(), handle: self.handle, device: 0, size: self.bytes.len() as u64, pieces })
    }
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

/// Why a client is not saved.
#[derive(Debug, Error)]
pub(crate) enum SaveError {
    #[error("it cannot be checkpointed: {0}")]
    Unsavable(String),
    #[error("it cannot be checkpointed now: {0}; the next dump may find that it has")]
    NotNow(&'static str),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Array(#[from] ArrayError),
    #[error(transparent)]
    State(#[from] StateError),
    #[error("a code image is missing")]
    NoCode,
    #[error("a variable's context is gone")]
    NoContext,
}

impl Failing for SaveError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Unsavable(_) | Self::NotNow(_) => FailureKind::Refused,
            Self::Copy(error) => error.kind(),
            Self::State(error) => error.kind(),
            Self::Array(_) | Self::NoCode | Self::NoContext => FailureKind::Internal,
        }
    }
}

impl Executor {
    /// Begins to save the client but for memory that is elsewhere in the image. Nothing runs on the device, and nothing
    /// is written to memory that the client shares. What it says is true of this moment; the copy goes on in the
    /// background, see [`Executor::progress`].
    pub(crate) fn begin_saving(&mut self, wanted: Wanted) -> Result<(Vec<SavedCode>, Secured), SaveError> {
        let (mut call, memory, _) = self.parts();
        memory.leave_out(&mut call, &wanted.elsewhere);
        if let Some(why) = &self.session.unsavable {
            return Err(SaveError::Unsavable(why.clone()));
        }
        self.session.objects.settle();
        if self.session.objects.is_cut() {
            return Err(SaveError::Unsavable(TOO_MUCH_UNLOADED.into()));
        }
        if let Some(why) = self.held_for_others() {
            return Err(SaveError::NotNow(why));
        }
        self.discard_finished();
        if self.checkpoint.copying.background.is_some() {
            return Err(CopyError::Already.into());
        }
        let mapped = self.memory.vmm.map_aliases(self.gpu.driver, &self.memory.devices);
        let aliases = mapped.map_err(CopyError::from)?;
        let begun = self.begin_with(&aliases, wanted);
        if begun.is_err() {
            unmap_aliases(self.driver(), &aliases);
        }
        begun
    }

    fn begin_with(&mut self, aliases: &[Alias], wanted: Wanted) -> Result<(Vec<SavedCode>, Secured), SaveError> {
        self.prepare_engine()?;
        // Every stream is idle: what was freed in its order is free.
        self.memory.pools.settle(self.driver());
        self.join_reserving();
        let precopied = if wanted.precopied { self.checkpoint.copying.precopied.take() } else { None };
        let writer = match &precopied {
            Some(precopied) => Arc::clone(&precopied.writer),
            None => Arc::new(wanted.writer),
        };

        let mut all = Vec::new();
        let allocations = self.describe_allocations(aliases, &mut all);
        let globals = self.describe_globals(&mut all)?;
        let mut arrays = Vec::new();
        for (blob, jobs) in self.memory.arrays.describe(&self.session)? {
            all.extend(jobs.into_iter().map(|job| (Region::Array(arrays.len()), Place::Other, job)));
            arrays.push(blob);
        }
        let (regions, mut tasks): (Vec<_>, Vec<_>) =
            all.into_iter().map(|(region, place, job)| (region, self.task(place, job))).unzip();
        // What `stop` has no use for stays for another copy of this state; who opens the ring gives it up.
        let mut room = match wanted.how {
            How::Stop => None,
            _ => self.checkpoint.copying.reserved.lock().ok().and_then(|mut reserved| reserved.take()),
        };
        let secured = self.secure(&mut tasks, wanted.how, &wanted.key, room.as_mut(), precopied.as_ref(), &writer);
        let secured = match secured {
            Ok(secured) => secured,
            Err(why) => {
                room.into_iter().for_each(|room| room.release(self.driver()));
                return Err(why.into());
            }
        };

        let described = self.describe_texts().map_err(SaveError::from);
        let described = described.and_then(|texts| Ok((texts, self.describe(wanted.head, allocations, globals)?)));
        let (texts, (client, code)) = match described {
            Ok(described) => described,
            Err(why) => {
                room.into_iter().for_each(|room| room.release(self.driver()));
                return Err(why);
            }
        };
        let copying = Copying::new(tasks, room, false);
        let draft = Draft { client, texts, arrays, regions };
        self.checkpoint.copying.guard = Some(Guard::new(Arc::clone(&copying)));
        let begun = self.copy_in_background(copying, writer, wanted.cancel, aliases.to_vec(), Some(draft));
        begun?;
        Ok((code, secured))
    }

    /// The client's part of the manifest, but for where the content of its memory is; and the code that it has.
    fn describe(
        &mut self,
        head: u64,
        allocations: Vec<Allocation>,
        globals: Vec<Global>,
    ) -> Result<(Client, Vec<SavedCode>), SaveError> {
        let mut call = Call { gpu: &mut self.gpu, session: &mut self.session, header: self.header };
        let ages = self.scheduler.times.event_ages(&mut call);

        let hashes: BTreeSet<_> = self.session.objects.log().iter().filter_map(|r| r.code).collect();
        let code = hashes
            .iter()
            .map(|hash| {
                let size = self.code.store.get(hash).map(|i| i.bytes.len() as u64);
                size.map(|size| SavedCode { hash: hash.to_string(), size }).ok_or(SaveError::NoCode)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let client = Client {
            gpus: self.describe_gpus(),
            ring: Ring { size: layout::SHARED_SIZE as u64, head },
            worker_version: state::version(),
            worker_state: self.state_bytes(&ages)?,
            windows: self.describe_windows(),
            object_kinds: self.describe_kinds(),
            objects: self.describe_objects(),
            pinned: self.describe_pinned(),
            allocations,
            globals,
            ..Default::default()
        };
        Ok((client, code))
    }

    /// A job, kept closed where nothing else keeps it.
    pub(crate) fn task(&self, place: Place, job: Job) -> Task {
        let shared = match place {
            Place::Allocation(address) => {
                let memory = self.memory.devices.get(job.device).map(|device| &device.memory);
                let size = memory.and_then(|m| m.allocations().get(&address)).map_or(0, |a| a.size);
                memory.is_some_and(|memory| memory.is_given_away(address, size))
            }
            Place::Piece(handle) => self.memory.vmm.pieces.get(&handle).is_none_or(|piece| piece.sharing.is_some()),
            Place::Other => true,
        };
        let closed = shared || self.checkpoint.copying.mispredicted.contains(&place);
        Task {
            job,
            place,
            preservation: if closed { Preservation::Closed } else { Preservation::Protected },
            soon: self.checkpoint.copying.written_soon.get(&place).copied().unwrap_or(u32::MAX),
            expected: None,
            before: None,
        }
    }

    pub(crate) fn describe_allocations(
        &self,
        aliases: &[Alias],
        all: &mut Vec<(Region, Place, Job)>,
    ) -> Vec<Allocation> {
        let mut list = Vec::new();
        for (ordinal, device) in self.memory.devices.iter().enumerate() {
            for (&address, allocation) in device.memory.allocations() {
                let region = Region::Allocation(list.len());
                let place = Place::Allocation(address);
                all.extend(jobs(address, allocation.size, ordinal, device.primary).map(|j| (region, place, j)));
                list.push(Allocation {
                    device: ordinal as u32,
                    address,
                    size: allocation.size,
                    requested_size: allocation.size,
                    flags: if allocation.pool == 0 { 0 } else { Allocation::POOLED },
                    handle: if allocation.pool == 0 { allocation.context } else { allocation.pool },
                    pieces: Vec::new(),
                });
            }
        }
        for Alias { address, handle, piece } in aliases {
            let Some(device) = self.memory.devices.get(piece.device) else { continue };
            let region = Region::Allocation(list.len());
            let place = Place::Piece(*handle);
            all.extend(jobs(*address, piece.size, piece.device, device.primary).map(|j| (region, place, j)));
            list.push(Allocation {
                device: piece.device as u32,
                address: *address,
                size: piece.size,
                requested_size: piece.size,
                flags: Allocation::PHYSICAL,
                handle: *handle,
                pieces: Vec::new(),
            });
        }
        list
    }

    fn describe_globals(&self, all: &mut Vec<(Region, Place, Job)>) -> Result<Vec<Global>, SaveError> {
        let mut list = Vec::new();
        let mut places: Vec<_> = self.code.globals.iter().collect();
        places.sort_by_key(|(key, _)| **key);
        for (&(module, context), globals) in places {
            let known = self.session.objects.get(context).ok_or(SaveError::NoContext)?;
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
                    initial: global.initial,
                });
            }
        }
        Ok(list)
    }

    /// What the worker has of the client besides memory.
    fn describe_texts(&self) -> Result<Vec<Text>, StateError> {
        let mut texts = Vec::new();
        let mut add = |kind, handle, bytes: &[u8]| {
            if !bytes.is_empty() {
                texts.push(Text { kind, handle, bytes: bytes.to_vec() });
            }
        };
        self.code.store.arriving().iter().for_each(|(number, bytes)| add(BlobKind::ArrivingCode, *number, bytes));
        self.scheduler.deferred.saved()?.iter().for_each(|held| add(BlobKind::DeferredCommands, 0, held));
        let mapped = self.memory.vmm.saved().map(|mapped| state::bytes(&mapped)).transpose()?;
        mapped.iter().for_each(|mapped| add(BlobKind::Mapped, 0, mapped));
        graphs::bytes(&self.code.graphs)?.iter().for_each(|graphs| add(BlobKind::Graphs, 0, graphs));
        (0..).zip(self.code.prints.pending()).for_each(|(output, text)| add(BlobKind::Printed, output, text));
        self.code.logs.saved().for_each(|(handle, text)| add(BlobKind::CodeLog, handle, text));
        Ok(texts)
    }

    fn describe_gpus(&self) -> Vec<ClientGpu> {
        let gpus = self.session.attached.devices.iter().enumerate();
        gpus.map(|(i, d)| ClientGpu { ordinal: i as u32, uuid: d.uuid }).collect()
    }

    fn describe_windows(&self) -> Vec<Window> {
        let device = |(i, d): (usize, &crate::resources::device::Device)| {
            let start = window::device(i).start;
            let size = d.memory.client_reserved() - start;
            (size > 0).then_some(Window { kind: WindowKind::Device, address: start, size })
        };
        let mut windows: Vec<_> = self.memory.devices.iter().enumerate().filter_map(device).collect();
        let allocations = self.memory.pinned.allocations();
        if let Some((last, allocation)) = allocations.last_key_value() {
            let size = last + allocation.size - window::PINNED_BASE;
            windows.push(Window { kind: WindowKind::Pinned, address: window::PINNED_BASE, size });
        }
        windows
    }

    fn describe_kinds(&self) -> Vec<ObjectKind> {
        let calls: BTreeSet<u16> = self.session.objects.log().iter().map(|r| r.call).collect();
        let name = |call| command::name(&self.session.table, call).unwrap_or("?").to_owned();
        calls.into_iter().map(|call| ObjectKind { kind: u32::from(call), name: name(call) }).collect()
    }

    fn describe_objects(&self) -> Vec<Object> {
        let records = self.session.objects.log().iter();
        records
            .map(|r| Object {
                sequence: r.sequence,
                kind: u32::from(r.call),
                handle: r.owner,
                device: self.device_of_context(r.context).unwrap_or(0) as u32,
                context: r.context,
                args_version: state::version(),
                args: r.args.clone(),
                code: r.code.into_iter().collect(),
            })
            .collect()
    }

    fn describe_pinned(&self) -> Vec<Pinned> {
        let pinned = self.memory.pinned.allocations().iter();
        pinned
            .map(|(&address, p)| Pinned { address, size: p.size, flags: u64::from(p.flags), pieces: Vec::new() })
            .collect()
    }

    /// What has no place of its own in the manifest.
    pub(crate) fn state_bytes(&self, ages: &Ages) -> Result<Vec<u8>, StateError> {
        let mut state = State::default();
        self.memory.write_shared(&mut state);
        let mut recorded: Vec<(u64, u64)> =
            self.scheduler.times.recorded.iter().map(|(event, when)| (*when, *event)).collect();
        recorded.sort_unstable();
        let event = |(_, handle): (u64, u64)| RecordedEvent {
            handle,
            timed: ages.contains_key(&handle),
            age: ages.get(&handle).copied().unwrap_or_default(),
            ..RecordedEvent::default()
        };
        state.recorded = recorded.into_iter().map(event).collect();
        let pinned = self.memory.pinned.allocations().iter();
        let pinned =
            pinned.map(|(&address, it)| PinnedMemory { address, context: it.context, ..PinnedMemory::default() });
        state.pinned = pinned.collect();
        for device in &self.memory.devices {
            let reserved_to = device.memory.client_reserved();
            let mut saved = state::Device { reserved_to, reset: device.reset, ..state::Device::default() };
            device.memory.write_names(&mut saved);
            state.devices.push(saved);
        }
        self.memory.pools.write(&mut state);
        state::opaque(&state)
    }
}

/// The region that a piece belongs to, by its place in its list.
#[derive(Clone, Copy)]
pub(crate) enum Region {
    Allocation(usize),
    Global(usize),
    Array(usize),
}

#[cfg(test)]
mod tests {
    use rekindle_images::limits::MAX_OPAQUE;
    use rekindle_images::{DataFile, DataReader};
    use rekindle_wire::command::Kind;

    use super::*;
    use crate::checkpoint::load::read_mapped;
    use crate::resources::vmm::Vmm;
    use crate::serve::fixture;
    use crate::session::state::{Access, Mapped, Mapping, Reservation, bytes};

    const MIB: u64 = 1 << 20;

    /// So many pieces of 2 MiB, each mapped for two devices.
    fn many(pieces: u64) -> Mapped {
        let place = |i: u64| window::RESERVED_BASE + i * 2 * MIB;
        let reservation = Reservation { address: place(0), size: pieces * 2 * MIB, ..Reservation::default() };
        let handle = |i| Kind::Piece.handle(i);
        let piece = |i| state::Piece { handle: handle(i), size: 2 * MIB, held: i % 3 == 0, ..Default::default() };
        let access = |device| Access { device, flags: 3, ..Access::default() };
        let mapping = |i| Mapping {
            address: place(i),
            size: 2 * MIB,
            piece: handle(pieces - i),
            access: vec![access(0), access(1)],
            ..Mapping::default()
        };
        Mapped {
            reservations: vec![reservation],
            pieces: (1..=pieces).map(piece).collect(),
            mappings: (0..pieces).map(mapping).collect(),
            ..Mapped::default()
        }
    }

    #[test]
    fn a_client_whose_state_no_image_holds_is_refused_before_anything_is_copied() {
        let mut worker = fixture::executor();
        worker.scheduler.times.recorded = (0..400_000).map(|i| (Kind::Event.handle(i), i)).collect();
        let key = ContentKey::from_bytes([3; 16]);
        let writer = || DataWriter::new(tempfile::tempfile().unwrap(), 0, key).unwrap();
        let error = worker.begin_precopy(writer(), Arc::default()).unwrap_err();
        assert!(matches!(error, CopyError::State(StateError::TooLong(_))), "{error}");
        let (writer, elsewhere, cancel) = (writer(), BTreeSet::new(), Arc::default());
        let wanted = Wanted { head: 0, key, writer, precopied: false, elsewhere, how: How::Stop, cancel };
        let error = worker.begin_saving(wanted).unwrap_err();
        assert!(matches!(error, SaveError::State(StateError::TooLong(_))), "{error}");
        assert_eq!(error.kind(), FailureKind::Refused);
        assert!(worker.checkpoint.copying.background.is_none());
    }

    #[test]
    fn a_client_with_a_hundred_thousand_pieces_of_its_own_mapping_is_saved_and_loaded_as_it_was() {
        let saved = many(100_000);
        assert!(bytes(&saved).unwrap().len() as u64 > MAX_OPAQUE);
        let mut worker = fixture::executor();
        worker.memory.vmm.read(&saved, 2).unwrap();
        let key = ContentKey::from_bytes([3; 16]);
        let file = tempfile::tempfile().unwrap();
        let writer = DataWriter::new(file.try_clone().unwrap(), 0, key).unwrap();
        let worker_state = worker.state_bytes(&Ages::new()).unwrap();
        let texts = worker.describe_texts().unwrap();
        let blobs = texts.iter().map(|text| text.write(&writer).unwrap()).collect();
        writer.finish().unwrap();

        let client = Client { worker_state, blobs, ..Client::default() };
        let state: State = state::parse(&client.worker_state).unwrap();
        let reader = DataReader::new(key.into(), [(DataFile::own(0), file)]);
        let mapped = read_mapped(&client, &state, &reader).unwrap();
        let mut again = Vmm::default();
        again.read(&mapped, 2).unwrap();
        assert_eq!(again.saved().unwrap(), saved);
        let twice = Client { blobs: [&client.blobs[..], &client.blobs[..]].concat(), ..client };
        assert!(read_mapped(&twice, &state, &reader).is_err());
    }
}
