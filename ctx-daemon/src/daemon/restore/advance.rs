//! Workers that load clients of an image before a restore of it begins.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rekindle_images::Manifest;
use rekindle_wire::control::LoadTimes;
use tracing::debug;

use super::super::Daemon;
use super::super::content::wait_for_content;
use super::super::grants::Uuid;
use super::super::worker::{Pieces, Timeout, Worker};
use super::check;
use super::error::RestoreError;
use super::load::{self, Files, How, Load, Mode};
use super::preloads::ToCopy;

/// How long workers that were killed may take to end, and how often this looks.
const ENDS: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(2);

/// A worker for each client of an image that needs one, in their order.
pub(super) struct Workers {
    pub(super) all: Vec<Arc<Worker>>,
    /// The GPUs that were chosen for each client; none where a worker sees all.
    pub(super) gpus: Vec<Option<Vec<Uuid>>>,
}

impl Workers {
    /// Workers that have nothing of the clients yet.
    pub(super) fn take(daemon: &Daemon, manifest: &Manifest) -> Result<Self, RestoreError> {
        let gpus = load::choose_gpus(daemon, manifest, None)?;
        let take = |_: &_, settings: &_, gpus: Option<&[_]>| daemon.pool.take_in_advance(settings, gpus);
        let all = load::take_workers(manifest, &gpus, take)?;
        Ok(Self { all, gpus })
    }

    /// Has the workers load. What a client can copy is in its place in `to_copy`, which may be shorter. Returns how long each took
    /// to load content.
    pub(super) fn fill(
        &self,
        daemon: &Daemon,
        manifest: &Manifest,
        files: &impl Files,
        mode: Mode,
        to_copy: Vec<Option<ToCopy>>,
    ) -> Result<Vec<LoadTimes>, RestoreError> {
        let attached: Vec<_> = self.all.iter().map(|it| it.attached()).collect();
        check::devices(manifest, &attached, daemon.config.restore.allowances)?;
        let limit = daemon.config.timeouts.stall;
        if load::share(manifest, &self.all, limit)? {
            return Err(RestoreError::SharesInAdvance);
        }
        let how = How { limits: daemon.config.clients.limits, mode, limit };
        let mut to_copy = to_copy.into_iter();
        let jobs = check::attached(manifest).map(|record| {
            let load = Load::new(manifest, (record, record.to_bytes()?), files, how)?;
            Ok(Load { to_copy: to_copy.next().flatten(), ..load })
        });
        let jobs: Vec<_> = jobs.collect::<Result<_, RestoreError>>()?;
        let mut times = Vec::new();
        // One after the other: each has all the machine's cores, and nobody waits.
        for ((record, worker), job) in check::attached(manifest).zip(&self.all).zip(jobs) {
            let name = check::name(record);
            let failed = |error| RestoreError::Worker(name.clone(), error);
            let promise = Arc::new(daemon.promises.make(record, worker));
            promise.listen(worker);
            let filled = job.run(worker).and_then(|()| match mode {
                Mode::Early => wait_for_content(worker, &name, limit, |_, _| ()).map(Some),
                _ => Ok(None),
            });
            worker.forget_load_steps();
            drop(promise);
            times.extend(filled.map_err(failed)?);
            debug!(worker = worker.pid(), "{name} is loaded in advance");
        }
        Ok(times)
    }

    /// The memory that has the content of each client. The workers have loaded it.
    pub(super) fn export(&self, daemon: &Daemon, manifest: &Manifest) -> Result<Vec<Pieces>, RestoreError> {
        let timeout = Timeout::WhileItWorks(daemon.config.timeouts.stall);
        let clients = check::attached(manifest).zip(&self.all).map(|(record, worker)| {
            let exported = worker.export_template(timeout);
            exported.map_err(|error| RestoreError::Worker(check::name(record), error))
        });
        clients.collect()
    }

    pub(super) fn end(&self) {
        self.all.iter().for_each(|it| it.kill());
    }

    /// The same, and waits a while until they are gone.
    pub(super) fn end_and_wait(&self) {
        self.end();
        let began = Instant::now();
        while self.all.iter().any(|it| it.process().is_alive()) && began.elapsed() < ENDS {
            std::thread::sleep(LOOK);
        }
    }
}
