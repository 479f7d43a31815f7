//! The address space of the devices: every range that exists, the rights of devices in it, and snapshots of both.
//!
//! Kernels and copies use a [`View`], which takes no lock that allocation holds for long. A view is a reader in the sense of
//! RCU: it works on an immutable snapshot, and reports from time to time that it no longer uses older ones ([`View::refresh`]).
//! A thread that unmaps memory takes its region out first, and then waits until no view can still use it. A kernel that goes on
//! using such memory finds it unmapped, as on a GPU, instead of crashing the process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rekindle_ptx::{Fault, FaultKind, Memory, Span};

/// The kind of a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Memory of a device from `cuMemAlloc` and the like.
    Device,
    /// Memory of a device, mapped with `cuMemMap`.
    Mapped,
    /// Memory of a device that another process has allocated.
    Opened,
    /// Host memory from `cuMemHostAlloc`, with its flags.
    Pinned(u32),
    /// Managed memory, which is the host's here.
    Managed,
    /// A managed variable of a module or library: the same, but it lives as long as its code.
    ManagedVariable,
    /// Host memory that was registered, with its flags.
    Registered(u32),
    /// A module's code, or one of its variables.
    Code,
    /// Other memory of a device that the program did not allocate.
    Internal,
}

impl Kind {
    /// Whether the memory is the host's.
    pub(crate) fn is_host(self) -> bool {
        self.is_managed() || matches!(self, Kind::Pinned(_) | Kind::Registered(_))
    }

    /// Whether the memory is managed.
    pub(crate) fn is_managed(self) -> bool {
        matches!(self, Kind::Managed | Kind::ManagedVariable)
    }
}

/// A range of addresses with memory behind it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Region {
    /// Its first address.
    pub(crate) base: u64,
    /// Its length in bytes.
    pub(crate) len: u64,
    /// The kind of its memory.
    pub(crate) kind: Kind,
    /// The ordinal of the device it belongs to (for host memory, of the context that asked for it).
    pub(crate) device: usize,
    /// The context it belongs to; 0 for none.
    pub(crate) context: u64,
    /// A bit for each device that may read it.
    pub(crate) readers: u64,
    /// A bit for each device that may write it.
    pub(crate) writers: u64,
    /// A number that no other allocation of the process has.
    pub(crate) id: u64,
}

impl Region {
    /// The address behind its last byte.
    pub(crate) fn end(&self) -> u64 {
        self.base + self.len
    }
}

struct Space {
    regions: BTreeMap<u64, Region>,
    snapshot: Option<Snapshot>,
    /// The generation that each open view has last reported.
    views: Vec<Arc<AtomicU64>>,
}

type Snapshot = Arc<Vec<Region>>;

static SPACE: Mutex<Space> = Mutex::new(Space { regions: BTreeMap::new(), snapshot: None, views: Vec::new() });

/// Counts the changes. Views read it without the lock, so that a view that is up to date takes none.
static GENERATION: AtomicU64 = AtomicU64::new(1);

fn space() -> MutexGuard<'static, Space> {
    // Regions are inserted and removed whole, so a panic elsewhere leaves them valid.
    SPACE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Space {
    fn changed(&mut self) -> u64 {
        self.snapshot = None;
        GENERATION.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn snapshot(&mut self) -> Snapshot {
        let regions = &self.regions;
        self.snapshot.get_or_insert_with(|| Arc::new(regions.values().copied().collect())).clone()
    }

    fn overlapping(&self, base: u64, len: u64) -> Option<Region> {
        let before = self.regions.range(..base + len).next_back()?.1;
        (before.end() > base).then_some(*before)
    }
}

/// A new number for an allocation.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Adds a region, unless it overlaps one that exists.
pub(crate) fn insert(region: Region) -> Result<(), Region> {
    let mut space = space();
    if let Some(other) = space.overlapping(region.base, region.len) {
        return Err(other);
    }
    space.regions.insert(region.base, region);
    space.changed();
    Ok(())
}

/// Takes out the region that begins at `base`, if `wanted` accepts it, and waits until nothing accesses it any more.
pub(crate) fn remove(base: u64, wanted: impl FnOnce(&Region) -> bool) -> Option<Region> {
    let mut space = space();
    let region = *space.regions.get(&base).filter(|r| wanted(r))?;
    space.regions.remove(&base);
    let generation = space.changed();
    drop(space);
    wait_for_views(generation);
    Some(region)
}

/// Takes out all regions that `wanted` accepts, and waits until nothing accesses them any more.
pub(crate) fn remove_all(wanted: impl Fn(&Region) -> bool) -> Vec<Region> {
    let mut space = space();
    let gone: Vec<Region> = space.regions.values().filter(|r| wanted(r)).copied().collect();
    for region in &gone {
        space.regions.remove(&region.base);
    }
    let generation = space.changed();
    drop(space);
    if !gone.is_empty() {
        wait_for_views(generation);
    }
    gone
}

/// Changes the regions from `base` to `base + len`, which must be covered by regions of that kind without gaps. Returns whether
/// they were.
pub(crate) fn change(base: u64, len: u64, kind: Kind, mut with: impl FnMut(&mut Region)) -> bool {
    let mut space = space();
    if !covered(base, len, |at| space.regions.range(..=at).next_back().map(|r| *r.1), |r| r.kind == kind) {
        return false;
    }
    for (_, region) in space.regions.range_mut(base..base + len) {
        with(region);
    }
    let generation = space.changed();
    drop(space);
    // The change may have taken rights away.
    wait_for_views(generation);
    true
}

/// Changes rights in any region.
pub(crate) fn change_all(with: impl FnMut(&mut Region)) {
    let mut space = space();
    space.regions.values_mut().for_each(with);
    let generation = space.changed();
    drop(space);
    wait_for_views(generation);
}

/// Whether there is a region that `wanted` accepts.
pub(crate) fn any(wanted: impl Fn(&Region) -> bool) -> bool {
    space().regions.values().any(wanted)
}

/// The region that holds an address.
pub(crate) fn find(address: u64) -> Option<Region> {
    let space = space();
    let region = *space.regions.range(..=address).next_back()?.1;
    (address < region.end()).then_some(region)
}

/// Whether every byte lies in a region that `good` accepts.
pub(crate) fn is_covered(base: u64, len: u64, good: impl Fn(&Region) -> bool) -> bool {
    let space = space();
    covered(base, len, |at| space.regions.range(..=at).next_back().map(|r| *r.1), good)
}

fn covered(base: u64, len: u64, at: impl Fn(u64) -> Option<Region>, good: impl Fn(&Region) -> bool) -> bool {
    let Some(end) = base.checked_add(len) else { return false };
    let mut next = base;
    while next < end {
        match at(next) {
            // A driver takes no range that reaches from one variable of a module into the next (measured on an H200).
            Some(region) if region.kind == Kind::Code && region.end() < end => return false,
            Some(region) if region.end() > next && good(&region) => next = region.end(),
            _ => return false,
        }
    }
    true
}

/// Waits until every view has seen that generation, or is closed.
fn wait_for_views(generation: u64) {
    loop {
        let behind = space().views.iter().any(|seen| seen.load(Ordering::SeqCst) < generation);
        if !behind {
            return;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// The memory that one kernel or copy on a device sees.
#[derive(Debug)]
pub(crate) struct View {
    device: usize,
    seen: Arc<AtomicU64>,
    current: Mutex<(u64, Snapshot)>,
}

impl View {
    /// Opens a view for work on a device.
    pub(crate) fn open(device: usize) -> Self {
        let mut space = space();
        let generation = GENERATION.load(Ordering::SeqCst);
        let seen = Arc::new(AtomicU64::new(generation));
        space.views.push(seen.clone());
        let snapshot = space.snapshot();
        Self { device, seen, current: Mutex::new((generation, snapshot)) }
    }

    /// Reports that no earlier result is used any more. Returns a number that changes when earlier results are no longer valid.
    pub(crate) fn refresh(&self) -> u64 {
        let generation = self.update().0;
        self.seen.store(generation, Ordering::SeqCst);
        generation
    }

    /// Runs `wait`, in which nothing is used of what the view has shown: no thread that unmaps memory waits for its end.
    pub(crate) fn rest(&self, wait: impl FnOnce()) {
        self.seen.store(u64::MAX, Ordering::SeqCst);
        wait();
        // Under the lock: this view sees every change before, and whoever changes the space later waits for it again.
        let space = space();
        self.seen.store(GENERATION.load(Ordering::SeqCst), Ordering::SeqCst);
        drop(space);
        self.refresh();
    }

    fn update(&self) -> MutexGuard<'_, (u64, Snapshot)> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if GENERATION.load(Ordering::SeqCst) != current.0 {
            let mut space = space();
            *current = (GENERATION.load(Ordering::SeqCst), space.snapshot());
        }
        current
    }

    /// The region that holds an address, whatever its rights. The region exists until the next refresh.
    pub(crate) fn find(&self, address: u64) -> Option<Region> {
        let current = self.update();
        let after = current.1.partition_point(|r| r.base <= address);
        let region = current.1.get(after.checked_sub(1)?)?;
        (address < region.end()).then_some(*region)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        space().views.retain(|seen| !Arc::ptr_eq(seen, &self.seen));
    }
}

// SAFETY: memory is only unmapped after its region is gone from the space and every view has been refreshed since.
unsafe impl Memory for View {
    fn resolve(&self, addr: u64, write: bool) -> Result<Span, Fault> {
        let bit = 1 << self.device;
        let region = self.find(addr).filter(|region| region.readers & bit != 0);
        let region = region.ok_or(Fault { kind: FaultKind::Unmapped, addr })?;
        let writable = region.writers & bit != 0;
        if write && !writable {
            return Err(Fault { kind: FaultKind::ReadOnly, addr });
        }
        Ok(Span { base: region.base, len: region.len, host: region.base as *mut u8, writable })
    }

    fn safe_point(&self) -> u64 {
        self.refresh()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_may_reach_over_allocations_and_not_over_variables_of_a_module() {
        let regions = |kind| {
            move |at: u64| {
                let base = [0, 100, 200].into_iter().rfind(|base| at >= *base)?;
                let (device, context, id) = (0, 0, 0);
                Some(Region { base, len: 100, kind, device, context, readers: 1, writers: 1, id })
            }
        };
        let is_covered = |kind, base, len| covered(base, len, regions(kind), |_| true);
        for (base, len) in [(0, 100), (120, 30), (100, 100)] {
            assert!(is_covered(Kind::Code, base, len) && is_covered(Kind::Device, base, len), "{base} {len}");
        }
        assert!(is_covered(Kind::Device, 50, 200) && !is_covered(Kind::Code, 50, 51));
        assert!(!is_covered(Kind::Device, 250, 51) && !is_covered(Kind::Device, 1, u64::MAX));
    }

    #[test]
    fn who_changes_memory_waits_for_no_view_that_rests_and_for_each_that_has_rested() {
        let view = View::open(0);
        // This would wait forever for the view of this thread.
        view.rest(|| change_all(|_| ()));
        let (seen, now) = (view.seen.load(Ordering::SeqCst), GENERATION.load(Ordering::SeqCst));
        assert!(seen <= now, "{seen}");
    }
}
