//! Descriptions of workers: memory and commands, for `ps`, NVML and dumps.
//!
//! A worker may be busy, stopped or hang. A caller that asks many workers sends all requests before it waits for the first
//! answer, and waits for all of them together no longer than for one.

use std::sync::TryLockError;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rekindle_wire::control::{Suspension, WorkerReply, WorkerRequest};
use rekindle_wire::frame;

use super::{Answered, DESCRIBE_TIMEOUT, Description, Late, Worker, WorkerError, lock, sys};
use crate::limit::{Deadline, Limit};

/// How long a worker that is busy with another request may take to finish it: most requests take no time.
const SOON: Limit = Limit::fixed(Duration::from_millis(100));
const AT_ONCE: Limit = Limit::fixed(Duration::ZERO);
/// How long idle workers, all together, may take to answer whoever only glances: a worker that does nothing else takes no time.
const GLANCE: Limit = Limit::fixed(Duration::from_millis(100));

/// Asks all of these at once. Returns each description, in their order; a worker that has no time now has its last one. Takes
/// little more than a second, however many do not answer.
pub(crate) fn describe_all(workers: &[&Worker]) -> Vec<Description> {
    let described = workers.iter().zip(describe_now(workers));
    described.map(|(worker, now)| now.or_else(|| worker.last_description()).unwrap_or_default()).collect()
}

/// The same, with nothing for a worker that has no time now.
pub(crate) fn describe_now(workers: &[&Worker]) -> Vec<Option<Description>> {
    // Idle workers come first, so that a busy one does not delay them.
    let idle = |worker: &&Worker| worker.ask_to_describe(AT_ONCE.begins());
    let mut asked: Vec<_> = workers.iter().map(idle).collect();
    let soon = SOON.begins();
    for (worker, asked) in workers.iter().zip(&mut asked).filter(|(_, asked)| asked.is_none()) {
        *asked = worker.ask_to_describe(soon);
    }
    receive_all(workers, &asked, DESCRIBE_TIMEOUT, Late::IsNews)
}

/// Asks all of these that are idle at once, and waits no longer than a tenth of a second for all of them together. A worker that
/// hangs costs that only once: until it has answered, it is not idle.
pub(crate) fn describe_at_a_glance(workers: &[&Worker]) -> Vec<Option<Description>> {
    let asked: Vec<_> = workers.iter().map(|worker| worker.ask_to_describe(AT_ONCE.begins())).collect();
    receive_all(workers, &asked, GLANCE, Late::IsUsual)
}

fn receive_all(
    workers: &[&Worker],
    asked: &[Option<Receiver<Answered>>],
    limit: Limit,
    late: Late,
) -> Vec<Option<Description>> {
    let deadline = limit.begins();
    let described = workers.iter().zip(asked);
    described.map(|(worker, asked)| worker.described(asked.as_ref(), deadline, late)).collect()
}

impl Worker {
    /// The worker's description; its last one if it has no time now.
    pub(crate) fn describe(&self) -> Description {
        describe_all(&[self]).pop().unwrap_or_default()
    }

    /// The memory of its client on each device. Waits for the answer.
    pub(crate) fn device_memory(&self, deadline: Deadline) -> Result<Vec<u64>, WorkerError> {
        self.described_anew(deadline).map(|it| it.device_memory)
    }

    /// Whether the client is suspended. Waits for the answer.
    pub(crate) fn suspension(&self, deadline: Deadline) -> Result<Option<Suspension>, WorkerError> {
        self.described_anew(deadline).map(|it| it.suspended)
    }

    /// How long the client has had no work. Waits for the answer.
    pub(crate) fn idle_for(&self, deadline: Deadline) -> Result<Duration, WorkerError> {
        self.described_anew(deadline).map(|it| Duration::from_millis(it.idle_ms))
    }

    /// The description of the last time that the worker was described.
    pub(crate) fn last_description(&self) -> Option<Description> {
        lock(&self.described).clone()
    }

    /// Whether the client was suspended when the worker was last described.
    pub(crate) fn was_suspended(&self) -> Option<Suspension> {
        lock(&self.described).as_ref()?.suspended
    }

    /// The restore that has loaded its client began at this time.
    pub(crate) fn was_restored(&self, began: Instant) {
        *lock(&self.restored) = Some(began);
    }

    /// The time from the beginning of the restore of its client to the client's first command, which the worker has told by now. It
    /// is told once.
    pub(crate) fn time_to_first_command(&self) -> Option<Duration> {
        let first = lock(&self.described).as_ref()?.first_command?;
        Some(first.saturating_duration_since(lock(&self.restored).take()?))
    }

    /// The memory of its client on each device when the worker was last described.
    pub(crate) fn device_memory_then(&self) -> Vec<u64> {
        self.last_description().unwrap_or_default().device_memory
    }

    /// Whether the worker only keeps its client, which is suspended deeply. It stays so until it ends.
    pub(crate) fn keeps(&self) -> bool {
        self.was_suspended().is_some_and(|it| it.deep)
    }

    fn described_anew(&self, deadline: Deadline) -> Result<Description, WorkerError> {
        let answered = self.call(&WorkerRequest::Describe, &[], &[], deadline)?;
        self.note(answered).ok_or(WorkerError::Protocol("Describe"))
    }

    /// Notes a description.
    fn note(&self, answered: Answered) -> Option<Description> {
        let WorkerReply::Description {
            device_memory,
            pinned_memory,
            commands,
            suspended,
            idle_ms,
            physical,
            refused_calls,
            first_command_ago_ns,
            gpu_time_ns,
        } = answered.reply
        else {
            return None;
        };
        let ago = first_command_ago_ns.map(Duration::from_nanos);
        let first_command = ago.and_then(|it| Instant::now().checked_sub(it));
        let description = Description {
            device_memory,
            pinned_memory,
            commands,
            suspended,
            idle_ms,
            physical,
            refused_calls,
            first_command,
            gpu_time_ns,
        };
        *lock(&self.described) = Some(description.clone());
        Some(description)
    }

    /// Sends the question, unless the worker is busy until then, or its channel is full.
    fn ask_to_describe(&self, until: Deadline) -> Option<Receiver<Answered>> {
        let reply = self.begin(Some(until))?.ok()?;
        match self.try_send(&WorkerRequest::Describe) {
            Ok(true) => return Some(reply),
            Ok(false) => self.take_back(),
            Err(error) => drop(self.fail_channel(&error)),
        }
        None
    }

    /// Sends a small request, unless that would take time.
    fn try_send(&self, request: &WorkerRequest) -> Result<bool, frame::FrameError> {
        let _one_frame = match self.sending.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        if !sys::is_writable(&self.channel) {
            return Ok(false);
        }
        frame::send(&self.channel, request, &[], &[]).map(|()| true)
    }

    fn described(&self, asked: Option<&Receiver<Answered>>, deadline: Deadline, late: Late) -> Option<Description> {
        match asked.map(|it| self.receive(it, deadline.into(), late)) {
            Some(Some(Ok(answered))) => self.note(answered),
            _ => None,
        }
    }
}
