//! Images of device code: what a program hands to `cuModuleLoadData` and `cuLibraryLoadData`.
//!
//! A program passes a bare pointer, without a length, to one of four things:
//!
//! ```text
//! wrapper  { u32 0x466243B1, u32 version, *data, *prelinked }   made by nvcc, points at fatbins
//! fatbin   { u32 0xBA55ED50, u16, u16 header, u64 size }, entries: the same code for several GPUs
//! cubin    an ELF file of the machine "NVIDIA CUDA"
//! PTX      text that ends with a NUL
//! ```
//!
//! The reading is in two steps, because they happen in two processes:
//!
//! - [`image_extent`] follows the program's own pointer, in the program, and says which bytes make
//!   up the image, so that they can be sent elsewhere. It trusts what it reads as much as the
//!   driver does.
//! - [`parse`] reads such bytes where they arrived and trusts nothing: whatever the bytes, it and
//!   all that it returns neither panic nor take more memory than the limits below.
//!
//! From a parsed image, [`CodeImage::select`] picks the entry that a driver would load on a given
//! GPU and [`Entry::unpack`] makes a [`Program`] of it, which tells the module's global variables,
//! its kernels with their parameters, and which of them allocate memory on the device.
//!
//! NVIDIA documents none of these formats but PTX. What is said here about them was read off the
//! output of nvcc 13.0 (for sm_75 to sm_121), `fatbinary_section.h` of the CUDA toolkit, and the
//! constants that LLVM publishes in `llvm/BinaryFormat/ELF.h`.

mod arch;
mod attributes;
mod cubin;
mod elf;
mod extent;
mod fatbin;
mod graph;
mod items;
mod program;
mod ptx;
mod reach;
mod select;
mod taken;
mod unmanaged;
mod unpack;

pub use arch::{Arch, Sm, Variant};
pub use extent::{ImageExtent, ImageKind, Part, image_extent};
pub use fatbin::{CodeImage, Entry, EntryKind, parse};
pub use items::{Binding, Global, Kernel, Param, Space};
pub use program::Program;
pub use unmanaged::{unmanaged, unmanaged_within};
pub use unpack::Compression;

/// The first four bytes, little-endian, of the structure that nvcc's host code registers.
pub const WRAPPER_MAGIC: u32 = 0x4662_43B1;

/// The first four bytes, little-endian, of a fatbin.
pub const FATBIN_MAGIC: u32 = 0xBA55_ED50;

/// The first four bytes of an ELF file.
pub const ELF_MAGIC: [u8; 4] = *b"\x7fELF";

/// The most bytes that one part of an image may have.
///
/// Far above any real one (the largest libraries of kernels hold some hundred megabytes): it is
/// there so that a wild length ends in an error.
pub const MAX_IMAGE: usize = 2 << 30;

/// The most bytes that one compressed entry may unpack to, see [`Entry::payload`].
pub const MAX_UNPACKED: usize = 1 << 30;

/// The most names in [`Global::points_to`].
const MOST_NAMED: usize = 4;

/// Why an image of code could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodeError {
    /// A pointer that leads to the image is null.
    #[error("the {0} pointer of the code image is null")]
    Null(&'static str),
    /// The wrapper has a version that this crate does not know.
    #[error("the code image's wrapper has the unknown version {0}")]
    WrapperVersion(u32),
    /// The bytes are none of fatbin, cubin and PTX.
    #[error("the bytes are no fatbin, no cubin and no PTX")]
    Unrecognised,
    /// Something is said to lie outside of the bytes that are there.
    #[error("the code image ends before its {0} does")]
    Truncated(&'static str),
    /// A field has a value that cannot be.
    #[error("the code image is malformed: {0}")]
    Malformed(&'static str),
    /// Something is larger than the limit on it.
    #[error("the code image's {what} is too large ({size}, the limit is {limit})")]
    TooLarge {
        /// The name of the part that is too large.
        what: &'static str,
        /// Its size, in bytes or items.
        size: u64,
        /// The limit on it, in the same unit.
        limit: u64,
    },
    /// The entry's compressed bytes do not unpack to what its header says.
    #[error("an entry of the code image does not unpack: {0}")]
    Unpack(String),
    /// The entry is kept in a form that only NVIDIA's tools read (link-time optimisation).
    #[error("an entry of kind {0} cannot be read")]
    Opaque(u16),
}
