//! Arrays: memory of a device that only copies, textures and surfaces reach. A real GPU lays out their elements in a private
//! way; here their rows follow each other.

use std::sync::Arc;

use rekindle_cuda_abi::types::{
    CUDA_ARRAY3D_CUBEMAP, CUDA_ARRAY3D_DEFERRED_MAPPING, CUDA_ARRAY3D_LAYERED, CUDA_ARRAY3D_SPARSE,
    CUDA_ARRAY3D_SURFACE_LDST, CUDA_ARRAY3D_TEXTURE_GATHER, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED,
    CUDA_ERROR_OUT_OF_MEMORY, CudaArray3dDescriptor, packing,
};

use crate::device::{Device, devices};
use crate::handles::{self, Object};
use crate::memory::space::{self, Kind};
use crate::status::{Result, ensure};

/// An array, or a level of a mipmapped one.
#[derive(Debug)]
pub(crate) struct Array {
    /// Its handle.
    pub(crate) handle: u64,
    /// The context it belongs to, by its handle.
    pub(crate) context: u64,
    /// Its shape.
    pub(crate) desc: CudaArray3dDescriptor,
    /// The address of its memory.
    pub(crate) base: u64,
    /// Whether it is a level of a mipmapped array, whose memory it lies in.
    pub(crate) level: bool,
}

/// The flags below. Other flags are errors.
const FLAGS: u32 = 0x7f;

/// Whether the driver would make an array of this shape.
pub(crate) fn check(d: &CudaArray3dDescriptor) -> Result<()> {
    let flag = |flag: u32| d.flags & flag != 0;
    ensure(!flag(CUDA_ARRAY3D_SPARSE) && !flag(CUDA_ARRAY3D_DEFERRED_MAPPING), CUDA_ERROR_NOT_SUPPORTED)?;
    ensure(d.flags & !FLAGS == 0 && d.element().is_some() && d.width > 0, CUDA_ERROR_INVALID_VALUE)?;
    if let Some(packing) = packing(d.format) {
        // Surfaces are of elements, and blocks are of planes.
        let good = packing.edge == 1 || d.height > 0 && !flag(CUDA_ARRAY3D_SURFACE_LDST);
        ensure(good && d.channels == packing.channels, CUDA_ERROR_INVALID_VALUE)?;
    }
    let (layered, cube) = (flag(CUDA_ARRAY3D_LAYERED), flag(CUDA_ARRAY3D_CUBEMAP));
    let good = match (layered, cube) {
        (false, true) => d.width == d.height && d.depth == 6,
        (true, true) => d.width == d.height && d.depth > 0 && d.depth.is_multiple_of(6),
        (true, false) => d.depth > 0,
        // Without a height, the depth must be 0, too.
        (false, false) => d.height > 0 || d.depth == 0,
    };
    let gather = !flag(CUDA_ARRAY3D_TEXTURE_GATHER) || (d.height > 0 && d.depth == 0);
    let volume = d.depth > 0 && !layered && !cube;
    let most = match (volume, d.height > 0) {
        (true, _) => [16384, 16384, 16384],
        (false, true) if layered || cube => [32768, 32768, 2048],
        (false, true) => [131_072, 65536, 0],
        (false, false) => [if layered { 32768 } else { 131_072 }, 0, 2048],
    };
    let fits = d.width <= most[0] && d.height <= most[1] && d.depth <= most[2];
    ensure(good && gather && fits, CUDA_ERROR_INVALID_VALUE)
}

/// Takes memory for an array of a context, filled with zeros.
fn memory(device: &Device, context: u64, bytes: usize) -> Result<u64> {
    device.allocate(context, Kind::Internal, bytes as u64)
}

/// Gives an array's memory back.
pub(crate) fn give_back(base: u64) {
    if let Some(region) = space::remove(base, |r| r.kind == Kind::Internal)
        && let Some(device) = devices().get(region.device)
    {
        device.reclaim(&region);
    }
}

impl Array {
    /// Makes an array that belongs to the context of that handle.
    pub(crate) fn create(device: &Device, context: u64, handle: u64, desc: CudaArray3dDescriptor) -> Result<Self> {
        check(&desc)?;
        let bytes = desc.bytes().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        Ok(Self { handle, context, desc, base: memory(device, context, bytes)?, level: false })
    }

    /// Bytes of a row, rows, and slices or layers.
    pub(crate) fn extent(&self) -> [usize; 3] {
        self.desc.extent().unwrap_or([0; 3])
    }
}

/// A mipmapped array: its levels lie one behind the other in one piece of memory.
#[derive(Debug)]
pub(crate) struct Mipmapped {
    /// Its handle.
    pub(crate) handle: u64,
    /// The context it belongs to, by its handle.
    pub(crate) context: u64,
    /// The address of its memory.
    pub(crate) base: u64,
    /// The levels, the largest first.
    pub(crate) levels: Vec<Arc<Array>>,
}

impl Object for Array {
    fn belongs_to(&self, context: u64) -> bool {
        self.context == context
    }
}

impl Object for Mipmapped {
    fn belongs_to(&self, context: u64) -> bool {
        self.context == context
    }
}

impl Mipmapped {
    /// Makes a mipmapped array of that many levels, or as many as its size has.
    pub(crate) fn create(device: &Device, context: u64, desc: CudaArray3dDescriptor, levels: u32) -> Result<Self> {
        check(&desc)?;
        /// The alignment of a level's first byte.
        const ALIGN: usize = 512;
        let descs: Vec<_> = (0..levels.min(desc.most_levels())).map(|level| desc.level(level)).collect();
        let sizes: Option<Vec<usize>> = descs.iter().map(|d| Some(d.bytes()?.next_multiple_of(ALIGN))).collect();
        let sizes = sizes.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let base = memory(device, context, sizes.iter().sum())?;
        let mut at = base;
        let level = |(desc, size): (CudaArray3dDescriptor, usize)| {
            let here = at;
            at += size as u64;
            Arc::new(Array { handle: handles::next(), context, desc, base: here, level: true })
        };
        let levels = descs.into_iter().zip(sizes).map(level).collect();
        Ok(Self { handle: handles::next(), context, base, levels })
    }
}
