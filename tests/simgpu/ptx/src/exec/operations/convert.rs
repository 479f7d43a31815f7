//! `cvt`, comparisons and selections.

use super::float::{FTZ, SATURATE, canonical32, canonical64, flush, saturate};
use super::half::{self, Format};
use super::round::{self, Rounding};
use crate::ast::Type;
use crate::exec::machine::{Core, Exec, Flow, Inst, Lane, Lanes, NO_ROW, Test};

/// Bits of [`Inst::imm`] for conversions: round to a whole number, in the mode of the low bits.
pub(crate) const WHOLE: u64 = 64;
/// The source and destination types, as numbers.
const SOURCE_SHIFT: u32 = 8;
const TARGET_SHIFT: u32 = 16;

macro_rules! integer_cases {
    ($source:expr, $target:expr, $wide:expr; $(($name:ident, $ty:ty)),*) => {
        match $source {
            $(Type::$name => integer_targets!($target, $wide, $ty),)*
            _ => return None,
        }
    };
}

macro_rules! integer_targets {
    ($target:expr, $wide:expr, $from:ty) => {
        match ($target, $wide) {
            // Extended from the target's type to the register's width.
            (Type::U8 | Type::B8, false) => |w, i| w.map1(i, |a: $from| u32::from(a as u8)),
            (Type::S8, false) => |w, i| w.map1(i, |a: $from| i32::from(a as i8)),
            (Type::U16 | Type::B16, false) => |w, i| w.map1(i, |a: $from| u32::from(a as u16)),
            (Type::S16, false) => |w, i| w.map1(i, |a: $from| i32::from(a as i16)),
            (Type::U32 | Type::S32 | Type::B32, false) => |w, i| w.map1(i, |a: $from| a as u32),
            (Type::U8 | Type::B8, true) => |w, i| w.map1(i, |a: $from| u64::from(a as u8)),
            (Type::S8, true) => |w, i| w.map1(i, |a: $from| i64::from(a as i8)),
            (Type::U16 | Type::B16, true) => |w, i| w.map1(i, |a: $from| u64::from(a as u16)),
            (Type::S16, true) => |w, i| w.map1(i, |a: $from| i64::from(a as i16)),
            (Type::U32 | Type::B32, true) => |w, i| w.map1(i, |a: $from| u64::from(a as u32)),
            (Type::S32, true) => |w, i| w.map1(i, |a: $from| i64::from(a as i32)),
            (Type::U64 | Type::S64 | Type::B64, true) => |w, i| w.map1(i, |a: $from| a as u64),
            _ => return None,
        }
    };
}

/// An integer to an integer, without saturation; `wide` tells the destination register's width.
/// A narrow register holds 16 bits or 32, which [`narrow_result`] sorts out.
pub(crate) fn integer(source: Type, target: Type, wide: bool) -> Option<Exec> {
    let exec: Exec = integer_cases!(source, target, wide;
        (U8, u8), (S8, i8), (U16, u16), (S16, i16), (U32, u32), (S32, i32), (U64, u64), (S64, i64),
        (B8, u8), (B16, u16), (B32, u32), (B64, u64));
    Some(exec)
}

/// Puts `a` into a register of 16 bits.
pub(crate) fn narrow_result() -> Exec {
    |w, i| w.map1(i, |a: u32| a as u16)
}

/// A number on its way from one type to another.
#[derive(Clone, Copy)]
enum Number {
    Int(i128),
    Float(f64),
}

fn read(w: &Core<'_>, i: &Inst, ty: Type, lane: usize) -> Number {
    let narrow = || w.get::<u32>(i.a, lane);
    let wide = || w.get::<u64>(i.a, lane);
    match ty {
        Type::U8 | Type::B8 => Number::Int(i128::from(narrow() as u8)),
        Type::S8 => Number::Int(i128::from(narrow() as i8)),
        Type::U16 | Type::B16 => Number::Int(i128::from(narrow() as u16)),
        Type::S16 => Number::Int(i128::from(narrow() as i16)),
        Type::S32 => Number::Int(i128::from(narrow().cast_signed())),
        Type::U64 | Type::B64 => Number::Int(i128::from(wide())),
        Type::S64 => Number::Int(i128::from(wide().cast_signed())),
        Type::F16 => Number::Float(f64::from(Format::Ieee.to_f32(narrow() as u16))),
        Type::Bf16 => Number::Float(f64::from(Format::Brain.to_f32(narrow() as u16))),
        Type::F32 => {
            let value = f32::from_bits(narrow());
            let value = if i.imm & FTZ != 0 { flush(value) } else { value };
            Number::Float(f64::from(value))
        }
        Type::F64 => Number::Float(f64::from_bits(wide())),
        _ => Number::Int(i128::from(narrow())),
    }
}

fn limits(ty: Type) -> (i128, i128) {
    let bits = ty.bytes() * 8;
    if ty.signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

fn to_integer(number: Number, ty: Type, flags: u64) -> u64 {
    let value = match number {
        Number::Int(value) if flags & SATURATE == 0 => value,
        Number::Int(value) => {
            let (low, high) = limits(ty);
            value.clamp(low, high)
        }
        Number::Float(value) if value.is_nan() => {
            if ty.bytes() == 8 {
                1 << 63
            } else {
                0
            }
        }
        Number::Float(value) => {
            let (low, high) = limits(ty);
            // A cast of a double saturates, and no limit is beyond it.
            (Rounding::from_bits(flags).whole(value) as i128).clamp(low, high)
        }
    };
    value as u64
}

fn write(w: &mut Core<'_>, i: &Inst, ty: Type, lane: usize, number: Number) {
    let mode = Rounding::from_bits(i.imm);
    if !ty.float() {
        let bits = to_integer(number, ty, i.imm);
        match ty.bytes() {
            8 => w.put(i.d, lane, bits),
            4 => w.put(i.d, lane, bits as u32),
            // Extended to 32 bits, of which a register of 16 takes its part afterwards.
            2 if ty.signed() => w.put(i.d, lane, i32::from(bits as i16)),
            2 => w.put(i.d, lane, u32::from(bits as u16)),
            _ if ty.signed() => w.put(i.d, lane, i32::from(bits as i8)),
            _ => w.put(i.d, lane, u32::from(bits as u8)),
        }
        return;
    }
    let number = match number {
        Number::Float(value) => {
            let value = if i.imm & WHOLE != 0 { mode.whole(value) } else { value };
            Number::Float(if i.imm & SATURATE != 0 { saturate(value) } else { value })
        }
        int @ Number::Int(_) => int,
    };
    let mode = if i.imm & WHOLE != 0 { Rounding::Nearest } else { mode };
    match (ty, number) {
        (Type::F64, Number::Float(value)) => w.put(i.d, lane, canonical64(value)),
        (Type::F64, Number::Int(value)) => w.put(i.d, lane, round::int_to_f64(value, mode)),
        (Type::F32, Number::Float(value)) => {
            let value = canonical32(round::narrow(value, mode));
            w.put(i.d, lane, if i.imm & FTZ != 0 { flush(value) } else { value });
        }
        (Type::F32, Number::Int(value)) => w.put(i.d, lane, round::int_to_f32(value, mode)),
        (_, number) => {
            let format = Format::of(ty).unwrap_or(Format::Ieee);
            let value = match number {
                Number::Float(value) => value,
                Number::Int(value) => round::int_to_f64(value, Rounding::Zero),
            };
            let value = if i.imm & half::RELU != 0 && value < 0.0 { 0.0 } else { value };
            w.put(i.d, lane, u32::from(half::from_f64(format, value, mode)));
        }
    }
}

const TYPES: &[Type] = &[
    Type::U8,
    Type::S8,
    Type::U16,
    Type::S16,
    Type::U32,
    Type::S32,
    Type::U64,
    Type::S64,
    Type::F16,
    Type::Bf16,
    Type::F32,
    Type::F64,
    Type::B8,
    Type::B16,
    Type::B32,
    Type::B64,
];

fn any(w: &mut Core<'_>, i: &Inst) -> Flow {
    let ty = |shift: u32| TYPES[(i.imm >> shift) as usize & 15];
    let (source, target) = (ty(SOURCE_SHIFT), ty(TARGET_SHIFT));
    for lane in Lanes(w.active) {
        let number = read(w, i, source, lane);
        write(w, i, target, lane, number);
    }
    Flow::Next
}

/// Any conversion, with its flags, and what must be added to [`Inst::imm`]. The destination
/// register must be as wide as the type, or of 32 bits for narrower ones.
pub(crate) fn general(source: Type, target: Type, flags: u64) -> Option<(Exec, u64)> {
    let number = |ty: Type| TYPES.iter().position(|&t| t == ty).map(|p| p as u64);
    let imm = number(source)? << SOURCE_SHIFT | number(target)? << TARGET_SHIFT;
    let nearest = Rounding::from_bits(flags) == Rounding::Nearest;
    // The common ones, without the way through the widest types.
    let exec: Exec = match (source, target) {
        (Type::F32, Type::F64) if flags & !7 == 0 => |w, i| w.map1(i, |a: f32| canonical64(f64::from(a))),
        (Type::F64, Type::F32) if nearest && flags & !7 == 0 => |w, i| w.map1(i, |a: f64| canonical32(a as f32)),
        (Type::S32, Type::F32) if nearest => |w, i| w.map1(i, |a: i32| a as f32),
        (Type::U32, Type::F32) if nearest => |w, i| w.map1(i, |a: u32| a as f32),
        (Type::S32, Type::F64) => |w, i| w.map1(i, |a: i32| f64::from(a)),
        (Type::U32, Type::F64) => |w, i| w.map1(i, |a: u32| f64::from(a)),
        // Casts truncate and saturate; NaN gives 0.
        (Type::F32, Type::S32) if flags == WHOLE | Rounding::Zero as u64 => |w, i| w.map1(i, |a: f32| a as i32),
        (Type::F32, Type::U32) if flags == WHOLE | Rounding::Zero as u64 => |w, i| w.map1(i, |a: f32| a as u32),
        (Type::F64, Type::S32) if flags == WHOLE | Rounding::Zero as u64 => |w, i| w.map1(i, |a: f64| a as i32),
        (Type::F16, Type::F32) if flags & !7 == 0 => |w, i| w.map1(i, |a: u16| canonical32(Format::Ieee.to_f32(a))),
        (Type::Bf16, Type::F32) if flags & !7 == 0 => |w, i| w.map1(i, |a: u16| canonical32(Format::Brain.to_f32(a))),
        _ => |w, i| any(w, i),
    };
    Some((exec, imm))
}

macro_rules! ordered {
    ($name:expr, $ty:ty) => {
        match $name {
            "eq" => |w, i| w.test2(i, |a: $ty, b| a == b),
            "ne" => |w, i| w.test2(i, |a: $ty, b| a != b),
            "lt" | "lo" => |w, i| w.test2(i, |a: $ty, b| a < b),
            "le" | "ls" => |w, i| w.test2(i, |a: $ty, b| a <= b),
            "gt" | "hi" => |w, i| w.test2(i, |a: $ty, b| a > b),
            "ge" | "hs" => |w, i| w.test2(i, |a: $ty, b| a >= b),
            _ => return None,
        }
    };
}

macro_rules! float_test {
    ($name:expr, $ty:ty, $prepare:expr) => {
        match $name {
            "eq" => |w, i| w.test2(i, |a: $ty, b: $ty| $prepare(a) == $prepare(b)),
            "ne" => |w, i| {
                w.test2(i, |a: $ty, b: $ty| {
                    let (a, b) = ($prepare(a), $prepare(b));
                    a < b || a > b
                })
            },
            "lt" => |w, i| w.test2(i, |a: $ty, b: $ty| $prepare(a) < $prepare(b)),
            "le" => |w, i| w.test2(i, |a: $ty, b: $ty| $prepare(a) <= $prepare(b)),
            "gt" => |w, i| w.test2(i, |a: $ty, b: $ty| $prepare(a) > $prepare(b)),
            "ge" => |w, i| w.test2(i, |a: $ty, b: $ty| $prepare(a) >= $prepare(b)),
            "equ" => |w, i| {
                w.test2(i, |a: $ty, b: $ty| {
                    let (a, b) = ($prepare(a), $prepare(b));
                    !(a < b || a > b)
                })
            },
            "neu" => |w, i| w.test2(i, |a: $ty, b: $ty| $prepare(a) != $prepare(b)),
            "ltu" => |w, i| w.test2(i, |a: $ty, b: $ty| !($prepare(a) >= $prepare(b))),
            "leu" => |w, i| w.test2(i, |a: $ty, b: $ty| !($prepare(a) > $prepare(b))),
            "gtu" => |w, i| w.test2(i, |a: $ty, b: $ty| !($prepare(a) <= $prepare(b))),
            "geu" => |w, i| w.test2(i, |a: $ty, b: $ty| !($prepare(a) < $prepare(b))),
            "num" => |w, i| w.test2(i, |a: $ty, b: $ty| !a.is_nan() && !b.is_nan()),
            "nan" => |w, i| w.test2(i, |a: $ty, b: $ty| a.is_nan() || b.is_nan()),
            _ => return None,
        }
    };
}

/// A half as a lane: read only.
#[derive(Clone, Copy)]
struct HalfLane<const BRAIN: bool>(u16);

// SAFETY: one word is touched.
unsafe impl<const BRAIN: bool> Lane for HalfLane<BRAIN> {
    const WIDE: bool = false;
    unsafe fn get(row: *const u32, lane: usize) -> Self {
        // SAFETY: the caller vouches for the row.
        HalfLane(unsafe { *row.add(lane) } as u16)
    }
    unsafe fn put(row: *mut u32, lane: usize, value: Self) {
        // SAFETY: the caller vouches for the row.
        unsafe { *row.add(lane) = u32::from(value.0) }
    }
}

impl<const BRAIN: bool> HalfLane<BRAIN> {
    fn value(self) -> f32 {
        if BRAIN { Format::Brain.to_f32(self.0) } else { Format::Ieee.to_f32(self.0) }
    }
    fn is_nan(self) -> bool {
        self.value().is_nan()
    }
}

/// The test of a comparison operator for a type.
#[allow(
    clippy::neg_cmp_op_on_partial_ord,
    clippy::double_comparisons,
    reason = "ordered and unordered comparisons differ for NaN"
)]
pub(crate) fn test(name: &str, ty: Type, ftz: bool) -> Option<Test> {
    Some(match ty {
        Type::U8 | Type::B8 => ordered!(name, u8),
        Type::S8 => ordered!(name, i8),
        Type::U16 | Type::B16 => ordered!(name, u16),
        Type::S16 => ordered!(name, i16),
        Type::U32 | Type::B32 => ordered!(name, u32),
        Type::S32 => ordered!(name, i32),
        Type::U64 | Type::B64 => ordered!(name, u64),
        Type::S64 => ordered!(name, i64),
        Type::F32 if ftz => float_test!(name, f32, flush),
        Type::F32 => float_test!(name, f32, std::convert::identity),
        Type::F64 => float_test!(name, f64, std::convert::identity),
        Type::F16 => float_test!(name, HalfLane<false>, HalfLane::<false>::value),
        Type::Bf16 => float_test!(name, HalfLane<true>, HalfLane::<true>::value),
        _ => return None,
    })
}

/// Bits of [`Inst::imm`] for comparisons: how the result is combined with predicate `c`.
pub(crate) const AND: u64 = 1;
pub(crate) const OR: u64 = 2;
pub(crate) const XOR: u64 = 3;
/// `c` is negated.
pub(crate) const NEGATE: u64 = 4;
/// The destination is a register that becomes all ones, or 1.0.
pub(crate) const SET_ONES: u64 = 8;
pub(crate) const SET_FLOAT: u64 = 16;

/// `setp` and `set`.
#[inline(always)]
pub(crate) fn compare(w: &mut Core<'_>, i: &Inst, test: Test) {
    let holds = test(w, i);
    if i.imm == 0 && i.e == NO_ROW {
        return w.set_predicate(i.d, holds);
    }
    let other =
        if i.imm & 3 == 0 { u32::MAX } else { w.predicate(i.c) ^ if i.imm & NEGATE != 0 { u32::MAX } else { 0 } };
    let combine = |holds: u32| match i.imm & 3 {
        OR => holds | other,
        XOR => holds ^ other,
        _ => holds & other,
    };
    let result = combine(holds);
    if i.imm & (SET_ONES | SET_FLOAT) != 0 {
        let yes = if i.imm & SET_ONES != 0 { u32::MAX } else { 1.0f32.to_bits() };
        for lane in Lanes(w.active) {
            w.put(i.d, lane, if result >> lane & 1 != 0 { yes } else { 0 });
        }
        return;
    }
    let opposite = combine(!holds & w.active);
    if i.d != NO_ROW {
        w.set_predicate(i.d, result);
    }
    if i.e != NO_ROW {
        w.set_predicate(i.e, opposite);
    }
}

/// `selp`: row `c` is a predicate.
pub(crate) fn select(wide: bool) -> Exec {
    fn choose<T: Lane>(w: &mut Core<'_>, i: &Inst) -> Flow {
        let chosen = w.predicate(i.c);
        for lane in Lanes(w.active) {
            let from = if chosen >> lane & 1 != 0 { i.a } else { i.b };
            let value: T = w.get(from, lane);
            w.put(i.d, lane, value);
        }
        Flow::Next
    }
    if wide { |w, i| choose::<u64>(w, i) } else { |w, i| choose::<u32>(w, i) }
}

/// `slct`: `a` if `c >= 0`, else `b`. `float` tells the type of `c`.
pub(crate) fn select_by_sign(wide: bool, float: bool) -> Exec {
    match (wide, float) {
        (false, false) => |w, i| w.map3(i, |a: u32, b: u32, c: i32| if c >= 0 { a } else { b }),
        (false, true) => |w, i| w.map3(i, |a: u32, b: u32, c: f32| if c >= 0.0 { a } else { b }),
        (true, false) => |w, i| w.map3(i, |a: u64, b: u64, c: i32| if c >= 0 { a } else { b }),
        (true, true) => |w, i| w.map3(i, |a: u64, b: u64, c: f32| if c >= 0.0 { a } else { b }),
    }
}
