//! Which allocations of a client are borrowed, and from which pieces of the template.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

use rekindle_images::Allocation;
use rekindle_wire::control::TemplatePiece;

use crate::checkpoint::template::Template;
use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::resources::ipc;
use crate::resources::memory::borrowed::TemplateError;
use crate::resources::memory::pieces_of;

/// Pieces by device and address, each with its size.
type Pieces = BTreeMap<(u32, u64), (u64, OwnedFd)>;

/// Lends the memory of a saved client, which is not made yet, to it: all large allocations that the template has, except those that
/// are `written`. Returns the rest of the template, from which content is copied.
pub(crate) fn lend(
    driver: &Driver,
    memory: &mut Memory,
    allocations: &[Allocation],
    written: &BTreeSet<u64>,
    template: Vec<(TemplatePiece, OwnedFd)>,
) -> Result<Template, TemplateError> {
    let by_place = |(it, file): (TemplatePiece, OwnedFd)| ((it.device, it.address), (it.size, file));
    let mut pieces: Pieces = template.into_iter().map(by_place).collect();
    let own = Allocation::PHYSICAL | Allocation::POOLED;
    for it in allocations.iter().filter(|it| it.flags & own == 0 && !written.contains(&it.address)) {
        let device = memory.devices.get_mut(it.device as usize).ok_or(TemplateError::Unfit)?;
        let Some(files) = take(&mut pieces, it, device.memory.piece_size()) else { continue };
        let mut imported = Vec::new();
        let result: Result<(), TemplateError> = files.iter().try_for_each(|file| {
            imported.push(ipc::import(driver, file).map_err(TemplateError::NotImported)?);
            Ok(())
        });
        // Also after an error, so that they are released with everything else.
        device.memory.lend(it.address, imported);
        result?;
    }
    let rest =
        pieces.into_iter().map(|((device, address), (size, file))| (TemplatePiece { device, address, size }, file));
    let (pieces, files) = rest.unzip();
    let mut rest = Template::default();
    rest.take(driver, &memory.devices, pieces, files)?;
    Ok(rest)
}

/// Takes the pieces of a large allocation out, if all are there.
fn take(pieces: &mut Pieces, allocation: &Allocation, piece_size: u64) -> Option<Vec<OwnedFd>> {
    let places: Vec<_> = pieces_of(allocation.address, allocation.size, piece_size)?.collect();
    let device = allocation.device;
    let is_there = |(address, size): &(u64, u64)| pieces.get(&(device, *address)).is_some_and(|(it, _)| it == size);
    if !places.iter().all(is_there) {
        return None;
    }
    places.iter().map(|(address, _)| Some(pieces.remove(&(device, *address))?.1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn allocation(address: u64, size: u64) -> Allocation {
        Allocation { device: 1, address, size, requested_size: size, flags: 0, handle: 0, pieces: Vec::new() }
    }

    #[test]
    fn an_allocation_is_borrowed_if_its_pieces_are_all_there() {
        let file = || OwnedFd::from(tempfile::tempfile().unwrap());
        let mut pieces: Pieces = [
            ((1, 0), (64 * MIB, file())),
            ((1, 64 * MIB), (6 * MIB, file())),
            ((1, 128 * MIB), (2 * MIB, file())),
            ((0, 256 * MIB), (2 * MIB, file())),
        ]
        .into();
        let mut taken =
            |address: u64, size: u64| take(&mut pieces, &allocation(address, size), 64 * MIB).map(|it| it.len());
        // Small ones share their piece with others, and pieces of other sizes or devices are others.
        assert_eq!((taken(128 * MIB, MIB), taken(128 * MIB, 3 * MIB), taken(256 * MIB, 2 * MIB)), (None, None, None));
        assert_eq!((taken(0, 69 * MIB), taken(0, 69 * MIB)), (Some(2), None));
        assert_eq!(taken(128 * MIB, MIB + 1), Some(1));
        assert_eq!(pieces.len(), 1);
    }
}
