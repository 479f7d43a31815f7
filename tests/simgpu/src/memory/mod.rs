//! Memory: the addresses, the devices that may access them, and the pages behind them.
//!
//! ```text
//!   api ──► heap      cuMemAlloc, module globals: slabs and large blocks
//!       ──► pinned    page-locked and registered host memory
//!       ──► ipc       memory of other processes
//!       ──► ipc_pool  memory of their pools
//!       ──► vmm       reservations, physical pieces, mappings
//!                │
//!                ▼ regions
//!              space  every accessible range, and snapshots of them for kernels and copies
//! ```
//!
//! Device memory is ordinary memory of this process, mapped at its device address. So every access that a program
//! makes is checked against [`space`] before it is made.

pub(crate) mod account;
pub(crate) mod heap;
pub(crate) mod ipc;
pub(crate) mod ipc_pool;
mod machine;
pub(crate) mod managed;
pub(crate) mod pages;
pub(crate) mod pinned;
pub(crate) mod space;
pub(crate) mod vmm;
