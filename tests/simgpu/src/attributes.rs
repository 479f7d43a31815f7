//! The values of `cuDeviceGetAttribute`: an H200's, except for configured values and unsupported features.

use rekindle_cuda_abi::types::CUdevice;

use crate::config::{config, pci};

/// The attributes from 0 on, as a real H200 gives them under driver 580.
#[rustfmt::skip]
const HOPPER: [i32; 148] = [
    0, 1024, 1024, 1024, 64, 2147483647, 65535, 65535, 49152, 65536,
    32, 2147483647, 65536, 1980000, 512, 1, 132, 0, 0, 1,
    0, 131072, 131072, 65536, 16384, 16384, 16384, 32768, 32768, 2048,
    512, 1, 1, 0, 6, 0, 3201000, 6016, 62914560, 2048,
    3, 1, 32768, 2048, 1, 32768, 32768, 8192, 8192, 32768,
    0, 32, 32768, 32768, 2046, 32768, 131072, 65536, 16384, 16384,
    16384, 32768, 2048, 32768, 32768, 2048, 32768, 32768, 2046, 268435456,
    131072, 65000, 2097120, 32768, 32768, 9, 0, 32768, 1, 1,
    1, 233472, 65536, 1, 0, 0, 0, 2, 0, 1,
    1, 1, 0, 0, 0, 1, 1, 232448, 0, 1,
    0, 0, 1, 1, 0, 0, 32, 1, 39321600, 134217728,
    1, 1024, 1, 1, 1, 1, 1, 1, 100, 9,
    1, 1, 1, 1, 1, 1, 4, 1, 1, 1,
    0, -1, 0, 0, 0, 0, 0, 0, 0, 590680286,
    415174878, 1, 1, 0, 1, 1, 0, 0,
];

/// The most threads of a block.
pub(crate) const MAX_BLOCK_THREADS: u32 = 1024;
/// The most threads of a block in x, y and z.
pub(crate) const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
/// The most blocks of a grid in x, y and z.
pub(crate) const MAX_GRID: [u32; 3] = [2_147_483_647, 65_535, 65_535];
/// Shared memory of a block that does not ask for more.
pub(crate) const SHARED_DEFAULT: u32 = 48 << 10;
/// Shared memory of a block that asks for it with `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(crate) const SHARED_OPT_IN: u32 = 227 << 10;
/// Shared memory that the system takes of each block.
pub(crate) const SHARED_RESERVED: u32 = 1 << 10;
/// Shared memory of a multiprocessor.
pub(crate) const SHARED_OF_MULTIPROCESSOR: u32 = 228 << 10;
/// Threads of a multiprocessor.
pub(crate) const THREADS_OF_MULTIPROCESSOR: u32 = 2048;
/// Blocks of a multiprocessor.
pub(crate) const BLOCKS_OF_MULTIPROCESSOR: u32 = 32;

/// An attribute's value, `None` for one that driver 580 does not know.
pub(crate) fn value(attribute: u32, device: CUdevice) -> Option<i32> {
    let known = *HOPPER.get(attribute as usize).filter(|_| attribute != 0)?;
    let number = crate::device::device(device).map_or(device as usize, |it| it.number);
    let [domain, bus, slot] = pci(number);
    let (major, minor) = config().capability;
    Some(match attribute {
        16 => config().multiprocessors as i32,
        33 => bus,
        34 => slot,
        50 => domain,
        75 => major as i32,
        76 => minor as i32,
        // Not supported: access to a device's memory from the host, several ways of sharing memory.
        101 | 128 => 0,
        // Not supported: functions that have one address on the host and on devices.
        129 => 0,
        110 | 112 | 113 | 114 | 116 | 117 | 121 | 124 | 125 => 0,
        // Not supported: pools and virtual memory on the host.
        141 | 142 | 144 | 145 => 0,
        // Pools are exported as files alone.
        119 => 1,
        _ => known,
    })
}
