//! The order of a context's commands: the progress of each of its streams, and the commands for which a new one waits.
//!
//! ```text
//!   legacy default stream   waits for the last command of every blocking stream of the context
//!   blocking stream         waits for the last command of the legacy default stream
//!   non-blocking stream     waits for nothing but what cuStreamWaitEvent says
//! ```
//!
//! The streams of each green context are a group of their own, with a default stream.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The kind of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// The legacy default stream.
    Legacy,
    /// Ordered with the legacy default stream.
    Blocking,
    /// Not ordered with it (`CU_STREAM_NON_BLOCKING`).
    NonBlocking,
}

/// The progress of a stream: the numbers of commands that it was given and that are done.
#[derive(Debug)]
pub(crate) struct Timeline {
    /// The stream's kind.
    pub(crate) role: Role,
    /// The id of the stream's green context, 0 for none.
    group: u64,
    submitted: AtomicU64,
    done: AtomicU64,
    /// Set when the stream is destroyed, which may still have work.
    destroyed: AtomicBool,
    waiters: Mutex<()>,
    advanced: Condvar,
}

/// A moment in a stream: when this number of its commands is done.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    timeline: Arc<Timeline>,
    count: u64,
}

impl Timeline {
    fn new(role: Role, group: u64) -> Self {
        Self {
            role,
            group,
            submitted: AtomicU64::new(0),
            done: AtomicU64::new(0),
            destroyed: AtomicBool::new(false),
            waiters: Mutex::default(),
            advanced: Condvar::new(),
        }
    }

    /// The moment when all commands submitted so far are done.
    pub(crate) fn last(self: &Arc<Self>) -> Mark {
        Mark { timeline: self.clone(), count: self.submitted.load(Ordering::SeqCst) }
    }

    /// Counts a new command; returns the moment when it is done.
    pub(crate) fn submit(self: &Arc<Self>) -> Mark {
        Mark { timeline: self.clone(), count: self.submitted.fetch_add(1, Ordering::SeqCst) + 1 }
    }

    /// Notes that another command is done.
    pub(crate) fn advance(&self) {
        let _waiters = self.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        self.done.fetch_add(1, Ordering::SeqCst);
        self.advanced.notify_all();
    }
}

impl Mark {
    /// Whether the moment has come.
    pub(crate) fn reached(&self) -> bool {
        self.timeline.done.load(Ordering::SeqCst) >= self.count
    }

    /// Waits for the moment.
    pub(crate) fn wait(&self) {
        self.wait_unless(|| false);
    }

    /// Waits for the moment, or until `cancelled` holds.
    pub(crate) fn wait_unless(&self, cancelled: impl Fn() -> bool) {
        let mut waiters = self.timeline.waiters.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.reached() && !cancelled() {
            let waited = self.timeline.advanced.wait_timeout(waiters, Duration::from_millis(20));
            waiters = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The timelines of a context's streams. A stream submits a command under its lock, so that the order of commands is the same
/// for all streams.
#[derive(Debug, Default)]
pub(crate) struct Order(Vec<Arc<Timeline>>);

impl Order {
    /// The timeline of a new stream.
    pub(crate) fn add(&mut self, role: Role, group: u64) -> Arc<Timeline> {
        let timeline = Arc::new(Timeline::new(role, group));
        self.0.push(timeline.clone());
        timeline
    }

    /// Notes that a stream is destroyed. Its timeline counts until its commands are done.
    pub(crate) fn remove(&mut self, timeline: &Timeline) {
        timeline.destroyed.store(true, Ordering::SeqCst);
        self.0.retain(|it| !it.destroyed.load(Ordering::SeqCst) || !it.last().reached());
    }

    /// The last moments of the streams that have work left, of a group or of all.
    pub(crate) fn unreached(&self, group: Option<u64>) -> Vec<Mark> {
        let wanted = self.0.iter().filter(|it| group.is_none_or(|group| it.group == group));
        wanted.map(Timeline::last).filter(|mark| !mark.reached()).collect()
    }

    /// The moments for which a new command of a stream waits.
    pub(crate) fn predecessors(&self, timeline: &Timeline) -> Vec<Mark> {
        let wanted = match timeline.role {
            Role::NonBlocking => return Vec::new(),
            Role::Blocking => Role::Legacy,
            Role::Legacy => Role::Blocking,
        };
        let others = self.0.iter().filter(|other| other.role == wanted && other.group == timeline.group);
        others.map(Timeline::last).filter(|mark| !mark.reached()).collect()
    }
}
