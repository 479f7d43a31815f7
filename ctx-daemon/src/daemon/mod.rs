//! The daemon: who connects, what it asks for, and the workers that serve it.
//!
//! ```text
//!   listener ── connection ──┬─ attach ─────── pool ── spawn ── worker      a process gets a worker
//!   (socket)    (one thread  ├─ dump ───────── registry                     CRIU dumps a process tree
//!                each)       ├─ checkpoint ─── checkpoints                  who has CRIU dump one hears of it
//!                            ├─ restore ────── pool                         CRIU restores one
//!                            ├─ takeover ───── registry                     a worker whose daemon is gone
//!                            ├─ import ─────── workers                      memory that processes share
//!                            ├─ grant, revoke ── grants                    what containers may use
//!                            ├─ gpus ───────── nvml ── helper               what NVML is asked
//!                            └─ list, status, calls, check, protocol
//! ```
//!
//! Whoever must wait has a thread, and no lock is held while anybody waits: state is behind mutexes that are held for a
//! look or a change. What a connection began ends with it, by whatever way it ends.

mod attach;
mod check;
mod checkpoints;
mod clients;
mod connection;
mod connections;
mod dump;
mod gpus;
mod grants;
mod ipc;
mod links;
mod list;
mod listener;
mod lost;
mod mappings;
mod memfd;
mod nvml;
mod party;
mod pidns;
mod pool;
mod process;
mod protocol;
mod restore;
mod room;
mod sandbox;
mod spawn;
mod stage;
mod state_dir;
mod sys;
mod takeover;
mod worker;
mod worker_records;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use thiserror::Error;
use tracing::info;

use self::checkpoints::Checkpoints;
use self::clients::Registry;
use self::connections::Connections;
use self::grants::Grants;
use self::links::Links;
use self::listener::{ListenError, Listener};
use self::lost::LostWorkers;
use self::nvml::Nvml;
use self::pool::Pool;
use self::restore::Restores;
use self::room::Rooms;
use self::sandbox::{Sandbox, SandboxError};
use self::spawn::Spawner;
use self::stage::Stage;
use self::worker_records::WorkerRecords;
use crate::config::Config;

/// How long dumps and restores that go on may take to be given up when the daemon stops.
const STOP_GRACE: Duration = Duration::from_secs(10);

/// Everything that connections share.
pub(crate) struct Daemon {
    config: Config,
    pool: Arc<Pool>,
    registry: Arc<Registry>,
    lost: Arc<LostWorkers>,
    restores: Restores,
    checkpoints: Checkpoints,
    rooms: Arc<Rooms>,
    stage: Arc<Stage>,
    links: Arc<Links>,
    sandbox: Sandbox,
    grants: Arc<Grants>,
    records: Arc<WorkerRecords>,
    nvml: Nvml,
    connections: Arc<Connections>,
    imports: ipc::UnderWay,
    stopping: AtomicBool,
}

/// Why the daemon does not run.
#[derive(Debug, Error)]
pub(crate) enum ServeError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("cannot start: {0}")]
    Start(#[from] io::Error),
}

impl ServeError {
    /// 3 where another daemon is in the way, as of all of Rekindle's programs; otherwise 1.
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
    // Both before there is another thread.
    sys::private_files();
    let signals = sys::StopSignals::block()?;
    sys::raise_descriptor_limit()?;

    let sandbox = Sandbox::probe(&config.sandbox)?;
    let listener = Listener::bind(&config, &sandbox)?;
    let daemon = Arc::new(Daemon {
        pool: Pool::new(Spawner::new(&config, &sandbox), config.spare),
        registry: Arc::default(),
        lost: Arc::default(),
        restores: Restores::default(),
        checkpoints: Checkpoints::default(),
        rooms: Arc::default(),
        stage: Stage::start(config.checkpoint.staging)?,
        links: Links::new(&config.checkpoint),
        sandbox,
        grants: Arc::new(Grants::load(&config.state_dir, config.grants_required)),
        records: Arc::new(WorkerRecords::open(&config.state_dir)),
        nvml: Nvml::new(&config),
        connections: Arc::new(Connections::new(config.connections)),
        imports: ipc::UnderWay::default(),
        stopping: AtomicBool::new(false),
        config,
    });
    daemon.pool.keep_filled()?;
    for acceptor in listener.acceptors()? {
        let accepting = Arc::clone(&daemon);
        thread("listener", move || acceptor.accept_all(&accepting))?;
    }
    info!(
        socket = %daemon.config.socket.display(),
        cuda_driver = %daemon.config.cuda_driver.display(),
        spare = daemon.config.spare,
        "rekindled {} serves",
        env!("CARGO_PKG_VERSION"),
    );

    let signal = signals.wait();
    info!("{signal}: stopping; workers in use go on without a daemon");
    daemon.stopping.store(true, Ordering::Release);
    listener.remove();
    daemon.pool.close();
    daemon.connections.end_all(STOP_GRACE);
    Ok(())
}

impl Daemon {
    /// Has a client's worker count what it has with what others of its container have.
    fn share(&self, client: &clients::Client) -> Result<(), grants::ShareError> {
        let devices = match client.allowed.container {
            Some(_) => self.pool.devices().map_err(|error| io::Error::other(error.to_string()))?,
            None => return Ok(()),
        };
        self.grants.share(&client.allowed, &client.worker, &devices, self.config.quiesce_timeout)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}

/// A thread with a name. There may be a thousand, so their stacks are small.
fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).stack_size(512 << 10).spawn(body)
}

/// Does something with all of these at once, each in a thread of its own, and waits for all of it. The results are in their
/// order.
fn at_once<T: Sync, R: Send>(all: &[T], action: impl Fn(&T) -> R + Sync) -> Vec<R> {
    match all {
        [one] => vec![action(one)],
        all => std::thread::scope(|scope| {
            let action = &action;
            let begun: Vec<_> = all.iter().map(|it| scope.spawn(move || action(it))).collect();
            begun.into_iter().map(|it| it.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        }),
    }
}

/// Locks. A thread that panicked left data that is whole: nothing is changed half-way under a lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a change; the lock is free meanwhile.
fn wait<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// As [`wait`], for a time.
fn wait_timeout<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>, time: Duration) -> MutexGuard<'a, T> {
    changed.wait_timeout(guard, time).unwrap_or_else(PoisonError::into_inner).0
}
