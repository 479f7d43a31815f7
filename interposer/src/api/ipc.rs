//! Memory and events that processes share. The application passes on a name that its worker keeps. A process that opens the
//! name has the daemon pass the memory to its own worker, and maps it as pieces of its own.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rekindle_cuda_abi::types::*;
use rekindle_wire::command::{
    ADDRESS_FREE, ADDRESS_RESERVE, AddressRange, EVENT_EXPORT, EVENT_OPEN, EventOpen, Kind, MEMORY_EXPORT,
    MemoryExport, NO_TICKET, OfEvent, OfPiece, PIECE_ACCESS, PIECE_EXPORT, PIECE_IMPORT, PIECE_MAP, PIECE_RELEASE,
    PIECE_UNMAP, Parameters, PieceAccess, PieceFlags, PieceImport, PieceMap,
};
use rekindle_wire::control::{Reply, Request};
use rekindle_wire::ipc::{self, HANDLE_BYTES, Named, Token};

use super::{check, code, put};
use crate::call::{Call, perform};
use crate::connection::ask;
use crate::operations::event;
use crate::process::log;
use crate::state::client::{self, Client};
use crate::state::ipc::{Open, Placed};
use crate::state::memory::Allocation;

/// All that `CU_MEM_HANDLE_TYPE_*` names: a file, two of Windows, a fabric's.
pub(super) const KNOWN_HANDLE_TYPES: [u32; 4] = [CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 2, 4, 8];

/// How often a delivery without pieces is asked for.
const EMPTY_DELIVERIES: u32 = 16;

/// Has the worker name something.
pub(super) fn name(number: u16, of: &impl Parameters) -> Result<Token, CUresult> {
    let mut call = Call::new(number)?;
    call.put(of);
    let (result, mut reply) = call.wait();
    check(result)?;
    let words = reply.word().zip(reply.word()).ok_or(CUDA_ERROR_UNKNOWN)?;
    Ok(ipc::of_words(words.into()))
}

pub(crate) unsafe fn cuIpcGetMemHandle(pHandle: *mut CUipcMemHandle, dptr: CUdeviceptr) -> CUresult {
    // The driver looks at this first, before there is a context or it is initialized.
    if pHandle.is_null() || dptr == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(client::get().and_then(|client| {
        client.contexts.current()?;
        if !matches!(client.memory.at(dptr), Some(Allocation::Device { .. })) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let bytes = ipc::handle(Named::Allocation, &name(MEMORY_EXPORT, &MemoryExport { address: dptr })?);
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(pHandle, CUipcMemHandle { bytes }) }
    }))
}

pub(crate) unsafe fn cuIpcOpenMemHandle(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: u32) -> CUresult {
    // SAFETY: the same contract.
    unsafe { cuIpcOpenMemHandle_v2(pdptr, handle, flags) }
}

pub(crate) unsafe fn cuIpcOpenMemHandle_v2(pdptr: *mut CUdeviceptr, handle: CUipcMemHandle, flags: u32) -> CUresult {
    code(client::get().and_then(|client| {
        let (context, known) = client.contexts.current()?;
        if pdptr.is_null() || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let token = ipc::token(Named::Allocation, &handle.bytes).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let mut opened = client.opened.lock();
        if let Some(open) = opened.get_mut(&token) {
            // Only one context of a process may open a handle.
            if open.context != context {
                return Err(CUDA_ERROR_INVALID_CONTEXT);
            }
            open.times += 1;
            // SAFETY: not null, so writable by cuda.h's contract.
            return unsafe { put(pdptr, open.base) };
        }
        let imported = take(client, &token, false)?;
        let devices = [imported.device, known.device];
        let placed = map(client, &devices, &imported).inspect_err(|_| imported.release())?;
        let (base, size) = (placed.reserved + imported.offset, imported.size);
        let open = Open { base, context, times: 1, placed };
        client.memory.insert(Allocation::Opened { base, size, device: imported.device, context });
        opened.insert(token, open);
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(pdptr, base) }
    }))
}

pub(crate) unsafe fn cuIpcCloseMemHandle(dptr: CUdeviceptr) -> CUresult {
    code(client::get().and_then(|client| {
        client.contexts.current()?;
        let mut opened = client.opened.lock();
        let token = opened.iter().find(|(_, open)| open.base == dptr).map(|(token, _)| *token);
        let token = token.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        match opened.get_mut(&token) {
            Some(open) if open.times > 1 => open.times -= 1,
            _ => {
                if let Some(open) = opened.remove(&token) {
                    client.memory.remove(open.base);
                    unmap(client, &open.placed)?;
                }
            }
        }
        Ok(())
    }))
}

/// Closes the handles of a context that is being destroyed.
pub(super) fn close_all(client: &Client, context: CUcontext) {
    let gone: Vec<Open> = client.opened.lock().extract_if(|_, open| open.context == context).map(|it| it.1).collect();
    for open in gone {
        client.memory.remove(open.base);
        // After a failure, the process's end frees the memory.
        let _ = unmap(client, &open.placed);
    }
}

pub(crate) unsafe fn cuIpcGetEventHandle(pHandle: *mut CUipcEventHandle, event: CUevent) -> CUresult {
    // The driver checks this first, as for memory.
    if pHandle.is_null() || event == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(client::get().and_then(|client| {
        client.contexts.current()?;
        event::check_handle(event)?;
        if !client.events.is_shared(event) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let bytes = ipc::handle(Named::Event, &name(EVENT_EXPORT, &OfEvent { event })?);
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(pHandle, CUipcEventHandle { bytes }) }
    }))
}

pub(crate) unsafe fn cuIpcOpenEventHandle(phEvent: *mut CUevent, handle: CUipcEventHandle) -> CUresult {
    code(client::get().and_then(|client| {
        let (context, _) = client.contexts.current()?;
        let token = ipc::token(Named::Event, &handle.bytes);
        let (false, Some(token)) = (phEvent.is_null(), token) else {
            return Err(CUDA_ERROR_INVALID_VALUE);
        };
        let event = super::event::made_for_others(client, context)?;
        let opened = loop {
            let ticket = match ticket(&token, false) {
                Ok((ticket, _)) => ticket,
                Err(code) => break Err(code),
            };
            let opened = perform(EVENT_OPEN, &EventOpen { ticket, event });
            if opened != Err(NO_TICKET) {
                break opened;
            }
        };
        opened.inspect_err(|_| super::event::destroy(client, event))?;
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(phEvent, event) }
    }))
}

pub(crate) unsafe fn cuMemExportToShareableHandle(
    shareableHandle: *mut c_void,
    handle: u64,
    handleType: u32,
    flags: u64,
) -> CUresult {
    code(client::get().and_then(|client| {
        if shareableHandle.is_null() || flags != 0 || !KNOWN_HANDLE_TYPES.contains(&handleType) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            log::refused("cuMemExportToShareableHandle of other handles than files");
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let piece = client.vmm.piece(handle).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        if piece.properties.handle_types & handleType == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let token = name(PIECE_EXPORT, &OfPiece { piece: handle })?;
        let file = file_of(&ipc::handle(Named::Piece, &token)).map_err(|_| CUDA_ERROR_OPERATING_SYSTEM)?;
        // SAFETY: not null, and a place for a descriptor by cuda.h's contract.
        unsafe { put(shareableHandle.cast::<i32>(), file.into_raw_fd()) }
    }))
}

pub(crate) unsafe fn cuMemImportFromShareableHandle(
    handle: *mut c_void,
    osHandle: *mut c_void,
    shHandleType: u32,
) -> CUresult {
    code(client::get().and_then(|client| {
        if handle.is_null() || !KNOWN_HANDLE_TYPES.contains(&shHandleType) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR {
            log::refused("cuMemImportFromShareableHandle of other handles than files");
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let token = token_in(osHandle as usize as i32, Named::Piece).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let imported = take(client, &token, true)?;
        let &[(piece, _)] = imported.pieces.as_slice() else {
            imported.release();
            return Err(CUDA_ERROR_UNKNOWN);
        };
        let flags = PieceFlags::of(imported.flags);
        let properties = CUmemAllocationProp {
            kind: CU_MEM_ALLOCATION_TYPE_PINNED,
            handle_types: CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location_type: CU_MEM_LOCATION_TYPE_DEVICE,
            location_id: client.devices.ordinal(imported.device),
            compression: flags.compression,
            rdma: flags.rdma,
            usage: flags.usage,
            ..Default::default()
        };
        client.vmm.add(piece, imported.device, properties);
        // SAFETY: not null, so writable by cuda.h's contract.
        unsafe { put(handle.cast(), piece) }
    }))
}

/// Creates a sealed file with a handle. It can be passed on, and CRIU saves it.
pub(super) fn file_of(bytes: &[u8; HANDLE_BYTES]) -> std::io::Result<OwnedFd> {
    // SAFETY: the name is a C string; a descriptor that comes back is new and owned here.
    let file = unsafe {
        let fd = libc::memfd_create(ipc::FILE_NAME.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        if fd < 0 {
            return Err(std::io::Error::last_os_error());
        }
        File::from(OwnedFd::from_raw_fd(fd))
    };
    file.write_all_at(bytes, 0)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_WRITE | libc::F_SEAL_SEAL;
    // SAFETY: a plain system call on the descriptor made above.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } {
        0 => Ok(file.into()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// The token in such a file for this kind of object; `None` for any other file.
pub(super) fn token_in(fd: i32, named: Named) -> Option<Token> {
    let mut bytes = [0_u8; HANDLE_BYTES + 1];
    // SAFETY: the kernel writes at most so many bytes into the local, and looks whether the descriptor is one.
    let got = unsafe { libc::pread(fd, bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    let (bytes, _) = bytes.split_first_chunk::<HANDLE_BYTES>()?;
    (got == HANDLE_BYTES as isize).then(|| ipc::token(named, bytes)).flatten()
}

/// Pieces that the worker has imported.
pub(super) struct Imported {
    pub(super) device: usize,
    offset: u64,
    size: u64,
    flags: u64,
    /// Handles and sizes.
    pieces: Vec<(u64, u64)>,
}

impl Imported {
    /// Releases them.
    pub(super) fn release(&self) {
        for (piece, _) in &self.pieces {
            // After a failure, the process's end frees the memory.
            let _ = perform(PIECE_RELEASE, &OfPiece { piece: *piece });
        }
    }
}

/// Has the daemon pass what a token names to this process's worker. Returns the number under which the worker has it, and the
/// number of its pieces.
fn ticket(token: &Token, own: bool) -> Result<(u64, usize), CUresult> {
    match ask::ask(&Request::Import { token: *token }) {
        Some(Reply::Imported { own: true, .. }) if !own => Err(CUDA_ERROR_INVALID_CONTEXT),
        Some(Reply::Imported { ticket, count, .. }) => Ok((ticket, count)),
        // The exporter has freed it.
        Some(Reply::NotShared) => Err(CUDA_ERROR_INVALID_HANDLE),
        _ => Err(CUDA_ERROR_OPERATING_SYSTEM),
    }
}

/// Has the worker take the pieces that a token names. `own` is whether they may belong to this process.
pub(super) fn take(client: &Client, token: &Token, own: bool) -> Result<Imported, CUresult> {
    // A daemon that does not know of pools never delivers what has no pieces.
    let mut empty = 0..EMPTY_DELIVERIES;
    loop {
        let (ticket, count) = ticket(token, own)?;
        let mut call = Call::new(PIECE_IMPORT)?;
        let handles: Vec<u64> = (0..count).map(|_| client.fresh(Kind::Piece)).collect();
        call.put(&PieceImport { ticket, pieces: handles.clone() });
        let (result, mut reply) = call.wait();
        if result == NO_TICKET {
            // This process was dumped in between, and has another worker.
            if count == 0 && empty.next().is_none() {
                log::refused("pools of other processes under this daemon, which is too old");
                return Err(CUDA_ERROR_NOT_SUPPORTED);
            }
            continue;
        }
        check(result)?;
        let mut word = || reply.word().ok_or(CUDA_ERROR_UNKNOWN);
        let (device, offset, size, flags) = (word()? as usize, word()?, word()?, word()?);
        let pieces = handles.into_iter().map(|handle| Ok((handle, word()?))).collect::<Result<_, CUresult>>()?;
        return Ok(Imported { device, offset, size, flags, pieces });
    }
}

/// Maps pieces side by side, for these devices.
pub(super) fn map(client: &Client, devices: &[usize], imported: &Imported) -> Result<Placed, CUresult> {
    let bytes: u64 = imported.pieces.iter().map(|(_, size)| size).sum();
    let reserved = client.vmm.take(bytes, MEMORY_GRANULARITY, 0).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    let pieces = imported.pieces.iter().map(|(handle, _)| *handle).collect();
    // After a failure the addresses stay reserved here, so that the next reservation tries others.
    perform(ADDRESS_RESERVE, &AddressRange { address: reserved, size: bytes })?;
    let mut at = reserved;
    let mapped = imported.pieces.iter().try_for_each(|(piece, size)| {
        perform(PIECE_MAP, &PieceMap { address: at, size: *size, offset: 0, piece: *piece, flags: 0 })?;
        at += size;
        Ok(())
    });
    let devices: BTreeSet<usize> = devices.iter().copied().collect();
    let access = devices.into_iter().map(|device| (device as u64, CU_MEM_ACCESS_READWRITE)).collect();
    let access = PieceAccess { address: reserved, size: bytes, access };
    mapped.and_then(|()| perform(PIECE_ACCESS, &access)).inspect_err(|_| {
        if at > reserved {
            let _ = perform(PIECE_UNMAP, &AddressRange { address: reserved, size: at - reserved });
        }
        // Addresses that the worker still has must stay reserved here.
        if perform(ADDRESS_FREE, &AddressRange { address: reserved, size: bytes }).is_ok() {
            client.vmm.give(reserved, bytes);
        }
    })?;
    Ok(Placed { reserved, bytes, pieces })
}

/// Unmaps what [`map`] has mapped, when nothing uses it any more.
pub(super) fn unmap(client: &Client, placed: &Placed) -> Result<(), CUresult> {
    let range = AddressRange { address: placed.reserved, size: placed.bytes };
    perform(PIECE_UNMAP, &range)?;
    for piece in &placed.pieces {
        perform(PIECE_RELEASE, &OfPiece { piece: *piece })?;
    }
    perform(ADDRESS_FREE, &range)?;
    client.vmm.give(placed.reserved, placed.bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_for_a_piece_has_a_token() {
        let name = [7; 16];
        let file = file_of(&ipc::handle(Named::Piece, &name)).unwrap();
        assert_eq!(token_in(file.as_raw_fd(), Named::Piece), Some(name));
        let other = file_of(&ipc::handle(Named::Allocation, &name)).unwrap();
        assert_eq!(token_in(other.as_raw_fd(), Named::Piece), None);
        assert_eq!(token_in(file.as_raw_fd(), Named::Pool), None);
        assert_eq!(token_in(-1, Named::Piece), None);
        assert!(File::from(file).write_all_at(b"x", 0).is_err());
    }
}
