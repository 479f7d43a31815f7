//! Options of the driver's compiler and linker, in the two arrays of the caller's.

use std::ffi::c_void;

use crate::types::*;

/// `CU_JIT_THREADS_PER_BLOCK`: how many are wanted; the answer is how many the code was compiled for.
pub const CU_JIT_THREADS_PER_BLOCK: u32 = 1;
/// `CU_JIT_WALL_TIME`: milliseconds, an answer.
pub const CU_JIT_WALL_TIME: u32 = 2;
/// `CU_JIT_INFO_LOG_BUFFER`.
pub const CU_JIT_INFO_LOG_BUFFER: u32 = 3;
/// `CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES`: how large the buffer is; the answer is how much was written.
pub const CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: u32 = 4;
/// `CU_JIT_ERROR_LOG_BUFFER`.
pub const CU_JIT_ERROR_LOG_BUFFER: u32 = 5;
/// `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`: as of the other buffer.
pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: u32 = 6;
/// Options whose values point to names or addresses, of link-time optimisation and earlier.
pub const POINTER_OPTIONS: [u32; 4] = [17, 18, 25, 27];
/// The first number that is no option of driver 580's.
pub const OPTIONS_END: u32 = 34;

/// `CU_JIT_INPUT_CUBIN`.
pub const CU_JIT_INPUT_CUBIN: u32 = 0;
/// `CU_JIT_INPUT_PTX`.
pub const CU_JIT_INPUT_PTX: u32 = 1;
/// `CU_JIT_INPUT_FATBINARY`.
pub const CU_JIT_INPUT_FATBINARY: u32 = 2;
/// `CU_JIT_INPUT_OBJECT`.
pub const CU_JIT_INPUT_OBJECT: u32 = 3;
/// `CU_JIT_INPUT_LIBRARY`.
pub const CU_JIT_INPUT_LIBRARY: u32 = 4;
/// `CU_JIT_INPUT_NVVM`.
pub const CU_JIT_INPUT_NVVM: u32 = 5;
/// The first number that is no kind of input.
pub const INPUTS_END: u32 = 6;

/// An option of the compiler or the linker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JitOption {
    /// `CU_JIT_*`.
    pub number: u32,
    /// The option's value when the options were read. (An answer takes the place of a size.)
    pub value: usize,
    /// Where in the caller's array its value is.
    place: usize,
}

impl JitOption {
    /// Writes an answer in place of the value.
    ///
    /// # Safety
    /// The caller's array is still there.
    pub unsafe fn answer(&self, value: usize) {
        // SAFETY: the place is in the caller's array.
        unsafe { (self.place as *mut usize).write(value) };
    }
}

/// Which of the compiler's two logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Log {
    /// The compiler's messages about the code.
    Info,
    /// The errors in the code.
    Error,
}

/// A call's options.
#[derive(Clone, Debug, Default)]
pub struct JitOptions {
    list: Vec<JitOption>,
}

impl JitOptions {
    /// Reads the arrays of a call.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there are options and an array is null.
    ///
    /// # Safety
    /// Both arrays are null or hold `count` elements.
    pub unsafe fn read(count: u32, options: *const u32, values: *mut *mut c_void) -> Result<Self, CUresult> {
        if count > 0 && (options.is_null() || values.is_null()) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let one = |i| {
            // SAFETY: not null, so `count` elements by the caller's promise.
            let (number, place) = unsafe { (options.add(i).read(), values.add(i)) };
            // SAFETY: as above.
            JitOption { number, value: unsafe { place.read() } as usize, place: place as usize }
        };
        Ok(Self { list: (0..count as usize).map(one).collect() })
    }

    /// The options in their order.
    pub fn list(&self) -> &[JitOption] {
        &self.list
    }

    /// Leaves options out for which `keep` does not hold.
    pub fn retain(&mut self, keep: impl FnMut(&JitOption) -> bool) {
        self.list.retain(keep);
    }

    /// Writes a log, which is `length` bytes long, where the caller wants it: as much of it as fits into the buffer, a NUL
    /// behind that, and how much that is in place of the buffer's size. `text` gives the first bytes of the log, or fewer.
    ///
    /// # Safety
    /// The arrays that the options were read from are still there, and the buffer has as many bytes as its size says.
    pub unsafe fn write_log(&self, log: Log, length: usize, text: impl FnOnce(usize) -> Vec<u8>) {
        let (buffer, size) = match log {
            Log::Info => (CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES),
            Log::Error => (CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES),
        };
        let find = |number| self.list.iter().find(|option| option.number == number);
        let (Some(buffer), Some(size)) = (find(buffer), find(size)) else { return };
        // The option is an `unsigned int`.
        let (buffer, room) = (buffer.value as *mut u8, size.value & 0xffff_ffff);
        let fits = if buffer.is_null() { 0 } else { length.min(room.saturating_sub(1)) };
        let mut text = text(fits);
        text.truncate(fits);
        // SAFETY: the buffer has room for `room` bytes by the caller's promise, and the text is shorter.
        unsafe {
            if room > 0 && !buffer.is_null() {
                std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, text.len());
                buffer.add(text.len()).write(0);
            }
            size.answer(text.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NUMBERS: [u32; 3] = [CU_JIT_WALL_TIME, CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];

    fn options(values: &mut [*mut c_void; 3]) -> JitOptions {
        // SAFETY: as many of each.
        unsafe { JitOptions::read(3, NUMBERS.as_ptr(), values.as_mut_ptr()) }.unwrap_or_else(|_| panic!("good arrays"))
    }

    #[test]
    fn a_log_is_cut_to_its_buffer_and_ends_in_a_nul() {
        let number = std::ptr::without_provenance_mut::<c_void>;
        for (room, expected) in
            [(0, &[9; 8]), (1, &[0, 9, 9, 9, 9, 9, 9, 9]), (4, b"bad\0\x09\x09\x09\x09"), (8, b"bad P\0\x09\x09")]
        {
            let mut buffer = [9_u8; 8];
            // The upper half of a size means nothing.
            let mut values = [number(7), buffer.as_mut_ptr().cast(), number(1 << 32 | room)];
            // SAFETY: the arrays and the buffer are there, and it is at least that large.
            unsafe { options(&mut values).write_log(Log::Error, 5, |fits| b"bad P"[..fits].to_vec()) };
            assert_eq!(&buffer, expected);
            assert_eq!((values[0] as usize, values[2] as usize), (7, room.saturating_sub(1).min(5)));
        }
    }

    #[test]
    fn later_calls_use_the_sizes_that_were_read_and_not_what_was_answered() {
        let mut buffer = [9_u8; 8];
        let number = std::ptr::without_provenance_mut::<c_void>;
        let mut values = [number(7), buffer.as_mut_ptr().cast(), number(8)];
        let options = options(&mut values);
        for text in ["a", "bcdef"] {
            // SAFETY: as above.
            unsafe { options.write_log(Log::Error, text.len(), |fits| text.as_bytes()[..fits].to_vec()) };
            assert_eq!(
                (values[2] as usize, &buffer[..=text.len()]),
                (text.len(), [text.as_bytes(), &[0]].concat().as_slice())
            );
        }
        // Nobody asked for this one.
        // SAFETY: as above.
        unsafe { options.write_log(Log::Info, 1, |_| panic!("not wanted")) };
    }

    #[test]
    fn without_a_buffer_nothing_is_written_of_a_log() {
        let mut values = [std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::without_provenance_mut(8)];
        // SAFETY: the arrays are there, and no buffer is.
        unsafe { options(&mut values).write_log(Log::Error, 5, |fits| vec![1; fits]) };
        assert_eq!(values[2] as usize, 0);
    }

    #[test]
    fn options_need_both_arrays_unless_there_are_none() {
        let null = std::ptr::null_mut();
        // SAFETY: null, or as many as the array has.
        unsafe {
            assert_eq!(JitOptions::read(1, NUMBERS.as_ptr(), null).err(), Some(CUDA_ERROR_INVALID_VALUE));
            assert!(JitOptions::read(0, std::ptr::null(), null).is_ok_and(|it| it.list().is_empty()));
        }
    }

    #[test]
    fn an_answer_takes_the_place_of_its_options_value() {
        let mut values = [std::ptr::null_mut(); 3];
        let mut options = options(&mut values);
        options.retain(|it| it.number == CU_JIT_WALL_TIME);
        assert_eq!(options.list().iter().map(|it| (it.number, it.value)).collect::<Vec<_>>(), [(CU_JIT_WALL_TIME, 0)]);
        // SAFETY: the array is there.
        options.list().iter().for_each(|it| unsafe { it.answer(5) });
        assert_eq!(values[0] as usize, 5);
    }
}
