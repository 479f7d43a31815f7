//! End-to-end tests: real programs made by nvcc, the real CRIU and podman, and every part of Rekindle as it is installed,
//! on the software GPU.
//!
//! ```text
//!   Node ── rekindled, its workers         a separate host for each test: directory, socket, GPUs
//!    ├── run ────── App                    a program under the interposer
//!    ├── dump ───── Image                  `criu dump` of an App
//!    ├── restore ── App                    `criu restore` of an Image
//!    └── finish                            nothing is left behind
//! ```
//!
//! - [`stage`]: paths of the built tree and of the programs under test
//! - [`node`]: the daemon; [`app`]: programs, [`counter`]: the program that answers over UDP, [`service`]: the same
//!   program over TCP
//! - [`criu`]: dumps and restores; [`image`]: the image directories that they write, and damage to them
//! - [`podman`][]: containers; [`network`][]: a private network for one test; [`fake`][]: a daemon of another version
//! - [`gate`]: holds a dump or a restore at a known moment; [`footprint`]: the resources in use, to find leaks;
//!   [`faults`]: kills a process at that moment and checks the result; [`disk`]: a disk that becomes full
//! - [`twin`]: dumps without CRIU, each compared with the image that `stop` writes at the same quiesce
//! - [`elsewhere`]: another host, in a [`namespace`]; [`hosts`]: two hosts with a network between them; [`tls`]: one that listens
//! - [`native`]: programs without the interposer
//! - [`kept`]: images of earlier releases, kept in the tree
//! - [`process`], [`wait`]: inspect processes, wait for conditions. No helper waits for a fixed time to pass
//! - [`random`]: a seed to repeat a test with; [`pairs`]: selects the cases of a matrix; [`schedule`]: selects the
//!   tests that run at the same time
//!
//! Tests must run in the namespaces that `scripts/lib/enter` sets up; `tests/e2e/run` does all of this.

pub mod app;
pub mod contained;
pub mod counter;
pub mod criu;
pub mod disk;
pub mod elsewhere;
pub mod fake;
pub mod faults;
pub mod footprint;
pub mod gate;
pub mod hosts;
pub mod image;
pub mod kept;
pub mod kill;
pub mod namespace;
pub mod native;
pub mod network;
pub mod node;
pub mod pairs;
pub mod podman;
pub mod process;
pub mod random;
pub mod schedule;
pub mod service;
pub mod stage;
pub mod tls;
pub mod twin;
pub mod wait;

pub use app::App;
pub use criu::{Fate, Outcome};
pub use elsewhere::Elsewhere;
pub use footprint::Footprint;
pub use gate::{Gate, Moment};
pub use image::Image;
pub use node::Node;
pub use wait::until;

/// The result of tests and of everything here: an error fails the test and describes the failure.
pub type Result<T = ()> = anyhow::Result<T>;
