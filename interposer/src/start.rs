//! The life of a process here: attaching to a worker, `cuInit`, a thread's end, and a fork.

use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Mutex, Once};

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{THREAD_END, ThreadEnd};

use crate::connection::attach::{self, Attachment};
use crate::connection::bounce_buffer::BounceBuffer;
use crate::connection::command::Command;
use crate::connection::{Connection, counts};
use crate::graphs;
use crate::process::{calling_thread, log};
use crate::state::client::{self, Client};
use crate::state::devices::Devices;

/// The connection's descriptor, for the handler in a forked child.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static ATTACHING: Mutex<()> = Mutex::new(());

/// Attaches if that has not happened yet, and says on stderr why it cannot.
pub(crate) fn ensure_attached() -> Result<&'static Client, CUresult> {
    try_attached(true)
}

/// Attaches if that has not happened yet; `say` is whether a failure is worth a line.
pub(crate) fn try_attached(say: bool) -> Result<&'static Client, CUresult> {
    if client::is_forked() {
        return Err(CUDA_ERROR_NOT_INITIALIZED);
    }
    let _one = ATTACHING.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
    if let Some(client) = client::attached() {
        return Ok(client);
    }
    let Attachment { socket, shared, bounce_buffer, attached } = attach::attach().map_err(|error| {
        if say {
            log::error(&error.to_string());
        }
        CUDA_ERROR_SYSTEM_NOT_READY
    })?;
    static HANDLER: Once = Once::new();
    // SAFETY: the handler only stores to atomics and closes a descriptor, which is allowed in a forked child.
    HANDLER.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(forget_in_child));
    });
    SOCKET.store(socket.as_raw_fd(), Release);
    let connection = Connection::new(shared, socket);
    let client = client::install(Client::new(connection, BounceBuffer::new(bounce_buffer), Devices::new(attached)));
    graphs::register();
    calling_thread::at_end(report_thread_end);
    counts::begin(shared);
    Ok(client)
}

/// `cuInit`.
pub(crate) fn initialise() -> CUresult {
    match ensure_attached() {
        Ok(client) if client.devices.visible().len() == 0 => CUDA_ERROR_NO_DEVICE,
        Ok(_) => {
            client::set_initialised();
            CUDA_SUCCESS
        }
        Err(error) => error,
    }
}

/// In a forked child CUDA is not initialised and cannot be, as with the real driver; the ring is not even mapped.
extern "C" fn forget_in_child() {
    if let Some(client) = client::attached() {
        client.managed.close_in_child();
        client::set_forked();
        counts::end();
        // SAFETY: the child's own copy of the descriptor; the parent keeps its.
        unsafe { libc::close(SOCKET.load(Acquire)) };
    }
}

/// A thread ends that has used its own default stream: the stream's attributes are forgotten, and the worker releases the
/// stream.
fn report_thread_end() {
    if let Ok(client) = client::get() {
        client.streams.attributes.forget_thread(calling_thread::number());
        let mut command = Command::new(&client.connection, THREAD_END, 0);
        command.put(&ThreadEnd {});
        // A worker that is gone has released everything.
        let _ = command.send();
    }
}
