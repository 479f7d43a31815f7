//! An executor for tests of what it does by itself: its driver succeeds at everything and does nothing.

use std::ffi::c_void;
use std::sync::OnceLock;

use rekindle_cuda_abi::types::{CUDA_SUCCESS, CUresult};
use rekindle_images::content::ContentKey;
use rekindle_wire::attach::Attached;
use rekindle_wire::codec::Writer;
use rekindle_wire::command::{self, Kind};
use rekindle_wire::ring::CommandHeader;

use super::access::hash::Hasher;
use super::driver::{Driver, LoadError};
use super::engine::Engine;
use super::executor::Executor;
use super::held::{Entry, Progress};
use super::objects::Object;
use super::uses::Uses;

extern "C" fn succeed() -> CUresult {
    CUDA_SUCCESS
}

fn driver() -> &'static Driver {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let find = |_: &'static str| Ok::<_, LoadError>(succeed as *const c_void);
        // SAFETY: a function of the C ABI leaves its arguments to its caller, so one that looks at none of them can stand
        // for all. Out parameters stay as the caller has set them.
        unsafe { Driver::load(find) }.unwrap()
    })
}

/// An executor that has no device.
pub(super) fn executor() -> Executor {
    let attached = Attached { driver_version: 13_000, api_version: 3020, devices: Vec::new() };
    let key = ContentKey::from_bytes([0; 16]);
    Executor::new(driver(), Vec::new(), Engine::new(), Hasher::new(&key, 0, 1 << 20), attached)
}

/// Gives the client a context.
pub(super) fn context(worker: &mut Executor) -> u64 {
    let handle = Kind::Context.handle(1);
    let object = Object { kind: Kind::Context, real: 0x1000, context: handle, parent: 0, allocates: false };
    assert!(worker.objects.insert(handle, object));
    handle
}

/// Gives the client an event.
pub(super) fn event(worker: &mut Executor, context: u64, handle: u64) {
    let object = Object { kind: Kind::Event, real: 0x2000, context, parent: 0, allocates: false };
    assert!(worker.objects.insert(handle, object));
    let create = command::number(&worker.table, "cuEventCreate").unwrap();
    let mut args = Writer::new();
    args.word(handle);
    args.word(0);
    worker.objects.record(create, handle, context, args.bytes(), None);
}

/// A held command whose turn has not come.
pub(super) fn entry(id: u64, header: CommandHeader, parameters: Vec<u8>, uses: Uses) -> Entry {
    Entry { id, header, parameters, uses, progress: Progress::Queued }
}
