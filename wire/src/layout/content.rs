//! The content of the shared memory: sizes and places, the header, the reply slots.

use crate::sync::{AtomicI32, AtomicU32, AtomicU64, Cell};

/// Whether this is compiled for the model checker, which tries all ways in which few commands can go.
const MODEL: bool = cfg!(feature = "model");

/// Marks the header.
pub const MAGIC: u64 = u64::from_le_bytes(*b"REKINDLE");
/// Bytes in a unit, the ring's grain.
pub const UNIT: usize = 64;
/// Units in the ring.
pub const UNITS: usize = if MODEL { 2 } else { 16384 };
/// The largest command, header included, in bytes.
pub const MAX_COMMAND: usize = if MODEL { 2 * UNIT } else { 128 << 10 };
/// Reply slots: how many calls may wait at a time; more wait for a slot.
pub const REPLIES: usize = if MODEL { 1 } else { 128 };
/// Bytes of a reply's payload.
pub const REPLY_BYTES: usize = if MODEL { 48 } else { 2048 - 16 };
/// Staging chunks. All chunks are registered, and so in CRIU's image. CRIU writes shared memory at about 1 GB/s while the
/// process stands still: 16 MiB took a third to two thirds of the freeze.
pub const CHUNKS: usize = 12;
/// Bytes in a staging chunk.
pub const CHUNK_SIZE: usize = 512 << 10;
/// Room for the counts of so many lines of the driver table.
pub const CALL_FUNCTIONS: usize = 1024;
/// Threads that count calls without getting in each other's way.
pub const CALL_STRIPES: usize = 8;

pub(super) const SEQS_AT: usize = 4096;
pub(super) const UNITS_AT: usize = SEQS_AT + UNITS * 8;
pub(super) const REPLIES_AT: usize = UNITS_AT + UNITS * UNIT;
pub(super) const CHUNKS_AT: usize = REPLIES_AT + REPLIES * size_of::<ReplySlot>();
pub(super) const CALLS_AT: usize = CHUNKS_AT + 4096;

/// Bytes of the shared memory. One more stripe of counts holds the refused calls.
pub const SHARED_SIZE: usize = CALLS_AT + (CALL_STRIPES + 1) * CALL_FUNCTIONS * size_of::<AtomicU64>();
/// Bytes of the staging.
pub const STAGING_SIZE: usize = CHUNKS * CHUNK_SIZE;

/// The name that the shared memory's memfd has in `/proc/PID/maps`.
pub const SHARED_NAME: &std::ffi::CStr = c"rekindle-ring";
/// The staging memfd's name.
pub const STAGING_NAME: &std::ffi::CStr = c"rekindle-staging";
/// The names of memfds of pinned memory begin with this; a serial number follows.
pub const PINNED_NAME: &str = "rekindle-pinned-";
/// As [`PINNED_NAME`], of memfds that have the pages of managed memory which the process uses.
pub const MANAGED_NAME: &str = "rekindle-managed-";
/// As [`MANAGED_NAME`], of memfds that have pages of managed variables. They lie where the driver has placed the code's variables.
pub const VARIABLES_NAME: &str = "rekindle-managed-variables-";
/// The name of a memfd that a process has mapped which has a userfaultfd for managed memory.
pub const USERFAULT_NAME: &std::ffi::CStr = c"rekindle-userfault";

/// The seals of the three memfds: neither their size nor the seals can change under the other side.
pub const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// The first page.
#[repr(C)]
#[cfg_attr(feature = "model", derive(Default))]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`crate::CLIENT_VERSION`] of the client.
    pub version: AtomicU32,
    /// How long a waiting caller spins before it sleeps, in microseconds; written by the worker at attach.
    pub caller_spin_us: AtomicU32,

    /// The next ticket, in units. Written by producers.
    pub tail: Aligned<AtomicU64>,
    /// Units consumed. Written by the worker.
    pub head: Aligned<AtomicU64>,
    /// Set while the worker sleeps; producers then ring the doorbell.
    pub worker_asleep: Aligned<AtomicU32>,
    /// Counts rings of the bell.
    pub doorbell: AtomicU32,
    /// How many producers sleep until the ring has room.
    pub waiting_for_room: Aligned<AtomicU32>,
    /// Changes when room was made for sleeping producers.
    pub room: AtomicU32,

    /// A sticky error (an illegal address and the like): every later call returns it. Of these cuda.h says that the process
    /// must be terminated and relaunched, so nothing takes it away again.
    pub sticky: Aligned<AtomicI32>,
    /// The error of a call that did not wait, to be delivered once by a later call.
    pub deferred: AtomicI32,
    /// Set while the worker holds many commands of some thread: each thread then asks for room before it sends more.
    pub pressure: AtomicU32,
    /// Whether kernels have printed what the client has not fetched ([`crate::command::PRINTS`]).
    pub printed: AtomicU32,
    /// Whether a checkpoint waits for the moment that the application has chosen. Written by the worker.
    pub moment: AtomicU32,

    /// How many threads hold the process at a standstill, see [`crate::standstill`]. Written by the client.
    pub standstills: Aligned<AtomicU32>,
    /// Whether no standstill may begin. Written by the worker.
    pub no_standstill: AtomicU32,
}

/// A field on a cache line of its own, so that the two sides do not fight over it.
#[repr(C, align(64))]
#[cfg_attr(feature = "model", derive(Default))]
pub struct Aligned<T>(pub T);

impl<T> std::ops::Deref for Aligned<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}

/// A place in which one call waits for its reply.
#[repr(C, align(64))]
pub struct ReplySlot {
    /// See [`crate::reply`].
    pub state: AtomicU32,
    /// The call's `CUresult`.
    pub result: AtomicI32,
    /// Bytes of the payload that count.
    pub length: AtomicU32,
    /// Not used.
    pub reserved: u32,
    /// Out parameters.
    pub payload: Cell<[u8; REPLY_BYTES]>,
}

/// The payload's offset in a reply slot, in bytes: the type of the payload is private.
pub const REPLY_PAYLOAD: usize = std::mem::offset_of!(ReplySlot, payload);
