//! The place of an operation in a trace, as the W3C's Trace Context writes it: OpenTelemetry's tools show the spans of one trace
//! together, whichever program has made them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The environment variable by which a program tells those that it starts which span they belong to.
pub const TRACEPARENT: &str = "TRACEPARENT";

/// Set for a CRIU that dumps with `--lazy-pages` and waits in its server of pages before it ends: if that server fails, CRIU has not unlocked
/// the processes' connections, and the plugin does.
pub const LEAVES_PAGES: &str = "REKINDLE_LEAVES_PAGES";

/// The text names no place in a trace.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("no traceparent of the form 00-TRACE-SPAN-FLAGS")]
pub struct NoTraceParent;

/// A span in a trace. In text `00-TRACE-SPAN-FLAGS`, with 32, 16 and 2 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TraceParent {
    /// The trace; never 0.
    pub trace: u128,
    /// The span; never 0.
    pub span: u64,
    /// Whether somebody records the trace.
    pub sampled: bool,
}

impl TraceParent {
    /// The first span of a trace of its own. Both numbers are to be random.
    pub fn first(trace: u128, span: u64) -> Self {
        Self { trace: trace.max(1), span: span.max(1), sampled: true }
    }

    /// Another span of the same trace, whose number is to be random.
    pub fn another(self, span: u64) -> Self {
        Self { span: span.max(1), ..self }
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

impl FromStr for TraceParent {
    type Err = NoTraceParent;

    fn from_str(text: &str) -> Result<Self, NoTraceParent> {
        let mut parts = text.split('-');
        let mut next = |digits: usize| {
            let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            parts.next().filter(|it| it.len() == digits && it.bytes().all(is_digit)).ok_or(NoTraceParent)
        };
        let version = next(2)?;
        let number = |text| u128::from_str_radix(text, 16).map_err(|_| NoTraceParent);
        let (trace, span, flags) = (number(next(32)?)?, number(next(16)?)?, number(next(2)?)?);
        // Versions after the first may have more parts.
        if version == "ff" || version == "00" && parts.next().is_some() || trace == 0 || span == 0 {
            return Err(NoTraceParent);
        }
        Ok(Self { trace, span: u64::try_from(span).map_err(|_| NoTraceParent)?, sampled: flags & 1 == 1 })
    }
}

impl TryFrom<String> for TraceParent {
    type Error = NoTraceParent;

    fn try_from(text: String) -> Result<Self, NoTraceParent> {
        text.parse()
    }
}

impl From<TraceParent> for String {
    fn from(it: TraceParent) -> Self {
        it.to_string()
    }
}

/// The span of a command that has CRIU make or restore an image. The daemon, which alone exports spans, exports it with its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandSpan {
    /// The span itself.
    pub span: TraceParent,
    /// The number of the span that the command belongs to, if its caller has named one.
    pub parent: Option<u64>,
    /// When the command began, in nanoseconds since 1970.
    pub began_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_in_a_trace_is_read_as_it_is_written() {
        let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let parsed: TraceParent = text.parse().unwrap();
        assert_eq!((parsed.span, parsed.sampled, parsed.to_string()), (0x00f0_67aa_0ba9_02b7, true, text.to_owned()));
        assert!(!text.replace("-01", "-02").parse::<TraceParent>().unwrap().sampled);
        assert_eq!(serde_json::to_value(parsed).unwrap(), text);
        let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more";
        assert_eq!(later.parse(), Ok(parsed));
        let zeros = format!("00-{:032}-00f067aa0ba902b7-01", 0);
        let upper = text.to_uppercase();
        let more = format!("{text}-more");
        let later = format!("ff{}", &text[2..]);
        for odd in ["", "00", "00-1-2-01", &zeros, &upper, &more, &later, &text[..text.len() - 1]] {
            assert_eq!(odd.parse::<TraceParent>(), Err(NoTraceParent), "{odd}");
        }
        let first = TraceParent::first(0, 0);
        assert_eq!(first.to_string().parse(), Ok(first));
    }
}
