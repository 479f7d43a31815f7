//! The span of a command in a trace of OpenTelemetry's. The command only says which it is: the daemon exports it with the spans
//! of the dump or the restore, if its configuration says so.

use std::time::{SystemTime, UNIX_EPOCH};

use rekindle_wire::control::{CommandSpan, TRACEPARENT, TraceParent};
use rustix::rand::{GetRandomFlags, getrandom};

/// A span that begins now: of the trace that the environment names, or of a trace of its own. None without random numbers.
pub(crate) fn begin() -> Option<CommandSpan> {
    let caller = std::env::var(TRACEPARENT).ok().and_then(|it| it.parse::<TraceParent>().ok());
    let [trace, span] = random()?;
    let span = match caller {
        Some(caller) => caller.another(span as u64),
        None => TraceParent::first(trace, span as u64),
    };
    Some(CommandSpan { span, parent: caller.map(|it| it.span), began_ns: now() })
}

/// Another span beside this one, which begins now.
pub(crate) fn again(before: CommandSpan) -> Option<CommandSpan> {
    let [_, span] = random()?;
    Some(CommandSpan { span: before.span.another(span as u64), began_ns: now(), ..before })
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn random() -> Option<[u128; 2]> {
    let mut bytes = [[0; 16]; 2];
    for one in &mut bytes {
        // So few bytes come whole, or not at all.
        getrandom(&mut one[..], GetRandomFlags::empty()).ok().filter(|got| *got == one.len())?;
    }
    Some(bytes.map(u128::from_ne_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_attempt_is_another_span_of_the_same_trace() {
        let first = begin().unwrap();
        let second = again(first).unwrap();
        assert_eq!((first.span.trace, first.parent), (second.span.trace, second.parent));
        assert_ne!(first.span.span, second.span.span);
        assert!(second.began_ns >= first.began_ns);
    }
}
