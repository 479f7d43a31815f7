//! Contexts: what belongs to one, its streams, its error.
//!
//! The first failure of a command is the context's for good: everything after it answers with that error. Of most such
//! failures cuda.h says that they leave the process in an inconsistent state, so that any further CUDA work returns the same
//! error until the process ends: all contexts of all devices have failed then, and there is no new one. A driver of two H200s does as it says
//! (`tests/apps/broken.cu` asks it); a reset succeeds, and leaves no context.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rekindle_cuda_abi::types::{
    CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS,
    CUresult, loses_process,
};

use crate::channel::Channels;
use crate::config::{config, log};
use crate::device::{Device, release_pools};
use crate::execution::malloc::MallocHeap;
use crate::execution::print::{self, Prints};
use crate::handles::{self, Object};
use crate::status::Result;
use crate::stream::{Mark, Role, Stream};
use crate::texture::Bindings;

/// `CU_LIMIT_*` from 0 on, with an H200's values: stack, printf buffer, malloc heap, ...
const LIMITS: [usize; 10] = [1024, 7 << 20, 8 << 20, 2, 2048, 128, 0, 0, 0, 0];

/// The error after which this process can do nothing more.
static LOST: AtomicI32 = AtomicI32::new(CUDA_SUCCESS);

/// An error if there can be no context in this process any more.
pub(crate) fn process_is_well() -> Result<()> {
    match LOST.load(Ordering::SeqCst) {
        CUDA_SUCCESS => Ok(()),
        code => Err(code),
    }
}

/// A context that is alive.
#[derive(Debug)]
pub(crate) struct Context {
    /// Its handle.
    pub(crate) handle: u64,
    /// What `cuCtxGetId` says.
    pub(crate) id: u64,
    /// Its device.
    pub(crate) device: &'static Device,
    /// The flags it was made with.
    pub(crate) flags: AtomicU32,
    /// `cuCtxSetCacheConfig`'s hint, which has no effect.
    pub(crate) cache_config: AtomicU32,
    /// How many `cuCtxAttach` were not followed by a `cuCtxDetach`.
    pub(crate) attached: AtomicU32,
    /// Device memory for `malloc` in kernels.
    pub(crate) malloc: MallocHeap,
    /// Its textures and surfaces.
    pub(crate) bindings: Bindings,
    error: AtomicI32,
    cancel: AtomicBool,
    limits: Mutex<[usize; LIMITS.len()]>,
    prints: Prints,
    complaints: Prints,
    peers: AtomicU64,
    /// The hardware queues that its streams share.
    pub(crate) channels: Channels,
    streams: Mutex<Streams>,
}

/// A context's streams. Submitting holds the lock, so that the order of commands is the same for all of them.
#[derive(Debug)]
pub(crate) struct Streams {
    legacy: Arc<Stream>,
    /// The per-thread default stream of each thread, by a number of ours.
    per_thread: HashMap<u64, Arc<Stream>>,
    others: Vec<Arc<Stream>>,
    /// Streams that have been destroyed with work left.
    leaving: Vec<Arc<Stream>>,
}

impl Context {
    /// A new context on a device, under that handle.
    pub(crate) fn new(handle: u64, device: &'static Device, flags: u32) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new_cyclic(|weak: &Weak<Self>| Self {
            handle,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            flags: AtomicU32::new(flags),
            cache_config: AtomicU32::new(0),
            attached: AtomicU32::new(0),
            malloc: MallocHeap::default(),
            bindings: Bindings::default(),
            error: AtomicI32::new(CUDA_SUCCESS),
            cancel: AtomicBool::new(false),
            limits: Mutex::new(LIMITS),
            prints: Prints::default(),
            complaints: Prints::default(),
            peers: AtomicU64::new(0),
            channels: Channels::new(config().connections),
            streams: Mutex::new(Streams {
                legacy: Stream::new(weak.clone(), CU_STREAM_LEGACY, Role::Legacy, 0),
                per_thread: HashMap::new(),
                others: Vec::new(),
                leaving: Vec::new(),
            }),
        })
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

    /// Its streams, for as long as nothing may be submitted to them.
    pub(crate) fn streams(&self) -> MutexGuard<'_, Streams> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new stream.
    pub(crate) fn create_stream(self: &Arc<Self>, role: Role, priority: i32) -> u64 {
        let stream = Stream::new(Arc::downgrade(self), handles::next(), role, priority);
        let handle = stream.handle;
        self.streams().others.push(stream.clone());
        handles::insert(handle, stream);
        handle
    }

    /// Ends a stream's handle. What it holds is still done.
    pub(crate) fn destroy_stream(&self, stream: &Arc<Stream>) {
        handles::remove(stream.handle);
        stream.end();
        let mut streams = self.streams();
        streams.others.retain(|other| !Arc::ptr_eq(other, stream));
        streams.leaving.retain(|left| !left.last().reached());
        streams.leaving.push(stream.clone());
    }

    /// The stream that a handle means in this context.
    pub(crate) fn stream(self: &Arc<Self>, handle: u64, thread: u64) -> Result<Arc<Stream>> {
        match handle {
            CU_STREAM_LEGACY => Ok(self.streams().legacy.clone()),
            CU_STREAM_PER_THREAD => {
                let new = || Stream::new(Arc::downgrade(self), CU_STREAM_PER_THREAD, Role::Blocking, 0);
                Ok(self.streams().per_thread.entry(thread).or_insert_with(new).clone())
            }
            _ => handles::get(handle),
        }
    }

    /// Waits until every stream has done what it has so far.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let marks = self.streams().last_of_all();
        marks.iter().for_each(Mark::wait);
        release_pools();
        self.flush_prints();
        self.check()
    }

    /// Takes what a kernel prints.
    pub(crate) fn print(&self, text: &[u8]) {
        self.prints.add(text);
    }

    /// Takes what a failed assertion of a kernel's says.
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
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        *limits.get_mut(limit as usize).ok_or(CUDA_ERROR_INVALID_VALUE)? = value;
        Ok(())
    }

    /// Notes that the context may access another device's memory; answers whether that is new.
    pub(crate) fn add_peer(&self, device: usize) -> bool {
        self.peers.fetch_or(1 << device, Ordering::SeqCst) & (1 << device) == 0
    }

    /// Ends what [`Self::add_peer`] noted; answers whether there was anything to end.
    pub(crate) fn remove_peer(&self, device: usize) -> bool {
        self.peers.fetch_and(!(1 << device), Ordering::SeqCst) & (1 << device) != 0
    }
}

impl Object for Context {}

impl Streams {
    fn all(&self) -> impl Iterator<Item = &Arc<Stream>> {
        let default = std::iter::once(&self.legacy).chain(self.per_thread.values());
        default.chain(&self.others).chain(&self.leaving)
    }

    /// Has the threads of all streams end with what is queued.
    pub(crate) fn end(&self) {
        self.all().for_each(|stream| stream.end());
    }

    fn last_of_all(&self) -> Vec<Mark> {
        self.all().map(|stream| stream.last()).filter(|mark| !mark.reached()).collect()
    }

    /// What a new command in a stream has to wait for.
    pub(crate) fn predecessors(&self, stream: &Stream) -> Vec<Mark> {
        let wanted = match stream.role {
            Role::NonBlocking => return Vec::new(),
            Role::Blocking => Role::Legacy,
            Role::Legacy => Role::Blocking,
        };
        let others = self.all().filter(|other| other.role == wanted);
        others.map(|other| other.last()).filter(|mark| !mark.reached()).collect()
    }
}
