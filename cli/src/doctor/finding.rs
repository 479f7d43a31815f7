//! What was found, and what to do about it.

use serde::Serialize;

/// How it is with something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Ok,
    /// It works, but there is something to know.
    Note,
    /// It does not.
    Bad,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) subject: &'static str,
    pub(super) verdict: Verdict,
    pub(super) found: String,
    /// What to do.
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
