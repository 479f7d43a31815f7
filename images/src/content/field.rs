//! Arithmetic modulo 2^127 - 1. Values are below it.

const PRIME: u128 = (1 << 127) - 1;

/// Any number, modulo the prime.
pub(super) fn reduce(x: u128) -> u128 {
    let x = (x & PRIME) + (x >> 127);
    if x >= PRIME { x - PRIME } else { x }
}

pub(super) fn add(a: u128, b: u128) -> u128 {
    // Both are below 2^127.
    reduce(a + b)
}

pub(super) fn multiply(a: u128, b: u128) -> u128 {
    let half = |x: u128| (x & u128::from(u64::MAX), x >> 64);
    let ((a0, a1), (b0, b1)) = (half(a), half(b));
    // The upper halves are below 2^63, so nothing here overflows.
    let middle = a0 * b1 + a1 * b0;
    let (low, carry) = (a0 * b0).overflowing_add(middle << 64);
    let high = a1 * b1 + (middle >> 64) + u128::from(carry);
    // 2^128 is 2 modulo the prime.
    reduce(reduce(low) + (high << 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_field() {
        assert_eq!(multiply(PRIME - 1, PRIME - 1), 1);
        assert_eq!(reduce(u128::MAX), 1);
        assert_eq!((reduce(PRIME), reduce(PRIME + 1)), (0, 1));
        assert_eq!(multiply(1 << 126, 2), 1);
        // Fermat: x^(p - 1) = 1.
        let x = 0x0123_4567_89ab_cdef_fedc_ba98_7654_3210;
        let (mut power, mut square, mut exponent) = (1, x, PRIME - 1);
        while exponent > 0 {
            if exponent & 1 == 1 {
                power = multiply(power, square);
            }
            square = multiply(square, square);
            exponent >>= 1;
        }
        assert_eq!(power, 1);
    }
}
