//! Errors in an image of code.

use thiserror::Error;

/// An image that is not what the client said it would send.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a code image arrived broken: {0}")]
pub(crate) struct BrokenImage(pub(super) &'static str);
