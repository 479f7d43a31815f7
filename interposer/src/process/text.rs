//! Short text in place, for code that may not allocate.

use std::fmt;

/// Text of at most `N` bytes. Writing more is an error.
pub(super) struct Text<const N: usize> {
    bytes: [u8; N],
    length: usize,
}

impl<const N: usize> Text<N> {
    /// The text of `arguments`, or none if it is too long.
    pub(super) fn of(arguments: fmt::Arguments<'_>) -> Option<Self> {
        let mut text = Self { bytes: [0; N], length: 0 };
        fmt::Write::write_fmt(&mut text, arguments).ok()?;
        Some(text)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

impl<const N: usize> fmt::Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let place = self.bytes.get_mut(self.length..self.length + text.len()).ok_or(fmt::Error)?;
        place.copy_from_slice(text.as_bytes());
        self.length += text.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_fits_is_whole_and_longer_text_is_none() {
        let bytes = |number| Text::<4>::of(format_args!("{number}/s")).map(|it| it.bytes().to_vec());
        assert_eq!(bytes(1), Some(b"1/s".to_vec()));
        assert_eq!(bytes(12), Some(b"12/s".to_vec()));
        assert_eq!(bytes(123), None);
    }
}
