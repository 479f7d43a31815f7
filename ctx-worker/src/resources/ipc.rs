//! Memory that the client shares with other processes: names of what it gives them, and pieces that came from them.
//!
//! ```text
//!   MEMORY_EXPORT, PIECE_EXPORT ──► a name ──(the application passes it on)──► Export ──► descriptors of the pieces
//!   Import ──► arrived, under a ticket ──► PIECE_IMPORT ──► pieces of the client's (`vmm`), which it maps
//! ```
//!
//! A piece that has been given away or has come from somewhere has an id, the same in every process that has it. In an image
//! one process has its content, in whose part the others find it; in a restore that one makes it anew, and they get it
//! ([`Arrived`]).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rekindle_cuda_abi::types::*;
use rekindle_images::Client;
use rekindle_wire::codec::{Malformed, Reader, Writer};
use rekindle_wire::command::{self, Kind, MemoryExport, NO_TICKET, OfPiece, PieceFlags, PieceImport};
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::ipc::{self, MAX_PIECES, Named, PIECES_AT_A_TIME, PieceId, Shared, SharedPiece, Token};
use thiserror::Error;

use crate::gpu::driver::{Driver, expect};
use crate::resources::ipc_events::SavedEvents;
use crate::resources::not_loaded::NotLoaded;
use crate::resources::vmm::{self, Piece, Sharing};
use crate::serve::executor::Executor;
use crate::session::outcome::{Outcome, Refused};
use crate::session::state::{self, State};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub(crate) const POSIX_FILE: u32 = 1;
/// What has come and was not asked for: no more than this at a time.
const MAX_TICKETS: usize = 16;

/// What has come from other workers.
#[derive(Debug, Default)]
pub(crate) struct Arrived {
    tickets: BTreeMap<u64, (Shared, Vec<OwnedFd>)>,
    /// Of a restore: pieces that were made here and nobody has taken, and descriptors of all.
    made: BTreeMap<PieceId, u64>,
    files: BTreeMap<PieceId, OwnedFd>,
}

/// A piece that an image's client has and others may have.
struct Wanted {
    id: PieceId,
    device: usize,
    size: u64,
    handle_types: u32,
    flags: PieceFlags,
    /// Whether its content is elsewhere.
    elsewhere: bool,
}

/// A piece, and the driver's handle of it.
type Exporting = (SharedPiece, u64);

pub(crate) fn write_name(out: &mut Writer, name: &[u8; 16]) {
    ipc::words(name).into_iter().for_each(|word| out.word(word));
}

/// A name that nobody guesses.
pub(crate) fn new_name() -> Option<[u8; 16]> {
    let mut name = [0_u8; 16];
    // SAFETY: writes at most sixteen bytes into the local.
    let got = unsafe { libc::getrandom(name.as_mut_ptr().cast(), name.len(), 0) };
    (got == 16).then_some(name)
}

fn export(driver: &Driver, real: u64) -> Result<OwnedFd, CUresult> {
    let mut fd = -1_i32;
    // SAFETY: the out parameter is a local, and the handle the driver's own.
    let result = unsafe { (driver.cuMemExportToShareableHandle)((&raw mut fd).cast(), real, POSIX_FILE, 0) };
    match result {
        // SAFETY: the driver has made the descriptor for its caller.
        CUDA_SUCCESS if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        CUDA_SUCCESS => Err(CUDA_ERROR_UNKNOWN),
        error => Err(error),
    }
}

fn import(driver: &Driver, file: &OwnedFd) -> Result<u64, CUresult> {
    let mut real = 0_u64;
    // SAFETY: the out parameter is a local; the driver takes a descriptor as a pointer's value, and keeps none.
    let result = unsafe {
        (driver.cuMemImportFromShareableHandle)((&raw mut real).cast(), file.as_raw_fd() as usize as *mut _, POSIX_FILE)
    };
    if result == CUDA_SUCCESS { Ok(real) } else { Err(result) }
}

/// All of them, or none.
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

impl Arrived {
    /// What came for a ticket.
    pub(crate) fn ticket(&mut self, ticket: u64) -> Option<(Shared, Vec<OwnedFd>)> {
        self.tickets.remove(&ticket)
    }

    /// The descriptor of a page of events, of a restore.
    pub(crate) fn file(&self, id: &PieceId) -> Option<OwnedFd> {
        self.files.get(id)?.try_clone().ok()
    }

    /// A piece of a restore, by the driver's handle, which is the caller's.
    pub(crate) fn take(&mut self, driver: &Driver, id: &PieceId) -> Result<u64, NotLoaded> {
        if let Some(real) = self.made.remove(id) {
            return Ok(real);
        }
        let file = self.files.get(id).ok_or(NotLoaded::Image("the image lacks memory that its processes share"))?;
        import(driver, file).map_err(|code| NotLoaded::Shared { what: "taken", code })
    }

    /// A restore has all that it needs.
    fn all_taken(&mut self) {
        self.made.clear();
        self.files.clear();
    }
}

/// Why memory is not given to another worker, or not taken from one.
#[derive(Debug, Error)]
pub(crate) enum ShareError {
    #[error("it has nothing of this name")]
    NoName,
    #[error("it has no such device")]
    NoDevice,
    #[error("memory was not given: {}", result_name(*.0))]
    NotGiven(CUresult),
    #[error("memory without its descriptors, or too much of it")]
    Unfit,
}

impl Failing for ShareError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::NoName | Self::NoDevice => FailureKind::Refused,
            Self::NotGiven(_) | Self::Unfit => FailureKind::Internal,
        }
    }
}

impl Executor {
    /// Executes a command about memory that is shared.
    pub(crate) fn ipc_command(
        &mut self,
        call: u16,
        args: &mut Reader<'_>,
        reply: &mut Writer,
    ) -> Result<Outcome, Refused> {
        match call {
            command::MEMORY_EXPORT => {
                let MemoryExport { address } = MemoryExport::read(args)?;
                let mut devices = self.memory.devices.iter_mut();
                let token = devices.find_map(|device| device.memory.export(address, new_name));
                write_name(reply, &token.ok_or(Refused::Code(CUDA_ERROR_INVALID_VALUE))?);
            }
            command::PIECE_EXPORT => {
                let OfPiece { piece } = OfPiece::read(args)?;
                let token = self.name_piece(piece).map_err(Refused::Code)?;
                write_name(reply, &token);
            }
            _ => return self.piece_import(args, reply),
        }
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    fn name_piece(&mut self, handle: u64) -> Result<Token, CUresult> {
        let driver = self.driver();
        let piece = self.memory.vmm.pieces.get_mut(&handle).filter(|p| p.held).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // The driver says whether it may be given away.
        export(driver, piece.real)?;
        if let Some((token, _)) = self.memory.vmm.exported.iter().find(|(_, named)| **named == handle) {
            return Ok(*token);
        }
        let (token, id) = new_name().zip(new_name()).ok_or(CUDA_ERROR_OPERATING_SYSTEM)?;
        piece.sharing.get_or_insert(Sharing { id, came: false, elsewhere: false });
        self.memory.vmm.exported.insert(token, handle);
        Ok(token)
    }

    fn piece_import(&mut self, args: &mut Reader<'_>, reply: &mut Writer) -> Result<Outcome, Refused> {
        let PieceImport { ticket, pieces: handles } = PieceImport::read(args)?;
        if handles.len() > MAX_PIECES {
            return Err(Malformed("more pieces than may be shared under one name").into());
        }
        let mut given = BTreeSet::new();
        if !handles.iter().all(|h| Kind::Piece.owns(*h) && !self.memory.vmm.pieces.contains_key(h) && given.insert(*h))
        {
            return Err(Malformed("a new handle that is taken, or of another kind").into());
        }
        let Some((shared, files)) = self.memory.arrived.tickets.remove(&ticket) else {
            return Ok(Outcome::Done(NO_TICKET));
        };
        if shared.named == Named::Event || files.len() != handles.len() || shared.count != files.len() {
            return Err(Refused::Code(CUDA_ERROR_INVALID_VALUE));
        }
        let device = self.session.attached.devices.iter().position(|d| d.uuid == shared.device);
        // One that this process may not use.
        let device = device.ok_or(Refused::Code(CUDA_ERROR_INVALID_DEVICE))?;
        // As with what it makes: there must be room before it is there. What it has already needs none.
        let mut new = BTreeSet::new();
        let more = shared.pieces.iter().filter(|piece| !self.memory.vmm.has(&piece.id) && new.insert(piece.id));
        let bytes = more.fold(0_u64, |sum, piece| sum.saturating_add(piece.size));
        let driver = self.driver();
        let pieces = self.memory.make_counted(driver, device, bytes, || import_all(driver, &files, &shared.pieces))?;
        [device as u64, shared.offset, shared.size, shared.flags].into_iter().for_each(|word| reply.word(word));
        for (handle, (real, SharedPiece { id, size })) in handles.into_iter().zip(pieces) {
            reply.word(size);
            let flags = PieceFlags::of(shared.flags);
            let sharing = Some(Sharing { id, came: true, elsewhere: false });
            let piece = Piece { real, size, device, handle_types: POSIX_FILE, flags, held: true, sharing };
            self.memory.vmm.pieces.insert(handle, piece);
        }
        self.count_pieces();
        Ok(Outcome::Done(CUDA_SUCCESS))
    }

    /// What a name stands for, for another worker: descriptors of the pieces from `first` on.
    pub(crate) fn export_named(&mut self, token: &Token, first: usize) -> Result<(Shared, Vec<OwnedFd>), ShareError> {
        if let Some((shared, file)) = self.named_event(token) {
            return Ok((shared, vec![file]));
        }
        let (device, mut shared, pieces) = self.named(token).ok_or(ShareError::NoName)?;
        shared.device = self.session.attached.devices.get(device).ok_or(ShareError::NoDevice)?.uuid;
        shared.count = pieces.len();
        let driver = self.driver();
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
        if let Some(handle) = self.memory.vmm.exported.get(token) {
            let piece = self.memory.vmm.pieces.get(handle)?;
            let named = SharedPiece { id: piece.sharing?.id, size: piece.size };
            return Some((
                piece.device,
                shared(Named::Piece, 0, piece.size, piece.flags.word()),
                vec![(named, piece.real)],
            ));
        }
        for (ordinal, device) in self.memory.devices.iter_mut().enumerate() {
            let Some((offset, size, pieces)) = device.memory.exported(token) else { continue };
            let mut named = Vec::new();
            for piece in pieces {
                let id = device.memory.id(piece.address, new_name)?;
                named.push((SharedPiece { id, size: piece.size }, piece.real));
            }
            return Some((ordinal, shared(Named::Allocation, offset, size, 0), named));
        }
        None
    }

    /// Keeps what comes from another worker until the client asks for it.
    pub(crate) fn arrive(&mut self, ticket: u64, shared: Shared, files: Vec<OwnedFd>) -> Result<(), ShareError> {
        if shared.pieces.len() != files.len() || shared.count > MAX_PIECES {
            return Err(ShareError::Unfit);
        }
        let tickets = &mut self.memory.arrived.tickets;
        if let Some((before, its_files)) = tickets.get_mut(&ticket) {
            before.pieces.extend(shared.pieces);
            its_files.extend(files);
            return Ok(());
        }
        // Whoever asked for them has been killed, or restored, in between.
        while tickets.len() >= MAX_TICKETS {
            tickets.pop_first();
        }
        tickets.insert(ticket, (shared, files));
        Ok(())
    }

    /// The ids of pieces that it has given away or may have, and of those that came from others.
    pub(crate) fn shares(&mut self) -> (Vec<PieceId>, Vec<PieceId>) {
        self.forget_events();
        let of_devices = self.memory.devices.iter().flat_map(|d| d.memory.ids().map(|(id, ..)| id));
        let of_vmm = self.memory.vmm.pieces.values().filter_map(|p| p.sharing);
        let (came, own): (Vec<Sharing>, Vec<Sharing>) = of_vmm.partition(|it| it.came);
        let arrived = self.memory.arrived.tickets.values().flat_map(|(shared, _)| shared.pieces.iter().map(|p| p.id));
        let ids = |list: Vec<Sharing>| list.into_iter().map(|it| it.id);
        let (own_events, events) = self.memory.ipc_events.shares();
        let own = ids(own).chain(of_devices).chain(own_events);
        (own.collect(), ids(came).chain(arrived).chain(events).collect())
    }

    /// Who saves what: nothing twice, and not what others save.
    pub(crate) fn leave_out(&mut self, elsewhere: &BTreeSet<PieceId>) {
        self.forget_events();
        self.memory.ipc_events.leave_out(elsewhere);
        let mut saved: BTreeSet<PieceId> =
            self.memory.devices.iter().flat_map(|d| d.memory.ids().map(|(id, ..)| id)).collect();
        for sharing in self.memory.vmm.pieces.values_mut().filter_map(|p| p.sharing.as_mut()) {
            sharing.elsewhere = elsewhere.contains(&sharing.id) || !saved.insert(sharing.id);
        }
    }

    /// All pieces that have ids, and events that processes share, for the image.
    pub(crate) fn write_shared(&self, out: &mut State) {
        let mut all = Vec::new();
        for (device, it) in self.memory.devices.iter().enumerate() {
            all.extend(it.memory.ids().map(|(id, _, size)| Wanted {
                id,
                device,
                size,
                handle_types: POSIX_FILE,
                flags: PieceFlags::default(),
                elsewhere: false,
            }));
        }
        for piece in self.memory.vmm.pieces.values() {
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
        out.shared_events = Some(self.memory.ipc_events.write()).into();
    }

    /// Makes the pieces anew whose content an image's client has, and says which there are, with descriptors from `first`
    /// on, and which it needs from others.
    pub(crate) fn make_shared(&mut self, blob: &[u8], first: usize) -> Result<Made, NotLoaded> {
        let client = Client::from_bytes(blob)?;
        if state::check(client.worker_version).is_err() {
            // Said better when it is loaded.
            return Ok(Made::default());
        }
        let malformed = NotLoaded::worker_state;
        let state: State = state::parse(&client.worker_state).map_err(malformed)?;
        let (wanted, events) = read_shared(&state).map_err(malformed)?;
        let driver = self.driver();
        if first == 0 {
            for it in wanted.iter().filter(|it| !it.elsewhere) {
                let device = self.memory.devices.get(it.device).ok_or(NotLoaded::NoDevice)?.device;
                let properties = vmm::properties(device, it.handle_types | POSIX_FILE, it.flags);
                let failed = |code| NotLoaded::Shared { what: "made", code };
                let real = vmm::create(driver, it.size, &properties).map_err(failed)?;
                self.memory.arrived.files.insert(it.id, export(driver, real).map_err(failed)?);
                if let Some(twice) = self.memory.arrived.made.insert(it.id, real) {
                    // SAFETY: the driver's own handle, of which nothing is mapped.
                    expect("cuMemRelease", unsafe { (driver.cuMemRelease)(twice) })?;
                }
            }
        }
        if first == 0 {
            for page in events.pages.iter().filter(|it| !it.elsewhere) {
                let file = page.make(&events).ok_or(NotLoaded::NoEvents)?;
                self.memory.arrived.files.insert(page.id, file);
            }
        }
        let here: BTreeSet<PieceId> = self.memory.arrived.files.keys().copied().collect();
        let all = wanted.iter().map(|it| it.id).chain(events.pages.iter().map(|it| it.id));
        let needed = all.filter(|id| !here.contains(id)).collect::<BTreeSet<_>>();
        let mut made = Made { count: here.len(), needed: needed.into_iter().collect(), ..Made::default() };
        for (id, file) in self.memory.arrived.files.iter().skip(first).take(PIECES_AT_A_TIME) {
            made.ids.push(*id);
            made.files.push(file.try_clone().map_err(NotLoaded::NoDescriptor)?);
        }
        Ok(made)
    }

    /// Pieces that others have made.
    pub(crate) fn take_shared(&mut self, ids: Vec<PieceId>, files: Vec<OwnedFd>) {
        self.memory.arrived.files.extend(ids.into_iter().zip(files));
    }

    /// Has the pieces of a restored client that others share be the ones that were made, or came, before.
    pub(crate) fn map_made(&mut self) -> Result<(), NotLoaded> {
        let driver = self.driver();
        for device in &mut self.memory.devices {
            device.memory.use_made(|id| self.memory.arrived.take(driver, id))?;
        }
        Ok(())
    }

    /// Maps what else is shared. From now on pieces are new ones.
    pub(crate) fn all_shared_is_mapped(&mut self, state: &State) -> Result<(), NotLoaded> {
        let (_, events) = read_shared(state).map_err(NotLoaded::worker_state)?;
        self.restore_events(events)?;
        self.memory.arrived.all_taken();
        self.memory.devices.iter_mut().for_each(|device| device.memory.all_made_are_used());
        Ok(())
    }
}

/// What [`Executor::make_shared`] says.
#[derive(Debug, Default)]
pub(crate) struct Made {
    pub(crate) count: usize,
    pub(crate) ids: Vec<PieceId>,
    pub(crate) files: Vec<OwnedFd>,
    pub(crate) needed: Vec<PieceId>,
}

/// What [`Executor::write_shared`] wrote.
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
