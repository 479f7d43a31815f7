//! The shared memory of a client and its worker.
//!
//! The client makes one memfd, seals it against any change of size, and both sides map it. CRIU saves the memfd with the
//! process, so commands not yet executed and replies not yet taken survive a dump and a restore.
//!
//! ```text
//!   0        Header        magic, version, indices, error words          4 KiB
//!   SEQS     u64 x UNITS   which ticket each unit's content belongs to   128 KiB
//!   UNITS    64 B x UNITS  the command ring                              1 MiB
//!   REPLIES  ReplySlot x REPLIES                                         256 KiB
//!   CHUNKS   u32 x CHUNKS  whether each staging chunk is being copied    4 KiB
//!   CALLS    u64 x ...     how often each call was asked for (`calls`)   72 KiB
//! ```
//!
//! A second memfd, the staging, holds [`CHUNKS`] chunks of [`CHUNK_SIZE`] bytes, through which pageable copies
//! go. The worker registers the staging with the driver once.
//!
//! - `content`: sizes, places, the header and the reply slots
//! - `mapping`: a process's mapping of these; the model checker has its own (`model.rs`)
//! - `mark`: how a worker recognises a client's shared memory

mod content;
#[cfg(not(feature = "model"))]
mod mapping;
mod mark;

pub use content::{
    Aligned, CALL_FUNCTIONS, CALL_STRIPES, CHUNK_SIZE, CHUNKS, Header, MAGIC, MANAGED_NAME, MAX_COMMAND, PINNED_NAME,
    REPLIES, REPLY_BYTES, REPLY_PAYLOAD, ReplySlot, SEALS, SHARED_NAME, SHARED_SIZE, STAGING_NAME, STAGING_SIZE, UNIT,
    UNITS, USERFAULT_NAME, VARIABLES_NAME,
};
#[cfg(not(feature = "model"))]
pub use mapping::Shared;
#[cfg(all(test, not(feature = "model")))]
pub(crate) use mapping::heap;

#[cfg(feature = "model")]
pub use crate::model::Shared;
