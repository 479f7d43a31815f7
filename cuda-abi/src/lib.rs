//! The interface of `libcuda.so.1` to programs: its symbols and their signatures, the versions under which they are found,
//! its private tables, and the images of code that it accepts.
//!
//! Three parts use this crate: the interposer (the `libcuda.so.1` of applications), the worker (which calls the real
//! one) and the software GPU (a `libcuda.so.1` for tests).
//!
//! ```text
//!   driver.table ──parse──> table ──generate──> exported symbols, look-up        (interposer, software GPU)
//!                                          └──> encoders, dispatch, entry points  (interposer, worker)
//! ```
//!
//! The interposer and the software GPU both read the arguments of calls, so the meaning of arguments is here once:
//! [`arguments`] and [`raw`] for the pointers themselves, [`launch`], [`copies`], [`batch`], [`jit`] and [`shapes`] for the
//! data that pointers lead to.
//!
//! The crate also has the table of the functions of `libnvidia-ml.so.1`: [`nvml`].

pub mod arguments;
pub mod atomics;
pub mod batch;
pub mod build_script;
pub mod checkpoint;
#[cfg(feature = "code")]
pub mod code;
pub mod copies;
pub mod coredump;
pub mod generate;
pub mod graphs;
pub mod green;
pub mod jit;
pub mod launch;
pub mod logs;
pub mod lookup;
pub mod managed;
pub mod nvml;
#[cfg(feature = "private")]
pub mod private;
pub mod raw;
pub mod refusals;
pub mod shapes;
pub mod table;
pub mod types;
