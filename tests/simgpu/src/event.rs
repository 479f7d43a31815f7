//! Events: moments in streams that can be asked about, waited for, and measured.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_READY};

use crate::context::Context;
use crate::handles::Object;
use crate::ipc_event::SharedEvent;
use crate::order::Mark;
use crate::status::{Result, ensure};
use crate::stream::Stream;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;
/// `CU_EVENT_INTERPROCESS`.
const INTERPROCESS: u32 = 4;

/// An event.
#[derive(Debug)]
pub(crate) struct Event {
    /// The context that the event was made in.
    pub(crate) context: Weak<Context>,
    flags: u32,
    last: Mutex<Option<Record>>,
    /// The shared part of an event that other processes may open.
    shared: Option<SharedEvent>,
}

/// The last time an event was recorded.
#[derive(Clone, Debug)]
struct Record {
    mark: Mark,
    time: Arc<AtomicU64>,
}

impl Event {
    /// Makes an event that has not been recorded.
    pub(crate) fn new(context: Weak<Context>, flags: u32) -> Result<Self> {
        let shared = if flags & INTERPROCESS == 0 { None } else { Some(SharedEvent::new()?) };
        Ok(Self { context, flags, last: Mutex::default(), shared })
    }

    /// Opens an event of another process.
    pub(crate) fn open(context: Weak<Context>, shared: SharedEvent) -> Self {
        Self { context, flags: INTERPROCESS | DISABLE_TIMING, last: Mutex::default(), shared: Some(shared) }
    }

    /// The part that other processes share.
    pub(crate) fn shared(&self) -> Option<&SharedEvent> {
        self.shared.as_ref()
    }

    fn last(&self) -> Option<Record> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Records the moment when the stream has done its present commands.
    pub(crate) fn record(&self, stream: &Arc<Stream>) -> Result<()> {
        let time = Arc::new(AtomicU64::new(0));
        let clock = time.clone();
        let shared = self.shared.as_ref().map(|shared| (shared.words(), shared.count()));
        let mark = stream.submit_always(move |_, state| {
            clock.store(now(), Ordering::SeqCst);
            if let Some((words, count)) = shared {
                words[1].fetch_max(count, Ordering::SeqCst);
            }
            state
        })?;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Record { mark, time });
        Ok(())
    }

    /// Whether the recorded moment has come; true for an event that was never recorded.
    pub(crate) fn is_done(&self) -> bool {
        let shared = self.shared.as_ref().is_none_or(|shared| shared.last().is_none_or(|last| last.is_done()));
        shared && self.last().is_none_or(|record| record.mark.reached())
    }

    /// The moment it recorded, if any.
    pub(crate) fn mark(&self) -> Option<Mark> {
        self.last().map(|record| record.mark)
    }

    /// The milliseconds from one event to another.
    pub(crate) fn elapsed(start: &Self, end: &Self) -> Result<f32> {
        let (Some(first), Some(second)) = (start.last(), end.last()) else {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        };
        ensure((start.flags | end.flags) & DISABLE_TIMING == 0, CUDA_ERROR_INVALID_HANDLE)?;
        ensure(first.mark.reached() && second.mark.reached(), CUDA_ERROR_NOT_READY)?;
        let [first, second] = [first, second].map(|r| r.time.load(Ordering::SeqCst) as f64);
        Ok(((second - first) / 1e6) as f32)
    }
}

impl Object for Event {
    fn belongs_to(&self, context: u64) -> bool {
        self.context.upgrade().is_some_and(|it| it.handle == context)
    }
}

/// Nanoseconds since the first call of this function.
pub(crate) fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}
