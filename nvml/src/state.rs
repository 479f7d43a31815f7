//! The state between `nvmlInit` and `nvmlShutdown`: the number of initialisations, and the GPUs.

use std::sync::{Arc, Mutex, PoisonError};

use rekindle_wire::control::{Reply, Request};
use rekindle_wire::nvml::{Gpu, Gpus};

use crate::daemon;
use crate::result::*;

/// An `nvmlDevice_t` is this number plus the GPU's place. It is not a valid pointer.
const HANDLE: usize = 0x4e56_4d4c_0000;

/// The daemon's answer when NVML was initialised.
pub(crate) struct Facts(pub(crate) Gpus);

#[derive(Default)]
struct State {
    /// `nvmlInit`s without their `nvmlShutdown`.
    users: u32,
    facts: Option<Arc<Facts>>,
}

static STATE: Mutex<State> = Mutex::new(State { users: 0, facts: None });

/// `nvmlInit`: the first call asks the daemon; later ones only count.
pub(crate) fn initialise() -> Result<(), u32> {
    {
        let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        if state.users > 0 {
            state.users += 1;
            return Ok(());
        }
    }
    // Without the lock: a process that forks meanwhile would leave it locked in its child.
    let facts = match daemon::ask_at_once(&Request::Gpus)? {
        Reply::Gpus(gpus) => Arc::new(Facts(gpus)),
        _ => return Err(ERROR_UNKNOWN),
    };
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.users += 1;
    state.facts = Some(facts);
    Ok(())
}

/// `nvmlShutdown`.
pub(crate) fn shut_down() -> Result<(), u32> {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.users = state.users.checked_sub(1).ok_or(ERROR_UNINITIALIZED)?;
    if state.users == 0 {
        state.facts = None;
    }
    Ok(())
}

/// The facts, or the error of a call before `nvmlInit`.
pub(crate) fn facts() -> Result<Arc<Facts>, u32> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner).facts.clone().ok_or(ERROR_UNINITIALIZED)
}

impl Facts {
    /// The GPU of a handle, and its place.
    pub(crate) fn gpu(&self, handle: usize) -> Result<(u32, &Gpu), u32> {
        let place = handle.checked_sub(HANDLE).ok_or(ERROR_INVALID_ARGUMENT)?;
        let gpu = self.0.gpus.get(place).ok_or(ERROR_INVALID_ARGUMENT)?;
        Ok((place as u32, gpu))
    }

    /// The handle of the GPU in a place.
    pub(crate) fn handle(&self, place: usize) -> Result<usize, u32> {
        if place < self.0.gpus.len() { Ok(HANDLE + place) } else { Err(ERROR_INVALID_ARGUMENT) }
    }
}
