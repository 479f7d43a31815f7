//! One client that is quiesced and being suspended.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rekindle_images::content::ContentKey;
use rekindle_images::{Client as Record, HashKey};
use rekindle_wire::control::{Copying, DataFile, WorkerReply, WorkerRequest};

use super::super::clients::Client;
use super::super::pauses;
use super::super::pool::Pool;
use super::super::quiesce::ClosedRing;
use super::super::rehearsal;
use super::super::worker::WorkerError;
use super::error::SuspendError;
use super::moved::code_files;
use crate::limit::Limit;

/// The longest pause between two questions how far a copy is.
const POLL_INTERVAL: Duration = Duration::from_millis(4);

/// How clients are suspended.
#[derive(Clone, Copy)]
pub(in crate::daemon) struct How {
    /// Whether their commands wait until somebody resumes them.
    pub(in crate::daemon) hold: bool,
    /// Whether their workers give back all that they have on GPUs.
    pub(in crate::daemon) deep: bool,
}

/// A client's part of a manifest, and how long its memory was copied, which the device hashes meanwhile.
pub(super) struct Saved {
    pub(super) blob: Vec<u8>,
    pub(super) copy: Duration,
}

/// A quiesced client, and the files for the content of its memory.
pub(super) struct Job<'a> {
    client: &'a Client,
    files: Vec<File>,
    key: ContentKey,
    /// How long the copy may stand still.
    limit: Limit,
}

impl<'a> Job<'a> {
    pub(super) fn new(ring: &'a ClosedRing, files: Vec<File>, limit: Limit) -> Result<Self, SuspendError> {
        let key = ContentKey::random().map_err(SuspendError::Key)?;
        Ok(Self { client: ring.client(), files, key, limit })
    }

    /// Has the worker save the content.
    pub(super) fn save(&self) -> Result<Saved, SuspendError> {
        let began = Instant::now();
        let failed = |error| SuspendError::of(self.client, error);
        let request = WorkerRequest::Save {
            hash_key: self.key.to_bytes(),
            files: (0..self.files.len() as u32).collect(),
            elsewhere: Vec::new(),
            compression: "off".to_owned(),
            copying: Copying::Stop,
            precopied: false,
            // The code stays where it is, so a log that was cut need not be replayed. Otherwise
            // `must_be_movable` has it replayed.
            rehearses: true,
            // The device compares the hashes when the content is back.
            hash_on_device: true,
        };
        let fds: Vec<_> = self.files.iter().map(AsRawFd::as_raw_fd).collect();
        self.client.worker.call(&request, &[], &fds, self.limit).map_err(failed)?;
        let (mut before, mut idle) = ((0, 0), self.limit.begins());
        loop {
            let answered = self.client.worker.call(&WorkerRequest::Progress, &[], &[], self.limit).map_err(failed)?;
            let pause = match answered.reply {
                WorkerReply::Saved { .. } => {
                    return Ok(Saved { blob: answered.blob, copy: began.elapsed() });
                }
                WorkerReply::Saving { copied, bytes, .. } => {
                    let now = (copied, self.blocks());
                    if now != before {
                        (before, idle) = (now, self.limit.begins());
                    } else if idle.is_over() {
                        return Err(SuspendError::Stalled { client: self.client.to_string(), limit: self.limit });
                    }
                    pauses::next(began.elapsed(), copied, bytes, POLL_INTERVAL)
                }
                _ => return Err(failed(WorkerError::Protocol("Progress"))),
            };
            std::thread::sleep(pause);
        }
    }

    /// The number of blocks that the files take; it grows with every write.
    fn blocks(&self) -> u64 {
        self.files.iter().filter_map(|file| file.metadata().ok()).map(|it| it.blocks()).sum()
    }

    /// The client, for messages.
    pub(super) fn name(&self) -> String {
        self.client.to_string()
    }

    /// Gives the copy up.
    pub(super) fn cancel(&self) {
        self.client.worker.cancel();
    }

    /// Proves that another worker can load what is saved, as far as a dump proves it.
    pub(super) fn must_be_movable(&self, pool: &Pool, blob: &[u8]) -> Result<(), SuspendError> {
        let malformed = |_| SuspendError::of(self.client, WorkerError::Protocol("Saved"));
        let record = Record::from_bytes(blob).map_err(malformed)?;
        if !rehearsal::is_needed(&record) {
            return Ok(());
        }
        let named = || self.client.to_string();
        let code = code_files(&self.client.worker, &record, self.limit);
        let code = code.map_err(|source| SuspendError::Code { client: named(), source })?;
        let rehearsed = rehearsal::rehearse(pool, self.client, self.key.into(), (blob, &code), self.limit);
        rehearsed.map_err(|source| SuspendError::NotRehearsed { client: named(), source })
    }

    /// Has the worker give the memory back, whose content is saved. Returns the number of bytes.
    pub(super) fn give_back(&self, blob: &[u8], How { hold, deep }: How) -> Result<u64, SuspendError> {
        let failed = |error| SuspendError::of(self.client, error);
        let malformed = |_| failed(WorkerError::Protocol("Saved"));
        let record = Record::from_bytes(blob).map_err(malformed)?;
        let mut data = Vec::new();
        let mut fds = Vec::new();
        for it in record.data_files() {
            let file = self.files.get(it.index as usize).filter(|_| it.depth == 0);
            fds.push(file.ok_or_else(|| failed(WorkerError::Protocol("Saved")))?.as_raw_fd());
            data.push(DataFile { depth: it.depth, index: it.index });
        }
        let (hash_algorithm, hash_key) = HashKey::Content(self.key).to_parts();
        let request = WorkerRequest::Suspend { data, hash_algorithm, hash_key, hold, deep };
        match self.client.worker.call(&request, blob, &fds, self.limit).map_err(failed)?.reply {
            WorkerReply::Suspended { bytes } => Ok(bytes),
            _ => Err(failed(WorkerError::Protocol("Suspend"))),
        }
    }
}
