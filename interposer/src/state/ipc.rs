//! Memory of other processes that this one has opened by handles.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::CUcontext;
use rekindle_wire::ipc::Token;

/// Pieces of another process, mapped side by side.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    /// The reservation in which they are mapped, from its beginning to its end.
    pub(crate) reserved: u64,
    pub(crate) bytes: u64,
    pub(crate) pieces: Vec<u64>,
}

/// An open handle.
#[derive(Clone, Debug)]
pub(crate) struct Open {
    /// The address at which its memory begins.
    pub(crate) base: u64,
    pub(crate) context: CUcontext,
    /// How often it has been opened.
    pub(crate) times: u64,
    pub(crate) placed: Placed,
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
