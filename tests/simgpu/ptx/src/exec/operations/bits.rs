//! Instructions on bits: counts, shifts, fields, permutations.

use super::int::each_bits;
use crate::ast::Type;
use crate::exec::machine::{Exec, exec};

/// Instructions that count or find bits; the destination has 32.
pub(crate) fn count(name: &str, ty: Type) -> Option<Exec> {
    const NONE: u32 = u32::MAX;
    Some(match (name, ty) {
        ("popc", Type::B32) => exec!(u32; |a: u32| a.count_ones()),
        ("popc", Type::B64) => exec!(u32; |a: u64| a.count_ones()),
        ("clz", Type::B32) => exec!(u32; |a: u32| a.leading_zeros()),
        ("clz", Type::B64) => exec!(u32; |a: u64| a.leading_zeros()),
        ("bfind", Type::U32) => exec!(u32; |a: u32| a.checked_ilog2().unwrap_or(NONE)),
        ("bfind", Type::U64) => exec!(u32; |a: u64| a.checked_ilog2().unwrap_or(NONE)),
        ("bfind", Type::S32) => exec!(u32; |a: i32| {
            (a ^ (a >> 31)).cast_unsigned().checked_ilog2().unwrap_or(NONE)
        }),
        ("bfind", Type::S64) => exec!(u32; |a: i64| {
            (a ^ (a >> 63)).cast_unsigned().checked_ilog2().unwrap_or(NONE)
        }),
        ("bfind.shiftamt", Type::U32) => exec!(u32; |a: u32| if a == 0 { NONE } else { a.leading_zeros() }),
        ("bfind.shiftamt", Type::U64) => exec!(u32; |a: u64| if a == 0 { NONE } else { a.leading_zeros() }),
        ("bfind.shiftamt", Type::S32) => exec!(u32; |a: i32| {
            let a = a ^ (a >> 31);
            if a == 0 { NONE } else { a.leading_zeros() }
        }),
        ("bfind.shiftamt", Type::S64) => exec!(u32; |a: i64| {
            let a = a ^ (a >> 63);
            if a == 0 { NONE } else { a.leading_zeros() }
        }),
        _ => return None,
    })
}

/// `shl` and `shr`: the count has 32 bits and is clamped to the width.
pub(crate) fn shift(name: &str, ty: Type) -> Option<Exec> {
    Some(match (name, ty) {
        ("shl", _) => {
            return each_bits!(ty, T => exec!(T; |a: T, b: u32| a.checked_shl(b).unwrap_or(0)));
        }
        ("shr", Type::S16) => exec!(i16; |a: i16, b: u32| a >> b.min(15)),
        ("shr", Type::S32) => exec!(i32; |a: i32, b: u32| a >> b.min(31)),
        ("shr", Type::S64) => exec!(i64; |a: i64, b: u32| a >> b.min(63)),
        ("shr", _) => {
            return each_bits!(ty, T => exec!(T; |a: T, b: u32| a.checked_shr(b).unwrap_or(0)));
        }
        _ => return None,
    })
}

/// `shf`: a funnel shift of two words.
pub(crate) fn funnel(left: bool, clamp: bool) -> Exec {
    fn both(a: u32, b: u32) -> u64 {
        u64::from(b) << 32 | u64::from(a)
    }
    match (left, clamp) {
        (true, false) => exec!(u32; |a: u32, b: u32, c: u32| ((both(a, b) << (c & 31)) >> 32) as u32),
        (true, true) => exec!(u32; |a: u32, b: u32, c: u32| ((both(a, b) << c.min(32)) >> 32) as u32),
        (false, false) => exec!(u32; |a: u32, b: u32, c: u32| (both(a, b) >> (c & 31)) as u32),
        (false, true) => exec!(u32; |a: u32, b: u32, c: u32| (both(a, b) >> c.min(32)) as u32),
    }
}

/// `bfe`: position and length have 32 bits, of which eight count.
pub(crate) fn extract(ty: Type) -> Option<Exec> {
    Some(match ty {
        Type::U32 => exec!(u32; |a: u32, b: u32, c: u32| {
            extract_bits(u64::from(a), b, c, 32, false) as u32
        }),
        Type::S32 => exec!(u32; |a: i32, b: u32, c: u32| {
            extract_bits(i64::from(a).cast_unsigned(), b, c, 32, true) as u32
        }),
        Type::U64 => exec!(u64; |a: u64, b: u32, c: u32| extract_bits(a, b, c, 64, false)),
        Type::S64 => exec!(u64; |a: u64, b: u32, c: u32| extract_bits(a, b, c, 64, true)),
        _ => return None,
    })
}

fn extract_bits(a: u64, position: u32, length: u32, width: u32, signed: bool) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if length == 0 {
        return 0;
    }
    // The sign is the field's highest bit that the value has.
    let top = (position + length - 1).min(width - 1);
    let sign = signed && a >> top & 1 != 0;
    let field = a.checked_shr(position).filter(|_| position < width).unwrap_or(0);
    let kept = length.min(width.saturating_sub(position));
    let mask = if kept >= 64 { u64::MAX } else { (1 << kept) - 1 };
    let fill = if sign { !mask } else { 0 };
    field & mask | fill
}

/// `bfi`: inserts `a` into `b` at `c`, `e` bits long.
pub(crate) fn insert(ty: Type) -> Option<Exec> {
    Some(match ty {
        Type::B32 => exec!(u32; |a: u32, b: u32, c: u32, e: u32| {
            insert_bits(u64::from(a), u64::from(b), c, e, 32) as u32
        }),
        Type::B64 => exec!(u64; |a: u64, b: u64, c: u32, e: u32| insert_bits(a, b, c, e, 64)),
        _ => return None,
    })
}

fn insert_bits(a: u64, b: u64, position: u32, length: u32, width: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if position >= width {
        return b;
    }
    let ones = if length >= 64 { u64::MAX } else { (1 << length) - 1 };
    let mask = ones << position;
    b & !mask | a << position & mask
}

/// `lop3`: any function of three bits; row `e` is a constant that holds its table.
pub(crate) fn lop3() -> Exec {
    exec!(u32; |a: u32, b: u32, c: u32, table: u32| {
        let mut out = 0;
        for (bit, (x, y, z)) in [
            (!a, !b, !c), (!a, !b, c), (!a, b, !c), (!a, b, c),
            (a, !b, !c), (a, !b, c), (a, b, !c), (a, b, c),
        ].into_iter().enumerate() {
            if table >> bit & 1 != 0 {
                out |= x & y & z;
            }
        }
        out
    })
}

/// `lop3` with the tables that compilers like best.
pub(crate) fn lop3_common(table: u8) -> Option<Exec> {
    Some(match table {
        0x96 => exec!(u32; |a: u32, b: u32, c: u32| a ^ b ^ c),
        0xe8 => exec!(u32; |a: u32, b: u32, c: u32| a & b | a & c | b & c),
        0xca => exec!(u32; |a: u32, b: u32, c: u32| a & b | !a & c),
        0xf8 => exec!(u32; |a: u32, b: u32, c: u32| a | b & c),
        0x80 => exec!(u32; |a: u32, b: u32, c: u32| a & b & c),
        0xfe => exec!(u32; |a: u32, b: u32, c: u32| a | b | c),
        _ => return None,
    })
}

/// `szext`: extends the low `b` bits of `a`.
pub(crate) fn szext(clamp: bool, signed: bool) -> Exec {
    fn low(a: u32, bits: u32, signed: bool) -> u32 {
        match (bits, signed) {
            (0, _) => 0,
            (32.., _) => a,
            (_, false) => a & ((1 << bits) - 1),
            (_, true) => (a.cast_signed() << (32 - bits) >> (32 - bits)).cast_unsigned(),
        }
    }
    match (clamp, signed) {
        (true, true) => exec!(u32; |a: u32, b: u32| low(a, b, true)),
        (true, false) => exec!(u32; |a: u32, b: u32| low(a, b, false)),
        (false, true) => exec!(u32; |a: u32, b: u32| low(a, b & 31, true)),
        (false, false) => exec!(u32; |a: u32, b: u32| low(a, b & 31, false)),
    }
}

/// `fns`: the position of the `c`-th set bit of `a` from bit `b` on, upwards or downwards.
pub(crate) fn find_nth() -> Exec {
    exec!(u32; |a: u32, b: u32, c: i32| {
        let base = b & 31;
        let mut left = c.unsigned_abs();
        if left == 0 {
            return if a >> base & 1 != 0 { base } else { u32::MAX };
        }
        let mut at = base.cast_signed();
        while (0..32).contains(&at) {
            if a >> at & 1 != 0 {
                left -= 1;
                if left == 0 {
                    return at.cast_unsigned();
                }
            }
            at += c.signum();
        }
        u32::MAX
    })
}

/// `prmt` in each of its modes.
pub(crate) fn permute(mode: Option<&str>) -> Option<Exec> {
    fn byte(pair: u64, index: u32) -> u32 {
        (pair >> (8 * (index & 7))) as u32 & 0xff
    }
    fn pick(a: u32, b: u32, choose: impl Fn(u32) -> u32) -> u32 {
        let pair = u64::from(b) << 32 | u64::from(a);
        (0..4).fold(0, |out, k| out | byte(pair, choose(k)) << (8 * k))
    }
    Some(match mode {
        None => exec!(u32; |a: u32, b: u32, c: u32| {
            let pair = u64::from(b) << 32 | u64::from(a);
            (0..4).fold(0, |out, k| {
                let select = c >> (4 * k);
                let value = byte(pair, select);
                // The selector's high bit copies the byte's sign into all of it.
                let value = if select & 8 == 0 { value } else { (value >> 7) * 0xff };
                out | value << (8 * k)
            })
        }),
        Some("f4e") => exec!(u32; |a: u32, b: u32, c: u32| pick(a, b, |k| k + (c & 3))),
        Some("b4e") => exec!(u32; |a: u32, b: u32, c: u32| pick(a, b, |k| (c & 3).wrapping_sub(k))),
        Some("rc8") => exec!(u32; |a: u32, b: u32, c: u32| pick(a, b, |_| c & 3)),
        Some("ecl") => exec!(u32; |a: u32, b: u32, c: u32| pick(a, b, |k| k.max(c & 3))),
        Some("ecr") => exec!(u32; |a: u32, b: u32, c: u32| pick(a, b, |k| k.min(c & 3))),
        Some("rc16") => exec!(u32; |a: u32, b: u32, c: u32| pick(a, b, |k| (c & 1) * 2 + (k & 1))),
        Some(_) => return None,
    })
}
