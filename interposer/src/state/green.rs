//! What green contexts are made of: resources of multiprocessors, and descriptors.
//!
//! A program gets a resource as a structure, copies it, and hands it back. In the driver's own structure are numbers of the
//! process that made it; in ours is a handle, which means the same after a restore. Whoever asks for the same resource again
//! gets the same handle, since nothing ever ends one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::Kind;

/// Where [`CUdevResource::internal`] has the handle.
const HANDLE: std::ops::Range<usize> = 4..12;

/// Where a resource that is not a part of another one came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Origin {
    /// A device, by the worker's number.
    Device(usize),
    /// Green contexts of a device that are made of a descriptor.
    Descriptor(usize, u64),
}

/// How a resource was split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Split {
    pub(crate) resource: u64,
    pub(crate) flags: u32,
    pub(crate) least: u32,
    /// The most parts that there may be.
    pub(crate) room: u32,
}

/// A resource: its handle, and what a program may read of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resource {
    pub(crate) handle: u64,
    pub(crate) processors: CUdevSmResource,
}

impl Resource {
    /// The structure that a program gets. A resource without multiprocessors is none.
    pub(crate) fn to_program(self) -> CUdevResource {
        if self.processors.count == 0 {
            return CUdevResource::default();
        }
        let mut resource =
            CUdevResource { kind: CU_DEV_RESOURCE_TYPE_SM, processors: self.processors, ..Default::default() };
        resource.internal[HANDLE].copy_from_slice(&self.handle.to_le_bytes());
        resource
    }

    /// The handle in a structure that a program hands back.
    pub(crate) fn named_by(resource: &CUdevResource) -> Result<u64, CUresult> {
        if resource.kind != CU_DEV_RESOURCE_TYPE_SM {
            return Err(CUDA_ERROR_INVALID_RESOURCE_TYPE);
        }
        let mut handle = [0; 8];
        handle.copy_from_slice(&resource.internal[HANDLE]);
        let handle = u64::from_le_bytes(handle);
        if Kind::Resource.owns(handle) { Ok(handle) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }
}

/// The parts of a resource, and the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) parts: Vec<Resource>,
    pub(crate) rest: Resource,
}

#[derive(Default)]
pub(crate) struct Known {
    pub(crate) origins: HashMap<Origin, Resource>,
    pub(crate) splits: HashMap<Split, Parts>,
    /// By the resources that they describe.
    pub(crate) descriptors: HashMap<Vec<u64>, u64>,
}

/// All that this process has asked for.
#[derive(Default)]
pub(crate) struct Resources(Mutex<Known>);

impl Resources {
    /// What is known, for as long as nobody else asks: two threads that ask for the same get the same.
    pub(crate) fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_is_known_by_its_copy_and_by_nothing_else() {
        let processors = CUdevSmResource { count: 16, smallest_part: 8, alignment: 8 };
        let resource = Resource { handle: Kind::Resource.handle(9), processors };
        let copy = resource.to_program();
        assert_eq!((Resource::named_by(&copy), copy.processors), (Ok(resource.handle), processors));
        let foreign = CUdevResource { internal: [7; 92], ..copy };
        assert_eq!(Resource::named_by(&foreign), Err(CUDA_ERROR_INVALID_VALUE));
        let none = Resource { processors: CUdevSmResource::default(), ..resource }.to_program();
        assert_eq!(Resource::named_by(&none), Err(CUDA_ERROR_INVALID_RESOURCE_TYPE));
    }
}
