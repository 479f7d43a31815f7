//! Contexts: their parts, the order of their commands, their error.
//!
//! The first failure of a command is the context's for good: every later call fails with that error. cuda.h says of most of
//! these errors that they leave the process in an inconsistent state, in which any further CUDA work returns the same error
//! until the process ends. After one of these, all contexts of all devices have failed, and no new one can be made. A driver
//! with two H200s does so (`tests/apps/broken.cu` tests it). A reset succeeds, and leaves no context.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::coredump;
use rekindle_cuda_abi::types::{
    CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS, CUresult, loses_process,
};

use crate::channel::Channels;
use crate::config::{config, log};
use crate::device::{Device, release_pools};
use crate::execution::malloc::MallocHeap;
use crate::execution::print::{self, Prints};
use crate::handles::Object;
use crate::order::{Mark, Order};
use crate::status::Result;
use crate::texture::Bindings;

/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
pub(crate) const MALLOC_HEAP_SIZE: u32 = 2;
/// `CU_LIMIT_*` from 0 on, with an H200's values: stack, printf buffer, malloc heap, ...
const LIMITS: [usize; 10] = [1024, 7 << 20, 8 << 20, 2, 2048, 128, 0, 0, 0, 0];

/// The addresses that an H100's driver takes for the buffer of kernels that print.
const PRINT_BUFFER: u64 = 10 << 20;

/// The error after which no CUDA call of this process succeeds.
static LOST: AtomicI32 = AtomicI32::new(CUDA_SUCCESS);

/// An error if this process can have no context any more.
pub(crate) fn process_is_well() -> Result<()> {
    match LOST.load(Ordering::SeqCst) {
        CUDA_SUCCESS => Ok(()),
        code => Err(code),
    }
}

/// The settings for core dumps that new contexts begin with.
pub(crate) fn coredumps() -> MutexGuard<'static, coredump::Settings> {
    static GLOBAL: LazyLock<Mutex<coredump::Settings>> = LazyLock::new(|| Mutex::new(coredump::Settings::of_process()));
    GLOBAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context that is alive.
#[derive(Debug)]
pub(crate) struct Context {
    /// Its handle.
    pub(crate) handle: u64,
    /// The result of `cuCtxGetId`.
    pub(crate) id: u64,
    /// Its device.
    pub(crate) device: &'static Device,
    /// The flags it was made with.
    pub(crate) flags: AtomicU32,
    /// The version of the interface that it was made for.
    pub(crate) api_version: AtomicU32,
    /// `cuCtxSetCacheConfig`'s hint, which has no effect.
    pub(crate) cache_config: AtomicU32,
    /// The number of `cuCtxAttach` calls without a `cuCtxDetach` yet.
    pub(crate) attached: AtomicU32,
    /// Device memory for `malloc` in kernels.
    pub(crate) malloc: MallocHeap,
    /// Its textures and surfaces.
    pub(crate) bindings: Bindings,
    /// Its settings for core dumps, of which none is ever written.
    pub(crate) coredumps: Mutex<coredump::Settings>,
    error: AtomicI32,
    cancel: AtomicBool,
    limits: Mutex<[usize; LIMITS.len()]>,
    prints: Prints,
    complaints: Prints,
    /// Where the buffer for printed text lies. As in the driver, the first launch of a kernel that may print makes it.
    print_buffer: Mutex<Option<u64>>,
    peers: AtomicU64,
    /// The hardware queues that its streams share.
    pub(crate) channels: Channels,
    order: Mutex<Order>,
}

/// The version that `cuda.h` has had since 3.2.
const API_VERSION: u32 = 3020;
/// The version before, of contexts that `cuCtxCreate` in its first form makes.
pub(crate) const FIRST_API_VERSION: u32 = 3010;

impl Context {
    /// A new context on a device, under that handle.
    pub(crate) fn new(handle: u64, device: &'static Device, flags: u32) -> Self {
        Self {
            handle,
            id: Self::next_id(),
            device,
            flags: AtomicU32::new(flags),
            api_version: AtomicU32::new(API_VERSION),
            cache_config: AtomicU32::new(0),
            attached: AtomicU32::new(0),
            malloc: MallocHeap::default(),
            bindings: Bindings::default(),
            coredumps: Mutex::new(coredumps().of_context(flags)),
            error: AtomicI32::new(CUDA_SUCCESS),
            cancel: AtomicBool::new(false),
            limits: Mutex::new(LIMITS),
            prints: Prints::default(),
            complaints: Prints::default(),
            print_buffer: Mutex::default(),
            peers: AtomicU64::new(0),
            channels: Channels::new(config().connections),
            order: Mutex::default(),
        }
    }

    /// An id that no context has, and no green one.
    pub(crate) fn next_id() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// The error that the context, or the process, has failed with.
    pub(crate) fn check(&self) -> Result<()> {
        match (self.error.load(Ordering::SeqCst), LOST.load(Ordering::SeqCst)) {
            (CUDA_SUCCESS, CUDA_SUCCESS) => Ok(()),
            (CUDA_SUCCESS, code) | (code, _) => Err(code),
        }
    }

    /// Makes the context fail, unless it has already, and ends its kernels.
    pub(crate) fn fail(&self, code: CUresult) {
        let first = self.error.compare_exchange(CUDA_SUCCESS, code, Ordering::SeqCst, Ordering::SeqCst);
        if first.is_ok() && code != CUDA_ERROR_CONTEXT_IS_DESTROYED {
            log!("a context of device {} fails with error {code}", self.device.ordinal);
        }
        if loses_process(code) {
            let _ = LOST.compare_exchange(CUDA_SUCCESS, code, Ordering::SeqCst, Ordering::SeqCst);
        }
        self.cancel();
    }

    /// Ends the context's kernels soon.
    pub(crate) fn cancel(&self) {
        self.cancel.store(true, Ordering::SeqCst);
    }

    /// Set when the context's kernels shall end.
    pub(crate) fn cancelled(&self) -> &AtomicBool {
        &self.cancel
    }

    /// The order of its streams' commands, for as long as nothing may be submitted to them.
    pub(crate) fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until every stream has done its present commands.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.synchronize_streams(None)
    }

    /// The same for the streams of a green context, by its id.
    pub(crate) fn synchronize_group(&self, green: u64) -> Result<()> {
        self.synchronize_streams(Some(green))
    }

    fn synchronize_streams(&self, group: Option<u64>) -> Result<()> {
        let marks = self.order().unreached(group);
        marks.iter().for_each(Mark::wait);
        release_pools();
        self.flush_prints();
        self.check()
    }

    /// Makes the buffer for printed text, if there is none. It takes addresses where new blocks for code would lie, so code that
    /// is loaded later lies elsewhere than if no kernel had been launched.
    pub(crate) fn make_print_buffer(&self) {
        let mut buffer = self.print_buffer.lock().unwrap_or_else(PoisonError::into_inner);
        buffer.get_or_insert_with(|| self.device.occupy_beside_code(PRINT_BUFFER));
    }

    /// Removes the buffer for printed text, with the context.
    pub(crate) fn remove_print_buffer(&self) {
        let buffer = self.print_buffer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(at) = buffer {
            self.device.vacate_beside_code(at);
        }
    }

    /// Keeps a kernel's printed text.
    pub(crate) fn print(&self, text: &[u8]) {
        self.prints.add(text);
    }

    /// Keeps the message of a kernel's failed assertion.
    pub(crate) fn complain(&self, text: &[u8]) {
        self.complaints.add(text);
    }

    /// Writes what kernels have printed to the program's stdout, and what assertions have said to its stderr.
    pub(crate) fn flush_prints(&self) {
        // SAFETY: C's own streams.
        let (stdout, stderr) = unsafe { (print::stdout, print::stderr) };
        self.prints.flush(stdout);
        self.complaints.flush(stderr);
    }

    /// A limit's value.
    pub(crate) fn limit(&self, limit: u32) -> Result<usize> {
        let limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        limits.get(limit as usize).copied().ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Changes a limit's value.
    pub(crate) fn set_limit(&self, limit: u32, value: usize) -> Result<()> {
        // As on a driver (tests/facts/heap.cu).
        if limit == MALLOC_HEAP_SIZE && self.malloc.is_made() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        *limits.get_mut(limit as usize).ok_or(CUDA_ERROR_INVALID_VALUE)? = value;
        Ok(())
    }

    /// Notes that the context may access another device's memory; returns whether that is new.
    pub(crate) fn add_peer(&self, device: usize) -> bool {
        self.peers.fetch_or(1 << device, Ordering::SeqCst) & (1 << device) == 0
    }

    /// Undoes [`Self::add_peer`]; returns whether there was anything to undo.
    pub(crate) fn remove_peer(&self, device: usize) -> bool {
        self.peers.fetch_and(!(1 << device), Ordering::SeqCst) & (1 << device) != 0
    }
}

impl Object for Context {}
