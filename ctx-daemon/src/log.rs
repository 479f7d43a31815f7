//! Where the log goes: to the journal with its fields if systemd has started this program, otherwise to stderr as text.

use std::fs;
use std::io::IsTerminal;
use std::os::unix::fs::MetadataExt;

use rekindle_ctx_worker as worker;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Names the journal's socket by the device and inode of stderr, if stderr leads to the journal (systemd.exec(5)).
const JOURNAL_STREAM: &str = "JOURNAL_STREAM";
/// The prefix of the journal's fields: `REKINDLE_PID=812`.
const FIELDS: &str = "REKINDLE";

/// Logs to stderr.
pub(crate) fn to_stderr() {
    tracing_subscriber::fmt()
        .with_env_filter(filter())
        .with_writer(worker::log_writer)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}

/// Logs to the journal if stderr leads there, otherwise to stderr. For the daemon only: a worker may not reach the journal's
/// socket, and writes text.
pub(crate) fn to_journal_or_stderr() {
    let journal = if leads_to_journal() { tracing_journald::layer().ok() } else { None };
    match journal {
        Some(journal) => {
            let journal = journal.with_field_prefix(Some(FIELDS.to_owned()));
            let journal = journal.with_syslog_identifier("rekindled".to_owned());
            tracing_subscriber::registry().with(filter()).with(journal).init();
        }
        None => to_stderr(),
    }
}

fn filter() -> EnvFilter {
    EnvFilter::try_from_env("REKINDLE_LOG").unwrap_or_else(|_| EnvFilter::new("info"))
}

fn leads_to_journal() -> bool {
    let stderr = fs::metadata("/proc/self/fd/2").map(|it| format!("{}:{}", it.dev(), it.ino()));
    stderr.is_ok_and(|it| std::env::var(JOURNAL_STREAM).as_deref() == Ok(it.as_str()))
}
