//! Memory of other processes that this one has opened by handles.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::CUcontext;
use rekindle_wire::ipc::Token;

/// An open handle.
#[derive(Clone, Debug)]
pub(crate) struct Open {
    /// The address at which its memory begins.
    pub(crate) base: u64,
    pub(crate) context: CUcontext,
    /// How often it has been opened.
    pub(crate) times: u64,
    /// The reservation in which it is mapped.
    pub(crate) reserved: u64,
    /// The mapped bytes of the reservation.
    pub(crate) bytes: u64,
    /// The mapped pieces.
    pub(crate) pieces: Vec<u64>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Opened(Mutex<HashMap<Token, Open>>);

impl Opened {
    /// The lock stays taken while a handle is opened or closed, so that a handle that two threads open is opened once.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashMap<Token, Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
