//! Where a worker is in its life; `serve/executor.rs` draws it.

/// Where the worker is in its life (see [`crate::serve::executor`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Spare,
    /// Loaded for a restore; the process is not there yet, or the ring not open.
    Restoring,
    Open,
    /// No command is taken, but the device is not at rest.
    Closing,
    Quiesced,
}
