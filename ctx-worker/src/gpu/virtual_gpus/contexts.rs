//! Which context belongs to which virtual GPU, and which contexts may use each other's memory.

use std::collections::{BTreeSet, HashMap};

use rekindle_cuda_abi::types::*;

/// The contexts of all virtual GPUs.
#[derive(Default)]
pub(super) struct Contexts {
    /// The virtual GPU of each context.
    gpus: HashMap<CUcontext, CUdevice>,
    /// The context that is the primary one of a virtual GPU.
    primaries: HashMap<CUdevice, CUcontext>,
    /// The flags with which the primary context of a virtual GPU is made.
    flags: HashMap<CUdevice, u32>,
    /// Pairs of contexts of which the first may use the second one's memory.
    peers: BTreeSet<(CUcontext, CUcontext)>,
}

impl Contexts {
    /// The virtual GPU of a context; `None` for a context of nobody's.
    pub(super) fn gpu(&self, context: CUcontext) -> Option<CUdevice> {
        self.gpus.get(&context).copied()
    }

    /// Notes a context that exists.
    pub(super) fn add(&mut self, context: CUcontext, gpu: CUdevice) {
        self.gpus.insert(context, gpu);
    }

    /// Notes that a context does not exist any more.
    pub(super) fn remove(&mut self, context: CUcontext) {
        self.gpus.remove(&context);
        self.peers.retain(|(user, owner)| *user != context && *owner != context);
    }

    /// The primary context of a virtual GPU, if there is one.
    pub(super) fn primary(&self, gpu: CUdevice) -> Option<CUcontext> {
        self.primaries.get(&gpu).copied()
    }

    /// Notes a virtual GPU's primary context.
    pub(super) fn set_primary(&mut self, gpu: CUdevice, context: CUcontext) {
        self.add(context, gpu);
        self.primaries.insert(gpu, context);
    }

    /// Forgets a virtual GPU's primary context, which a reset has ended or is about to end, and its flags.
    pub(super) fn take_primary(&mut self, gpu: CUdevice) -> Option<CUcontext> {
        self.flags.remove(&gpu);
        let context = self.primaries.remove(&gpu)?;
        self.remove(context);
        Some(context)
    }

    /// The flags for the primary context of a virtual GPU.
    pub(super) fn flags(&self, gpu: CUdevice) -> u32 {
        self.flags.get(&gpu).copied().unwrap_or(0)
    }

    pub(super) fn set_flags(&mut self, gpu: CUdevice, flags: u32) {
        self.flags.insert(gpu, flags);
    }

    /// Whether a context may use another one's memory.
    pub(super) fn are_peers(&self, user: CUcontext, owner: CUcontext) -> bool {
        self.peers.contains(&(user, owner))
    }

    pub(super) fn add_peers(&mut self, user: CUcontext, owner: CUcontext) {
        self.peers.insert((user, owner));
    }

    /// Ends what [`Self::add_peers`] has begun. Returns whether the context still uses memory of a virtual GPU that `is_like`
    /// accepts.
    pub(super) fn remove_peers(
        &mut self,
        user: CUcontext,
        owner: CUcontext,
        is_like: impl Fn(CUdevice) -> bool,
    ) -> bool {
        self.peers.remove(&(user, owner));
        let mut owners = self.peers.iter().filter(|(of, _)| *of == user).filter_map(|(_, owner)| self.gpu(*owner));
        owners.any(is_like)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_that_ends_is_nobodys_peer() {
        let mut contexts = Contexts::default();
        contexts.set_primary(0, 10);
        contexts.set_primary(1, 11);
        contexts.add(12, 1);
        contexts.add_peers(10, 11);
        contexts.add_peers(10, 12);
        contexts.add_peers(12, 10);
        contexts.set_flags(1, 4);
        assert_eq!((contexts.take_primary(1), contexts.take_primary(1)), (Some(11), None));
        assert_eq!((contexts.gpu(11), contexts.gpu(12), contexts.flags(1)), (None, Some(1), 0));
        assert!(!contexts.are_peers(10, 11) && contexts.are_peers(10, 12));
        contexts.remove(12);
        assert!(!contexts.are_peers(10, 12) && !contexts.are_peers(12, 10));
    }

    #[test]
    fn access_to_a_gpu_lasts_as_long_as_any_of_its_contexts_is_a_peer() {
        let mut contexts = Contexts::default();
        for (context, gpu) in [(10, 0), (11, 1), (12, 1), (13, 2)] {
            contexts.add(context, gpu);
        }
        [11, 12, 13].into_iter().for_each(|owner| contexts.add_peers(10, owner));
        assert!(contexts.remove_peers(10, 11, |gpu| gpu == 1));
        assert!(!contexts.remove_peers(10, 12, |gpu| gpu == 1));
        assert!(contexts.are_peers(10, 13));
    }
}
