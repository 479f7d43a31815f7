//! Errors while a worker drops privileges.

/// A step that the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("the sandbox cannot be entered: {step}: {source}; see [sandbox] in the configuration")]
pub(crate) struct SandboxError {
    pub(super) step: &'static str,
    pub(super) source: std::io::Error,
}

/// The result of a system call.
pub(super) fn check(step: &'static str, result: libc::c_int) -> Result<(), SandboxError> {
    if result < 0 { Err(SandboxError { step, source: std::io::Error::last_os_error() }) } else { Ok(()) }
}
