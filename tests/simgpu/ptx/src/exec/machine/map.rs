//! Functions applied to all active lanes of rows.

use super::core::{Core, Flow};
use super::inst::Inst;
use super::row::{LANES, Lane, Lanes};

/// An [`Exec`](super::inst::Exec) that maps sources to a destination by a closure.
macro_rules! exec {
    ($d:ty; |$a:ident: $ta:ty| $body:expr) => {{
        let f: $crate::exec::machine::Exec = |w, i| w.map1(i, |$a: $ta| -> $d { $body });
        f
    }};
    ($d:ty; |$a:ident: $ta:ty, $b:ident: $tb:ty| $body:expr) => {{
        let f: $crate::exec::machine::Exec = |w, i| w.map2(i, |$a: $ta, $b: $tb| -> $d { $body });
        f
    }};
    ($d:ty; |$a:ident: $ta:ty, $b:ident: $tb:ty, $c:ident: $tc:ty| $body:expr) => {{
        let f: $crate::exec::machine::Exec = |w, i| w.map3(i, |$a: $ta, $b: $tb, $c: $tc| -> $d { $body });
        f
    }};
    ($d:ty; |$a:ident: $ta:ty, $b:ident: $tb:ty, $c:ident: $tc:ty, $e:ident: $te:ty| $body:expr) => {{
        let f: $crate::exec::machine::Exec = |w, i| w.map4(i, |$a: $ta, $b: $tb, $c: $tc, $e: $te| -> $d { $body });
        f
    }};
}
pub(crate) use exec;

/// How many lanes are computed before their results are stored: enough for the compiler to use
/// vectors, though a destination may be one of the sources.
const CHUNK: usize = 8;

impl Core<'_> {
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
