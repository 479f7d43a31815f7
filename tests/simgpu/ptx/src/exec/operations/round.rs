//! Arithmetic in the rounding modes that the host does not offer portably.
//!
//! Each result is first computed to nearest; the sign of the rounding error then shows whether the neighbour is the right
//! result.

/// A rounding mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
    /// To nearest, ties away from zero.
    Away,
}

impl Rounding {
    /// The mode of a modifier, for results that are floating point numbers.
    pub(crate) fn named(name: &str) -> Option<Rounding> {
        Some(match name {
            "rn" => Rounding::Nearest,
            "rz" => Rounding::Zero,
            "rm" => Rounding::Down,
            "rp" => Rounding::Up,
            "rna" => Rounding::Away,
            _ => return None,
        })
    }

    /// The mode of a modifier, for results that are whole numbers.
    pub(crate) fn named_whole(name: &str) -> Option<Rounding> {
        Some(match name {
            "rni" => Rounding::Nearest,
            "rzi" => Rounding::Zero,
            "rmi" => Rounding::Down,
            "rpi" => Rounding::Up,
            _ => return None,
        })
    }

    /// The mode whose number is in the low bits.
    pub(crate) fn from_bits(bits: u64) -> Rounding {
        match bits & 7 {
            1 => Rounding::Zero,
            2 => Rounding::Down,
            3 => Rounding::Up,
            4 => Rounding::Away,
            _ => Rounding::Nearest,
        }
    }

    /// Rounds to a whole number.
    pub(crate) fn whole(self, value: f64) -> f64 {
        match self {
            Rounding::Nearest => value.round_ties_even(),
            Rounding::Zero => value.trunc(),
            Rounding::Down => value.floor(),
            Rounding::Up => value.ceil(),
            Rounding::Away => value.round(),
        }
    }
}

/// Moves `nearest`, whose rounding lost `rest`, to the mode's result.
fn adjust64(nearest: f64, rest: f64, mode: Rounding) -> f64 {
    if !nearest.is_finite() {
        // An overflow: the largest finite number lies between, unless an infinity was put in.
        return match mode {
            Rounding::Zero if rest.is_finite() => f64::MAX.copysign(nearest),
            Rounding::Down if rest.is_finite() && nearest > 0.0 => f64::MAX,
            Rounding::Up if rest.is_finite() && nearest < 0.0 => f64::MIN,
            _ => nearest,
        };
    }
    if rest == 0.0 || rest.is_nan() {
        return nearest;
    }
    let up = match mode {
        Rounding::Nearest | Rounding::Away => return nearest,
        Rounding::Zero => nearest < 0.0 || (nearest == 0.0 && rest < 0.0),
        Rounding::Down => false,
        Rounding::Up => true,
    };
    if up && rest > 0.0 {
        nearest.next_up()
    } else if !up && rest < 0.0 {
        nearest.next_down()
    } else {
        nearest
    }
}

/// Rounds an exact value, given as a double and the rest beyond it, to single precision.
pub(crate) fn to_f32(value: f64, rest: f64, mode: Rounding) -> f32 {
    let nearest = value as f32;
    if !value.is_finite() {
        return nearest;
    }
    if nearest.is_infinite() {
        return match mode {
            Rounding::Zero => f32::MAX.copysign(nearest),
            Rounding::Down if nearest > 0.0 => f32::MAX,
            Rounding::Up if nearest < 0.0 => f32::MIN,
            _ => nearest,
        };
    }
    let lost = value - f64::from(nearest);
    let lost = if lost == 0.0 { rest } else { lost };
    if lost == 0.0 || lost.is_nan() {
        return nearest;
    }
    match mode {
        // The double may itself have been rounded onto a tie; the rest beyond it decides.
        Rounding::Nearest | Rounding::Away => break_tie(value, rest, nearest, mode),
        Rounding::Zero if value > 0.0 && lost < 0.0 => nearest.next_down(),
        Rounding::Zero if value < 0.0 && lost > 0.0 => nearest.next_up(),
        Rounding::Down if lost < 0.0 => nearest.next_down(),
        Rounding::Up if lost > 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

fn break_tie(value: f64, rest: f64, nearest: f32, mode: Rounding) -> f32 {
    let lost = value - f64::from(nearest);
    if lost == 0.0 {
        return nearest;
    }
    let other = if lost > 0.0 { nearest.next_up() } else { nearest.next_down() };
    let tie = (f64::from(other) - value) == lost;
    if !tie {
        return nearest;
    }
    let towards_other = if rest == 0.0 {
        mode == Rounding::Away && lost.signum() == value.signum()
    } else {
        rest.signum() == lost.signum()
    };
    if towards_other { other } else { nearest }
}

/// A sum and its rounding error (Knuth).
fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let sum = a + b;
    let part = sum - a;
    (sum, (a - (sum - part)) + (b - part))
}

/// The sign of an exact zero sum, which the mode determines.
fn zero_sum(a: f64, b: f64, sum: f64, mode: Rounding) -> f64 {
    if sum == 0.0 && mode == Rounding::Down && (a != b || a != 0.0) { -0.0 } else { sum }
}

fn both_zero_down(a: f64, b: f64, sum: f64, mode: Rounding) -> f64 {
    if sum == 0.0 && mode == Rounding::Down && (a.is_sign_negative() || b.is_sign_negative()) {
        return -0.0;
    }
    zero_sum(a, b, sum, mode)
}

pub(crate) fn add32(a: f32, b: f32, mode: Rounding) -> f32 {
    let (a, b) = (f64::from(a), f64::from(b));
    let (sum, rest) = two_sum(a, b);
    to_f32(both_zero_down(a, b, sum, mode), rest, mode)
}

pub(crate) fn mul32(a: f32, b: f32, mode: Rounding) -> f32 {
    to_f32(f64::from(a) * f64::from(b), 0.0, mode)
}

pub(crate) fn fma32(a: f32, b: f32, c: f32, mode: Rounding) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let (sum, rest) = two_sum(product, c);
    to_f32(both_zero_down(product, c, sum, mode), rest, mode)
}

pub(crate) fn div32(a: f32, b: f32, mode: Rounding) -> f32 {
    let (a, b) = (f64::from(a), f64::from(b));
    let quotient = a / b;
    let rest = (-quotient).mul_add(b, a);
    to_f32(quotient, if b < 0.0 { -rest } else { rest }, mode)
}

pub(crate) fn sqrt32(a: f32, mode: Rounding) -> f32 {
    let a = f64::from(a);
    let root = a.sqrt();
    to_f32(root, (-root).mul_add(root, a), mode)
}

pub(crate) fn add64(a: f64, b: f64, mode: Rounding) -> f64 {
    let (sum, rest) = two_sum(a, b);
    let rest = if a.is_infinite() || b.is_infinite() {
        f64::INFINITY
    } else if sum.is_infinite() {
        1.0
    } else {
        rest
    };
    adjust64(both_zero_down(a, b, sum, mode), rest, mode)
}

pub(crate) fn mul64(a: f64, b: f64, mode: Rounding) -> f64 {
    let product = a * b;
    let rest = if a.is_infinite() || b.is_infinite() {
        f64::INFINITY
    } else if product.is_infinite() {
        1.0
    } else {
        let rest = a.mul_add(b, -product);
        // The rounding error of a product that vanished is the product itself.
        if product == 0.0 && a != 0.0 && b != 0.0 { a.signum() * b.signum() } else { rest }
    };
    adjust64(product, rest, mode)
}

pub(crate) fn fma64(a: f64, b: f64, c: f64, mode: Rounding) -> f64 {
    let nearest = a.mul_add(b, c);
    if mode == Rounding::Nearest {
        return nearest;
    }
    if !nearest.is_finite() {
        let infinite = a.is_infinite() || b.is_infinite() || c.is_infinite();
        return adjust64(nearest, if infinite { f64::INFINITY } else { 1.0 }, mode);
    }
    // The error of a fused multiply-add (Boldo and Muller).
    let product = a * b;
    let product_rest = a.mul_add(b, -product);
    let (low, low_rest) = two_sum(c, product_rest);
    let (high, high_rest) = two_sum(product, low);
    let rest = ((high - nearest) + high_rest) + low_rest;
    adjust64(both_zero_down(product, c, nearest, mode), rest, mode)
}

pub(crate) fn div64(a: f64, b: f64, mode: Rounding) -> f64 {
    let quotient = a / b;
    let rest = if quotient.is_infinite() {
        if a.is_infinite() || b == 0.0 { f64::INFINITY } else { 1.0 }
    } else {
        let rest = (-quotient).mul_add(b, a);
        if b < 0.0 { -rest } else { rest }
    };
    adjust64(quotient, rest, mode)
}

pub(crate) fn sqrt64(a: f64, mode: Rounding) -> f64 {
    let root = a.sqrt();
    let rest = if root.is_infinite() { f64::INFINITY } else { (-root).mul_add(root, a) };
    adjust64(root, rest, mode)
}

/// A double to single precision.
pub(crate) fn narrow(value: f64, mode: Rounding) -> f32 {
    to_f32(value, 0.0, mode)
}

/// An integer to double precision.
pub(crate) fn int_to_f64(value: i128, mode: Rounding) -> f64 {
    let nearest = value as f64;
    adjust64(nearest, (value - nearest as i128) as f64, mode)
}

/// An integer to single precision.
pub(crate) fn int_to_f32(value: i128, mode: Rounding) -> f32 {
    let nearest = value as f32;
    let lost = value - nearest as i128;
    match mode {
        Rounding::Zero if value > 0 && lost < 0 => nearest.next_down(),
        Rounding::Zero if value < 0 && lost > 0 => nearest.next_up(),
        Rounding::Down if lost < 0 => nearest.next_down(),
        Rounding::Up if lost > 0 => nearest.next_up(),
        _ => nearest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directed_sums_enclose_the_exact_one() {
        for (a, b) in [(1.0f32, 1e-20f32), (-1.0, 1e-20), (0.1, 0.2), (1e30, -1e-30)] {
            let exact = f64::from(a) + f64::from(b);
            let (down, up) = (add32(a, b, Rounding::Down), add32(a, b, Rounding::Up));
            assert!(f64::from(down) <= exact && exact <= f64::from(up));
            assert_eq!(down.next_up(), up);
        }
    }

    #[test]
    fn directed_quotients_differ_by_one_step() {
        for b in [3.0f64, 7.0, -11.0] {
            assert_eq!(div64(1.0, b, Rounding::Down).next_up(), div64(1.0, b, Rounding::Up));
            let zero = div64(1.0, b, Rounding::Zero);
            assert!(zero.abs() <= (1.0 / b).abs());
        }
        assert_eq!(div64(1.0, 4.0, Rounding::Up), 0.25);
    }

    #[test]
    fn the_exponential_functions_trick_rounds_down() {
        // libdevice's expf adds a large constant, rounding down, to take a floor.
        let magic = f32::from_bits(0x4b40_0001);
        assert_eq!(fma32(0.75, 252.0, magic, Rounding::Down) - magic, 189.0);
        assert_eq!(fma32(0.7501, 252.0, magic, Rounding::Down) - magic, 189.0);
    }

    #[test]
    fn integers_round_as_asked() {
        let value = (1 << 24) + 1;
        assert_eq!(int_to_f32(value, Rounding::Down), 16_777_216.0);
        assert_eq!(int_to_f32(value, Rounding::Up), 16_777_218.0);
        assert_eq!(int_to_f32(-value, Rounding::Zero), -16_777_216.0);
    }
}
