//! Pieces of a suspended client, whose physical memory goes back to its device. The client's handles and mappings stay in the
//! tables, and stand for new memory when the client resumes.

use rekindle_cuda_abi::types::CUDA_SUCCESS;

use super::Vmm;
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::Memory;
use crate::resources::not_loaded::NotLoaded;

impl Vmm {
    /// The bytes of physical memory of all pieces on a device.
    pub(crate) fn physical(&self, device: usize) -> u64 {
        self.pieces.values().filter(|piece| piece.device == device).map(|piece| piece.size).sum()
    }

    /// Whether other processes may know, or have, a piece.
    pub(crate) fn has_names(&self) -> bool {
        !self.exported.is_empty() || self.pieces.values().any(|piece| piece.sharing.is_some())
    }

    /// Unmaps and releases all pieces. Nothing uses them, and their content is lost.
    ///
    /// # Errors
    /// The first error of the driver. The memory is of no use then.
    pub(crate) fn release_physical(&mut self, driver: &Driver) -> Result<(), CallFailed> {
        let mut result = Ok(());
        for (&address, mapping) in self.mappings.iter() {
            // SAFETY: the client's mapping, which nothing uses.
            let unmapped = unsafe { (driver.cuMemUnmap)(address, mapping.size as usize) };
            result = result.and(checked("cuMemUnmap", unmapped));
        }
        result.and(self.release_pieces(driver))
    }

    fn release_pieces(&mut self, driver: &Driver) -> Result<(), CallFailed> {
        let mut result = Ok(());
        for piece in self.pieces.values_mut() {
            let real = std::mem::take(&mut piece.real);
            if real != 0 {
                // SAFETY: the driver's handle of this piece, which is not used again.
                result = result.and(checked("cuMemRelease", unsafe { (driver.cuMemRelease)(real) }));
            }
        }
        result
    }

    /// Releases the pieces of an attempt to make them, and the mappings that the attempt made.
    fn undo(&mut self, driver: &Driver) {
        for (&address, mapping) in self.mappings.iter() {
            // SAFETY: addresses of the client's. The first one that is not mapped ends the mappings that were made, since
            // pieces are mapped in this order.
            if unsafe { (driver.cuMemUnmap)(address, mapping.size as usize) } != CUDA_SUCCESS {
                break;
            }
        }
        let _ = self.release_pieces(driver);
    }
}

impl Memory {
    /// Makes new physical memory for all pieces and maps it where the client has mapped it. Its content is undefined.
    ///
    /// # Errors
    /// As a rule a lack of memory. No piece has memory then.
    pub(crate) fn bring_back_pieces(&mut self, driver: &Driver) -> Result<(), NotLoaded> {
        self.make_pieces(driver).inspect_err(|_| self.vmm.undo(driver))
    }
}
