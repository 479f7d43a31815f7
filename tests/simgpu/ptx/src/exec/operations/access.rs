//! Loads and stores.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use crate::ast::Type;
use crate::exec::machine::{Access, Core, Exec, Flow, Inst, Lane, Lanes, NO_ROW, Row};
use crate::fault::FaultKind;

/// The way of an access: the fields of [`Inst::e`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct How {
    pub(crate) access: Access,
    /// The address has 64 bits.
    pub(crate) wide: bool,
    /// The address is an offset in the function's frame on the stack; there is no row.
    pub(crate) frame: bool,
    /// The access may belong to a loop that waits.
    pub(crate) poll: bool,
    /// The access has a fence on both sides.
    pub(crate) fence: bool,
    /// The number of values, if more than one: their rows are in the program's list at [`Inst::d`].
    pub(crate) count: u32,
}

impl How {
    pub(crate) fn pack(self) -> u32 {
        self.access as u32
            | u32::from(self.wide) << 2
            | u32::from(self.frame) << 3
            | u32::from(self.poll) << 4
            | u32::from(self.fence) << 5
            | self.count << 8
    }

    #[inline(always)]
    pub(crate) fn unpack(bits: u32) -> How {
        How {
            access: match bits & 3 {
                0 => Access::Generic,
                1 => Access::Shared,
                _ => Access::Local,
            },
            wide: bits & 4 != 0,
            frame: bits & 8 != 0,
            poll: bits & 16 != 0,
            fence: bits & 32 != 0,
            count: bits >> 8,
        }
    }
}

/// A value in memory.
pub(super) trait Stored: Copy {
    const BYTES: u64;
    /// # Safety
    ///
    /// The pointer must be one that [`Core::pointer`] gave for `BYTES` bytes.
    unsafe fn load(at: *mut u8) -> Self;
    /// # Safety
    ///
    /// As for `load`, for writing.
    unsafe fn store(at: *mut u8, value: Self);
}

macro_rules! stored {
    ($($ty:ty, $atomic:ty, $bits:ty;)*) => {$(
        impl Stored for $ty {
            const BYTES: u64 = size_of::<$ty>() as u64;
            #[inline(always)]
            unsafe fn load(at: *mut u8) -> Self {
                // SAFETY: the caller vouches for the pointer, which is aligned. Others may access
                // the same memory, so this is an atomic access.
                unsafe { <$atomic>::from_ptr(at.cast()) }.load(Ordering::Relaxed) as $ty
            }
            #[inline(always)]
            unsafe fn store(at: *mut u8, value: Self) {
                // SAFETY: as above.
                unsafe { <$atomic>::from_ptr(at.cast()) }.store(value as $bits, Ordering::Relaxed)
            }
        }
    )*};
}

stored! {
    u8, AtomicU8, u8;
    i8, AtomicU8, u8;
    u16, AtomicU16, u16;
    i16, AtomicU16, u16;
    u32, AtomicU32, u32;
    i32, AtomicU32, u32;
    u64, AtomicU64, u64;
}

impl Core<'_> {
    /// The address that a lane accesses.
    #[inline(always)]
    pub(super) fn address(&self, how: How, a: Row, offset: u64, lane: usize) -> u64 {
        if how.frame {
            self.local.frame.wrapping_add(offset)
        } else if how.wide {
            self.get::<u64>(a, lane).wrapping_add(offset)
        } else {
            u64::from(self.get::<u32>(a, lane).wrapping_add(offset as u32))
        }
    }
}

/// The values of a vector on their way from or to memory. A GPU accesses a vector as a whole; here at least each of its eight bytes
/// are, on which protocols rely that put data beside a flag.
#[derive(Default)]
struct Vector([u64; 8]);

impl Vector {
    /// # Safety
    ///
    /// Within the vector.
    unsafe fn place(&mut self, offset: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.as_mut_ptr().cast::<u8>().add(offset) }
    }

    /// # Safety
    ///
    /// The pointer is aligned to `bytes`, which are readable and fit.
    unsafe fn load(&mut self, at: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { copy(self.place(0), at, bytes) };
    }

    /// # Safety
    ///
    /// As for `load`, for writing.
    unsafe fn store(&mut self, at: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { copy(at, self.place(0), bytes) };
    }
}

/// Copies a vector, in parts of eight bytes if it has as many, in their order.
///
/// # Safety
///
/// Both pointers are aligned to `bytes`, or to eight, and valid for so many.
unsafe fn copy(to: *mut u8, from: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match bytes {
            2 => u16::store(to, u16::load(from)),
            4 => u32::store(to, u32::load(from)),
            _ => (0..bytes).step_by(8).for_each(|at| u64::store(to.add(at), u64::load(from.add(at)))),
        }
    }
}

#[inline(always)]
fn load<T: Stored, D: Lane>(w: &mut Core<'_>, i: &Inst, extend: impl Fn(T) -> D) -> Flow {
    let how = How::unpack(i.e);
    if how.poll {
        w.poll();
    }
    if how.count > 1 {
        return load_many(w, i, how, extend);
    }
    for lane in Lanes(w.active) {
        let addr = w.address(how, i.a, i.imm, lane);
        let Some(at) = w.pointer(how.access, addr, T::BYTES, false, lane) else {
            return Flow::Fault;
        };
        // SAFETY: `pointer` vouches for it.
        let value = unsafe { T::load(at) };
        w.put(i.d, lane, extend(value));
    }
    if how.fence {
        fence(Ordering::SeqCst);
    }
    Flow::Next
}

fn load_many<T: Stored, D: Lane>(w: &mut Core<'_>, i: &Inst, how: How, extend: impl Fn(T) -> D) -> Flow {
    let rows = &w.launch.lists[i.d as usize..][..how.count as usize];
    for lane in Lanes(w.active) {
        let addr = w.address(how, i.a, i.imm, lane);
        let bytes = T::BYTES * u64::from(how.count);
        let Some(at) = w.pointer(how.access, addr, bytes, false, lane) else {
            return Flow::Fault;
        };
        let mut vector = Vector::default();
        // SAFETY: `pointer` vouches for all of the vector.
        unsafe { vector.load(at, bytes as usize) };
        for (k, &row) in rows.iter().enumerate() {
            if row != NO_ROW {
                // SAFETY: the vector has so many values.
                let value = unsafe { T::load(vector.place(k * T::BYTES as usize)) };
                w.put(row, lane, extend(value));
            }
        }
    }
    if how.fence {
        fence(Ordering::SeqCst);
    }
    Flow::Next
}

#[inline(always)]
fn store<T: Stored, S: Lane>(w: &mut Core<'_>, i: &Inst, narrow: impl Fn(S) -> T) -> Flow {
    let how = How::unpack(i.e);
    if how.fence {
        fence(Ordering::SeqCst);
    }
    if how.count > 1 {
        let rows = &w.launch.lists[i.d as usize..][..how.count as usize];
        for lane in Lanes(w.active) {
            let addr = w.address(how, i.a, i.imm, lane);
            let bytes = T::BYTES * u64::from(how.count);
            let Some(at) = w.pointer(how.access, addr, bytes, true, lane) else {
                return Flow::Fault;
            };
            let mut vector = Vector::default();
            for (k, &row) in rows.iter().enumerate() {
                let value = narrow(w.get(row, lane));
                // SAFETY: the vector has room for so many values.
                unsafe { T::store(vector.place(k * T::BYTES as usize), value) };
            }
            // SAFETY: `pointer` vouches for all of the vector.
            unsafe { vector.store(at, bytes as usize) };
        }
        return Flow::Next;
    }
    for lane in Lanes(w.active) {
        let addr = w.address(how, i.a, i.imm, lane);
        let Some(at) = w.pointer(how.access, addr, T::BYTES, true, lane) else {
            return Flow::Fault;
        };
        let value = narrow(w.get(i.d, lane));
        // SAFETY: `pointer` vouches for it.
        unsafe { T::store(at, value) };
    }
    Flow::Next
}

/// The load of a type into a register of `register` bytes.
pub(crate) fn select_load(ty: Type, register: u32) -> Option<Exec> {
    Some(match (ty.bytes(), ty.signed(), register) {
        (1, true, 2) => |w, i| load(w, i, |v: i8| i16::from(v)),
        (1, true, 4) => |w, i| load(w, i, |v: i8| i32::from(v)),
        (1, true, 8) => |w, i| load(w, i, |v: i8| i64::from(v)),
        (1, false, 2 | 4) => |w, i| load(w, i, |v: u8| u32::from(v)),
        (1, false, 8) => |w, i| load(w, i, |v: u8| u64::from(v)),
        (2, true, 4) => |w, i| load(w, i, |v: i16| i32::from(v)),
        (2, true, 8) => |w, i| load(w, i, |v: i16| i64::from(v)),
        (2, _, 2 | 4) => |w, i| load(w, i, |v: u16| u32::from(v)),
        (2, false, 8) => |w, i| load(w, i, |v: u16| u64::from(v)),
        (4, _, 4) => |w, i| load(w, i, |v: u32| v),
        (4, true, 8) => |w, i| load(w, i, |v: i32| i64::from(v)),
        (4, false, 8) => |w, i| load(w, i, |v: u32| u64::from(v)),
        (8, _, 8) => |w, i| load(w, i, |v: u64| v),
        _ => return None,
    })
}

/// The store of a type from a wide or a narrow register.
pub(crate) fn select_store(ty: Type, wide: bool) -> Option<Exec> {
    Some(match (ty.bytes(), wide) {
        (1, false) => |w, i| store(w, i, |v: u32| v as u8),
        (2, false) => |w, i| store(w, i, |v: u32| v as u16),
        (4, false) => |w, i| store(w, i, |v: u32| v),
        (1, true) => |w, i| store(w, i, |v: u64| v as u8),
        (2, true) => |w, i| store(w, i, |v: u64| v as u16),
        (4, true) => |w, i| store(w, i, |v: u64| v as u32),
        (8, true) => |w, i| store(w, i, |v: u64| v),
        _ => return None,
    })
}

/// A load from the kernel's parameters, which is the same for all lanes: `imm` is the offset,
/// `e` the count of values as in [`How`].
pub(crate) fn select_param(ty: Type, register: u32) -> Option<Exec> {
    fn param<const BYTES: usize>(w: &mut Core<'_>, i: &Inst, spread: fn(&mut Core<'_>, Row, u64)) -> Flow {
        let count = (i.e >> 8).max(1) as usize;
        let one = [i.d];
        let rows = if i.e >> 8 > 1 { &w.launch.lists[i.d as usize..][..count] } else { &one };
        for (k, &row) in rows.iter().enumerate() {
            let at = (i.imm as usize).wrapping_add(k * BYTES);
            let Some(bytes) = at.checked_add(BYTES).and_then(|end| w.launch.params.get(at..end)) else {
                return w.fail(FaultKind::Unmapped, crate::PARAM_WINDOW.wrapping_add(i.imm), 0);
            };
            let mut value = [0; 8];
            value[..BYTES].copy_from_slice(bytes);
            if row != NO_ROW {
                spread(w, row, u64::from_le_bytes(value));
            }
        }
        Flow::Next
    }
    fn spread<D: Lane>(w: &mut Core<'_>, row: Row, value: D) {
        for lane in Lanes(w.active) {
            w.put(row, lane, value);
        }
    }
    Some(match (ty.bytes(), ty.signed(), register) {
        (1, true, 2) => |w, i| param::<1>(w, i, |w, r, v| spread(w, r, i16::from(v as i8))),
        (1, true, 4) => |w, i| param::<1>(w, i, |w, r, v| spread(w, r, i32::from(v as i8))),
        (1, true, 8) => |w, i| param::<1>(w, i, |w, r, v| spread(w, r, i64::from(v as i8))),
        (1, false, 2 | 4) => |w, i| param::<1>(w, i, |w, r, v| spread(w, r, v as u32)),
        (1, false, 8) => |w, i| param::<1>(w, i, spread),
        (2, true, 4) => |w, i| param::<2>(w, i, |w, r, v| spread(w, r, i32::from(v as i16))),
        (2, true, 8) => |w, i| param::<2>(w, i, |w, r, v| spread(w, r, i64::from(v as i16))),
        (2, _, 2 | 4) => |w, i| param::<2>(w, i, |w, r, v| spread(w, r, v as u32)),
        (2, false, 8) => |w, i| param::<2>(w, i, spread),
        (4, _, 4) => |w, i| param::<4>(w, i, |w, r, v| spread(w, r, v as u32)),
        (4, true, 8) => |w, i| param::<4>(w, i, |w, r, v| spread(w, r, i64::from(v as i32))),
        (4, false, 8) => |w, i| param::<4>(w, i, spread),
        (8, _, 8) => |w, i| param::<8>(w, i, spread),
        _ => return None,
    })
}

/// `membar` and `fence`.
pub(crate) fn full_fence() -> Exec {
    |_, _| {
        fence(Ordering::SeqCst);
        Flow::Next
    }
}
