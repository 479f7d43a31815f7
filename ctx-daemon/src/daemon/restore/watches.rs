//! The commands that are about to restore an image or are doing so, and the restores that they watch.
//!
//! ```text
//!   rekindle restore ──┬─ WatchRestore ──► a watch ◄─────────┐ the first restore
//!                      └─ starts CRIU ─── Restore ──► Phases ┘ of a descendant
//! ```
//!
//! `watch` serves a watch, which ends with its connection. A restore needs no watch.

use std::sync::{Arc, Mutex};

use rekindle_wire::control::{CommandSpan, RestoreInfo};

use super::super::metrics::Metrics;
use super::super::spans::Spans;
use super::super::{lock, process};
use super::phases::{Phases, Tracked};

/// All watches.
#[derive(Default)]
pub(in crate::daemon) struct Watches {
    inner: Mutex<Inner>,
    metrics: Arc<Metrics>,
    spans: Arc<Spans>,
}

#[derive(Default)]
struct Inner {
    watches: Vec<Watch>,
    next: u64,
}

/// What the processes of a restore do before they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::daemon) enum Wish {
    /// Nothing: the command only watches.
    Watch,
    /// They wait for a moment until the command has heard that they are about to run, and has asked again.
    Hear,
    /// They wait until the command says that they may run. They are those of the migration of this name, and may have run here before
    /// if `again`.
    Hold { migration: String, again: bool },
}

struct Watch {
    number: u64,
    /// The process that watches, and that starts CRIU.
    watcher: i32,
    wish: Wish,
    /// The watcher's span, if it has one.
    span: Option<CommandSpan>,
    restore: Option<Arc<Phases>>,
}

impl Watches {
    /// No watches yet.
    pub(in crate::daemon) fn new(metrics: Arc<Metrics>, spans: Arc<Spans>) -> Self {
        Self { inner: Mutex::default(), metrics, spans }
    }

    /// A CRIU begins a restore. A watcher watches the first one that descends from it: processes that were restored are its
    /// descendants too.
    pub(super) fn begin(&self, criu: i32) -> Tracked {
        let is_watched = !lock(&self.inner).watches.is_empty();
        let above = if is_watched { process::ancestry(criu) } else { Vec::new() };
        let mut inner = lock(&self.inner);
        let watches = inner.watches.iter_mut();
        let watches: Vec<_> = watches.filter(|it| it.restore.is_none() && above.contains(&it.watcher)).collect();
        let command = watches.iter().find_map(|it| Some((it.watcher, it.span?)));
        let phases = Arc::new(Phases::new(Arc::clone(&self.metrics), Arc::clone(&self.spans), command));
        for watch in watches {
            match &watch.wish {
                Wish::Watch => {}
                Wish::Hear => phases.must_be_heard(),
                Wish::Hold { migration, again } => phases.hold().want(migration, *again),
            }
            watch.restore = Some(Arc::clone(&phases));
        }
        drop(inner);
        Tracked(phases)
    }

    /// A process watches, until the result is dropped.
    pub(super) fn add(&self, watcher: i32, wish: Wish, span: Option<CommandSpan>) -> WatchGuard<'_> {
        let mut inner = lock(&self.inner);
        inner.next += 1;
        let number = inner.next;
        inner.watches.push(Watch { number, watcher, wish, span, restore: None });
        WatchGuard { watches: self, number }
    }

    fn with<T>(&self, number: u64, action: impl FnOnce(&mut Watch) -> T) -> Option<T> {
        lock(&self.inner).watches.iter_mut().find(|it| it.number == number).map(action)
    }
}

/// Keeps a watch registered until it is dropped.
pub(super) struct WatchGuard<'a> {
    watches: &'a Watches,
    number: u64,
}

impl WatchGuard<'_> {
    /// The progress of the restore, if it has begun.
    pub(super) fn info(&self) -> Option<RestoreInfo> {
        let restore = self.watches.with(self.number, |it| it.restore.clone()).flatten();
        restore.map(|it| it.info())
    }

    /// The watcher has heard that the processes are about to run.
    pub(super) fn has_heard(&self) {
        self.watches.with(self.number, Watch::has_heard);
    }

    /// The watcher, which holds the processes, says that they may run. Returns whether they are complete, and have waited for that.
    pub(super) fn own(&self) -> bool {
        let restore = self.watches.with(self.number, |it| it.restore.clone()).flatten();
        restore.is_some_and(|it| it.hold().own())
    }
}

impl Watch {
    fn has_heard(&mut self) {
        if let Some(restore) = &self.restore
            && self.wish == Wish::Hear
        {
            self.wish = Wish::Watch;
            restore.is_heard();
        }
    }

    /// The watcher is gone.
    fn ends(&mut self) {
        self.has_heard();
        if let Some(restore) = &self.restore
            && matches!(self.wish, Wish::Hold { .. })
        {
            restore.hold().abandon();
        }
    }
}

impl Drop for WatchGuard<'_> {
    fn drop(&mut self) {
        self.watches.with(self.number, Watch::ends);
        lock(&self.watches.inner).watches.retain(|it| it.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_wire::control::FailureKind;

    #[test]
    fn a_watcher_watches_the_first_restore_below_it() {
        let watches = Watches::default();
        let own = std::process::id() as i32;
        let parent = process::ancestry(own)[1];
        let (watch, other) = (watches.add(parent, Wish::Watch, None), watches.add(i32::MAX, Wish::Watch, None));
        assert!(watch.info().is_none());
        let first = watches.begin(own);
        let second = watches.begin(own);
        drop(first);
        assert_eq!(watch.info().unwrap().failure.unwrap().kind, FailureKind::GivenUp);
        assert!(second.0.info().failure.is_none() && other.info().is_none());
    }

    #[test]
    fn a_watcher_that_is_gone_holds_nobody_up() {
        let watches = Watches::default();
        let own = std::process::id() as i32;
        let (first, second) = (watches.add(own, Wish::Hear, None), watches.add(own, Wish::Hear, None));
        let restore = watches.begin(own);
        first.has_heard();
        first.has_heard();
        drop((first, second));
        assert!(restore.0.is_heard_by_all());
        assert!(lock(&watches.inner).watches.is_empty());
    }

    #[test]
    fn processes_that_a_watcher_holds_wait_for_it_and_not_longer_than_it_lives() {
        let watches = Watches::default();
        let own = std::process::id() as i32;
        let watch = watches.add(own, Wish::Hold { migration: "a".into(), again: false }, None);
        let restore = watches.begin(own);
        assert!(restore.0.hold().migration().is_some() && !watch.own());
        drop(watch);
        assert!(restore.0.hold().wait(|| Ok::<_, super::super::error::RestoreError>(())).is_err());
        assert!(watches.begin(own).0.hold().migration().is_none());
    }
}
