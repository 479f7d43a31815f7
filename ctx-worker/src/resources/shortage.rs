//! What an allocation that has found no memory lacks: the daemon can make so much room on the device.

/// Why the last allocation on a device failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// It did not fail, or for another reason.
    #[default]
    None,
    /// The client may not have more. Memory of other clients would not help.
    Limit,
    /// The device has no room for so many bytes.
    Device(u64),
}

/// The bytes that must be free on a device for an allocation that has found so many free and failed. It may fail although its bytes
/// are free, because the driver takes some more: then more must be free than is now.
pub(crate) fn bytes_to_be_free(free: u64, short: Shortage) -> u64 {
    match short {
        Shortage::Device(bytes) => bytes.max(free.saturating_add(1)),
        Shortage::None | Shortage::Limit => 0,
    }
}

/// The bytes that must be free on each device for a client that needs so many on each, and has found no room.
pub(crate) fn to_be_free(free: &[u64], needed: &[u64]) -> Vec<u64> {
    let seems_enough = free.iter().zip(needed).all(|(free, needed)| free >= needed);
    let all = free.iter().zip(needed).map(|(&free, &needed)| match needed {
        0 => 0,
        needed if seems_enough => needed.max(free.saturating_add(1)),
        needed => needed,
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_must_be_free_than_was_not_enough() {
        assert_eq!(bytes_to_be_free(100, Shortage::Device(300)), 300);
        assert_eq!(bytes_to_be_free(300, Shortage::Device(300)), 301);
        assert_eq!(bytes_to_be_free(300, Shortage::Device(0)), 301);
        assert_eq!(bytes_to_be_free(300, Shortage::Limit), 0);
        assert_eq!(to_be_free(&[100, 50, 7], &[300, 50, 0]), [300, 50, 0]);
        assert_eq!(to_be_free(&[300, 50, 7], &[300, 20, 0]), [301, 51, 0]);
    }
}
