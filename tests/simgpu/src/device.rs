//! Devices: what they are called, how much memory they have, how fast they copy, and their primary contexts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_NOT_INITIALIZED, CUDA_ERROR_OUT_OF_MEMORY, CUdevice,
};

use crate::config::config;
use crate::context::Context;
use crate::handles;
use crate::memory::heap::{Heap, WINDOW};
use crate::memory::space::{Kind, Region};
use crate::pool::Pools;
use crate::status::Result;

/// Where the devices' heaps begin; each device has three windows. They lie below everything that workers reserve, as
/// NVIDIA's driver keeps out of the way of what programs reserve.
const HEAPS: u64 = 0x0400_0000_0000;
const CODE_HEAPS: u64 = 0x0500_0000_0000;
const INTERNAL_HEAPS: u64 = 0x0600_0000_0000;

/// A simulated GPU.
#[derive(Debug)]
pub(crate) struct Device {
    /// Its number.
    pub(crate) ordinal: usize,
    /// Its number among all that there are, also those that this process does not see.
    pub(crate) number: usize,
    /// Bytes of memory.
    pub(crate) memory: u64,
    used: AtomicU64,
    /// A bit for each device whose contexts may access this one's memory.
    peers: AtomicU64,
    /// What programs allocate.
    pub(crate) heap: Heap,
    /// Code of modules, and their variables.
    pub(crate) code: Heap,
    /// What else the driver allocates.
    pub(crate) internal: Heap,
    /// Pools of stream-ordered allocation.
    pub(crate) pools: Pools,
    /// The link to the host: when it is free again, from the host and to it.
    links: [Mutex<Option<Instant>>; 2],
    primary: Mutex<Primary>,
}

/// A device's primary context: its handle stays the same over every reset.
#[derive(Debug)]
pub(crate) struct Primary {
    /// Its handle, whether it is active or not.
    pub(crate) handle: u64,
    /// How often it has been retained.
    pub(crate) retained: usize,
    /// The flags it has or will be created with.
    pub(crate) flags: u32,
    /// The context while it is active.
    pub(crate) active: Option<Arc<Context>>,
}

/// The direction of a copy over the link to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the host to the device.
    In,
    /// From the device to the host.
    Out,
}

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

/// Makes the devices, once.
pub(crate) fn create() -> &'static [Device] {
    DEVICES.get_or_init(|| config().devices.iter().enumerate().map(|(at, number)| Device::new(at, *number)).collect())
}

/// All devices; none before `cuInit`.
pub(crate) fn devices() -> &'static [Device] {
    DEVICES.get().map_or(&[], Vec::as_slice)
}

/// The device of that number.
pub(crate) fn device(ordinal: CUdevice) -> Result<&'static Device> {
    let devices = DEVICES.get().ok_or(CUDA_ERROR_NOT_INITIALIZED)?;
    usize::try_from(ordinal).ok().and_then(|i| devices.get(i)).ok_or(CUDA_ERROR_INVALID_DEVICE)
}

impl Device {
    fn new(ordinal: usize, number: usize) -> Self {
        let window = |first: u64| Heap::new(first + ordinal as u64 * WINDOW / 16);
        Self {
            ordinal,
            number,
            memory: config().memory,
            used: AtomicU64::new(0),
            peers: AtomicU64::new(0),
            heap: window(HEAPS),
            code: window(CODE_HEAPS),
            internal: window(INTERNAL_HEAPS),
            pools: Pools::new(),
            links: [const { Mutex::new(None) }; 2],
            primary: Mutex::new(Primary { handle: handles::next(), retained: 0, flags: 0, active: None }),
        }
    }

    /// Its UUID, the same in every process.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        crate::config::uuid(self.number)
    }

    /// Its PCI address: domain, bus, device.
    pub(crate) fn pci(&self) -> [i32; 3] {
        crate::config::pci(self.number)
    }

    /// Takes memory, if there is enough.
    pub(crate) fn charge(&self, bytes: u64) -> Result<()> {
        let take = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= self.memory);
        let taken = self.used.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        taken.map(|_| ()).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)
    }

    /// Gives memory back.
    pub(crate) fn release(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// How many bytes are free.
    pub(crate) fn free_memory(&self) -> u64 {
        self.memory.saturating_sub(self.used.load(Ordering::SeqCst))
    }

    /// A bit for each device whose contexts may access this one's memory.
    pub(crate) fn peers(&self) -> u64 {
        self.peers.load(Ordering::SeqCst)
    }

    /// Lets the contexts of another device access this one's memory, or no longer.
    pub(crate) fn set_peer(&self, other: usize, on: bool) {
        if on {
            self.peers.fetch_or(1 << other, Ordering::SeqCst);
        } else {
            self.peers.fetch_and(!(1 << other), Ordering::SeqCst);
        }
    }

    /// The primary context's state.
    pub(crate) fn primary(&self) -> MutexGuard<'_, Primary> {
        self.primary.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits as long as bytes take over the link to the host.
    pub(crate) fn pass_link(&self, direction: Direction, bytes: u64) {
        let Some(rate) = config().copy_rate else { return };
        let link = &self.links[usize::from(direction == Direction::Out)];
        let until = {
            let mut free = link.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Instant::now();
            let start = free.filter(|at| *at > now).unwrap_or(now);
            let end = start + Duration::from_secs_f64(bytes as f64 / rate);
            *free = Some(end);
            end
        };
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
    }

    /// Gives the memory of a region back to the heap it came from; the region is out of the space.
    pub(crate) fn reclaim(&self, region: &Region) {
        match region.kind {
            Kind::Device => self.heap.free(self, region.base),
            Kind::Code => self.code.free(self, region.base),
            Kind::Internal => self.internal.free(self, region.base),
            _ => {}
        }
    }
}
