//! Parameters as bytes: 8-byte words, texts and blobs, in the order of the call's declaration.

use std::ffi::CStr;

use thiserror::Error;

/// Bytes from the other side that are not what the call declares.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("malformed command or reply: {0}")]
pub struct Malformed(pub &'static str);

/// Appends parameters.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Starts empty, with room for a typical call.
    pub fn new() -> Self {
        Self { bytes: Vec::with_capacity(128) }
    }

    /// Continues in a buffer that is reused; what it held is dropped.
    pub fn reusing(mut bytes: Vec<u8>) -> Self {
        bytes.clear();
        Self { bytes }
    }

    /// Appends one word.
    pub fn word(&mut self, word: u64) {
        self.bytes.extend_from_slice(&word.to_le_bytes());
    }

    /// Appends half a word. Halves come in pairs.
    pub fn half(&mut self, half: u32) {
        self.bytes.extend_from_slice(&half.to_le_bytes());
    }

    /// Appends a blob: its length, its bytes, and zeros to the next multiple of eight.
    pub fn blob(&mut self, blob: &[u8]) {
        self.word(blob.len() as u64);
        self.bytes.extend_from_slice(blob);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }

    /// Appends a text with its NUL.
    pub fn text(&mut self, text: &CStr) {
        self.blob(text.to_bytes_with_nul());
    }

    /// Appends what another writer wrote.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The bytes written so far.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes written so far, as the buffer itself.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// Takes parameters, trusting nothing.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    all: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Reads from the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { all: bytes, at: 0 }
    }

    /// The next word.
    pub fn word(&mut self) -> Result<u64, Malformed> {
        let bytes = self.all.get(self.at..self.at + 8).ok_or(Malformed("ends before its last parameter"))?;
        self.at += 8;
        Ok(u64::from_le_bytes(bytes.try_into().map_err(|_| Malformed("word"))?))
    }

    /// The next half of a word.
    pub fn half(&mut self) -> Result<u32, Malformed> {
        let bytes = self.all.get(self.at..self.at + 4).ok_or(Malformed("ends before its last parameter"))?;
        self.at += 4;
        Ok(u32::from_le_bytes(bytes.try_into().map_err(|_| Malformed("half"))?))
    }

    /// The next word as a 32-bit number.
    pub fn word32(&mut self) -> Result<u32, Malformed> {
        u32::try_from(self.word()?).map_err(|_| Malformed("number larger than its type"))
    }

    /// The next blob.
    pub fn blob(&mut self) -> Result<&'a [u8], Malformed> {
        let length = usize::try_from(self.word()?).map_err(|_| Malformed("length"))?;
        let left = self.all.len() - self.at;
        if length > left {
            return Err(Malformed("blob longer than its command"));
        }
        let blob = &self.all[self.at..self.at + length];
        self.at += length.next_multiple_of(8).min(left);
        Ok(blob)
    }

    /// The next text.
    pub fn text(&mut self) -> Result<&'a CStr, Malformed> {
        CStr::from_bytes_with_nul(self.blob()?).map_err(|_| Malformed("text without an end, or with two"))
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        let rest = &self.all[self.at..];
        self.at = self.all.len();
        rest
    }

    /// Checks that nothing is left.
    pub fn end(&self) -> Result<(), Malformed> {
        if self.at == self.all.len() { Ok(()) } else { Err(Malformed("longer than its parameters")) }
    }

    /// Everything, from the first parameter: what the object log keeps.
    pub fn all(&self) -> &'a [u8] {
        self.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(words in proptest::collection::vec(any::<u64>(), 0..8), blob in proptest::collection::vec(any::<u8>(), 0..100)) {
            let mut w = Writer::new();
            for &x in &words { w.word(x); }
            w.blob(&blob);
            w.text(c"name");
            let mut r = Reader::new(w.bytes());
            for &x in &words { prop_assert_eq!(r.word(), Ok(x)); }
            prop_assert_eq!(r.blob(), Ok(&blob[..]));
            prop_assert_eq!(r.text(), Ok(c"name"));
            prop_assert_eq!(r.end(), Ok(()));
        }

        #[test]
        fn hostile_bytes_are_an_error_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut r = Reader::new(&bytes);
            while r.blob().is_ok() && r.end().is_err() {}
            let mut r = Reader::new(&bytes);
            let _ = r.text();
            let _ = r.word32();
        }
    }
}
