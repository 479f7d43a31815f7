//! Why something was not done: one line for people, and a kind for programs.

use std::io;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::frame::FrameError;

/// The kind of a failure. Programs decide by the kind, and never by the reason's text.
///
/// On the wire a kind is its name ([`FailureKind::as_str`]). A name that this version does not know reads as `Other`, and so
/// does a message without a kind, so that kinds can be added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "&'static str")]
pub enum FailureKind {
    /// The request cannot be met as things are, and asking again does not change that: the request is not allowed or not
    /// supported, or the object that it names is not there.
    Refused,
    /// The two sides are of different versions of Rekindle.
    Version,
    /// The image is damaged, incomplete, or none.
    BadImage,
    /// There is no room for the image.
    NoSpace,
    /// A command wrote to memory that it was not expected to write to, and a dump found that out too late to make it good.
    /// The same dump by the protocol `stop` does not depend on that.
    Mispredicted,
    /// Whoever had asked for it ended, or gave it up.
    GivenUp,
    /// Another dump has failed, and both were to be made at one moment.
    Together,
    /// Something took longer than it may.
    Timeout,
    /// A process, a worker or a daemon that was needed has ended.
    LostPeer,
    /// The machine, the driver or Rekindle failed.
    Internal,
    /// Not said, or a kind of a later version.
    #[default]
    Other,
}

impl FailureKind {
    /// All that this version knows.
    pub const ALL: [Self; 11] = [
        Self::Refused,
        Self::Version,
        Self::BadImage,
        Self::NoSpace,
        Self::Mispredicted,
        Self::GivenUp,
        Self::Together,
        Self::Timeout,
        Self::LostPeer,
        Self::Internal,
        Self::Other,
    ];

    /// Its name, on the wire and in the output of `rekindle ... --json`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Version => "version",
            Self::BadImage => "bad_image",
            Self::NoSpace => "no_space",
            Self::Mispredicted => "mispredicted",
            Self::GivenUp => "given_up",
            Self::Together => "together",
            Self::Timeout => "timeout",
            Self::LostPeer => "lost_peer",
            Self::Internal => "internal",
            Self::Other => "other",
        }
    }
}

impl From<String> for FailureKind {
    fn from(name: String) -> Self {
        Self::ALL.into_iter().find(|it| it.as_str() == name).unwrap_or_default()
    }
}

impl From<FailureKind> for &'static str {
    fn from(kind: FailureKind) -> Self {
        kind.as_str()
    }
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, Error, Serialize, Deserialize)]
#[error("{reason}")]
pub struct Failure {
    /// For programs.
    #[serde(default)]
    pub kind: FailureKind,
    /// The reason in one line for people, which says what to do.
    pub reason: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(kind: FailureKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into() }
    }

    /// A failure of kind [`FailureKind::Refused`].
    pub fn refused(reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Refused, reason)
    }

    /// A failure of kind [`FailureKind::Internal`].
    pub fn internal(reason: impl Into<String>) -> Self {
        Self::new(FailureKind::Internal, reason)
    }
}

/// An error that knows its kind, and so can be told to another process.
pub trait Failing: std::error::Error {
    /// Its kind.
    fn kind(&self) -> FailureKind;

    /// The failure that another process is told of.
    fn failure(&self) -> Failure {
        Failure::new(self.kind(), self.to_string())
    }
}

impl<E: Failing> From<E> for Failure {
    fn from(error: E) -> Self {
        error.failure()
    }
}

impl Failing for io::Error {
    fn kind(&self) -> FailureKind {
        match io::Error::kind(self) {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
                FailureKind::NoSpace
            }
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => FailureKind::Timeout,
            _ => FailureKind::Internal,
        }
    }
}

impl Failing for FrameError {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Closed => FailureKind::LostPeer,
            Self::Io(error) => Failing::kind(error),
            Self::Json(_) | Self::TooLarge(_) | Self::Descriptors => FailureKind::Internal,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::super::{DumpOutcome, Reply, WorkerReply};
    use super::*;

    #[test]
    fn every_kind_travels_by_its_own_name() {
        for kind in FailureKind::ALL {
            let sent = serde_json::to_value(kind).unwrap();
            assert_eq!(sent, json!(kind.as_str()));
            assert_eq!(serde_json::from_value::<FailureKind>(sent).unwrap(), kind);
            assert_eq!(FailureKind::ALL.iter().filter(|it| it.as_str() == kind.as_str()).count(), 1);
        }
    }

    #[test]
    fn a_failure_of_a_later_or_an_earlier_version_is_read_as_one_of_another_kind() {
        let other = Failure::new(FailureKind::Other, "no");
        for said in [
            json!({ "Failed": { "kind": "eaten_by_a_grue", "reason": "no", "more": { "later": 1 } } }),
            json!({ "Failed": { "reason": "no" } }),
        ] {
            assert_eq!(serde_json::from_value::<Reply>(said.clone()).unwrap(), Reply::Failed(other.clone()));
            assert_eq!(
                serde_json::from_value::<DumpOutcome>(said.clone()).unwrap(),
                DumpOutcome::Failed(other.clone())
            );
            let WorkerReply::Failed(failure) = serde_json::from_value(said).unwrap() else { panic!() };
            assert_eq!(failure, other);
        }
    }

    #[test]
    fn an_earlier_version_still_finds_the_reason() {
        let said = serde_json::to_value(Reply::Failed(Failure::refused("no"))).unwrap();
        assert_eq!(said, json!({ "Failed": { "kind": "refused", "reason": "no" } }));
    }

    #[test]
    fn a_full_disk_is_told_from_a_slow_one_and_a_broken_one() {
        let kind = |kind: io::ErrorKind| Failure::from(io::Error::from(kind)).kind;
        assert_eq!(kind(io::ErrorKind::StorageFull), FailureKind::NoSpace);
        assert_eq!(kind(io::ErrorKind::TimedOut), FailureKind::Timeout);
        assert_eq!(kind(io::ErrorKind::BrokenPipe), FailureKind::Internal);
        assert_eq!(Failure::from(FrameError::Closed).kind, FailureKind::LostPeer);
    }
}
