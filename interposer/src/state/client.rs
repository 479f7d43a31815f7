//! The attached process: one [`Client`], which has everything that the process keeps.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64};

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::Kind;

use super::arrays::Arrays;
use super::contexts::Contexts;
use super::coredumps::Coredumps;
use super::devices::Devices;
use super::events::Events;
use super::functions::Functions;
use super::green::Resources;
use super::ipc::Opened;
use super::managed::ManagedMemory;
use super::memory::Memory;
use super::pools::Pools;
use super::streams::Streams;
use super::variables::Variables;
use super::vmm::Vmm;
use crate::connection::Connection;
use crate::connection::bounce_buffer::BounceBuffer;

/// An attached process.
pub(crate) struct Client {
    pub(crate) connection: Connection,
    pub(crate) bounce_buffer: BounceBuffer,
    pub(crate) devices: Devices,
    pub(crate) contexts: Contexts,
    pub(crate) coredumps: Coredumps,
    pub(crate) memory: Memory,
    pub(crate) managed: ManagedMemory,
    pub(crate) variables: Variables,
    pub(crate) vmm: Vmm,
    pub(crate) opened: Opened,
    pub(crate) pools: Pools,
    pub(crate) functions: Functions,
    pub(crate) streams: Streams,
    pub(crate) resources: Resources,
    pub(crate) arrays: Arrays,
    pub(crate) events: Events,
    next_handle: AtomicU64,
}

static CLIENT: AtomicPtr<Client> = AtomicPtr::new(std::ptr::null_mut());
static INITIALISED: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);

/// The client, or the error of a call before `cuInit` or in a forked child.
pub(crate) fn get() -> Result<&'static Client, CUresult> {
    if !INITIALISED.load(Acquire) || is_forked() {
        return Err(CUDA_ERROR_NOT_INITIALIZED);
    }
    attached().ok_or(CUDA_ERROR_NOT_INITIALIZED)
}

/// The client if the process is attached, whether `cuInit` was called or not.
pub(crate) fn attached() -> Option<&'static Client> {
    // SAFETY: the pointer is null or a leaked Client.
    unsafe { CLIENT.load(Acquire).as_ref() }
}

/// Keeps the process's client, for ever.
pub(crate) fn install(client: Client) -> &'static Client {
    let client = Box::leak(Box::new(client));
    CLIENT.store(client, Release);
    client
}

/// `cuInit` has succeeded.
pub(crate) fn set_initialised() {
    INITIALISED.store(true, Release);
}

/// This process is a child that was forked from an attached one. Only an atomic store, as such a child may do.
pub(crate) fn set_forked() {
    FORKED.store(true, Release);
}

/// Whether this process was forked from an attached one.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Acquire)
}

impl Client {
    pub(crate) fn new(connection: Connection, bounce_buffer: BounceBuffer, devices: Devices) -> Self {
        Self {
            connection,
            bounce_buffer,
            contexts: Contexts::new(devices.count()),
            coredumps: Coredumps::of_process(),
            devices,
            memory: Memory::new(),
            managed: ManagedMemory::default(),
            variables: Variables::default(),
            vmm: Vmm::default(),
            opened: Opened::default(),
            pools: Pools::default(),
            functions: Functions::default(),
            streams: Streams::default(),
            resources: Resources::default(),
            arrays: Arrays::default(),
            events: Events::default(),
            next_handle: AtomicU64::new(1),
        }
    }

    /// A handle for a new object.
    pub(crate) fn fresh(&self, kind: Kind) -> u64 {
        kind.handle(self.next_handle.fetch_add(1, Relaxed))
    }
}
