//! How a copy is given up from outside: by the daemon's word, or for want of one.

use std::sync::{Arc, Mutex, PoisonError};

use super::Copying;

/// What is to be cancelled, of the request that came last.
#[derive(Default)]
pub(crate) struct Cancel(Mutex<State>);

#[derive(Default)]
struct State {
    fired: bool,
    copying: Option<Arc<Copying>>,
}

impl Cancel {
    /// A request has come that begins a copy. One that was cancelled before stays so.
    pub(crate) fn expect_another(&self) {
        *self.lock() = State::default();
    }

    /// Gives the copy up that was begun last, or that is about to begin.
    pub(crate) fn fire(&self) {
        let mut state = self.lock();
        state.fired = true;
        if let Some(copying) = state.copying.take() {
            copying.cancel();
        }
    }

    /// The copy has begun.
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
