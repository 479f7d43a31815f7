//! The addresses of device and pinned memory.
//!
//! An address means the same in the application, in its worker and on the device, and after a restore: so both lie in
//! windows that neither process uses for anything else. The application keeps device windows reserved without access
//! and reserves as the memory grows; the worker reserves the same range with the driver.
//!
//! ```text
//!   0x0800_0000_0000  the worker alone: clones of memory that is being saved, 512 GiB for each device
//!   0x1000_0000_0000  what the application reserves and maps itself, 6 TiB
//!   0x1600_0000_0000  the worker alone: pieces of the application's, mapped to be saved and loaded, 2 TiB
//!   0x2000_0000_0000  device 0   4 TiB each, 16 devices at most
//!   0x2400_0000_0000  device 1   ...
//!   0x6000_0000_0000  pinned host memory, 16 TiB
//! ```
//!
//! Measured on driver 580: `cuMemAddressReserve` honours hints there. Legacy mmap layouts put libraries at 0x2ad6_...,
//! inside device 2's window: a collision there shows when the application reserves, before any memory is given out.

use std::ops::Range;

/// The first of the addresses that the application reserves itself (`cuMemAddressReserve`).
pub const RESERVED_BASE: u64 = 0x1000_0000_0000;
/// The size of the address space that the application reserves itself.
pub const RESERVED_SIZE: u64 = 6 << 40;
/// The first of the addresses at which a worker that saves or loads maps physical memory which the application may have mapped
/// nowhere, or without access. The application has nothing there.
pub const ALIAS_BASE: u64 = RESERVED_BASE + RESERVED_SIZE;
/// The size of the address space for these mappings.
pub const ALIAS_SIZE: u64 = 2 << 40;
/// The first of the addresses at which a worker maps clones of memory, while they are copied into an image. The application has
/// nothing there.
pub const CLONE_BASE: u64 = 0x0800_0000_0000;
/// The size of the address space for the clones of one device.
pub const CLONE_SIZE: u64 = 512 << 30;
/// The first address of device 0's window.
pub const DEVICE_BASE: u64 = 0x2000_0000_0000;
/// The distance between the windows of two devices, and their size.
pub const DEVICE_SIZE: u64 = 1 << 42;
/// The number of devices that have a window.
pub const MAX_DEVICES: usize = 16;
/// The first address of pinned host memory.
pub const PINNED_BASE: u64 = 0x6000_0000_0000;
/// How much address space pinned host memory may take.
pub const PINNED_SIZE: u64 = 1 << 44;
/// The most bytes of one physical allocation that a worker maps in a window: large ranges are made of several.
pub const MAX_PIECE: u64 = 1 << 30;
/// The application reserves device windows in steps of this size. CRIU before kernel 6.7 walks reservations, so they
/// are not made larger than needed.
pub const STEP: u64 = 64 << 30;

/// The window of a device (numbered as the worker numbers them).
pub fn device(ordinal: usize) -> Range<u64> {
    let base = DEVICE_BASE + ordinal as u64 * DEVICE_SIZE;
    base..base + DEVICE_SIZE
}

/// The device in whose window an address lies.
pub fn device_of(address: u64) -> Option<usize> {
    let ordinal = (address.checked_sub(DEVICE_BASE)? / DEVICE_SIZE) as usize;
    (ordinal < MAX_DEVICES).then_some(ordinal)
}

/// The window of what the application reserves itself.
pub fn reserved() -> Range<u64> {
    RESERVED_BASE..RESERVED_BASE + RESERVED_SIZE
}

/// The window of pieces that are saved or loaded.
pub fn aliases() -> Range<u64> {
    ALIAS_BASE..ALIAS_BASE + ALIAS_SIZE
}

/// The window of clones of a device's memory.
pub fn clones(ordinal: usize) -> Range<u64> {
    let base = CLONE_BASE + ordinal as u64 * CLONE_SIZE;
    base..base + CLONE_SIZE
}

/// The window of pinned host memory.
pub fn pinned() -> Range<u64> {
    PINNED_BASE..PINNED_BASE + PINNED_SIZE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_do_not_meet() {
        assert!(device(MAX_DEVICES - 1).end <= PINNED_BASE);
        assert!(reserved().end <= aliases().start && aliases().end <= device(0).start);
        assert!(clones(MAX_DEVICES - 1).end <= reserved().start);
        assert_eq!(device_of(device(3).start + 5), Some(3));
        assert_eq!(device_of(device(0).start - 1), None);
        assert_eq!(device_of(PINNED_BASE), None);
    }
}
