//! The exports of a shared library, by its section of dynamic symbols.

use object::LittleEndian;
use object::elf::{FileHeader64, SHN_UNDEF, SHT_DYNSYM};
use object::read::elf::{FileHeader, Sym};

/// The names of the functions and variables that a library for a 64-bit little-endian machine defines; none where the
/// file is no such library, or is damaged.
pub(super) fn exports(file: &[u8]) -> Option<Vec<String>> {
    let header = FileHeader64::<LittleEndian>::parse(file).ok().filter(|it| it.is_little_endian())?;
    let symbols = header.sections(LittleEndian, file).ok()?.symbols(LittleEndian, file, SHT_DYNSYM).ok()?;
    // A section of dynamic symbols has at least the null symbol.
    if symbols.is_empty() {
        return None;
    }
    let defined = symbols.iter().filter(|it| it.st_shndx(LittleEndian) != SHN_UNDEF);
    let name = |it: &_| Some(String::from_utf8_lossy(symbols.symbol_name(LittleEndian, it).ok()?).into_owned());
    defined.map(name).collect()
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
