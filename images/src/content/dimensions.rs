//! The dimensions of a chunk: units, columns and rows, and the key words that they take.

/// Bytes that one thread takes at once.
pub(super) const UNIT: usize = 16;
/// Columns of a chunk.
pub(super) const COLUMNS: usize = 128;
/// Units of a column.
pub(super) const ROUNDS: usize = 32;
/// Bytes from one unit of a column to the next.
pub(super) const ROW: usize = UNIT * COLUMNS;
/// NH values of 32 bits each at every level.
pub(super) const LANES: usize = 4;
/// Words of the column key.
pub(super) const COLUMN_WORDS: usize = 4 * ROUNDS + 2 * (LANES - 1);
/// Words of the chunk key.
pub(super) const CHUNK_WORDS: usize = 2 * LANES * COLUMNS + 2 * (LANES - 1);

/// Bytes of a chunk. A GPU's threads hash chunks independently of each other.
pub const CHUNK: usize = ROW * ROUNDS;

/// Bytes of the digest of a chunk, of which a hash is made.
pub const DIGEST: usize = 8 * LANES;

/// Threads of a block, in every kernel.
pub const THREADS: u32 = COLUMNS as u32;
