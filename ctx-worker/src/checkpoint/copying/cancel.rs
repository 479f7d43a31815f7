//! Cancels a copy from outside: the daemon asks for it, or has become silent.

use std::sync::{Arc, Mutex, PoisonError};

use super::Copying;

/// The cancellation state of the latest request.
#[derive(Default)]
pub(crate) struct Cancel(Mutex<State>);

#[derive(Default)]
struct State {
    fired: bool,
    copying: Option<Arc<Copying>>,
}

impl Cancel {
    /// A request to begin a copy has arrived. A copy that was cancelled before stays cancelled.
    pub(crate) fn expect_another(&self) {
        *self.lock() = State::default();
    }

    /// Cancels the copy that was begun last, or that is about to begin.
    pub(crate) fn fire(&self) {
        let mut state = self.lock();
        state.fired = true;
        if let Some(copying) = state.copying.take() {
            copying.cancel();
        }
    }

    /// Called when the copy has begun.
    pub(crate) fn begun(&self, copying: &Arc<Copying>) {
        let mut state = self.lock();
        if state.fired {
            copying.cancel();
        } else {
            state.copying = Some(Arc::clone(copying));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
