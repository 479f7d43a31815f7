//! Keeping workers ready for restores of a warm image: one thread for each image.

use std::sync::Arc;

use rekindle_wire::control::{Failing, FailureKind};
use tracing::{debug, info};

use super::super::super::content::wait_for_content;
use super::super::super::{Daemon, thread};
use super::super::check;
use super::super::error::RestoreError;
use super::super::load::{self, How, Load, Mode};
use super::images::{Set, Task, WarmImage};

/// Starts the thread that keeps workers ready until the image is forgotten.
pub(super) fn start(daemon: &Arc<Daemon>, image: &Arc<WarmImage>) -> std::io::Result<()> {
    let (daemon, image) = (Arc::clone(daemon), Arc::clone(image));
    thread("warm", move || {
        while let Task::Make { resident } = image.task() {
            daemon.pool.wait_for_restores();
            match make(&daemon, &image, resident) {
                Ok(Some(set)) => {
                    info!(image = %image.name(), resident, "workers wait for a restore of a warm image");
                    image.made(set);
                }
                Ok(None) => {
                    let what = "its processes share GPU memory, so restores load it when they begin";
                    image.failed(what.to_owned(), true);
                }
                Err(error) => image.failed(error.to_string(), is_lasting(&error)),
            }
        }
    })
    .map(drop)
}

/// Whether another attempt can only fail alike.
fn is_lasting(error: &RestoreError) -> bool {
    matches!(error.kind(), FailureKind::Refused | FailureKind::Version | FailureKind::BadImage)
}

/// Workers that have loaded the clients of the image; none if its processes share memory.
fn make(daemon: &Daemon, image: &Arc<WarmImage>, resident: bool) -> Result<Option<Set>, RestoreError> {
    let manifest = &image.manifest;
    let gpus = load::choose_gpus(daemon, manifest, None)?;
    let workers = load::take_workers(manifest, &gpus, |settings, gpus| daemon.pool.take_in_advance(settings, gpus))?;
    let set = Set { workers, gpus, resident };
    // A worker that is taken by a restore gets another action.
    for worker in &set.workers {
        let image = Arc::downgrade(image);
        worker.on_death(move || {
            if let Some(image) = image.upgrade() {
                image.look_again();
            }
        });
    }
    match fill(daemon, image, &set) {
        Ok(true) => Ok(Some(set)),
        result => {
            set.end();
            result.map(|_| None)
        }
    }
}

/// Has the workers load. Returns `false` if processes share memory.
fn fill(daemon: &Daemon, image: &WarmImage, set: &Set) -> Result<bool, RestoreError> {
    let manifest = &image.manifest;
    let attached: Vec<_> = set.workers.iter().map(|it| it.attached()).collect();
    check::devices(manifest, &attached, daemon.config.restore.allowances)?;
    let limit = daemon.config.timeouts.stall;
    if load::share(manifest, &set.workers, limit)? {
        return Ok(false);
    }
    let mode = if set.resident { Mode::Early } else { Mode::Warm };
    let how = How { limits: daemon.config.clients.limits, mode, limit };
    let jobs = check::attached(manifest).map(|record| Load::new(manifest, record, image.content(), how));
    let jobs: Vec<_> = jobs.collect::<Result<_, _>>()?;
    // One after the other: each has all the machine's cores, and nobody waits.
    for ((record, worker), job) in check::attached(manifest).zip(&set.workers).zip(jobs) {
        let name = check::name(record);
        let failed = |error| RestoreError::Worker(name.clone(), error);
        job.run(worker).map_err(failed)?;
        if set.resident {
            wait_for_content(worker, &name, limit).map_err(failed)?;
        }
        debug!(worker = worker.pid(), "{name} is loaded in advance");
    }
    Ok(true)
}
