//! At the quiesce: every job's content is hashed on the device, and cloned where there is room. The memory of a client that does not run
//! again soon is hashed while it is copied.

use std::time::Instant;

use rekindle_images::content::ContentKey;
use rekindle_images::{DataWriter, PieceHash};
use rekindle_wire::control::{Copying as How, Secured};
use tracing::warn;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::access::hash::{BATCH_BYTES, MOST_PIECES, Piece};
use crate::checkpoint::copying::error::CopyError;
use crate::checkpoint::copying::{Clones, Copying, Place, Precopied, Preservation, Task};
use crate::checkpoint::layers::Layers;
use crate::gpu::driver::CallFailed;
use crate::resources::job::Job;

impl Checkpoint {
    /// Decides how each job is preserved, and makes the hashes and clones while nothing runs. Jobs that are closed by now stay
    /// closed.
    pub(crate) fn secure(
        &mut self,
        layers: &mut Layers<'_>,
        tasks: &mut [Task],
        (how, key): (How, &ContentKey),
        mut room: Option<&mut Clones>,
        precopied: Option<&Precopied>,
        writer: &DataWriter,
    ) -> Result<Secured, CopyError> {
        let mut secured = Secured { bytes: bytes(tasks, |_| true), ..Secured::default() };
        let open = |task: &Task| task.preservation != Preservation::Closed;
        if how == How::Stop && precopied.is_none() {
            tasks.iter_mut().for_each(|task| task.preservation = Preservation::Closed);
            secured.closed = secured.bytes;
            return Ok(secured);
        }
        if let How::Clone = how
            && let Some(room) = room.as_mut()
        {
            // If there is not room for all, jobs that may be written soon come first.
            let mut all: Vec<&mut Task> = tasks.iter_mut().filter(|task| open(task)).collect();
            all.sort_by_key(|task| task.soon);
            for task in all {
                let (device, length) = (task.job.device, task.job.length);
                task.preservation = room.take(device, length).map_or(Preservation::Protected, Preservation::Cloned);
            }
        }
        self.hasher.set_key(layers.call.driver(), key)?;
        let began = Instant::now();
        let is_cloned = |task: &Task| matches!(task.preservation, Preservation::Cloned(_));
        self.expect_hashes(layers, tasks, is_cloned)?;
        secured.cloned = bytes(tasks, is_cloned);
        secured.clone_ns = began.elapsed().as_nanos() as u64;
        let began = Instant::now();
        self.expect_hashes(layers, tasks, |task| open(task) && !is_cloned(task))?;
        secured.hashed = bytes(tasks, |task| open(task) && !is_cloned(task));
        secured.hash_ns = began.elapsed().as_nanos() as u64;
        layers.call.gpu.leave();
        for task in tasks.iter_mut().filter(|task| open(task)) {
            let Job { offset, length, .. } = task.job;
            let Some(hash) = task.expected else { continue };
            if let Some(storage) = writer.known(hash, length) {
                if let (Preservation::Cloned(address), Some(room)) = (task.preservation, room.as_mut()) {
                    room.give(task.job.device, address, length);
                }
                task.preservation =
                    Preservation::AlreadyStored(rekindle_images::Piece { offset, length, hash, storage });
            }
        }
        if let Some(precopied) = precopied {
            let open =
                |task: &Task| !matches!(task.preservation, Preservation::Closed | Preservation::AlreadyStored(_));
            for task in tasks.iter_mut().filter(|task| open(task)) {
                let still = |hash| precopied.still(task.place, task.job.offset, task.job.length, hash);
                // Changed memory is copied again while the ring is closed.
                task.before = precopied.before(task.place, task.job.offset, task.job.length);
                task.preservation =
                    task.expected.and_then(still).map_or(Preservation::Closed, Preservation::AlreadyStored);
            }
        }
        secured.unchanged = bytes(tasks, |task| matches!(task.preservation, Preservation::AlreadyStored(_)));
        secured.closed = bytes(tasks, |task| task.preservation == Preservation::Closed);
        Ok(secured)
    }

    /// Hashes all jobs of a copy that has begun, and that was told so, so that lanes need not hash their content. Their memory stays as it is
    /// until it is copied. After an error lanes hash it.
    pub(crate) fn hash_beside(&mut self, layers: &mut Layers<'_>, copying: &Copying, key: &ContentKey) {
        let maker = copying.hashes.make();
        let hashed = self.hasher.set_key(layers.call.driver(), key).map_err(CopyError::from);
        let hashed =
            hashed.and_then(|()| self.hash_tasks(layers, &copying.tasks, |_| true, |hashes| maker.put(hashes)));
        layers.call.gpu.leave();
        if let Err(why) = hashed {
            warn!("the device does not hash what is copied, so the host does: {why}");
        }
    }

    /// Hashes these jobs; a copy of one must have the hash that is expected then.
    fn expect_hashes(
        &mut self,
        layers: &Layers<'_>,
        tasks: &mut [Task],
        which: impl Fn(&Task) -> bool,
    ) -> Result<(), CopyError> {
        let mut all = Vec::new();
        self.hash_tasks(layers, tasks, which, |hashes| all.extend(hashes))?;
        all.into_iter().for_each(|(i, hash)| tasks[i].expected = Some(hash));
        Ok(())
    }

    /// Hashes these jobs, as many at a time as there is room for, and clones some in the same step. `found` gets the number and the hash of
    /// each.
    fn hash_tasks(
        &mut self,
        layers: &Layers<'_>,
        tasks: &[Task],
        which: impl Fn(&Task) -> bool,
        mut found: impl FnMut(Vec<(usize, PieceHash)>),
    ) -> Result<(), CopyError> {
        for ordinal in 0..layers.memory.devices.len() {
            let own = |task: &Task| which(task) && task.job.device == ordinal && task.place != Place::Other;
            let mut all: Vec<usize> = (0..tasks.len()).filter(|i| own(&tasks[*i])).collect();
            while !all.is_empty() {
                let mut sum = 0_u64;
                let fits = |i: &&usize| {
                    sum += tasks[**i].job.length;
                    sum <= BATCH_BYTES
                };
                let count = all.iter().take(MOST_PIECES).take_while(fits).count();
                let rest = all.split_off(count.max(1));
                let hashes = self.hash_batch(layers, ordinal, tasks, &all)?;
                found(all.into_iter().zip(hashes).collect());
                all = rest;
            }
        }
        Ok(())
    }

    fn hash_batch(
        &mut self,
        layers: &Layers<'_>,
        ordinal: usize,
        tasks: &[Task],
        batch: &[usize],
    ) -> Result<Vec<PieceHash>, CopyError> {
        let processors = layers.call.session.processors(ordinal);
        let driver = layers.call.driver();
        let Some(device) = layers.memory.devices.get(ordinal) else { return Ok(Vec::new()) };
        let (place, primary) = ((ordinal, device.device), device.primary);
        let piece = |i: &usize| {
            let Task { job, preservation, .. } = tasks[*i];
            let target = if let Preservation::Cloned(address) = preservation { address } else { 0 };
            Piece { source: job.address, target, length: job.length }
        };
        let pieces: Vec<_> = batch.iter().map(piece).collect();
        let copies = pieces.iter().any(|piece| piece.target != 0);
        let hashes = (|| -> Result<_, CallFailed> {
            self.hasher.prepare(driver, place, primary)?;
            let Some(table) = self.hasher.table(driver, ordinal, &pieces)? else { return Ok(None) };
            // SAFETY: the jobs' memory is mapped, nothing runs that would write it, and clones were taken for them.
            unsafe { self.hasher.enqueue(driver, (ordinal, processors), &table, copies)? };
            self.hasher.fetch(driver, ordinal, &table).map(Some)
        })();
        match hashes? {
            Some(hashes) => Ok(hashes.into_iter().map(PieceHash::from).collect()),
            None => Err(CopyError::TooMuch),
        }
    }
}

fn bytes(tasks: &[Task], which: impl Fn(&Task) -> bool) -> u64 {
    tasks.iter().filter(|task| which(task)).map(|task| task.job.length).sum()
}
