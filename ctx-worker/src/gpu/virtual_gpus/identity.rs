//! The identity of a virtual GPU: derived from that of its GPU, so that it is the same in every process and after a restart,
//! and another than the GPU's, so that nobody takes a part for the whole. The second half of the UUID is the GPU's: by it, who has
//! only UUIDs finds the parts of one GPU ([`rekindle_wire::gpus::are_of_one`]).

use super::settings::Uuid;

/// Spreads small numbers over 64 bits: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;
/// Where a PCI domain of 16 bits has the number of a part.
const PART_IN_DOMAIN: u32 = 12;

/// The UUID of a GPU's part, from 0.
pub(super) fn uuid(of_gpu: Uuid, part: u32) -> Uuid {
    let mark = (u64::from(part) + 1).wrapping_mul(SPREAD);
    let mut uuid = of_gpu;
    uuid.iter_mut().zip(mark.to_be_bytes()).for_each(|(byte, mark)| *byte ^= mark);
    uuid
}

/// The PCI domain of a GPU's part.
pub(super) fn pci_domain(of_gpu: u32, part: u32) -> u32 {
    of_gpu ^ ((part + 1) << PART_IN_DOMAIN)
}

/// The PCI bus id of a GPU's part, as the driver writes it: `1000:17:00.0`. `None` if the GPU's is written otherwise.
pub(super) fn pci_bus_id(of_gpu: &str, part: u32) -> Option<String> {
    let (domain, rest) = of_gpu.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("{:04x}:{rest}", pci_domain(domain, part)))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rekindle_wire::gpus::are_of_one;

    use super::*;
    use crate::gpu::virtual_gpus::settings::VirtualGpus;

    #[test]
    fn every_part_of_every_gpu_is_another() {
        let parts = 0..VirtualGpus::MOST;
        let gpus: Vec<_> = (0..8).map(|last| [[7; 15].as_slice(), &[last]].concat().try_into().unwrap()).collect();
        let uuids = gpus.iter().flat_map(|gpu| parts.clone().map(|part| uuid(*gpu, part)));
        let all: BTreeSet<Uuid> = uuids.chain(gpus.iter().copied()).collect();
        assert_eq!(all.len(), 8 * (parts.len() + 1));
        assert!(are_of_one(&uuid(gpus[0], 3), &uuid(gpus[0], 7)) && !are_of_one(&uuid(gpus[0], 3), &uuid(gpus[1], 3)));

        let ids = |bus: &str| parts.clone().map(|part| pci_bus_id(bus, part).unwrap()).collect::<BTreeSet<_>>();
        let (one, other) = (ids("0000:17:00.0"), ids("0001:17:00.0"));
        assert_eq!(one.union(&other).count(), 2 * parts.len());
        assert_eq!(pci_bus_id("0000:17:00.0", 0).as_deref(), Some("1000:17:00.0"));
        assert_eq!((pci_domain(0, 14), pci_bus_id("none", 0)), (0xf000, None));
    }
}
