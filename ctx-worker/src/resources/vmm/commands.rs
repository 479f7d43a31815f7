//! Commands about virtual memory management.

use std::collections::BTreeMap;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, AddressRange, Kind, OfPiece, PieceAccess, PieceCreate, PieceGranularity, PieceMap};
use rekindle_wire::window;

use super::{Mapping, Piece, create, is_in, properties, set_access};
use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::waiting::Then;

const INVALID_VALUE: Refused = Refused::Code(CUDA_ERROR_INVALID_VALUE);

impl Memory {
    /// Executes a command about virtual memory management.
    pub(crate) fn vmm_command(
        &mut self,
        call: &mut Call,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let driver = call.driver();
        match number {
            command::ADDRESS_RESERVE => {
                let AddressRange { address, size } = AddressRange::read(args)?;
                if !is_in(&window::reserved(), address, size) {
                    return Err(Malformed("a reservation outside its window").into());
                }
                if !self.vmm.is_free(address, size) {
                    return Err(Refused::Code(CUDA_ERROR_OUT_OF_MEMORY));
                }
                self.vmm.keep_windows(driver).map_err(Refused::Code)?;
                self.vmm.reservations.insert(address, size);
            }
            command::ADDRESS_FREE => {
                let AddressRange { address, size } = AddressRange::read(args)?;
                if self.vmm.reservations.get(&address) != Some(&size) || self.vmm.is_used(address, size) {
                    return Err(INVALID_VALUE);
                }
                self.vmm.reservations.remove(&address);
            }
            command::PIECE_CREATE => self.piece_create(call, args)?,
            command::PIECE_RELEASE => {
                let OfPiece { piece: handle } = OfPiece::read(args)?;
                let piece = self.vmm.pieces.get_mut(&handle).filter(|p| p.held).ok_or(INVALID_VALUE)?;
                piece.held = false;
                check(self.vmm.drop_unused(driver, handle))?;
                self.count_pieces();
            }
            command::PIECE_RETAIN => {
                let OfPiece { piece: handle } = OfPiece::read(args)?;
                self.vmm.pieces.get_mut(&handle).ok_or(INVALID_VALUE)?.held = true;
            }
            command::PIECE_MAP => self.piece_map(call, args)?,
            command::PIECE_UNMAP => return self.piece_unmap(call, args),
            command::PIECE_ACCESS => self.piece_access(call, args)?,
            command::PIECE_GRANULARITY => {
                let PieceGranularity { option, device, handle_types, flags } = PieceGranularity::read(args)?;
                let properties = properties(self.device(device)?, handle_types, flags);
                let mut granularity = 0;
                // SAFETY: the out parameter is a local, the properties live through the call.
                let told = unsafe {
                    (driver.cuMemGetAllocationGranularity)(&raw mut granularity, &raw const properties, option)
                };
                check(told)?;
                reply.word(granularity as u64);
            }
            _ => return Err(Refused::UnknownCall(number)),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn piece_create(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PieceCreate { piece: handle, size, device: ordinal, handle_types, flags } = PieceCreate::read(args)?;
        if !Kind::Piece.owns(handle) || self.vmm.pieces.contains_key(&handle) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let (driver, device) = (call.driver(), self.device(ordinal)?);
        let ordinal = ordinal as usize;
        let properties = properties(device, handle_types, flags);
        let real = self.make_counted(driver, ordinal, size, || create(driver, size, &properties))?;
        let piece = Piece { real, size, device: ordinal, handle_types, flags, held: true, sharing: None };
        self.vmm.pieces.insert(handle, piece);
        self.count_pieces();
        Ok(())
    }

    /// Updates the pieces' bytes that count towards the client's limits.
    pub(crate) fn count_pieces(&mut self) {
        for (ordinal, device) in self.devices.iter_mut().enumerate() {
            device.memory.set_pieces(self.vmm.counted(ordinal));
        }
    }

    fn piece_map(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PieceMap { address, size, offset, piece: handle, flags } = PieceMap::read(args)?;
        let piece = self.vmm.pieces.get(&handle).filter(|p| p.held).ok_or(INVALID_VALUE)?;
        if !self.vmm.is_reserved(address, size) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: a piece of the client's, at addresses that it has reserved; the driver refuses those that are taken.
        check(unsafe { (call.driver().cuMemMap)(address, size as usize, offset as usize, piece.real, flags) })?;
        self.vmm.mappings.insert(address, Mapping { size, piece: handle, access: BTreeMap::new() });
        Ok(())
    }

    fn piece_unmap(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let AddressRange { address, size } = AddressRange::read(args)?;
        if !self.vmm.is_reserved(address, size) {
            return Err(INVALID_VALUE);
        }
        // As in the driver, nothing uses the mapping any more when it is unmapped.
        let busy = call.session.waiting.busy(0);
        call.when_done(busy, Then::Unmap { address, size, reply: call.header.reply })?;
        Ok(Outcome::Later)
    }

    /// Unmaps a range that nothing uses any more.
    pub(crate) fn unmap_pieces(&mut self, driver: &Driver, address: u64, size: u64) -> CUresult {
        // SAFETY: addresses that the client has reserved; the driver refuses what is not whole mappings.
        let mut result = unsafe { (driver.cuMemUnmap)(address, size as usize) };
        if result != CUDA_SUCCESS {
            return result;
        }
        let gone: Vec<u64> = self.vmm.mappings.range(address..address + size).map(|(base, _)| *base).collect();
        for base in gone {
            if let Some(mapping) = self.vmm.mappings.remove(&base) {
                let dropped = self.vmm.drop_unused(driver, mapping.piece);
                result = if result == CUDA_SUCCESS { dropped } else { result };
            }
        }
        self.count_pieces();
        result
    }

    fn piece_access(&mut self, call: &mut Call, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PieceAccess { address, size, access } = PieceAccess::read(args)?;
        let mut wanted = Vec::new();
        for (ordinal, flags) in access {
            wanted.push((ordinal as usize, flags, self.device(ordinal)?));
        }
        if !self.vmm.covers(address, size) {
            return Err(INVALID_VALUE);
        }
        let access: Vec<_> = wanted
            .iter()
            .map(|&(_, flags, device)| CUmemAccessDesc {
                location_type: CU_MEM_LOCATION_TYPE_DEVICE,
                location_id: device,
                flags,
            })
            .collect();
        check(set_access(call.driver(), address, size, &access))?;
        // The driver sets access for whole mappings.
        for (_, mapping) in self.vmm.mappings.range_mut(..address + size).filter(|(base, m)| **base + m.size > address)
        {
            for &(ordinal, flags, _) in &wanted {
                mapping.access.insert(ordinal, flags);
            }
        }
        Ok(())
    }
}
