//! Device memory for clones: reserved before the quiesce, since allocating it takes time, and released when the copy is over.

use rekindle_cuda_abi::types::*;
use rekindle_wire::free_ranges::FreeRanges;
use rekindle_wire::window::{self, MAX_PIECE};
use tracing::warn;

use crate::gpu::driver::{CallFailed, Driver, checked};

/// Clones begin at multiples of this, where copies are fast.
const ALIGN: u64 = 512;
/// One part in this many of a device's memory stays free.
const MARGIN: u64 = 32;

/// Room for clones on each device.
pub(crate) struct Clones {
    devices: Vec<Room>,
}

#[derive(Default)]
struct Room {
    base: u64,
    /// Addresses and sizes of physical pieces, mapped side by side from the base on.
    pieces: Vec<(u64, u64)>,
    size: u64,
    free: FreeRanges,
}

impl Clones {
    /// Reserves memory on each device: as much of `wanted` as the device has to spare. `devices` are the devices with their
    /// primary contexts.
    pub(crate) fn reserve(driver: &Driver, devices: &[(CUdevice, CUcontext)], wanted: &[u64]) -> Self {
        let rooms = devices.iter().zip(wanted).enumerate().map(|(ordinal, (&(device, primary), &wanted))| {
            let mut room = Room { base: window::clones(ordinal).start, ..Room::default() };
            if let Err(failed) = room.fill(driver, device, primary, wanted.min(window::CLONE_SIZE)) {
                warn!("there is room for clones of {} of {wanted} bytes: {failed}", room.size);
            }
            room
        });
        Self { devices: rooms.collect() }
    }

    /// Takes this many bytes on a device, if there is room.
    pub(crate) fn take(&mut self, device: usize, length: u64) -> Option<u64> {
        self.devices.get_mut(device)?.free.take(length.next_multiple_of(ALIGN))
    }

    /// Returns bytes that were taken.
    pub(crate) fn give(&mut self, device: usize, address: u64, length: u64) {
        if let Some(room) = self.devices.get_mut(device) {
            room.free.give(address, length.next_multiple_of(ALIGN));
        }
    }

    /// Whether less than half of the reserved memory is left on some device.
    pub(crate) fn is_crowded(&self) -> bool {
        self.devices.iter().any(|room| room.free.total() < room.size / 2)
    }

    /// Bytes of a device's memory that are reserved.
    pub(crate) fn bytes(&self, device: usize) -> u64 {
        self.devices.get(device).map_or(0, |room| room.size)
    }

    /// Releases the memory to the devices. Nothing uses it any more.
    pub(crate) fn release(self, driver: &Driver) {
        for room in self.devices {
            let mut at = room.base;
            for (piece, size) in room.pieces {
                // SAFETY: mapped and made in `fill`, used by nothing any more.
                let gone = unsafe {
                    checked("cuMemUnmap", (driver.cuMemUnmap)(at, size as usize))
                        .and(checked("cuMemRelease", (driver.cuMemRelease)(piece)))
                };
                if let Err(failed) = gone {
                    warn!("memory for clones stays where it was: {failed}");
                }
                at += size;
            }
        }
    }
}

/// Reserves addresses in the driver, permanently. They are to be many, so that the driver uses the requested address, and in one
/// range, so that the range is free later too.
pub(crate) fn keep_window(driver: &Driver, base: u64, size: u64) {
    let mut got = 0;
    // SAFETY: the out parameter is a local.
    let reserved = unsafe { (driver.cuMemAddressReserve)(&raw mut got, size as usize, 0, base, 0) };
    if reserved == CUDA_SUCCESS && got != base {
        // Probably reserved since an earlier time.
        // SAFETY: what was just reserved, and is of no use.
        unsafe { (driver.cuMemAddressFree)(got, size as usize) };
    }
}

impl Room {
    fn fill(&mut self, driver: &Driver, device: CUdevice, primary: CUcontext, wanted: u64) -> Result<(), CallFailed> {
        // SAFETY: the context is the device's primary one.
        unsafe { checked("cuCtxSetCurrent", (driver.cuCtxSetCurrent)(primary))? };
        let length = wanted.next_multiple_of(MEMORY_GRANULARITY).min(spare(driver)?);
        if length == 0 {
            return Ok(());
        }
        keep_window(driver, self.base, length.max(window::CLONE_SIZE));
        let properties = CUmemAllocationProp {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            location_type: CU_MEM_LOCATION_TYPE_DEVICE,
            location_id: device,
            ..Default::default()
        };
        let made = self.map(driver, &properties, length);
        let access = CUmemAccessDesc {
            location_type: CU_MEM_LOCATION_TYPE_DEVICE,
            location_id: device,
            flags: CU_MEM_ACCESS_READWRITE,
        };
        if self.size > 0 {
            // SAFETY: what was mapped just now; the descriptor lives through the call.
            let set = unsafe { (driver.cuMemSetAccess)(self.base, self.size as usize, &raw const access, 1) };
            checked("cuMemSetAccess", set)?;
            self.free.give(self.base, self.size);
        }
        made
    }

    fn map(&mut self, driver: &Driver, properties: &CUmemAllocationProp, length: u64) -> Result<(), CallFailed> {
        while self.size < length {
            // Other processes on this device may take the free memory meanwhile.
            let size = MAX_PIECE.min(length - self.size).min(spare(driver)?);
            if size == 0 {
                warn!("there is room for clones of {} of {length} bytes", self.size);
                break;
            }
            let mut piece = 0_u64;
            // SAFETY: out parameters are locals, the properties live through the call; the addresses are our own.
            unsafe {
                let made = (driver.cuMemCreate)((&raw mut piece).cast(), size as usize, properties, 0);
                checked("cuMemCreate", made)?;
                let mapped = (driver.cuMemMap)(self.base + self.size, size as usize, 0, piece, 0);
                if mapped != CUDA_SUCCESS {
                    (driver.cuMemRelease)(piece);
                }
                checked("cuMemMap", mapped)?;
            }
            self.pieces.push((piece, size));
            self.size += size;
        }
        Ok(())
    }
}

/// The memory that clones may take on the current context's device, in whole granules.
fn spare(driver: &Driver) -> Result<u64, CallFailed> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: out parameters are locals.
    checked("cuMemGetInfo", unsafe { (driver.cuMemGetInfo_v2)(&raw mut free, &raw mut total) })?;
    Ok((free as u64).saturating_sub(total as u64 / MARGIN) / MEMORY_GRANULARITY * MEMORY_GRANULARITY)
}

#[cfg(test)]
impl Clones {
    /// Room that exists on no device.
    pub(crate) fn imagined(size: u64) -> Self {
        let base = window::clones(0).start;
        let free = FreeRanges::all(base..base + size);
        Self { devices: vec![Room { base, pieces: Vec::new(), size, free }] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_can_be_taken_in_one() {
        let mut clones = Clones::imagined(4096);
        let places: Vec<_> = (0..4).map(|_| clones.take(0, 1000).unwrap()).collect();
        assert_eq!(clones.take(0, 1), None);
        assert!(clones.is_crowded());
        for at in [1, 3, 0, 2] {
            clones.give(0, places[at], 1000);
        }
        assert_eq!(clones.take(0, 4096), Some(places[0]));
        assert_eq!(clones.take(1, 1), None);
    }
}
