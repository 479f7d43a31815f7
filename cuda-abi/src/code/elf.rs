//! As much of ELF64, little-endian, as cubins need. Every offset is checked where it is used.
//!
//! Sources: the System V ABI, chapter 4, and for what NVIDIA adds the constants `EM_CUDA`,
//! `EF_CUDA_*` and `ELFABIVERSION_CUDA_*` of `llvm/BinaryFormat/ELF.h`.

use std::cell::Cell;
use std::ops::Range;

use super::{Arch, CodeError, MAX_IMAGE, Variant};

/// `SHT_SYMTAB`.
pub(super) const SYMTAB: u32 = 2;
/// `SHT_RELA`.
const RELA: u32 = 4;
/// `SHT_NOBITS`: takes no space in the file.
const NOBITS: u32 = 8;
/// `SHT_REL`.
const REL: u32 = 9;
/// `SHT_SYMTAB_SHNDX`: section numbers that do not fit in a symbol.
const SYMTAB_SHNDX: u32 = 18;
/// `SHN_XINDEX`: the number does not fit here.
const XINDEX: u32 = 0xffff;

const SECTION: usize = 64;
const SYMBOL: usize = 24;
const PROGRAM_HEADER: usize = 56;

/// The longest name that is read. Mangled C++ names of some ten thousand bytes exist.
const MAX_NAME: usize = 1 << 18;
/// Bytes of names that may be read from one file: names may overlap, so that the file's size does
/// not bound them.
const MAX_NAMES: usize = 1 << 28;

/// The little-endian number at `at`.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let field = bytes.get(at..at.checked_add(2)?)?;
    field.try_into().ok().map(u16::from_le_bytes)
}

/// The little-endian number at `at`.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let field = bytes.get(at..at.checked_add(4)?)?;
    field.try_into().ok().map(u32::from_le_bytes)
}

/// The little-endian number at `at`.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let field = bytes.get(at..at.checked_add(8)?)?;
    field.try_into().ok().map(u64::from_le_bytes)
}

/// The range of `count` items of `size` bytes at `offset`, if it lies below [`MAX_IMAGE`].
fn table(offset: u64, count: u64, size: usize) -> Result<Range<usize>, CodeError> {
    let checked = || {
        let start = usize::try_from(offset).ok()?;
        let len = usize::try_from(count).ok()?.checked_mul(size)?;
        let end = start.checked_add(len)?;
        (end <= MAX_IMAGE).then_some(start..end)
    };
    checked().ok_or(CodeError::TooLarge {
        what: "ELF table or section",
        size: offset.saturating_add(count.saturating_mul(size as u64)),
        limit: MAX_IMAGE as u64,
    })
}

/// The ELF header's fields that matter here.
#[derive(Debug, Clone)]
pub(super) struct Header {
    abi_version: u8,
    machine: u16,
    flags: u32,
    program_headers: Range<usize>,
    sections_at: u64,
    section_count: u16,
    names_section: u16,
}

impl Header {
    /// Bytes of the header.
    pub(super) const SIZE: usize = 64;

    /// Reads the header at the start of `bytes`, of which it needs [`Header::SIZE`].
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, CodeError> {
        const CUT: CodeError = CodeError::Truncated("ELF header");
        let bytes = bytes.get(..Self::SIZE).ok_or(CUT)?;
        // EI_CLASS is 64-bit, EI_DATA is little-endian.
        if bytes.get(4..6) != Some(&[2, 1]) {
            return Err(CodeError::Malformed("not a 64-bit little-endian ELF file"));
        }
        let half = |at| u16_at(bytes, at).ok_or(CUT);
        let program_headers = match half(0x38)? {
            0 => 0..0,
            count if usize::from(half(0x36)?) == PROGRAM_HEADER => {
                table(u64_at(bytes, 0x20).ok_or(CUT)?, count.into(), PROGRAM_HEADER)?
            }
            _ => return Err(CodeError::Malformed("ELF program headers of another size")),
        };
        let header = Self {
            abi_version: *bytes.get(8).ok_or(CUT)?,
            machine: half(0x12)?,
            flags: u32_at(bytes, 0x30).ok_or(CUT)?,
            program_headers,
            sections_at: u64_at(bytes, 0x28).ok_or(CUT)?,
            section_count: half(0x3c)?,
            names_section: half(0x3e)?,
        };
        if header.sections_at != 0 && usize::from(half(0x3a)?) != SECTION {
            return Err(CodeError::Malformed("ELF section headers of another size"));
        }
        Ok(header)
    }

    /// Where the first section's header lies, if there are sections. It is needed to know how many
    /// there are when the number does not fit in the header (65280 and more).
    pub(super) fn first_section(&self) -> Result<Option<Range<usize>>, CodeError> {
        match self.sections_at {
            0 => Ok(None),
            at => table(at, 1, SECTION).map(Some),
        }
    }

    /// Where the section headers lie, given the bytes of [`Header::first_section`].
    pub(super) fn section_table(&self, first: Option<&[u8]>) -> Result<Range<usize>, CodeError> {
        let Some(first) = first else {
            return Ok(0..0);
        };
        let count = match self.section_count {
            0 => u64_at(first, 0x20).ok_or(CodeError::Truncated("first section"))?,
            count => count.into(),
        };
        table(self.sections_at, count, SECTION)
    }

    /// The section that holds the sections' names, given the first section.
    fn names_section(&self, first: Option<&Section>) -> u32 {
        match (u32::from(self.names_section), first) {
            (XINDEX, Some(first)) => first.link,
            (index, _) => index,
        }
    }

    /// The size of the file: the furthest end of the headers, the section table, whose bytes are
    /// given, and the sections that occupy space.
    pub(super) fn file_size(&self, sections: &[u8]) -> Result<usize, CodeError> {
        let mut end = Self::SIZE.max(self.program_headers.end);
        if self.sections_at != 0 {
            end = end.max(table(self.sections_at, sections.len() as u64, 1)?.end);
        }
        for section in parse_sections(sections) {
            end = end.max(section.range()?.end);
        }
        Ok(end)
    }
}

/// A section's header.
#[derive(Debug, Clone, Copy)]
pub(super) struct Section {
    name: u32,
    /// `sh_type`.
    pub(super) kind: u32,
    flags: u64,
    offset: u64,
    /// `sh_size`, in bytes.
    pub(super) size: u64,
    /// `sh_link`.
    pub(super) link: u32,
    /// `sh_info`.
    pub(super) info: u32,
}

impl Section {
    /// Whether it is one of instructions (`SHF_EXECINSTR`).
    pub(super) fn is_code(&self) -> bool {
        self.flags & 4 != 0
    }

    /// Its bytes in the file; none for `SHT_NOBITS` and for the unused section 0, whose size means
    /// something else.
    fn range(&self) -> Result<Range<usize>, CodeError> {
        match self.kind {
            0 | NOBITS => Ok(0..0),
            _ => table(self.offset, self.size, 1),
        }
    }
}

fn parse_sections(bytes: &[u8]) -> impl Iterator<Item = Section> + '_ {
    bytes.chunks_exact(SECTION).map_while(|header| {
        Some(Section {
            name: u32_at(header, 0)?,
            kind: u32_at(header, 4)?,
            flags: u64_at(header, 8)?,
            offset: u64_at(header, 0x18)?,
            size: u64_at(header, 0x20)?,
            link: u32_at(header, 0x28)?,
            info: u32_at(header, 0x2c)?,
        })
    })
}

/// A symbol.
#[derive(Debug, Clone, Copy)]
pub(super) struct Symbol {
    name: u32,
    info: u8,
    /// `st_other`: what NVIDIA's tools say beyond ELF.
    pub(super) other: u8,
    /// The section it is defined in, 0 if it is undefined. Numbers from 0xff00 to 0xfffe that were
    /// not extended are no sections; no file has a section of such a number without extending it.
    pub(super) section: u32,
    /// Where it lies in its section.
    pub(super) value: u64,
    /// Bytes.
    pub(super) size: u64,
}

impl Symbol {
    /// A variable: `STT_OBJECT`, or in relocatable objects `STT_CUDA_OBJECT`.
    pub(super) fn is_object(&self) -> bool {
        matches!(self.info & 0xf, 1 | 13)
    }

    /// `STT_FUNC`.
    pub(super) fn is_function(&self) -> bool {
        self.info & 0xf == 2
    }

    /// `STB_LOCAL`, `STB_GLOBAL` or `STB_WEAK`: 0, 1, 2.
    pub(super) fn binding(&self) -> u8 {
        self.info >> 4
    }
}

/// An ELF file.
#[derive(Debug)]
pub(super) struct Elf<'a> {
    bytes: &'a [u8],
    header: Header,
    /// The sections, by number.
    pub(super) sections: Vec<Section>,
    names: u32,
    /// The remainder of [`MAX_NAMES`].
    names_left: Cell<usize>,
}

impl<'a> Elf<'a> {
    /// Reads the header and the section headers of the cubin in `bytes`.
    pub(super) fn parse(bytes: &'a [u8]) -> Result<Self, CodeError> {
        const CUT: CodeError = CodeError::Truncated("ELF section table");
        /// `EM_CUDA`.
        const MACHINE: u16 = 190;
        let header = Header::parse(bytes)?;
        if header.machine != MACHINE {
            return Err(CodeError::Malformed("the ELF file is not for NVIDIA GPUs"));
        }
        let first = header.first_section()?.map(|range| bytes.get(range).ok_or(CUT)).transpose()?;
        let table = bytes.get(header.section_table(first)?).ok_or(CUT)?;
        let sections: Vec<_> = parse_sections(table).collect();
        Ok(Self {
            names: header.names_section(sections.first()),
            bytes,
            header,
            sections,
            names_left: Cell::new(MAX_NAMES),
        })
    }

    /// The architecture in the header's flags: in bits 8 to 15 from ABI version 8 on (CUDA 13), in
    /// the lowest byte before.
    pub(super) fn arch(&self) -> Arch {
        let shift = if self.header.abi_version >= 8 { 8 } else { 0 };
        Arch { number: (self.header.flags >> shift) & 0xff, variant: Variant::Generic }
    }

    /// The bytes of a section.
    pub(super) fn data(&self, section: &Section) -> Result<&'a [u8], CodeError> {
        self.bytes.get(section.range()?).ok_or(CodeError::Truncated("ELF section"))
    }

    /// The name of a section.
    pub(super) fn section_name(&self, section: &Section) -> Result<&'a [u8], CodeError> {
        self.string(self.names, section.name)
    }

    /// The name of a symbol of the table that `symbols` describes.
    pub(super) fn symbol_name(&self, symbols: &Symbols, symbol: &Symbol) -> Result<&'a [u8], CodeError> {
        self.string(symbols.strings, symbol.name)
    }

    /// The NUL-terminated string at `offset` of the section with the number `section`.
    fn string(&self, section: u32, offset: u32) -> Result<&'a [u8], CodeError> {
        const CUT: CodeError = CodeError::Truncated("name");
        let section = self.sections.get(section as usize).ok_or(CUT)?;
        let tail = self.data(section)?.get(offset as usize..).ok_or(CUT)?;
        let window = tail.get(..MAX_NAME).unwrap_or(tail);
        let len = window.iter().position(|&byte| byte == 0).ok_or(CUT)?;
        let left = self.names_left.get().checked_sub(len + 1);
        self.names_left.set(left.ok_or(CodeError::TooLarge {
            what: "sum of names",
            size: MAX_NAMES as u64 + 1,
            limit: MAX_NAMES as u64,
        })?);
        tail.get(..len).ok_or(CUT)
    }

    /// Where the symbol with this number has its `st_other`, in bytes from the start of the file.
    pub(super) fn other_of_symbol(&self, number: usize) -> Option<usize> {
        let table = self.sections.iter().find(|section| section.kind == SYMTAB)?.range().ok()?;
        let at = table.start + number.checked_mul(SYMBOL)?;
        (at + SYMBOL <= table.end).then_some(at + 5)
    }

    /// The symbol table; an empty one if the file has none.
    pub(super) fn symbols(&self) -> Result<Symbols, CodeError> {
        let Some((index, section)) = (0..).zip(&self.sections).find(|(_, section)| section.kind == SYMTAB) else {
            return Ok(Symbols::default());
        };
        let extended = self
            .sections
            .iter()
            .find(|section| section.kind == SYMTAB_SHNDX && section.link == index)
            .map(|section| self.data(section))
            .transpose()?;
        let parse = |(index, entry): (usize, &[u8])| {
            let section = match u32::from(u16_at(entry, 6)?) {
                XINDEX => u32_at(extended?, index * 4)?,
                section => section,
            };
            Some(Symbol {
                name: u32_at(entry, 0)?,
                info: *entry.get(4)?,
                other: *entry.get(5)?,
                section,
                value: u64_at(entry, 8)?,
                size: u64_at(entry, 16)?,
            })
        };
        Ok(Symbols {
            table: index,
            strings: section.link,
            list: self
                .data(section)?
                .chunks_exact(SYMBOL)
                .enumerate()
                .map(|entry| parse(entry).ok_or(CodeError::Truncated("symbol table")))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// A place that the driver fills with a symbol's address.
#[derive(Debug, Clone, Copy)]
pub(super) struct Relocation {
    /// The place, in its section.
    pub(super) offset: u64,
    /// The symbol's number.
    pub(super) symbol: u32,
}

impl Elf<'_> {
    /// The relocations in sections for which `wanted` says so by their number: each with that number.
    pub(super) fn relocations(
        &self,
        symbols: &Symbols,
        wanted: impl Fn(u32) -> bool,
    ) -> Result<Vec<(u32, Relocation)>, CodeError> {
        let mut found = Vec::new();
        for section in &self.sections {
            let size = match section.kind {
                REL => 16,
                RELA => 24,
                _ => continue,
            };
            if section.link != symbols.table || !wanted(section.info) {
                continue;
            }
            for entry in self.data(section)?.chunks_exact(size) {
                if let (Some(offset), Some(info)) = (u64_at(entry, 0), u64_at(entry, 8)) {
                    // The upper half of r_info is the symbol.
                    found.push((section.info, Relocation { offset, symbol: (info >> 32) as u32 }));
                }
            }
        }
        Ok(found)
    }
}

/// The symbol table of a file.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    /// The number of the section that it is.
    pub(super) table: u32,
    /// The number of the section with the names.
    strings: u32,
    /// The symbols, by number.
    pub(super) list: Vec<Symbol>,
}
