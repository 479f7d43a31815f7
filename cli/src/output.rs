//! Writing to standard output, and warnings to standard error.

use std::fmt;
use std::io::{self, Write};

use anyhow::{Context, Result};
use serde::Serialize;

/// Prints text. A reader that closes the pipe early is not an error.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Prints a warning. Nobody may read it: who started a process that holds others may be gone, and that must not end it, as `eprintln!` would.
pub(crate) fn warn(what: impl fmt::Display) {
    // In one piece, so that the warnings of several threads and processes do not mix.
    let _ = io::stderr().write_all(format!("rekindle: {what}\n").as_bytes());
}

/// Prints JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).context("cannot write JSON")?;
    print(&(text + "\n"))
}

/// A table, its columns aligned: names to the left, the columns of `numbers` to the right.
pub(crate) fn table(rows: &[Vec<String>], numbers: &[usize]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            let width = widths[column];
            if numbers.contains(&column) { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A size in a readable unit.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // A value that would be rounded up to 1024 belongs to the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A rate in a readable unit.
pub(crate) fn rate(bytes: u64, time: std::time::Duration) -> String {
    let per_second = bytes as f64 / time.as_secs_f64().max(1e-6);
    match per_second {
        _ if per_second >= 1e9 => format!("{:.1} GB/s", per_second / 1e9),
        _ => format!("{:.0} MB/s", per_second / 1e6),
    }
}

/// A time in a readable unit.
pub(crate) fn time(ns: u64) -> String {
    match ns {
        0..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", ns as f64 / 1e9),
    }
}

/// A name from outside, without characters that would move a terminal's cursor.
pub(crate) fn plain(text: &str) -> String {
    let visible = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    text.chars().map(visible).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_under_each_other() {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        let rows = [row(["PID", "STATE", "NAME"]), row(["12345", "on", "a b"])];
        let text = table(&rows, &[0]);
        assert_eq!(text, "  PID  STATE  NAME\n12345  on     a b\n");
    }

    #[test]
    fn sizes_keep_to_four_digits() {
        let shown = [0, 1023, 1024, 1536, (1 << 20) - 1, 1 << 30, u64::MAX].map(size);
        let expected = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "16384.0 PiB"];
        assert_eq!(shown, expected);
    }
}
