//! Waits until the device is idle and CRIU can seize the process, and names the work that prevents this.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::Reader;
use rekindle_wire::command::{self, FindFunction};
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::layout::Shared;
use rekindle_wire::standstill;
use thiserror::Error;

use crate::session::Session;
use crate::session::call::Call;
use crate::session::waiting::StreamKey;

/// How a wait for the device ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    /// Nothing runs, and all waits are for the application.
    Idle,
    /// The time is up. The text names the work that still runs.
    Busy(String),
}

/// How long the device may take, at first, before the worker assumes that the device waits for a command that it does not have.
const TIMEOUT: Duration = Duration::from_millis(500);

/// The worker's view of its streams during a quiesce.
#[derive(Debug)]
pub(crate) struct Closing {
    busy: HashSet<StreamKey>,
    /// When the view last changed.
    since: Instant,
    patience: Duration,
}

impl Closing {
    pub(crate) fn new() -> Self {
        Self { busy: HashSet::new(), since: Instant::now(), patience: TIMEOUT }
    }

    /// How much longer the running work may be just long.
    pub(crate) fn patience(&self) -> Duration {
        if self.busy.is_empty() { Duration::ZERO } else { self.patience.saturating_sub(self.since.elapsed()) }
    }

    /// Notes which streams are busy now. If a step has added work, the following wait is longer: two streams of long kernels
    /// must not alternate for ever.
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

/// An earlier error has broken the context, so that the device never becomes idle.
#[derive(Clone, Copy, Debug, Error)]
#[error("the context is broken: {}", result_name(*.0))]
pub(crate) struct Broken(pub(crate) CUresult);

impl Failing for Broken {
    fn kind(&self) -> FailureKind {
        FailureKind::Refused
    }
}

/// Asks the driver which streams are idle, and returns one that is not. An error of a stream means that its context is broken.
pub(crate) fn busy_stream(call: &mut Call) -> Result<Option<StreamKey>, Broken> {
    let mut busy = None;
    for key in call.session.waiting.busy(0) {
        if call.enter(key.context).is_err() {
            continue;
        }
        let Some(real) = call.session.waiting.real(key) else { continue };
        // SAFETY: the handle is the driver's own.
        match unsafe { (call.driver().cuStreamQuery)(real) } {
            CUDA_SUCCESS => call.session.waiting.all_done(key),
            CUDA_ERROR_NOT_READY => busy = busy.or(Some(key)),
            code => return Err(Broken(code)),
        }
    }
    Ok(busy)
}

/// Waits until every stream is idle, for `patience` at most. An error breaks the context, and ends the wait.
pub(crate) fn comes_to_rest(call: &mut Call, patience: Duration) -> Result<bool, Broken> {
    let deadline = Instant::now() + patience;
    let rest = loop {
        let busy = busy_stream(call)?.is_some();
        if !busy || Instant::now() >= deadline {
            break !busy;
        }
        std::thread::sleep(Duration::from_micros(20));
    };
    let _ = call.enter_own();
    Ok(rest)
}

/// Waits until no thread of the client holds the others: CRIU could not seize them.
pub(crate) fn no_standstill(shared: &Shared, deadline: Instant) -> Rest {
    while standstill::is_under_way(shared) {
        if Instant::now() >= deadline {
            return Rest::Busy("the process moves pages of memory that it registers or unregisters".into());
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    Rest::Idle
}

/// Lets streams have only so many commands in flight for a time. Names a stream that has more yet.
pub(crate) fn calm(call: &mut Call, most: u64, time: Duration) -> Option<String> {
    call.session.waiting.calm(most, time);
    // Streams whose last private event is far back: it would not tell how far they are.
    let far: Vec<StreamKey> =
        call.session.waiting.busy(0).into_iter().filter(|key| call.session.waiting.wants_tick(*key)).collect();
    for key in far {
        if call.enter(key.context).is_ok() {
            let driver = call.gpu.driver;
            call.session.waiting.tick(driver, key);
        }
    }
    let _ = call.enter_own();
    let driver = call.gpu.driver;
    let stream = call.session.waiting.not_calm(driver);
    stream.map(|stream| what_runs(&call.session, stream))
}

/// The maximum number of kernels that are named.
const NAMED: usize = 3;

/// Names the work that keeps a stream busy.
pub(crate) fn what_runs(session: &Session, key: StreamKey) -> String {
    let stream = match key.handle {
        CU_STREAM_LEGACY => "the default stream".into(),
        CU_STREAM_PER_THREAD => format!("the default stream of thread {}", key.thread),
        handle => format!("stream {handle:#x}"),
    };
    let device = session.device_of_context(key.context).unwrap_or(0);
    let mut kernels: Vec<String> = Vec::new();
    for function in session.waiting.launches(key) {
        let name = kernel_name(session, function);
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
fn kernel_name(session: &Session, handle: u64) -> String {
    let looked_up = |call| matches!(call, command::MODULE_FUNCTION | command::LIBRARY_KERNEL);
    let of = |handle| session.objects.log().iter().find(|r| r.owner == handle && looked_up(r.call));
    let record = of(handle).or_else(|| of(session.objects.get(handle).map_or(0, |o| o.parent)));
    let name = record.and_then(|r| {
        let found = FindFunction::read(&mut Reader::new(&r.args)).ok()?;
        Some(found.name.to_string_lossy().into_owned())
    });
    name.unwrap_or_else(|| "of no known name".into())
}
