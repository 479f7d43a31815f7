//! Host callbacks. The worker says when a stream has come to one, a thread of this library runs it, and what follows it
//! on its stream goes on when it has returned.
//!
//! ```text
//!   cuLaunchHostFunc ── HOST_FUNC ──> worker: deferred, with what follows, until the stream has come to it
//!   callback thread <── CALLBACK_NEXT ── worker
//!        runs it   ──── CALLBACK_NEXT ──> worker: what follows goes on
//! ```

use std::ffi::c_void;
use std::sync::Mutex;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{CALLBACK_NEXT, CallbackNext, HOST_FUNC, HostFunc, STREAM_CALLBACK};

use crate::call::Call;
use crate::process::calling_thread::{self, named_stream};
use crate::process::{log, threads};
use crate::state::client::{self, Client};

type HostFunction = unsafe extern "C" fn(*mut c_void);
type StreamCallback = unsafe extern "C" fn(CUstream, CUresult, *mut c_void);

/// Enqueues a callback, whatever captures.
pub(crate) fn enqueue(stream: CUstream, function: *mut c_void, data: *mut c_void, kind: u64) -> Result<(), CUresult> {
    if function.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let client = client::get()?;
    let mut call = Call::in_context(HOST_FUNC)?;
    let named = named_stream(stream);
    if named > CU_STREAM_PER_THREAD && client.streams.get(named).is_none() {
        return Err(CUDA_ERROR_INVALID_HANDLE);
    }
    start_thread(client)?;
    call.put(&HostFunc { stream: named, function: function as u64, data: data as u64, kind, named: stream });
    check(call.send())
}

/// Starts the thread that runs callbacks, once. Where it cannot be made now, the next callback may find that it can.
fn start_thread(client: &'static Client) -> Result<(), CUresult> {
    static STARTED: Mutex<bool> = Mutex::new(false);
    let mut started = STARTED.lock().map_err(|_| CUDA_ERROR_UNKNOWN)?;
    if *started {
        return Ok(());
    }
    threads::spawn("cuda-callbacks", move || run(client)).map_err(|error| {
        log::note(&format!("no thread can be made that runs host functions ({error})"));
        CUDA_ERROR_OUT_OF_MEMORY
    })?;
    *started = true;
    Ok(())
}

/// Runs callbacks as the worker hands them out, until the worker is gone.
fn run(client: &'static Client) {
    calling_thread::run_callbacks();
    let mut done = 0;
    loop {
        let mut call = Call::unchecked(client, CALLBACK_NEXT, 0);
        call.put(&CallbackNext { done });
        let (result, mut reply) = call.wait();
        let mut word = || reply.word();
        let (CUDA_SUCCESS, Some(id), Some(kind), Some(function), Some(data), Some(stream), Some(status)) =
            (result, word(), word(), word(), word(), word(), word())
        else {
            // A worker that is gone has been told of already.
            if client.connection.is_alive() {
                log::error(&format!("host functions are not called any more: the worker has answered {result}"));
            }
            return;
        };
        let (function, data) = (function as *mut c_void, data as *mut c_void);
        // SAFETY: the function and what it takes are as the application gave them with a callback of this kind.
        unsafe {
            if kind == STREAM_CALLBACK {
                std::mem::transmute::<*mut c_void, StreamCallback>(function)(stream, status as i32, data);
            } else {
                std::mem::transmute::<*mut c_void, HostFunction>(function)(data);
            }
        }
        done = id;
    }
}
