//! Integer arithmetic, and logic of predicates.

use crate::ast::Type;
use crate::exec::machine::{Exec, Flow, exec};

/// The same closure for each of the unsigned and signed types of 16, 32 and 64 bits.
macro_rules! each_int {
    ($ty:expr, $T:ident => $make:expr) => {
        match $ty {
            Type::U16 | Type::B16 => {
                type $T = u16;
                Some($make)
            }
            Type::S16 => {
                type $T = i16;
                Some($make)
            }
            Type::U32 | Type::B32 => {
                type $T = u32;
                Some($make)
            }
            Type::S32 => {
                type $T = i32;
                Some($make)
            }
            Type::U64 | Type::B64 => {
                type $T = u64;
                Some($make)
            }
            Type::S64 => {
                type $T = i64;
                Some($make)
            }
            _ => None,
        }
    };
}

/// The same closure for the unsigned type of each width, whatever the sign.
macro_rules! each_bits {
    ($ty:expr, $T:ident => $make:expr) => {
        match $ty.bytes() {
            2 => {
                type $T = u16;
                Some($make)
            }
            4 => {
                type $T = u32;
                Some($make)
            }
            8 => {
                type $T = u64;
                Some($make)
            }
            _ => None,
        }
    };
}

pub(super) use each_bits;

/// Instructions with two sources, all of one type.
pub(crate) fn binary(name: &str, ty: Type) -> Option<Exec> {
    match name {
        "add" => each_bits!(ty, T => exec!(T; |a: T, b: T| a.wrapping_add(b))),
        "sub" => each_bits!(ty, T => exec!(T; |a: T, b: T| a.wrapping_sub(b))),
        "mul.lo" => each_bits!(ty, T => exec!(T; |a: T, b: T| a.wrapping_mul(b))),
        "mul.hi" => mul_high(ty),
        "and" => each_bits!(ty, T => exec!(T; |a: T, b: T| a & b)),
        "or" => each_bits!(ty, T => exec!(T; |a: T, b: T| a | b)),
        "xor" => each_bits!(ty, T => exec!(T; |a: T, b: T| a ^ b)),
        "min" => each_int!(ty, T => exec!(T; |a: T, b: T| a.min(b))),
        "max" => each_int!(ty, T => exec!(T; |a: T, b: T| a.max(b))),
        // Division by zero gives all ones, as the hardware does.
        "div" => each_int!(ty, T => exec!(T; |a: T, b: T| {
            if b == 0 { !0 } else { a.wrapping_div(b) }
        })),
        "rem" => each_int!(ty, T => exec!(T; |a: T, b: T| if b == 0 { a } else { a.wrapping_rem(b) })),
        "add.sat" => Some(exec!(i32; |a: i32, b: i32| a.saturating_add(b))),
        "sub.sat" => Some(exec!(i32; |a: i32, b: i32| a.saturating_sub(b))),
        "min.relu" if ty == Type::S32 => Some(exec!(i32; |a: i32, b: i32| a.min(b).max(0))),
        "max.relu" if ty == Type::S32 => Some(exec!(i32; |a: i32, b: i32| a.max(b).max(0))),
        "bmsk.clamp" => Some(exec!(u32; |a: u32, b: u32| mask_clamp(a, b))),
        "bmsk.wrap" => Some(exec!(u32; |a: u32, b: u32| {
            let (a, b) = (a & 31, b & 31);
            ((1u32 << b) - 1) << a
        })),
        "mul24.lo" => match ty {
            Type::S32 => Some(exec!(i32; |a: i32, b: i32| wide24s(a, b) as i32)),
            _ => Some(exec!(u32; |a: u32, b: u32| wide24u(a, b) as u32)),
        },
        "mul24.hi" => match ty {
            Type::S32 => Some(exec!(i32; |a: i32, b: i32| (wide24s(a, b) >> 16) as i32)),
            _ => Some(exec!(u32; |a: u32, b: u32| (wide24u(a, b) >> 16) as u32)),
        },
        _ => None,
    }
}

fn mask_clamp(a: u32, b: u32) -> u32 {
    let ones = if b >= 32 { u32::MAX } else { (1 << b) - 1 };
    if a >= 32 { 0 } else { ones << a }
}

fn wide24s(a: i32, b: i32) -> i64 {
    (i64::from(a) << 40 >> 40) * (i64::from(b) << 40 >> 40)
}

fn wide24u(a: u32, b: u32) -> u64 {
    u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff)
}

fn mul_high(ty: Type) -> Option<Exec> {
    Some(match ty {
        Type::U16 => exec!(u16; |a: u16, b: u16| ((u32::from(a) * u32::from(b)) >> 16) as u16),
        Type::S16 => exec!(i16; |a: i16, b: i16| ((i32::from(a) * i32::from(b)) >> 16) as i16),
        Type::U32 => exec!(u32; |a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        Type::S32 => exec!(i32; |a: i32, b: i32| ((i64::from(a) * i64::from(b)) >> 32) as i32),
        Type::U64 => exec!(u64; |a: u64, b: u64| high_u64(a, b)),
        Type::S64 => exec!(i64; |a: i64, b: i64| high_i64(a, b)),
        _ => return None,
    })
}

pub(super) fn high_u64(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

pub(super) fn high_i64(a: i64, b: i64) -> i64 {
    ((i128::from(a) * i128::from(b)) >> 64) as i64
}

/// `mul.wide`: the destination is twice as wide as the sources.
pub(crate) fn mul_wide(ty: Type) -> Option<Exec> {
    Some(match ty {
        Type::U16 => exec!(u32; |a: u16, b: u16| u32::from(a) * u32::from(b)),
        Type::S16 => exec!(i32; |a: i16, b: i16| i32::from(a) * i32::from(b)),
        Type::U32 => exec!(u64; |a: u32, b: u32| u64::from(a) * u64::from(b)),
        Type::S32 => exec!(i64; |a: i32, b: i32| i64::from(a) * i64::from(b)),
        _ => return None,
    })
}

/// `mad.wide`.
pub(crate) fn mad_wide(ty: Type) -> Option<Exec> {
    Some(match ty {
        Type::U16 => exec!(u32; |a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c)),
        Type::S16 => exec!(i32; |a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c)),
        Type::U32 => exec!(u64; |a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c)),
        Type::S32 => exec!(i64; |a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c)),
        _ => return None,
    })
}

/// Instructions with three sources, all of one type.
pub(crate) fn ternary(name: &str, ty: Type) -> Option<Exec> {
    match name {
        "mad.lo" => each_bits!(ty, T => exec!(T; |a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c))),
        "mad.hi" => Some(match ty {
            Type::U16 => exec!(u16; |a: u16, b: u16, c: u16| {
                (((u32::from(a) * u32::from(b)) >> 16) as u16).wrapping_add(c)
            }),
            Type::S16 => exec!(i16; |a: i16, b: i16, c: i16| {
                (((i32::from(a) * i32::from(b)) >> 16) as i16).wrapping_add(c)
            }),
            Type::U32 => exec!(u32; |a: u32, b: u32, c: u32| {
                (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c)
            }),
            Type::S32 => exec!(i32; |a: i32, b: i32, c: i32| {
                (((i64::from(a) * i64::from(b)) >> 32) as i32).wrapping_add(c)
            }),
            Type::U64 => exec!(u64; |a: u64, b: u64, c: u64| high_u64(a, b).wrapping_add(c)),
            Type::S64 => exec!(i64; |a: i64, b: i64, c: i64| high_i64(a, b).wrapping_add(c)),
            _ => return None,
        }),
        "mad.hi.sat" => Some(exec!(i32; |a: i32, b: i32, c: i32| {
            (((i64::from(a) * i64::from(b)) >> 32) as i32).saturating_add(c)
        })),
        "mad24.lo" => match ty {
            Type::S32 => Some(exec!(i32; |a: i32, b: i32, c: i32| (wide24s(a, b) as i32).wrapping_add(c))),
            _ => Some(exec!(u32; |a: u32, b: u32, c: u32| (wide24u(a, b) as u32).wrapping_add(c))),
        },
        "mad24.hi" => match ty {
            Type::S32 => Some(exec!(i32; |a: i32, b: i32, c: i32| ((wide24s(a, b) >> 16) as i32).wrapping_add(c))),
            _ => Some(exec!(u32; |a: u32, b: u32, c: u32| ((wide24u(a, b) >> 16) as u32).wrapping_add(c))),
        },
        "sad" => each_int!(ty, T => exec!(T; |a: T, b: T, c: T| {
            c.wrapping_add(if a < b { b.wrapping_sub(a) } else { a.wrapping_sub(b) })
        })),
        _ => None,
    }
}

/// Instructions with one source, of the same type.
pub(crate) fn unary(name: &str, ty: Type) -> Option<Exec> {
    match name {
        "not" => each_bits!(ty, T => exec!(T; |a: T| !a)),
        "cnot" => each_bits!(ty, T => exec!(T; |a: T| T::from(a == 0))),
        "neg" => each_bits!(ty, T => exec!(T; |a: T| a.wrapping_neg())),
        "abs" => match ty {
            Type::S16 => Some(exec!(i16; |a: i16| a.wrapping_abs())),
            Type::S32 => Some(exec!(i32; |a: i32| a.wrapping_abs())),
            Type::S64 => Some(exec!(i64; |a: i64| a.wrapping_abs())),
            _ => None,
        },
        "brev" => each_bits!(ty, T => exec!(T; |a: T| a.reverse_bits())),
        _ => None,
    }
}

/// `dp4a` and `dp2a`: dot products of packed bytes.
pub(crate) fn dot(four: bool, high: bool, a_signed: bool, b_signed: bool) -> Exec {
    fn part(word: u32, index: u32, bits: u32, signed: bool) -> i32 {
        let word = word >> (index * bits);
        match (bits, signed) {
            (8, true) => i32::from(word as i8),
            (8, false) => i32::from(word as u8),
            (_, true) => i32::from(word as i16),
            (_, false) => i32::from(word as u16),
        }
    }
    macro_rules! dp4 {
        ($s:expr, $t:expr) => {
            exec!(u32; |a: u32, b: u32, c: u32| {
                (0..4).fold(c, |sum, k| {
                    let product = part(a, k, 8, $s).wrapping_mul(part(b, k, 8, $t));
                    sum.wrapping_add(product.cast_unsigned())
                })
            })
        };
    }
    macro_rules! dp2 {
        ($s:expr, $t:expr, $first:expr) => {
            exec!(u32; |a: u32, b: u32, c: u32| {
                (0..2).fold(c, |sum, k| {
                    let product = part(a, k, 16, $s).wrapping_mul(part(b, $first + k, 8, $t));
                    sum.wrapping_add(product.cast_unsigned())
                })
            })
        };
    }
    match (four, high, a_signed, b_signed) {
        (true, _, true, true) => dp4!(true, true),
        (true, _, true, false) => dp4!(true, false),
        (true, _, false, true) => dp4!(false, true),
        (true, _, false, false) => dp4!(false, false),
        (false, false, true, true) => dp2!(true, true, 0),
        (false, false, true, false) => dp2!(true, false, 0),
        (false, false, false, true) => dp2!(false, true, 0),
        (false, false, false, false) => dp2!(false, false, 0),
        (false, true, true, true) => dp2!(true, true, 2),
        (false, true, true, false) => dp2!(true, false, 2),
        (false, true, false, true) => dp2!(false, true, 2),
        (false, true, false, false) => dp2!(false, false, 2),
    }
}

/// Copies a row, wide or narrow.
pub(crate) fn copy(wide: bool) -> Exec {
    if wide { exec!(u64; |a: u64| a) } else { exec!(u32; |a: u32| a) }
}

/// Logical operations of predicates.
pub(crate) fn predicate_logic(name: &str) -> Option<Exec> {
    Some(match name {
        "and" => |w, i| {
            w.set_predicate(i.d, w.predicate(i.a) & w.predicate(i.b));
            Flow::Next
        },
        "or" => |w, i| {
            w.set_predicate(i.d, w.predicate(i.a) | w.predicate(i.b));
            Flow::Next
        },
        "xor" => |w, i| {
            w.set_predicate(i.d, w.predicate(i.a) ^ w.predicate(i.b));
            Flow::Next
        },
        "not" => |w, i| {
            w.set_predicate(i.d, !w.predicate(i.a));
            Flow::Next
        },
        "mov" => |w, i| {
            w.set_predicate(i.d, w.predicate(i.a));
            Flow::Next
        },
        _ => return None,
    })
}
