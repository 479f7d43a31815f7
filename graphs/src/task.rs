//! The work of a node.

use std::collections::BTreeMap;

use rekindle_cuda_abi::types::*;

/// The work of a node.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Launches a kernel.
    Kernel(Kernel),
    /// Copies a box of memory.
    Copy(Copy),
    /// Sets memory to a value.
    Fill(Fill),
    /// Calls a function of the application's.
    Host(Host),
    /// Runs another graph, which this node owns.
    Child(CUgraph),
    /// Does nothing.
    Empty,
    /// Waits for an event.
    Wait(CUevent),
    /// Records an event.
    Record(CUevent),
    /// Allocates this memory.
    Allocate(Memory),
    /// Frees the memory at this address.
    Free(CUdeviceptr),
    /// Operations on words of memory.
    Words(Words),
    /// Runs one of the graphs that this node owns, or one repeatedly, or none.
    Conditional(Conditional),
}

/// A node that looks at a condition of its graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conditional {
    /// The condition's.
    pub handle: u64,
    /// `CU_GRAPH_COND_TYPE_*`.
    pub kind: u32,
    /// The context in which it runs.
    pub context: CUcontext,
    /// The value that the condition gets at each launch.
    pub default: u32,
    /// Whether it gets that value at all.
    pub assigns: bool,
    /// The graphs. A program gets the address of this list, which never changes.
    pub bodies: Vec<CUgraph>,
}

/// A kernel launch.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    /// Function or kernel.
    pub function: u64,
    /// Whether the application named a kernel rather than a function.
    pub by_kernel: bool,
    /// The context in which it runs.
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
    /// The `kernelParams` that were handed out: addresses in `parameters`.
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
    /// The parameters as the application gave them.
    pub copy: CudaMemcpy3d,
    /// The context in which it runs.
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
    /// The parameters as the application gave them.
    pub fill: CudaMemsetNodeParams,
    /// The context in which it runs.
    pub context: CUcontext,
}

/// A function of the application's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its address.
    pub function: u64,
    /// Its argument.
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
    /// The context in which they run.
    pub context: CUcontext,
    /// The operations, in their order.
    pub operations: Vec<CUstreamBatchMemOpParams>,
    /// The flags of all operations together.
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
            Self::Conditional(_) => 13,
        }
    }
}
