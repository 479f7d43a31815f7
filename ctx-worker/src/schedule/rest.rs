//! Bringing the device to rest, and naming what keeps it from that.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, FindFunction};
use rekindle_wire::control::{Failing, FailureKind};
use thiserror::Error;

use crate::serve::executor::Executor;
use crate::session::waiting::StreamKey;

/// How a wait for the device ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Nothing runs, and nothing waits but for the application.
    Idle,
    /// Time is up, and this is what still runs.
    Busy(String),
}

/// How long the device may take before it is thought to wait for a command that it does not have, at first.
const PATIENCE: Duration = Duration::from_millis(500);

/// What a worker knows of its streams while a quiesce goes on.
#[derive(Debug)]
pub(crate) struct Closing {
    busy: HashSet<StreamKey>,
    /// When that last changed.
    since: Instant,
    patience: Duration,
}

impl Closing {
    pub(crate) fn new() -> Self {
        Self { busy: HashSet::new(), since: Instant::now(), patience: PATIENCE }
    }

    /// How much longer what runs may merely be long.
    pub(crate) fn patience(&self) -> Duration {
        if self.busy.is_empty() { Duration::ZERO } else { self.patience.saturating_sub(self.since.elapsed()) }
    }

    /// Takes note of what is busy now. Where a step has added to it, the next one must be thought over for longer: two
    /// streams of long kernels must not take turns for ever.
    pub(crate) fn look(&mut self, busy: Vec<StreamKey>) {
        let busy: HashSet<_> = busy.into_iter().collect();
        if busy.difference(&self.busy).next().is_some() && !self.busy.is_empty() {
            self.patience *= 2;
        }
        if busy != self.busy {
            self.since = Instant::now();
            self.busy = busy;
        }
    }
}

/// An earlier error has broken the context, so that nothing comes to rest.
#[derive(Clone, Copy, Debug, Error)]
#[error("the context is broken: {}", result_name(*.0))]
pub(crate) struct Broken(pub(crate) CUresult);

impl Failing for Broken {
    fn kind(&self) -> FailureKind {
        FailureKind::Refused
    }
}

/// As many kernels are named at most.
const NAMED: usize = 3;

impl Executor {
    /// Waits until every stream is idle and nothing waits for the device. The ring is not looked at meanwhile.
    pub(crate) fn drain(&mut self, timeout: Duration) -> Result<Rest, Broken> {
        let deadline = Instant::now() + timeout;
        loop {
            self.poll();
            let mut busy = None;
            for key in self.session.waiting.busy(0) {
                if self.enter_context(key.context).is_err() {
                    continue;
                }
                let Some(real) = self.session.waiting.real(key) else { continue };
                // SAFETY: the handle is the driver's own.
                match unsafe { (self.driver().cuStreamQuery)(real) } {
                    CUDA_SUCCESS => self.session.waiting.all_done(key),
                    CUDA_ERROR_NOT_READY => busy = busy.or(Some(key)),
                    code => {
                        self.note_sticky(code);
                        return Err(Broken(code));
                    }
                }
            }
            match busy {
                None if self.session.waiting.is_empty() && self.scheduler.deferred.is_at_rest() => {
                    self.collect_prints();
                    return Ok(Rest::Idle);
                }
                _ if Instant::now() < deadline => std::thread::sleep(Duration::from_micros(50)),
                Some(key) => return Ok(Rest::Busy(self.what_runs(key))),
                None => return Ok(Rest::Busy("an event is pending".into())),
            }
        }
    }

    fn what_runs(&self, key: StreamKey) -> String {
        let stream = match key.handle {
            CU_STREAM_LEGACY => "the default stream".into(),
            CU_STREAM_PER_THREAD => format!("the default stream of thread {}", key.thread),
            handle => format!("stream {handle:#x}"),
        };
        let device = self.device_of_context(key.context).unwrap_or(0);
        let mut kernels: Vec<String> = Vec::new();
        for function in self.session.waiting.launches(key) {
            let name = self.kernel_name(function);
            if kernels.len() < NAMED && !kernels.contains(&name) {
                kernels.push(name);
            }
        }
        match kernels.as_slice() {
            [] => format!("{stream} on device {device} waits for something"),
            [one] => format!("{stream} on device {device} runs the kernel {one}"),
            several => format!("{stream} on device {device} runs one of the kernels {}", several.join(", ")),
        }
    }

    /// The name of a function or kernel, from the command that looked it up.
    fn kernel_name(&self, handle: u64) -> String {
        let looked_up = |call| matches!(call, command::MODULE_FUNCTION | command::LIBRARY_KERNEL);
        let of = |handle| self.session.objects.log().iter().find(|r| r.owner == handle && looked_up(r.call));
        let record = of(handle).or_else(|| of(self.session.objects.get(handle).map_or(0, |o| o.parent)));
        let name = record.and_then(|r| {
            let found = FindFunction::read(&mut Reader::new(&r.args)).ok()?;
            Some(found.name.to_string_lossy().into_owned())
        });
        name.unwrap_or_else(|| "of no known name".into())
    }
}
