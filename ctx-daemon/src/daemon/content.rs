//! Waiting for the content of a client's memory, which its worker loads after a restore or a suspension.

use std::time::{Duration, Instant};

use rekindle_wire::control::{LoadTimes, WorkerRequest};
use tracing::info;

use super::pauses;
use super::worker::{LoadProgress, Worker, WorkerError};
use crate::limit::Limit;

/// The longest pause between two questions how far a load is.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Waits until a worker has loaded the content of its client's memory; it may not stand still for longer than the limit.
/// `on_progress` hears how many bytes are loaded, of how many. Returns how long the load took.
pub(crate) fn wait_for_content(
    worker: &Worker,
    name: &str,
    limit: Limit,
    on_progress: impl Fn(u64, u64),
) -> Result<LoadTimes, WorkerError> {
    let (began, mut before, mut idle) = (Instant::now(), None, limit.begins());
    loop {
        let (now, pause) = match worker.load_progress(limit)? {
            LoadProgress::Over(times) => {
                log_times(worker, name, &times);
                return Ok(times);
            }
            LoadProgress::UnderWay { loaded, bytes } => {
                on_progress(loaded, bytes);
                let pause = pauses::next(began.elapsed(), loaded, bytes, POLL_INTERVAL);
                (Some((loaded, worker.process().cpu_time())), pause)
            }
        };
        if now != before {
            (before, idle) = (now, limit.begins());
        } else if idle.is_over() {
            return Err(worker.idle(&WorkerRequest::LoadProgress, limit));
        }
        std::thread::sleep(pause);
    }
}

fn log_times(worker: &Worker, name: &str, times: &LoadTimes) {
    let ms = |ns: u64| ns / 1_000_000;
    let LoadTimes { code_ns, replay_ns, map_ns, content_ns, hash_ns, bytes, set, copied } = *times;
    info!(
        worker = worker.pid(),
        code_ms = ms(code_ns),
        replay_ms = ms(replay_ns),
        map_ms = ms(map_ns),
        content_ms = ms(content_ns),
        hash_ms = ms(hash_ns),
        bytes,
        zeros = set,
        copied,
        "phases of load: {name}"
    );
}
