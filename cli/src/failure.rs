//! The error that a verb ends with.

use std::fmt;
use std::process::ExitCode;

use rekindle_images::{ErrorKind, ImageError};
use rekindle_stores::StoreError;
use rekindle_wire::control::FailureKind;

/// An error and its exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u8,
    error: anyhow::Error,
}

impl Failure {
    /// An error for a request that cannot be carried out here.
    pub(crate) fn refused(error: impl Into<anyhow::Error>) -> Self {
        Self { code: 3, error: error.into() }
    }

    /// An error for options that do not fit together.
    pub(crate) fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self { code: 2, error: error.into() }
    }

    /// What several failures come to: their exit code, if they have one in common.
    pub(crate) fn of_several(failures: &[Self], error: impl Into<anyhow::Error>) -> Self {
        let mut codes = failures.iter().map(|it| it.code);
        let first = codes.next().unwrap_or(1);
        Self { code: if codes.all(|it| it == first) { first } else { 1 }, error: error.into() }
    }

    /// An error for a bad image.
    pub(crate) fn bad_image(error: impl Into<anyhow::Error>) -> Self {
        Self { code: 4, error: error.into() }
    }

    /// An error of the kind that the daemon has reported.
    pub(crate) fn of_kind(kind: FailureKind, error: impl Into<anyhow::Error>) -> Self {
        let code = match kind {
            FailureKind::Refused | FailureKind::Version => 3,
            FailureKind::BadImage => 4,
            _ => 1,
        };
        Self { code, error: error.into() }
    }

    /// The same with what is to be known first.
    pub(crate) fn but(self, what: String) -> Self {
        Self { code: self.code, error: self.error.context(what) }
    }

    /// The kind that fits the exit code.
    pub(crate) fn kind(&self) -> FailureKind {
        match self.code {
            3 => FailureKind::Refused,
            4 => FailureKind::BadImage,
            _ => FailureKind::Other,
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The error with its causes, on one line. Many errors contain their cause already.
        let mut said = String::new();
        for cause in self.error.chain().map(ToString::to_string) {
            if !said.ends_with(&cause) {
                let separator = if said.is_empty() { "" } else { ": " };
                said.extend([separator, &cause]);
            }
        }
        f.write_str(&said)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self { code: 1, error }
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        if error.kind().is_bad_image() || error.kind() == ErrorKind::NotAnImage {
            Self::bad_image(error)
        } else if error.kind() == ErrorKind::Overwrites {
            Self::refused(error)
        } else {
            anyhow::Error::from(error).into()
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Image(error) => error.into(),
            error if error.is_bad_image() => Self::bad_image(error),
            StoreError::Usage { .. } => Self::usage(error),
            StoreError::Local { .. } | StoreError::Remote { .. } => anyhow::Error::from(error).into(),
            error => Self::refused(error),
        }
    }
}
