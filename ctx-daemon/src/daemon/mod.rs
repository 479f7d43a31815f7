//! The daemon: its connections and their requests, and the workers that serve clients.
//!
//! ```text
//!   listener ── connection ──┬─ attach ─────── pool ── spawn ── worker      a process gets a worker
//!   (socket)    (one thread  ├─ dump ───────── registry                     CRIU dumps a process tree
//!                each)       ├─ orders ─────── checkpoints                  a command orders a dump
//!                            ├─ migrate ────── migrations                   a tree goes on on another host
//!                            ├─ restore ────── pool                         CRIU restores one, and a command watches it
//!                            ├─ takeover ───── registry                     a worker joins a new daemon
//!                            ├─ suspend ────── registry, moves              GPU memory goes back, and comes again
//!                            ├─ oversubscribe ─ suspend                     idle programs go for one that needs memory
//!                            ├─ ipc ────────── imports                      memory that processes share
//!                            ├─ grant, revoke ── grants                    GPUs for containers
//!                            ├─ attach, restore, suspend ── charge         workers go into cgroups of pods and slices
//!                            ├─ gpus ───────── nvml ── helper               NVML's queries
//!                            ├─ dump, restore, check ── native ── helper   processes that the driver itself checkpoints
//!                            └─ list, status, calls, check, protocol
//!   spans ── OTLP ──► ────── what dumps and restores took, to a collector
//!   metrics ── HTTP ─────── what all of these record, and the registry      a monitor asks for numbers
//! ```
//!
//! These modules share the `Daemon` (`state`), which imports none of them. `peer` checks the rights of a peer, and `message`
//! sends replies. No two files import each other (`scripts/cycles`).
//!
//! Everything that waits has a thread of its own, and no thread holds a lock while it waits: state is behind mutexes that are
//! held only to read or change it. Everything that a connection has begun ends with the connection.

mod attach;
mod charge;
mod check;
mod checkpoints;
mod clients;
mod connection;
mod connections;
mod content;
mod dump;
mod gpus;
mod grants;
mod groups;
mod host_memory;
mod imports;
mod ipc;
mod links;
mod list;
mod listener;
mod lost;
mod managed;
mod mappings;
mod memfd;
mod memory_pressure;
mod message;
mod metrics;
mod migrate;
mod moment;
mod moves;
mod native;
mod nvml;
mod orders;
mod oversubscribe;
mod party;
mod pauses;
mod peer;
mod pidns;
mod pool;
mod process;
mod protocol;
mod quiesce;
mod registered;
mod rehearsal;
mod restore;
mod sandbox;
mod service;
mod spans;
mod spawn;
mod stage;
mod stale_socket;
mod state;
mod state_dir;
mod suspend;
mod sync;
pub(crate) mod sys;
mod takeover;
mod together;
mod worker;
mod worker_records;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use thiserror::Error;
use tracing::info;

use self::listener::{ListenError, Listener};
use self::metrics::MetricsError;
use self::sandbox::{Sandbox, SandboxError};
use self::state::Daemon;
use self::sync::{at_once, lock, thread, wait, wait_timeout};
use crate::config::Config;

/// How long dumps and restores that go on may take to be given up when the daemon stops.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// How long the last spans may take to be exported.
const SPANS_GRACE: Duration = Duration::from_secs(1);

/// Why the daemon does not run.
#[derive(Debug, Error)]
pub(crate) enum ServeError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error("cannot start: {0}")]
    Start(#[from] io::Error),
}

impl ServeError {
    /// The exit code: 3 where another daemon is in the way, as in all of Rekindle's programs; otherwise 1.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Listen(ListenError::Taken { .. }) => 3,
            _ => 1,
        }
    }
}

/// Serves until SIGTERM or SIGINT. Workers that serve a client then go on without a daemon.
pub(crate) fn serve(config: Config) -> Result<(), ServeError> {
    sandbox::make_devices();
    // Both need a process with one thread.
    sys::private_files();
    let signals = sys::StopSignals::block()?;
    sys::raise_descriptor_limit()?;

    let sandbox = Sandbox::probe(&config.workers.sandbox)?;
    let listener = Listener::bind(&config, &sandbox)?;
    let for_metrics = metrics::Listeners::bind(&config.metrics).inspect_err(|_| listener.remove())?;
    let daemon = Arc::new(Daemon::start(config, sandbox)?);
    host_memory::prepare();
    suspend::serve_wishes(&daemon)?;
    oversubscribe::serve_wishes(&daemon)?;
    metrics::serve(&daemon, &for_metrics)?;
    for acceptor in listener.acceptors()? {
        let accepting = Arc::clone(&daemon);
        thread("listener", move || acceptor.accept_all(&accepting))?;
    }
    info!(
        socket = %daemon.config.socket.path.display(),
        cuda_driver = %daemon.config.workers.cuda_driver.display(),
        spare = daemon.config.workers.spares.usual,
        "rekindled {} serves",
        env!("CARGO_PKG_VERSION"),
    );

    native::recover(&daemon.native)?;
    service::begin(&daemon)?;

    let signal = signals.wait();
    service::stopping();
    info!("{signal}: stopping; workers in use go on without a daemon");
    daemon.stopping.store(true, Ordering::Release);
    listener.remove();
    for_metrics.remove();
    daemon.pool.close();
    daemon.connections.end_all(STOP_GRACE);
    daemon.spans.end(SPANS_GRACE);
    Ok(())
}
