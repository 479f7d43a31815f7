//! The output of kernels. The worker sets a word when there is some; this process then fetches it and writes it to its own
//! stdout, as the driver does at a synchronisation. Messages of failed assertions go to stderr.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};

use rekindle_cuda_abi::types::CUDA_SUCCESS;
use rekindle_wire::command::{PRINTS, Prints};

use super::Connection;
use super::command::Command;

unsafe extern "C" {
    /// C's streams: text written through them keeps its place among what the program prints itself.
    static stdout: *mut libc::FILE;
    static stderr: *mut libc::FILE;
}

/// One thread at a time fetches and writes, so that text keeps its order.
static WRITING: Mutex<()> = Mutex::new(());
/// Whether a thread fetches now: it may have the output of a kernel that another thread has just waited for.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Writes the output of kernels, if there is any.
pub(crate) fn deliver(connection: &'static Connection) {
    if connection.shared.header().printed.load(Acquire) != 0 || BUSY.load(Acquire) {
        fetch(connection);
    }
}

#[cold]
fn fetch(connection: &'static Connection) {
    let Ok(_one) = WRITING.lock() else { return };
    BUSY.store(true, Release);
    while connection.shared.header().printed.load(Acquire) != 0 && fetch_part(connection) {}
    BUSY.store(false, Release);
}

/// Fetches and writes one part. Returns whether there may be more.
fn fetch_part(connection: &'static Connection) -> bool {
    let mut command = Command::new(connection, PRINTS, 0);
    command.put(&Prints {});
    let (result, reply) = command.wait();
    let mut reply = reply.rest();
    let (CUDA_SUCCESS, Ok(output), Ok(more), Ok(text)) = (result, reply.word(), reply.word(), reply.blob()) else {
        return false;
    };
    if !text.is_empty() {
        // SAFETY: C's own streams, which lock themselves, and bytes that are there.
        unsafe {
            let stream = if output == 0 { stdout } else { stderr };
            libc::fwrite(text.as_ptr().cast::<c_void>(), 1, text.len(), stream);
        }
    }
    more != 0
}
