//! What a shared library exports, by its section of dynamic symbols. (x86_64; everything in the file is checked.)

const DYNSYM: u32 = 11;

/// The names of the functions and variables that a library defines; none where this is no such library.
pub(super) fn exports(file: &[u8]) -> Option<Vec<String>> {
    if file.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let sections = number(file, 0x28, 8)?;
    let (size, count) = (number(file, 0x3a, 2)?, number(file, 0x3c, 2)?);
    let section = |index: u64| file.get(at(sections, index.checked_mul(size)?)?..);
    let symbols = (0..count).filter_map(section).find(|it| number(it, 4, 4) == Some(u64::from(DYNSYM)))?;
    let names = content(file, section(number(symbols, 0x28, 4)?)?)?;
    let mut found = Vec::new();
    for symbol in content(file, symbols)?.chunks_exact(24) {
        // Section 0 is where symbols are that others define.
        if number(symbol, 6, 2)? == 0 {
            continue;
        }
        let name = names.get(at(number(symbol, 0, 4)?, 0)?..)?;
        let name = name.split(|byte| *byte == 0).next()?;
        found.push(String::from_utf8_lossy(name).into_owned());
    }
    Some(found)
}

fn content<'a>(file: &'a [u8], section: &[u8]) -> Option<&'a [u8]> {
    let (offset, size) = (number(section, 0x18, 8)?, number(section, 0x20, 8)?);
    file.get(at(offset, 0)?..at(offset, size)?)
}

fn at(base: u64, offset: u64) -> Option<usize> {
    base.checked_add(offset)?.try_into().ok()
}

/// A little-endian number of this many bytes.
fn number(bytes: &[u8], offset: usize, width: usize) -> Option<u64> {
    let bytes = bytes.get(offset..offset.checked_add(width)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The C library of this process.
    fn library() -> Vec<u8> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path =
            maps.lines().find_map(|line| line.find('/').map(|at| &line[at..]).filter(|it| it.contains("/libc.so")));
        std::fs::read(path.unwrap()).unwrap()
    }

    #[test]
    fn a_library_is_read() {
        let names = exports(&library()).unwrap();
        assert!(names.iter().any(|it| it == "malloc") && names.iter().any(|it| it == "open"));
    }

    #[test]
    fn whatever_is_cut_or_changed_is_an_error_or_another_list() {
        let whole = library();
        assert_eq!(exports(b""), None);
        assert_eq!(exports(b"\x7fELF\x02\x01"), None);
        for length in (0..whole.len()).step_by(whole.len() / 50) {
            let _ = exports(&whole[..length]);
        }
        let mut changed = whole.clone();
        for byte in 0x20..0x40 {
            changed[byte] = 0xff;
            let _ = exports(&changed);
        }
    }
}
