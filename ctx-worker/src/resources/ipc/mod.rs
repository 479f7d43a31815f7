//! Memory that the client shares with other processes: names of memory that it gives them, and pieces that came from them.
//!
//! ```text
//!   MEMORY_EXPORT, PIECE_EXPORT ──► a name ──(the application passes it on)──► Export ──► descriptors of the pieces
//!   Import ──► arrived, under a ticket ──► PIECE_IMPORT ──► pieces of the client's (`vmm`), which it maps
//! ```
//!
//! A piece that has been given away or has come from elsewhere has an id, the same in every process that has the piece. In
//! an image, one process's part has the content, and the others find it there. In a restore, that process makes the piece
//! anew, and the others get it from that process ([`Arrived`]).

mod commands;
pub(crate) mod events;
mod events_saved;
pub(crate) mod names;
mod saved;

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use rekindle_cuda_abi::types::*;
use rekindle_wire::control::{Failing, FailureKind};
use rekindle_wire::ipc::{MAX_PIECES, PieceId, Shared};
use thiserror::Error;

use crate::gpu::driver::Driver;
use crate::resources::not_loaded::NotLoaded;

/// The most deliveries that may wait for the client to ask for them.
const MAX_TICKETS: usize = 16;

/// Memory and events that have come from other workers.
#[derive(Debug, Default)]
pub(crate) struct Arrived {
    tickets: BTreeMap<u64, (Shared, Vec<OwnedFd>)>,
    /// In a restore: pieces that were made here and that nobody has taken, and descriptors of all pieces.
    made: BTreeMap<PieceId, u64>,
    files: BTreeMap<PieceId, OwnedFd>,
}

/// A descriptor of a piece, for another process.
pub(crate) fn export(driver: &Driver, real: u64) -> Result<OwnedFd, CUresult> {
    let mut fd = -1_i32;
    // SAFETY: the out parameter is a local, and the handle the driver's own.
    let result = unsafe {
        (driver.cuMemExportToShareableHandle)((&raw mut fd).cast(), real, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
    };
    match result {
        // SAFETY: the driver has made the descriptor for its caller.
        CUDA_SUCCESS if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        CUDA_SUCCESS => Err(CUDA_ERROR_UNKNOWN),
        error => Err(error),
    }
}

/// The driver's handle of a piece that another process has exported.
pub(crate) fn import(driver: &Driver, file: &OwnedFd) -> Result<u64, CUresult> {
    let mut real = 0_u64;
    // SAFETY: the out parameter is a local; the driver takes a descriptor as a pointer's value, and keeps none.
    let result = unsafe {
        (driver.cuMemImportFromShareableHandle)(
            (&raw mut real).cast(),
            file.as_raw_fd() as usize as *mut _,
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        )
    };
    if result == CUDA_SUCCESS { Ok(real) } else { Err(result) }
}

impl Arrived {
    /// Keeps a delivery from another worker until the client asks for it.
    pub(crate) fn put(&mut self, ticket: u64, shared: Shared, files: Vec<OwnedFd>) -> Result<(), ShareError> {
        if shared.pieces.len() != files.len() || shared.count > MAX_PIECES {
            return Err(ShareError::Unfit);
        }
        let tickets = &mut self.tickets;
        if let Some((before, its_files)) = tickets.get_mut(&ticket) {
            before.pieces.extend(shared.pieces);
            its_files.extend(files);
            return Ok(());
        }
        // The processes that asked for the oldest deliveries were killed or restored in between.
        while tickets.len() >= MAX_TICKETS {
            tickets.pop_first();
        }
        tickets.insert(ticket, (shared, files));
        Ok(())
    }

    /// Takes the delivery for a ticket.
    pub(crate) fn ticket(&mut self, ticket: u64) -> Option<(Shared, Vec<OwnedFd>)> {
        self.tickets.remove(&ticket)
    }

    /// The ids of pieces that came and that the client has not asked for yet.
    fn ids(&self) -> impl Iterator<Item = PieceId> {
        self.tickets.values().flat_map(|(shared, _)| shared.pieces.iter().map(|piece| piece.id))
    }

    /// The descriptor of a page of events, in a restore.
    pub(crate) fn file(&self, id: &PieceId) -> Option<OwnedFd> {
        self.files.get(id)?.try_clone().ok()
    }

    /// Takes a piece in a restore. Returns the driver's handle, which then belongs to the caller.
    pub(crate) fn take(&mut self, driver: &Driver, id: &PieceId) -> Result<u64, NotLoaded> {
        if let Some(real) = self.made.remove(id) {
            return Ok(real);
        }
        let file = self.files.get(id).ok_or(NotLoaded::Image("the image lacks memory that its processes share"))?;
        import(driver, file).map_err(|code| NotLoaded::Shared { what: "taken", code })
    }

    /// Ends the restore, which has all pieces that it needs.
    fn all_taken(&mut self) {
        self.made.clear();
        self.files.clear();
    }
}

/// Why memory cannot be given to another worker, or taken from one.
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
