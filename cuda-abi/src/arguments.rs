//! The arguments of a driver call as C passed them, so that what uses them is safe code.
//!
//! An exported symbol gets raw pointers, and `cuda.h` says what its caller promises of them. The types here hold such a
//! pointer together with that promise. [`FromC::from_c`] makes them, in the exported symbols that [`crate::generate`]
//! writes, and nothing else does: so a function that has one as a parameter may read or write through it, for as long as
//! the call lasts (`'c`).
//!
//! ```text
//!   C ── raw pointers ──> exported symbol ── from_c ──> In, Out, InOut, InArray, OutArray, Text ──> safe function
//! ```
//!
//! Every pointer may be null. Where `cuda.h` forbids that, the methods answer with `CUDA_ERROR_INVALID_VALUE`, as the
//! driver does.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ops::Deref;

use crate::launch::{gather, size_of_parameters};
use crate::raw;
use crate::types::*;

/// A value, or what the call answers with.
type Result<T> = std::result::Result<T, CUresult>;

/// A parameter of a driver function that is made of what C passed.
pub trait FromC<C> {
    /// Takes an argument of the call that is under way.
    ///
    /// # Safety
    /// The argument is what the caller passed for this parameter, and the caller keeps what `cuda.h` says of it until
    /// the call returns. `Self` lives no longer than the call.
    unsafe fn from_c(argument: C) -> Self;
}

/// Numbers and handles; and raw pointers, in functions that take those.
impl<T> FromC<T> for T {
    unsafe fn from_c(argument: T) -> T {
        argument
    }
}

/// Declares parameters that are made of one pointer.
macro_rules! pointers {
    ($($(#[$doc:meta])* $name:ident from $($from:ty),+;)*) => {$(
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name<'c, T>(*mut T, PhantomData<&'c T>);

        impl<T> Clone for $name<'_, T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<'_, T> {}

        $(impl<T> FromC<$from> for $name<'_, T> {
            unsafe fn from_c(argument: $from) -> Self {
                Self(argument as *mut T, PhantomData)
            }
        })+

        impl<T> $name<'_, T> {
            /// The argument of one who passes none.
            pub const fn null() -> Self {
                Self(std::ptr::null_mut(), PhantomData)
            }

            /// Whether the caller passed none.
            pub fn is_null(self) -> bool {
                self.0.is_null()
            }

            /// # Errors
            /// `CUDA_ERROR_INVALID_VALUE` where the caller passed none.
            pub fn require(self) -> Result<()> {
                ensure(!self.is_null(), CUDA_ERROR_INVALID_VALUE)
            }
        }
    )*};
}

pointers! {
    /// Null, or a value that the call may read.
    In from *const T, *mut T;
    /// Null, or room for a value that the call may write.
    Out from *mut T;
    /// Null, or a value that the call may read and write.
    InOut from *mut T;
    /// Null, or as many values as the [`Count`] beside it in the same call says, which the call may read.
    InArray from *const T, *mut T;
    /// Null, or room for as many values as the [`Count`] or the [`Room`] beside it in the same call says.
    OutArray from *mut T;
}

/// A pointer to a value of 64 bits that `cuda.h` declares as `void *`, because other attributes are of other types.
impl FromC<*mut c_void> for Out<'_, u64> {
    unsafe fn from_c(argument: *mut c_void) -> Self {
        Self(argument.cast(), PhantomData)
    }
}

/// As for [`Out`].
impl FromC<*mut c_void> for In<'_, u64> {
    unsafe fn from_c(argument: *mut c_void) -> Self {
        Self(argument.cast(), PhantomData)
    }
}

impl<'c, T: Copy> In<'c, T> {
    /// The value.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there is none.
    pub fn read(self) -> Result<Passed<'c, T>> {
        // SAFETY: null or a value by the caller's promise, which `from_c` asks for.
        Ok(Passed(unsafe { raw::read(self.0) }?, PhantomData))
    }
}

impl<'c, T: Copy> InOut<'c, T> {
    /// The value.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there is none.
    pub fn read(self) -> Result<Passed<'c, T>> {
        In(self.0, PhantomData).read()
    }

    /// Writes the value, which must not be null.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there is no room for it.
    pub fn put(self, value: T) -> Result<()> {
        Out(self.0, PhantomData).put(value)
    }
}

impl<T> Out<'_, T> {
    /// Writes a value that the caller must have room for.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there is no room for it.
    pub fn put(self, value: T) -> Result<()> {
        // SAFETY: null or writable by the caller's promise, which `from_c` asks for.
        unsafe { raw::put(self.0, value) }
    }

    /// Writes a value that the caller need not want.
    pub fn put_if(self, value: T) {
        let _ = self.put(value);
    }
}

/// How many values there are in the arrays of a call. (Calls have one count for all of their arrays.)
#[derive(Clone, Copy, Debug)]
pub struct Count(usize);

impl FromC<usize> for Count {
    unsafe fn from_c(argument: usize) -> Self {
        Self(argument)
    }
}

impl<T: Copy> InArray<'_, T> {
    /// The values. (They are copied, because the caller may have the call write its answer over them.)
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there are some and the array is null.
    pub fn values(self, count: Count) -> Result<Vec<T>> {
        // SAFETY: null, or as many values as the call's count says, by the caller's promise, which `from_c` asks for.
        unsafe { raw::values(self.0, count.0) }
    }
}

/// How many values a call's out arrays have room for; the call says there how many there are.
#[derive(Debug)]
pub struct Room<'c>(InOut<'c, usize>);

impl FromC<*mut usize> for Room<'_> {
    unsafe fn from_c(argument: *mut usize) -> Self {
        // SAFETY: the caller's promise.
        Self(unsafe { InOut::from_c(argument) })
    }
}

impl Room<'_> {
    /// How many values each array has room for.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where the caller does not say so.
    pub fn size(&self) -> Result<usize> {
        self.0.read().map(|size| *size)
    }

    /// Says how many there are. (It takes the room, since nothing says any more how long the arrays are.)
    ///
    /// # Errors
    /// As [`Room::size`].
    pub fn put(self, count: usize) -> Result<()> {
        self.0.put(count)
    }
}

impl<T: Copy + Default> OutArray<'_, T> {
    /// Fills the whole array, if there is one, with these values and zeros behind them; values that it has no room for
    /// are left out.
    ///
    /// # Errors
    /// As [`Room::size`].
    pub fn fill(self, items: &[T], room: &Room<'_>) -> Result<()> {
        let size = room.size()?;
        if !self.is_null() {
            for place in 0..size {
                let item = items.get(place).copied().unwrap_or_default();
                // SAFETY: not null, so with room for `size` values by the caller's promise, which `from_c` asks for.
                unsafe { self.0.add(place).write_unaligned(item) };
            }
        }
        Ok(())
    }

    /// Writes the first value, if there is room for one.
    pub fn put_first(self, item: T, room: Count) {
        if room.0 > 0 && !self.is_null() {
            // SAFETY: not null and not empty, by the caller's promise, which `from_c` asks for.
            unsafe { self.0.write_unaligned(item) };
        }
    }
}

/// Null, or a text that ends in a NUL.
#[derive(Clone, Copy, Debug)]
pub struct Text<'c>(*const c_char, PhantomData<&'c CStr>);

impl FromC<*const c_char> for Text<'_> {
    unsafe fn from_c(argument: *const c_char) -> Self {
        Self(argument, PhantomData)
    }
}

impl<'c> Text<'c> {
    /// The text.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there is none.
    pub fn read(self) -> Result<&'c CStr> {
        // SAFETY: null, or a text that ends in a NUL, by the caller's promise, which `from_c` asks for.
        unsafe { raw::text(self.0) }
    }
}

/// A value that the caller passed. If it is a structure, the pointers in it are what `cuda.h` wants them to be.
#[derive(Clone, Copy, Debug)]
pub struct Passed<'c, T>(T, PhantomData<&'c T>);

impl<T> Deref for Passed<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<'c> Passed<'c, CudaKernelNodeParams> {
    /// The part that all versions have.
    pub fn v1(&self) -> Passed<'c, CudaKernelNodeParamsV1> {
        Passed(self.v1, PhantomData)
    }
}

impl Passed<'_, CudaKernelNodeParamsV1> {
    /// The kernel's parameters ([`gather`]). A node, unlike a launch, wants all of them where they are in a buffer.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where they do not fit the layout.
    ///
    /// # Safety
    /// `layout` is that of the kernel that these parameters are for.
    pub unsafe fn parameters(&self, layout: &[(u32, u32)]) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let size = size_of_parameters(layout.iter().copied());
        // SAFETY: pointers as `cuda.h` wants them, by the promise that a `Passed` holds; the layout by the caller's.
        unsafe { gather(layout.iter().copied(), size, self.params, self.extra, &mut bytes) }?;
        if bytes.len() < size { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(bytes) }
    }
}

impl Passed<'_, CudaBatchMemOpNodeParams> {
    /// The operations.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` where there are some and the array is null.
    pub fn operations(&self) -> Result<Vec<CUstreamBatchMemOpParams>> {
        InArray(self.operations, PhantomData).values(Count(self.count as usize))
    }
}

/// The contents of `CUgraphNodeParams`.
#[derive(Clone, Copy, Debug)]
pub enum NodeParams<'c> {
    /// `kernel`.
    Kernel(Passed<'c, CudaKernelNodeParams>),
    /// `memcpy`.
    Memcpy(Passed<'c, CudaMemcpyNodeParams>),
    /// `memset`, and its context.
    Memset(Passed<'c, CudaMemsetNodeParams>, CUcontext),
    /// `host`.
    Host(Passed<'c, CudaHostNodeParams>),
    /// `graph`.
    Child(CUgraph),
    /// Nothing.
    Empty,
    /// `eventWait`.
    Wait(CUevent),
    /// `eventRecord`.
    Record(CUevent),
    /// `alloc`, where an answer is written.
    Allocate,
    /// `free`.
    Free(CUdeviceptr),
    /// `memOp`.
    BatchMemOp(Passed<'c, CudaBatchMemOpNodeParams>),
    /// `conditional`, where an answer is written.
    Conditional,
    /// External semaphores.
    Unsupported,
    /// A type that `cuda.h` does not have.
    Unknown,
}

impl<'c> Passed<'c, CUgraphNodeParams> {
    /// The parameters, read by their type.
    pub fn node(&self) -> NodeParams<'c> {
        const MEMSET_CONTEXT: usize = size_of::<CudaMemsetNodeParams>() / 8;
        let words = &self.words;
        match self.kind {
            0 => NodeParams::Kernel(part(words)),
            1 => NodeParams::Memcpy(part(words)),
            2 => NodeParams::Memset(part(words), words[MEMSET_CONTEXT]),
            3 => NodeParams::Host(part(words)),
            4 => NodeParams::Child(words[0]),
            5 => NodeParams::Empty,
            6 => NodeParams::Wait(words[0]),
            7 => NodeParams::Record(words[0]),
            10 => NodeParams::Allocate,
            11 => NodeParams::Free(words[0]),
            12 => NodeParams::BatchMemOp(part(words)),
            13 => NodeParams::Conditional,
            8 | 9 => NodeParams::Unsupported,
            _ => NodeParams::Unknown,
        }
    }
}

/// The types that parameters of a node are made of: numbers and raw pointers alone.
trait Part: Copy {}
impl Part for CudaKernelNodeParams {}
impl Part for CudaMemcpyNodeParams {}
impl Part for CudaMemsetNodeParams {}
impl Part for CudaHostNodeParams {}
impl Part for CudaBatchMemOpNodeParams {}

/// The first words of a node's parameters as the structure that its type stands for.
fn part<'c, T: Part>(words: &[u64; 29]) -> Passed<'c, T> {
    const { assert!(size_of::<T>() <= size_of::<[u64; 29]>()) };
    // SAFETY: the words are at least as long, and any bits are numbers and raw pointers.
    Passed(unsafe { words.as_ptr().cast::<T>().read_unaligned() }, PhantomData)
}

impl<'c> InOut<'c, CUgraphNodeParams> {
    /// The parameters of an allocation, whose address is an answer; null where these are.
    pub fn allocation(self) -> InOut<'c, CudaMemAllocNodeParams> {
        // No pointer into nothing.
        if self.is_null() {
            return InOut::null();
        }
        // SAFETY: not null, so within the caller's structure.
        InOut(unsafe { (&raw mut (*self.0).words).cast() }, PhantomData)
    }

    /// The parameters of a conditional node, whose list of bodies is an answer; null where these are.
    pub fn conditional(self) -> InOut<'c, CudaConditionalNodeParams> {
        if self.is_null() {
            return InOut::null();
        }
        // SAFETY: not null, so within the caller's structure.
        InOut(unsafe { (&raw mut (*self.0).words).cast() }, PhantomData)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an exported symbol does it.
    fn passed<T: FromC<C>, C>(argument: C) -> T {
        // SAFETY: the tests pass pointers to their own variables, which outlive what is made of them.
        unsafe { T::from_c(argument) }
    }

    #[test]
    fn a_null_argument_is_an_invalid_value_wherever_one_is_needed() {
        let null = std::ptr::null_mut::<u64>();
        let invalid = Some(CUDA_ERROR_INVALID_VALUE);
        assert_eq!(passed::<In<u64>, _>(null).read().err(), invalid);
        assert_eq!(passed::<In<u64>, _>(null.cast_const()).read().err(), invalid);
        assert_eq!(passed::<InOut<u64>, _>(null).read().err(), invalid);
        assert_eq!(passed::<InOut<u64>, _>(null).put(1).err(), invalid);
        assert_eq!(passed::<Out<u64>, _>(null).put(1).err(), invalid);
        assert_eq!(passed::<Text, _>(std::ptr::null()).read().err(), invalid);
        assert_eq!(passed::<Room, _>(std::ptr::null_mut()).size().err(), invalid);
        assert_eq!(passed::<InArray<u64>, _>(null).values(passed(1_usize)).err(), invalid);
        assert_eq!(passed::<InArray<u64>, _>(null).values(passed(0_usize)), Ok(Vec::new()));
        passed::<Out<u64>, _>(null).put_if(1);
        assert!(passed::<InOut<CUgraphNodeParams>, _>(std::ptr::null_mut()).allocation().is_null());
    }

    #[test]
    fn values_are_read_and_written_at_addresses_that_are_not_aligned() {
        let mut bytes = [0_u8; 17];
        let odd = (&raw mut bytes[1]).cast::<u64>();
        let odd = if odd.is_aligned() { (&raw mut bytes[2]).cast() } else { odd };
        passed::<Out<u64>, _>(odd).put(7).unwrap_or_else(|_| panic!("not null"));
        assert_eq!(passed::<In<u64>, _>(odd).read().map(|it| *it), Ok(7));
        passed::<Out<u64>, _>(odd.cast::<c_void>()).put_if(8);
        assert_eq!(passed::<In<u64>, _>(odd.cast::<c_void>()).read().map(|it| *it), Ok(8));
    }

    #[test]
    fn an_array_is_filled_as_far_as_the_caller_has_room_with_zeros_behind() {
        let (mut array, mut count) = ([9_u64; 4], 3_usize);
        let room: Room = passed(&raw mut count);
        passed::<OutArray<u64>, _>(array.as_mut_ptr()).fill(&[1, 2], &room).unwrap_or_else(|_| panic!("not null"));
        assert_eq!(room.put(2), Ok(()));
        assert_eq!((array, count), ([1, 2, 0, 9], 2));
        let room: Room = passed(&raw mut count);
        passed::<OutArray<u64>, _>(array.as_mut_ptr()).fill(&[5, 6, 7], &room).unwrap_or_else(|_| panic!("not null"));
        passed::<OutArray<u64>, _>(std::ptr::null_mut()).fill(&[5], &room).unwrap_or_else(|_| panic!("not null"));
        assert_eq!(array, [5, 6, 0, 9]);
        passed::<OutArray<u64>, _>(array.as_mut_ptr()).put_first(4, passed(0_usize));
        assert_eq!(array[0], 5);
        passed::<OutArray<u64>, _>(array.as_mut_ptr()).put_first(4, passed(1_usize));
        assert_eq!(array[0], 4);
    }

    #[test]
    fn a_nodes_parameters_are_read_by_its_type() {
        let mut params = CUgraphNodeParams { kind: 2, reserved: [0; 3], words: [0; 29], reserved_at_end: 0 };
        // A memset: destination, pitch, value and element, width, height, context.
        params.words[..6].copy_from_slice(&[0x1000, 64, 5 | 4 << 32, 8, 2, 77]);
        let memset = CudaMemsetNodeParams { dst: 0x1000, pitch: 64, value: 5, element: 4, width: 8, height: 2 };
        let node = |params: &CUgraphNodeParams| passed::<In<_>, _>(&raw const *params).read().map(|it| it.node());
        assert!(matches!(node(&params), Ok(NodeParams::Memset(it, 77)) if *it == memset));
        let mut operation = CUstreamBatchMemOpParams { operation: 2, address: 0x2000, ..Default::default() };
        params.kind = 12;
        params.words[..4].copy_from_slice(&[77, 1, (&raw mut operation) as u64, 0]);
        let Ok(NodeParams::BatchMemOp(words)) = node(&params) else { panic!("operations on words") };
        assert_eq!((words.context, words.operations()), (77, Ok(vec![operation])));
        params.words[1] = 0;
        assert!(matches!(node(&params), Ok(NodeParams::BatchMemOp(it)) if it.operations() == Ok(Vec::new())));
        for (kind, expected) in [(4, "Child(77)"), (5, "Empty"), (9, "Unsupported"), (11, "Free(77)"), (14, "Unknown")]
        {
            params.kind = kind;
            assert_eq!(node(&params).map(|it| format!("{it:?}")).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn the_address_of_an_allocation_is_written_into_the_nodes_parameters() {
        let mut params = CUgraphNodeParams { kind: 10, reserved: [0; 3], words: [0; 29], reserved_at_end: 0 };
        let allocation = passed::<InOut<CUgraphNodeParams>, _>(&raw mut params).allocation();
        let asked = allocation.read().unwrap_or_else(|_| panic!("not null"));
        allocation.put(CudaMemAllocNodeParams { address: 0x3000, ..*asked }).unwrap_or_else(|_| panic!("not null"));
        assert_eq!(params.words[14], 0x3000);
    }
}
