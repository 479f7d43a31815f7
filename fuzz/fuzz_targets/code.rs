//! Code of any content: fatbins, cubins, PTX.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rekindle_cuda_abi::code::{parse, unmanaged_within};

/// An entry may say that it unpacks to gigabytes.
const LIMIT: usize = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let _ = unmanaged_within(data, LIMIT);
    let Ok(image) = parse(data) else { return };
    let _ = image.select((9, 0));
    let _ = image.select_ptx((u32::MAX, u32::MAX));
    for entry in &image.entries {
        if entry.payload_within(LIMIT).is_ok()
            && let Ok(program) = entry.unpack()
        {
            let _ = program.globals();
            let _ = program.kernels();
            let _ = program.uses_device_malloc();
        }
    }
});
