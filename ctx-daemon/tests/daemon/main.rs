//! Tests of the daemon as a process, with fake workers and clients: they use no GPU.
//!
//! Worker and client processes are this program again, started with one of the two "tests" `fake_worker` and
//! `fake_client` and an environment variable that makes them do something.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod asking;
mod attach;
mod client;
mod dump;
mod hostile;
mod life;
mod metrics;
mod nvml;
mod oversubscribe;
mod pool;
mod preload;
mod protocols;
mod restore;
mod stopped;
mod support;
mod suspend;
mod warm;
mod worker;

/// Not a test: the program that the daemon starts as a worker.
#[test]
fn fake_worker() {
    if let Ok(fd) = std::env::var("FAKE_WORKER_CHANNEL") {
        worker::main(fd.parse().unwrap());
    }
}

/// Not a test: an application.
#[test]
fn fake_client() {
    if std::env::var_os("FAKE_CLIENT").is_some() {
        client::main();
    }
}
