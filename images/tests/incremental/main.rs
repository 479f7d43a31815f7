//! Images that build on others.

#![allow(clippy::unwrap_used, reason = "a test")]

mod bases;
mod chain;
#[path = "../common/mod.rs"]
mod common;
mod flattening;
mod parents;
mod sharing;
