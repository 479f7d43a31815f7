//! The shared memory of a client and its worker.
//!
//! One memfd, made by the client, sealed against any change of size, mapped by both. CRIU saves it with the process,
//! so commands not yet executed and replies not yet taken survive with it.
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
//! A second memfd, the staging, holds [`CHUNKS`] chunks of [`CHUNK_SIZE`] bytes: what pageable copies go through. The
//! worker registers it with the driver once.

use crate::calls;
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
/// Staging chunks. They are registered, so all of them are in CRIU's image, and it writes shared memory at about 1 GB/s while
/// the process stands still: 16 MiB were a third to two thirds of its freeze.
pub const CHUNKS: usize = 12;
/// Bytes in a staging chunk.
pub const CHUNK_SIZE: usize = 512 << 10;

const SEQS_AT: usize = 4096;
const UNITS_AT: usize = SEQS_AT + UNITS * 8;
const REPLIES_AT: usize = UNITS_AT + UNITS * UNIT;
const CHUNKS_AT: usize = REPLIES_AT + REPLIES * size_of::<ReplySlot>();

const CALLS_AT: usize = CHUNKS_AT + 4096;

/// Bytes of the shared memory.
pub const SHARED_SIZE: usize = CALLS_AT + calls::BYTES;
/// Bytes of the staging.
pub const STAGING_SIZE: usize = CHUNKS * CHUNK_SIZE;

/// The name that the shared memory's memfd has in `/proc/PID/maps`.
pub const SHARED_NAME: &std::ffi::CStr = c"rekindle-ring";
/// The staging memfd's name.
pub const STAGING_NAME: &std::ffi::CStr = c"rekindle-staging";
/// What the names of memfds of pinned memory begin with; a serial number follows.
pub const PINNED_NAME: &str = "rekindle-pinned-";

/// The seals of the three: their size cannot change under the other side, and neither can that.
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
    /// Whether somebody waits for the application to be where it wants to be checkpointed. Written by the worker.
    pub moment: AtomicU32,
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

/// Where one call waits.
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

/// Where a reply slot's payload lies in it, in bytes: what it is made of is private.
pub const REPLY_PAYLOAD: usize = std::mem::offset_of!(ReplySlot, payload);

#[cfg(feature = "model")]
pub use crate::model::Shared;

/// A mapping of the shared memory. `Copy`: it is an address whose owner keeps it mapped.
#[cfg(not(feature = "model"))]
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    base: *mut u8,
}

// SAFETY: everything behind the address is atomic, or handed over by atomics (units by `seq`, payloads by `state`).
#[cfg(not(feature = "model"))]
unsafe impl Send for Shared {}
// SAFETY: as above.
#[cfg(not(feature = "model"))]
unsafe impl Sync for Shared {}

#[cfg(not(feature = "model"))]
impl Shared {
    /// # Safety
    /// `base` is a mapping of at least [`SHARED_SIZE`] bytes, page-aligned, shared, readable and writable, that stays
    /// mapped as long as this or a copy of it is used, and whose file cannot shrink.
    pub unsafe fn new(base: *mut u8) -> Self {
        Self { base }
    }

    /// The header.
    pub fn header(&self) -> &Header {
        const { assert!(size_of::<Header>() <= SEQS_AT) };
        // SAFETY: `new` promises the mapping; every field is an atomic, valid for any bit pattern.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// The ticket that the content of a unit belongs to, plus one.
    pub fn seq(&self, unit: usize) -> &AtomicU64 {
        assert!(unit < UNITS);
        // SAFETY: inside the mapping by the assertion; aligned; atomic.
        unsafe { &*self.base.add(SEQS_AT).cast::<AtomicU64>().add(unit) }
    }

    /// The ring's first byte.
    pub fn units(&self) -> *mut u8 {
        // SAFETY: inside the mapping.
        unsafe { self.base.add(UNITS_AT) }
    }

    /// A reply slot.
    pub fn reply(&self, slot: usize) -> &ReplySlot {
        assert!(slot < REPLIES);
        // SAFETY: inside the mapping by the assertion; aligned; atomics, and a payload behind an UnsafeCell.
        unsafe { &*self.base.add(REPLIES_AT).cast::<ReplySlot>().add(slot) }
    }

    /// The state of a staging chunk: 0 at rest, see [`crate::reply`] for the others.
    pub fn chunk(&self, chunk: usize) -> &AtomicU32 {
        assert!(chunk < CHUNKS);
        // SAFETY: inside the mapping by the assertion; aligned; atomic.
        unsafe { &*self.base.add(CHUNKS_AT).cast::<AtomicU32>().add(chunk) }
    }

    /// One stripe of the counts of calls, see [`crate::calls`].
    pub fn calls(&self, stripe: usize) -> &[AtomicU64; calls::FUNCTIONS] {
        assert!(stripe <= calls::STRIPES);
        // SAFETY: inside the mapping by the assertion; aligned; atomics.
        unsafe { &*self.base.add(CALLS_AT).cast::<[AtomicU64; calls::FUNCTIONS]>().add(stripe) }
    }

    /// Where the mapping begins.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Copies bytes into the units, from byte `at` of the ring on and over its end.
    ///
    /// # Safety
    /// The units that this covers belong to the caller; there are at most [`MAX_COMMAND`] bytes.
    #[inline]
    pub(crate) unsafe fn store(&self, at: usize, bytes: &[u8]) {
        let start = at % (UNITS * UNIT);
        let first = bytes.len().min(UNITS * UNIT - start);
        // SAFETY: start + first is at most the ring's size, and the rest starts at 0; the caller owns these bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.units().add(start), first);
            std::ptr::copy_nonoverlapping(bytes.as_ptr().add(first), self.units(), bytes.len() - first);
        }
    }

    /// Copies bytes out of the units, from byte `at` of the ring on and over its end.
    ///
    /// # Safety
    /// `into` has room for `length` bytes, at most [`MAX_COMMAND`].
    #[inline]
    pub(crate) unsafe fn load(&self, at: usize, into: *mut u8, length: usize) {
        let start = at % (UNITS * UNIT);
        let first = length.min(UNITS * UNIT - start);
        // SAFETY: both parts lie in the ring, which is at least as large as any command.
        unsafe {
            std::ptr::copy_nonoverlapping(self.units().add(start), into, first);
            std::ptr::copy_nonoverlapping(self.units(), into.add(first), length - first);
        }
    }
}

impl Shared {
    /// Marks freshly made shared memory as such.
    pub fn initialise(&self) {
        use std::sync::atomic::Ordering::Release;
        self.header().version.store(crate::version::client_version(), Release);
        self.header().magic.store(MAGIC, Release);
    }

    /// [`crate::CLIENT_VERSION`] of whoever made this; `None` if it is no shared memory of a client.
    pub fn version(&self) -> Option<u32> {
        use std::sync::atomic::Ordering::Acquire;
        (self.header().magic.load(Acquire) == MAGIC).then(|| self.header().version.load(Acquire))
    }
}

#[cfg(test)]
#[cfg(not(feature = "model"))]
pub(crate) fn heap() -> Shared {
    let layout = std::alloc::Layout::from_size_align(SHARED_SIZE, 4096).unwrap();
    // SAFETY: the layout has a size; the memory is leaked, so it stays.
    unsafe { Shared::new(std::alloc::alloc_zeroed(layout)) }
}
