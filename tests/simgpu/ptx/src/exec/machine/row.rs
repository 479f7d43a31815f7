//! Rows of registers: their places, and their lanes as typed values.

/// The number of lanes of a warp.
pub(crate) const LANES: usize = 32;

/// The place of a row of a register, a constant or a special register: two bits name the region, the rest counts words of four
/// bytes.
pub(crate) type Row = u32;
/// The bit of rows of the program's constants. (Rows with none of these bits are in the function's frame.)
pub(crate) const CONSTANT: Row = 1 << 30;
/// The bit of rows of the warp's special registers.
pub(crate) const SPECIAL: Row = 2 << 30;
/// The bits that count words.
pub(crate) const ROW_OFFSET: Row = (1 << 30) - 1;
/// No row: an operand that is missing, or `_`.
pub(crate) const NO_ROW: Row = u32::MAX;

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
