//! The state in an image of shared memory, and how the workers of a restore come to share the same memory again.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rekindle_cuda_abi::types::*;
use rekindle_images::Client;
use rekindle_wire::codec::Malformed;
use rekindle_wire::command::PieceFlags;
use rekindle_wire::ipc::{PIECES_AT_A_TIME, PieceId};

use super::events_saved::SavedEvents;
use super::export;
use crate::gpu::driver::{Driver, checked};
use crate::resources::Memory;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::vmm::{self, Piece, Sharing};
use crate::session::call::Call;
use crate::session::state::{self, State};

/// A piece that an image's client has and other processes may have.
struct Wanted {
    id: PieceId,
    device: usize,
    size: u64,
    handle_types: u32,
    flags: PieceFlags,
    /// Whether another client's part of the image has the content.
    elsewhere: bool,
}

impl Memory {
    /// Writes all pieces that have ids, and shared events, for the image.
    pub(crate) fn write_shared(&self, out: &mut State) {
        let mut all = Vec::new();
        for (device, it) in self.devices.iter().enumerate() {
            all.extend(it.memory.ids().map(|(id, _, size)| Wanted {
                id,
                device,
                size,
                handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                flags: PieceFlags::default(),
                elsewhere: false,
            }));
        }
        for piece in self.vmm.pieces.values() {
            let Some(Sharing { id, elsewhere, .. }) = piece.sharing else { continue };
            let Piece { device, size, handle_types, flags, .. } = *piece;
            all.push(Wanted { id, device, size, handle_types, flags, elsewhere });
        }
        let piece = |it: Wanted| state::SharedPiece {
            id: it.id.to_vec(),
            device: it.device as u32,
            size: it.size,
            handle_types: it.handle_types,
            flags: it.flags.word(),
            elsewhere: it.elsewhere,
            ..Default::default()
        };
        out.shared = all.into_iter().map(piece).collect();
        out.shared_events = Some(self.ipc_events.write()).into();
    }

    /// Makes the pieces anew whose content an image's client has. Returns these, with descriptors from `first` on, and the
    /// pieces that the client needs from others.
    pub(crate) fn make_shared(&mut self, driver: &Driver, blob: &[u8], first: usize) -> Result<Made, NotLoaded> {
        let client = Client::from_bytes(blob)?;
        if state::check(client.worker_version).is_err() {
            // The load of the image reports this error better.
            return Ok(Made::default());
        }
        let malformed = NotLoaded::worker_state;
        let state: State = state::parse(&client.worker_state).map_err(malformed)?;
        let (wanted, events) = read_shared(&state).map_err(malformed)?;
        if first == 0 {
            for it in wanted.iter().filter(|it| !it.elsewhere) {
                let device = self.devices.get(it.device).ok_or(NotLoaded::NoDevice)?.device;
                let properties =
                    vmm::properties(device, it.handle_types | CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, it.flags);
                let failed = |code| NotLoaded::Shared { what: "made", code };
                let real = vmm::create(driver, it.size, &properties).map_err(failed)?;
                self.arrived.files.insert(it.id, export(driver, real).map_err(failed)?);
                if let Some(twice) = self.arrived.made.insert(it.id, real) {
                    // SAFETY: the driver's own handle, of which nothing is mapped.
                    checked("cuMemRelease", unsafe { (driver.cuMemRelease)(twice) })?;
                }
            }
        }
        if first == 0 {
            for page in events.pages.iter().filter(|it| !it.elsewhere) {
                let file = page.make().ok_or(NotLoaded::NoEvents)?;
                self.arrived.files.insert(page.id, file);
            }
        }
        let here: BTreeSet<PieceId> = self.arrived.files.keys().copied().collect();
        let all = wanted.iter().map(|it| it.id).chain(events.pages.iter().map(|it| it.id));
        let needed = all.filter(|id| !here.contains(id)).collect::<BTreeSet<_>>();
        let mut made = Made { count: here.len(), needed: needed.into_iter().collect(), ..Made::default() };
        for (id, file) in self.arrived.files.iter().skip(first).take(PIECES_AT_A_TIME) {
            made.ids.push(*id);
            made.files.push(file.try_clone().map_err(NotLoaded::NoDescriptor)?);
        }
        Ok(made)
    }

    /// Takes pieces that other workers have made.
    pub(crate) fn take_shared(&mut self, ids: Vec<PieceId>, files: Vec<OwnedFd>) {
        self.arrived.files.extend(ids.into_iter().zip(files));
    }

    /// Has the pieces that were made, or came, before mapped as the shared pieces of a restored client. Its memory is mapped
    /// after this call.
    pub(crate) fn map_made(&mut self, driver: &Driver) -> Result<(), NotLoaded> {
        for device in &mut self.devices {
            device.memory.use_made(|id| self.arrived.take(driver, id))?;
        }
        Ok(())
    }

    /// Checks that all shared memory is mapped, and restores shared events.
    pub(crate) fn all_shared_is_mapped(&mut self, call: &mut Call, state: &State) -> Result<(), NotLoaded> {
        let (_, events) = read_shared(state).map_err(NotLoaded::worker_state)?;
        if !self.devices.iter().all(|device| device.memory.has_mapped_made()) {
            return Err(NotLoaded::Image("the image names shared memory that none of its allocations has"));
        }
        let primary = self.first_primary();
        self.ipc_events.restore(call, primary, &self.arrived, events)?;
        self.arrived.all_taken();
        Ok(())
    }
}

/// The result of [`Memory::make_shared`].
#[derive(Debug, Default)]
pub(crate) struct Made {
    pub(crate) count: usize,
    pub(crate) ids: Vec<PieceId>,
    pub(crate) files: Vec<OwnedFd>,
    pub(crate) needed: Vec<PieceId>,
}

/// Reads what [`Memory::write_shared`] wrote.
fn read_shared(state: &State) -> Result<(Vec<Wanted>, SavedEvents), Malformed> {
    let piece = |it: &state::SharedPiece| {
        Ok(Wanted {
            id: state::name(&it.id)?,
            device: it.device as usize,
            size: it.size,
            handle_types: it.handle_types,
            flags: PieceFlags::of(it.flags),
            elsewhere: it.elsewhere,
        })
    };
    let pieces = state.shared.iter().map(piece).collect::<Result<_, _>>()?;
    Ok((pieces, SavedEvents::read(&state.shared_events)?))
}
