//! Faults that `SIMGPU_FAULT` injects: rules `POINT:WHEN:ACTION`, several of them separated by commas.
//!
//! - `POINT` is a driver function by its exported symbol (`cuMemCreate`), or a place inside: `alloc` (device memory
//!   of any kind is about to be taken), `kernel` (a kernel is about to run), `copy` (a copy is about to run).
//! - `WHEN` is an ordinal, from 1, over the whole process; `N+` means the Nth and all later ones.
//! - `ACTION` is an error code (`2`); at `kernel` and `copy` it is a sticky error of the context. Or `delay=MS`,
//!   `abort`, `exit=CODE`, `kill` (SIGKILL to oneself).
//!
//! `SIMGPU_FAULT=alloc:3:2,cuMemCreate:2:abort` lets the third allocation fail and the process abort in its second
//! call of `cuMemCreate`.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rekindle_cuda_abi::types::CUresult;

use crate::status::Result;

#[derive(Debug)]
struct Rule {
    point: String,
    ordinal: u64,
    and_later: bool,
    action: Action,
    seen: AtomicU64,
}

#[derive(Debug, PartialEq, Eq)]
enum Action {
    Fail(CUresult),
    Delay(Duration),
    Abort,
    Exit(i32),
    Kill,
}

/// Passes a point where a fault may be injected: does what the rules say, and fails if one says so.
pub(crate) fn point(name: &str) -> Result<()> {
    static RULES: OnceLock<Vec<Rule>> = OnceLock::new();
    let rules = RULES.get_or_init(|| {
        let text = std::env::var("SIMGPU_FAULT").unwrap_or_default();
        parse(&text).unwrap_or_else(|bad| {
            // With a rule that is not understood, a test would pass for the wrong reason.
            eprintln!("simgpu: SIMGPU_FAULT: not understood: {bad}");
            std::process::abort();
        })
    });
    rules.iter().filter(|rule| rule.point == name).try_for_each(Rule::pass)
}

impl Rule {
    fn pass(&self) -> Result<()> {
        let now = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
        if now != self.ordinal && !(self.and_later && now > self.ordinal) {
            return Ok(());
        }
        if now == self.ordinal {
            eprintln!("simgpu: injected at {} number {now}: {:?}", self.point, self.action);
        }
        match self.action {
            Action::Fail(code) => return Err(code),
            Action::Delay(time) => std::thread::sleep(time),
            Action::Abort => std::process::abort(),
            // SAFETY: ends the process without running anything.
            Action::Exit(code) => unsafe { libc::_exit(code) },
            // SAFETY: sends a signal to this process.
            Action::Kill => unsafe {
                libc::kill(libc::getpid(), libc::SIGKILL);
            },
        }
        Ok(())
    }
}

fn parse(text: &str) -> std::result::Result<Vec<Rule>, String> {
    text.split(',').map(str::trim).filter(|rule| !rule.is_empty()).map(parse_rule).collect()
}

fn parse_rule(text: &str) -> std::result::Result<Rule, String> {
    let bad = || text.to_string();
    let mut parts = text.split(':');
    let (Some(point), Some(when), Some(action), None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
        return Err(bad());
    };
    let ordinal = when.trim_end_matches('+').parse().map_err(|_| bad())?;
    let action = match action.split_once('=') {
        Some(("delay", ms)) => Action::Delay(Duration::from_millis(ms.parse().map_err(|_| bad())?)),
        Some(("exit", code)) => Action::Exit(code.parse().map_err(|_| bad())?),
        None if action == "abort" => Action::Abort,
        None if action == "kill" => Action::Kill,
        None => Action::Fail(action.parse().map_err(|_| bad())?),
        Some(_) => return Err(bad()),
    };
    Ok(Rule { point: point.into(), ordinal, and_later: when.ends_with('+'), action, seen: AtomicU64::new(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_fire_at_their_ordinal() {
        let rules = parse("alloc:2:2, cuMemCreate:3+:801").unwrap();
        let pass = |r: &Rule| (0..4).map(|_| r.pass().err()).collect::<Vec<_>>();
        assert_eq!(pass(&rules[0]), [None, Some(2), None, None]);
        assert_eq!(pass(&rules[1]), [None, None, Some(801), Some(801)]);
    }

    #[test]
    fn actions_are_read() {
        let action = |text: &str| parse(text).map(|mut rules| rules.remove(0).action);
        assert_eq!(action("copy:1:delay=20"), Ok(Action::Delay(Duration::from_millis(20))));
        assert_eq!(action("copy:1:exit=3"), Ok(Action::Exit(3)));
        assert_eq!(action("copy:1:abort"), Ok(Action::Abort));
        for bad in ["copy", "copy:1", "copy:x:2", "copy:1:explode", "copy:1:2:3"] {
            assert_eq!(action(bad), Err(bad.to_string()));
        }
    }
}
