//! Which entry of an image a GPU gets.

use super::{Arch, CodeImage, Entry, EntryKind, Sm};

impl<'a> CodeImage<'a> {
    /// The entry that a driver loads on `device`: machine code for the GPU or for the nearest lower
    /// minor of its major, else the PTX for the highest architecture that can be compiled for it.
    ///
    /// Between entries for the same number, the narrower [`Variant`](super::Variant) and then the
    /// first one is taken. The environment (`CUDA_FORCE_PTX_JIT`, `CUDA_DISABLE_PTX_JIT`) can make
    /// a driver do otherwise; this does not look at it.
    ///
    /// `None` if nothing in the image runs there (`CUDA_ERROR_NO_BINARY_FOR_GPU`).
    #[must_use]
    pub fn select(&self, device: impl Into<Sm>) -> Option<&Entry<'a>> {
        let device = device.into();
        self.best(EntryKind::Elf, |arch| arch.cubin_runs_on(device)).or_else(|| self.select_ptx(device))
    }

    /// The PTX that a driver without a use for machine code compiles for `device`.
    #[must_use]
    pub fn select_ptx(&self, device: impl Into<Sm>) -> Option<&Entry<'a>> {
        let device = device.into();
        self.best(EntryKind::Ptx, |arch| arch.ptx_runs_on(device))
    }

    fn best(&self, kind: EntryKind, fits: impl Fn(Arch) -> bool) -> Option<&Entry<'a>> {
        self.entries
            .iter()
            .filter(|entry| entry.kind == kind && fits(entry.arch))
            // Of equals `max_by_key` takes the last: go backwards for the first.
            .rev()
            .max_by_key(|entry| (entry.arch.number, entry.arch.variant))
    }
}
