//! Devices: their names, their memory, and the rate of their copies.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rekindle_cuda_abi::types::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_INITIALIZED, CUdevice,
};

use crate::config::{self, config};
use crate::handles;
use crate::memory::account::Account;
use crate::memory::heap::{Heap, Place, Saved, WINDOW};
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
    /// The device's number among all devices, including those that this process does not see.
    pub(crate) number: usize,
    /// The amount of memory that is taken, and the devices that may access it.
    pub(crate) memory: Account,
    /// The heap of programs' allocations.
    heap: Heap,
    /// The heap of modules' code and variables.
    code: Heap,
    /// The heap of the driver's other allocations.
    internal: Heap,
    /// Pools of stream-ordered allocation.
    pub(crate) pools: Pools,
    /// For each direction of the link to the host, the time when it is free again.
    links: [Mutex<Option<Instant>>; 2],
    /// The handle of its primary context, whether that is active or not.
    pub(crate) primary: u64,
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

/// Releases the reserves of all devices' pools beyond their thresholds: the program has waited for some command.
pub(crate) fn release_pools() {
    devices().iter().for_each(|device| device.pools.release());
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
            memory: Account::new(ordinal, number, config().memory),
            heap: window(HEAPS),
            code: window(CODE_HEAPS),
            internal: window(INTERNAL_HEAPS),
            pools: Pools::new(),
            links: [const { Mutex::new(None) }; 2],
            primary: handles::next(),
        }
    }

    /// Its UUID, the same in every process.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        config::uuid(self.number)
    }

    /// Its PCI address: domain, bus, device.
    pub(crate) fn pci(&self) -> [i32; 3] {
        config::pci(self.number)
    }

    /// Waits as long as so many bytes take over the link to the host.
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

    /// The heap for regions of a kind.
    fn heap_of(&self, kind: Kind) -> Option<&Heap> {
        match kind {
            Kind::Device => Some(&self.heap),
            Kind::Code => Some(&self.code),
            Kind::Internal => Some(&self.internal),
            _ => None,
        }
    }

    /// Takes memory of the device for a context, or for all of them (0).
    pub(crate) fn allocate(&self, context: u64, kind: Kind, len: u64) -> Result<u64> {
        let heap = self.heap_of(kind).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        heap.allocate(&self.memory, context, kind, len)
    }

    /// Sets memory of a kind to zero, see [`Heap::clear`].
    ///
    /// # Safety
    ///
    /// As for [`Heap::clear`].
    pub(crate) unsafe fn clear(&self, kind: Kind, address: u64, len: u64) {
        if let Some(heap) = self.heap_of(kind) {
            // SAFETY: the caller's promise.
            unsafe { heap.clear(address, len) };
        }
    }

    /// Gives the memory of a region back to the heap it came from; the region is out of the space.
    pub(crate) fn reclaim(&self, region: &Region) {
        if let Some(heap) = self.heap_of(region.kind) {
            heap.free(&self.memory, region.base);
        }
    }

    /// Moves the content of all its memory out, see [`Heap::move_out`].
    pub(crate) fn move_out(&self) -> Vec<Saved> {
        [&self.heap, &self.code, &self.internal].into_iter().flat_map(|it| it.move_out(&self.memory)).collect()
    }

    /// Moves a block in again.
    pub(crate) fn move_in(&self, saved: &Saved) -> Result<()> {
        for heap in [&self.heap, &self.code, &self.internal] {
            if heap.move_in(&self.memory, saved)? {
                return Ok(());
            }
        }
        Err(CUDA_ERROR_INVALID_VALUE)
    }

    /// Takes addresses between code, as the driver does for the buffer of kernels that print. Returns where.
    pub(crate) fn occupy_beside_code(&self, len: u64) -> u64 {
        self.code.occupy(len)
    }

    /// Gives such addresses back.
    pub(crate) fn vacate_beside_code(&self, at: u64) {
        self.code.vacate(at);
    }

    /// The block that holds an address of a program's allocation.
    pub(crate) fn block(&self, address: u64) -> Option<Place> {
        self.heap.block(address)
    }
}
