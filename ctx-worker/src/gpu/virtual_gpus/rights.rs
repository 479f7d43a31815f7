//! Which virtual GPU may access which mapping.
//!
//! The driver keeps one right of a GPU for each mapping, and several virtual GPUs share it: the GPU gets the greatest of
//! theirs, and keeps it until the last one loses it. The hardware cannot tell the virtual GPUs of one GPU apart, so one that
//! has no right to memory which another one uses reads and writes it all the same.

use std::collections::BTreeMap;
use std::ops::Range;

use rekindle_cuda_abi::types::*;
use rekindle_wire::window::MAX_DEVICES;

/// The flags of access for each virtual GPU.
type OfGpus = [u32; MAX_DEVICES];

/// A mapping of physical memory.
struct Mapping {
    size: u64,
    of_gpus: OfGpus,
}

/// All mappings of the process.
#[derive(Default)]
pub(super) struct Rights {
    mappings: BTreeMap<u64, Mapping>,
}

/// Mappings side by side in which the driver has to set the same access.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) range: Range<u64>,
    /// GPUs of the driver's, each once, and the flags of access that they are to have.
    pub(super) of_gpus: Vec<(CUdevice, u32)>,
}

impl Rights {
    /// Notes a mapping, which nobody may access yet.
    pub(super) fn map(&mut self, address: u64, size: u64) {
        self.mappings.insert(address, Mapping { size, of_gpus: [0; MAX_DEVICES] });
    }

    /// Forgets the mappings that begin in a range.
    pub(super) fn unmap(&mut self, range: Range<u64>) {
        let gone: Vec<u64> = self.mappings.range(range).map(|(address, _)| *address).collect();
        for address in gone {
            self.mappings.remove(&address);
        }
    }

    /// What has to change where virtual GPUs get these rights to a range. `real` gives the driver's GPU for a virtual one, and
    /// for all others `None`.
    pub(super) fn changes(
        &self,
        range: Range<u64>,
        given: &[(CUdevice, u32)],
        real: impl Fn(CUdevice) -> Option<CUdevice>,
    ) -> Vec<Change> {
        let mut changes: Vec<Change> = Vec::new();
        for (&start, mapping) in self.mappings.range(range) {
            let after = with(mapping.of_gpus, given);
            let mut of_gpus: Vec<(CUdevice, u32)> = Vec::new();
            for gpu in given.iter().filter_map(|(gpu, _)| real(*gpu)) {
                let parts = (0..).zip(after).filter(|(part, _)| real(*part) == Some(gpu));
                let flags = parts.map(|(_, flags)| flags).max().unwrap_or(0);
                if of_gpus.iter().all(|(it, _)| *it != gpu) {
                    of_gpus.push((gpu, flags));
                }
            }
            let end = start + mapping.size;
            match changes.last_mut().filter(|it| it.range.end == start && it.of_gpus == of_gpus) {
                Some(last) => last.range.end = end,
                None => changes.push(Change { range: start..end, of_gpus }),
            }
        }
        changes
    }

    /// Notes that virtual GPUs have got these rights to a range.
    pub(super) fn set(&mut self, range: Range<u64>, given: &[(CUdevice, u32)]) {
        for (_, mapping) in self.mappings.range_mut(range) {
            mapping.of_gpus = with(mapping.of_gpus, given);
        }
    }
}

fn with(mut of_gpus: OfGpus, given: &[(CUdevice, u32)]) -> OfGpus {
    for (gpu, flags) in given {
        if let Some(place) = usize::try_from(*gpu).ok().and_then(|gpu| of_gpus.get_mut(gpu)) {
            *place = *flags;
        }
    }
    of_gpus
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: u32 = CU_MEM_ACCESS_READ;
    const BOTH: u32 = CU_MEM_ACCESS_READWRITE;

    /// Two virtual GPUs for each of the driver's.
    fn real(gpu: CUdevice) -> Option<CUdevice> {
        Some(gpu / 2).filter(|_| (0..4).contains(&gpu))
    }

    fn give(rights: &mut Rights, range: Range<u64>, given: &[(CUdevice, u32)]) -> Vec<(Range<u64>, CUdevice, u32)> {
        let changes = rights.changes(range.clone(), given, real);
        rights.set(range, given);
        let flat = |it: Change| it.of_gpus.into_iter().map(move |(gpu, flags)| (it.range.clone(), gpu, flags));
        changes.into_iter().flat_map(flat).collect()
    }

    #[test]
    fn a_gpu_has_the_greatest_right_of_its_parts_until_the_last_one_loses_it() {
        let mut rights = Rights::default();
        rights.map(10, 10);
        assert_eq!(give(&mut rights, 10..20, &[(0, BOTH)]), [(10..20, 0, BOTH)]);
        assert_eq!(give(&mut rights, 10..20, &[(1, READ), (2, READ)]), [(10..20, 0, BOTH), (10..20, 1, READ)]);
        assert_eq!(give(&mut rights, 10..20, &[(0, 0)]), [(10..20, 0, READ)]);
        assert_eq!(give(&mut rights, 10..20, &[(1, 0)]), [(10..20, 0, 0)]);
        assert_eq!(give(&mut rights, 10..20, &[(3, BOTH), (2, 0)]), [(10..20, 1, BOTH)], "each GPU is named once");
    }

    #[test]
    fn mappings_that_end_alike_change_together() {
        let mut rights = Rights::default();
        [10, 20, 30].into_iter().for_each(|at| rights.map(at, 10));
        give(&mut rights, 20..30, &[(1, BOTH)]);
        let expected = [(10..20, 0, READ), (20..30, 0, BOTH), (30..40, 0, READ)];
        assert_eq!(give(&mut rights, 10..40, &[(0, READ)]), expected);
        assert_eq!(give(&mut rights, 10..40, &[(1, BOTH)]), [(10..40, 0, BOTH)]);
    }

    #[test]
    fn what_is_mapped_anew_is_nobodys() {
        let mut rights = Rights::default();
        rights.map(10, 10);
        give(&mut rights, 10..20, &[(0, BOTH)]);
        rights.unmap(10..20);
        assert!(give(&mut rights, 10..20, &[(0, BOTH)]).is_empty());
        rights.map(10, 10);
        assert_eq!(give(&mut rights, 10..20, &[(1, READ)]), [(10..20, 0, READ)]);
    }
}
