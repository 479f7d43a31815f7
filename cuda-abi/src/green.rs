//! The multiprocessors that green contexts are made of.

/// `CUdevResourceType`: multiprocessors.
pub const CU_DEV_RESOURCE_TYPE_SM: u32 = 1;
/// `CUdevSmResourceSplit_flags`: each multiprocessor counts by itself, wherever on the device it is.
pub const CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING: u32 = 1;
/// `CUdevSmResourceSplit_flags`: parts that may hold the largest clusters.
pub const CU_DEV_SM_RESOURCE_SPLIT_MAX_POTENTIAL_CLUSTER_SIZE: u32 = 2;
/// `CUgreenCtxCreate_flags`: with a default stream, which every green context has.
pub const CU_GREEN_CTX_DEFAULT_STREAM: u32 = 1;

/// `CUdevSmResource`: what a program may read of a resource of multiprocessors.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUdevSmResource {
    /// `smCount`.
    pub count: u32,
    /// `minSmPartitionSize`.
    pub smallest_part: u32,
    /// `smCoscheduledAlignment`.
    pub alignment: u32,
}

/// `CUdevResource`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUdevResource {
    /// `type`: [`CU_DEV_RESOURCE_TYPE_SM`], or 0 for nothing.
    pub kind: u32,
    /// The driver's own, which a program copies and hands back.
    pub internal: [u8; 92],
    /// `sm`.
    pub processors: CUdevSmResource,
    /// The rest of the union.
    pub unused: [u8; 36],
}

impl Default for CUdevResource {
    fn default() -> Self {
        Self { kind: 0, internal: [0; 92], processors: CUdevSmResource::default(), unused: [0; 36] }
    }
}

const _: () = assert!(size_of::<CUdevResource>() == 144);
