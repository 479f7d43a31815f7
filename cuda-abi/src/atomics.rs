//! Atomic operations, as `cuDeviceGetP2PAtomicCapabilities` and its like tell of them.

/// `CU_ATOMIC_OPERATION_MAX`: operations have lower numbers.
pub const OPERATIONS: u32 = 13;

/// `CU_ATOMIC_CAPABILITY_*`.
const SIGNED: u32 = 1;
const UNSIGNED: u32 = 1 << 1;
const REDUCTION: u32 = 1 << 2;
const SCALAR_32: u32 = 1 << 3;
const SCALAR_64: u32 = 1 << 4;

/// What every GPU of today does by an operation in its own memory, after the instructions `atom` and `red` of PTX. Vectors and
/// words of 128 bits are left out: not every one has them.
#[must_use]
pub fn in_own_memory(operation: u32) -> u32 {
    match operation {
        // Integers: addition, minimum, maximum.
        0..=2 => SIGNED | UNSIGNED | REDUCTION | SCALAR_32 | SCALAR_64,
        // Increment and decrement.
        3 | 4 => UNSIGNED | REDUCTION | SCALAR_32,
        // And, or, exclusive or.
        5..=7 => SIGNED | UNSIGNED | REDUCTION | SCALAR_32 | SCALAR_64,
        // Exchange, compare and swap.
        8 | 9 => SIGNED | UNSIGNED | SCALAR_32 | SCALAR_64,
        // Addition of floating-point numbers. They have no minimum and no maximum.
        10 => SIGNED | REDUCTION | SCALAR_32 | SCALAR_64,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_combines_is_a_reduction_and_only_known_operations_are_supported() {
        let reduces = |operation| in_own_memory(operation) & REDUCTION != 0;
        assert_eq!((0..OPERATIONS).filter(|it| reduces(*it)).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7, 10]);
        assert!((0..OPERATIONS).all(|it| in_own_memory(it) < 1 << 7));
        assert_eq!(in_own_memory(OPERATIONS), 0);
    }
}
