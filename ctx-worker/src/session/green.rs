//! The client's resources of multiprocessors, the descriptors and the green contexts that are made of them.
//!
//! ```text
//!   device ── resource ──┬─ split ─> parts, rest ── descriptor ──> green context ──> (another) resource ── ...
//!                        └───────────────────────── descriptor
//! ```
//!
//! What the driver keeps inside a resource holds in one process. So the client's resources contain the client's handles, and
//! the worker has the driver's by these. The object log has how each was made, and a restore makes it again in that way.

use std::collections::HashMap;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::Kind;

/// A green context that exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GreenContext {
    /// The driver's.
    pub(crate) real: CUgreenCtx,
    /// The client's descriptor of what it is made of.
    pub(crate) descriptor: u64,
}

/// All of them, by the client's handles. Resources and descriptors last as long as the client, as with the driver.
#[derive(Default)]
pub(crate) struct Green {
    resources: HashMap<u64, CUdevResource>,
    descriptors: HashMap<u64, u64>,
    /// By the handles of the contexts that they are converted into.
    contexts: HashMap<u64, GreenContext>,
}

impl Green {
    /// Keeps a resource; `false` where the handle is taken or names another kind, which is the client's mistake.
    pub(crate) fn keep_resource(&mut self, handle: u64, resource: CUdevResource) -> bool {
        Kind::Resource.owns(handle) && self.resources.insert(handle, resource).is_none()
    }

    /// A resource.
    pub(crate) fn resource(&self, handle: u64) -> Result<CUdevResource, CUresult> {
        self.resources.get(&handle).copied().ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Keeps a descriptor of the driver's; `false` as of [`Self::keep_resource`].
    pub(crate) fn keep_descriptor(&mut self, handle: u64, real: u64) -> bool {
        Kind::ResourceDescriptor.owns(handle) && self.descriptors.insert(handle, real).is_none()
    }

    /// The driver's descriptor.
    pub(crate) fn descriptor(&self, handle: u64) -> Result<u64, CUresult> {
        self.descriptors.get(&handle).copied().ok_or(CUDA_ERROR_INVALID_VALUE)
    }

    /// Keeps a green context.
    pub(crate) fn keep_context(&mut self, context: u64, green: GreenContext) {
        self.contexts.insert(context, green);
    }

    /// The green context that a context was converted from.
    pub(crate) fn context(&self, context: u64) -> Option<GreenContext> {
        self.contexts.get(&context).copied()
    }

    /// A green context that is made of what a descriptor describes.
    pub(crate) fn made_of(&self, descriptor: u64) -> Option<GreenContext> {
        self.contexts.values().find(|it| it.descriptor == descriptor).copied()
    }

    /// Forgets a green context that is about to be destroyed.
    pub(crate) fn take_context(&mut self, context: u64) -> Option<GreenContext> {
        self.contexts.remove(&context)
    }

    /// All green contexts, which are forgotten.
    pub(crate) fn take_contexts(&mut self) -> Vec<GreenContext> {
        self.contexts.drain().map(|(_, green)| green).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_given_once_and_for_their_kind() {
        let mut green = Green::default();
        let (resource, descriptor) = (Kind::Resource.handle(1), Kind::ResourceDescriptor.handle(2));
        assert!(green.keep_resource(resource, CUdevResource::default()));
        assert!(!green.keep_resource(resource, CUdevResource::default()));
        assert!(!green.keep_resource(descriptor, CUdevResource::default()));
        assert!(green.keep_descriptor(descriptor, 7) && !green.keep_descriptor(descriptor, 8));
        assert!(!green.keep_descriptor(resource, 7));
        assert_eq!(green.resource(descriptor), Err(CUDA_ERROR_INVALID_VALUE));
        assert_eq!(green.descriptor(resource), Err(CUDA_ERROR_INVALID_VALUE));
    }

    #[test]
    fn a_green_context_is_found_by_what_it_is_made_of_while_it_lives() {
        let mut green = Green::default();
        let (context, descriptor) = (Kind::Context.handle(1), Kind::ResourceDescriptor.handle(2));
        green.keep_context(context, GreenContext { real: 5, descriptor });
        assert_eq!(green.made_of(descriptor).map(|it| it.real), Some(5));
        assert_eq!(green.take_context(context).map(|it| it.real), Some(5));
        assert!(green.made_of(descriptor).is_none() && green.context(context).is_none());
    }
}
