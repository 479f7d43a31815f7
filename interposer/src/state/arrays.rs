//! Arrays, textures and surfaces with their descriptors, from which this process checks calls and answers queries.

use std::collections::HashMap;
use std::sync::{RwLock, RwLockReadGuard};

use rekindle_cuda_abi::types::*;

/// An array.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) desc: CudaArray3dDescriptor,
    pub(crate) context: CUcontext,
    /// Whether it is a level of a mipmapped array, with which it goes.
    pub(crate) level: bool,
}

/// A mipmapped array.
#[derive(Clone, Debug)]
pub(crate) struct Mipmapped {
    pub(crate) levels: Vec<CUarray>,
    pub(crate) context: CUcontext,
}

/// A texture, or a surface, which is not described any further.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Texture {
    /// The worker's handle; programs have the driver's own value, which kernels use.
    pub(crate) handle: u64,
    pub(crate) resource: CudaResourceDesc,
    pub(crate) texture: Option<CudaTextureDesc>,
    pub(crate) view: Option<CudaResourceViewDesc>,
}

#[derive(Default)]
struct Known {
    arrays: HashMap<CUarray, Array>,
    mipmapped: HashMap<CUmipmappedArray, Mipmapped>,
    /// Textures and surfaces by context and value.
    textures: HashMap<(CUcontext, u64), Texture>,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Arrays {
    known: RwLock<Known>,
}

impl Arrays {
    fn known(&self) -> Result<RwLockReadGuard<'_, Known>, CUresult> {
        self.known.read().map_err(|_| CUDA_ERROR_UNKNOWN)
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        if let Ok(mut known) = self.known.write() {
            change(&mut known);
        }
    }

    /// The array of a handle.
    pub(crate) fn get(&self, array: CUarray) -> Result<Array, CUresult> {
        self.known()?.arrays.get(&array).cloned().ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn insert(&self, handle: CUarray, array: Array) {
        self.change(|known| {
            known.arrays.insert(handle, array);
        });
    }

    pub(crate) fn remove(&self, handle: CUarray) {
        self.change(|known| {
            known.arrays.remove(&handle);
        });
    }

    /// The mipmapped array of a handle.
    pub(crate) fn mipmapped(&self, array: CUmipmappedArray) -> Result<Mipmapped, CUresult> {
        self.known()?.mipmapped.get(&array).cloned().ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn insert_mipmapped(&self, handle: CUmipmappedArray, array: Mipmapped) {
        self.change(|known| {
            known.mipmapped.insert(handle, array);
        });
    }

    /// Takes a mipmapped array out, and its levels.
    pub(crate) fn remove_mipmapped(&self, handle: CUmipmappedArray, array: &Mipmapped) {
        self.change(|known| {
            known.mipmapped.remove(&handle);
            for level in &array.levels {
                known.arrays.remove(level);
            }
        });
    }

    /// The texture or surface of a value, which the driver gives anew in each context.
    pub(crate) fn texture(&self, context: CUcontext, value: u64) -> Result<Texture, CUresult> {
        self.known()?.textures.get(&(context, value)).copied().ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    pub(crate) fn insert_texture(&self, context: CUcontext, value: u64, texture: Texture) {
        self.change(|known| {
            known.textures.insert((context, value), texture);
        });
    }

    /// Takes a texture (or, where `texture` is false, a surface) out.
    pub(crate) fn take_texture(&self, context: CUcontext, value: u64, texture: bool) -> Result<Texture, CUresult> {
        let mut known = self.known.write().map_err(|_| CUDA_ERROR_UNKNOWN)?;
        let of_kind = |t: &&Texture| t.texture.is_some() == texture;
        let found = known.textures.get(&(context, value)).filter(of_kind).copied();
        known.textures.remove(&found.map(|_| (context, value)).ok_or(CUDA_ERROR_INVALID_HANDLE)?);
        found.ok_or(CUDA_ERROR_INVALID_HANDLE)
    }

    /// Forgets the objects of a context.
    pub(crate) fn forget_context(&self, context: CUcontext) {
        self.change(|known| {
            known.arrays.retain(|_, a| a.context != context);
            known.mipmapped.retain(|_, a| a.context != context);
            known.textures.retain(|(c, _), _| *c != context);
        });
    }
}
