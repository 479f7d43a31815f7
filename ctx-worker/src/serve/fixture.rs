//! An executor for tests of its own logic: every call of its driver succeeds and does nothing.

use std::ffi::c_void;
use std::sync::OnceLock;

use rekindle_cuda_abi::types::{CUDA_SUCCESS, CUresult};
use rekindle_images::content::ContentKey;
use rekindle_wire::attach::Attached;
use rekindle_wire::codec::Writer;
use rekindle_wire::command::{self, Kind};
use rekindle_wire::ring::CommandHeader;

use crate::checkpoint::access::client::ClientView;
use crate::checkpoint::access::hash::Hasher;
use crate::checkpoint::access::set::Access;
use crate::checkpoint::engine::Engine;
use crate::gpu::driver::{Driver, LoadError};
use crate::schedule::deferred::{Entry, Progress};
use crate::schedule::dependencies::Dependencies;
use crate::serve::executor::Executor;
use crate::session::objects::Object;

extern "C" fn succeed() -> CUresult {
    CUDA_SUCCESS
}

fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let find = |_: &'static str| Ok::<_, LoadError>(succeed as *const c_void);
        // SAFETY: a function of the C ABI leaves its arguments to its caller, so one that looks at none of them can stand
        // for all. Out parameters stay as the caller has set them.
        let mut driver = unsafe { Driver::load(find) }.unwrap();
        (driver.cuEventCreate, driver.cuEventRecord) = (clock::create, clock::record_in);
        driver.cuEventElapsedTime = clock::elapsed;
        (driver.cuMemHostRegister_v2, driver.cuMemHostUnregister) = (pins::register, pins::unregister);
        driver
    })
}

/// The host memory that this thread has registered with the driver.
pub(crate) mod pins {
    use std::cell::RefCell;
    use std::ffi::c_void;

    use rekindle_cuda_abi::types::*;

    thread_local! {
        static PINNED: RefCell<Vec<(usize, usize)>> = const { RefCell::new(Vec::new()) };
    }

    /// The address and the length of each piece, in the order in which they were registered.
    pub(crate) fn all() -> Vec<(usize, usize)> {
        PINNED.with_borrow(Clone::clone)
    }

    pub(super) unsafe extern "C" fn register(at: *mut c_void, bytes: usize, _: u32) -> CUresult {
        PINNED.with_borrow_mut(|pinned| pinned.push((at as usize, bytes)));
        CUDA_SUCCESS
    }

    pub(super) unsafe extern "C" fn unregister(at: *mut c_void) -> CUresult {
        PINNED.with_borrow_mut(|pinned| pinned.retain(|(address, _)| *address != at as usize));
        CUDA_SUCCESS
    }
}

/// The driver's events: they store when they were recorded, by a clock that the calling thread sets.
pub(crate) mod clock {
    use std::cell::{Cell, RefCell};
    use std::collections::HashMap;

    use rekindle_cuda_abi::types::*;

    thread_local! {
        static NOW: Cell<u64> = const { Cell::new(0) };
        static STEP: Cell<u64> = const { Cell::new(0) };
        static RECORDED: RefCell<HashMap<CUevent, u64>> = RefCell::default();
    }

    /// Sets the clock, in nanoseconds since its beginning.
    pub(crate) fn set(now: u64) {
        NOW.set(now);
    }

    /// Nanoseconds since the clock's beginning.
    pub(crate) fn now() -> u64 {
        NOW.get()
    }

    /// Advances the clock by this many nanoseconds.
    pub(crate) fn advance(by: u64) {
        NOW.set(NOW.get() + by);
    }

    /// Advances the clock by this many nanoseconds whenever an event is recorded.
    pub(crate) fn advance_at_each_record(by: u64) {
        STEP.set(by);
    }

    /// Records an event, which is done at once.
    pub(crate) fn record(event: CUevent) {
        advance(STEP.get());
        RECORDED.with_borrow_mut(|recorded| recorded.insert(event, NOW.get()));
    }

    /// A new event.
    pub(crate) fn new() -> CUevent {
        RECORDED.with_borrow_mut(|recorded| {
            let event = 0x2000 + recorded.len() as u64;
            recorded.insert(event, 0);
            event
        })
    }

    pub(crate) unsafe extern "C" fn create(event: *mut CUevent, _flags: u32) -> CUresult {
        // SAFETY: the caller's out parameter.
        unsafe { event.write(new()) };
        CUDA_SUCCESS
    }

    pub(crate) unsafe extern "C" fn record_in(event: CUevent, _stream: CUstream) -> CUresult {
        record(event);
        CUDA_SUCCESS
    }

    pub(crate) unsafe extern "C" fn elapsed(milliseconds: *mut f32, start: CUevent, end: CUevent) -> CUresult {
        RECORDED.with_borrow(|recorded| match (recorded.get(&start), recorded.get(&end)) {
            (Some(start), Some(end)) => {
                // SAFETY: the caller's out parameter.
                unsafe { milliseconds.write(((*end as f64 - *start as f64) / 1e6) as f32) };
                CUDA_SUCCESS
            }
            _ => CUDA_ERROR_INVALID_HANDLE,
        })
    }
}

/// An executor that has no device.
pub(crate) fn executor() -> Executor {
    let attached =
        Attached { driver_version: 13_000, driver_build: String::new(), api_version: 3020, devices: Vec::new() };
    let key = ContentKey::from_bytes([0; 16]);
    Executor::new(driver(), Vec::new(), Engine::new(), Hasher::new(&key, 0, 1 << 20), attached)
}

/// Gives the client a context.
pub(crate) fn context(worker: &mut Executor) -> u64 {
    let handle = Kind::Context.handle(1);
    let object = Object { kind: Kind::Context, real: 0x1000, context: handle, parent: 0, allocates: false };
    assert!(worker.call.session.objects.insert(handle, object));
    handle
}

/// Gives the client an event.
pub(crate) fn event(worker: &mut Executor, context: u64, handle: u64) {
    let object = Object { kind: Kind::Event, real: clock::new(), context, parent: 0, allocates: false };
    assert!(worker.call.session.objects.insert(handle, object));
    let create = command::number(&worker.call.session.table, "cuEventCreate").unwrap();
    let mut args = Writer::new();
    args.word(handle);
    args.word(0);
    worker.call.session.objects.record(create, handle, context, args.bytes(), None);
}

/// The predicted accesses of a command.
pub(crate) fn access_of(worker: &mut Executor, header: CommandHeader, parameters: &[u8]) -> Access {
    let Executor { call, memory, code, checkpoint, .. } = worker;
    let client = ClientView { driver: call.driver(), session: &call.session, memory, code };
    checkpoint.tracker.access(&client, &header, parameters)
}

/// A deferred command whose turn has not come.
pub(crate) fn entry(id: u64, header: CommandHeader, parameters: Vec<u8>, dependencies: Dependencies) -> Entry {
    Entry {
        id,
        header,
        parameters,
        dependencies,
        progress: Progress::Queued,
        settings: Vec::new(),
        shared_record: None,
    }
}
