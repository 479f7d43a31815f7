//! Calls to the worker: [`Call`] takes one there, and generated code makes calls of lines of the driver table.

use std::ffi::{CStr, c_char};

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{HELD_ROOM, HeldRoom, Kind, Parameters};

use crate::connection::command::{Command, Reply};
use crate::connection::{WORKER_DIED, prints};
use crate::process::calling_thread::{self, named_stream};
use crate::state::client::{self, Client};
use crate::state::contexts;

/// The client's side of generated calls.
#[allow(clippy::all, clippy::undocumented_unsafe_blocks, unused_mut, unreachable_pub, reason = "generated")]
pub(crate) mod remote {
    use rekindle_cuda_abi::types::*;
    include!(concat!(env!("OUT_DIR"), "/encoders.rs"));
}

/// The error that every call gets now, if any: the context is broken, or the worker is gone. Otherwise, once, the error of an
/// earlier call that did not wait.
pub(crate) fn standing_error(client: &'static Client) -> Result<(), CUresult> {
    if let Err(sticky) = client.connection.sticky_error() {
        prints::deliver(&client.connection);
        // In a thread whose context is destroyed, that error comes first.
        return Err(client
            .contexts
            .current()
            .err()
            .filter(|e| *e == CUDA_ERROR_CONTEXT_IS_DESTROYED)
            .unwrap_or(sticky));
    }
    if client.connection.is_known_dead() {
        return Err(WORKER_DIED);
    }
    client.connection.deferred_error()
}

/// One call on its way to the worker.
pub(crate) struct Call {
    client: &'static Client,
    command: Command,
}

impl Call {
    /// Begins a call in the thread's current context (which may be none).
    pub(crate) fn new(number: u16) -> Result<Self, CUresult> {
        let client = client::get()?;
        if calling_thread::in_callback() {
            return Err(CUDA_ERROR_NOT_PERMITTED);
        }
        standing_error(client)?;
        Ok(Self::unchecked(client, number, contexts::current()))
    }

    /// Begins a call that goes out even when the context is broken.
    pub(crate) fn unchecked(client: &'static Client, number: u16, context: CUcontext) -> Self {
        Self { client, command: Command::new(&client.connection, number, context) }
    }

    /// Begins a call that needs a current context.
    pub(crate) fn in_context(number: u16) -> Result<Self, CUresult> {
        let call = Self::new(number)?;
        if call.command.context() == 0 { Err(CUDA_ERROR_INVALID_CONTEXT) } else { Ok(call) }
    }

    /// Puts the parameters of a command, which are those of its number.
    pub(crate) fn put(&mut self, parameters: &impl Parameters) {
        self.command.put(parameters);
    }

    pub(crate) fn word(&mut self, word: u64) {
        self.command.word(word);
    }

    pub(crate) fn device(&mut self, ordinal: CUdevice) -> Result<(), CUresult> {
        let device = self.client.devices.number(ordinal)?;
        self.command.word(device as u64);
        Ok(())
    }

    pub(crate) fn stream(&mut self, stream: CUstream) -> Result<(), CUresult> {
        self.command.word(stream_of(stream)?);
        Ok(())
    }

    /// # Safety
    /// `text` is null or ends in a NUL.
    #[allow(dead_code, reason = "for lines of the driver table that have a text and travel as they are")]
    pub(crate) unsafe fn text(&mut self, text: *const c_char) -> Result<(), CUresult> {
        if text.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        self.command.text(unsafe { CStr::from_ptr(text) });
        Ok(())
    }

    /// Puts a new handle of the kind that the C type names.
    pub(crate) fn fresh(&mut self, c_type: &str) -> u64 {
        let kind = match c_type {
            "CUstream" => Kind::Stream,
            "CUevent" => Kind::Event,
            "CUmodule" => Kind::Module,
            "CUlibrary" => Kind::Library,
            "CUfunction" => Kind::Function,
            "CUkernel" => Kind::Kernel,
            _ => Kind::Context,
        };
        let handle = self.client.fresh(kind);
        self.command.word(handle);
        handle
    }

    /// Sends without waiting; a thread that is far ahead of the device waits until it is less so, as with the driver.
    pub(crate) fn send(self) -> CUresult {
        self.send_to_end().err().unwrap_or(CUDA_SUCCESS)
    }

    /// As [`Call::send`]; returns the end of the ring behind the command.
    pub(crate) fn send_to_end(self) -> Result<u64, CUresult> {
        if self.client.connection.is_under_pressure() {
            let mut call = Call::unchecked(self.client, HELD_ROOM, 0);
            call.put(&HeldRoom {});
            call.wait();
        }
        self.command.send()
    }

    /// Sends and waits for the reply.
    pub(crate) fn wait(self) -> (CUresult, Reply) {
        let answer = self.command.wait();
        prints::deliver(&self.client.connection);
        answer
    }
}

/// Has the worker execute a command without results, and waits for its end.
pub(crate) fn perform(number: u16, parameters: &impl Parameters) -> Result<(), CUresult> {
    let mut call = Call::new(number)?;
    call.put(parameters);
    check(call.wait().0)
}

/// The parameter of a command for a stream that a caller names.
pub(crate) fn stream_of(named: CUstream) -> Result<u64, CUresult> {
    let stream = named_stream(named);
    if stream > CU_STREAM_PER_THREAD && !Kind::Stream.owns(stream) {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    Ok(stream)
}
