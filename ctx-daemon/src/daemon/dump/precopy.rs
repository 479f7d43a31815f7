//! Before the quiesce, while everything runs: memory is set aside for clones, and copied once where the protocol says so.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::{ImageError, ImageWriter, Protocol};
use rekindle_wire::control::{WorkerReply, WorkerRequest};
use tracing::{debug, info};

use super::super::clients::Client;
use super::super::links::Copied;
use super::super::stage::InUse;
use super::super::worker::WorkerError;
use super::error::SaveError;
use super::files::Files;
use super::protocol::Chosen;
use super::spans::Work;
use crate::limit::Limit;

/// The pause between two questions about how far a copy is, at first and at most.
pub(super) const POLL_INTERVAL: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];
/// Another round must have more bytes than this to copy, and the last round must have copied at most this part of the round
/// before.
const LITTLE: u64 = 64 << 20;
const SHRINKS: (u64, u64) = (7, 10);

/// A client, and how it is dumped.
#[derive(Clone)]
pub(super) struct Planned {
    pub(super) client: Arc<Client>,
    /// The number of its first data file and of its part of the manifest.
    pub(super) index: u32,
    /// How many data files its memory is worth.
    pub(super) count: usize,
    pub(super) chosen: Chosen,
    /// The files, if something has been written to them already.
    pub(super) files: Option<Arc<Files>>,
    /// Bytes that were copied before the quiesce, and how long that took.
    pub(super) precopied: (u64, Duration),
    /// The rounds of that copy.
    pub(super) rounds: Vec<Work>,
    /// The staging memory that its worker has, as long as the worker copies.
    pub(super) staged: Option<Arc<InUse>>,
    /// The client's part of its GPUs' links.
    pub(super) link: Arc<Copied>,
}

impl Planned {
    /// A client that nothing has been prepared for yet. `files` are the number of the first file, and the number of files.
    pub(super) fn new(client: Arc<Client>, files: (u32, usize), chosen: Chosen, link: Arc<Copied>) -> Self {
        let (index, count) = files;
        Self {
            client,
            index,
            count,
            chosen,
            files: None,
            precopied: Default::default(),
            rounds: Vec::new(),
            staged: None,
            link,
        }
    }

    /// The client's data files: the existing ones, or new ones.
    pub(super) fn files(&self, writer: &ImageWriter) -> Result<Arc<Files>, ImageError> {
        match &self.files {
            Some(files) => Ok(Arc::clone(files)),
            None => Files::make(writer, self.index, self.count).map(Arc::new),
        }
    }

    /// Has the worker set memory aside for clones, and waits until it has. A worker that finds no memory works without clones.
    pub(super) fn reserve(&self, cow_pool: u64, limit: Limit) -> Result<(), SaveError> {
        let Some(bytes) = self.chosen.reserves(cow_pool) else { return Ok(()) };
        let asked = self.client.worker.ask(&WorkerRequest::Reserve { bytes }, &[], limit);
        asked.map_err(|error| SaveError::of(&self.client, &error))
    }

    /// Tells the worker how fast it may copy now, and waits until the worker has received that.
    pub(super) fn pace(&self, limit: Limit) -> Result<(), SaveError> {
        self.link.tell(&self.client, limit).map_err(|error| SaveError::of(&self.client, &error))
    }

    /// Copies the client's memory while it runs, if its protocol is `recopy`: round after round while each round has less to
    /// copy than the one before. `goes_on` says whether the dump does; a copy without progress for as long as `stall` is given
    /// up.
    pub(super) fn precopy(
        &mut self,
        writer: &ImageWriter,
        rounds: u32,
        stall: Limit,
        goes_on: impl Fn() -> bool,
    ) -> Result<(), SaveError> {
        if self.chosen.protocol != Protocol::Recopy {
            return Ok(());
        }
        let began = Instant::now();
        let files = self.files(writer)?;
        let known = writer.base().map(|base| base.known(self.client.namespace_pid())).unwrap_or_default().to_bytes();
        let mut last = u64::MAX;
        for round in 0..rounds {
            let round_began = Instant::now();
            let request = WorkerRequest::Precopy {
                hash_key: writer.key().to_bytes(),
                files: files.numbers(),
                compression: writer.compression().to_string(),
            };
            let worker = &self.client.worker;
            let failed = |error: WorkerError| SaveError::of(&self.client, &error);
            worker.ask_with(&request, &known, &files.descriptors(), stall).map_err(failed)?;
            let bytes = self.loop_until_saved(&files, stall, &goes_on)?;
            self.precopied.0 += bytes;
            self.rounds.push(Work::precopy(&self.client, round_began, bytes));
            debug!(client = %self.client, round, bytes, "copied while it runs");
            if bytes <= LITTLE || bytes.saturating_mul(SHRINKS.1) >= last.saturating_mul(SHRINKS.0) {
                break;
            }
            last = bytes;
        }
        self.precopied.1 = began.elapsed();
        info!(client = %self.client, bytes = self.precopied.0, ms = began.elapsed().as_millis() as u64, "pre-copied");
        self.files = Some(files);
        Ok(())
    }

    /// Waits for a pre-copy's end, and returns how much it has copied. If the dump does not go on, cuts the pre-copy short.
    fn loop_until_saved(&self, files: &Files, stall: Limit, goes_on: &impl Fn() -> bool) -> Result<u64, SaveError> {
        let client = &self.client;
        let mut pause = POLL_INTERVAL[0];
        let (mut progress, mut stalled) = (None, stall.begins());
        loop {
            self.pace(stall)?;
            let asked = client.worker.call(&WorkerRequest::Progress, &[], &[], stall);
            match asked.map_err(|error| SaveError::of(client, &error))?.reply {
                WorkerReply::Saved { bytes, .. } => return Ok(bytes),
                WorkerReply::Saving { copied, .. } => {
                    let now = Some((copied, files.blocks()));
                    if now != progress {
                        (progress, stalled) = (now, stall.begins());
                    } else if stalled.is_over() {
                        client.worker.cancel();
                        return Err(SaveError::stalled(stall, &format!("{client} to be copied by its worker")));
                    }
                }
                _ => return Err(SaveError::of(client, &WorkerError::Protocol("Progress"))),
            }
            if !goes_on() {
                client.worker.cancel();
                return Err(SaveError::given_up());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(POLL_INTERVAL[1]);
        }
    }
}
