//! Names that nobody else has chosen.

use rustix::rand::{GetRandomFlags, getrandom};

use crate::StoreError;

/// Random bytes from the kernel.
pub(crate) fn bytes<const N: usize>() -> Result<[u8; N], StoreError> {
    let mut bytes = [0; N];
    // Requests of up to 256 bytes are answered whole.
    match getrandom(&mut bytes, GetRandomFlags::empty()) {
        Ok(length) if length == N => Ok(bytes),
        _ => Err(StoreError::refused("the kernel gives no random numbers")),
    }
}

/// 32 random hexadecimal digits.
pub(crate) fn hex() -> Result<String, StoreError> {
    Ok(format!("{:032x}", u128::from_le_bytes(bytes()?)))
}
