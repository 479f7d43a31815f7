//! The parameters and the configuration of a kernel launch, as `cuLaunchKernel` and `cuLaunchKernelEx` get them.

use std::ffi::c_void;

use crate::types::*;

/// What the keys in `extra` say of the value behind them: `CU_LAUNCH_PARAM_END`, `..._BUFFER_POINTER`, `..._BUFFER_SIZE`.
const END: usize = 0;
/// See [`END`].
pub const BUFFER_POINTER: usize = 1;
/// See [`END`].
pub const BUFFER_SIZE: usize = 2;

/// The most bytes of parameters that any kernel takes (`cuda.h`: 32,764 from Volta on).
pub const MAX_PARAMETERS: usize = 32_764;

/// How many bytes parameters take, by the offset and size of each.
pub fn size_of_parameters(layout: impl Iterator<Item = (u32, u32)>) -> usize {
    layout.map(|(offset, size)| offset as usize + size as usize).max().unwrap_or(0)
}

/// Gathers a launch's parameters into one buffer: from a pointer to each, at the offsets of the layout, `size` bytes
/// together; or from the caller's buffer in `extra`, as long as that is. What was in `into` is gone in any case.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` where a parameter is missing, where both forms are used, and where a buffer is larger than
/// any kernel takes.
///
/// # Safety
/// `params` and `extra` are null, or as `cuLaunchKernel` wants them for a kernel of this layout.
pub unsafe fn gather(
    layout: impl ExactSizeIterator<Item = (u32, u32)>,
    size: usize,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
    into: &mut Vec<u8>,
) -> Result<(), CUresult> {
    into.clear();
    if !params.is_null() && !extra.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if !extra.is_null() {
        // SAFETY: the caller's promise.
        let buffer = unsafe { buffer(extra) }?;
        into.extend_from_slice(buffer);
        return Ok(());
    }
    if layout.len() > 0 && params.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    into.resize(size, 0);
    for (i, (offset, size)) in layout.enumerate() {
        // SAFETY: one pointer for each parameter, by the caller's promise.
        let value = unsafe { *params.add(i) };
        let place = into.get_mut(offset as usize..).and_then(|it| it.get_mut(..size as usize));
        let (Some(place), false) = (place, value.is_null()) else { return Err(CUDA_ERROR_INVALID_VALUE) };
        // SAFETY: not null, so a value of the parameter's size by the caller's promise; the place is as long.
        unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), place.as_mut_ptr(), place.len()) };
    }
    Ok(())
}

/// The caller's buffer of parameters.
///
/// # Safety
/// `extra` is not null, and as `cuLaunchKernel` wants it.
unsafe fn buffer<'a>(extra: *mut *mut c_void) -> Result<&'a [u8], CUresult> {
    let (mut pointer, mut size) = (std::ptr::null::<u8>(), 0_usize);
    // Each of the two keys once, and the end.
    for pair in 0..3 {
        // SAFETY: keys with a value behind each, up to the end, by the caller's promise.
        let (key, value) = unsafe { (*extra.add(pair * 2) as usize, extra.add(pair * 2 + 1)) };
        match key {
            END => break,
            // SAFETY: a key has a value behind it.
            BUFFER_POINTER => pointer = unsafe { *value }.cast(),
            // SAFETY: the value is a pointer to the size.
            BUFFER_SIZE => size = unsafe { (*value).cast::<usize>().read() },
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    if size > MAX_PARAMETERS || (pointer.is_null() && size > 0) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: not null, so `size` bytes by the caller's promise.
    Ok(if size == 0 { &[] } else { unsafe { std::slice::from_raw_parts(pointer, size) } })
}

impl CUlaunchConfig {
    /// The attributes of a launch.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there are some and the array is null.
    ///
    /// # Safety
    /// `attrs` is null, or points to `num_attrs` attributes that stay as long as the answer is used.
    pub unsafe fn attributes<'a>(&self) -> Result<&'a [CUlaunchAttribute], CUresult> {
        match self.num_attrs {
            0 => Ok(&[]),
            _ if self.attrs.is_null() => Err(CUDA_ERROR_INVALID_VALUE),
            // SAFETY: the caller's promise.
            count => Ok(unsafe { std::slice::from_raw_parts(self.attrs, count as usize) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: [(u32, u32); 2] = [(0, 4), (8, 8)];

    /// Gathers for a kernel of an `int` and a pointer.
    fn gathered(params: *mut *mut c_void, extra: *mut *mut c_void) -> Result<Vec<u8>, CUresult> {
        let mut bytes = vec![0xff; 3];
        let size = size_of_parameters(LAYOUT.into_iter());
        // SAFETY: the tests pass null, or what `cuLaunchKernel` wants.
        unsafe { gather(LAYOUT.into_iter(), size, params, extra, &mut bytes) }.map(|()| bytes)
    }

    fn buffer_of(bytes: &mut [u8], size: &mut usize) -> [*mut c_void; 5] {
        let key = std::ptr::without_provenance_mut;
        [key(BUFFER_POINTER), bytes.as_mut_ptr().cast(), key(BUFFER_SIZE), (&raw mut *size).cast(), key(END)]
    }

    #[test]
    fn each_parameter_lies_at_its_offset_and_padding_is_zero() {
        let (mut first, mut second) = (0x0403_0201_u32, u64::MAX);
        let mut params = [(&raw mut first).cast(), (&raw mut second).cast()];
        let expected = [1, 2, 3, 4, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255];
        assert_eq!(gathered(params.as_mut_ptr(), std::ptr::null_mut()), Ok(expected.to_vec()));
        params[1] = std::ptr::null_mut();
        assert_eq!(gathered(params.as_mut_ptr(), std::ptr::null_mut()), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn a_buffer_is_taken_as_long_as_it_is() {
        let null = std::ptr::null_mut();
        for mut size in [0, 5, 16, 40] {
            let mut bytes = vec![7; size];
            assert_eq!(gathered(null, buffer_of(&mut bytes, &mut size).as_mut_ptr()), Ok(vec![7; bytes.len()]));
        }
        let (mut bytes, mut size) = ([0; 4], MAX_PARAMETERS + 1);
        assert_eq!(gathered(null, buffer_of(&mut bytes, &mut size).as_mut_ptr()), Err(CUDA_ERROR_INVALID_VALUE));
        let mut size = 4;
        let mut extra = buffer_of(&mut bytes, &mut size);
        extra[1] = null.cast();
        assert_eq!(gathered(null, extra.as_mut_ptr()), Err(CUDA_ERROR_INVALID_VALUE));
        extra[0] = std::ptr::without_provenance_mut(3);
        assert_eq!(gathered(null, extra.as_mut_ptr()), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn parameters_are_needed_in_one_form_and_not_in_both() {
        let null = std::ptr::null_mut();
        let (mut bytes, mut size) = ([0; 16], 16);
        let mut params = [bytes.as_mut_ptr().cast(), bytes.as_mut_ptr().cast()];
        let mut extra = buffer_of(&mut bytes, &mut size);
        assert_eq!(gathered(params.as_mut_ptr(), extra.as_mut_ptr()), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(gathered(null, null), Err(CUDA_ERROR_INVALID_VALUE));
        let mut nothing = vec![1];
        // SAFETY: a kernel without parameters needs neither form.
        let none = unsafe { gather([].into_iter(), 0, null, null, &mut nothing) };
        assert_eq!((none, nothing), (Ok(()), Vec::new()));
    }

    #[test]
    fn a_layout_that_goes_past_its_size_is_refused() {
        let mut value = 0_u64;
        let mut params: [*mut c_void; 1] = [(&raw mut value).cast()];
        for layout in [(4, 8), (u32::MAX, 1), (u32::MAX, u32::MAX)] {
            let mut bytes = Vec::new();
            // SAFETY: the value is not read, since the layout does not fit.
            let got = unsafe { gather([layout].into_iter(), 8, params.as_mut_ptr(), std::ptr::null_mut(), &mut bytes) };
            assert_eq!(got, Err(CUDA_ERROR_INVALID_VALUE));
        }
    }

    #[test]
    fn a_configuration_has_as_many_attributes_as_it_says() {
        let attributes = [CUlaunchAttribute { id: 2, pad: [0; 4], value: [1; 8] }; 2];
        let mut config = CUlaunchConfig {
            grid: [1; 3],
            block: [1; 3],
            shared_bytes: 0,
            stream: 0,
            attrs: attributes.as_ptr(),
            num_attrs: 2,
        };
        // SAFETY: as many as the array has.
        assert!(unsafe { config.attributes() }.is_ok_and(|it| it.len() == 2 && it[1].id == 2));
        config.attrs = std::ptr::null();
        // SAFETY: null.
        assert!(unsafe { config.attributes() }.is_err());
        config.num_attrs = 0;
        // SAFETY: null, and none.
        assert!(unsafe { config.attributes() }.is_ok_and(<[_]>::is_empty));
    }
}
