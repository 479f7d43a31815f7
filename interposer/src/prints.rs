//! What kernels print: fetched from the worker whenever it says that there is some, and written to this process's stdout,
//! as by the driver when something synchronises. What failed assertions say goes to stderr.

use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use rekindle_cuda_abi::types::CUDA_SUCCESS;
use rekindle_wire::command::{PRINTS, Prints};

use crate::client::{Call, Client};
use crate::process::calling_thread;

unsafe extern "C" {
    /// C's streams: text written through them keeps its place among what the program prints itself.
    static stdout: *mut libc::FILE;
    static stderr: *mut libc::FILE;
}

/// One thread at a time fetches and writes, so that text keeps its order.
static WRITING: Mutex<()> = Mutex::new(());
/// Whether one does: what it has fetched may be what another thread has just waited for.
static BUSY: AtomicBool = AtomicBool::new(false);

/// Writes what kernels have printed, if anything.
pub(crate) fn deliver(client: &'static Client) {
    if client.shared.header().printed.load(Acquire) != 0 || BUSY.load(Acquire) {
        fetch(client);
    }
}

#[cold]
fn fetch(client: &'static Client) {
    /// The thread that is fetching: its own calls must not fetch.
    static FETCHER: AtomicU64 = AtomicU64::new(0);
    let me = u64::from(calling_thread::number());
    if FETCHER.load(Acquire) == me {
        return;
    }
    let Ok(_one) = WRITING.lock() else { return };
    FETCHER.store(me, Release);
    BUSY.store(true, Release);
    while client.shared.header().printed.load(Acquire) != 0 && fetch_part(client) {}
    BUSY.store(false, Release);
    FETCHER.store(0, Release);
}

/// Whether there may be more.
fn fetch_part(client: &'static Client) -> bool {
    let mut call = Call::unchecked(client, PRINTS, 0);
    call.put(&Prints {});
    let (result, reply) = call.wait();
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
