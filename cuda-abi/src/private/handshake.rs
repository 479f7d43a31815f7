//! The runtime's start-up handshake (INT): it asks for a message authentication code over what it knows of the
//! driver, and refuses to start when it computes another. Each copy of the runtime asks three times, with its
//! version and the two numbers that follow.

use super::hmac_md2::hmac_md2;
use super::host::Host;

const KEY: [u8; 16] = 0x146A_DDAE_53A9_A752_AA08_4136_0BF5_5A9F_u128.to_be_bytes();

/// The inputs of the code, besides the devices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caller {
    /// The version that the runtime passes.
    pub(super) version: u32,
    /// The process's id.
    pub(super) pid: u32,
    /// The lower half of `pthread_self`.
    pub(super) thread: u32,
    /// The addresses of the CUDART table, the INT table and the latter's function.
    pub(super) addresses: [u64; 3],
    /// The time that the runtime passes, in seconds since 1970.
    pub(super) seconds: u64,
}

/// The two words that the runtime expects.
pub(super) fn words(host: &dyn Host, caller: Caller) -> [u64; 2] {
    match caller.version % 10 {
        0 => [0x3341_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8],
        1 => [0x1841_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8],
        _ => code(host, caller),
    }
}

fn code(host: &dyn Host, caller: Caller) -> [u64; 2] {
    let mut message = Vec::with_capacity(256);
    for word in [host.driver_version().cast_unsigned(), caller.version, caller.pid, caller.thread] {
        message.extend_from_slice(&word.to_le_bytes());
    }
    for word in caller.addresses.into_iter().chain([caller.seconds]) {
        message.extend_from_slice(&word.to_le_bytes());
    }
    for device in host.devices() {
        message.extend_from_slice(&device.uuid);
        for part in device.pci {
            message.extend_from_slice(&part.to_le_bytes());
        }
    }
    let code = u128::from_le_bytes(hmac_md2(&KEY, &[&message]));
    [code as u64, (code >> 64) as u64]
}
