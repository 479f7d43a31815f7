//! The builds of the libraries that applications map: the interposer and NVML, side by side on a machine.
//!
//! A process keeps the file that it has mapped. If an upgrade replaced that file, CRIU could not dump the process any more (the
//! file has no name), and could not restore an image that was made before (the file has another size and build id). So
//! each build has a directory of its own, which never changes, and applications are given paths in there:
//!
//! ```text
//!   lib/rekindle/
//!       libcuda.so.1 ──────► builds/ID/libcuda.so.1          what new applications are given
//!       libnvidia-ml.so.1 ─► builds/ID/libnvidia-ml.so.1
//!       builds/
//!           ID/libcuda.so.1, libcuda.so, libnvidia-ml.so.1   the build that is in use for new applications
//!           ID/...                                           an earlier one, which processes have mapped
//! ```
//!
//! `ID` is a hash of the libraries ([`BuildId`]), so a directory cannot have other content than its name says: whoever has the files of
//! a build may add it anywhere, and an image carries them.
//!
//! | from | to | by |
//! |---|---|---|
//! | absent | present | [`Locked::add`]: an upgrade, or a restore whose image has it |
//! | present | in use for new applications | [`Locked::choose`]: an upgrade |
//! | present | absent | [`Locked::remove`]: nothing needs it any more, as [`needs`] finds out |

#![deny(unsafe_code)]

mod error;
mod id;
pub mod needs;
mod store;

pub use error::BuildError;
pub use id::BuildId;
pub use store::{Build, Library, Locked, Store};

/// The name by which programs load the driver.
pub const INTERPOSER: &str = "libcuda.so.1";
/// The name by which programs load NVML.
pub const NVML: &str = "libnvidia-ml.so.1";
/// The libraries of a build, in the order in which its hash takes them. Only the first is in every build.
pub const LIBRARIES: [&str; 2] = [INTERPOSER, NVML];
