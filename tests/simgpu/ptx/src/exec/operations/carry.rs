//! Arithmetic with the carry flag, which wide numbers need.
//!
//! A subtraction adds the complement, as the hardware does: it leaves the flag set where there was no borrow. The manual speaks
//! of a borrow, but compilers read the flag of a subtraction with an addition.

use super::int::{high_i64, high_u64};
use crate::ast::Type;
use crate::exec::machine::{Core, Exec, Flow, Inst, Lanes};

/// The variant of an instruction with the carry flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Carry {
    /// Whether the flag is added.
    pub(crate) carry_in: bool,
    /// Whether the flag is set.
    pub(crate) carry_out: bool,
}

/// The instructions that add or subtract with the carry flag, which is the predicate in the low
/// half of `imm`. `product` maps `a`, `b` to what `c` is added to.
fn carried<const BITS: u32>(
    w: &mut Core<'_>,
    i: &Inst,
    carry: Carry,
    term: impl Fn(&Core<'_>, usize) -> (u64, u64, bool),
) -> Flow {
    let flag = i.imm as u32;
    let before = w.predicate(flag);
    let mut after = before;
    for lane in Lanes(w.active) {
        let (a, b, subtract) = term(w, lane);
        let carry_in = if carry.carry_in { before >> lane & 1 != 0 } else { subtract };
        let b = if subtract { !b & u64::MAX >> (64 - BITS) } else { b };
        let sum = u128::from(a) + u128::from(b) + u128::from(carry_in);
        let out = sum >> BITS & 1 != 0;
        after = after & !(1 << lane) | u32::from(out) << lane;
        if BITS == 32 {
            w.put(i.d, lane, sum as u32);
        } else {
            w.put(i.d, lane, sum as u64);
        }
    }
    if carry.carry_out {
        w.set_predicate(flag, after);
    }
    Flow::Next
}

/// `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc` and `madc`; `name` is `add`, `sub`, `mad.lo` or
/// `mad.hi`.
pub(crate) fn with_carry(name: &str, ty: Type, carry: Carry) -> Option<Exec> {
    macro_rules! variants {
        ($bits:expr, $term:expr) => {{
            let exec: Exec = match (carry.carry_in, carry.carry_out) {
                (false, _) => |w, i| {
                    carried::<$bits>(w, i, Carry { carry_in: false, carry_out: true }, |w, lane| $term(w, i, lane))
                },
                (true, false) => |w, i| {
                    carried::<$bits>(w, i, Carry { carry_in: true, carry_out: false }, |w, lane| $term(w, i, lane))
                },
                (true, true) => |w, i| {
                    carried::<$bits>(w, i, Carry { carry_in: true, carry_out: true }, |w, lane| $term(w, i, lane))
                },
            };
            exec
        }};
    }
    fn ab(w: &Core<'_>, i: &Inst, lane: usize, wide: bool) -> (u64, u64) {
        if wide {
            (w.get(i.a, lane), w.get(i.b, lane))
        } else {
            (u64::from(w.get::<u32>(i.a, lane)), u64::from(w.get::<u32>(i.b, lane)))
        }
    }
    fn sum<const WIDE: bool, const SUBTRACT: bool>(w: &Core<'_>, i: &Inst, lane: usize) -> (u64, u64, bool) {
        let (a, b) = ab(w, i, lane, WIDE);
        (a, b, SUBTRACT)
    }
    fn product<const WIDE: bool, const HIGH: bool, const SIGNED: bool>(
        w: &Core<'_>,
        i: &Inst,
        lane: usize,
    ) -> (u64, u64, bool) {
        let (a, b) = ab(w, i, lane, WIDE);
        let c = if WIDE { w.get(i.c, lane) } else { u64::from(w.get::<u32>(i.c, lane)) };
        let high = match (WIDE, SIGNED) {
            (true, false) => high_u64(a, b),
            (true, true) => high_i64(a.cast_signed(), b.cast_signed()).cast_unsigned(),
            (false, false) => (a * b) >> 32,
            (false, true) => {
                let wide = i64::from(a as i32) * i64::from(b as i32);
                (wide >> 32).cast_unsigned() & 0xffff_ffff
            }
        };
        let low = if WIDE { a.wrapping_mul(b) } else { a.wrapping_mul(b) & 0xffff_ffff };
        (if HIGH { high } else { low }, c, false)
    }
    Some(match (name, ty.bytes(), ty.signed()) {
        ("add", 4, _) => variants!(32, sum::<false, false>),
        ("add", 8, _) => variants!(64, sum::<true, false>),
        ("sub", 4, _) => variants!(32, sum::<false, true>),
        ("sub", 8, _) => variants!(64, sum::<true, true>),
        ("mad.lo", 4, _) => variants!(32, product::<false, false, false>),
        ("mad.lo", 8, _) => variants!(64, product::<true, false, false>),
        ("mad.hi", 4, false) => variants!(32, product::<false, true, false>),
        ("mad.hi", 4, true) => variants!(32, product::<false, true, true>),
        ("mad.hi", 8, false) => variants!(64, product::<true, true, false>),
        ("mad.hi", 8, true) => variants!(64, product::<true, true, true>),
        _ => return None,
    })
}
