//! End-to-end tests: real programs made by nvcc, the real CRIU and podman, and every part of Rekindle as it is installed,
//! on the software GPU.
//!
//! ```text
//!   Node ── rekindled, its workers         one host of its own for each test: directory, socket, GPUs
//!    ├── run ────── App                    a program under the interposer
//!    ├── dump ───── Image                  `criu dump` of an App
//!    ├── restore ── App                    `criu restore` of an Image
//!    └── finish                            nothing is left behind
//! ```
//!
//! - [`stage`]: what is tested: the built tree, the programs
//! - [`node`]: the daemon; [`app`]: programs, [`counter`]: the one that answers over UDP, [`service`]: and over TCP
//! - [`criu`]: dumps and restores; [`image`]: what they leave, and damage to it
//! - [`podman`][]: containers; [`network`][]: one of a test's own; [`fake`][]: a daemon of another version
//! - [`gate`]: stopping a dump or a restore at a known moment; [`footprint`]: what is held, to find what leaks;
//!   [`faults`]: killing somebody then, and what must hold; [`disk`]: one that becomes full
//! - [`twin`]: dumps without CRIU, each compared with what `stop` writes at the same quiesce
//! - [`kept`]: images of earlier releases
//! - [`process`], [`wait`]: looking at processes, waiting for conditions. Nothing here waits for time to pass
//! - [`random`]: a seed to repeat a test with; [`pairs`]: which cases of a matrix are tried; [`schedule`]: which tests run beside each other
//!
//! Tests must run where `scripts/lib/enter` leads; `tests/e2e/run` does all of it.

pub mod app;
pub mod counter;
pub mod criu;
pub mod disk;
pub mod fake;
pub mod faults;
pub mod footprint;
pub mod gate;
pub mod image;
pub mod kept;
pub mod kill;
pub mod network;
pub mod node;
pub mod pairs;
pub mod podman;
pub mod process;
pub mod random;
pub mod schedule;
pub mod service;
pub mod stage;
pub mod twin;
pub mod wait;

pub use app::App;
pub use criu::{Fate, Outcome};
pub use footprint::Footprint;
pub use gate::{Gate, Moment};
pub use image::Image;
pub use node::Node;
pub use wait::until;

/// What tests and everything here return: an error fails the test and says what happened.
pub type Result<T = ()> = anyhow::Result<T>;
