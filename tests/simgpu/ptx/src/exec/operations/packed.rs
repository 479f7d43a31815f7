//! Pairs of integers of 16 bits, and comparisons whose results are numbers of 16 bits.

use super::half::Format;
use crate::ast::Type;
use crate::exec::machine::{Core, Exec, Flow, Inst, Lanes, exec};

fn pairs(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16 | u32::from(f(a as u16, b as u16))
}

/// `add`, `min` and `max` of pairs of integers; `relu` makes negative results zero.
pub(crate) fn integers(name: &str, signed: bool, relu: bool) -> Option<Exec> {
    fn signed_pairs(a: u32, b: u32, f: impl Fn(i16, i16) -> i16) -> u32 {
        pairs(a, b, |a, b| f(a.cast_signed(), b.cast_signed()).cast_unsigned())
    }
    Some(match (name, signed, relu) {
        ("add", ..) => exec!(u32; |a: u32, b: u32| pairs(a, b, u16::wrapping_add)),
        ("min", false, _) => exec!(u32; |a: u32, b: u32| pairs(a, b, u16::min)),
        ("max", false, _) => exec!(u32; |a: u32, b: u32| pairs(a, b, u16::max)),
        ("min", true, false) => exec!(u32; |a: u32, b: u32| signed_pairs(a, b, i16::min)),
        ("max", true, false) => exec!(u32; |a: u32, b: u32| signed_pairs(a, b, i16::max)),
        ("min", true, true) => exec!(u32; |a: u32, b: u32| signed_pairs(a, b, |a, b| a.min(b).max(0))),
        ("max", true, true) => exec!(u32; |a: u32, b: u32| signed_pairs(a, b, |a, b| a.max(b).max(0))),
        _ => return None,
    })
}

/// `vabsdiff4`: the differences of the bytes of two words, as bytes or, with `add`, their sum added to a third word.
pub(crate) fn differences(signed: bool, add: bool) -> Exec {
    fn each(a: u32, b: u32, signed: bool) -> [u8; 4] {
        let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
        std::array::from_fn(|k| match signed {
            true => a[k].cast_signed().abs_diff(b[k].cast_signed()),
            false => a[k].abs_diff(b[k]),
        })
    }
    fn sum(c: u32, bytes: [u8; 4]) -> u32 {
        bytes.into_iter().fold(c, |sum, byte| sum.wrapping_add(byte.into()))
    }
    match (signed, add) {
        (false, false) => exec!(u32; |a: u32, b: u32, _c: u32| u32::from_le_bytes(each(a, b, false))),
        (true, false) => exec!(u32; |a: u32, b: u32, _c: u32| u32::from_le_bytes(each(a, b, true))),
        (false, true) => exec!(u32; |a: u32, b: u32, c: u32| sum(c, each(a, b, false))),
        (true, true) => exec!(u32; |a: u32, b: u32, c: u32| sum(c, each(a, b, true))),
    }
}

const OPERATORS: &[&str] =
    &["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"];

#[allow(
    clippy::neg_cmp_op_on_partial_ord,
    clippy::double_comparisons,
    reason = "ordered and unordered comparisons differ for NaN"
)]
fn holds(operator: u64, a: f32, b: f32) -> bool {
    match OPERATORS.get(operator as usize).copied().unwrap_or("") {
        "eq" => a == b,
        "ne" => a < b || a > b,
        "lt" => a < b,
        "le" => a <= b,
        "gt" => a > b,
        "ge" => a >= b,
        "equ" => !(a < b || a > b),
        "neu" => a != b,
        "ltu" => !(a >= b),
        "leu" => !(a > b),
        "gtu" => !(a <= b),
        "geu" => !(a < b),
        "num" => !a.is_nan() && !b.is_nan(),
        _ => a.is_nan() || b.is_nan(),
    }
}

const BRAIN: u64 = 1 << 8;
const ONES: u64 = 1 << 9;
const SINGLE: u64 = 1 << 10;

/// The halves for which the comparison holds, for a lane.
fn compare(i: &Inst, a: u32, b: u32) -> [bool; 2] {
    let format = if i.imm & BRAIN != 0 { Format::Brain } else { Format::Ieee };
    let half = |word: u32, k: u32| format.to_f32((word >> (16 * k)) as u16);
    [0, 1].map(|k| holds(i.imm & 0xff, half(a, k), half(b, k)))
}

/// `set` for numbers of 16 bits: its exec, and [`Inst::imm`]. `ones` is for results of all ones
/// instead of 1.0.
pub(crate) fn set(operator: &str, ty: Type, ones: bool) -> Option<(Exec, u64)> {
    let mut imm = OPERATORS.iter().position(|&known| known == operator)? as u64;
    imm |= if Format::of(ty)? == Format::Brain { BRAIN } else { 0 };
    imm |= if ones { ONES } else { 0 };
    imm |= if ty.bytes() == 2 { SINGLE } else { 0 };
    let exec: Exec = |w, i| {
        let one = match (i.imm & ONES != 0, i.imm & BRAIN != 0) {
            (true, _) => 0xffff,
            (false, true) => 0x3f80,
            (false, false) => 0x3c00,
        };
        let single = i.imm & SINGLE != 0;
        w.map2(i, |a: u32, b: u32| {
            let [low, high] = compare(i, a, b).map(|yes| if yes { one } else { 0u32 });
            if single { low } else { high << 16 | low }
        })
    };
    Some((exec, imm))
}

/// `setp` for pairs: predicates `d` and `e` are set for the low and the high half.
pub(crate) fn set_predicates(operator: &str, ty: Type) -> Option<(Exec, u64)> {
    fn run(w: &mut Core<'_>, i: &Inst) -> Flow {
        let (mut low, mut high) = (0, 0);
        for lane in Lanes(w.active) {
            let [l, h] = compare(i, w.get(i.a, lane), w.get(i.b, lane));
            low |= u32::from(l) << lane;
            high |= u32::from(h) << lane;
        }
        w.set_predicate(i.d, low);
        w.set_predicate(i.e, high);
        Flow::Next
    }
    let (_, imm) = set(operator, ty, false)?;
    Some((|w, i| run(w, i), imm))
}
