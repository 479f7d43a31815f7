//! Floating point instructions of 32 and 64 bits.

use super::round::{self, Rounding};
use crate::ast::Type;
use crate::exec::machine::{Core, Exec, Flow, Inst, exec};

/// Bits of [`Inst::imm`] for floating point instructions, above the rounding mode's three.
pub(crate) const FTZ: u64 = 8;
/// Keeps results within 0 and 1.
pub(crate) const SATURATE: u64 = 16;

/// Replaces NaN by the only NaN that single precision arithmetic gives.
#[inline(always)]
pub(crate) fn canonical32(value: f32) -> f32 {
    if value.is_nan() { f32::from_bits(0x7fff_ffff) } else { value }
}

#[inline(always)]
pub(crate) fn canonical64(value: f64) -> f64 {
    if value.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { value }
}

/// Replaces a subnormal number by a zero of its sign.
#[inline(always)]
pub(crate) fn flush(value: f32) -> f32 {
    if value.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(value) } else { value }
}

#[inline(always)]
fn flush_if(value: f32, flags: u64) -> f32 {
    if flags & FTZ != 0 { flush(value) } else { value }
}

#[inline(always)]
pub(crate) fn finish32(value: f32, flags: u64) -> f32 {
    let value = canonical32(flush_if(value, flags));
    if flags & SATURATE != 0 { saturate(f64::from(value)) as f32 } else { value }
}

#[inline(always)]
fn finish64(value: f64, flags: u64) -> f64 {
    let value = canonical64(value);
    if flags & SATURATE != 0 { saturate(value) } else { value }
}

/// Keeps a number within 0 and 1; NaN and the negative zero become the positive one.
#[inline(always)]
pub(crate) fn saturate(value: f64) -> f64 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// An exec for singles that looks at its flags.
macro_rules! single {
    (|$a:ident, $mode:ident| $body:expr) => {{
        let f: Exec = |w, i| {
            let (flags, $mode) = (i.imm, Rounding::from_bits(i.imm));
            w.map1(i, |$a: f32| {
                let $a = flush_if($a, flags);
                let _ = $mode;
                finish32($body, flags)
            })
        };
        f
    }};
    (|$a:ident, $b:ident, $mode:ident| $body:expr) => {{
        let f: Exec = |w, i| {
            let (flags, $mode) = (i.imm, Rounding::from_bits(i.imm));
            w.map2(i, |$a: f32, $b: f32| {
                let ($a, $b) = (flush_if($a, flags), flush_if($b, flags));
                let _ = $mode;
                finish32($body, flags)
            })
        };
        f
    }};
    (|$a:ident, $b:ident, $c:ident, $mode:ident| $body:expr) => {{
        let f: Exec = |w, i| {
            let (flags, $mode) = (i.imm, Rounding::from_bits(i.imm));
            w.map3(i, |$a: f32, $b: f32, $c: f32| {
                let ($a, $b, $c) = (flush_if($a, flags), flush_if($b, flags), flush_if($c, flags));
                let _ = $mode;
                finish32($body, flags)
            })
        };
        f
    }};
}

/// An exec for doubles that looks at its flags.
macro_rules! double {
    (|$a:ident, $mode:ident| $body:expr) => {{
        let f: Exec = |w, i| {
            let (flags, $mode) = (i.imm, Rounding::from_bits(i.imm));
            w.map1(i, |$a: f64| {
                let _ = $mode;
                finish64($body, flags)
            })
        };
        f
    }};
    (|$a:ident, $b:ident, $mode:ident| $body:expr) => {{
        let f: Exec = |w, i| {
            let (flags, $mode) = (i.imm, Rounding::from_bits(i.imm));
            w.map2(i, |$a: f64, $b: f64| {
                let _ = $mode;
                finish64($body, flags)
            })
        };
        f
    }};
    (|$a:ident, $b:ident, $c:ident, $mode:ident| $body:expr) => {{
        let f: Exec = |w, i| {
            let (flags, $mode) = (i.imm, Rounding::from_bits(i.imm));
            w.map3(i, |$a: f64, $b: f64, $c: f64| {
                let _ = $mode;
                finish64($body, flags)
            })
        };
        f
    }};
}

/// A multiply-add loop compiled for processors that have the instruction; elsewhere it would be a
/// call of the C library for each lane.
#[cfg(target_arch = "x86_64")]
mod fused {
    use super::{Core, Exec, Flow, Inst, canonical32, canonical64, flush};

    #[target_feature(enable = "avx2,fma")]
    fn f32_plain(w: &mut Core<'_>, i: &Inst) -> Flow {
        w.map3(i, |a: f32, b: f32, c: f32| canonical32(a.mul_add(b, c)))
    }

    #[target_feature(enable = "avx2,fma")]
    fn f32_flush(w: &mut Core<'_>, i: &Inst) -> Flow {
        w.map3(i, |a: f32, b: f32, c: f32| canonical32(flush(flush(a).mul_add(flush(b), flush(c)))))
    }

    #[target_feature(enable = "avx2,fma")]
    fn f64_plain(w: &mut Core<'_>, i: &Inst) -> Flow {
        w.map3(i, |a: f64, b: f64, c: f64| canonical64(a.mul_add(b, c)))
    }

    /// The exec for singles or doubles, if this processor can.
    pub(super) fn select(double: bool, ftz: bool) -> Option<Exec> {
        if !(is_x86_feature_detected!("fma") && is_x86_feature_detected!("avx2")) {
            return None;
        }
        Some(match (double, ftz) {
            // SAFETY: the features were found just above.
            (true, _) => |w, i| unsafe { f64_plain(w, i) },
            // SAFETY: as above.
            (false, false) => |w, i| unsafe { f32_plain(w, i) },
            // SAFETY: as above.
            (false, true) => |w, i| unsafe { f32_flush(w, i) },
        })
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod fused {
    pub(super) fn select(_double: bool, _ftz: bool) -> Option<super::Exec> {
        None
    }
}

/// `add`, `sub`, `mul`, `div`, `min`, `max` and their variants; flags are in [`Inst::imm`].
pub(crate) fn binary(name: &str, ty: Type, flags: u64) -> Option<Exec> {
    let plain = flags == Rounding::Nearest as u64;
    let nearest = Rounding::from_bits(flags) == Rounding::Nearest;
    Some(match (name, ty) {
        ("add", Type::F32) if plain => exec!(f32; |a: f32, b: f32| canonical32(a + b)),
        ("sub", Type::F32) if plain => exec!(f32; |a: f32, b: f32| canonical32(a - b)),
        ("mul", Type::F32) if plain => exec!(f32; |a: f32, b: f32| canonical32(a * b)),
        ("add", Type::F64) if plain => exec!(f64; |a: f64, b: f64| canonical64(a + b)),
        ("sub", Type::F64) if plain => exec!(f64; |a: f64, b: f64| canonical64(a - b)),
        ("mul", Type::F64) if plain => exec!(f64; |a: f64, b: f64| canonical64(a * b)),
        ("add", Type::F32) if nearest => single!(|a, b, mode| a + b),
        ("sub", Type::F32) if nearest => single!(|a, b, mode| a - b),
        ("mul", Type::F32) if nearest => single!(|a, b, mode| a * b),
        ("add", Type::F32) => single!(|a, b, mode| round::add32(a, b, mode)),
        ("sub", Type::F32) => single!(|a, b, mode| round::add32(a, -b, mode)),
        ("mul", Type::F32) => single!(|a, b, mode| round::mul32(a, b, mode)),
        ("add", Type::F64) => double!(|a, b, mode| round::add64(a, b, mode)),
        ("sub", Type::F64) => double!(|a, b, mode| round::add64(a, -b, mode)),
        ("mul", Type::F64) => double!(|a, b, mode| round::mul64(a, b, mode)),
        ("div", Type::F32) if nearest => single!(|a, b, mode| a / b),
        ("div", Type::F32) => single!(|a, b, mode| round::div32(a, b, mode)),
        ("div", Type::F64) if nearest => double!(|a, b, mode| a / b),
        ("div", Type::F64) => double!(|a, b, mode| round::div64(a, b, mode)),
        ("min", Type::F32) => single!(|a, b, mode| min32(a, b)),
        ("max", Type::F32) => single!(|a, b, mode| -min32(-a, -b)),
        ("min.nan", Type::F32) => single!(|a, b, mode| if a.is_nan() {
            a
        } else if b.is_nan() {
            b
        } else {
            min32(a, b)
        }),
        ("max.nan", Type::F32) => single!(|a, b, mode| if a.is_nan() {
            a
        } else if b.is_nan() {
            b
        } else {
            -min32(-a, -b)
        }),
        ("min", Type::F64) => double!(|a, b, mode| min64(a, b)),
        ("max", Type::F64) => double!(|a, b, mode| -min64(-a, -b)),
        ("copysign", Type::F32) => exec!(f32; |a: f32, b: f32| b.copysign(a)),
        ("copysign", Type::F64) => exec!(f64; |a: f64, b: f64| b.copysign(a)),
        _ => return None,
    })
}

/// The smaller one; a number rather than NaN; a negative zero rather than a positive one.
fn min32(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

fn min64(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

/// `fma` and `mad`.
pub(crate) fn fused_multiply_add(ty: Type, flags: u64) -> Option<Exec> {
    let nearest = Rounding::from_bits(flags) == Rounding::Nearest;
    if nearest
        && flags & SATURATE == 0
        && let Some(exec) = fused::select(ty == Type::F64, flags & FTZ != 0)
    {
        return Some(exec);
    }
    Some(match ty {
        Type::F32 if nearest => single!(|a, b, c, mode| a.mul_add(b, c)),
        Type::F32 => single!(|a, b, c, mode| round::fma32(a, b, c, mode)),
        Type::F64 => double!(|a, b, c, mode| round::fma64(a, b, c, mode)),
        _ => return None,
    })
}

/// Instructions with one source.
pub(crate) fn unary(name: &str, ty: Type, flags: u64) -> Option<Exec> {
    let nearest = Rounding::from_bits(flags) == Rounding::Nearest;
    Some(match (name, ty) {
        ("neg", Type::F32) if flags & FTZ == 0 => exec!(f32; |a: f32| -a),
        ("abs", Type::F32) if flags & FTZ == 0 => exec!(f32; |a: f32| a.abs()),
        ("neg", Type::F32) => exec!(f32; |a: f32| -flush(a)),
        ("abs", Type::F32) => exec!(f32; |a: f32| flush(a).abs()),
        ("neg", Type::F64) => exec!(f64; |a: f64| -a),
        ("abs", Type::F64) => exec!(f64; |a: f64| a.abs()),
        ("rcp", Type::F32) if nearest => single!(|a, mode| 1.0 / a),
        ("rcp", Type::F32) => single!(|a, mode| round::div32(1.0, a, mode)),
        ("rcp", Type::F64) if nearest => double!(|a, mode| 1.0 / a),
        ("rcp", Type::F64) => double!(|a, mode| round::div64(1.0, a, mode)),
        ("sqrt", Type::F32) if nearest => single!(|a, mode| a.sqrt()),
        ("sqrt", Type::F32) => single!(|a, mode| round::sqrt32(a, mode)),
        ("sqrt", Type::F64) if nearest => double!(|a, mode| a.sqrt()),
        ("sqrt", Type::F64) => double!(|a, mode| round::sqrt64(a, mode)),
        // The approximations of these instructions are as good as the host's functions.
        ("rsqrt", Type::F32) => single!(|a, mode| (1.0 / f64::from(a).sqrt()) as f32),
        ("rsqrt", Type::F64) => double!(|a, mode| 1.0 / a.sqrt()),
        ("sin", Type::F32) => single!(|a, mode| f64::from(a).sin() as f32),
        ("cos", Type::F32) => single!(|a, mode| f64::from(a).cos() as f32),
        ("lg2", Type::F32) => single!(|a, mode| f64::from(a).log2() as f32),
        ("ex2", Type::F32) => single!(|a, mode| f64::from(a).exp2() as f32),
        ("tanh", Type::F32) => single!(|a, mode| f64::from(a).tanh() as f32),
        _ => return None,
    })
}

/// `testp`.
pub(crate) fn test(name: &str, ty: Type) -> Option<Exec> {
    macro_rules! tests {
        ($f:ident) => {
            match name {
                "finite" => |w, i| {
                    let p = w.test1(i, |a: $f| a.is_finite());
                    w.set_predicate(i.d, p);
                    Flow::Next
                },
                "infinite" => |w, i| {
                    let p = w.test1(i, |a: $f| a.is_infinite());
                    w.set_predicate(i.d, p);
                    Flow::Next
                },
                "number" => |w, i| {
                    let p = w.test1(i, |a: $f| !a.is_nan());
                    w.set_predicate(i.d, p);
                    Flow::Next
                },
                "notanumber" => |w, i| {
                    let p = w.test1(i, |a: $f| a.is_nan());
                    w.set_predicate(i.d, p);
                    Flow::Next
                },
                "normal" => |w, i| {
                    let p = w.test1(i, |a: $f| a.is_normal());
                    w.set_predicate(i.d, p);
                    Flow::Next
                },
                "subnormal" => |w, i| {
                    let p = w.test1(i, |a: $f| a.is_subnormal());
                    w.set_predicate(i.d, p);
                    Flow::Next
                },
                _ => return None,
            }
        };
    }
    let exec: Exec = match ty {
        Type::F32 => tests!(f32),
        Type::F64 => tests!(f64),
        _ => return None,
    };
    Some(exec)
}
