//! Rows of registers as typed lanes, and functions applied to all active lanes of a row.

use super::core::Core;
use super::{Flow, Inst, LANES, Row};

/// A value that a lane of a row can hold.
///
/// Rows of up to 32 bits take a word a lane, narrower values zero-extended; rows of 64 bits two.
///
/// # Safety
///
/// `get` and `put` must touch the lane's own words only: one word if `WIDE` is false, else two.
pub(crate) unsafe trait Lane: Copy {
    const WIDE: bool;
    /// # Safety
    ///
    /// The row must be one of this width, and the lane less than 32.
    unsafe fn get(row: *const u32, lane: usize) -> Self;
    /// # Safety
    ///
    /// As for `get`, and the row must not be shared.
    unsafe fn put(row: *mut u32, lane: usize, value: Self);
}

macro_rules! narrow {
    ($($ty:ty: |$bits:ident| $from:expr, |$value:ident| $to:expr;)*) => {$(
        // SAFETY: one word is touched.
        unsafe impl Lane for $ty {
            const WIDE: bool = false;
            #[inline(always)]
            unsafe fn get(row: *const u32, lane: usize) -> Self {
                // SAFETY: the caller vouches for the row.
                let $bits = unsafe { *row.add(lane) };
                $from
            }
            #[inline(always)]
            unsafe fn put(row: *mut u32, lane: usize, $value: Self) {
                // SAFETY: the caller vouches for the row.
                unsafe { *row.add(lane) = $to }
            }
        }
    )*};
}

narrow! {
    u32: |bits| bits, |value| value;
    i32: |bits| bits.cast_signed(), |value| value.cast_unsigned();
    f32: |bits| f32::from_bits(bits), |value| value.to_bits();
    u16: |bits| bits as u16, |value| u32::from(value);
    i16: |bits| bits as i16, |value| u32::from(value.cast_unsigned());
    u8: |bits| bits as u8, |value| u32::from(value);
    i8: |bits| bits as i8, |value| u32::from(value.cast_unsigned());
}

macro_rules! wide {
    ($($ty:ty: |$bits:ident| $from:expr, |$value:ident| $to:expr;)*) => {$(
        // SAFETY: two words are touched.
        unsafe impl Lane for $ty {
            const WIDE: bool = true;
            #[inline(always)]
            unsafe fn get(row: *const u32, lane: usize) -> Self {
                // SAFETY: the caller vouches for the row; wide rows are aligned to 8 bytes.
                let $bits = unsafe { *row.cast::<u64>().add(lane) };
                $from
            }
            #[inline(always)]
            unsafe fn put(row: *mut u32, lane: usize, $value: Self) {
                // SAFETY: as above.
                unsafe { *row.cast::<u64>().add(lane) = $to }
            }
        }
    )*};
}

wide! {
    u64: |bits| bits, |value| value;
    i64: |bits| bits.cast_signed(), |value| value.cast_unsigned();
    f64: |bits| f64::from_bits(bits), |value| value.to_bits();
}

/// The lanes of a mask, lowest first.
#[derive(Clone, Copy)]
pub(crate) struct Lanes(pub(crate) u32);

impl Iterator for Lanes {
    type Item = usize;
    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let lane = self.0.trailing_zeros();
        self.0 &= self.0 - 1;
        Some(lane as usize)
    }
}

/// How many lanes are computed before their results are stored: enough for the compiler to use
/// vectors, though a destination may be one of the sources.
const CHUNK: usize = 8;

impl Core<'_> {
    /// One lane of a row.
    #[inline(always)]
    pub(crate) fn get<T: Lane>(&self, row: Row, lane: usize) -> T {
        // SAFETY: linking gave every operand a row of the width its instruction asks for, within
        // the frame, which `Warp` keeps large enough.
        unsafe { T::get(self.row(row), lane) }
    }

    /// Sets one lane of a row.
    #[inline(always)]
    pub(crate) fn put<T: Lane>(&mut self, row: Row, lane: usize, value: T) {
        // SAFETY: as for `get`; destinations are always rows of the frame.
        unsafe { T::put(self.row(row), lane, value) }
    }

    /// The lanes for which a predicate is true.
    #[inline(always)]
    pub(crate) fn predicate(&self, row: Row) -> u32 {
        // SAFETY: a predicate's row is one word.
        unsafe { *self.row(row) }
    }

    /// Sets a predicate for the active lanes.
    #[inline(always)]
    pub(crate) fn set_predicate(&mut self, row: Row, lanes: u32) {
        let row = self.row(row);
        // SAFETY: a predicate's row is one word.
        unsafe { *row = (*row & !self.active) | (lanes & self.active) }
    }

    /// `d = f()` for each active lane.
    #[inline(always)]
    pub(crate) fn map0<D: Lane>(&mut self, i: &Inst, f: impl Fn() -> D) -> Flow {
        for lane in Lanes(self.active) {
            self.put(i.d, lane, f());
        }
        Flow::Next
    }

    /// `d = f(a)` for each active lane.
    #[inline(always)]
    pub(crate) fn map1<A: Lane, D: Lane>(&mut self, i: &Inst, f: impl Fn(A) -> D) -> Flow {
        let (d, a) = (self.row(i.d), self.row(i.a));
        // SAFETY: as for `get` and `put`.
        unsafe {
            if self.active == u32::MAX {
                for chunk in (0..LANES).step_by(CHUNK) {
                    let out: [D; CHUNK] = std::array::from_fn(|l| f(A::get(a, chunk + l)));
                    for (l, value) in out.into_iter().enumerate() {
                        D::put(d, chunk + l, value);
                    }
                }
            } else {
                for lane in Lanes(self.active) {
                    D::put(d, lane, f(A::get(a, lane)));
                }
            }
        }
        Flow::Next
    }

    /// `d = f(a, b)` for each active lane.
    #[inline(always)]
    pub(crate) fn map2<A: Lane, B: Lane, D: Lane>(&mut self, i: &Inst, f: impl Fn(A, B) -> D) -> Flow {
        let (d, a, b) = (self.row(i.d), self.row(i.a), self.row(i.b));
        // SAFETY: as for `get` and `put`.
        unsafe {
            if self.active == u32::MAX {
                for chunk in (0..LANES).step_by(CHUNK) {
                    let out: [D; CHUNK] = std::array::from_fn(|l| f(A::get(a, chunk + l), B::get(b, chunk + l)));
                    for (l, value) in out.into_iter().enumerate() {
                        D::put(d, chunk + l, value);
                    }
                }
            } else {
                for lane in Lanes(self.active) {
                    D::put(d, lane, f(A::get(a, lane), B::get(b, lane)));
                }
            }
        }
        Flow::Next
    }

    /// `d = f(a, b, c)` for each active lane.
    #[inline(always)]
    pub(crate) fn map3<A: Lane, B: Lane, C: Lane, D: Lane>(&mut self, i: &Inst, f: impl Fn(A, B, C) -> D) -> Flow {
        let (d, a, b, c) = (self.row(i.d), self.row(i.a), self.row(i.b), self.row(i.c));
        // SAFETY: as for `get` and `put`.
        unsafe {
            if self.active == u32::MAX {
                for chunk in (0..LANES).step_by(CHUNK) {
                    let out: [D; CHUNK] = std::array::from_fn(|l| {
                        let lane = chunk + l;
                        f(A::get(a, lane), B::get(b, lane), C::get(c, lane))
                    });
                    for (l, value) in out.into_iter().enumerate() {
                        D::put(d, chunk + l, value);
                    }
                }
            } else {
                for lane in Lanes(self.active) {
                    D::put(d, lane, f(A::get(a, lane), B::get(b, lane), C::get(c, lane)));
                }
            }
        }
        Flow::Next
    }

    /// `d = f(a, b, c, e)` for each active lane.
    #[inline(always)]
    pub(crate) fn map4<A: Lane, B: Lane, C: Lane, E: Lane, D: Lane>(
        &mut self,
        i: &Inst,
        f: impl Fn(A, B, C, E) -> D,
    ) -> Flow {
        for lane in Lanes(self.active) {
            let value = f(self.get(i.a, lane), self.get(i.b, lane), self.get(i.c, lane), self.get(i.e, lane));
            self.put(i.d, lane, value);
        }
        Flow::Next
    }

    /// The active lanes for which `f(a, b)` holds.
    #[inline(always)]
    pub(crate) fn test2<A: Lane>(&self, i: &Inst, f: impl Fn(A, A) -> bool) -> u32 {
        let (a, b) = (self.row(i.a), self.row(i.b));
        let mut found = 0;
        // SAFETY: as for `get`.
        unsafe {
            if self.active == u32::MAX {
                for lane in 0..LANES {
                    found |= u32::from(f(A::get(a, lane), A::get(b, lane))) << lane;
                }
            } else {
                for lane in Lanes(self.active) {
                    found |= u32::from(f(A::get(a, lane), A::get(b, lane))) << lane;
                }
            }
        }
        found
    }

    /// The active lanes for which `f(a)` holds.
    #[inline(always)]
    pub(crate) fn test1<A: Lane>(&self, i: &Inst, f: impl Fn(A) -> bool) -> u32 {
        let mut found = 0;
        for lane in Lanes(self.active) {
            found |= u32::from(f(self.get(i.a, lane))) << lane;
        }
        found
    }
}
