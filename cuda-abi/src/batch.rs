//! The arguments of copies in batches, as both sides of a `libcuda.so.1` read them.

use crate::types::*;

/// `CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL`: the source has been read when the call returns.
pub const SOURCE_DURING_CALL: u32 = 2;

/// Whether a source access order is one that exists.
fn is_order(order: u32) -> bool {
    (1..=3).contains(&order)
}

/// Whether flags are those that exist: `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`.
fn are_flags(flags: u32) -> bool {
    flags & !1 == 0
}

/// The attributes of each of `count` copies, or the driver's answer to attributes that fit them not. `indices` say with
/// which copy each begins.
///
/// # Errors
///
/// `CUDA_ERROR_INVALID_VALUE`.
pub fn attributes_of(
    count: usize,
    attributes: &[CUmemcpyAttributes],
    indices: &[usize],
) -> Result<impl Fn(usize) -> CUmemcpyAttributes + use<>, CUresult> {
    let rising = indices.windows(2).all(|pair| pair[0] < pair[1]);
    let good = attributes.iter().all(|a| is_order(a.order) && are_flags(a.flags));
    let within = indices.first() == Some(&0) && indices.last().is_some_and(|last| *last < count);
    if attributes.len() != indices.len() || !rising || !good || !within {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let (attributes, indices) = (attributes.to_vec(), indices.to_vec());
    Ok(move |copy| {
        let which = indices.partition_point(|first| *first <= copy).saturating_sub(1);
        attributes.get(which).copied().unwrap_or_default()
    })
}

/// An array of a batch's, which must not be empty.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for one that is null or empty.
///
/// # Safety
/// `array` is null or has `count` elements, which stay as long as the answer is used.
pub unsafe fn array<'a, T>(array: *const T, count: usize) -> Result<&'a [T], CUresult> {
    if array.is_null() || count == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(array, count) })
}

/// Makes the copies of a batch one after the other, up to the first that fails: `one` makes one of them by its place, and
/// says whether the call has to wait for it. Answers whether it has to wait for any.
///
/// # Errors
/// The error of the first copy that fails. `failed` is told the place of that copy.
pub fn each(
    count: usize,
    mut one: impl FnMut(usize) -> Result<bool, CUresult>,
    failed: impl Fn(usize),
) -> Result<bool, CUresult> {
    (0..count).try_fold(false, |wait, place| Ok(one(place).inspect_err(|_| failed(place))? || wait))
}

const POINTER: u32 = 1;
const ARRAY: u32 = 2;

impl CudaMemcpy3dBatchOp {
    /// The copy that this operation is; `element` says how large an array's elements are.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE`, or what `element` says.
    pub fn copy(&self, element: impl Fn(CUarray) -> Result<usize, CUresult>) -> Result<CudaMemcpy3d, CUresult> {
        let invalid = CUDA_ERROR_INVALID_VALUE;
        if self.extent.contains(&0) || !is_order(self.order) || !are_flags(self.flags) {
            return Err(invalid);
        }
        // Everything along x counts elements of the array that takes part, or bytes.
        let mut bytes = 1;
        for operand in [&self.dst, &self.src] {
            if operand.kind == ARRAY {
                bytes = element(operand.place)?;
            }
        }
        let side = |operand: &CUmemcpy3DOperand| {
            let [x, y, z] = operand.words.map(|n| n as usize);
            match operand.kind {
                POINTER => Ok(CudaMemcpy3dSide {
                    kind: CU_MEMORYTYPE_UNIFIED,
                    device: operand.place,
                    pitch: x.checked_mul(bytes).ok_or(invalid)?,
                    height: y,
                    ..Default::default()
                }),
                ARRAY => Ok(CudaMemcpy3dSide {
                    kind: CU_MEMORYTYPE_ARRAY,
                    array: operand.place,
                    x: x.checked_mul(bytes).ok_or(invalid)?,
                    y,
                    z,
                    ..Default::default()
                }),
                _ => Err(invalid),
            }
        };
        let [width, height, depth] = self.extent;
        let width = width.checked_mul(bytes).ok_or(invalid)?;
        Ok(CudaMemcpy3d { dst: side(&self.dst)?, src: side(&self.src)?, width, height, depth })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_belong_to_the_copies_from_their_index_on() {
        let order = |order| CUmemcpyAttributes { order, ..Default::default() };
        let of = attributes_of(5, &[order(1), order(2)], &[0, 3]).unwrap_or_else(|_| panic!("good attributes"));
        assert_eq!([0, 2, 3, 4].map(|i| of(i).order), [1, 1, 2, 2]);
        let bad = |attributes: &[CUmemcpyAttributes], indices: &[usize]| attributes_of(2, attributes, indices).is_err();
        assert!(bad(&[], &[]) && bad(&[order(1)], &[1]) && bad(&[order(0)], &[0]) && bad(&[order(4)], &[0]));
        assert!(bad(&[order(1), order(1)], &[0, 0]) && bad(&[order(1), order(1)], &[0, 2]));
    }

    #[test]
    fn a_batch_ends_with_the_first_copy_that_fails_and_says_which() {
        let (made, failed) = (std::cell::RefCell::new(Vec::new()), std::cell::Cell::new(None));
        let run = |bad: usize, waits: usize| {
            let one = |place| {
                made.borrow_mut().push(place);
                if place == bad { Err(CUDA_ERROR_INVALID_VALUE) } else { Ok(place == waits) }
            };
            let result = each(4, one, |place| failed.set(Some(place)));
            (result, made.take(), failed.take())
        };
        assert_eq!(run(9, 1), (Ok(true), vec![0, 1, 2, 3], None));
        assert_eq!(run(9, 9), (Ok(false), vec![0, 1, 2, 3], None));
        assert_eq!(run(2, 1), (Err(CUDA_ERROR_INVALID_VALUE), vec![0, 1, 2], Some(2)));
    }

    #[test]
    fn an_empty_array_is_no_argument_of_a_batch() {
        // SAFETY: null, and as many as there are.
        unsafe {
            assert_eq!(array([1_u8, 2].as_ptr(), 2), Ok(&[1, 2][..]));
            assert_eq!(array([1_u8, 2].as_ptr(), 0), Err(CUDA_ERROR_INVALID_VALUE));
            assert_eq!(array(std::ptr::null::<u8>(), 2), Err(CUDA_ERROR_INVALID_VALUE));
        }
    }
}
