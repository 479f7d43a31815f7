//! Memory of other processes that this one has opened by handles.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::CUcontext;
use rekindle_wire::ipc::Token;

/// One handle that is open.
#[derive(Clone, Debug)]
pub(crate) struct Open {
    /// Where its memory begins.
    pub(crate) base: u64,
    pub(crate) context: CUcontext,
    /// How often it has been opened.
    pub(crate) times: u64,
    /// The reservation that it is mapped in,
    pub(crate) reserved: u64,
    /// of which so many bytes are mapped,
    pub(crate) bytes: u64,
    /// to these pieces.
    pub(crate) pieces: Vec<u64>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Opened(Mutex<HashMap<Token, Open>>);

impl Opened {
    /// Held while one is opened or closed: a handle that two threads open is opened once.
    pub(crate) fn lock(&self) -> MutexGuard<'_, HashMap<Token, Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
