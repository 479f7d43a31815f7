//! What a node does.

use std::collections::BTreeMap;
use std::ffi::c_void;

use rekindle_cuda_abi::types::*;

use crate::Result;

/// What a node does.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Launches a kernel.
    Kernel(Kernel),
    /// Copies.
    Copy(Copy),
    /// Sets memory to a value.
    Fill(Fill),
    /// Calls a function of the application's.
    Host(Host),
    /// Runs another graph, which this node owns.
    Child(CUgraph),
    /// Nothing.
    Empty,
    /// Waits for an event.
    Wait(CUevent),
    /// Records an event.
    Record(CUevent),
    /// From here on this memory is there.
    Allocate(Memory),
    /// From here on this memory is not there.
    Free(CUdeviceptr),
    /// Operations on words of memory.
    Words(Words),
}

/// A kernel launch.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// Function or kernel.
    pub function: u64,
    /// Whether it was named as a kernel, not as a function.
    pub by_kernel: bool,
    /// Where it runs.
    pub context: CUcontext,
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block in each dimension.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// Offset and size of each parameter.
    pub layout: Vec<(u32, u32)>,
    /// The parameters at their offsets.
    pub parameters: Vec<u8>,
    /// `CU_LAUNCH_ATTRIBUTE_*` and their values.
    pub attributes: BTreeMap<u32, CUlaunchAttributeValue>,
    /// What was handed out as `kernelParams`: addresses in `parameters`.
    pub pointers: Vec<u64>,
}

impl PartialEq for Kernel {
    fn eq(&self, other: &Self) -> bool {
        let what = |k: &Self| (k.function, k.context, k.grid, k.block, k.shared_bytes);
        what(self) == what(other) && self.parameters == other.parameters && self.attributes == other.attributes
    }
}

/// A copy.
#[derive(Clone, Copy, Debug)]
pub struct Copy {
    /// As it was described.
    pub copy: CudaMemcpy3d,
    /// Where it runs.
    pub context: CUcontext,
}

impl PartialEq for Copy {
    fn eq(&self, other: &Self) -> bool {
        let side = |s: &CudaMemcpy3dSide| (s.x, s.y, s.z, s.kind, s.host, s.device, s.array, s.pitch, s.height);
        let size = |c: &Self| (c.copy.width, c.copy.height, c.copy.depth, c.context);
        side(&self.copy.src) == side(&other.copy.src)
            && side(&self.copy.dst) == side(&other.copy.dst)
            && size(self) == size(other)
    }
}

/// A memset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// As it was described.
    pub fill: CudaMemsetNodeParams,
    /// Where it runs.
    pub context: CUcontext,
}

/// A function of the application's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its address.
    pub function: u64,
    /// What it is called with.
    pub data: u64,
}

/// Memory of an allocation node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    pub(crate) address: CUdeviceptr,
    pub(crate) bytes: usize,
    pub(crate) device: CUdevice,
}

/// Operations on words of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    /// Where they run.
    pub context: CUcontext,
    /// In their order.
    pub operations: Vec<CUstreamBatchMemOpParams>,
    /// Of all.
    pub flags: u32,
}

impl Task {
    /// `CUgraphNodeType`.
    pub fn kind(&self) -> u32 {
        match self {
            Self::Kernel(_) => 0,
            Self::Copy(_) => 1,
            Self::Fill(_) => 2,
            Self::Host(_) => 3,
            Self::Child(_) => 4,
            Self::Empty => 5,
            Self::Wait(_) => 6,
            Self::Record(_) => 7,
            Self::Allocate(_) => 10,
            Self::Free(_) => 11,
            Self::Words(_) => 12,
        }
    }
}

/// `CU_LAUNCH_PARAM_BUFFER_POINTER` and `..._SIZE`: what follows them in `extra`.
const BUFFER: usize = 1;
const BUFFER_SIZE: usize = 2;

/// Most bytes of parameters that any kernel takes (`cuda.h`: 32,764 from Volta on).
const MAX_PARAMETERS: usize = 32_764;

/// Gathers a launch's parameters at their offsets.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` where they do not fit the layout.
///
/// # Safety
/// `params` and `extra` are null, or as `cuLaunchKernel` wants them for a kernel of this layout.
pub(crate) unsafe fn gather(
    layout: &[(u32, u32)],
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Result<Vec<u8>> {
    let end = |&(offset, size): &(u32, u32)| offset as usize + size as usize;
    let size = layout.iter().map(end).max().unwrap_or(0);
    if size > MAX_PARAMETERS || (!params.is_null() && !extra.is_null()) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if extra.is_null() {
        let mut bytes = vec![0; size];
        if params.is_null() && !layout.is_empty() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        for (i, &(offset, size)) in layout.iter().enumerate() {
            // SAFETY: one pointer for each parameter, each to a value of the parameter's size, by the caller's promise.
            unsafe {
                let value = *params.add(i);
                if value.is_null() {
                    return Err(CUDA_ERROR_INVALID_VALUE);
                }
                let to = bytes.as_mut_ptr().add(offset as usize);
                std::ptr::copy_nonoverlapping(value.cast::<u8>(), to, size as usize);
            }
        }
        return Ok(bytes);
    }
    let (mut buffer, mut length) = (std::ptr::null::<u8>(), 0_usize);
    for pair in 0..3 {
        // SAFETY: pairs up to the end marker, by the caller's promise.
        let (key, value) = unsafe { (*extra.add(pair * 2) as usize, extra.add(pair * 2 + 1)) };
        match key {
            0 => break,
            // SAFETY: a key has a value behind it.
            BUFFER => buffer = unsafe { *value }.cast(),
            // SAFETY: the value is a pointer to the size.
            BUFFER_SIZE => length = unsafe { (*value).cast::<usize>().read() },
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    if length > MAX_PARAMETERS || length < size || (buffer.is_null() && length > 0) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's buffer holds that many bytes.
    Ok(if length == 0 { Vec::new() } else { unsafe { std::slice::from_raw_parts(buffer, length) }.to_vec() })
}
