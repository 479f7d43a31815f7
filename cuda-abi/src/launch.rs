//! The parameters and the configuration of a kernel launch, as `cuLaunchKernel` and `cuLaunchKernelEx` get them.

use std::ffi::c_void;

use crate::types::*;

/// The keys in `extra`, which give the meaning of the value after them: `CU_LAUNCH_PARAM_END`, `..._BUFFER_POINTER`,
/// `..._BUFFER_SIZE`.
const END: usize = 0;
const BUFFER_POINTER: usize = 1;
const BUFFER_SIZE: usize = 2;

/// The most bytes of parameters that any kernel takes (`cuda.h`: 32,764 from Volta on).
pub const MAX_PARAMETERS: usize = 32_764;

/// `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`: a flag.
pub const CU_LAUNCH_ATTRIBUTE_COOPERATIVE: u32 = 2;
/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`: see [`CUlaunchAttributeValue::cluster`].
pub const CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION: u32 = 4;
/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT`: an event, flags, and whether it triggers when blocks begin.
pub const CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT: u32 = 7;
/// `CU_LAUNCH_ATTRIBUTE_PRIORITY`: a signed number.
pub const CU_LAUNCH_ATTRIBUTE_PRIORITY: u32 = 8;
/// `CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT`: an event and flags.
pub const CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT: u32 = 12;

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

/// `extra` of a launch whose parameters lie in one buffer; `size` gets its length. The answer points to both, and may be
/// used as long as they are there; the launch only reads them.
pub fn extra(parameters: &[u8], size: &mut usize) -> [*mut c_void; 5] {
    *size = parameters.len();
    let key = std::ptr::without_provenance_mut;
    let buffer = parameters.as_ptr().cast_mut().cast();
    [key(BUFFER_POINTER), buffer, key(BUFFER_SIZE), (&raw mut *size).cast(), key(END)]
}

impl CUlaunchAttributeValue {
    /// A number of 32 bits, or a flag.
    pub fn of_word(word: u32) -> Self {
        Self([word.into(), 0, 0, 0, 0, 0, 0, 0])
    }

    /// The value as a number of 32 bits, or a flag.
    pub fn word(&self) -> u32 {
        self.0[0] as u32
    }

    /// Blocks of a cluster in x, y and z; 1 where nothing is said.
    pub fn cluster(&self) -> [u32; 3] {
        let [first, second, ..] = self.0;
        [first as u32, (first >> 32) as u32, second as u32].map(|blocks| blocks.max(1))
    }
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

/// The parts of a launch that the calls from before CUDA 4 set one by one.
#[derive(Clone, Debug, Default)]
pub struct LegacyLaunch {
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    parameters: Vec<u8>,
    size: usize,
}

impl LegacyLaunch {
    /// A launch with the settings that another call leaves (`cuda.h` at `cuLaunch` and `cuLaunchCooperativeKernel`).
    pub fn new(block: [u32; 3], shared_bytes: u32, parameters: Vec<u8>) -> Self {
        let size = parameters.len();
        Self { block, shared_bytes, parameters, size }
    }

    /// `cuFuncSetBlockShape`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for anything that is not positive.
    pub fn set_block(&mut self, block: [i32; 3]) -> Result<(), CUresult> {
        let block = block.map(|threads| u32::try_from(threads).unwrap_or(0));
        if block.contains(&0) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.block = block;
        Ok(())
    }

    /// `cuParamSetSize`.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for more than any kernel takes.
    pub fn set_size(&mut self, bytes: u32) -> Result<(), CUresult> {
        if bytes as usize > MAX_PARAMETERS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        self.size = bytes as usize;
        Ok(())
    }

    /// `cuParamSetv` and its like.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where they do not lie within what a kernel takes.
    pub fn set_bytes(&mut self, offset: i32, bytes: &[u8]) -> Result<(), CUresult> {
        let start = usize::try_from(offset).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let end = start.checked_add(bytes.len()).filter(|end| *end <= MAX_PARAMETERS);
        let end = end.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if self.parameters.len() < end {
            self.parameters.resize(end, 0);
        }
        self.parameters[start..end].copy_from_slice(bytes);
        Ok(())
    }

    /// As many bytes of parameters as the size says; zero where nothing has been set.
    pub fn parameters(&self) -> Vec<u8> {
        let mut parameters = self.parameters.clone();
        parameters.resize(self.size, 0);
        parameters
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
        let mut size = 0;
        for length in [0, 5, 16, 40, MAX_PARAMETERS] {
            let bytes = vec![7; length];
            assert_eq!(gathered(null, extra(&bytes, &mut size).as_mut_ptr()), Ok(bytes));
        }
        let bytes = vec![7; MAX_PARAMETERS + 1];
        assert_eq!(gathered(null, extra(&bytes, &mut size).as_mut_ptr()), Err(CUDA_ERROR_INVALID_VALUE));
        let mut extra = extra(&bytes[..4], &mut size);
        extra[1] = null.cast();
        assert_eq!(gathered(null, extra.as_mut_ptr()), Err(CUDA_ERROR_INVALID_VALUE));
        extra[0] = std::ptr::without_provenance_mut(3);
        assert_eq!(gathered(null, extra.as_mut_ptr()), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn parameters_are_needed_in_one_form_and_not_in_both() {
        let null = std::ptr::null_mut();
        let (mut bytes, mut size) = ([0_u8; 16], 0);
        let mut params = [bytes.as_mut_ptr().cast(), bytes.as_mut_ptr().cast()];
        let mut extra = extra(&bytes, &mut size);
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

    #[test]
    fn a_cluster_has_one_block_in_a_direction_of_which_nothing_is_said() {
        let mut value = CUlaunchAttributeValue::of_word(4);
        assert_eq!((value.word(), value.cluster()), (4, [4, 1, 1]));
        value.0[..2].copy_from_slice(&[2 << 32, u64::MAX << 32 | 3]);
        assert_eq!(value.cluster(), [1, 2, 3]);
    }

    #[test]
    fn parts_of_a_launch_are_set_within_what_a_kernel_takes() {
        let mut legacy = LegacyLaunch::new([1; 3], 0, vec![1, 2, 3, 4]);
        assert_eq!(legacy.parameters(), [1, 2, 3, 4]);
        assert_eq!((legacy.set_bytes(6, &[7]), legacy.set_size(8)), (Ok(()), Ok(())));
        assert_eq!(legacy.parameters(), [1, 2, 3, 4, 0, 0, 7, 0]);
        let invalid = Err(CUDA_ERROR_INVALID_VALUE);
        assert_eq!((legacy.set_bytes(-1, &[7]), legacy.set_bytes(i32::MAX, &[7])), (invalid, invalid));
        let most = MAX_PARAMETERS as u32;
        assert_eq!((legacy.set_bytes(most as i32, &[7]), legacy.set_size(most + 1)), (invalid, invalid));
        assert_eq!((legacy.set_bytes(most as i32 - 1, &[7]), legacy.set_size(most)), (Ok(()), Ok(())));
        assert_eq!((legacy.set_block([1, 0, 1]), legacy.set_block([1, 1, -1])), (invalid, invalid));
        assert_eq!((legacy.set_block([2, 3, 4]), legacy.block), (Ok(()), [2, 3, 4]));
    }
}
