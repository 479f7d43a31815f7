//! Reading and writing through the pointers of a C caller, in functions that take them raw. ([`crate::arguments`] has
//! types for functions that do not.) C does not promise that a `void *` is aligned for what it points to.

use std::ffi::{CStr, c_char};

use crate::types::*;

/// Writes an out parameter.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` where it is null.
///
/// # Safety
/// `out` is null or writable.
pub unsafe fn put<T>(out: *mut T, value: T) -> Result<(), CUresult> {
    if out.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so writable by the caller's promise.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes an out parameter that may be null.
///
/// # Safety
/// `out` is null or writable.
pub unsafe fn put_if<T>(out: *mut T, value: T) {
    // SAFETY: the caller's promise.
    let _ = unsafe { put(out, value) };
}

/// Reads what a pointer points to.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` where it is null.
///
/// # Safety
/// `pointer` is null or readable.
pub unsafe fn read<T: Copy>(pointer: *const T) -> Result<T, CUresult> {
    if pointer.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so readable by the caller's promise.
    Ok(unsafe { pointer.read_unaligned() })
}

/// Reads an array.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` where it is null and not empty.
///
/// # Safety
/// `array` is null or has `count` elements.
pub unsafe fn values<T: Copy>(array: *const T, count: usize) -> Result<Vec<T>, CUresult> {
    if array.is_null() && count > 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null unless it is empty, so of that length by the caller's promise.
    Ok((0..count).map(|place| unsafe { array.add(place).read_unaligned() }).collect())
}

/// A text that ends in a NUL.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` where it is null.
///
/// # Safety
/// `text` is null or a C string that outlives the answer.
pub unsafe fn text<'a>(text: *const c_char) -> Result<&'a CStr, CUresult> {
    if text.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so a C string by the caller's promise.
    Ok(unsafe { CStr::from_ptr(text) })
}

/// Writes a text into a buffer of `room` bytes: as much of it as fits, and a NUL.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` where there is no room for the NUL.
///
/// # Safety
/// `out` is null or has as much room.
pub unsafe fn put_text(out: *mut c_char, room: i32, text: &str) -> Result<(), CUresult> {
    let room = usize::try_from(room).unwrap_or(0);
    if out.is_null() || room == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let fits = text.len().min(room - 1);
    // SAFETY: at most as many bytes as there is room for, with the NUL.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), out, fits);
        out.add(fits).write(0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_an_invalid_value_wherever_something_is_needed() {
        let invalid = CUDA_ERROR_INVALID_VALUE;
        // SAFETY: null.
        unsafe {
            assert_eq!(put(std::ptr::null_mut(), 1), Err(invalid));
            put_if(std::ptr::null_mut(), 1);
            assert_eq!(read(std::ptr::null::<u8>()), Err(invalid));
            assert_eq!(values(std::ptr::null::<u8>(), 1), Err(invalid));
            assert_eq!(values(std::ptr::null::<u8>(), 0), Ok(Vec::new()));
            assert_eq!(text(std::ptr::null()), Err(invalid));
            assert_eq!(put_text(std::ptr::null_mut(), 4, ""), Err(invalid));
        }
    }

    #[test]
    fn values_are_read_and_written_wherever_they_lie() {
        let mut bytes = [0_u8; 24];
        let odd = (&raw mut bytes).cast::<u8>().wrapping_add(3).cast::<u64>();
        // SAFETY: within the array.
        unsafe {
            assert_eq!(put(odd, 7), Ok(()));
            put_if(odd.wrapping_add(1), 8);
            assert_eq!((read(odd), values(odd, 2)), (Ok(7), Ok(vec![7, 8])));
        }
    }

    #[test]
    fn a_text_is_cut_to_its_buffer_and_ends_in_a_nul() {
        let mut buffer = [9; 5];
        let mut put_in = |room| {
            // SAFETY: at most as much room as there is.
            let put = unsafe { put_text(buffer.as_mut_ptr(), room, "abc") };
            // SAFETY: it ends in a NUL once something was written.
            put.map(|()| unsafe { text(buffer.as_ptr()) }.map(CStr::to_bytes).map(<[u8]>::to_vec))
        };
        assert_eq!((put_in(0), put_in(-1)), (Err(CUDA_ERROR_INVALID_VALUE), Err(CUDA_ERROR_INVALID_VALUE)));
        assert_eq!(
            (put_in(1), put_in(3), put_in(5)),
            (Ok(Ok(vec![])), Ok(Ok(b"ab".to_vec())), Ok(Ok(b"abc".to_vec())))
        );
        assert_eq!(buffer[4], 9);
    }
}
