//! Numbers of 16 bits: `f16`, `bf16` and pairs of them.

use super::float::{SATURATE, saturate};
use super::round::Rounding;
use crate::ast::Type;
use crate::exec::machine::{Core, Exec, Flow, Inst, Lanes, exec};

/// Replaces negative results by zero.
pub(crate) const RELU: u64 = 32;

/// A format of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Ieee,
    Brain,
}

impl Format {
    /// The format of a type, if it has one.
    pub(crate) fn of(ty: Type) -> Option<Format> {
        match ty {
            Type::F16 | Type::F16x2 => Some(Format::Ieee),
            Type::Bf16 | Type::Bf16x2 => Some(Format::Brain),
            _ => None,
        }
    }

    pub(crate) fn to_f32(self, bits: u16) -> f32 {
        match self {
            Format::Brain => f32::from_bits(u32::from(bits) << 16),
            Format::Ieee => {
                let sign = u32::from(bits >> 15) << 31;
                let exponent = u32::from(bits >> 10 & 31);
                let fraction = u32::from(bits & 0x3ff);
                match exponent {
                    0 => {
                        let value = fraction as f32 / 16_777_216.0;
                        f32::from_bits(value.to_bits() | sign)
                    }
                    31 => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
                    _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
                }
            }
        }
    }

    /// Rounds a double; sums and products of two numbers of this format are exact in one.
    pub(crate) fn round(self, value: f64, mode: Rounding) -> u16 {
        if value.is_nan() {
            return 0x7fff;
        }
        let sign = u16::from(value.is_sign_negative()) << 15;
        let (fraction_bits, least_exponent, largest, infinity) = match self {
            Format::Ieee => (10, -14, 65504.0, 0x7c00),
            Format::Brain => (7, -126, f64::from(f32::from_bits(0x7f7f_0000)), 0x7f80),
        };
        if value.is_infinite() {
            return sign | infinity;
        }
        let magnitude = value.abs();
        let exponent = exponent_of(magnitude).max(least_exponent);
        // In units of the last place the magnitude is a number that must become whole.
        let unit = power_of_two(exponent - fraction_bits);
        let signed = if sign == 0 { magnitude / unit } else { -magnitude / unit };
        let whole = mode.whole(signed).abs();
        if whole * unit > largest {
            let to_largest = match mode {
                Rounding::Zero => true,
                Rounding::Down => sign == 0,
                Rounding::Up => sign != 0,
                Rounding::Nearest | Rounding::Away => false,
            };
            return sign | if to_largest { infinity - 1 } else { infinity };
        }
        // A carry out of the fraction goes into the exponent, as it should.
        let hidden = (1u32 << fraction_bits) as f64;
        let biased = (exponent - least_exponent) as u16;
        sign | if whole < hidden { whole as u16 } else { ((biased + 1) << fraction_bits) + (whole - hidden) as u16 }
    }
}

fn exponent_of(magnitude: f64) -> i32 {
    (magnitude.to_bits() >> 52) as i32 - 1023
}

fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// Single to this format.
pub(crate) fn from_f32(format: Format, value: f32, mode: Rounding) -> u16 {
    format.round(f64::from(value), mode)
}

/// Double to this format.
pub(crate) fn from_f64(format: Format, value: f64, mode: Rounding) -> u16 {
    format.round(value, mode)
}

fn finish(format: Format, value: f64, flags: u64) -> u16 {
    let value = if flags & SATURATE != 0 { saturate(value) } else { value };
    let value = if flags & RELU != 0 && value < 0.0 { 0.0 } else { value };
    format.round(value, Rounding::Nearest)
}

fn minimum(a: f64, b: f64, propagate: bool) -> f64 {
    if a.is_nan() || b.is_nan() {
        return if propagate || (a.is_nan() && b.is_nan()) {
            f64::NAN
        } else if a.is_nan() {
            b
        } else {
            a
        };
    }
    if a < b || (a == b && a.is_sign_negative()) { a } else { b }
}

/// The instruction's number, as [`select`] puts it into [`Inst::imm`] above the flags.
fn calculate(number: u64, a: f64, b: f64, c: f64) -> f64 {
    match number {
        0 => a + b,
        1 => a - b,
        2 => a * b,
        3 => a.mul_add(b, c),
        4 => minimum(a, b, false),
        5 => -minimum(-a, -b, false),
        6 => minimum(a, b, true),
        7 => -minimum(-a, -b, true),
        8 => -a,
        9 => a.abs(),
        10 => a.exp2(),
        11 => a.tanh(),
        _ => 1.0 / a.sqrt(),
    }
}

const NAMES: &[&str] = &["add", "sub", "mul", "fma", "min", "max", "min.nan", "max.nan", "neg", "abs", "ex2", "tanh"];
const NUMBER_SHIFT: u32 = 16;

fn run<const BRAIN: bool, const PAIR: bool>(w: &mut Core<'_>, i: &Inst) -> Flow {
    let format = if BRAIN { Format::Brain } else { Format::Ieee };
    let number = i.imm >> NUMBER_SHIFT;
    for lane in Lanes(w.active) {
        let sources: [u32; 3] = [w.get(i.a, lane), w.get(i.b, lane), w.get(i.c, lane)];
        let mut out = 0;
        for half in 0..if PAIR { 2 } else { 1 } {
            let [a, b, c] = sources.map(|s| f64::from(format.to_f32((s >> (16 * half)) as u16)));
            out |= u32::from(finish(format, calculate(number, a, b, c), i.imm)) << (16 * half);
        }
        w.put(i.d, lane, out);
    }
    Flow::Next
}

/// The exec of an instruction on this type, and what must be added to [`Inst::imm`]. All three
/// sources must be rows, even if the instruction has fewer.
pub(crate) fn select(name: &str, ty: Type) -> Option<(Exec, u64)> {
    let number = NAMES.iter().position(|&known| known == name)? as u64;
    let exec: Exec = match ty {
        Type::F16 => |w, i| run::<false, false>(w, i),
        Type::F16x2 => |w, i| run::<false, true>(w, i),
        Type::Bf16 => |w, i| run::<true, false>(w, i),
        Type::Bf16x2 => |w, i| run::<true, true>(w, i),
        _ => return None,
    };
    Some((exec, number << NUMBER_SHIFT))
}

/// `cvt.rn.f16x2.f32 d, a, b`: `a` becomes the upper half.
pub(crate) fn pack(ty: Type) -> Option<Exec> {
    fn halves(format: Format, a: f32, b: f32, flags: u64) -> u32 {
        let mode = Rounding::from_bits(flags);
        let one = |value: f32| {
            let value = if flags & RELU != 0 && value < 0.0 { 0.0 } else { value };
            u32::from(from_f32(format, value, mode))
        };
        one(a) << 16 | one(b)
    }
    Some(match ty {
        Type::F16x2 => |w, i| w.map2(i, |a: f32, b: f32| halves(Format::Ieee, a, b, i.imm)),
        Type::Bf16x2 => |w, i| w.map2(i, |a: f32, b: f32| halves(Format::Brain, a, b, i.imm)),
        _ => return None,
    })
}

/// A sum of two numbers, or pairs of numbers, of 16 bits, for atomic additions.
pub(crate) fn add_bits(format: Format, a: u32, b: u32) -> u32 {
    (0..2).fold(0, |out, half| {
        let [a, b] = [a, b].map(|s| f64::from(format.to_f32((s >> (16 * half)) as u16)));
        out | u32::from(format.round(a + b, Rounding::Nearest)) << (16 * half)
    })
}

/// Bitwise negation and absolute value, which do not round; exact for NaN too.
pub(crate) fn sign(name: &str, ty: Type) -> Option<Exec> {
    let pair = matches!(ty, Type::F16x2 | Type::Bf16x2);
    Format::of(ty)?;
    Some(match (name, pair) {
        ("neg", false) => exec!(u32; |a: u32| (a ^ 0x8000) & 0xffff),
        ("neg", true) => exec!(u32; |a: u32| a ^ 0x8000_8000),
        ("abs", false) => exec!(u32; |a: u32| a & 0x7fff),
        ("abs", true) => exec!(u32; |a: u32| a & 0x7fff_7fff),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_comes_back() {
        for format in [Format::Ieee, Format::Brain] {
            for bits in 0..=u16::MAX {
                let value = format.to_f32(bits);
                if !value.is_nan() {
                    assert_eq!(format.round(f64::from(value), Rounding::Nearest), bits);
                }
            }
        }
    }

    #[test]
    fn halves_round_to_even() {
        let ieee = |v: f64| Format::Ieee.round(v, Rounding::Nearest);
        assert_eq!(ieee(2049.0), ieee(2048.0));
        assert_eq!(ieee(2051.0), ieee(2052.0));
        assert_eq!(ieee(65520.0), 0x7c00);
        assert_eq!(ieee(65519.9), 0x7bff);
    }
}
