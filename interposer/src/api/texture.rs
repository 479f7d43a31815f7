//! Texture and surface objects: the worker makes them; how they were described is known here.

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{Kind, SURFACE_CREATE, TEXTURE_CREATE, TEXTURE_DESTROY, TextureCreate, TextureDestroy};

use super::{check, code, put};
use crate::call::Call;
use crate::state::arrays::Texture;
use crate::state::client::{self, Client};

/// Makes the driver's checks of a resource: the worker would take a wrong one for an error of this library.
fn check_resource(client: &Client, desc: &CudaResourceDesc) -> Result<(), CUresult> {
    match desc.kind {
        CU_RESOURCE_TYPE_ARRAY => client.arrays.get(desc.words[0]).map(|_| ()),
        CU_RESOURCE_TYPE_MIPMAPPED_ARRAY => client.arrays.mipmapped(desc.words[0]).map(|_| ()),
        CU_RESOURCE_TYPE_LINEAR | CU_RESOURCE_TYPE_PITCH2D => {
            let linear = desc.linear().ok_or(CUDA_ERROR_INVALID_VALUE)?;
            let bytes = desc.linear_bytes().ok_or(CUDA_ERROR_INVALID_VALUE)?;
            let end = linear.address.checked_add(bytes);
            if end.is_none() || !client.memory.is_direct(linear.address, bytes.max(1)) {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            Ok(())
        }
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// Creates a texture or surface in the worker, and keeps its descriptors. The blobs are the bytes of the descriptors.
fn create(call: u16, kind: Kind, texture: Texture, blobs: [Vec<u8>; 3]) -> Result<u64, CUresult> {
    let client = client::get()?;
    let (context, _) = client.contexts.current()?;
    check_resource(client, &texture.resource)?;
    let mut call = Call::in_context(call)?;
    let handle = client.fresh(kind);
    let [resource, sampler, view] = &blobs;
    call.put(&TextureCreate { handle, value: 0, resource, texture: sampler, view });
    let (result, mut reply) = call.wait();
    check(result)?;
    let value = reply.word().ok_or(CUDA_ERROR_UNKNOWN)?;
    client.arrays.insert_texture(context, value, Texture { handle, ..texture });
    Ok(value)
}

pub(crate) unsafe fn cuTexObjectCreate(
    out: *mut CUtexObject,
    resource: *const CudaResourceDesc,
    texture: *const CudaTextureDesc,
    view: *const CudaResourceViewDesc,
) -> CUresult {
    if out.is_null() || resource.is_null() || texture.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, or tested for it, so readable by cuda.h's contract.
    let (known, blobs) = unsafe {
        let view_bytes = if view.is_null() { Vec::new() } else { to_bytes(view) };
        let known = Texture {
            handle: 0,
            resource: *resource,
            texture: Some(*texture),
            view: if view.is_null() { None } else { Some(*view) },
        };
        (known, [to_bytes(resource), to_bytes(texture), view_bytes])
    };
    // SAFETY: not null, so writable by cuda.h's contract.
    code(create(TEXTURE_CREATE, Kind::TexObject, known, blobs).and_then(|value| unsafe { put(out, value) }))
}

pub(crate) unsafe fn cuSurfObjectCreate(out: *mut CUsurfObject, resource: *const CudaResourceDesc) -> CUresult {
    if out.is_null() || resource.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, so readable by cuda.h's contract.
    let (known, bytes) =
        unsafe { (Texture { handle: 0, resource: *resource, texture: None, view: None }, to_bytes(resource)) };
    if known.resource.kind != CU_RESOURCE_TYPE_ARRAY {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let blobs = [bytes, Vec::new(), Vec::new()];
    // SAFETY: not null, so writable by cuda.h's contract.
    code(create(SURFACE_CREATE, Kind::SurfObject, known, blobs).and_then(|value| unsafe { put(out, value) }))
}

/// Kernels that were enqueued before may still read it, as with the driver.
fn destroy(value: u64, texture: bool) -> CUresult {
    code(client::get().and_then(|client| {
        let (context, _) = client.contexts.current()?;
        let known = client.arrays.take_texture(context, value, texture)?;
        let mut call = Call::new(TEXTURE_DESTROY)?;
        call.put(&TextureDestroy { handle: known.handle });
        check(call.send())
    }))
}

pub(crate) unsafe fn cuTexObjectDestroy(texture: CUtexObject) -> CUresult {
    destroy(texture, true)
}

pub(crate) unsafe fn cuSurfObjectDestroy(surface: CUsurfObject) -> CUresult {
    destroy(surface, false)
}

fn known(value: u64, texture: bool) -> Result<Texture, CUresult> {
    let client = client::get()?;
    let (context, _) = client.contexts.current()?;
    let known = client.arrays.texture(context, value)?;
    if known.texture.is_some() == texture { Ok(known) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

pub(crate) unsafe fn cuTexObjectGetResourceDesc(out: *mut CudaResourceDesc, texture: CUtexObject) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(known(texture, true).and_then(|known| unsafe { put(out, known.resource) }))
}

pub(crate) unsafe fn cuTexObjectGetTextureDesc(out: *mut CudaTextureDesc, texture: CUtexObject) -> CUresult {
    let described = known(texture, true).and_then(|known| known.texture.ok_or(CUDA_ERROR_INVALID_VALUE));
    // SAFETY: the caller's promise by cuda.h.
    code(described.and_then(|described| unsafe { put(out, described) }))
}

pub(crate) unsafe fn cuTexObjectGetResourceViewDesc(out: *mut CudaResourceViewDesc, texture: CUtexObject) -> CUresult {
    // A texture that was made without a view has a view of zeros.
    // SAFETY: the caller's promise by cuda.h.
    code(known(texture, true).and_then(|known| unsafe { put(out, known.view.unwrap_or_default()) }))
}

pub(crate) unsafe fn cuSurfObjectGetResourceDesc(out: *mut CudaResourceDesc, surface: CUsurfObject) -> CUresult {
    // SAFETY: the caller's promise by cuda.h.
    code(known(surface, false).and_then(|known| unsafe { put(out, known.resource) }))
}
