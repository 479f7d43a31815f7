//! Running kernels: what a launch checks, and what a stream's thread then does.

mod children;
pub(crate) mod launch;
pub(crate) mod malloc;
pub(crate) mod print;
mod shape;
