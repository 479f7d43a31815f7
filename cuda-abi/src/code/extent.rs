//! Finding the bytes of an image behind a bare pointer, in the program that passes it.

use std::slice;

use super::elf::Header;
use super::fatbin::{HEADER, fatbin_size};
use super::{CodeError, ELF_MAGIC, FATBIN_MAGIC, MAX_IMAGE, WRAPPER_MAGIC};

/// The most fatbins that a wrapper may say it was linked from, one for each object file.
const MAX_PRELINKED: usize = 1 << 16;

/// The form of the image that a program passed, and so the form in which the driver must be given the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImageKind {
    /// A single fatbin, passed directly or in a wrapper of version 1. Its bytes alone are an image for
    /// `cuModuleLoadData` and `cuLibraryLoadData`; the copy needs no wrapper.
    Fatbin,
    /// A wrapper of version 2, made by the device linker: the first part is the linked fatbin, the
    /// others are the fatbins it was linked from, in order.
    ///
    /// The first part alone is an image wherever it holds code for the GPU. Elsewhere the driver
    /// links the PTX of the other parts, for which it needs a wrapper again: `{u32 0x466243B1,
    /// u32 2, first part, array of the other parts and a NULL}`.
    Linked,
    /// A single cubin.
    Elf,
    /// PTX text with the NUL that ends it.
    Ptx,
}

/// Where one part of an image lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The first byte. Copies should be aligned to 8 bytes, as nvcc aligns the original.
    pub ptr: *const u8,
    /// Bytes, at least 1 and at most [`MAX_IMAGE`].
    pub len: usize,
}

impl Part {
    /// The bytes.
    ///
    /// # Safety
    ///
    /// The memory that [`image_extent`] read must still be there, and stay there unchanged for
    /// `'a`, which the caller chooses.
    #[must_use]
    pub unsafe fn as_slice<'a>(&self) -> &'a [u8] {
        // SAFETY: `image_extent` made the part from memory that its caller vouched for, and the
        // caller of this function vouches that it is still so.
        unsafe { slice::from_raw_parts(self.ptr, self.len) }
    }
}

/// The bytes that make up an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageExtent {
    /// The form of the image that the program passed.
    pub kind: ImageKind,
    /// The parts: one, or for [`ImageKind::Linked`] at least one. [`parse`](super::parse) reads the
    /// bytes of each.
    pub parts: Vec<Part>,
}

/// nvcc's `__fatBinC_Wrapper_t` (`fatbinary_section.h`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Wrapper {
    magic: u32,
    version: u32,
    data: *const u8,
    /// Version 1: the name of a file, unused. Version 2: a NULL-terminated array of fatbins.
    prelinked: *const *const u8,
}

/// Finds the bytes of the image at `ptr`, the argument of `cuModuleLoadData`,
/// `cuModuleLoadDataEx`, `cuModuleLoadFatBinary` or `cuLibraryLoadData`.
///
/// Sizes are those that the headers give; for a cubin the furthest end of its headers and sections,
/// not counting those that occupy no space in the file (`SHT_NOBITS`).
///
/// # Errors
///
/// [`CodeError::Null`] and [`CodeError::WrapperVersion`] for wrappers that lead nowhere, the others
/// for headers that cannot be. What is neither wrapper, fatbin nor ELF is taken for PTX.
///
/// # Safety
///
/// `ptr` must be null or what the driver's functions require: a pointer to one of these images,
/// complete in readable memory, that nobody changes during the call.
pub unsafe fn image_extent(ptr: *const u8) -> Result<ImageExtent, CodeError> {
    if ptr.is_null() {
        return Err(CodeError::Null("image"));
    }
    // SAFETY: the caller's promise; a text may be shorter than a magic number, and only as much is
    // read as agrees with it.
    if !unsafe { starts_with(ptr, &WRAPPER_MAGIC.to_le_bytes()) } {
        // SAFETY: the caller's promise.
        let (kind, part) = unsafe { bare_extent(ptr) }?;
        return Ok(ImageExtent { kind, parts: vec![part] });
    }
    // SAFETY: the magic says that a wrapper is there. It need not be aligned.
    let wrapper = unsafe { ptr.cast::<Wrapper>().read_unaligned() };
    debug_assert_eq!(wrapper.magic.to_le(), WRAPPER_MAGIC);
    if wrapper.data.is_null() {
        return Err(CodeError::Null("data"));
    }
    // SAFETY: the wrapper's `data` points to an image as `ptr` may.
    let (kind, part) = unsafe { bare_extent(wrapper.data) }?;
    match wrapper.version {
        1 => Ok(ImageExtent { kind, parts: vec![part] }),
        2 => {
            let mut parts = vec![part];
            // SAFETY: in version 2 the second pointer, if any, is such an array of images.
            unsafe { prelinked_extents(wrapper.prelinked, &mut parts) }?;
            Ok(ImageExtent { kind: ImageKind::Linked, parts })
        }
        version => Err(CodeError::WrapperVersion(version)),
    }
}

/// Appends the parts of a NULL-terminated array of images.
///
/// # Safety
///
/// `array` must be null or such an array, of images as [`image_extent`] requires them.
unsafe fn prelinked_extents(array: *const *const u8, parts: &mut Vec<Part>) -> Result<(), CodeError> {
    if array.is_null() {
        return Ok(());
    }
    for index in 0..MAX_PRELINKED {
        // SAFETY: no element before this one was NULL, so it belongs to the array.
        let element = unsafe { array.add(index).read_unaligned() };
        if element.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise about the elements.
        parts.push(unsafe { bare_extent(element) }?.1);
    }
    Err(CodeError::TooLarge {
        what: "list of prelinked fatbins",
        size: MAX_PRELINKED as u64 + 1,
        limit: MAX_PRELINKED as u64,
    })
}

/// The extent of an image that is not a wrapper.
///
/// # Safety
///
/// As for [`image_extent`], and `ptr` is not null.
unsafe fn bare_extent(ptr: *const u8) -> Result<(ImageKind, Part), CodeError> {
    // SAFETY: the caller's promise; not more is read than agrees with the magic.
    let (is_fatbin, is_elf) = unsafe {
        let fatbin = starts_with(ptr, &FATBIN_MAGIC.to_le_bytes());
        (fatbin, starts_with(ptr, &ELF_MAGIC))
    };
    let (kind, len) = if is_fatbin {
        // SAFETY: a fatbin starts with a header of this size.
        let header = unsafe { slice::from_raw_parts(ptr, HEADER) };
        (ImageKind::Fatbin, fatbin_size(header)?.1)
    } else if is_elf {
        // SAFETY: an ELF file is there.
        (ImageKind::Elf, unsafe { elf_size(ptr) }?)
    } else {
        // SAFETY: what is left is text that ends with a NUL.
        (ImageKind::Ptx, unsafe { text_size(ptr) }?)
    };
    Ok((kind, Part { ptr, len }))
}

/// Whether `magic` is at `ptr`, reading no further than the first difference.
///
/// # Safety
///
/// `ptr` points to readable bytes up to and including the first that differs from `magic`.
unsafe fn starts_with(ptr: *const u8, magic: &[u8; 4]) -> bool {
    magic.iter().enumerate().all(|(index, expected)| {
        // SAFETY: all the bytes before were equal, so the caller's promise covers this one.
        unsafe { ptr.add(index).read() == *expected }
    })
}

/// The size of the ELF file at `ptr`: the furthest end of its headers and sections.
///
/// # Safety
///
/// An ELF file is at `ptr`, complete in readable memory.
unsafe fn elf_size(ptr: *const u8) -> Result<usize, CodeError> {
    // SAFETY: an ELF file has its header.
    let header = Header::parse(unsafe { slice::from_raw_parts(ptr, Header::SIZE) })?;
    // SAFETY: where the header says that there are sections there is at least the first.
    let first =
        header.first_section()?.map(|range| unsafe { slice::from_raw_parts(ptr.add(range.start), range.len()) });
    let table = header.section_table(first)?;
    // SAFETY: the section table belongs to the file; its range was checked against `MAX_IMAGE`.
    let sections = unsafe { slice::from_raw_parts(ptr.add(table.start), table.len()) };
    header.file_size(sections)
}

/// The size of the text at `ptr`, its NUL included.
///
/// # Safety
///
/// A NUL-terminated text is at `ptr`.
unsafe fn text_size(ptr: *const u8) -> Result<usize, CodeError> {
    for len in 1..=MAX_IMAGE {
        // SAFETY: no byte before this one was the NUL.
        if unsafe { ptr.add(len - 1).read() } == 0 {
            return Ok(len);
        }
    }
    Err(CodeError::TooLarge { what: "text", size: MAX_IMAGE as u64 + 1, limit: MAX_IMAGE as u64 })
}
