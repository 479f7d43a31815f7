//! Mappings of the worker's own, through which pieces are saved and loaded: the client may have no mapping of a piece, or
//! none that can be read.

use rekindle_cuda_abi::types::*;
use rekindle_wire::window;
use thiserror::Error;

use super::{Piece, Vmm, set_access};
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::device::Device;

/// A piece, and the place where it is mapped to be saved or loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alias {
    pub(crate) address: u64,
    pub(crate) handle: u64,
    pub(crate) piece: Piece,
}

impl Vmm {
    /// The places at which pieces are mapped to be saved and loaded, for each piece whose content this client saves: side
    /// by side, in the order of their handles. None where the pieces do not fit.
    pub(crate) fn places(&self) -> Option<Vec<Alias>> {
        let mut at = window::aliases().start;
        let here = |(_, piece): &(&u64, &Piece)| !piece.sharing.is_some_and(|it| it.elsewhere);
        let places = self.pieces.iter().filter(here).map(|(&handle, &piece)| {
            let alias = Alias { address: at, handle, piece };
            at = at.checked_add(piece.size).filter(|end| *end <= window::aliases().end)?;
            Some(alias)
        });
        places.collect()
    }

    /// Maps every piece where it can be read and written. [`unmap_aliases`] unmaps them.
    pub(crate) fn map_aliases(&mut self, driver: &Driver, devices: &[Device]) -> Result<Vec<Alias>, AliasError> {
        let places = self.places().ok_or(AliasError::TooMuch)?;
        if !places.is_empty() {
            let kept = self.keep_windows(driver);
            kept.map_err(AliasError::Reserve)?;
        }
        let mut mapped = Vec::new();
        for alias in &places {
            let device = devices.get(alias.piece.device).map_or(0, |d| d.device);
            match map_alias(driver, alias, device) {
                Ok(()) => mapped.push(*alias),
                Err(error) => {
                    unmap_aliases(driver, &mapped);
                    return Err(error.into());
                }
            }
        }
        Ok(mapped)
    }
}

/// Why pieces cannot be mapped to be copied.
#[derive(Debug, Error)]
pub(crate) enum AliasError {
    #[error("it has more memory of its own mapping than can be saved")]
    TooMuch,
    #[error("cuMemAddressReserve failed: {}", result_name(*.0))]
    Reserve(CUresult),
    #[error(transparent)]
    Driver(#[from] CallFailed),
}

/// Unmaps what [`Vmm::map_aliases`] mapped. The engine no longer uses these mappings.
pub(crate) fn unmap_aliases(driver: &Driver, aliases: &[Alias]) {
    for alias in aliases {
        let size = alias.piece.size as usize;
        // SAFETY: mapped in `map_alias`, and nobody else's.
        let gone = unsafe { checked("cuMemUnmap", (driver.cuMemUnmap)(alias.address, size)) };
        if let Err(failed) = gone {
            tracing::warn!("what was mapped at {:#x} to be saved stays there: {failed}", alias.address);
        }
    }
}

fn map_alias(driver: &Driver, alias: &Alias, device: CUdevice) -> Result<(), CallFailed> {
    let Alias { address, piece, .. } = *alias;
    // SAFETY: a piece of the client's, at addresses of our own.
    let mapped = unsafe { checked("cuMemMap", (driver.cuMemMap)(address, piece.size as usize, 0, piece.real, 0)) };
    let access = CUmemAccessDesc {
        location_type: CU_MEM_LOCATION_TYPE_DEVICE,
        location_id: device,
        flags: CU_MEM_ACCESS_READWRITE,
    };
    mapped.and_then(|()| {
        checked("cuMemSetAccess", set_access(driver, address, piece.size, &[access])).inspect_err(|_| {
            // SAFETY: mapped above.
            unsafe { (driver.cuMemUnmap)(address, piece.size as usize) };
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MIB, sample};
    use super::*;

    #[test]
    fn pieces_are_saved_side_by_side_unless_somebody_else_saves_them() {
        let places: Vec<_> = sample().places().unwrap().iter().map(|a| (a.address, a.handle)).collect();
        assert_eq!(places, [(window::ALIAS_BASE, 1), (window::ALIAS_BASE + 2 * MIB, 2)]);
        let mut vmm = sample();
        vmm.pieces.insert(0, vmm.pieces[&2]);
        vmm.pieces.get_mut(&2).unwrap().sharing.as_mut().unwrap().elsewhere = true;
        let places: Vec<_> = vmm.places().unwrap().iter().map(|a| a.handle).collect();
        assert_eq!(places, [0, 1]);
    }
}
