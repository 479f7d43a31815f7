//! This process's mappings, read without allocating, so that a forked child may.

use std::io;
use std::ops::Range;

/// One line of `/proc/self/maps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping<'a> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// `PROT_*`.
    pub(crate) protection: i32,
    pub(crate) shared: bool,
    pub(crate) offset: u64,
    /// Its beginning, where it is very long.
    pub(crate) path: &'a [u8],
}

impl Mapping<'_> {
    /// The part of a range that it covers.
    pub(crate) fn within(&self, range: &Range<u64>) -> Option<Range<u64>> {
        let part = self.start.max(range.start)..self.end.min(range.end);
        (part.start < part.end).then_some(part)
    }
}

/// Calls `each` with every mapping, in the order of addresses.
pub(crate) fn each(mut each: impl FnMut(&Mapping<'_>)) -> io::Result<()> {
    // SAFETY: plain system calls; the descriptor is this function's own.
    unsafe {
        let file = libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // The kernel gives whole lines.
        let mut buffer = [0_u8; 8192];
        let mut kept = 0;
        let result = loop {
            let place = buffer.get_mut(kept..).unwrap_or_default();
            let got = libc::read(file, place.as_mut_ptr().cast(), place.len());
            if got < 0 {
                break Err(io::Error::last_os_error());
            }
            let end = kept + got as usize;
            let mut from = 0;
            while let Some(length) = buffer.get(from..end).and_then(|rest| rest.iter().position(|c| *c == b'\n')) {
                if let Some(mapping) = buffer.get(from..from + length).and_then(parse) {
                    each(&mapping);
                }
                from += length + 1;
            }
            if got == 0 {
                break Ok(());
            }
            // A line without an end in a full buffer is no line that matters here.
            if from == 0 && end == buffer.len() {
                from = end;
            }
            buffer.copy_within(from..end, 0);
            kept = end - from;
        };
        libc::close(file);
        result
    }
}

/// `start-end rw-p offset device inode   path`.
fn parse(line: &[u8]) -> Option<Mapping<'_>> {
    let mut fields = line.splitn(6, |c| *c == b' ');
    let mut range = fields.next()?.splitn(2, |c| *c == b'-');
    let (start, end) = (hex(range.next()?)?, hex(range.next()?)?);
    let rights = fields.next()?;
    let offset = hex(fields.next()?)?;
    let (_, _) = (fields.next()?, fields.next()?);
    let path = fields.next().unwrap_or_default().trim_ascii();
    let has = |right: u8, bit: i32| if rights.contains(&right) { bit } else { 0 };
    let protection = has(b'r', libc::PROT_READ) | has(b'w', libc::PROT_WRITE) | has(b'x', libc::PROT_EXEC);
    Some(Mapping { start, end, protection, shared: rights.contains(&b's'), offset, path })
}

fn hex(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0_u64, |n, c| Some(n << 4 | u64::from((*c as char).to_digit(16)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps_is_parsed() {
        let mapping = parse(b"7f00-7f20 rw-s 00001000 00:01 77      /memfd:rekindle-pinned-5 (deleted)").unwrap();
        assert_eq!((mapping.start, mapping.end, mapping.offset, mapping.shared), (0x7f00, 0x7f20, 0x1000, true));
        assert_eq!(mapping.protection, libc::PROT_READ | libc::PROT_WRITE);
        assert_eq!(mapping.path, b"/memfd:rekindle-pinned-5 (deleted)");
        assert!(parse(b"1-2 r--p 0 0:0 0").unwrap().path.is_empty());
        assert_eq!(mapping.within(&(0x7f10..0x8000)), Some(0x7f10..0x7f20));
    }

    #[test]
    fn each_visits_all_mappings() {
        let here = &raw const *b"here" as u64;
        let (mut found, mut count) = (false, 0);
        each(|m| {
            found |= (m.start..m.end).contains(&here);
            count += 1;
        })
        .unwrap();
        assert!(found && count > 5);
    }
}
