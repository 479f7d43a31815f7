//! Commands about memory and events that processes share, and requests of other workers for them.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind, MemoryExport, NO_TICKET, OfPiece, PieceFlags, PieceImport};
use rekindle_wire::ipc::{MAX_PIECES, Named, PIECES_AT_A_TIME, PieceId, Shared, SharedPiece, Token};

use super::names::{new_name, write_name};
use super::{ShareError, export, import};
use crate::gpu::driver::Driver;
use crate::resources::Memory;
use crate::resources::vmm::{Piece, Sharing};
use crate::session::call::Call;
use crate::session::outcome::{Outcome, Refused};

/// A piece, and the driver's handle of it.
type Exporting = (SharedPiece, u64);

/// Imports all of the pieces, or none.
fn import_all(driver: &Driver, files: &[OwnedFd], pieces: &[SharedPiece]) -> Result<Vec<(u64, SharedPiece)>, CUresult> {
    let mut imported = Vec::new();
    for (file, piece) in files.iter().zip(pieces) {
        match import(driver, file) {
            Ok(real) => imported.push((real, *piece)),
            Err(code) => {
                for (real, _) in imported {
                    // SAFETY: the driver's own handle, of which nothing is mapped.
                    unsafe { (driver.cuMemRelease)(real) };
                }
                return Err(code);
            }
        }
    }
    Ok(imported)
}

impl Memory {
    /// Executes a command about shared memory.
    pub(crate) fn ipc_command(
        &mut self,
        call: &mut Call,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match number {
            command::MEMORY_EXPORT => {
                let MemoryExport { address } = MemoryExport::read(args)?;
                let mut devices = self.devices.iter_mut();
                let token = devices.find_map(|device| device.memory.export(address, new_name));
                write_name(reply, &token.ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?);
            }
            command::PIECE_EXPORT => {
                let OfPiece { piece } = OfPiece::read(args)?;
                let token = self.name_piece(call.driver(), piece).map_err(Refused::Code)?;
                write_name(reply, &token);
            }
            _ => return self.piece_import(call, args, reply),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// Executes a command about shared events.
    pub(crate) fn ipc_event_command(
        &mut self,
        call: &mut Call,
        number: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let primary = self.first_primary();
        self.ipc_events.command(call, primary, &mut self.arrived, number, args, reply)
    }

    fn name_piece(&mut self, driver: &Driver, handle: u64) -> Result<Token, CUresult> {
        let piece = self.vmm.pieces.get_mut(&handle).filter(|p| p.held).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // The driver says whether the piece may be given away.
        export(driver, piece.real)?;
        if let Some((token, _)) = self.vmm.exported.iter().find(|(_, named)| **named == handle) {
            return Ok(*token);
        }
        let (token, id) = new_name().zip(new_name()).ok_or(CUDA_ERROR_OPERATING_SYSTEM)?;
        piece.sharing.get_or_insert(Sharing { id, came: false, elsewhere: false });
        self.vmm.exported.insert(token, handle);
        Ok(token)
    }

    fn piece_import(&mut self, call: &mut Call, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let PieceImport { ticket, pieces: handles } = PieceImport::read(args)?;
        if handles.len() > MAX_PIECES {
            return Err(Malformed("more pieces than may be shared under one name").into());
        }
        let mut given = BTreeSet::new();
        if !handles.iter().all(|h| Kind::Piece.owns(*h) && !self.vmm.pieces.contains_key(h) && given.insert(*h)) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let Some((shared, files)) = self.arrived.ticket(ticket) else {
            return Ok(Outcome::Done(NO_TICKET));
        };
        if shared.named == Named::Event || files.len() != handles.len() || shared.count != files.len() {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let device = call.session.attached.devices.iter().position(|d| d.uuid == shared.device);
        // The device may be one that this process may not use.
        let device = device.ok_or(Refused::Code(CUDA_ERROR_INVALID_DEVICE))?;
        // As for pieces that the client makes, there must be room before a new piece comes. A piece that the client already
        // has needs none.
        let mut new = BTreeSet::new();
        let more = shared.pieces.iter().filter(|piece| !self.vmm.has(&piece.id) && new.insert(piece.id));
        let bytes = more.fold(0_u64, |sum, piece| sum.saturating_add(piece.size));
        let driver = call.driver();
        let pieces = self.make_counted(driver, device, bytes, || import_all(driver, &files, &shared.pieces))?;
        [device as u64, shared.offset, shared.size, shared.flags].into_iter().for_each(|word| reply.word(word));
        for (handle, (real, SharedPiece { id, size })) in handles.into_iter().zip(pieces) {
            reply.word(size);
            let flags = PieceFlags::of(shared.flags);
            let sharing = Some(Sharing { id, came: true, elsewhere: false });
            let piece = Piece {
                real,
                size,
                device,
                handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                flags,
                held: true,
                sharing,
            };
            self.vmm.pieces.insert(handle, piece);
        }
        self.count_pieces();
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// The memory or event behind a name, for another worker: descriptors of the pieces from `first` on.
    pub(crate) fn export_named(
        &mut self,
        call: &Call,
        token: &Token,
        first: usize,
    ) -> Result<(Shared, Vec<OwnedFd>), ShareError> {
        if let Some((shared, file)) = self.ipc_events.named(token) {
            return Ok((shared, vec![file]));
        }
        let (device, mut shared, pieces) = self.named(token).ok_or(ShareError::NoName)?;
        shared.device = call.session.attached.devices.get(device).ok_or(ShareError::NoDevice)?.uuid;
        shared.count = pieces.len();
        let driver = call.driver();
        let mut files = Vec::new();
        for (piece, real) in pieces.into_iter().skip(first).take(PIECES_AT_A_TIME) {
            files.push(export(driver, real).map_err(ShareError::NotGiven)?);
            shared.pieces.push(piece);
        }
        Ok((shared, files))
    }

    fn named(&mut self, token: &Token) -> Option<(usize, Shared, Vec<Exporting>)> {
        let shared = |named, offset, size, flags| Shared {
            named,
            device: [0; 16],
            offset,
            size,
            flags,
            count: 0,
            pieces: Vec::new(),
        };
        if let Some(handle) = self.vmm.exported.get(token) {
            let piece = self.vmm.pieces.get(handle)?;
            let named = SharedPiece { id: piece.sharing?.id, size: piece.size };
            return Some((
                piece.device,
                shared(Named::Piece, 0, piece.size, piece.flags.word()),
                vec![(named, piece.real)],
            ));
        }
        // The importer asks whether the pool is there, and for no memory.
        if let Some(ordinal) = self.pools.named(token) {
            return Some((ordinal, shared(Named::Allocation, 0, 0, 0), Vec::new()));
        }
        let segment = self.pools.segment_named(token);
        for (ordinal, device) in self.devices.iter_mut().enumerate() {
            let of_pool = segment.filter(|(of, _)| *of == ordinal).and_then(|(_, address)| {
                let (base, length, pieces) = device.memory.backing(address)?;
                Some((address - base, length, pieces))
            });
            let Some((offset, size, pieces)) = of_pool.or_else(|| device.memory.exported(token)) else { continue };
            let mut named = Vec::new();
            for piece in pieces {
                let id = device.memory.id(piece.address, new_name)?;
                named.push((SharedPiece { id, size: piece.size }, piece.real));
            }
            return Some((ordinal, shared(Named::Allocation, offset, size, 0), named));
        }
        None
    }

    /// The ids of pieces that the client has given away or may have, and of pieces that came from other processes.
    pub(crate) fn shares(&mut self, call: &mut Call) -> (Vec<PieceId>, Vec<PieceId>) {
        let primary = self.first_primary();
        self.ipc_events.forget(call, primary);
        let of_devices = self.devices.iter().flat_map(|d| d.memory.ids().map(|(id, ..)| id));
        let of_vmm = self.vmm.pieces.values().filter_map(|p| p.sharing);
        let (came, own): (Vec<Sharing>, Vec<Sharing>) = of_vmm.partition(|it| it.came);
        let arrived = self.arrived.ids();
        let ids = |list: Vec<Sharing>| list.into_iter().map(|it| it.id);
        let (own_events, events) = self.ipc_events.shares();
        let own = ids(own).chain(of_devices).chain(own_events);
        (own.collect(), ids(came).chain(arrived).chain(events).collect())
    }

    /// Notes the pieces that other processes save. A piece that this client has twice is saved once.
    pub(crate) fn leave_out(&mut self, call: &mut Call, elsewhere: &BTreeSet<PieceId>) {
        let primary = self.first_primary();
        self.ipc_events.forget(call, primary);
        self.ipc_events.leave_out(elsewhere);
        let mut saved: BTreeSet<PieceId> =
            self.devices.iter().flat_map(|d| d.memory.ids().map(|(id, ..)| id)).collect();
        for sharing in self.vmm.pieces.values_mut().filter_map(|p| p.sharing.as_mut()) {
            sharing.elsewhere = elsewhere.contains(&sharing.id) || !saved.insert(sharing.id);
        }
    }
}
