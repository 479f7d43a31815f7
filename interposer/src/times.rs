//! How long the application's calls take, for who asks: with `REKINDLE_LOG=times` a table on stderr when the process ends.

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

/// By the numbers of functions; there only where times are asked for.
static ROWS: OnceLock<Option<Vec<Row>>> = OnceLock::new();

fn rows() -> Option<&'static [Row]> {
    let made = ROWS.get_or_init(|| {
        let wanted = std::env::var_os("REKINDLE_LOG").is_some_and(|v| v == "times");
        wanted.then(|| {
            // SAFETY: a function that may run when the process ends.
            unsafe { libc::atexit(tell) };
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

extern "C" fn tell() {
    // Nothing unwinds into C.
    let _ = std::panic::catch_unwind(|| rows().map(write_table));
}

fn write_table(rows: &[Row]) {
    let mut said: Vec<_> = rows.iter().zip(SYMBOLS).filter(|(row, _)| row.calls.load(Relaxed) > 0).collect();
    said.sort_by_key(|(row, _)| std::cmp::Reverse(row.total.load(Relaxed)));
    log::error(&format!(
        "{:>9} {:>11} {:>11}  call, in process {}",
        "calls",
        "all, us",
        "longest, us",
        std::process::id()
    ));
    for (row, symbol) in said {
        let us = |cell: &AtomicU64| cell.load(Relaxed) as f64 / 1e3;
        let (calls, total, longest) = (row.calls.load(Relaxed), us(&row.total), us(&row.longest));
        log::error(&format!("{calls:>9} {total:>11.1} {longest:>11.1}  {}", symbol.0));
    }
}
