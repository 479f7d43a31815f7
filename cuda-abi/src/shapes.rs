//! C structures of the driver API around shapes of memory: copies of boxes, arrays, textures and surfaces.

#![allow(missing_docs, reason = "the names are cuda.h's, and documented there")]

use crate::types::{CUcontext, CUdeviceptr, CudaMemcpy2d};

pub type CUarray = u64;
pub type CUmipmappedArray = u64;
pub type CUtexObject = u64;
pub type CUsurfObject = u64;

/// `CU_MEMORYTYPE_HOST`.
pub const CU_MEMORYTYPE_HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
pub const CU_MEMORYTYPE_DEVICE: u32 = 2;
/// `CU_MEMORYTYPE_ARRAY`.
pub const CU_MEMORYTYPE_ARRAY: u32 = 3;
/// `CU_MEMORYTYPE_UNIFIED`.
pub const CU_MEMORYTYPE_UNIFIED: u32 = 4;

/// The source or the destination in [`CudaMemcpy3d`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaMemcpy3dSide {
    pub x: usize,
    pub y: usize,
    pub z: usize,
    pub lod: usize,
    pub kind: u32,
    pub host: u64,
    pub device: CUdeviceptr,
    pub array: CUarray,
    /// In `CUDA_MEMCPY3D_PEER`; reserved otherwise.
    pub context: CUcontext,
    pub pitch: usize,
    pub height: usize,
}

/// `CUDA_MEMCPY3D_v2` and `CUDA_MEMCPY3D_PEER`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaMemcpy3d {
    pub src: CudaMemcpy3dSide,
    pub dst: CudaMemcpy3dSide,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
}

impl From<CudaMemcpy2d> for CudaMemcpy3d {
    fn from(c: CudaMemcpy2d) -> Self {
        let (src_host, dst_host) = (c.src_host as u64, c.dst_host as u64);
        let src = CudaMemcpy3dSide {
            x: c.src_x,
            y: c.src_y,
            kind: c.src_type,
            host: src_host,
            device: c.src_device,
            array: c.src_array,
            pitch: c.src_pitch,
            ..Default::default()
        };
        let dst = CudaMemcpy3dSide {
            x: c.dst_x,
            y: c.dst_y,
            kind: c.dst_type,
            host: dst_host,
            device: c.dst_device,
            array: c.dst_array,
            pitch: c.dst_pitch,
            ..Default::default()
        };
        Self { src, dst, width: c.width, height: c.height, depth: 1 }
    }
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUmemLocation {
    pub kind: u32,
    pub id: i32,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemcpyAttributes {
    pub order: u32,
    pub source_hint: CUmemLocation,
    pub target_hint: CUmemLocation,
    pub flags: u32,
}

/// `CUmemcpy3DOperand`: a pointer (type 1) with the length of rows and height of layers in elements, or an array (type
/// 2) with an offset in elements. A pointer's last word is its location hint.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CUmemcpy3DOperand {
    pub kind: u32,
    pub place: u64,
    pub words: [u64; 3],
}

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaMemcpy3dBatchOp {
    pub src: CUmemcpy3DOperand,
    pub dst: CUmemcpy3DOperand,
    pub extent: [usize; 3],
    pub order: u32,
    pub flags: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR_v2`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaArrayDescriptor {
    pub width: usize,
    pub height: usize,
    pub format: u32,
    pub channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v2`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaArray3dDescriptor {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

/// `CUDA_ARRAY_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaArrayDescriptorV1 {
    pub width: u32,
    pub height: u32,
    pub format: u32,
    pub channels: u32,
}

impl From<CudaArrayDescriptorV1> for CudaArray3dDescriptor {
    fn from(it: CudaArrayDescriptorV1) -> Self {
        let CudaArrayDescriptorV1 { width, height, format, channels } = it;
        Self { width: width as usize, height: height as usize, format, channels, ..Self::default() }
    }
}

impl From<CudaArray3dDescriptor> for CudaArrayDescriptorV1 {
    /// No array is wider or higher than 32 bits say.
    fn from(it: CudaArray3dDescriptor) -> Self {
        Self { width: it.width as u32, height: it.height as u32, format: it.format, channels: it.channels }
    }
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaArray3dDescriptorV1 {
    pub width: u32,
    pub height: u32,
    pub depth: u32,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

impl From<CudaArray3dDescriptorV1> for CudaArray3dDescriptor {
    fn from(it: CudaArray3dDescriptorV1) -> Self {
        let CudaArray3dDescriptorV1 { width, height, depth, format, channels, flags } = it;
        Self { width: width as usize, height: height as usize, depth: depth as usize, format, channels, flags }
    }
}

impl From<CudaArray3dDescriptor> for CudaArray3dDescriptorV1 {
    /// As for [`CudaArrayDescriptorV1`].
    fn from(it: CudaArray3dDescriptor) -> Self {
        let CudaArray3dDescriptor { width, height, depth, format, channels, flags } = it;
        Self { width: width as u32, height: height as u32, depth: depth as u32, format, channels, flags }
    }
}

/// `CUDA_ARRAY3D_LAYERED`.
pub const CUDA_ARRAY3D_LAYERED: u32 = 1;
/// `CUDA_ARRAY3D_SURFACE_LDST`.
pub const CUDA_ARRAY3D_SURFACE_LDST: u32 = 2;
/// `CUDA_ARRAY3D_CUBEMAP`.
pub const CUDA_ARRAY3D_CUBEMAP: u32 = 4;
/// `CUDA_ARRAY3D_TEXTURE_GATHER`.
pub const CUDA_ARRAY3D_TEXTURE_GATHER: u32 = 8;
/// `CUDA_ARRAY3D_SPARSE`, which has no memory of its own.
pub const CUDA_ARRAY3D_SPARSE: u32 = 0x40;
/// `CUDA_ARRAY3D_DEFERRED_MAPPING`, as above.
pub const CUDA_ARRAY3D_DEFERRED_MAPPING: u32 = 0x80;

/// Bytes of one channel of the plain formats (`CUarray_format`): integers, half and float.
pub fn channel_bytes(format: u32) -> Option<usize> {
    Some(match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return None,
    })
}

/// How a format lies in memory that says its channels itself (`CUarray_format`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packing {
    /// Texels along each edge of a block.
    pub edge: usize,
    /// Bytes of a block.
    pub bytes: usize,
    pub channels: u32,
}

/// The packing of block-compressed formats, and of normalised ones, whose blocks have one texel. `None` for the other formats that
/// say their channels: their planes are arrays of their own.
pub fn packing(format: u32) -> Option<Packing> {
    let of = |edge, bytes, channels| Some(Packing { edge, bytes, channels });
    match format {
        // BC1, with four channels; BC2 and BC3; BC4; BC5; BC6H; BC7.
        0x91 | 0x92 => of(4, 8, 4),
        0x93..=0x96 => of(4, 16, 4),
        0x97 | 0x98 => of(4, 8, 1),
        0x99 | 0x9a => of(4, 16, 2),
        0x9b | 0x9c => of(4, 16, 3),
        0x9d | 0x9e => of(4, 16, 4),
        // Four channels of 10, 10, 10 and 2 bits.
        0x50 => of(1, 4, 4),
        // One, two and four channels: of 8 and of 16 bits, without a sign and with one.
        0xc0..=0xcb => {
            let (kind, channels) = ((format - 0xc0) / 3, 1 << ((format - 0xc0) % 3));
            of(1, channels as usize * if kind % 2 == 0 { 1 } else { 2 }, channels)
        }
        _ => None,
    }
}

impl From<CudaArrayDescriptor> for CudaArray3dDescriptor {
    fn from(d: CudaArrayDescriptor) -> Self {
        let CudaArrayDescriptor { width, height, format, channels } = d;
        Self { width, height, depth: 0, format, channels, flags: 0 }
    }
}

impl CudaArray3dDescriptor {
    /// Bytes of an element, which is a block where the format is block-compressed; `None` for formats with several planes.
    pub fn element(&self) -> Option<usize> {
        if let Some(packing) = packing(self.format) {
            return Some(packing.bytes);
        }
        matches!(self.channels, 1 | 2 | 4).then_some(())?;
        Some(channel_bytes(self.format)? * self.channels as usize)
    }

    /// Texels along each edge of an element: more than one where the format is block-compressed.
    pub fn edge(&self) -> usize {
        packing(self.format).map_or(1, |it| it.edge)
    }

    /// The shape as copies see it: bytes of a row, rows, and slices or layers. What is not there counts as one. Rows of a
    /// block-compressed array are rows of blocks.
    pub fn extent(&self) -> Option<[usize; 3]> {
        let width = self.width.div_ceil(self.edge()).checked_mul(self.element()?)?;
        // The layers of a one-dimensional layered array are its depth, too.
        Some([width, self.height.max(1).div_ceil(self.edge()), self.depth.max(1)])
    }

    /// Bytes of its content.
    pub fn bytes(&self) -> Option<usize> {
        let [width, height, depth] = self.extent()?;
        width.checked_mul(height)?.checked_mul(depth)
    }

    /// The descriptor of a level of a mipmapped array of this one.
    pub fn level(&self, level: u32) -> Self {
        let half = |n: usize| if n == 0 { 0 } else { (n >> level.min(63)).max(1) };
        let layered = self.flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) != 0;
        let depth = if layered { self.depth } else { half(self.depth) };
        Self { width: half(self.width), height: half(self.height), depth, ..*self }
    }

    /// How many levels a mipmapped array of this size has at most.
    pub fn most_levels(&self) -> u32 {
        let layered = self.flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP) != 0;
        let longest = self.width.max(self.height).max(if layered { 0 } else { self.depth });
        usize::BITS - longest.leading_zeros()
    }
}

/// `CUDA_RESOURCE_DESC`: what a texture or surface is of. Its words mean, by type: 0 array; 1 mipmapped array; 2 linear:
/// address, format and channels, bytes; 3 pitched: address, format and channels, width, height, pitch.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaResourceDesc {
    pub kind: u32,
    pub words: [u64; 16],
    pub flags: u32,
}

/// `CU_RESOURCE_TYPE_ARRAY`.
pub const CU_RESOURCE_TYPE_ARRAY: u32 = 0;
/// `CU_RESOURCE_TYPE_MIPMAPPED_ARRAY`.
pub const CU_RESOURCE_TYPE_MIPMAPPED_ARRAY: u32 = 1;
/// `CU_RESOURCE_TYPE_LINEAR`.
pub const CU_RESOURCE_TYPE_LINEAR: u32 = 2;
/// `CU_RESOURCE_TYPE_PITCH2D`.
pub const CU_RESOURCE_TYPE_PITCH2D: u32 = 3;

/// The memory that a texture reads where that memory is no array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearResource {
    pub address: CUdeviceptr,
    pub format: u32,
    pub channels: u32,
    /// Elements of a row; for linear memory, all of them.
    pub width: usize,
    pub height: usize,
    /// Bytes from row to row.
    pub pitch: usize,
}

impl CudaResourceDesc {
    /// The memory that it names, if it names no array.
    pub fn linear(&self) -> Option<LinearResource> {
        let [address, shape, width, height, pitch, ..] = self.words;
        let (format, channels) = (shape as u32, (shape >> 32) as u32);
        let element = channel_bytes(format)?.checked_mul(channels as usize).filter(|e| *e > 0)?;
        let (width, height, pitch) = (width as usize, height as usize, pitch as usize);
        match self.kind {
            CU_RESOURCE_TYPE_LINEAR => {
                Some(LinearResource { address, format, channels, width: width / element, height: 0, pitch: width })
            }
            CU_RESOURCE_TYPE_PITCH2D => Some(LinearResource { address, format, channels, width, height, pitch }),
            _ => None,
        }
    }

    /// Bytes from the address to the end of what is read.
    pub fn linear_bytes(&self) -> Option<u64> {
        let linear = self.linear()?;
        if self.kind == CU_RESOURCE_TYPE_LINEAR {
            return Some(linear.pitch as u64);
        }
        let row = linear.width.checked_mul(channel_bytes(linear.format)?.checked_mul(linear.channels as usize)?)?;
        Some(linear.pitch.checked_mul(linear.height.checked_sub(1)?)?.checked_add(row)? as u64)
    }
}

/// `CUDA_TEXTURE_DESC`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CudaTextureDesc {
    pub address_mode: [u32; 3],
    pub filter_mode: u32,
    pub flags: u32,
    pub max_anisotropy: u32,
    pub mipmap_filter_mode: u32,
    pub mipmap_level_bias: f32,
    pub min_mipmap_level_clamp: f32,
    pub max_mipmap_level_clamp: f32,
    pub border_color: [f32; 4],
    pub reserved: [u32; 12],
}

/// `CUDA_RESOURCE_VIEW_DESC`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaResourceViewDesc {
    pub format: u32,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub first_level: u32,
    pub last_level: u32,
    pub first_layer: u32,
    pub last_layer: u32,
    pub reserved: [u32; 16],
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaArrayMemoryRequirements {
    pub size: usize,
    pub alignment: usize,
    pub reserved: [u32; 4],
}

/// A structure's bytes as words, to travel. The length must be a multiple of four, and padding must be none of its
/// value: every structure of this module is made of whole words, or is rounded up.
pub trait Plain: Copy {}
impl Plain for CudaResourceDesc {}
impl Plain for CudaTextureDesc {}
impl Plain for CudaResourceViewDesc {}

/// Reads a structure that travelled as bytes.
pub fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    if bytes.len() != size_of::<T>() {
        return None;
    }
    // SAFETY: as many bytes as the structure has, and any bits are a valid value of it: numbers alone.
    Some(unsafe { bytes.as_ptr().cast::<T>().read_unaligned() })
}

/// A structure's bytes, padding as zeros.
///
/// # Safety
/// `value` points to a structure of the caller's whose every byte may be read.
pub unsafe fn to_bytes<T: Plain>(value: *const T) -> Vec<u8> {
    let mut bytes = vec![0; size_of::<T>()];
    // SAFETY: the caller's promise; the vector has as many bytes.
    unsafe { std::ptr::copy_nonoverlapping(value.cast::<u8>(), bytes.as_mut_ptr(), bytes.len()) };
    bytes
}

/// As the headers have them.
const _: () = {
    assert!(size_of::<CudaMemcpy3d>() == 200 && size_of::<CudaMemcpy3dSide>() == 88);
    assert!(size_of::<CudaMemcpy3dBatchOp>() == 112 && size_of::<CUmemcpyAttributes>() == 24);
    assert!(size_of::<CudaArray3dDescriptor>() == 40 && size_of::<CudaArrayDescriptor>() == 24);
    assert!(size_of::<CudaResourceDesc>() == 144 && size_of::<CudaTextureDesc>() == 104);
    assert!(size_of::<CudaResourceViewDesc>() == 112 && size_of::<CudaArrayMemoryRequirements>() == 32);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_half_of_the_one_before_and_never_nothing() {
        let d = CudaArray3dDescriptor { width: 10, height: 3, depth: 0, format: 0x20, channels: 4, flags: 0 };
        assert_eq!(d.most_levels(), 4);
        assert_eq!(d.extent(), Some([160, 3, 1]));
        assert_eq!((d.level(1).width, d.level(1).height, d.level(1).depth), (5, 1, 0));
        let layered = CudaArray3dDescriptor { depth: 6, flags: CUDA_ARRAY3D_LAYERED, ..d };
        assert_eq!(layered.level(3).depth, 6);
        assert_eq!(CudaArray3dDescriptor { channels: 3, ..d }.element(), None);
    }

    #[test]
    fn copies_see_blocks_of_a_compressed_array() {
        let of =
            |format, width, height| CudaArray3dDescriptor { format, width, height, channels: 4, ..Default::default() };
        let (bc1, bc7) = (of(0x91, 64, 32), of(0x9d, 64, 32));
        assert_eq!((bc1.element(), bc1.extent()), (Some(8), Some([128, 8, 1])));
        assert_eq!((bc7.element(), bc7.extent()), (Some(16), Some([256, 8, 1])));
        // Levels that are smaller than a block have one.
        assert_eq!(bc1.level(5).extent(), Some([8, 1, 1]));
        assert_eq!(of(0x91, 6, 5).extent(), Some([16, 2, 1]));
        // Two planes.
        assert_eq!(of(0xb0, 64, 32).extent(), None);
    }

    #[test]
    fn normalised_formats_have_elements_as_their_names_say() {
        let bytes = |format| packing(format).map(|it| (it.bytes, it.channels, it.edge));
        let sizes: Vec<_> = (0xc0..=0xcb).map(|format| bytes(format).unwrap_or_default()).collect();
        let (eight, sixteen) = ([(1, 1, 1), (2, 2, 1), (4, 4, 1)], [(2, 1, 1), (4, 2, 1), (8, 4, 1)]);
        assert_eq!(sizes, [eight, sixteen, eight, sixteen].concat());
        assert_eq!((bytes(0x50), bytes(0xcc), bytes(0x20)), (Some((4, 4, 1)), None, None));
    }

    #[test]
    fn a_pitched_texture_ends_with_its_last_row() {
        let shape = 0x20 | 4 << 32;
        let mut desc = CudaResourceDesc { kind: CU_RESOURCE_TYPE_PITCH2D, ..Default::default() };
        desc.words[..5].copy_from_slice(&[0x1000, shape, 10, 3, 512]);
        assert_eq!(desc.linear_bytes(), Some(2 * 512 + 160));
        desc.words[3] = 0;
        assert_eq!(desc.linear_bytes(), None);
    }
}
