//! The state in an image of reservations, pieces and mappings, and how a restore makes them again.

use rekindle_cuda_abi::types::*;
use rekindle_images::BlobKind;
use rekindle_wire::codec::Malformed;
use rekindle_wire::command::PieceFlags;
use rekindle_wire::window;

use super::{Mapping, Piece, Sharing, Vmm, create, is_in, properties, set_access};
use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::saved::{Part, Saved};
use crate::session::state::{self, Mapped, StateError};

impl Vmm {
    /// The state for the image. `None` where the client has made no such objects.
    pub(crate) fn mapped(&self) -> Option<Mapped> {
        let mut out = Mapped::default();
        let reservation = |(&address, &size): (&u64, &u64)| state::Reservation { address, size, ..Default::default() };
        out.reservations = self.reservations.iter().map(reservation).collect();
        let sharing = |it: &Sharing| state::Sharing {
            id: it.id.to_vec(),
            came: it.came,
            elsewhere: it.elsewhere,
            ..Default::default()
        };
        let piece = |(&handle, piece): (&u64, &Piece)| state::Piece {
            handle,
            size: piece.size,
            device: piece.device as u32,
            handle_types: piece.handle_types,
            flags: piece.flags.word(),
            held: piece.held,
            sharing: piece.sharing.as_ref().map(sharing).into(),
            ..Default::default()
        };
        out.pieces = self.pieces.iter().map(piece).collect();
        out.exported_pieces = self.exported.iter().map(|(token, piece)| state::named(token, *piece)).collect();
        let access =
            |(&device, &flags): (&usize, &u32)| state::Access { device: device as u32, flags, ..Default::default() };
        let mapping = |(&address, mapping): (&u64, &Mapping)| state::Mapping {
            address,
            size: mapping.size,
            piece: mapping.piece,
            access: mapping.access.iter().map(access).collect(),
            ..Default::default()
        };
        out.mappings = self.mappings.iter().map(mapping).collect();
        (out != Mapped::default()).then_some(out)
    }

    /// Reads what [`Vmm::mapped`] returned, for a client with this many devices. The driver's objects are not made yet.
    pub(crate) fn read(&mut self, saved: &Mapped, devices: usize) -> Result<(), Malformed> {
        let ordinal = |device: u32| {
            let device = Some(device as usize).filter(|d| *d < devices);
            device.ok_or(Malformed("memory of a device that there is not"))
        };
        for it in &saved.reservations {
            if !is_in(&window::reserved(), it.address, it.size) {
                return Err(Malformed("a reservation outside its window"));
            }
            self.reservations.insert(it.address, it.size);
        }
        for it in &saved.pieces {
            let sharing = match it.sharing.as_ref() {
                None => None,
                Some(it) => Some(Sharing { id: state::name(&it.id)?, came: it.came, elsewhere: it.elsewhere }),
            };
            let (size, device, handle_types) = (it.size, ordinal(it.device)?, it.handle_types);
            let flags = PieceFlags::of(it.flags);
            self.pieces.insert(it.handle, Piece { real: 0, size, device, handle_types, flags, held: it.held, sharing });
        }
        for it in &saved.exported_pieces {
            if !self.pieces.contains_key(&it.of) {
                return Err(Malformed("a name of nothing"));
            }
            self.exported.insert(state::name(&it.name)?, it.of);
        }
        for it in &saved.mappings {
            if !self.is_reserved(it.address, it.size) || !self.pieces.contains_key(&it.piece) {
                return Err(Malformed("a mapping of nothing, or at no reserved place"));
            }
            let access = it.access.iter().map(|it| Ok((ordinal(it.device)?, it.flags)));
            let access = access.collect::<Result<_, Malformed>>()?;
            self.mappings.insert(it.address, Mapping { size: it.size, piece: it.piece, access });
        }
        Ok(())
    }
}

/// The whole state, in one part. A restore reads it before it maps memory ([`Vmm::read`]), so there is nothing left to
/// load.
impl Saved for Vmm {
    const KIND: BlobKind = BlobKind::Mapped;
    type With<'a> = ();

    fn save(&self) -> Result<Vec<Part>, StateError> {
        let Some(mapped) = self.mapped() else { return Ok(Vec::new()) };
        Ok(vec![Part { handle: 0, bytes: state::bytes(&mapped)? }])
    }

    fn load(&mut self, _: Part, (): ()) -> Result<(), NotLoaded> {
        Ok(())
    }
}

impl Memory {
    /// Makes the reservations, pieces (empty yet) and mappings of an image's client, with their access.
    pub(crate) fn restore_vmm(&mut self, driver: &Driver) -> Result<(), NotLoaded> {
        if !self.vmm.reservations.is_empty() {
            let kept = self.vmm.keep_windows(driver);
            kept.map_err(|code| failed("the window at", window::RESERVED_BASE, code))?;
        }
        self.make_pieces(driver)?;
        self.count_pieces();
        Ok(())
    }

    /// Makes the pieces, which have no memory now, and maps them, with their access. After an error some have memory.
    pub(super) fn make_pieces(&mut self, driver: &Driver) -> Result<(), NotLoaded> {
        for (&handle, piece) in &mut self.vmm.pieces {
            if let Some(sharing) = &piece.sharing {
                piece.real = self.arrived.take(driver, &sharing.id)?;
                continue;
            }
            let device = self.devices.get(piece.device).ok_or(NotLoaded::NoDevice)?.device;
            let properties = properties(device, piece.handle_types, piece.flags);
            piece.real = create(driver, piece.size, &properties).map_err(|code| failed("memory", handle, code))?;
        }
        for (&address, mapping) in self.vmm.mappings.iter() {
            let failed = |code| failed("the mapping at", address, code);
            let piece = self.vmm.pieces.get(&mapping.piece).ok_or(NotLoaded::Image("a mapping of nothing"))?;
            // SAFETY: a piece and a reservation that were just made.
            let mapped = unsafe { (driver.cuMemMap)(address, mapping.size as usize, 0, piece.real, 0) };
            let allowed = |(ordinal, flags): (&usize, &u32)| {
                let location_id = self.devices.get(*ordinal)?.device;
                Some(CUmemAccessDesc { location_type: CU_MEM_LOCATION_TYPE_DEVICE, location_id, flags: *flags })
            };
            let access: Vec<_> = mapping.access.iter().filter_map(allowed).collect();
            if mapped != CUDA_SUCCESS {
                return Err(failed(mapped));
            }
            if !access.is_empty() {
                match set_access(driver, address, mapping.size, &access) {
                    CUDA_SUCCESS => {}
                    code => return Err(failed(code)),
                }
            }
        }
        Ok(())
    }
}

fn failed(what: &'static str, at: u64, code: CUresult) -> NotLoaded {
    NotLoaded::NotToBeHad { what, at, code }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MIB, sample};
    use super::*;

    #[test]
    fn what_is_written_is_read_without_the_drivers_handles() {
        let vmm = sample();
        assert_eq!(Vmm::default().mapped(), None);
        let out = vmm.mapped().unwrap();
        let mut again = Vmm::default();
        again.read(&out, 2).unwrap();
        assert_eq!((&again.reservations, &*again.mappings), (&vmm.reservations, &*vmm.mappings));
        assert!(again.pieces.values().all(|p| p.real == 0 && p.size == 2 * MIB));
        assert_eq!(again.pieces[&2].flags.rdma, 1);
        assert_eq!(again.pieces[&2].sharing, vmm.pieces[&2].sharing);
        assert_eq!(again.exported, vmm.exported);
        // A piece of a device that does not exist; a mapping at no reserved place, or of no piece; a name of no piece.
        assert!(Vmm::default().read(&out, 1).is_err());
        let changes: [fn(&mut Mapped); 4] = [
            |state| state.reservations.clear(),
            |state| state.pieces.clear(),
            |state| state.mappings[0].piece = 99,
            |state| state.exported_pieces[0].name.truncate(15),
        ];
        for (i, change) in changes.into_iter().enumerate() {
            let mut changed = out.clone();
            change(&mut changed);
            assert!(Vmm::default().read(&changed, 2).is_err(), "{i}");
        }
    }
}
