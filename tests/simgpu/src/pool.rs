//! The bookkeeping of pools of stream-ordered allocation: the amount allocated from a pool, and its reserve. A reserve grows in
//! steps, as the driver's does, and is released when the program waits for a command.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::CUDA_ERROR_INVALID_VALUE;

use crate::handles;
use crate::status::{Result, ensure};

/// A device's pools.
#[derive(Debug)]
pub(crate) struct Pools {
    default: Arc<Pool>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    created: BTreeMap<u64, Arc<Pool>>,
    current: u64,
    /// The pool that each allocation came from, by its address.
    origin: BTreeMap<u64, Arc<Pool>>,
    /// Allocations whose free is still ahead in a stream.
    leaving: BTreeMap<u64, Leaving>,
    /// The number of frees so far.
    frees: u64,
}

/// A free that a stream has not come to.
#[derive(Debug)]
struct Leaving {
    /// The free's number among all frees.
    number: u64,
    stream: u64,
    pool: u64,
    bytes: u64,
}

/// The step in which a pool's reserve grows.
const STEP: u64 = 32 << 20;
/// The multiple to which sizes are rounded up.
const ALIGN: u64 = 512;

/// The pool of another process that an imported pool is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) process: u64,
    pub(crate) pool: u64,
}

/// A pool: mostly settings and counters.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Its handle.
    pub(crate) handle: u64,
    /// The types of handles for other processes that it was created for.
    pub(crate) handle_types: u32,
    /// Whether a handle was ever made, without which no allocation has one.
    pub(crate) is_exported: AtomicBool,
    /// Where it came from, if it is another process's. Nothing is allocated from it then.
    pub(crate) source: Option<Source>,
    /// The attributes 1 to 4: three ways of reuse, and the release threshold.
    settings: [AtomicU64; 4],
    used: AtomicU64,
    used_high: AtomicU64,
    /// A bit for each other device that was let in.
    pub(crate) access: AtomicU64,
    /// The sizes of the reserve's segments, used or not.
    segments: Mutex<Vec<u64>>,
    reserved_high: AtomicU64,
}

impl Pool {
    fn new(handle_types: u32, source: Option<Source>) -> Arc<Self> {
        let settings = [1, 1, 1, 0].map(AtomicU64::new);
        let zero = || AtomicU64::new(0);
        let segments = Mutex::default();
        let handle = handles::next();
        Arc::new(Self {
            handle,
            handle_types,
            is_exported: AtomicBool::new(false),
            source,
            settings,
            used: zero(),
            used_high: zero(),
            access: zero(),
            segments,
            reserved_high: zero(),
        })
    }

    fn segments(&self) -> MutexGuard<'_, Vec<u64>> {
        self.segments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, bytes: u64) {
        let size = bytes.next_multiple_of(ALIGN);
        let used = self.used.fetch_add(size, Ordering::Relaxed) + size;
        self.used_high.fetch_max(used, Ordering::Relaxed);
        let mut segments = self.segments();
        if used > segments.iter().sum() {
            segments.push(size.next_multiple_of(STEP));
        }
        self.reserved_high.fetch_max(segments.iter().sum(), Ordering::Relaxed);
    }

    fn give(&self, bytes: u64) {
        self.used.fetch_sub(bytes.next_multiple_of(ALIGN), Ordering::Relaxed);
    }

    /// Releases unused segments, as long as `keep` bytes remain.
    pub(crate) fn trim(&self, keep: u64) {
        let mut segments = self.segments();
        if self.used.load(Ordering::Relaxed) > 0 {
            return;
        }
        for i in (0..segments.len()).rev() {
            if segments.iter().sum::<u64>() - segments[i] >= keep {
                segments.remove(i);
            }
        }
    }

    /// Only the process that made a pool may ask for its attributes, set or trim it.
    pub(crate) fn ensure_own(&self) -> Result<()> {
        ensure(self.source.is_none(), CUDA_ERROR_INVALID_VALUE)
    }

    /// An attribute, `CU_MEMPOOL_ATTR_*`.
    pub(crate) fn attribute(&self, attribute: u32) -> Result<u64> {
        self.ensure_own()?;
        Ok(match attribute {
            1..=4 => self.settings[attribute as usize - 1].load(Ordering::Relaxed),
            5 => self.segments().iter().sum(),
            6 => self.reserved_high.load(Ordering::Relaxed),
            7 => self.used.load(Ordering::Relaxed),
            8 => self.used_high.load(Ordering::Relaxed),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }

    /// Sets an attribute; the high-water marks can only be set to 0.
    pub(crate) fn set_attribute(&self, attribute: u32, value: u64) -> Result<()> {
        self.ensure_own()?;
        match attribute {
            1..=4 => self.settings[attribute as usize - 1].store(value, Ordering::Relaxed),
            6 if value == 0 => self.reserved_high.store(self.segments().iter().sum(), Ordering::Relaxed),
            8 if value == 0 => self.used_high.store(self.used.load(Ordering::Relaxed), Ordering::Relaxed),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }
}

impl Pools {
    /// A device's default pool.
    pub(crate) fn new() -> Self {
        let default = Pool::new(0, None);
        let current = default.handle;
        Self { default, state: Mutex::new(State { current, ..State::default() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The default pool.
    pub(crate) fn default(&self) -> u64 {
        self.default.handle
    }

    /// The pool that allocations are taken from.
    pub(crate) fn current(&self) -> u64 {
        self.state().current
    }

    /// Sets the pool that allocations are taken from.
    pub(crate) fn set_current(&self, handle: u64) -> Result<()> {
        ensure(self.get(handle)?.source.is_none(), CUDA_ERROR_INVALID_VALUE)?;
        self.state().current = handle;
        Ok(())
    }

    /// The pool that a handle names.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<Pool>> {
        if handle == self.default.handle {
            return Ok(self.default.clone());
        }
        self.state().created.get(&handle).cloned().ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Creates a pool, or imports one.
    pub(crate) fn create(&self, handle_types: u32, source: Option<Source>) -> u64 {
        let pool = Pool::new(handle_types, source);
        let handle = pool.handle;
        self.state().created.insert(handle, pool);
        handle
    }

    /// Destroys a pool; its allocations stay. An imported one is not destroyed while its memory is in use.
    pub(crate) fn destroy(&self, handle: u64) -> Result<()> {
        let mut state = self.state();
        let in_use = state.origin.values().any(|pool| pool.handle == handle && pool.source.is_some());
        ensure(!in_use, CUDA_ERROR_INVALID_VALUE)?;
        state.created.remove(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if state.current == handle {
            state.current = self.default.handle;
        }
        Ok(())
    }

    /// The pool that the allocation at an address came from.
    pub(crate) fn origin(&self, base: u64) -> Option<u64> {
        self.pool_of(base).map(|pool| pool.handle)
    }

    /// The same pool itself.
    pub(crate) fn pool_of(&self, base: u64) -> Option<Arc<Pool>> {
        self.state().origin.get(&base).cloned()
    }

    /// The addresses of a pool's allocations.
    pub(crate) fn allocations(&self, pool: u64) -> Vec<u64> {
        let state = self.state();
        state.origin.iter().filter(|(_, its)| its.handle == pool).map(|(base, _)| *base).collect()
    }

    /// Notes an allocation from a pool.
    pub(crate) fn note(&self, base: u64, pool: Arc<Pool>, bytes: u64) {
        pool.take(bytes);
        self.state().origin.insert(base, pool);
    }

    /// Notes that an allocation is gone, if it came from a pool.
    pub(crate) fn forget(&self, base: u64, bytes: u64) {
        if let Some(pool) = self.state().origin.remove(&base) {
            pool.give(bytes);
        }
    }

    /// Notes that an allocation's free is ahead in a stream; returns the free's number, unless a free was ahead already.
    pub(crate) fn leave(&self, base: u64, bytes: u64, stream: u64) -> Option<u64> {
        let pool = self.origin(base).unwrap_or(0);
        self.forget(base, bytes);
        let mut state = self.state();
        state.frees += 1;
        let number = state.frees;
        let before = state.leaving.insert(base, Leaving { number, stream, pool, bytes });
        before.is_none().then_some(number)
    }

    /// Notes that the stream has come to a free; returns whether the memory has not been allocated anew meanwhile.
    pub(crate) fn left(&self, base: u64, number: u64) -> bool {
        let mut state = self.state();
        let is_it = state.leaving.get(&base).is_some_and(|leaving| leaving.number == number);
        if is_it {
            state.leaving.remove(&base);
        }
        is_it
    }

    /// Memory of this size whose free is ahead in the stream: later commands of the stream come after the free, and may use it.
    pub(crate) fn reuse(&self, pool: u64, bytes: u64, stream: u64) -> Option<u64> {
        let mut state = self.state();
        let fits = |l: &Leaving| l.stream == stream && l.pool == pool && l.bytes == bytes;
        let base = state.leaving.iter().find(|(_, leaving)| fits(leaving)).map(|(base, _)| *base)?;
        state.leaving.remove(&base);
        Some(base)
    }

    /// Ends all pools but the default one. Returns the remaining allocations.
    pub(crate) fn reset(&self) -> Vec<u64> {
        let mut state = self.state();
        state.created.clear();
        state.current = self.default.handle;
        for (number, setting) in self.default.settings.iter().enumerate() {
            setting.store(u64::from(number < 3), Ordering::Relaxed);
        }
        state.origin.keys().copied().collect()
    }

    /// Releases the pools' reserves beyond their thresholds.
    pub(crate) fn release(&self) {
        let state = self.state();
        for pool in state.created.values().chain([&self.default]) {
            pool.trim(pool.settings[3].load(Ordering::Relaxed));
        }
    }
}
