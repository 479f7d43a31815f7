//! `atom` and `red`.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::access::How;
use super::float::{canonical32, canonical64};
use super::half::{self, Format};
use crate::ast::Type;
use crate::exec::machine::{Access, Core, Exec, Flow, Inst, Lane, Lanes, NO_ROW};

/// A word that can be changed atomically.
trait Word: Lane + PartialEq {
    const BYTES: u64;
    /// Replaces the word by a function of it, and returns its former value.
    ///
    /// # Safety
    ///
    /// The pointer must be one that [`Core::pointer`] gave for `BYTES` bytes, for writing.
    unsafe fn update(at: *mut u8, f: impl Fn(Self) -> Self) -> Self;
    /// The same for memory that only this thread of the host accesses.
    ///
    /// # Safety
    ///
    /// As for `update`.
    unsafe fn update_alone(at: *mut u8, f: impl Fn(Self) -> Self) -> Self;
}

macro_rules! word {
    ($ty:ty, $atomic:ty) => {
        impl Word for $ty {
            const BYTES: u64 = size_of::<$ty>() as u64;
            #[inline(always)]
            unsafe fn update(at: *mut u8, f: impl Fn(Self) -> Self) -> Self {
                // SAFETY: the caller vouches for the pointer, which is aligned.
                let word = unsafe { <$atomic>::from_ptr(at.cast()) };
                let mut old = word.load(Ordering::Relaxed);
                loop {
                    let new = f(old);
                    match word.compare_exchange(old, new, Ordering::SeqCst, Ordering::Relaxed) {
                        Ok(_) => return old,
                        Err(now) => old = now,
                    }
                }
            }
            #[inline(always)]
            unsafe fn update_alone(at: *mut u8, f: impl Fn(Self) -> Self) -> Self {
                // SAFETY: the caller vouches for the pointer.
                let word = unsafe { <$atomic>::from_ptr(at.cast()) };
                let old = word.load(Ordering::Relaxed);
                word.store(f(old), Ordering::Relaxed);
                old
            }
        }
    };
}

word!(u16, AtomicU16);
word!(u32, AtomicU32);
word!(u64, AtomicU64);

/// `d = [a]`, `[a] = f([a], b, c)`, for the lanes in the order of their numbers.
#[inline(always)]
fn update<T: Word>(w: &mut Core<'_>, i: &Inst, f: impl Fn(T, T, T) -> T) -> Flow {
    let how = How::unpack(i.e);
    if how.poll {
        w.poll();
    }
    for lane in Lanes(w.active) {
        let addr = w.address(how, i.a, i.imm, lane);
        let Some(at) = w.pointer(how.access, addr, T::BYTES, true, lane) else {
            return Flow::Fault;
        };
        let b: T = w.get(i.b, lane);
        let c: T = w.get(i.c, lane);
        // SAFETY: `pointer` vouches for it; a block's shared memory belongs to this thread.
        let old = unsafe {
            if how.access == Access::Generic {
                T::update(at, |old| f(old, b, c))
            } else {
                T::update_alone(at, |old| f(old, b, c))
            }
        };
        if i.d != NO_ROW {
            w.put(i.d, lane, old);
        }
    }
    Flow::Next
}

/// The exec of an operation. Row `c` must be a row even where there is only one operand.
pub(crate) fn select(operation: &str, ty: Type) -> Option<Exec> {
    macro_rules! of {
        ($word:ty: |$old:ident, $b:ident, $c:ident| $body:expr) => {{
            let f: Exec = |w, i| {
                update(w, i, |$old: $word, $b: $word, $c: $word| {
                    let _ = ($old, $b, $c);
                    $body
                })
            };
            f
        }};
    }
    macro_rules! both {
        (|$old:ident, $b:ident, $c:ident| $body:expr) => {
            match ty.bytes() {
                4 => of!(u32: |$old, $b, $c| $body),
                8 => of!(u64: |$old, $b, $c| $body),
                _ => return None,
            }
        };
    }
    Some(match (operation, ty) {
        ("add", Type::F32) => of!(u32: |old, b, c| {
            canonical32(f32::from_bits(old) + f32::from_bits(b)).to_bits()
        }),
        ("add", Type::F64) => of!(u64: |old, b, c| {
            canonical64(f64::from_bits(old) + f64::from_bits(b)).to_bits()
        }),
        ("add", Type::F16x2) => of!(u32: |old, b, c| half::add_bits(Format::Ieee, old, b)),
        ("add", Type::Bf16x2) => of!(u32: |old, b, c| half::add_bits(Format::Brain, old, b)),
        ("add", Type::F16) => of!(u16: |old, b, c| {
            half::add_bits(Format::Ieee, u32::from(old), u32::from(b)) as u16
        }),
        ("add", Type::Bf16) => of!(u16: |old, b, c| {
            half::add_bits(Format::Brain, u32::from(old), u32::from(b)) as u16
        }),
        ("exch", Type::B16) => of!(u16: |old, b, c| b),
        ("cas", Type::B16) => of!(u16: |old, b, c| if old == b { c } else { old }),
        _ if ty.float() => return None,
        ("add", _) => both!(|old, b, c| old.wrapping_add(b)),
        ("and", _) => both!(|old, b, c| old & b),
        ("or", _) => both!(|old, b, c| old | b),
        ("xor", _) => both!(|old, b, c| old ^ b),
        ("exch", _) => both!(|old, b, c| b),
        ("cas", _) => both!(|old, b, c| if old == b { c } else { old }),
        ("inc", _) => both!(|old, b, c| if old >= b { 0 } else { old + 1 }),
        ("dec", _) => both!(|old, b, c| if old == 0 || old > b { b } else { old - 1 }),
        ("min", Type::S32) => of!(u32: |old, b, c| old.cast_signed().min(b.cast_signed()).cast_unsigned()),
        ("max", Type::S32) => of!(u32: |old, b, c| old.cast_signed().max(b.cast_signed()).cast_unsigned()),
        ("min", Type::S64) => of!(u64: |old, b, c| old.cast_signed().min(b.cast_signed()).cast_unsigned()),
        ("max", Type::S64) => of!(u64: |old, b, c| old.cast_signed().max(b.cast_signed()).cast_unsigned()),
        ("min", _) => both!(|old, b, c| old.min(b)),
        ("max", _) => both!(|old, b, c| old.max(b)),
        _ => return None,
    })
}
