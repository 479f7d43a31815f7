//! A record of the object log.

use rekindle_images::CodeHash;

/// A record of the log.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) sequence: u64,
    pub(crate) call: u16,
    /// The object that the command created or changed.
    pub(crate) owner: u64,
    /// The context that was current at the command.
    pub(crate) context: u64,
    pub(crate) args: Vec<u8>,
    pub(crate) code: Option<CodeHash>,
}
