//! Memory and events that processes share. A handle that an application passes to another names the memory or the event, and
//! is no right by itself. The daemon asks the workers of the processes that the importer may share with whether the name is
//! theirs, and carries the memory's own descriptors from worker to worker.
//!
//! ```text
//!   exporter ── MEMORY_EXPORT ──► its worker keeps a token ──► 64 bytes, or a file of 64 bytes ──► importer
//!   importer ── Import{token} ──► daemon ── Export{token} ──► exporter's worker ── descriptors ──► importer's worker
//!   importer ── PIECE_IMPORT{ticket} ──► its worker
//! ```

use std::ffi::CStr;

use serde::{Deserialize, Serialize};

/// The name of a shared object. A token cannot be guessed.
pub type Token = [u8; 16];

/// Names a piece of memory in all processes that have it.
pub type PieceId = [u8; 16];

/// Bytes of a handle: as many as `CUipcMemHandle` and `CUipcEventHandle` have.
pub const HANDLE_BYTES: usize = 64;

/// The name of the file whose content is a handle of memory: what a program gets as a POSIX file descriptor.
pub const FILE_NAME: &CStr = c"rekindle-shared-memory";

const MAGIC: [u8; 8] = *b"rekindle";

/// The kind of object that a handle names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum Named {
    /// An allocation (`cuIpcGetMemHandle`).
    Allocation = 1,
    /// A piece of memory (`cuMemExportToShareableHandle`).
    Piece = 2,
    /// An event (`cuIpcGetEventHandle`).
    Event = 3,
    /// A pool (`cuMemPoolExportToShareableHandle`). Only in handles: what is on its way from worker to worker names no piece.
    Pool = 4,
    /// An allocation from a pool (`cuMemPoolExportPointer`). Only in handles.
    PoolMemory = 5,
}

/// The bytes of a handle, which the application passes to another process.
pub fn handle(named: Named, token: &Token) -> [u8; HANDLE_BYTES] {
    let mut bytes = [0; HANDLE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8] = named as u8;
    bytes[16..32].copy_from_slice(token);
    bytes
}

/// The token in what [`handle`] gave for this; None for anything else.
pub fn token(named: Named, bytes: &[u8; HANDLE_BYTES]) -> Option<Token> {
    let mut token = Token::default();
    token.copy_from_slice(&bytes[16..32]);
    (*bytes == handle(named, &token)).then_some(token)
}

/// An allocation from a pool, as the application passes it on: where it is in the memory that has the segment's name. The
/// importer has that memory mapped once for all allocations in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolMemory {
    /// The name of the pool's segment.
    pub segment: Token,
    /// The name of the pool.
    pub pool: Token,
    /// Where the allocation begins in the segment.
    pub offset: u64,
    /// Bytes of the allocation.
    pub size: u64,
}

impl PoolMemory {
    /// The bytes that the application passes to another process, as many as `CUmemPoolPtrExportData` has.
    pub fn handle(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = handle(Named::PoolMemory, &self.segment);
        bytes[32..48].copy_from_slice(&self.pool);
        bytes[48..56].copy_from_slice(&self.offset.to_le_bytes());
        bytes[56..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// What [`PoolMemory::handle`] gave these bytes for; None for other bytes.
    pub fn of(bytes: &[u8; HANDLE_BYTES]) -> Option<Self> {
        let (mut segment, mut pool) = (Token::default(), Token::default());
        segment.copy_from_slice(&bytes[16..32]);
        pool.copy_from_slice(&bytes[32..48]);
        let word = |at: usize| (0..8).fold(0, |word, i| word | u64::from(bytes[at + i]) << (8 * i));
        let memory = Self { segment, pool, offset: word(48), size: word(56) };
        (*bytes == memory.handle()).then_some(memory)
    }
}

/// A token as two words of the ring.
pub fn words(token: &Token) -> [u64; 2] {
    let word = |at: usize| (0..8).fold(0, |word, i| word | u64::from(token[at + i]) << (8 * i));
    [word(0), word(8)]
}

/// The token of these words.
pub fn of_words(words: [u64; 2]) -> Token {
    let mut token = Token::default();
    token[..8].copy_from_slice(&words[0].to_le_bytes());
    token[8..].copy_from_slice(&words[1].to_le_bytes());
    token
}

/// A piece of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPiece {
    /// Its name.
    pub id: PieceId,
    /// Bytes.
    pub size: u64,
}

/// Memory, or an event, on its way from worker to worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// The kind of the shared object.
    pub named: Named,
    /// The UUID of the GPU that it is of; of events, nothing.
    pub device: [u8; 16],
    /// Where the named object begins in the pieces, laid side by side (for an event: its number within its page).
    pub offset: u64,
    /// Bytes of the named object.
    pub size: u64,
    /// [`crate::command::PieceFlags`].
    pub flags: u64,
    /// How many pieces there are in all.
    pub count: usize,
    /// The pieces whose descriptors come with this message, in the descriptors' order.
    pub pieces: Vec<SharedPiece>,
}

/// The most pieces in a message.
pub const PIECES_AT_A_TIME: usize = 200;
/// The most pieces of what is shared: 256 GiB of allocations.
pub const MAX_PIECES: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_read_as_they_were_written_and_nothing_else_is() {
        let name: Token = std::array::from_fn(|i| i as u8 * 17);
        let bytes = handle(Named::Piece, &name);
        assert_eq!(token(Named::Piece, &bytes), Some(name));
        assert_eq!(token(Named::Allocation, &bytes), None);
        for place in (0..HANDLE_BYTES).filter(|place| !(16..32).contains(place)) {
            let mut other = bytes;
            other[place] ^= 1;
            assert_eq!(token(Named::Piece, &other), None, "{place}");
        }
        assert_eq!(of_words(words(&name)), name);
    }

    #[test]
    fn memory_of_pools_is_read_as_it_was_written_and_nothing_else_is() {
        let memory = PoolMemory { segment: [3; 16], pool: [4; 16], offset: 512, size: 1 << 40 };
        let bytes = memory.handle();
        assert_eq!(PoolMemory::of(&bytes), Some(memory));
        assert_eq!(token(Named::PoolMemory, &bytes), None);
        assert_eq!(PoolMemory::of(&handle(Named::Pool, &[4; 16])), None);
    }
}
