//! A finding, and advice.

use serde::Serialize;

/// The verdict on one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Ok,
    /// The part works, with a restriction.
    Note,
    /// The part does not work.
    Bad,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) subject: &'static str,
    pub(super) verdict: Verdict,
    pub(super) found: String,
    /// Advice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) advice: Option<String>,
}

impl Finding {
    pub(super) fn ok(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Ok, found: found.into(), advice: None }
    }

    pub(super) fn note(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Note, found: found.into(), advice: Some(advice.into()) }
    }

    pub(super) fn bad(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, verdict: Verdict::Bad, found: found.into(), advice: Some(advice.into()) }
    }
}
