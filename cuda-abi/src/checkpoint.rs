//! The driver's checkpoint of another process: `cuCheckpointProcess...`, CUDA 12.8 (driver 570) and later.
//!
//! The structures have grown from version to version within their 64 bytes, so an entry point is taken by `cuGetProcAddress` with
//! the version whose structures the caller fills in, and everything else in them is zero.
//!
//! From 13.4 on (driver 615) the structures of [`CheckpointArgs`] and [`RestoreArgs`] can also ask for storage of the caller's own
//! ("custom storage"), which takes an entry point of [`CUSTOM_STORAGE`].

use crate::types::CUresult;

/// The first version of CUDA that has these functions.
pub const FIRST: i32 = 12_080;
/// The first version whose [`RestoreArgs`] has pairs of GPUs where this module has them.
pub const WITH_PAIRS: i32 = 13_000;
/// The first version whose structures ask for custom storage. Nothing here does so yet.
pub const CUSTOM_STORAGE: i32 = 13_040;

/// `CUcheckpointLockArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct LockArgs {
    /// How long the lock may wait for the process's work, in milliseconds; 0 is for ever.
    pub timeout_ms: u32,
    /// Zero.
    pub reserved0: u32,
    /// Zero.
    pub reserved: [u64; 7],
}

/// `CUcheckpointCheckpointArgs`, as of [`FIRST`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CheckpointArgs {
    /// Zero.
    pub reserved: [u64; 8],
}

/// `CUcheckpointGpuPair`: memory of the one GPU comes back on the other.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuPair {
    /// The GPU of the checkpoint.
    pub old: [u8; 16],
    /// The GPU of the restore.
    pub new: [u8; 16],
}

/// `CUcheckpointRestoreArgs`, as of [`WITH_PAIRS`]. Without pairs it is the same, all zeros, in every version.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RestoreArgs {
    /// A pair for each GPU that the process saw, or null: the GPUs are the same.
    pub pairs: *const GpuPair,
    /// How many there are.
    pub count: u32,
    /// Zero.
    pub reserved0: [u8; 44],
    /// Zero.
    pub reserved1: u64,
}

impl RestoreArgs {
    /// Restores onto these GPUs; onto the same ones if there are no pairs. The pairs are used as long as the structure is.
    #[must_use]
    pub fn new(pairs: &[GpuPair]) -> Self {
        Self {
            pairs: if pairs.is_empty() { std::ptr::null() } else { pairs.as_ptr() },
            count: u32::try_from(pairs.len()).unwrap_or(u32::MAX),
            reserved0: [0; 44],
            reserved1: 0,
        }
    }
}

/// `CUcheckpointUnlockArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct UnlockArgs {
    /// Zero.
    pub reserved: [u64; 8],
}

const _: () = {
    assert!(size_of::<LockArgs>() == 64);
    assert!(size_of::<CheckpointArgs>() == 64);
    assert!(size_of::<GpuPair>() == 32);
    assert!(size_of::<RestoreArgs>() == 64);
    assert!(size_of::<UnlockArgs>() == 64);
};

/// `CUprocessState`.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// The process runs.
    Running = 0,
    /// Calls of the process wait.
    Locked = 1,
    /// The content of its GPU memory is in its host memory, and it has no GPU.
    Checkpointed = 2,
    /// It has no GPU any more, and does not get one back.
    Failed = 3,
}

impl ProcessState {
    /// The state of this number; none for one of a later version.
    #[must_use]
    pub fn of(number: u32) -> Option<Self> {
        [Self::Running, Self::Locked, Self::Checkpointed, Self::Failed].into_iter().find(|it| *it as u32 == number)
    }

    /// Its word in messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Locked => "locked",
            Self::Checkpointed => "checkpointed",
            Self::Failed => "failed",
        }
    }
}

/// A function of this interface.
pub type Function<Args> = unsafe extern "C" fn(i32, *mut Args) -> CUresult;
