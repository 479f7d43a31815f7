//! The thread of a process that works for whoever checkpoints it, NVIDIA's "restore thread".

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rekindle_cuda_abi::checkpoint::ProcessState;
use rekindle_cuda_abi::types::{
    CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OPERATING_SYSTEM, CUDA_SUCCESS,
};

use super::page::{self, Page, Request};
use super::{device_file, gate};
use crate::config::log;
use crate::context::Context;
use crate::contexts::primary;
use crate::device::{self, devices};
use crate::memory::heap::Saved;
use crate::memory::space::{self, Kind};
use crate::status::{Result, ensure};
use crate::{fault, handles};

/// How long the worker sleeps when nobody wakes it.
const SLEEP: Duration = Duration::from_secs(60);

/// The content of device memory, while the process has no device.
static MOVED: Mutex<Vec<(usize, Saved)>> = Mutex::new(Vec::new());

/// Makes this process one that can be checkpointed, if its environment says so.
pub(crate) fn begin() -> Result<()> {
    if device_file::path().is_none() {
        return Ok(());
    }
    device_file::open().map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    let page = page::make().ok_or(CUDA_ERROR_OPERATING_SYSTEM)?;
    gate::build();
    // As NVIDIA's, the thread has the mask of its creator; CRIU's plugins block signals while they let it run.
    let thread = std::thread::Builder::new().name("cuda-restore".into());
    thread.spawn(move || work(page)).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    while page.thread.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    Ok(())
}

fn work(page: &Page) {
    // SAFETY: no precondition.
    page.thread.store(unsafe { libc::gettid() }, Ordering::SeqCst);
    loop {
        let answered = page.answered.load(Ordering::SeqCst);
        let asked = page.asked.load(Ordering::SeqCst);
        if asked == answered {
            page::wait(&page.asked, asked, SLEEP);
            continue;
        }
        let result = serve(page).err().unwrap_or(CUDA_SUCCESS);
        page.result.store(result, Ordering::SeqCst);
        page::set(&page.answered, asked);
    }
}

fn serve(page: &Page) -> Result<()> {
    let request = Request::of(page.request.load(Ordering::SeqCst)).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let is = ProcessState::of(page.state.load(Ordering::SeqCst)).ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
    log!("{request:?} while the process is {}", is.as_str());
    let (needed, next) = match request {
        Request::Lock => (ProcessState::Running, ProcessState::Locked),
        Request::Checkpoint => (ProcessState::Locked, ProcessState::Checkpointed),
        Request::Restore => (ProcessState::Checkpointed, ProcessState::Locked),
        Request::Unlock => (ProcessState::Locked, ProcessState::Running),
    };
    ensure(is == needed, CUDA_ERROR_ILLEGAL_STATE)?;
    match request {
        Request::Lock => {
            fault::point("lock")?;
            let ms = page.timeout_ms.load(Ordering::SeqCst);
            let until = (ms > 0).then(|| Instant::now() + Duration::from_millis(u64::from(ms)));
            ensure(gate::close(until, is_idle), CUDA_ERROR_NOT_READY)?;
        }
        Request::Checkpoint => {
            fault::point("checkpoint")?;
            move_out()?;
        }
        Request::Restore => {
            let restored = fault::point("restore").and_then(|()| move_in());
            if restored.is_err() {
                page.state.store(ProcessState::Failed as u32, Ordering::SeqCst);
            }
            restored?;
        }
        Request::Unlock => {
            fault::point("unlock")?;
            gate::open();
        }
    }
    page.state.store(next as u32, Ordering::SeqCst);
    Ok(())
}

/// Whether all work of all contexts has ended.
fn is_idle() -> bool {
    let idle = |context: &Context| context.order().unreached(None).is_empty();
    let primaries = devices().iter().filter_map(|device| primary(device).active.clone());
    primaries.into_iter().all(|it| idle(&it)) && handles::all::<Context>().iter().all(|it| idle(it))
}

/// Moves the content of device memory into ordinary memory of the process, and gives the device up.
fn move_out() -> Result<()> {
    let opened = |it: &space::Region| it.kind == Kind::Opened;
    ensure(!space::any(opened), CUDA_ERROR_NOT_SUPPORTED)?;
    let mut moved = MOVED.lock().unwrap_or_else(PoisonError::into_inner);
    *moved =
        device::devices().iter().flat_map(|it| it.move_out().into_iter().map(|saved| (it.ordinal, saved))).collect();
    device_file::close();
    Ok(())
}

fn move_in() -> Result<()> {
    device_file::open().map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
    let mut moved = MOVED.lock().unwrap_or_else(PoisonError::into_inner);
    for (ordinal, saved) in moved.drain(..) {
        let device = devices().get(ordinal).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        device.move_in(&saved)?;
    }
    Ok(())
}
