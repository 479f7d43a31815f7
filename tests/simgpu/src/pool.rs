//! Pools of stream-ordered allocation. Memory is taken when asked for, and given back when the stream comes to it. What
//! a pool has in reserve is a number only: kept in steps, as the driver does, and given up when the program waits for
//! something.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};

use crate::device::{Device, devices};
use crate::handles;
use crate::memory::space::{self, Kind};
use crate::status::Result;
use crate::stream::Stream;

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
    /// Which pool an allocation came from, by its address.
    origin: BTreeMap<u64, Arc<Pool>>,
    /// Allocations whose free is ahead in a stream.
    leaving: BTreeMap<u64, Leaving>,
    /// How many frees there were.
    frees: u64,
}

/// A free that a stream has not come to.
#[derive(Debug)]
struct Leaving {
    /// Which of all frees it is.
    number: u64,
    stream: u64,
    pool: u64,
    bytes: u64,
}

/// What a pool's reserve grows by.
const STEP: u64 = 32 << 20;
/// What sizes are rounded to.
const ALIGN: u64 = 512;

/// A pool: mostly numbers that can be set and asked for.
#[derive(Debug)]
pub(crate) struct Pool {
    /// Its handle.
    pub(crate) handle: u64,
    /// The attributes 1 to 4: three ways of reuse, and the release threshold.
    settings: [AtomicU64; 4],
    used: AtomicU64,
    used_high: AtomicU64,
    /// A bit for each other device that was let in.
    pub(crate) access: AtomicU64,
    /// The sizes of what is in reserve, used or not.
    segments: Mutex<Vec<u64>>,
    reserved_high: AtomicU64,
}

impl Pool {
    fn new() -> Arc<Self> {
        let settings = [1, 1, 1, 0].map(AtomicU64::new);
        let zero = || AtomicU64::new(0);
        let segments = Mutex::default();
        let handle = handles::next();
        Arc::new(Self {
            handle,
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

    /// Gives up what is not used as long as `keep` bytes remain.
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

    /// An attribute, `CU_MEMPOOL_ATTR_*`.
    pub(crate) fn attribute(&self, attribute: u32) -> Result<u64> {
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
        let default = Pool::new();
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
        self.get(handle)?;
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

    /// Creates a pool.
    pub(crate) fn create(&self) -> u64 {
        let pool = Pool::new();
        let handle = pool.handle;
        self.state().created.insert(handle, pool);
        handle
    }

    /// Destroys a pool; what is allocated from it stays.
    pub(crate) fn destroy(&self, handle: u64) -> Result<()> {
        let mut state = self.state();
        state.created.remove(&handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if state.current == handle {
            state.current = self.default.handle;
        }
        Ok(())
    }

    /// The pool that the allocation at an address came from.
    pub(crate) fn origin(&self, base: u64) -> Option<u64> {
        self.state().origin.get(&base).map(|pool| pool.handle)
    }

    fn note(&self, base: u64, pool: Arc<Pool>, bytes: u64) {
        pool.take(bytes);
        self.state().origin.insert(base, pool);
    }

    /// Notes that an allocation is gone, if it came from a pool.
    pub(crate) fn forget(&self, base: u64, bytes: u64) {
        if let Some(pool) = self.state().origin.remove(&base) {
            pool.give(bytes);
        }
    }

    /// Notes that an allocation's free is on its way in a stream; answers which free it is, if it was not before.
    fn leave(&self, base: u64, bytes: u64, stream: u64) -> Option<u64> {
        let pool = self.origin(base).unwrap_or(0);
        self.forget(base, bytes);
        let mut state = self.state();
        state.frees += 1;
        let number = state.frees;
        let before = state.leaving.insert(base, Leaving { number, stream, pool, bytes });
        before.is_none().then_some(number)
    }

    /// The stream has come to a free; answers whether the memory was not allocated anew meanwhile.
    fn left(&self, base: u64, number: u64) -> bool {
        let mut state = self.state();
        let is_it = state.leaving.get(&base).is_some_and(|leaving| leaving.number == number);
        if is_it {
            state.leaving.remove(&base);
        }
        is_it
    }

    /// Memory of this size that the stream frees: what follows in the stream comes after the free, and may have it.
    fn reuse(&self, pool: u64, bytes: u64, stream: u64) -> Option<u64> {
        let mut state = self.state();
        let fits = |l: &Leaving| l.stream == stream && l.pool == pool && l.bytes == bytes;
        let base = state.leaving.iter().find(|(_, leaving)| fits(leaving)).map(|(base, _)| *base)?;
        state.leaving.remove(&base);
        Some(base)
    }

    /// Ends all pools but the default one. Returns what is allocated.
    fn reset(&self) -> Vec<u64> {
        let mut state = self.state();
        state.created.clear();
        state.current = self.default.handle;
        for (number, setting) in self.default.settings.iter().enumerate() {
            setting.store(u64::from(number < 3), Ordering::Relaxed);
        }
        state.origin.keys().copied().collect()
    }

    fn release(&self) {
        let state = self.state();
        for pool in state.created.values().chain([&self.default]) {
            pool.trim(pool.settings[3].load(Ordering::Relaxed));
        }
    }
}

/// Ends the pools of a device that is reset, and what is allocated from them.
pub(crate) fn reset(device: &Device) {
    for base in device.pools.reset() {
        if let Some(region) = space::remove(base, |r| r.kind == Kind::Device) {
            device.pools.forget(base, region.len);
            device.reclaim(&region);
        }
    }
    device.pools.release();
}

/// The program has waited for something: what pools have in reserve beyond their thresholds is given up.
pub(crate) fn release() {
    devices().iter().for_each(|device| device.pools.release());
}

/// The device and the pool that a handle names.
pub(crate) fn find(handle: u64) -> Result<(&'static Device, Arc<Pool>)> {
    let found = devices().iter().find_map(|device| Some((device, device.pools.get(handle).ok()?)));
    found.ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Allocates in a stream's order: memory that the stream frees before it is there at once, and of other sizes it can be
/// waited for.
pub(crate) fn allocate(stream: &Arc<Stream>, pool: u64, bytes: u64) -> Result<u64> {
    let context = stream.context()?;
    let (device, pool) = find(pool)?;
    if let Some(base) = device.pools.reuse(pool.handle, bytes, stream.id) {
        device.pools.note(base, pool, bytes);
        return Ok(base);
    }
    let take = || device.heap.allocate(device, 0, Kind::Device, bytes);
    let base = match take() {
        Err(CUDA_ERROR_OUT_OF_MEMORY) => {
            stream.synchronize()?;
            match take() {
                // What it lacks is on its way to be freed in another stream.
                Err(CUDA_ERROR_OUT_OF_MEMORY) => context.synchronize().and_then(|()| take())?,
                other => other?,
            }
        }
        other => other?,
    };
    context.check()?;
    device.pools.note(base, pool, bytes);
    Ok(base)
}

/// Frees when the stream comes to it.
pub(crate) fn free(stream: &Arc<Stream>, base: u64) -> Result<()> {
    let region = space::find(base).filter(|r| r.base == base && r.kind == Kind::Device);
    let region = region.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let device = devices().get(region.device).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let number = device.pools.leave(base, region.len, stream.id).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    stream.submit(move |_| {
        if !device.pools.left(base, number) {
            return Ok(());
        }
        let region = space::remove(base, |r| r.kind == Kind::Device).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        device.reclaim(&region);
        Ok(())
    })?;
    Ok(())
}
