//! The client's own virtual memory management: addresses it has reserved, pieces of physical memory it has made, and
//! mappings of one at the other.
//!
//! The driver keeps only large reservations where they are asked for (measured on 580: 64 MiB and more, not 8), so one that
//! holds both windows is made when the first of them is needed, and stays; the client's are parts of it.
//!
//! ```text
//!   reservations   ├──────────── addresses ────────────┤      at the client's places in `window::reserved`
//!   mappings          ├─ piece 1 ─┤├─ piece 2 ─┤             each with what devices may do there
//!   pieces         1, 2, 3 ...                                also those that are mapped twice, or nowhere
//! ```
//!
//! A piece lives as long as the client has its handle or a mapping of it. Its content is saved and loaded through a
//! mapping of the worker's own in `window::aliases`, since the client may have none, or none that can be read.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use rekindle_cuda_abi::types::*;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{
    self, AddressRange, Kind, OfPiece, PieceAccess, PieceCreate, PieceFlags, PieceGranularity, PieceMap,
};
use rekindle_wire::ipc::{PieceId, Token};
use rekindle_wire::window;
use thiserror::Error;

use crate::gpu::driver::{CallFailed, Driver, expect};
use crate::resources::not_loaded::NotLoaded;
use crate::resources::units::{self, Unit, Versioned};
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused, check};
use crate::session::state::{self, Mapped};
use crate::session::waiting::Then;

const INVALID_VALUE: Refused = Refused::Code(CUDA_ERROR_INVALID_VALUE);

/// Physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The driver's handle; 0 in an image, until it is made again.
    pub(crate) real: u64,
    pub(crate) size: u64,
    pub(crate) device: usize,
    pub(crate) handle_types: u32,
    pub(crate) flags: PieceFlags,
    /// Whether the client has its handle.
    pub(crate) held: bool,
    pub(crate) sharing: Option<Sharing>,
}

/// What a piece has that other processes may have too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharing {
    pub(crate) id: PieceId,
    /// Whether it came from another process.
    pub(crate) came: bool,
    /// Whether somebody else's part of the image has its content.
    pub(crate) elsewhere: bool,
}

/// A piece at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    size: u64,
    piece: u64,
    /// What each device may do there, by `CUmemAccess_flags`; none may do anything at first.
    access: BTreeMap<usize, u32>,
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Vmm {
    reservations: BTreeMap<u64, u64>,
    pub(crate) pieces: BTreeMap<u64, Piece>,
    mappings: Versioned<BTreeMap<u64, Mapping>>,
    /// Pieces that the client has given names.
    pub(crate) exported: BTreeMap<Token, u64>,
    /// Whether the driver keeps the windows free.
    kept: bool,
}

/// A piece where it is mapped to be saved or loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alias {
    pub(crate) address: u64,
    pub(crate) handle: u64,
    pub(crate) piece: Piece,
}

impl Vmm {
    /// What counts towards the client's limit on a device: what came from others as well, which is there for as long as
    /// this client has it, but what is one piece once.
    pub(crate) fn counted(&self, device: usize) -> u64 {
        let mut seen = BTreeSet::new();
        let first = |p: &&Piece| p.device == device && p.sharing.is_none_or(|it| seen.insert(it.id));
        self.pieces.values().filter(first).map(|p| p.size).sum()
    }

    /// Whether it has the piece of this id.
    pub(crate) fn has(&self, id: &PieceId) -> bool {
        self.pieces.values().any(|p| p.sharing.is_some_and(|it| it.id == *id))
    }

    /// Bytes of pieces on a device that are this client's to save, if others do not save them.
    pub(crate) fn bytes(&self, device: usize) -> u64 {
        let own = |p: &&Piece| p.device == device && !p.sharing.is_some_and(|it| it.came);
        self.pieces.values().filter(own).map(|p| p.size).sum()
    }

    /// Whether every byte of a range is mapped.
    pub(crate) fn covers(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut at = address;
        while at < end {
            match self.mappings.range(..=at).next_back() {
                Some((base, mapping)) if at < base + mapping.size => at = base + mapping.size,
                _ => return false,
            }
        }
        bytes > 0
    }

    /// The pieces that are mapped in a range, by their handles.
    pub(crate) fn pieces_in(&self, start: u64, end: u64) -> impl Iterator<Item = u64> {
        let mapped = self.mappings.range(..end).rev().take_while(move |(base, m)| *base + m.size > start);
        mapped.map(|(_, mapping)| mapping.piece)
    }

    /// Changes whenever mappings may have.
    pub(crate) fn version(&self) -> u64 {
        self.mappings.version()
    }

    /// Runs of mappings without a gap.
    pub(crate) fn runs(&self) -> Vec<Unit> {
        units::join(self.mappings.iter().map(|(base, mapping)| (*base, mapping.size)))
    }

    /// Runs that have a piece in common, each with each.
    pub(crate) fn shared_runs(&self) -> Vec<(Unit, Unit)> {
        let mut places: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (base, mapping) in self.mappings.iter() {
            places.entry(mapping.piece).or_default().push(*base);
        }
        places.retain(|_, bases| bases.len() > 1);
        let runs = if places.is_empty() { Vec::new() } else { self.runs() };
        let run = |base: u64| runs.iter().find(|run| (run.start..run.end).contains(&base)).copied();
        let pairs = places.values().flat_map(|bases| bases.iter().flat_map(|a| bases.iter().map(move |b| (*a, *b))));
        let mut shared: Vec<_> = pairs.filter_map(|(a, b)| Some((run(a)?, run(b)?))).filter(|(a, b)| a != b).collect();
        shared.sort();
        shared.dedup();
        shared
    }

    /// The device whose memory a run is, where that device may read all of it and no other process has any of it.
    pub(crate) fn readable(&self, run: &Unit) -> Option<usize> {
        let mut device = None;
        for (_, mapping) in self.mappings.range(run.start..run.end) {
            let piece = self.pieces.get(&mapping.piece)?;
            let owner = piece.device;
            let may = mapping.access.get(&owner).is_some_and(|flags| *flags != 0);
            if !may || piece.sharing.is_some() || device.is_some_and(|device| device != owner) {
                return None;
            }
            device = Some(owner);
        }
        device
    }

    /// Whether a range lies in one reservation.
    fn is_reserved(&self, address: u64, size: u64) -> bool {
        let reservation = self.reservations.range(..=address).next_back();
        let end = address.checked_add(size);
        reservation.zip(end).is_some_and(|((base, length), end)| end <= base + length)
    }

    /// Has the driver keep both windows free.
    fn keep_windows(&mut self, driver: &Driver) -> Result<(), CUresult> {
        if !self.kept {
            reserve_at(driver, window::RESERVED_BASE, window::RESERVED_SIZE + window::ALIAS_SIZE)?;
            self.kept = true;
        }
        Ok(())
    }

    /// Whether a range touches no reservation.
    fn is_free(&self, address: u64, size: u64) -> bool {
        let before = self.reservations.range(..address.saturating_add(size)).next_back();
        before.is_none_or(|(base, length)| base + length <= address)
    }

    /// Whether anything is mapped in a range.
    fn is_used(&self, address: u64, size: u64) -> bool {
        let before = self.mappings.range(..address.saturating_add(size)).next_back();
        before.is_some_and(|(base, mapping)| base + mapping.size > address)
    }

    /// Lets go of a piece that nobody has any more.
    fn drop_unused(&mut self, driver: &Driver, handle: u64) -> CUresult {
        let used = self.mappings.values().any(|m| m.piece == handle);
        match self.pieces.get(&handle) {
            Some(piece) if !piece.held && !used => {
                let real = piece.real;
                self.pieces.remove(&handle);
                self.exported.retain(|_, piece| *piece != handle);
                // SAFETY: the driver's own handle, of which nothing is mapped.
                unsafe { (driver.cuMemRelease)(real) }
            }
            _ => CUDA_SUCCESS,
        }
    }

    /// Where each piece whose content is this client's to save is mapped for that, and to be loaded: side by side, in the
    /// order of their handles. None where there is too much.
    fn places(&self) -> Option<Vec<Alias>> {
        let mut at = window::aliases().start;
        let here = |(_, piece): &(&u64, &Piece)| !piece.sharing.is_some_and(|it| it.elsewhere);
        let places = self.pieces.iter().filter(here).map(|(&handle, &piece)| {
            let alias = Alias { address: at, handle, piece };
            at = at.checked_add(piece.size).filter(|end| *end <= window::aliases().end)?;
            Some(alias)
        });
        places.collect()
    }

    /// For the image. None where there is nothing.
    pub(crate) fn saved(&self) -> Option<Mapped> {
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

    /// What [`Vmm::saved`] gave, of a client that has so many devices. Nothing of it is there yet.
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

/// Whether a range lies in a window.
fn is_in(window: &Range<u64>, address: u64, size: u64) -> bool {
    size > 0 && window.contains(&address) && address.checked_add(size).is_some_and(|end| end <= window.end)
}

pub(crate) fn properties(device: CUdevice, handle_types: u32, flags: PieceFlags) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        handle_types,
        location_type: CU_MEM_LOCATION_TYPE_DEVICE,
        location_id: device,
        compression: flags.compression,
        rdma: flags.rdma,
        usage: flags.usage,
        ..Default::default()
    }
}

pub(crate) fn create(driver: &Driver, size: u64, properties: &CUmemAllocationProp) -> Result<u64, CUresult> {
    let mut real = 0_u64;
    // SAFETY: the out parameter is a local, the properties live through the call.
    match unsafe { (driver.cuMemCreate)((&raw mut real).cast(), size as usize, properties, 0) } {
        CUDA_SUCCESS => Ok(real),
        error => Err(error),
    }
}

/// Reserves exactly these addresses.
fn reserve_at(driver: &Driver, address: u64, size: u64) -> Result<(), CUresult> {
    let mut got = 0;
    // SAFETY: the out parameter is a local.
    match unsafe { (driver.cuMemAddressReserve)(&raw mut got, size as usize, 0, address, 0) } {
        CUDA_SUCCESS if got == address => Ok(()),
        CUDA_SUCCESS => {
            // SAFETY: what was just reserved, and is of no use.
            unsafe { (driver.cuMemAddressFree)(got, size as usize) };
            Err(CUDA_ERROR_OUT_OF_MEMORY)
        }
        error => Err(error),
    }
}

fn set_access(driver: &Driver, address: u64, size: u64, access: &[CUmemAccessDesc]) -> CUresult {
    // SAFETY: the descriptors live through the call.
    unsafe { (driver.cuMemSetAccess)(address, size as usize, access.as_ptr(), access.len()) }
}

impl Executor {
    /// Executes a command of virtual memory management.
    pub(crate) fn vmm_command(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        let driver = self.driver();
        match call {
            command::ADDRESS_RESERVE => {
                let AddressRange { address, size } = AddressRange::read(args)?;
                if !is_in(&window::reserved(), address, size) {
                    return Err(Malformed("a reservation outside its window").into());
                }
                if !self.memory.vmm.is_free(address, size) {
                    return Err(Refused::Code(CUDA_ERROR_OUT_OF_MEMORY));
                }
                let driver = self.driver();
                self.memory.vmm.keep_windows(driver).map_err(Refused::Code)?;
                self.memory.vmm.reservations.insert(address, size);
            }
            command::ADDRESS_FREE => {
                let AddressRange { address, size } = AddressRange::read(args)?;
                if self.memory.vmm.reservations.get(&address) != Some(&size) || self.memory.vmm.is_used(address, size) {
                    return Err(INVALID_VALUE);
                }
                self.memory.vmm.reservations.remove(&address);
            }
            command::PIECE_CREATE => self.piece_create(args)?,
            command::PIECE_RELEASE => {
                let OfPiece { piece: handle } = OfPiece::read(args)?;
                let piece = self.memory.vmm.pieces.get_mut(&handle).filter(|p| p.held).ok_or(INVALID_VALUE)?;
                piece.held = false;
                check(self.memory.vmm.drop_unused(driver, handle))?;
                self.count_pieces();
            }
            command::PIECE_RETAIN => {
                let OfPiece { piece: handle } = OfPiece::read(args)?;
                self.memory.vmm.pieces.get_mut(&handle).ok_or(INVALID_VALUE)?.held = true;
            }
            command::PIECE_MAP => self.piece_map(args)?,
            command::PIECE_UNMAP => return self.piece_unmap(args),
            command::PIECE_ACCESS => self.piece_access(args)?,
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
            _ => return Err(Refused::UnknownCall(call)),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn piece_create(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PieceCreate { piece: handle, size, device: ordinal, handle_types, flags } = PieceCreate::read(args)?;
        if !Kind::Piece.owns(handle) || self.memory.vmm.pieces.contains_key(&handle) {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let (driver, device) = (self.driver(), self.device(ordinal)?);
        let ordinal = ordinal as usize;
        let properties = properties(device, handle_types, flags);
        let real = self.memory.make_counted(driver, ordinal, size, || create(driver, size, &properties))?;
        let piece = Piece { real, size, device: ordinal, handle_types, flags, held: true, sharing: None };
        self.memory.vmm.pieces.insert(handle, piece);
        self.count_pieces();
        Ok(())
    }

    /// What counts towards the client's limits.
    pub(crate) fn count_pieces(&mut self) {
        for (ordinal, device) in self.memory.devices.iter_mut().enumerate() {
            device.memory.set_pieces(self.memory.vmm.counted(ordinal));
        }
    }

    fn piece_map(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PieceMap { address, size, offset, piece: handle, flags } = PieceMap::read(args)?;
        let piece = self.memory.vmm.pieces.get(&handle).filter(|p| p.held).ok_or(INVALID_VALUE)?;
        if !self.memory.vmm.is_reserved(address, size) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: a piece of the client's, at addresses that it has reserved; the driver refuses those that are taken.
        check(unsafe { (self.driver().cuMemMap)(address, size as usize, offset as usize, piece.real, flags) })?;
        self.memory.vmm.mappings.insert(address, Mapping { size, piece: handle, access: BTreeMap::new() });
        Ok(())
    }

    fn piece_unmap(&mut self, args: &mut Reader<'_>) -> Result<Outcome, Refused> {
        let AddressRange { address, size } = AddressRange::read(args)?;
        if !self.memory.vmm.is_reserved(address, size) {
            return Err(INVALID_VALUE);
        }
        // As in the driver, nothing uses it any more when it goes.
        let busy = self.session.waiting.busy(0);
        self.when_done(busy, Then::Unmap { address, size, reply: self.header.reply })?;
        Ok(Outcome::Later)
    }

    /// Unmaps what nothing uses any more.
    pub(crate) fn unmap_pieces(&mut self, address: u64, size: u64) -> CUresult {
        let driver = self.driver();
        // SAFETY: addresses that the client has reserved; the driver refuses what is not whole mappings.
        let mut result = unsafe { (driver.cuMemUnmap)(address, size as usize) };
        if result != CUDA_SUCCESS {
            return result;
        }
        let gone: Vec<u64> = self.memory.vmm.mappings.range(address..address + size).map(|(base, _)| *base).collect();
        for base in gone {
            if let Some(mapping) = self.memory.vmm.mappings.remove(&base) {
                let dropped = self.memory.vmm.drop_unused(driver, mapping.piece);
                result = if result == CUDA_SUCCESS { dropped } else { result };
            }
        }
        self.count_pieces();
        result
    }

    fn piece_access(&mut self, args: &mut Reader<'_>) -> Result<(), Refused> {
        let PieceAccess { address, size, access } = PieceAccess::read(args)?;
        let mut wanted = Vec::new();
        for (ordinal, flags) in access {
            wanted.push((ordinal as usize, flags, self.device(ordinal)?));
        }
        if !self.memory.vmm.covers(address, size) {
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
        check(set_access(self.driver(), address, size, &access))?;
        // The driver sets it for whole mappings.
        for (_, mapping) in
            self.memory.vmm.mappings.range_mut(..address + size).filter(|(base, m)| **base + m.size > address)
        {
            for &(ordinal, flags, _) in &wanted {
                mapping.access.insert(ordinal, flags);
            }
        }
        Ok(())
    }

    /// Makes what an image's client had: reservations, pieces (empty yet), mappings with their access.
    pub(crate) fn restore_vmm(&mut self) -> Result<(), NotLoaded> {
        let driver = self.driver();
        let failed = |what, at, code| NotLoaded::NotToBeHad { what, at, code };
        if !self.memory.vmm.reservations.is_empty() {
            let kept = self.memory.vmm.keep_windows(driver);
            kept.map_err(|code| failed("the window at", window::RESERVED_BASE, code))?;
        }
        for (&handle, piece) in &mut self.memory.vmm.pieces {
            if let Some(sharing) = &piece.sharing {
                piece.real = self.memory.arrived.take(driver, &sharing.id)?;
                continue;
            }
            let device = self.memory.devices.get(piece.device).ok_or(NotLoaded::NoDevice)?.device;
            let properties = properties(device, piece.handle_types, piece.flags);
            piece.real = create(driver, piece.size, &properties).map_err(|code| failed("memory", handle, code))?;
        }
        for (&address, mapping) in self.memory.vmm.mappings.iter() {
            let failed = |code| failed("the mapping at", address, code);
            let piece = self.memory.vmm.pieces.get(&mapping.piece).ok_or(NotLoaded::Image("a mapping of nothing"))?;
            // SAFETY: a piece and a reservation that were just made.
            let mapped = unsafe { (driver.cuMemMap)(address, mapping.size as usize, 0, piece.real, 0) };
            let allowed = |(ordinal, flags): (&usize, &u32)| {
                let location_id = self.memory.devices.get(*ordinal)?.device;
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
        self.count_pieces();
        Ok(())
    }

    /// Maps every piece where it can be read and written. [`Executor::unmap_aliases`] ends that.
    pub(crate) fn map_aliases(&mut self) -> Result<Vec<Alias>, AliasError> {
        let places = self.memory.vmm.places().ok_or(AliasError::TooMuch)?;
        if !places.is_empty() {
            let driver = self.driver();
            let kept = self.memory.vmm.keep_windows(driver);
            kept.map_err(AliasError::Reserve)?;
        }
        let mut mapped = Vec::new();
        for alias in &places {
            let device = self.memory.devices.get(alias.piece.device).map_or(0, |d| d.device);
            match map_alias(self.driver(), alias, device) {
                Ok(()) => mapped.push(*alias),
                Err(error) => {
                    self.unmap_aliases(&mapped);
                    return Err(error.into());
                }
            }
        }
        Ok(mapped)
    }

    /// Ends what [`Executor::map_aliases`] began.
    pub(crate) fn unmap_aliases(&self, aliases: &[Alias]) {
        unmap_aliases(self.driver(), aliases);
    }
}

/// Why pieces are not mapped to be copied.
#[derive(Debug, Error)]
pub(crate) enum AliasError {
    #[error("it has more memory of its own mapping than can be saved")]
    TooMuch,
    #[error("cuMemAddressReserve failed: {}", result_name(*.0))]
    Reserve(CUresult),
    #[error(transparent)]
    Driver(#[from] CallFailed),
}

/// Ends what [`Executor::map_aliases`] began. The engine is done with them.
pub(crate) fn unmap_aliases(driver: &Driver, aliases: &[Alias]) {
    for alias in aliases {
        let size = alias.piece.size as usize;
        // SAFETY: mapped in `map_alias`, and nobody else's.
        let gone = unsafe { expect("cuMemUnmap", (driver.cuMemUnmap)(alias.address, size)) };
        if let Err(failed) = gone {
            tracing::warn!("what was mapped at {:#x} to be saved stays there: {failed}", alias.address);
        }
    }
}

fn map_alias(driver: &Driver, alias: &Alias, device: CUdevice) -> Result<(), CallFailed> {
    let Alias { address, piece, .. } = *alias;
    // SAFETY: a piece of the client's, at addresses of our own.
    let mapped = unsafe { expect("cuMemMap", (driver.cuMemMap)(address, piece.size as usize, 0, piece.real, 0)) };
    let access = CUmemAccessDesc {
        location_type: CU_MEM_LOCATION_TYPE_DEVICE,
        location_id: device,
        flags: CU_MEM_ACCESS_READWRITE,
    };
    mapped.and_then(|()| {
        expect("cuMemSetAccess", set_access(driver, address, piece.size, &[access])).inspect_err(|_| {
            // SAFETY: mapped above.
            unsafe { (driver.cuMemUnmap)(address, piece.size as usize) };
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const BASE: u64 = window::RESERVED_BASE;

    fn sample() -> Vmm {
        let piece = |real| Piece {
            real,
            size: 2 * MIB,
            device: 1,
            handle_types: 1,
            flags: PieceFlags { compression: 0, rdma: 1, usage: 2 },
            held: real == 7,
            sharing: (real == 8).then_some(Sharing { id: [3; 16], came: true, elsewhere: false }),
        };
        let mapping = |piece| Mapping { size: 2 * MIB, piece, access: BTreeMap::from([(0, 1), (1, 3)]) };
        Vmm {
            reservations: BTreeMap::from([(BASE, 64 * MIB)]),
            pieces: BTreeMap::from([(1, piece(7)), (2, piece(8))]),
            mappings: BTreeMap::from([(BASE, mapping(1)), (BASE + 2 * MIB, mapping(2)), (BASE + 8 * MIB, mapping(1))])
                .into(),
            exported: BTreeMap::from([([5; 16], 1)]),
            kept: false,
        }
    }

    #[test]
    fn what_is_covered_has_no_gap() {
        let vmm = sample();
        assert!(vmm.covers(BASE, 4 * MIB) && vmm.covers(BASE + 3 * MIB, MIB));
        assert!(!vmm.covers(BASE, 4 * MIB + 1) && !vmm.covers(BASE + 6 * MIB, MIB) && !vmm.covers(BASE, 0));
        assert!(!vmm.covers(u64::MAX, 2));
    }

    #[test]
    fn ranges_are_free_or_used_to_the_byte() {
        let vmm = sample();
        assert!(vmm.is_free(BASE + 64 * MIB, MIB) && vmm.is_free(BASE - MIB, MIB));
        assert!(!vmm.is_free(BASE + 64 * MIB - 1, MIB) && !vmm.is_free(BASE - MIB, MIB + 1));
        assert!(!vmm.is_free(BASE - MIB, 66 * MIB) && !vmm.is_free(BASE, u64::MAX));
        assert!(vmm.is_used(BASE, MIB) && vmm.is_used(BASE + 4 * MIB, 5 * MIB) && vmm.is_used(BASE - 1, 2));
        assert!(!vmm.is_used(BASE + 4 * MIB, 4 * MIB) && !vmm.is_used(BASE - MIB, MIB));
    }

    #[test]
    fn what_is_written_is_read_without_the_drivers_handles() {
        let vmm = sample();
        assert_eq!(Vmm::default().saved(), None);
        let out = vmm.saved().unwrap();
        let mut again = Vmm::default();
        again.read(&out, 2).unwrap();
        assert_eq!((&again.reservations, &*again.mappings), (&vmm.reservations, &*vmm.mappings));
        assert!(again.pieces.values().all(|p| p.real == 0 && p.size == 2 * MIB));
        assert_eq!(again.pieces[&2].flags.rdma, 1);
        assert_eq!(again.pieces[&2].sharing, vmm.pieces[&2].sharing);
        assert_eq!(again.exported, vmm.exported);
        // Of a device that there is not; a mapping at no reserved place, or of no piece; a name of no piece.
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

    #[test]
    fn what_has_no_gap_is_one_run_and_pieces_tie_runs_together() {
        let vmm = sample();
        let (low, high) = (Unit::new(BASE, 4 * MIB), Unit::new(BASE + 8 * MIB, 2 * MIB));
        assert_eq!(vmm.runs(), [low, high]);
        assert_eq!(vmm.shared_runs(), [(low, high), (high, low)]);
        assert_eq!(vmm.readable(&high), Some(1));
        // One of its pieces came from another process.
        assert_eq!(vmm.readable(&low), None);
    }

    #[test]
    fn what_came_counts_and_what_is_one_piece_counts_once() {
        let mut vmm = sample();
        assert_eq!((vmm.bytes(1), vmm.counted(1), vmm.counted(0)), (2 * MIB, 4 * MIB, 0));
        // Its own, under a second handle.
        vmm.pieces.insert(3, Piece { held: true, ..vmm.pieces[&2] });
        assert_eq!((vmm.bytes(1), vmm.counted(1)), (2 * MIB, 4 * MIB));
        assert!(vmm.has(&[3; 16]) && !vmm.has(&[4; 16]));
    }

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
