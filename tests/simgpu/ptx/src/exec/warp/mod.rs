//! A warp: its registers, its fragments, and the loop that executes instructions.
//!
//! ```text
//!   run      picks the fragment that runs next, and executes its instructions
//!   control  calls, barriers, collectives: the instructions that are more than a step
//!   state    the warp itself; fragments, stacks, the inputs of collectives, the barriers of its block
//! ```

mod barrier;
mod collective;
mod control;
mod fragment;
mod run;
mod stacks;
mod state;

pub(crate) use self::barrier::Barriers;
pub(crate) use self::run::Stop;
pub(crate) use self::state::Warp;
