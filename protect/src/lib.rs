//! The policy of protected jobs: how often `rekindle protect` checkpoints a job, which images it keeps, and what it does
//! when the job ends.
//!
//! Nothing here starts a program or waits. `cli/src/protect` does, and asks this crate:
//!
//! | file | question |
//! |---|---|
//! | [`interval`] | how long until the next checkpoint, so that the job loses least |
//! | [`failures`] | how often does this job fail, as far as we know |
//! | [`shelf`] | which images are good, which must stay, which may go |
//! | [`again`] | which image is to be verified again, and when |
//! | [`copies`] | which images do stores have, and which may go there |
//! | [`levels`] | which store is to get the newest image, and from which one comes back what is damaged |
//! | [`phase`] | the job has ended, or a restore has failed: what now |
//! | [`container`] | can a container be protected, and was it ended by a user or by a failure |
//! | [`record`] | what the next supervisor has to know, in a file that is replaced atomically |
//!
//! A file imports only from lines below its own:
//!
//! ```text
//!   record
//!   levels, container, again
//!   phase, shelf, copies
//!   failures, interval, process
//! ```

#![forbid(unsafe_code)]

pub mod again;
pub mod container;
pub mod copies;
pub mod failures;
pub mod interval;
pub mod levels;
pub mod phase;
pub mod process;
pub mod record;
pub mod shelf;

pub use container::Container;
pub use copies::Copies;
pub use failures::Failures;
pub use interval::{Choice, Cost, Formula, choose};
pub use levels::Level;
pub use phase::{Ending, Event, Phase, Rules};
pub use process::Process;
pub use record::{Record, RecordError};
pub use shelf::{Image, Shelf, Standing};
