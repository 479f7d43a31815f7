//! How long the application's calls take: `REKINDLE_LOG=times` prints a table to stderr when the process ends.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::exports::SYMBOLS;
use crate::process::log;

/// A function's calls, nanoseconds of all together, and of the longest.
#[derive(Default)]
struct Row {
    calls: AtomicU64,
    total: AtomicU64,
    longest: AtomicU64,
}

/// The rows by the functions' numbers, if `REKINDLE_LOG=times` is set.
static ROWS: OnceLock<Option<Vec<Row>>> = OnceLock::new();

fn rows() -> Option<&'static [Row]> {
    let made = ROWS.get_or_init(|| {
        let is_set = std::env::var_os("REKINDLE_LOG").is_some_and(|v| v == "times");
        is_set.then(|| {
            // SAFETY: a function that may run when the process ends.
            unsafe { libc::atexit(print_table) };
            (0..SYMBOLS.len()).map(|_| Row::default()).collect()
        })
    });
    made.as_deref()
}

/// A call begins.
#[inline]
pub(crate) fn begin() -> Option<Instant> {
    rows().map(|_| Instant::now())
}

/// A call that began then is over.
#[inline]
pub(crate) fn end(function: u16, begun: Option<Instant>) {
    if let Some((begun, rows)) = begun.zip(rows()) {
        let took = begun.elapsed().as_nanos() as u64;
        let row = &rows[function as usize];
        row.calls.fetch_add(1, Relaxed);
        row.total.fetch_add(took, Relaxed);
        row.longest.fetch_max(took, Relaxed);
    }
}

extern "C" fn print_table() {
    // Nothing unwinds into C.
    let _ = std::panic::catch_unwind(|| rows().map(write_table));
}

fn write_table(rows: &[Row]) {
    let mut used: Vec<_> = rows.iter().zip(SYMBOLS).filter(|(row, _)| row.calls.load(Relaxed) > 0).collect();
    used.sort_by_key(|(row, _)| std::cmp::Reverse(row.total.load(Relaxed)));
    log::error(&format!(
        "{:>9} {:>11} {:>11}  call, in process {}",
        "calls",
        "all, us",
        "longest, us",
        std::process::id()
    ));
    for (row, symbol) in used {
        let us = |cell: &AtomicU64| cell.load(Relaxed) as f64 / 1e3;
        let (calls, total, longest) = (row.calls.load(Relaxed), us(&row.total), us(&row.longest));
        log::error(&format!("{calls:>9} {total:>11.1} {longest:>11.1}  {}", symbol.0));
    }
}
