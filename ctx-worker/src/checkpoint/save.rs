//! Saves a quiesced client: its device memory into the data file, all other state into its part of the manifest.

use std::collections::BTreeSet;
use std::sync::Arc;

use rekindle_images::content::ContentKey;
use rekindle_images::{Allocation, Client, DataWriter, Global, Ring};
use rekindle_wire::control::{Copying as How, SavedCode, Secured};
use rekindle_wire::ipc::PieceId;
use rekindle_wire::layout;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::background::Begin;
use crate::checkpoint::copying::error::CopyError;
use crate::checkpoint::copying::guard::Guard;
use crate::checkpoint::copying::{Cancel, Copying, Place, Preservation, Task};
use crate::checkpoint::cut::cannot_be_placed_again;
use crate::checkpoint::describe::{
    describe_allocations, describe_globals, describe_gpus, describe_kinds, describe_objects, describe_pinned,
    describe_windows, state_bytes,
};
use crate::checkpoint::draft::{Draft, Region};
use crate::checkpoint::layers::Layers;
use crate::checkpoint::parts::save_parts;
use crate::checkpoint::save_error::SaveError;
use crate::resources::Memory;
use crate::resources::job::Job;
use crate::resources::kernel_heap_error::HeapError;
use crate::resources::vmm::aliases::{Alias, unmap_aliases};
use crate::session::state;

/// The parameters of a save.
pub(crate) struct Wanted {
    /// The position of the first command that is not executed yet.
    pub(crate) head: u64,
    pub(crate) key: ContentKey,
    /// The writer of the data file. Not used if a pre-copy has one already.
    pub(crate) writer: DataWriter,
    /// Whether a pre-copy was made for this image.
    pub(crate) precopied: bool,
    pub(crate) elsewhere: BTreeSet<PieceId>,
    pub(crate) how: How,
    /// Whether the daemon has another worker prove that a log which was cut can be replayed.
    pub(crate) rehearses: bool,
    /// Whether content that the device has hashed is not hashed again on the host, if the client does not run meanwhile.
    pub(crate) hash_on_device: bool,
    pub(crate) cancel: Arc<Cancel>,
}

impl Checkpoint {
    /// Begins to save the client, except for memory that is elsewhere in the image. Nothing runs on the device, and memory that
    /// the client shares is not written. The saved state is that of this moment; the copy continues in the background, see
    /// [`Checkpoint::progress`].
    pub(crate) fn begin_saving(
        &mut self,
        layers: &mut Layers<'_>,
        wanted: Wanted,
    ) -> Result<(Vec<SavedCode>, Secured), SaveError> {
        if wanted.hash_on_device {
            // A suspension, which needs the host memory that the last one still has.
            self.discarded.clear();
        }
        layers.memory.leave_out(layers.call, &wanted.elsewhere);
        let heap = layers.memory.kernel_heaps.obstacle();
        if let Some(why) = layers.call.session.unsavable.clone().or(heap) {
            return Err(SaveError::Unsavable(why));
        }
        layers.call.session.objects.settle();
        if let Some(why) = cannot_be_placed_again(&layers.call.session, layers.code, wanted.rehearses) {
            return Err(SaveError::Unsavable(why));
        }
        self.discard_finished(layers.memory);
        if self.copying.background.is_some() {
            return Err(CopyError::Already.into());
        }
        let aliases = layers.map_aliases().map_err(CopyError::from)?;
        let begun = self.begin_with(layers, &aliases, wanted);
        if begun.is_err() {
            unmap_aliases(layers.call.driver(), &aliases);
        }
        begun
    }

    fn begin_with(
        &mut self,
        layers: &mut Layers<'_>,
        aliases: &[Alias],
        wanted: Wanted,
    ) -> Result<(Vec<SavedCode>, Secured), SaveError> {
        let driver = layers.call.driver();
        self.prepare_engine(&mut layers.call.gpu, &layers.memory.devices)?;
        // Every stream is idle, so memory that was freed in stream order is free.
        layers.memory.pools.settle(driver);
        self.join_reserving();
        let precopied = if wanted.precopied { self.copying.precopied.take() } else { None };
        let writer = match &precopied {
            Some(precopied) => Arc::clone(&precopied.writer),
            None => Arc::new(wanted.writer),
        };

        let mut all = Vec::new();
        let allocations = describe_allocations(layers.memory, aliases, &mut all);
        let globals = describe_globals(&layers.call.session, layers.code, &mut all)?;
        let mut arrays = Vec::new();
        for (blob, jobs) in layers.memory.arrays.describe(&layers.call.session)? {
            all.extend(jobs.into_iter().map(|job| (Region::Array(arrays.len()), Place::Other, job)));
            arrays.push(blob);
        }
        let (regions, mut tasks): (Vec<_>, Vec<_>) =
            all.into_iter().map(|(region, place, job)| (region, self.task(layers.memory, place, job))).unzip();
        // Reserved memory that `stop` does not need stays for another copy of this state; opening the ring releases it.
        let mut room = match wanted.how {
            How::Stop => None,
            _ => self.copying.reserved.lock().ok().and_then(|mut reserved| reserved.take()),
        };
        let secured =
            self.secure(layers, &mut tasks, (wanted.how, &wanted.key), room.as_mut(), precopied.as_ref(), &writer);
        let secured = match secured {
            Ok(secured) => secured,
            Err(why) => {
                room.into_iter().for_each(|room| room.release(driver));
                return Err(why.into());
            }
        };

        let described = read_heaps(layers).and_then(|()| save_parts(layers).map_err(SaveError::from));
        let described = described.and_then(|texts| Ok((texts, describe(layers, wanted.head, allocations, globals)?)));
        let (texts, (client, code)) = match described {
            Ok(described) => described,
            Err(why) => {
                room.into_iter().for_each(|room| room.release(driver));
                return Err(why);
            }
        };
        let copying = Copying::new(tasks, room, false);
        let draft = Draft { client, texts, arrays, regions };
        self.copying.guard = Some(Guard::new(Arc::clone(&copying)));
        let is_closed = |task: &Task| task.preservation == Preservation::Closed;
        let to_hash = (wanted.hash_on_device && copying.tasks.iter().all(is_closed)).then(|| Arc::clone(&copying));
        if let Some(copying) = &to_hash {
            copying.expect_device_hashes();
        }
        let begin = Begin { copying, writer, cancel: wanted.cancel, aliases: aliases.to_vec(), draft: Some(draft) };
        self.copy_in_background(driver, layers.memory, begin)?;
        if let Some(copying) = to_hash {
            self.hash_beside(layers, &copying, &wanted.key);
        }
        Ok((code, secured))
    }

    /// Makes a job. The ring stays closed for it if nothing else preserves its memory.
    pub(crate) fn task(&self, memory: &Memory, place: Place, job: Job) -> Task {
        let shared = match place {
            Place::Allocation(address) => {
                let memory = memory.devices.get(job.device).map(|device| &device.memory);
                let size = memory.and_then(|m| m.allocations().get(&address)).map_or(0, |a| a.size);
                memory.is_some_and(|memory| memory.is_given_away(address, size))
            }
            Place::Piece(handle) => memory.vmm.pieces.get(&handle).is_none_or(|piece| piece.sharing.is_some()),
            Place::Other => true,
        };
        let closed = shared || self.copying.mispredicted.contains(&place);
        Task {
            job,
            place,
            preservation: if closed { Preservation::Closed } else { Preservation::Protected },
            soon: self.copying.written_soon.get(&place).copied().unwrap_or(u32::MAX),
            expected: None,
            before: None,
        }
    }
}

/// Reads the heaps from which kernels take memory with `malloc`.
fn read_heaps(layers: &mut Layers<'_>) -> Result<(), SaveError> {
    let Layers { call, memory, .. } = layers;
    let read = memory.kernel_heaps.read(call.driver());
    call.gpu.leave();
    read.map_err(|why| match why {
        HeapError::Driver(failed) => CopyError::from(failed).into(),
        HeapError::TooLarge(_) | HeapError::NotFound => SaveError::Unsavable(why.to_string()),
    })
}

/// Describes the client's part of the manifest, except for the places of its memory's content; and returns the client's code.
fn describe(
    layers: &mut Layers<'_>,
    head: u64,
    allocations: Vec<Allocation>,
    globals: Vec<Global>,
) -> Result<(Client, Vec<SavedCode>), SaveError> {
    let ages = layers.scheduler.times.event_ages(layers.call);
    let session = &layers.call.session;

    let hashes: BTreeSet<_> = session.objects.log().iter().filter_map(|r| r.code).collect();
    let code = hashes
        .iter()
        .map(|hash| {
            let size = layers.code.store.get(hash).map(|i| i.bytes().len() as u64);
            size.map(|size| SavedCode { hash: hash.to_string(), size }).ok_or(SaveError::NoCode)
        })
        .collect::<Result<Vec<_>, _>>()?;
    let client = Client {
        gpus: describe_gpus(session),
        ring: Ring { size: layout::SHARED_SIZE as u64, head },
        worker_version: state::version(),
        worker_state: state_bytes(layers, &ages)?,
        windows: describe_windows(layers.memory),
        object_kinds: describe_kinds(session),
        objects: describe_objects(session),
        pinned: describe_pinned(layers.memory),
        allocations,
        globals,
        ..Default::default()
    };
    Ok((client, code))
}

#[cfg(test)]
mod tests {
    use rekindle_images::limits::MAX_OPAQUE;
    use rekindle_images::{DataFile, DataReader};
    use rekindle_wire::command::Kind;
    use rekindle_wire::control::{Failing, FailureKind};
    use rekindle_wire::window;

    use super::*;
    use crate::checkpoint::load::read_mapped;
    use crate::resources::vmm::Vmm;
    use crate::schedule::times::Ages;
    use crate::serve::fixture;
    use crate::session::state::{self, State, StateError};
    use crate::session::state::{Access, Mapped, Mapping, Reservation, bytes};

    const MIB: u64 = 1 << 20;

    /// This many pieces of 2 MiB, each mapped for two devices.
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
        let (mut layers, checkpoint) = worker.layers();
        let error = checkpoint.begin_precopy(&mut layers, writer(), Arc::default()).unwrap_err();
        assert!(matches!(error, CopyError::State(StateError::TooLong(_))), "{error}");
        let (writer, elsewhere, cancel) = (writer(), BTreeSet::new(), Arc::default());
        let wanted = Wanted {
            head: 0,
            key,
            writer,
            precopied: false,
            elsewhere,
            how: How::Stop,
            rehearses: true,
            hash_on_device: true,
            cancel,
        };
        let (mut layers, checkpoint) = worker.layers();
        let error = checkpoint.begin_saving(&mut layers, wanted).unwrap_err();
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
        let worker_state = state_bytes(&worker.layers().0, &Ages::new()).unwrap();
        let texts = save_parts(&worker.layers().0).unwrap();
        let blobs = texts.iter().map(|text| text.write(&writer).unwrap()).collect();
        writer.finish().unwrap();

        let client = Client { worker_state, blobs, ..Client::default() };
        let state: State = state::parse(&client.worker_state).unwrap();
        let reader = DataReader::new(key.into(), [(DataFile::own(0), file)]);
        let mapped = read_mapped(&client, &state, &reader).unwrap();
        let mut again = Vmm::default();
        again.read(&mapped, 2).unwrap();
        assert_eq!(again.mapped().unwrap(), saved);
        let twice = Client { blobs: [&client.blobs[..], &client.blobs[..]].concat(), ..client };
        assert!(read_mapped(&twice, &state, &reader).is_err());
    }
}
