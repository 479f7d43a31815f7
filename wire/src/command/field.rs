//! The types that a command's parameters have, and how each lies in the ring.
//!
//! | type | bytes |
//! |---|---|
//! | `u64`, `u32`, `i32` | one word; a number that does not fit its type is malformed |
//! | `u32 as Half` | four bytes, without padding: two of them are a word |
//! | `[u32; 3]` | three halves |
//! | `[u64; 3]` | three words |
//! | `&[u8]` | a blob: a word with the length, the bytes, zeros up to the next word |
//! | `&[u8] as Rest` | all that is left |
//! | `&CStr` | a blob with the text and its NUL |
//! | `Vec<T>` | a word with the count, then each element |
//! | `(A, B)` | one after the other |

use std::ffi::CStr;

use crate::boxes::End;
use crate::codec::{Malformed, Reader, Writer};

/// A type of parameter. `Value` is its type in the command's structure, where that is another.
pub trait Field<'a, Value = Self> {
    /// How many bytes it has, where all values have as many.
    const BYTES: Option<usize>;

    /// Appends a value.
    fn put(value: &Value, w: &mut Writer);

    /// Takes what [`Field::put`] appended.
    ///
    /// # Errors
    /// Where the bytes are no such value.
    fn take(r: &mut Reader<'a>) -> Result<Value, Malformed>;

    /// Appends a value that is made of any numbers.
    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer);
}

impl Field<'_> for u64 {
    const BYTES: Option<usize> = Some(8);

    fn put(value: &Self, w: &mut Writer) {
        w.word(*value);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        r.word()
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        w.word(any());
    }
}

impl Field<'_> for u32 {
    const BYTES: Option<usize> = Some(8);

    fn put(value: &Self, w: &mut Writer) {
        w.word(u64::from(*value));
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        r.word32()
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        w.word(u64::from(any() as u32));
    }
}

impl Field<'_> for i32 {
    const BYTES: Option<usize> = Some(8);

    fn put(value: &Self, w: &mut Writer) {
        w.word(i64::from(*value) as u64);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Self::try_from(r.word()? as i64).map_err(|_| Malformed("number larger than its type"))
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        w.word(i64::from(any() as i32) as u64);
    }
}

/// A number of four bytes that shares its word with another.
#[derive(Debug)]
pub enum Half {}

impl Field<'_, u32> for Half {
    const BYTES: Option<usize> = Some(4);

    fn put(value: &u32, w: &mut Writer) {
        w.half(*value);
    }

    fn take(r: &mut Reader<'_>) -> Result<u32, Malformed> {
        r.half()
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        w.half(any() as u32);
    }
}

impl Field<'_> for [u32; 3] {
    const BYTES: Option<usize> = Some(12);

    fn put(value: &Self, w: &mut Writer) {
        value.iter().for_each(|n| w.half(*n));
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok([r.half()?, r.half()?, r.half()?])
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        (0..3).for_each(|_| w.half(any() as u32));
    }
}

impl Field<'_> for [u64; 3] {
    const BYTES: Option<usize> = Some(24);

    fn put(value: &Self, w: &mut Writer) {
        value.iter().for_each(|n| w.word(*n));
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok([r.word()?, r.word()?, r.word()?])
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        (0..3).for_each(|_| w.word(any()));
    }
}

impl<'a> Field<'a> for &'a [u8] {
    const BYTES: Option<usize> = None;

    fn put(value: &Self, w: &mut Writer) {
        w.blob(value);
    }

    fn take(r: &mut Reader<'a>) -> Result<Self, Malformed> {
        r.blob()
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        let length = any() % 40;
        w.blob(&(0..length).map(|_| any() as u8).collect::<Vec<_>>());
    }
}

/// All that is left of the parameters: words and blobs whose order another field says.
#[derive(Debug)]
pub enum Rest {}

impl<'a> Field<'a, &'a [u8]> for Rest {
    const BYTES: Option<usize> = None;

    fn put(value: &&'a [u8], w: &mut Writer) {
        w.raw(value);
    }

    fn take(r: &mut Reader<'a>) -> Result<&'a [u8], Malformed> {
        Ok(r.rest())
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        (0..any() % 10).for_each(|_| w.word(any()));
    }
}

impl<'a> Field<'a> for &'a CStr {
    const BYTES: Option<usize> = None;

    fn put(value: &Self, w: &mut Writer) {
        w.text(value);
    }

    fn take(r: &mut Reader<'a>) -> Result<Self, Malformed> {
        r.text()
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        let length = any() % 40;
        let text = (0..length).map(|_| any() as u8 | 1).chain([0]);
        w.blob(&text.collect::<Vec<_>>());
    }
}

impl<'a, T: Field<'a>> Field<'a> for Vec<T> {
    const BYTES: Option<usize> = None;

    fn put(value: &Self, w: &mut Writer) {
        w.word(value.len() as u64);
        value.iter().for_each(|element| T::put(element, w));
    }

    fn take(r: &mut Reader<'a>) -> Result<Self, Malformed> {
        let count = r.word()?;
        // Each element has bytes of its own, so a count that is too large ends with the parameters.
        let mut elements = Self::new();
        for _ in 0..count {
            elements.push(T::take(r)?);
        }
        Ok(elements)
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        let count = any() % 5;
        w.word(count);
        (0..count).for_each(|_| T::sample(any, w));
    }
}

impl<'a, A: Field<'a>, B: Field<'a>> Field<'a> for (A, B) {
    const BYTES: Option<usize> = sum(A::BYTES, B::BYTES);

    fn put(value: &Self, w: &mut Writer) {
        A::put(&value.0, w);
        B::put(&value.1, w);
    }

    fn take(r: &mut Reader<'a>) -> Result<Self, Malformed> {
        Ok((A::take(r)?, B::take(r)?))
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        A::sample(any, w);
        B::sample(any, w);
    }
}

/// An end of a copy of a box: its kind and four words.
impl Field<'_> for End {
    const BYTES: Option<usize> = Some(40);

    fn put(value: &Self, w: &mut Writer) {
        value.write(w);
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Self::read(r)
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        let end = match any() % 2 {
            0 => Self::Memory { address: any(), pitch: any(), rows: any() },
            _ => Self::Array { array: any(), at: [any(), any(), any()] },
        };
        end.write(w);
    }
}

impl Field<'_> for super::PieceFlags {
    const BYTES: Option<usize> = Some(8);

    fn put(value: &Self, w: &mut Writer) {
        w.word(value.word());
    }

    fn take(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self::of(r.word()?))
    }

    #[cfg(test)]
    fn sample(any: &mut dyn FnMut() -> u64, w: &mut Writer) {
        w.word(Self::of(any()).word());
    }
}

const fn sum(a: Option<usize>, b: Option<usize>) -> Option<usize> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a + b),
        _ => None,
    }
}
