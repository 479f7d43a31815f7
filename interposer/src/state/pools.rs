//! Pools that processes share: those of this process that others may get, and those that came from others. The worker keeps
//! the former like all pools. The latter are kept here: nothing is allocated from them, they have no attributes, and their memory
//! is mapped pieces.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_wire::ipc::Token;

use super::ipc::Placed;

/// A pool of another process.
#[derive(Debug)]
pub(crate) struct Imported {
    /// Its name.
    pub(crate) token: Token,
    pub(crate) device: usize,
    /// The devices that may use its memory.
    pub(crate) access: BTreeSet<usize>,
    /// Segments of the pool that are mapped here, by their names. They stay as long as the pool, as the driver keeps them.
    segments: BTreeMap<Token, Placed>,
    /// Allocations by address: the size, and how often each has been imported.
    open: BTreeMap<u64, (u64, u64)>,
}

impl Imported {
    pub(crate) fn new(token: Token, device: usize) -> Self {
        Self { token, device, access: BTreeSet::from([device]), segments: BTreeMap::new(), open: BTreeMap::new() }
    }

    /// The segment of this name, if it is mapped.
    pub(crate) fn segment(&self, name: &Token) -> Option<&Placed> {
        self.segments.get(name)
    }

    /// All mapped segments.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Placed> {
        self.segments.values()
    }

    pub(crate) fn add_segment(&mut self, name: Token, placed: Placed) {
        self.segments.insert(name, placed);
    }

    /// Counts an allocation that has been imported. `false` if it is known with another size.
    pub(crate) fn open(&mut self, base: u64, size: u64) -> bool {
        let (known, times) = self.open.entry(base).or_insert((size, 0));
        if *known != size {
            return false;
        }
        *times += 1;
        true
    }

    /// Counts a free. Returns whether the process no longer has the allocation.
    fn close(&mut self, base: u64) -> bool {
        match self.open.get_mut(&base) {
            Some((_, times)) if *times > 1 => {
                *times -= 1;
                false
            }
            _ => {
                self.open.remove(&base);
                true
            }
        }
    }
}

/// A pool that other processes may have.
#[derive(Debug)]
struct ForOthers {
    handle_types: u32,
    is_exported: bool,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// The pools of this process that were created for others.
    for_others: BTreeMap<u64, ForOthers>,
    imported: BTreeMap<u64, Imported>,
    /// Reservations whose mappings are about to end.
    pub(crate) leaving: Vec<Placed>,
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Pools {
    state: Mutex<State>,
    any_imported: AtomicBool,
}

impl Pools {
    /// The lock stays taken while memory is imported, so that a segment is mapped once.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same, if any pool has come from another process.
    pub(crate) fn lock_imported(&self) -> Option<MutexGuard<'_, State>> {
        self.any_imported.load(Relaxed).then(|| self.lock())
    }

    pub(crate) fn add_imported(&self, handle: u64, pool: Imported) {
        self.any_imported.store(true, Relaxed);
        self.lock().imported.insert(handle, pool);
    }
}

impl State {
    /// Notes the types of handles that a pool was created for.
    pub(crate) fn created(&mut self, pool: u64, handle_types: u32) {
        self.for_others.insert(pool, ForOthers { handle_types, is_exported: false });
    }

    /// Forgets a pool of this process.
    pub(crate) fn destroyed(&mut self, pool: u64) {
        self.for_others.remove(&pool);
    }

    /// The types of handles that a pool may be exported as.
    pub(crate) fn handle_types(&self, pool: u64) -> u32 {
        self.for_others.get(&pool).map_or(0, |it| it.handle_types)
    }

    /// Notes that a pool has a handle.
    pub(crate) fn exported(&mut self, pool: u64) {
        if let Some(pool) = self.for_others.get_mut(&pool) {
            pool.is_exported = true;
        }
    }

    /// Whether a pool was ever given a handle.
    pub(crate) fn is_exported(&self, pool: u64) -> bool {
        self.for_others.get(&pool).is_some_and(|it| it.is_exported)
    }

    /// The pool of another process that the application's handle names.
    pub(crate) fn imported(&mut self, pool: u64) -> Option<&mut Imported> {
        self.imported.get_mut(&pool)
    }

    /// Destroys a pool of another process, unless its memory is in use. Returns the segments that may be unmapped. `None` if there
    /// is no such pool.
    pub(crate) fn destroy_imported(&mut self, pool: u64) -> Option<Result<Vec<Placed>, CUresult>> {
        if !self.imported(pool)?.open.is_empty() {
            return Some(Err(CUDA_ERROR_INVALID_VALUE));
        }
        self.imported.remove(&pool).map(|pool| Ok(pool.segments.into_values().collect()))
    }

    /// Frees an allocation of a pool of another process. Returns whether the process no longer has the allocation. `None` if there
    /// is no such pool.
    pub(crate) fn free_imported(&mut self, pool: u64, base: u64) -> Option<bool> {
        Some(self.imported(pool)?.close(base))
    }

    /// Removes the pools of other processes on a device. Returns their segments.
    pub(crate) fn forget_device(&mut self, device: usize) -> Vec<Placed> {
        let (gone, kept) = std::mem::take(&mut self.imported).into_iter().partition(|(_, pool)| pool.device == device);
        self.imported = kept;
        let gone: BTreeMap<u64, Imported> = gone;
        gone.into_values().flat_map(|pool| pool.segments.into_values()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_imported_pool_is_destroyed_with_its_segments_once_all_its_memory_is_freed() {
        let pools = Pools::default();
        assert!(pools.lock_imported().is_none());
        pools.add_imported(7, Imported::new([1; 16], 0));
        let mut state = pools.lock();
        let pool = state.imported(7).unwrap();
        pool.add_segment([2; 16], Placed { reserved: 1 << 40, bytes: 32 << 20, pieces: vec![3] });
        assert!(pool.open(1 << 40, 512) && pool.open(1 << 40, 512) && !pool.open(1 << 40, 1024));
        assert!(state.destroy_imported(8).is_none());
        assert_eq!(state.free_imported(7, 1 << 40), Some(false));
        assert!(matches!(state.destroy_imported(7), Some(Err(CUDA_ERROR_INVALID_VALUE))));
        assert_eq!(state.free_imported(7, 1 << 40), Some(true));
        assert!(matches!(state.destroy_imported(7), Some(Ok(gone)) if gone.len() == 1));
        assert!(state.imported(7).is_none() && state.free_imported(7, 1 << 40).is_none());
    }
}
