//! The fatbin container: the same code for several GPUs, as machine code and as PTX.
//!
//! Layout, little-endian, as nvcc 13.0 writes it (`--compress-mode` none, speed, size and balance,
//! `-Xfatbin -compress-all`, all architectures, debug, `-rdc`, LTO):
//!
//! ```text
//! fatbin header                         entry header
//! 0x00 u32 magic 0xBA55ED50             0x00 u16 kind: 1 PTX, 2 ELF, 8 LTO-IR
//! 0x04 u16 version, 1                   0x02 u16 version, 0x101
//! 0x06 u16 header size, 16              0x04 u32 header size, 64 and more
//! 0x08 u64 size of all that follows     0x08 u64 payload size, a multiple of 8, padding included
//! 0x10 entries, one after the other     0x10 u32 compressed size, without padding; 0 if plain
//!                                       0x14 u32 offset of the options, 0x40, or 0
//!                                       0x18 u16 minor, u16 major: of the PTX version for PTX
//!                                       0x1c u32 architecture number: 75, 90, 120
//!                                       0x20 u32 offset, 0x24 u32 length of the source's name
//!                                       0x28 u64 flags
//!                                       0x30 u64 0, but in a compressed LTO entry
//!                                       0x38 u64 unpacked size; 0 if plain
//!                                       0x40 u32 offset, u32 length of a text of options; for
//!                                            sm_100 and later a copy of the ELF's .nv.compat
//!
//! flags  0x1 64-bit  0x2 debug  0x10 Linux  0x2000 LZ4  0x8000 zstd  0x10000 scrambled (LTO)
//!        0x100000 'a'  0x200000 'f'  0x1000000 sm_100 and later
//! ```
//!
//! The payload follows its header. LZ4 is one raw block (`--compress-mode=speed`), zstd one frame
//! (the default, for PTX and for what else shrinks enough).

use std::borrow::Cow;

use super::elf::{Elf, u16_at, u32_at, u64_at};
use super::ptx::Ptx;
use super::unpack::{Compression, unpack};
use super::{Arch, CodeError, ELF_MAGIC, FATBIN_MAGIC, MAX_IMAGE, MAX_UNPACKED, Program, Variant};

/// Bytes of a fatbin's header that this crate reads, and the least that it may say to have.
pub(super) const HEADER: usize = 16;
/// The same for an entry's header.
const ENTRY_HEADER: usize = 64;
/// nvcc writes one entry for an architecture; some dozens are the most that was seen.
const MAX_ENTRIES: usize = 4096;

const FLAG_LZ4: u64 = 0x2000;
const FLAG_ZSTD: u64 = 0x8000;
const FLAG_SCRAMBLED: u64 = 0x1_0000;
const FLAG_SPECIFIC: u64 = 0x10_0000;
const FLAG_FAMILY: u64 = 0x20_0000;

/// The kind of code that an entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EntryKind {
    /// PTX text, perhaps followed by NULs.
    Ptx,
    /// Machine code in an ELF file: a cubin.
    Elf,
    /// NVVM's intermediate code for link-time optimisation. A driver only links it.
    LtoIr,
    /// Another kind, by its number.
    Other(u16),
}

impl EntryKind {
    fn from_number(number: u16) -> Self {
        match number {
            1 => Self::Ptx,
            2 => Self::Elf,
            8 => Self::LtoIr,
            other => Self::Other(other),
        }
    }

    fn number(self) -> u16 {
        match self {
            Self::Ptx => 1,
            Self::Elf => 2,
            Self::LtoIr => 8,
            Self::Other(other) => other,
        }
    }
}

/// An entry of an image, still packed.
#[derive(Debug, Clone, Copy)]
pub struct Entry<'a> {
    /// The kind of code that the entry holds.
    pub kind: EntryKind,
    /// The architecture that the entry was compiled for.
    pub arch: Arch,
    /// The flags of the entry's header, see the module's layout; 0 outside a fatbin.
    pub flags: u64,
    /// How the payload is compressed, `None` if it is plain.
    pub compression: Option<Compression>,
    /// The payload as it is stored.
    packed: &'a [u8],
    /// The size that it is said to unpack to.
    unpacked_size: u64,
}

impl<'a> Entry<'a> {
    /// The payload, unpacked.
    ///
    /// # Errors
    ///
    /// [`CodeError::TooLarge`] above [`MAX_UNPACKED`], [`CodeError::Unpack`] for bytes that do not
    /// unpack to the size that the header says, [`CodeError::Opaque`] for scrambled entries.
    pub fn payload(&self) -> Result<Cow<'a, [u8]>, CodeError> {
        self.payload_within(MAX_UNPACKED)
    }

    /// The payload, unpacked, if it has no more than `limit` bytes.
    ///
    /// # Errors
    ///
    /// As for [`Entry::payload`], with the caller's limit.
    pub fn payload_within(&self, limit: usize) -> Result<Cow<'a, [u8]>, CodeError> {
        if self.flags & FLAG_SCRAMBLED != 0 {
            return Err(CodeError::Opaque(self.kind.number()));
        }
        match self.compression {
            None => Ok(Cow::Borrowed(self.packed)),
            Some(compression) => unpack(compression, self.packed, self.unpacked_size, limit).map(Cow::Owned),
        }
    }

    /// Unpacks the entry, for questions about what is in it.
    ///
    /// # Errors
    ///
    /// As for [`Entry::payload`], [`CodeError::Opaque`] for what is neither PTX nor ELF, and those
    /// of a malformed ELF file.
    pub fn unpack(&self) -> Result<Program<'a>, CodeError> {
        match self.kind {
            EntryKind::Ptx => Ok(Program::from_ptx(self.payload()?)),
            EntryKind::Elf => Program::from_elf(self.payload()?),
            EntryKind::LtoIr | EntryKind::Other(_) => Err(CodeError::Opaque(self.kind.number())),
        }
    }
}

/// An image of code: what one fatbin, cubin or PTX text holds.
#[derive(Debug, Clone)]
pub struct CodeImage<'a> {
    /// The entries in the order of the image. A bare cubin or PTX text is one entry.
    pub entries: Vec<Entry<'a>>,
}

/// Reads an image that [`image_extent`](super::image_extent) found: the bytes of one of its parts.
///
/// Bytes after the end of a fatbin are ignored, as the driver cannot see them.
///
/// # Errors
///
/// [`CodeError::Unrecognised`] if the bytes are no image of code, and the other errors if they
/// start like one and are not one to the end. Entries are only unpacked when they are asked for, so
/// an error inside one of them comes from [`Entry::unpack`].
pub fn parse(bytes: &[u8]) -> Result<CodeImage<'_>, CodeError> {
    if bytes.len() > MAX_IMAGE {
        return Err(CodeError::TooLarge { what: "image", size: bytes.len() as u64, limit: MAX_IMAGE as u64 });
    }
    if bytes.starts_with(&FATBIN_MAGIC.to_le_bytes()) {
        return parse_fatbin(bytes);
    }
    let (kind, arch) = if bytes.starts_with(&ELF_MAGIC) {
        (EntryKind::Elf, Elf::parse(bytes)?.arch())
    } else {
        let arch = Ptx::new(bytes).target().ok_or(CodeError::Unrecognised)?;
        (EntryKind::Ptx, arch)
    };
    Ok(CodeImage {
        entries: vec![Entry {
            kind,
            arch,
            flags: 0,
            compression: None,
            packed: bytes,
            unpacked_size: bytes.len() as u64,
        }],
    })
}

/// The size of the whole fatbin, from its first [`HEADER`] bytes.
pub(super) fn fatbin_size(header: &[u8]) -> Result<(usize, usize), CodeError> {
    let start = usize::from(u16_at(header, 6).ok_or(CodeError::Truncated("fatbin header"))?);
    let size = u64_at(header, 8).ok_or(CodeError::Truncated("fatbin header"))?;
    if start < HEADER {
        return Err(CodeError::Malformed("the fatbin's header is too small"));
    }
    let end = usize::try_from(size)
        .ok()
        .and_then(|size| size.checked_add(start))
        .filter(|&end| end <= MAX_IMAGE)
        .ok_or(CodeError::TooLarge { what: "fatbin", size, limit: MAX_IMAGE as u64 })?;
    Ok((start, end))
}

/// The entries of a fatbin one after the other, each with all of its bytes. An error ends the list.
pub(super) fn entries_with_bytes(bytes: &[u8]) -> impl Iterator<Item = Result<(Entry<'_>, &[u8]), CodeError>> {
    let body = fatbin_size(bytes).and_then(|(start, end)| bytes.get(start..end).ok_or(CodeError::Truncated("fatbin")));
    let (mut rest, mut failed) = match body {
        Ok(body) => (body, None),
        Err(error) => (&[][..], Some(error)),
    };
    std::iter::from_fn(move || {
        if let Some(error) = failed.take() {
            return Some(Err(error));
        }
        if rest.is_empty() {
            return None;
        }
        let parsed = parse_entry(rest).map(|(entry, after)| {
            let all = rest.get(..rest.len() - after.len()).unwrap_or_default();
            rest = after;
            (entry, all)
        });
        if parsed.is_err() {
            rest = &[];
        }
        Some(parsed)
    })
}

/// An entry with the header of another one, and with this payload, which is plain.
pub(super) fn entry_with_payload(original: &[u8], payload: &[u8]) -> Result<Vec<u8>, CodeError> {
    const CUT: CodeError = CodeError::Truncated("entry");
    let size = u32_at(original, 0x04).ok_or(CUT)? as usize;
    let header = original.get(..size).filter(|header| header.len() >= ENTRY_HEADER).ok_or(CUT)?;
    let flags = u64_at(header, 0x28).ok_or(CUT)? & !(FLAG_LZ4 | FLAG_ZSTD);
    let mut entry = header.to_vec();
    let padded = payload.len().next_multiple_of(8);
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = entry.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(0x08, &(padded as u64).to_le_bytes());
    put(0x10, &0_u32.to_le_bytes());
    put(0x28, &flags.to_le_bytes());
    put(0x38, &0_u64.to_le_bytes());
    entry.extend_from_slice(payload);
    entry.resize(size + padded, 0);
    Ok(entry)
}

fn parse_fatbin(bytes: &[u8]) -> Result<CodeImage<'_>, CodeError> {
    let (start, end) = fatbin_size(bytes)?;
    let mut rest = bytes.get(start..end).ok_or(CodeError::Truncated("fatbin"))?;
    let mut entries = Vec::new();
    while !rest.is_empty() {
        if entries.len() == MAX_ENTRIES {
            return Err(CodeError::TooLarge {
                what: "number of entries",
                size: MAX_ENTRIES as u64 + 1,
                limit: MAX_ENTRIES as u64,
            });
        }
        let (entry, after) = parse_entry(rest)?;
        entries.push(entry);
        rest = after;
    }
    Ok(CodeImage { entries })
}

/// Reads the entry at the start of `bytes`, and returns it with what follows it.
fn parse_entry(bytes: &[u8]) -> Result<(Entry<'_>, &[u8]), CodeError> {
    const CUT: CodeError = CodeError::Truncated("entry");
    let header = bytes.get(..ENTRY_HEADER).ok_or(CUT)?;
    let number = |at| u32_at(header, at).ok_or(CUT);
    let header_size = number(0x04)? as usize;
    if header_size < ENTRY_HEADER {
        return Err(CodeError::Malformed("an entry's header is too small"));
    }
    let size = usize::try_from(u64_at(header, 0x08).ok_or(CUT)?).map_err(|_| CUT)?;
    let end = header_size.checked_add(size).ok_or(CUT)?;
    let payload = bytes.get(header_size..end).ok_or(CUT)?;
    let flags = u64_at(header, 0x28).ok_or(CUT)?;

    let compression = match (flags & FLAG_LZ4 != 0, flags & FLAG_ZSTD != 0) {
        (false, false) => None,
        (true, false) => Some(Compression::Lz4),
        (false, true) => Some(Compression::Zstd),
        (true, true) => {
            return Err(CodeError::Malformed("an entry is compressed in two ways"));
        }
    };
    let packed = match compression {
        None => payload,
        Some(_) => payload.get(..number(0x10)? as usize).ok_or(CUT)?,
    };
    let variant = if flags & FLAG_SPECIFIC != 0 {
        Variant::Specific
    } else if flags & FLAG_FAMILY != 0 {
        Variant::Family
    } else {
        Variant::Generic
    };
    let entry = Entry {
        kind: EntryKind::from_number(u16_at(header, 0).ok_or(CUT)?),
        arch: Arch { number: number(0x1c)?, variant },
        flags,
        compression,
        packed,
        unpacked_size: u64_at(header, 0x38).ok_or(CUT)?,
    };
    Ok((entry, bytes.get(end..).unwrap_or_default()))
}
