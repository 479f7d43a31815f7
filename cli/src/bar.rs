//! A progress bar: one line on a terminal.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::output;

/// The width of the bar, in characters.
const WIDTH: usize = 30;

/// A progress bar on standard error.
pub(crate) struct Bar {
    shown: bool,
    /// The time of the first bytes, and their number.
    first: Option<(Instant, u64)>,
}

impl Bar {
    /// A bar that shows nothing where standard error is not a terminal.
    pub(crate) fn new() -> Self {
        Self { shown: std::io::stderr().is_terminal(), first: None }
    }

    /// A bar that shows nothing.
    pub(crate) fn hidden() -> Self {
        Self { shown: false, first: None }
    }

    pub(crate) fn is_shown(&self) -> bool {
        self.shown
    }

    /// Shows the phase, and how many of all bytes are done.
    pub(crate) fn show(&mut self, phase: &str, done: u64, bytes: u64) {
        if !self.shown {
            return;
        }
        if done > 0 {
            self.first.get_or_insert((Instant::now(), done));
        }
        let since = self.first.map(|(at, first)| (at.elapsed(), done.saturating_sub(first)));
        // Replaces the line that was written before.
        let _ = write!(std::io::stderr(), "\r\x1b[K{}", line(phase, done, bytes, since));
    }

    /// Removes the bar.
    pub(crate) fn clear(&self) {
        if self.shown {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// The phase, its progress and its rate.
fn line(phase: &str, done: u64, bytes: u64, since: Option<(Duration, u64)>) -> String {
    let filled = match bytes {
        0 => 0,
        bytes => ((done as f64 / bytes as f64) * WIDTH as f64) as usize,
    };
    let bar: String = (0..WIDTH).map(|at| if at < filled { '#' } else { '.' }).collect();
    let rate = since.filter(|(time, _)| time.as_millis() >= 200).map(|(time, more)| output::rate(more, time));
    let rate = rate.map(|it| format!("  {it}")).unwrap_or_default();
    format!("{:<8} [{bar}] {} of {}{rate}", output::plain(phase), output::size(done), output::size(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_says_how_far_and_how_fast() {
        let second = Duration::from_secs(1);
        let half = line("copy", 1 << 30, 2 << 30, Some((second, 500_000_000)));
        assert_eq!(half, "copy     [###############...............] 1.0 GiB of 2.0 GiB  500 MB/s");
        assert_eq!(line("copy", 0, 0, None), "copy     [..............................] 0 B of 0 B");
    }
}
