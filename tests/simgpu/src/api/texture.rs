//! Texture and surface objects.

use std::sync::Arc;

use rekindle_cuda_abi::arguments::{In, Out};
use rekindle_cuda_abi::types::{
    CU_RESOURCE_TYPE_ARRAY, CU_RESOURCE_TYPE_LINEAR, CU_RESOURCE_TYPE_MIPMAPPED_ARRAY, CU_RESOURCE_TYPE_PITCH2D,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, CUresult, CUsurfObject, CUtexObject, CudaResourceDesc,
    CudaResourceViewDesc, CudaTextureDesc, packing,
};

use crate::array::Array;
use crate::array::Mipmapped;
use crate::blocks;
use crate::memory::space;
use crate::status::{Result, ensure, status};
use crate::texture::{Bound, Resource};
use crate::{current, handles};

/// The alignments of addresses and pitches of textures, which the device's attributes give.
const ALIGN: u64 = 512;
const PITCH_ALIGN: usize = 32;

fn resource(desc: &CudaResourceDesc) -> Result<Resource> {
    ensure(desc.flags == 0, CUDA_ERROR_INVALID_VALUE)?;
    Ok(match desc.kind {
        CU_RESOURCE_TYPE_ARRAY => Resource::Levels(vec![handles::get::<Array>(desc.words[0])?]),
        CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => Resource::Levels(handles::get::<Mipmapped>(desc.words[0])?.levels.clone()),
        CU_RESOURCE_TYPE_LINEAR | CU_RESOURCE_TYPE_PITCH2D => {
            let linear = desc.linear().ok_or(CUDA_ERROR_INVALID_VALUE)?;
            let bytes = desc.linear_bytes().ok_or(CUDA_ERROR_INVALID_VALUE)?.max(1);
            ensure(linear.address.is_multiple_of(ALIGN), CUDA_ERROR_INVALID_VALUE)?;
            let pitched = desc.kind == CU_RESOURCE_TYPE_PITCH2D;
            ensure(!pitched || linear.pitch.is_multiple_of(PITCH_ALIGN), CUDA_ERROR_INVALID_VALUE)?;
            let device = current::current()?.device.ordinal;
            let good = space::is_covered(linear.address, bytes, |r| r.readers & 1 << device != 0);
            ensure(good, CUDA_ERROR_INVALID_VALUE)?;
            Resource::Linear(linear)
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

fn check(desc: &CudaTextureDesc) -> Result<()> {
    const READ_AS_INTEGER: u32 = 1;
    const SRGB: u32 = 0x10;
    ensure(desc.flags & !0x73 == 0 && desc.filter_mode <= 1, CUDA_ERROR_INVALID_VALUE)?;
    ensure(desc.address_mode.iter().all(|mode| *mode <= 3), CUDA_ERROR_INVALID_VALUE)?;
    // Integers cannot be interpolated.
    ensure(desc.filter_mode == 0 || desc.flags & READ_AS_INTEGER == 0, CUDA_ERROR_INVALID_VALUE)?;
    ensure(desc.flags & SRGB == 0, CUDA_ERROR_NOT_SUPPORTED)
}

pub fn cuTexObjectCreate(
    out: Out<CUtexObject>,
    described: In<CudaResourceDesc>,
    texture: In<CudaTextureDesc>,
    view: *const CudaResourceViewDesc,
) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let (described, texture) = (*described.read()?, *texture.read()?);
        check(&texture)?;
        let resource = resource(&described)?;
        if let Resource::Levels(levels) = &resource {
            let reads = |format| packing(format).is_none_or(|it| it.edge == 1) || blocks::reads(format);
            ensure(levels.iter().all(|level| reads(level.desc.format)), CUDA_ERROR_NOT_SUPPORTED)?;
        }
        // A view reads elements as another type, or only some of them.
        ensure(view.is_null(), CUDA_ERROR_NOT_SUPPORTED)?;
        let bound = Bound { described, texture: Some(texture), view: None, resource };
        out.put(context.bindings.bind(bound))
    })
}

pub fn cuTexObjectDestroy(texture: CUtexObject) -> CUresult {
    status(|| current::current()?.bindings.unbind(texture, true))
}

fn bound(handle: u64, texture: bool) -> Result<Arc<Bound>> {
    let bound = current::current()?.bindings.get(handle)?;
    ensure(bound.texture.is_some() == texture, CUDA_ERROR_INVALID_VALUE)?;
    Ok(bound)
}

pub fn cuTexObjectGetResourceDesc(out: Out<CudaResourceDesc>, texture: CUtexObject) -> CUresult {
    status(|| out.put(bound(texture, true)?.described))
}

pub fn cuTexObjectGetTextureDesc(out: Out<CudaTextureDesc>, texture: CUtexObject) -> CUresult {
    status(|| out.put(bound(texture, true)?.texture.ok_or(CUDA_ERROR_INVALID_VALUE)?))
}

pub fn cuTexObjectGetResourceViewDesc(out: Out<CudaResourceViewDesc>, texture: CUtexObject) -> CUresult {
    status(|| out.put(bound(texture, true)?.view.unwrap_or_default()))
}

pub fn cuSurfObjectCreate(out: Out<CUsurfObject>, described: In<CudaResourceDesc>) -> CUresult {
    status(|| {
        let context = current::healthy()?;
        ensure(!out.is_null(), CUDA_ERROR_INVALID_VALUE)?;
        let described = *described.read()?;
        ensure(described.kind == CU_RESOURCE_TYPE_ARRAY, CUDA_ERROR_INVALID_VALUE)?;
        // The driver does not check whether the array was made for surfaces.
        let resource = resource(&described)?;
        out.put(context.bindings.bind(Bound { described, texture: None, view: None, resource }))
    })
}

pub fn cuSurfObjectDestroy(surface: CUsurfObject) -> CUresult {
    status(|| current::current()?.bindings.unbind(surface, false))
}

pub fn cuSurfObjectGetResourceDesc(out: Out<CudaResourceDesc>, surface: CUsurfObject) -> CUresult {
    status(|| out.put(bound(surface, false)?.described))
}
