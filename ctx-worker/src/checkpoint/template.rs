//! A template: the content of an image's GPU memory that is on the devices already. A worker has loaded it and exported the
//! physical pieces; the daemon keeps their descriptors, which keep the memory too when that worker has ended (measured,
//! `tests/facts/shared.cu`). Other workers copy the content from there, on the device.
//!
//! ```text
//!   worker that loaded ──ExportTemplate──► descriptors ──(daemon)──TakeTemplate──► mapped in the window of clones
//!                                                                                    │ BringBack: device to device
//!                                                                                    └─► released when all is loaded
//! ```
//!
//! A client never meets a template: the mappings are gone before its first command.
//!
//! The template of a `CopyTemplate` is of an image that the restored one builds on. Content may have changed since, or have moved within the
//! client's memory: the device hashes what the template has, and only what has the wanted hash is copied.

use std::os::fd::OwnedFd;

use rekindle_cuda_abi::types::*;
use rekindle_wire::control::TemplatePiece;
use rekindle_wire::window;
use tracing::warn;

use crate::checkpoint::copying::clones;
use crate::gpu::driver::{CallFailed, Driver, checked};
use crate::resources::Memory;
use crate::resources::device::Device;
use crate::resources::ipc;
use crate::resources::memory::borrowed::TemplateError;

/// Pieces with the driver's handles of them, which are mapped nowhere: what lies where does not depend on them.
#[derive(Debug, Default)]
pub(crate) struct Imported(Vec<(TemplatePiece, u64)>);

impl Imported {
    /// Imports pieces.
    ///
    /// # Errors
    /// The pieces before the one that failed are imported.
    pub(crate) fn take(
        &mut self,
        driver: &Driver,
        devices: &[Device],
        pieces: Vec<TemplatePiece>,
        files: Vec<OwnedFd>,
    ) -> Result<(), TemplateError> {
        if pieces.len() != files.len() {
            return Err(TemplateError::NoDescriptors);
        }
        for (piece, file) in pieces.into_iter().zip(files) {
            let is_piece = piece.size.is_multiple_of(MEMORY_GRANULARITY) && (1..=MOST).contains(&piece.size);
            let is_here = (piece.device as usize) < devices.len();
            if !is_piece || !is_here || piece.address.checked_add(piece.size).is_none() {
                return Err(TemplateError::Unfit);
            }
            self.0.push((piece, ipc::import(driver, &file).map_err(TemplateError::NotImported)?));
        }
        Ok(())
    }

    /// Releases pieces that nobody wants.
    pub(crate) fn release(self, driver: &Driver) {
        for (_, real) in self.0 {
            // SAFETY: imported in `take`, and mapped nowhere.
            let _ = unsafe { (driver.cuMemRelease)(real) };
        }
    }
}

/// The largest piece that is taken. Clients may make large pieces of their own.
const MOST: u64 = window::CLONE_SIZE;

/// A template's pieces that are mapped here.
#[derive(Debug, Default)]
pub(crate) struct Template {
    /// By the addresses that the content has in a client.
    pieces: Vec<Mapped>,
    /// The bytes that are mapped for each device.
    taken: Vec<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Mapped {
    /// The address and the size in a client.
    address: u64,
    size: u64,
    /// Where the piece is mapped here, and the driver's handle of it.
    at: u64,
    real: u64,
    device: usize,
}

impl Template {
    /// A template of pieces that lie where they are said to: an address in a client, a size, and an address here.
    #[cfg(test)]
    pub(crate) fn imagined(pieces: &[(u64, u64, u64)]) -> Self {
        let pieces = pieces.iter().map(|&(address, size, at)| Mapped { address, size, at, real: 0, device: 0 });
        Self { pieces: pieces.collect(), taken: Vec::new() }
    }

    /// Imports pieces and maps them where they can be read.
    ///
    /// # Errors
    /// The pieces before the one that failed are mapped.
    pub(crate) fn take(
        &mut self,
        driver: &Driver,
        devices: &[Device],
        pieces: Vec<TemplatePiece>,
        files: Vec<OwnedFd>,
    ) -> Result<(), TemplateError> {
        let mut imported = Imported::default();
        let result = imported.take(driver, devices, pieces, files);
        self.map(driver, devices, imported).and(result)
    }

    /// Maps imported pieces where they can be read.
    ///
    /// # Errors
    /// The pieces before the one that failed are mapped, and those behind it are released.
    pub(crate) fn map(
        &mut self,
        driver: &Driver,
        devices: &[Device],
        mut imported: Imported,
    ) -> Result<(), TemplateError> {
        let mut pieces = std::mem::take(&mut imported.0).into_iter();
        let mapped = pieces.by_ref().try_for_each(|(piece, real)| {
            let ordinal = piece.device as usize;
            let device = devices.get(ordinal).ok_or(TemplateError::Unfit)?;
            self.add(driver, (device.device, ordinal), (piece.address, piece.size, real))
        });
        Imported(pieces.collect()).release(driver);
        mapped
    }

    /// Maps a piece where it can be read: the address of its content in a client, its size, and the driver's handle.
    pub(crate) fn add(
        &mut self,
        driver: &Driver,
        (device, ordinal): (CUdevice, usize),
        (address, size, real): (u64, u64, u64),
    ) -> Result<(), TemplateError> {
        self.taken.resize(self.taken.len().max(ordinal + 1), 0);
        let (base, taken) = (window::clones(ordinal).start, self.taken[ordinal]);
        if taken.checked_add(size).is_none_or(|end| end > window::CLONE_SIZE) {
            return Err(TemplateError::Unfit);
        }
        if taken == 0 {
            clones::keep_window(driver, base, window::CLONE_SIZE);
        }
        map(driver, (real, size), base + taken, device)?;
        let place = self.pieces.partition_point(|it| it.address < address);
        self.pieces.insert(place, Mapped { address, size, at: base + taken, real, device: ordinal });
        self.taken[ordinal] += size;
        Ok(())
    }

    /// Where the content of these addresses lies here, of memory of a device; none if it is not wholly in one piece.
    pub(crate) fn find(&self, device: usize, address: u64, length: u64) -> Option<u64> {
        let place = self.pieces.partition_point(|it| it.address <= address).checked_sub(1)?;
        let Mapped { address: start, size, at, device: has, .. } = *self.pieces.get(place)?;
        let offset = address - start;
        (has == device && offset.checked_add(length)? <= size).then_some(at + offset)
    }

    /// Unmaps and releases all pieces. Nothing reads them any more.
    pub(crate) fn release(&mut self, driver: &Driver) {
        for piece in self.pieces.drain(..) {
            // SAFETY: mapped and imported in `take`, and read by nothing any more.
            let gone = unsafe {
                checked("cuMemUnmap", (driver.cuMemUnmap)(piece.at, piece.size as usize))
                    .and(checked("cuMemRelease", (driver.cuMemRelease)(piece.real)))
            };
            if let Err(failed) = gone {
                warn!("a piece of a template stays mapped at {:#x}: {failed}", piece.at);
            }
        }
        self.taken.clear();
    }
}

/// Maps an imported piece for reading. A piece that cannot be mapped is released.
fn map(driver: &Driver, (real, size): (u64, u64), at: u64, device: CUdevice) -> Result<(), CallFailed> {
    let access =
        CUmemAccessDesc { location_type: CU_MEM_LOCATION_TYPE_DEVICE, location_id: device, flags: CU_MEM_ACCESS_READ };
    // SAFETY: a handle of ours, at addresses of our own; the descriptor lives through the call.
    unsafe {
        let mapped = checked("cuMemMap", (driver.cuMemMap)(at, size as usize, 0, real, 0));
        let done = mapped.and_then(|()| {
            let set = (driver.cuMemSetAccess)(at, size as usize, &raw const access, 1);
            checked("cuMemSetAccess", set).inspect_err(|_| {
                (driver.cuMemUnmap)(at, size as usize);
            })
        });
        done.inspect_err(|_| {
            (driver.cuMemRelease)(real);
        })
    }
}

/// Descriptors of the pieces behind all memory whose content an image has, from the one with this number on, `most` at the
/// most; and the number of all.
///
/// # Errors
/// The driver exports a piece no more, or a client has made pieces that cannot be exported.
pub(crate) fn export(
    driver: &Driver,
    memory: &Memory,
    first: usize,
    most: usize,
) -> Result<(usize, Vec<(TemplatePiece, OwnedFd)>), TemplateError> {
    let device_memory = memory.devices.iter().enumerate().flat_map(|(ordinal, device)| {
        let pieces = device.memory.physical_pieces();
        pieces.map(move |(address, size, real)| (TemplatePiece { device: ordinal as u32, address, size }, real))
    });
    // Pieces that a client has made so that they cannot be exported are loaded from the image.
    let exportable = |handle_types: u32| handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0;
    let places = memory.vmm.places().unwrap_or_default();
    let own = places.iter().filter(|alias| exportable(alias.piece.handle_types)).map(|alias| {
        let device = alias.piece.device as u32;
        (TemplatePiece { device, address: alias.address, size: alias.piece.size }, alias.piece.real)
    });
    let all: Vec<_> = device_memory.chain(own).collect();
    let wanted = all.iter().skip(first).take(most);
    let exported = wanted.map(|(piece, real)| {
        let file = ipc::export(driver, *real).map_err(TemplateError::NotExported)?;
        Ok((*piece, file))
    });
    let exported = exported.collect::<Result<_, TemplateError>>()?;
    Ok((all.len(), exported))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_found_where_one_piece_has_all_of_it() {
        let template = Template::imagined(&[(100, 50, 1000), (150, 10, 2000)]);
        assert_eq!(template.find(0, 100, 50), Some(1000));
        assert_eq!(template.find(0, 120, 30), Some(1020));
        assert_eq!(template.find(0, 150, 10), Some(2000));
        assert_eq!(template.find(1, 100, 50), None);
        for (address, length) in [(99, 1), (140, 11), (160, 1), (120, u64::MAX)] {
            assert_eq!(template.find(0, address, length), None, "{address} {length}");
        }
        assert_eq!(Template::default().find(0, 0, 1), None);
    }
}
